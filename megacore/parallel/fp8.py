"""Linear layers of --fp8: another `Products` object, which `parallelize()` gives to the plain layers of a block. The
output and the gradient of the input are products of fp8 numbers (ops/fp8.py); the gradient of the weight is a product
of 16-bit numbers, added in fp32, as without --fp8. A weight is quantised once a step, not in each microbatch: what is
kept of it between them ends with the step, so that none is ever of an earlier one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megacore.errors import ConfigError
from megacore.ops.fp8 import RECIPES, Quantised, Recipe, product, quantise
from megacore.parallel.products import TORCH, Products, TorchProducts
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear

OUTPUT, INPUT_GRADIENT = range(2)
_ALIGNED = 16  # numbers, which tensor cores read at once
_SAMPLE = 64  # rows that are multiplied in 16 bits too, where the error is measured


class Fp8Products(TorchProducts):
    """The products of linear layers that share an input. `name`: of the layers, blocks.3.mlp.gate+up."""

    def __init__(self, name: str, recipe: Recipe) -> None:
        self.name, self.recipe = name, recipe
        self.weights: list[Tensor] = []  # of the layers
        # `measures`: whether errors are added to `squares`.
        # `in_sixteen_bits`: whether the layers left fp8.
        self.in_sixteen_bits, self.measures = False, False
        # What has been quantised of the weights, which do not change before it is dropped, by their place in memory;
        # None: nothing is kept.
        self.kept: dict[tuple[Any, ...], Quantised] | None = None
        # Of the error and of the 16-bit product, fp64 [output and input gradient, 3], and how many operands of these
        # samples are not finite; None: nothing was measured yet.
        self.squares: Tensor | None = None

    linear = Products.linear
    write_output = Products.write_output
    write_input_gradient = Products.write_input_gradient
    add_input_gradient = Products.add_input_gradient

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.in_sixteen_bits:
            return TORCH.output(x, weight, bias)
        y = self._product(OUTPUT, x, weight)
        return y if bias is None else y.add_(bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        if self.in_sixteen_bits:
            return TORCH.input_gradient(grad, weight)
        return self._product(INPUT_GRADIENT, grad, weight.t())

    def _product(self, kind: int, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T: [..., k] and [o, k] -> [..., o]"""
        recipe, rows = self.recipe, x.flatten(0, -2)
        form = torch.float8_e4m3fn if kind == OUTPUT else recipe.gradients
        y = product(quantise(rows, form, recipe.rows), self._quantised(weight), recipe, x.dtype)
        if self.measures:
            self._measure(kind, y, rows, weight)
        return y.view(*x.shape[:-1], -1)

    def _quantised(self, weight: Tensor) -> Quantised:
        memory = weight.untyped_storage()._cdata
        # A copy may lie where another one lay: only the memory of the parameters themselves stays theirs.
        if self.kept is None or memory not in [own.untyped_storage()._cdata for own in self.weights]:
            return quantise(weight, torch.float8_e4m3fn, self.recipe.weights)
        place = memory, weight.storage_offset(), weight.shape, weight.stride()
        if place not in self.kept:
            self.kept[place] = quantise(weight, torch.float8_e4m3fn, self.recipe.weights)
        return self.kept[place]

    @torch.no_grad()
    def _measure(self, kind: int, y: Tensor, rows: Tensor, weight: Tensor) -> None:
        if self.squares is None:
            self.squares = torch.zeros(2, 3, dtype=torch.float64, device=rows.device)
        every = -(-len(rows) // _SAMPLE)
        sample = rows[::every]
        expected = (sample @ weight.t()).double()
        error = y[::every].double() - expected
        of_sample = error.square().sum(), expected.square().sum(), (~sample.isfinite()).sum().double()
        self.squares[kind] += torch.stack(of_sample)


def exchange(layer: nn.Module, name: str, recipe: str) -> None:
    """Let the linear layers inside a block multiply in fp8; experts, routers and small replicated layers stay. `layer`:
    the block, as it was built. `name`: its global name. `recipe`: the value of --fp8. Raises ConfigError where a layer
    of a program's own has features that no tile divides."""
    unit, unfit = RECIPES[recipe].weights[1] or _ALIGNED, list[str]()
    for path, parent in layer.named_modules():
        if isinstance(parent, ColumnParallelLinear | RowParallelLinear):
            continue  # its adapter is as narrow as its rank
        children = dict(parent.named_children())
        columns = [each for each, child in children.items() if isinstance(child, ColumnParallelLinear)]
        rows = [[each] for each, child in children.items() if isinstance(child, RowParallelLinear)]
        # Layers that share an input are computed by the products of one of them, on a device as one product.
        for together in (columns, *rows):
            place = ".".join(filter(None, (name, path)))
            products = Fp8Products(f"{place}.{'+'.join(together)}", RECIPES[recipe])
            for each in together:
                module: Any = children[each]
                module.products = products
                products.weights.append(module.weight)
                if any(size % unit for size in module.weight.shape):
                    unfit.append(f"{place}.{each} has {' x '.join(map(str, module.weight.shape))}")
    if unfit:
        raise ConfigError(
            [
                f"--fp8 {recipe} needs multiples of {unit} features on each rank, and {one} on this one: leave --fp8 "
                f"out, or use --fp8 skip={name.rpartition('.')[2]} for this block"
                for one in unfit
            ]
        )


def fp8_products(module: nn.Module) -> list[Fp8Products]:
    """Those of the layers inside a module, each once."""
    found = (getattr(each, "products", None) for each in module.modules())
    return list(dict.fromkeys(products for products in found if isinstance(products, Fp8Products)))
