"""The matrix products of linear layers: the one seam through which all of them pass.

A linear layer computes three products: its output x W^T, the gradient of its input dY W, and the gradient of its weight
dY^T X. Every layer asks the `Products` object of its `BuildContext` for them, so that another way to multiply (FP8, for
example) is a subclass in a separate file. `TorchProducts` is the default.

Where a parameter has an `accumulator`, the product of its gradient adds to that sum in fp32, and autograd gets no
gradient: 16-bit gradients are neither written, nor read again, nor rounded. Likewise `looked_up` adds the rows of a
token table that were read.

Shape legend: b microbatch, s sequence, i input features, o output features, n rows (b x s).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from megacore.ops.dispatch import Node
from megacore.parallel.sharding import GradientAccumulator, ShardedParameter

Parameters = Sequence[Tensor | None]  # weight, bias, weight, bias, ...; a bias may be None


class Products:
    """How linear layers multiply; a subclass overrides one product or all three. Layers call `linear` where autograd
    may do the bookkeeping, and the three where they communicate between them. `linear` calls the same three, each in a
    separate node, so that a schedule that splits backward computes none twice."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b: [..., i] -> [..., o]; autograd does not see it."""
        return F.linear(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """dY W: [..., o] -> [..., i]"""
        return grad @ weight

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """dY^T X: [n, o] and [n, i] -> [o, i]"""
        return grad.t() @ x

    def write_output(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """y = x W^T + b: [n, i] -> [n, o]"""
        y.copy_(self.output(x, weight, bias))

    def write_input_gradient(self, dx: Tensor, grad: Tensor, weight: Tensor) -> None:
        """dX = dY W: [n, o] -> [n, i]"""
        dx.copy_(self.input_gradient(grad, weight))

    def add_input_gradient(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        """total += dY W: [..., o] -> [..., i]; in total's dtype, which is that of the operands or fp32"""
        total += self.input_gradient(grad.to(total.dtype), weight.to(total.dtype))

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, *, has_terms: bool) -> None:
        """total += dY^T X in fp32, [n, o] and [n, i] -> [o, i]; without `has_terms` total = dY^T X"""
        term = self.weight_gradient(grad, x)
        total.add_(term) if has_terms else total.copy_(term)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b for autograd: [..., i] -> [..., o]"""
        gradient: Tensor | None = None
        if torch.is_grad_enabled() and weight.requires_grad:  # saves x before anything is computed
            gradient = _WeightGradient.apply(self, x.detach(), (*x.shape[:-1], weight.shape[-2]), weight, bias)
        y: Tensor = _Output.apply(self, x, weight.detach(), None if bias is None else bias.detach())
        if gradient is None:
            return y
        return with_gradient(y, gradient)


class TorchProducts(Products):
    """PyTorch's operators, and its own backward where no communication stands between the products."""

    def write_output(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        torch.mm(x, weight.t(), out=y) if bias is None else torch.addmm(bias, x, weight.t(), out=y)

    def write_input_gradient(self, dx: Tensor, grad: Tensor, weight: Tensor) -> None:
        torch.mm(grad, weight, out=dx)

    def add_input_gradient(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        rows, factor = total.view(-1, total.shape[-1]), grad.flatten(0, -2)
        if total.dtype != weight.dtype and adds_in_fp32(total.device, weight.dtype):
            torch.addmm(rows, factor, weight, out_dtype=total.dtype, out=rows)
        elif total.dtype == weight.dtype and total.device.type != "cpu":
            rows.addmm_(factor, weight)
        else:  # on a CPU the numbers are those of a product and a sum
            super().add_input_gradient(total, grad, weight)

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, *, has_terms: bool) -> None:
        if total.dtype != x.dtype:
            torch.addmm(total, grad.t(), x, beta=int(has_terms), out_dtype=total.dtype, out=total)
        elif has_terms:
            torch.addmm(total, grad.t(), x, out=total)
        else:
            torch.mm(grad.t(), x, out=total)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias) if accumulator_of(weight) is None else super().linear(x, weight, bias)


TORCH = TorchProducts()


def adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device adds products of matrices of a 16-bit dtype to a sum in fp32."""
    # Fake tensors have the operators of the meta device; on that itself, torch does not log that it has none.
    asked = device if type(torch.empty(0)) is Tensor else torch.device("meta")
    return dtype in (torch.bfloat16, torch.float16) and _has_addmm_to_fp32(asked, dtype)


@cache
def _has_addmm_to_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    with unset_fake_temporarily():
        total, one = torch.zeros(1, 1, device=device), torch.ones(1, 1, dtype=dtype, device=device)
        try:
            torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
        except (RuntimeError, TypeError):  # the device has no such operator, or this torch has none
            return False
        return True


def accumulator_of(weight: Tensor | None) -> GradientAccumulator | None:
    """Where the gradient of a weight is added; None: it is given to autograd, as always in compiled code."""
    if not isinstance(weight, ShardedParameter) or weight.accumulator is None or torch.compiler.is_dynamo_compiling():
        return None
    return weight.accumulator


def looked_up(tokens: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table, [...] int64 -> [..., h]. Where the table's gradients have a sum, backward adds to it the rows
    that were read, and no gradient of the whole table exists."""
    if not weight.requires_grad or accumulator_of(weight) is None:
        return F.embedding(tokens, weight)
    rows: Tensor = _Rows.apply(tokens, weight)
    return rows


def gradients_of_rows(tokens: Tensor, grad: Tensor, table: int) -> tuple[Tensor, Tensor]:
    """The gradients of rows that were read, each row's bitwise as in the table's dense gradient: those of one row are
    added up in the order of the tokens. No size depends on how many different tokens there are, so that the host does
    not wait for the device.

    `tokens`: [...], the rows. `grad`: [..., h]. `table`: how many rows there are. Returns rows [n], and what is to be
    added to each, [n, h].
    """
    tokens, grad = tokens.flatten(), grad.reshape(-1, grad.shape[-1])
    in_order, order = tokens.sort(stable=True)
    place = F.pad(in_order[1:] != in_order[:-1], (1, 0)).cumsum(0)  # of each token's row among the different ones
    places = torch.empty_like(place).scatter_(0, order, place)
    terms = torch.ops.aten.embedding_dense_backward(grad, places, len(tokens), -1, False)
    # Places that no token has hold zeros: they are added to any rows, each to another one.
    rows = torch.arange(len(tokens), device=tokens.device) % table
    return rows.scatter_(0, place, in_order), terms


# ---- nodes of autograd
# A node written in Python saves its tensors after its forward, and recomputation ends with the last tensor that is
# saved. For it to end before the product, another node saves the input first, and the product's node holds the weight
# as an attribute: ZeRO-3 gathers it again in the same memory.


class _Rows(Node):
    """The rows of a table with a sum; backward adds to that."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.sum, ctx.table = accumulator_of(weight), len(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        (tokens,) = ctx.saved_tensors
        ctx.sum.add_rows(*gradients_of_rows(tokens, grad, ctx.table))
        return None, None


class _Output(Node):
    """The output; backward computes only the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, products: Products, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.products, ctx.weight = products, weight
        return products.output(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.products.input_gradient(grad, ctx.weight) if ctx.needs_input_grad[1] else None, None, None


class _WeightGradient(Node):
    """Forward gives zeros of the output's shape, one number in memory; backward the gradients of weight and bias.
    Autograd asks a node for all gradients that it can give: a schedule that wants those of weights later needs them in
    a separate node."""

    @staticmethod
    def forward(
        ctx: Any, products: Products, x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layers = LinearLayers(products, (weight, bias))
        return x.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return None, None, None, *ctx.layers.parameter_gradients(x, [grad])


class _Joined(Node):
    """The output as it is; backward hands its gradient to both nodes."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gradient: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def with_gradient(y: Tensor, gradient: Tensor) -> Tensor:
    """y, whose gradient backward hands to the node of `gradient` too; that is zeros of y's shape."""
    joined: Tensor = _Joined.apply(y, gradient)
    return joined


class _SavedInput(Node):
    """The input as it is, saved for the backward of the node that reads it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def input_saved(x: Tensor) -> Tensor:
    """x for a node that calls `save_operands`, which then computes nothing before everything is saved."""
    saved: Tensor = _SavedInput.apply(x)
    return saved


def save_operands(ctx: Any, layers: LinearLayers, x: Tensor, *weights: Tensor | None) -> None:
    """Keep a node's linear layers, their input and weights for its backward."""
    ctx.layers, ctx.saved_input = layers, x.grad_fn if layers.input_is_saved else None
    if ctx.saved_input is None:
        ctx.save_for_backward(x, *weights)
    else:
        ctx.weights = weights


def saved_operands(ctx: Any) -> Sequence[Any]:
    """Input and weights as `save_operands` kept them."""
    return ctx.saved_tensors if ctx.saved_input is None else (*ctx.saved_input.saved_tensors, *ctx.weights)


def linears(products: Products, x: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
    """x W^T + b of each weight and bias, [b, s, i] -> [b, s, o], for autograd."""
    return tuple(products.linear(x, weight, bias) for weight, bias in _pairs(parameters))


class LinearLayers:
    """Linear layers that share an input x, and their products outside autograd. `whole`: the weights as one matrix (see
    `joined`); there are no biases, and the layers are computed as one whose output holds theirs side by side. None:
    they are computed one by one. `input_is_saved`: x comes from `input_saved`."""

    def __init__(
        self, products: Products, parameters: Parameters, *, whole: Tensor | None = None, input_is_saved: bool = False
    ) -> None:
        self.products, self.whole, self.input_is_saved = products, whole, input_is_saved
        # Where the gradient of each weight is added; None for those that autograd gets.
        self.accumulators = list(map(accumulator_of, parameters[::2]))
        self.parameters = parameters
        # Whether none of them learns: there is no gradient of any.
        self.frozen = True
        for one in parameters:  # a generator would be two more calls in every layer
            if one is not None and one.requires_grad:
                self.frozen = False

    def pairs(self, parameters: Parameters) -> Sequence[tuple[Tensor, Tensor | None]]:
        return _pairs(parameters) if self.whole is None else [(self.whole, None)]

    def matrices(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return weights if self.whole is None else [self.whole]

    def outputs(self, x: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
        """x W^T + b of each product, [b, s, i] -> [b, s, o]"""
        if self.whole is not None:
            return (self.products.output(x, self.whole, None),)
        return tuple([self.products.output(x, weight, bias) for weight, bias in _pairs(parameters)])

    def input_gradient(self, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """The gradient of the input, [b, s, i], from those of the outputs."""
        if self.whole is not None:
            return self.products.input_gradient(grads[0], self.whole)
        total = self.products.input_gradient(grads[0], weights[0])
        for number in range(1, len(grads)):
            self.products.add_input_gradient(total, grads[number], weights[number])
        return total

    def write_input_gradient(self, dx: Tensor, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """The same of a part of the rows, [n, i]; `weights` as `matrices` gives them."""
        self.products.write_input_gradient(dx, grads[0], weights[0])
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            self.products.add_input_gradient(dx, grad, weight)

    def parameter_gradients(self, x: Tensor, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Those of weight, bias, weight, bias, ...; None for weights with a sum, to which theirs are added."""
        inputs = x.flatten(0, -2)
        if self.frozen:
            return [None] * len(self.parameters)
        if self.whole is not None:
            return self._joined_gradients(inputs, grads[0].flatten(0, -2))
        gradients: list[Tensor | None] = []
        for number, bias in enumerate(self.parameters[1::2]):
            grad = grads[number].flatten(0, -2)
            gradients += [self._weight_gradient(number, grad, inputs), None if bias is None else grad.sum(0)]
        return gradients

    def weight_gradient(self, x: Tensor, grad: Tensor) -> Tensor | None:
        if self.frozen:
            return None
        return self._weight_gradient(0, grad.flatten(0, -2), x.flatten(0, -2))

    def _weight_gradient(self, number: int, grad: Tensor, inputs: Tensor) -> Tensor | None:
        total = self.accumulators[number]
        if total is None:
            return self.products.weight_gradient(grad, inputs)
        buffer, has_terms = total.buffer()
        self.products.add_weight_gradient(buffer, grad, inputs, has_terms=has_terms)
        total.added()
        return None

    def _joined_gradients(self, inputs: Tensor, grad: Tensor) -> list[Tensor | None]:
        sums = [total for total in self.accumulators if total is not None]
        if len(sums) == len(self.accumulators):
            buffers, have_terms = zip(*[total.buffer() for total in sums], strict=True)
            if (whole := joined(buffers)) is not None and len(set(have_terms)) == 1:
                self.products.add_weight_gradient(whole, grad, inputs, has_terms=have_terms[0])
            else:
                for buffer, has_terms, part in zip(buffers, have_terms, grad.split(self._rows(), 1), strict=True):
                    self.products.add_weight_gradient(buffer, part, inputs, has_terms=has_terms)
            for total in sums:
                total.added()
            return [None, None] * len(sums)
        whole = self.products.weight_gradient(grad, inputs)
        return [gradient for part in whole.split(self._rows()) for gradient in (part, None)]

    def _rows(self) -> list[int]:
        return [weight.shape[0] for weight, _ in _pairs(self.parameters)]


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """One matrix with the rows of several that lie one after the other in memory, without a copy; None: they do not."""
    first, columns = tensors[0], tensors[0].shape[1:]
    memory, rows, start = first.untyped_storage()._cdata, first.shape[0], first.storage_offset()
    if not first.is_contiguous():
        return None
    end = start + first.numel()
    for tensor in tensors[1:]:
        apart = tensor.storage_offset() != end or tensor.untyped_storage()._cdata != memory
        if apart or not tensor.is_contiguous() or tensor.shape[1:] != columns:
            return None
        rows, end = rows + tensor.shape[0], end + tensor.numel()
    return first.detach().as_strided((rows, *columns), first.stride(), start)


def _pairs(parameters: Parameters) -> list[tuple[Tensor, Tensor | None]]:
    pairs: Any = zip(parameters[::2], parameters[1::2], strict=True)
    return list(pairs)
