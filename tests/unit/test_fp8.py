"""--fp8: what is quantised, against exact fractions; products, against fp64; layers, and what leaves fp8."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megacore.config import PrecisionConfig
from megacore.errors import ConfigError
from megacore.ops import fp8, kernels_chosen
from megacore.ops.fp8 import RECIPES, quantise
from megacore.ops.grouped import RowGroups, grouped_implementation
from megacore.optim.update import LossScaler
from megacore.parallel import experts
from megacore.parallel.experts import GroupedProducts
from megacore.parallel.fp8 import Fp8Products, exchange
from megacore.parallel.products import TORCH, Products
from megacore.parallel.random import Dropout, RandomStreams
from megacore.parallel.sharding import ShardedParameter, ShardSpec
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: (4, 3, 7, 448), E5M2: (5, 2, 15, 57344)}  # bits of exponent and of fraction, bias, largest


@cache
def numbers_of(form: torch.dtype) -> list[float]:
    """The non-negative finite numbers of a format in order; by its definition."""
    exponents, fractions, bias, largest = FORMATS[form]
    found = (
        2.0 ** (max(exponent, 1) - bias - fractions) * (fraction + ((1 << fractions) if exponent else 0))
        for exponent, fraction in itertools.product(range(1 << exponents), range(1 << fractions))
    )
    return sorted(number for number in found if number <= largest)


def rounded(x: float, scale: float, form: torch.dtype) -> float:
    """x / scale to the nearest number, ties to an even place, and beyond the largest to that. Python's floats hold all
    of it exactly."""
    if not math.isfinite(x):
        return math.nan
    numbers, size = numbers_of(form), abs(x) / scale
    above = min(bisect.bisect_left(numbers, size), len(numbers) - 1)
    near = (above, max(above - 1, 0))
    best = min(near, key=lambda place: (abs(numbers[place] - size), place % 2))
    return math.copysign(numbers[best], x)


def scale_of(tile: list[float], form: torch.dtype) -> float:
    """The smallest power of two that brings the largest finite number of a tile into the format's range."""
    size, scale = max((abs(x) for x in tile if math.isfinite(x)), default=0.0), 2.0**-100
    while scale * FORMATS[form][3] < size:
        scale *= 2
    return scale


@pytest.mark.parametrize("form", FORMATS)
def test_every_bf16_number_is_quantised_as_fractions_are(form: torch.dtype) -> None:
    """All 65,536, in tiles of neighbours, which share an exponent, and of numbers that lie far apart."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for x in (every.view(512, 128), every.view(128, 512).t().contiguous()):
        found = quantise(x, form, (1, 128))
        for tile, values, scale in zip(x.tolist(), found.values.float().tolist(), found.scales.tolist(), strict=True):
            expected = scale_of(tile, form)
            assert scale[0] == expected
            assert repr(values) == repr([rounded(one, expected, form) for one in tile])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """bf16 numbers whose rows and columns have other sizes, so that a scale at the wrong place shows."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape[-1], generator=random).exp() * torch.randn(shape[0], 1, generator=random).exp()
    return (torch.randn(shape, generator=random) * sizes).bfloat16()


def by_hand(x: Tensor, form: torch.dtype, tile: tuple[int, int]) -> Tensor:
    """The fp64 matrix that the product of a quantised one sees, tile by tile."""
    result = torch.empty(x.shape, dtype=torch.float64)
    for i, j in itertools.product(range(0, x.shape[0], tile[0]), range(0, x.shape[1], tile[1])):
        part = x[i : i + tile[0], j : j + tile[1]]
        flat = part.flatten().tolist()
        scale = scale_of(flat, form)
        flat = [rounded(one, scale, form) * scale for one in flat]
        result[i : i + tile[0], j : j + tile[1]] = torch.tensor(flat, dtype=torch.float64).view(part.shape)
    return result


TILES: dict[str, Callable[[Tensor], tuple[tuple[int, int], tuple[int, int]]]] = {
    "blockwise": lambda x: ((1, 128), (128, 128)),
    "tensorwise": lambda x: (tuple(x.shape), tuple(x.shape)),  # type: ignore[dict-item,return-value]
    "rowwise": lambda x: ((1, x.shape[1]), (1, x.shape[1])),
}
GRADIENTS = {"blockwise": E4M3, "tensorwise": E5M2, "rowwise": E4M3}


@cache
def usual() -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight and a gradient of the output."""
    return numbers(6, 256), numbers(128, 256, seed=1), numbers(6, 128, seed=2)


@cache
def expected_products(name: str, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Output and input gradient in fp64, from operands that are quantised by hand along what is summed."""
    transposed = weight.t()
    of = {id(one): TILES[name](one) for one in (x, weight, grad, transposed)}
    y = by_hand(x, E4M3, of[id(x)][0]) @ by_hand(weight, E4M3, of[id(weight)][1]).t()
    dx = by_hand(grad, GRADIENTS[name], of[id(grad)][0]) @ by_hand(transposed, E4M3, of[id(transposed)][1]).t()
    return y, dx


def are_the_products(name: str, form: torch.dtype = torch.float32, bound: float = 2e-7) -> None:
    x, weight, grad = usual()
    products = Fp8Products("", RECIPES[name])
    y, dx = expected_products(name, x, weight, grad)
    found = [
        products.output(x.to(form), weight.to(form), None),
        products.input_gradient(grad.to(form), weight.to(form)),
    ]
    for one, other in zip(found, (y, dx), strict=True):
        assert (one.double() - other).norm() <= bound * other.norm()


@pytest.mark.parametrize("name", RECIPES)
def test_products_are_those_of_the_quantised_numbers(name: str) -> None:
    are_the_products(name)


@pytest.mark.parametrize("name", RECIPES)
def test_a_device_without_fp8_multiplies_the_same_numbers_and_says_so(name: str) -> None:
    """Their products with scales are exact in bf16. Here the CPU stands for an accelerator."""
    fp8._runs_natively.cache_clear()

    def fails(*_: Any) -> Tensor:
        raise RuntimeError("no such product")

    with (
        kernels_chosen("triton"),
        mock.patch.dict(fp8._NATIVE, {name: fails}),
        pytest.warns(UserWarning, match=f"--fp8 {name}: cpu .*no such product"),
    ):
        are_the_products(name, torch.bfloat16, 2**-8)
    fp8._runs_natively.cache_clear()


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_the_native_product_is_that_of_the_quantised_numbers(name: str) -> None:
    """torch's product of scaled matrices, which a CPU has for these two."""
    fp8._runs_natively.cache_clear()
    with kernels_chosen("triton"), mock.patch.object(fp8, "_in_bf16", wraps=fp8._in_bf16) as other:
        are_the_products(name, torch.bfloat16, 2**-8)
    assert other.call_count == len({E4M3, GRADIENTS[name]}), "the trial of each format of the first operand alone"
    fp8._runs_natively.cache_clear()


@pytest.mark.parametrize("bits", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_not_finite_stays_visible_and_spoils_nothing_else(name: str, bits: float) -> None:
    x, weight = numbers(4, 128), numbers(128, 128, seed=1)
    products = Fp8Products("", RECIPES[name])
    expected = products.output(x, weight, None)
    x[2, 5] = 0.0
    with_zero = products.output(x, weight, None)
    x[2, 5] = bits
    found = products.output(x, weight, None)
    assert found[2].isnan().all()
    others = [0, 1, 3]
    assert torch.equal(found[others], with_zero[others]) and expected.isfinite().all()


# ---- layers


def test_gradients_of_weights_are_those_without_fp8() -> None:
    """And no weight is remembered: after an update the products are those of the new one."""
    x, weight, grad = (one.clone() for one in usual())
    x.requires_grad_()
    weight.requires_grad_()
    products = Fp8Products("", RECIPES["blockwise"])
    for _ in range(2):
        y = products.linear(x, weight)
        y.backward(grad)
        assert x.grad is not None and weight.grad is not None
        assert torch.equal(weight.grad, TORCH.weight_gradient(grad, x.detach()))
        expected = expected_products("blockwise", x.detach().clone(), weight.detach().clone(), grad)
        assert (y.double() - expected[0]).norm() <= 2**-8 * expected[0].norm()
        assert (x.grad.double() - expected[1]).norm() <= 2**-8 * expected[1].norm()
        x.grad = weight.grad = None
        with torch.no_grad():
            weight.copy_(numbers(128, 256, seed=3))


def test_columns_of_a_rank_are_those_of_the_whole_layer() -> None:
    """To the bit, forward, on two and four ranks; and rows of part of the tokens."""
    x, weight = numbers(12, 256), numbers(512, 256, seed=1)
    products = Fp8Products("", RECIPES["blockwise"])
    whole = products.output(x, weight, None)
    for ranks in (2, 4):
        parts = [products.output(x, part, None) for part in weight.chunk(ranks)]
        assert torch.equal(torch.cat(parts, -1), whole)
    assert torch.equal(torch.cat([products.output(part, weight, None) for part in x.chunk(3)]), whole)


def test_the_measured_error_is_the_error() -> None:
    x, weight, grad = numbers(6, 256), numbers(128, 256, seed=1), numbers(6, 128, seed=2)
    products = Fp8Products("", RECIPES["blockwise"])
    products.measures = True
    y, dx = products.output(x, weight, None), products.input_gradient(grad, weight)
    assert products.squares is not None
    for found, one, other in zip(products.squares, (y, dx), (x @ weight.t(), grad @ weight), strict=True):
        expected = float((one.float() - other.float()).square().sum() / other.float().square().sum())
        assert float(found[0] / found[1]) == pytest.approx(expected, rel=1e-5) and float(found[2]) == 0
    products.in_sixteen_bits = True
    assert torch.equal(products.output(x, weight, None), x @ weight.t())
    assert torch.equal(products.input_gradient(grad, weight), grad @ weight)


def test_copies_of_a_weight_are_not_kept() -> None:
    """Another copy may lie in their memory later: one that is kept is the parameter itself, or a part of it."""
    x, weight, grad = usual()
    products = Fp8Products("", RECIPES["blockwise"])
    products.weights, products.kept = [weight], {}
    for _ in range(2):
        y, dx = products.output(x, weight, None), products.input_gradient(grad, weight)
        part = products.output(x[:, :128], weight[:, :128], None)
        assert torch.equal(products.output(x, weight.clone(), None), y)
    assert len(products.kept) == 3
    products.kept = None
    assert torch.equal(products.output(x, weight, None), y) and torch.equal(products.input_gradient(grad, weight), dx)
    assert torch.equal(products.output(x[:, :128], weight[:, :128], None), part)


def test_layers_that_no_tile_divides_are_named() -> None:
    layer = nn.ModuleDict(
        {"gate": ColumnParallelLinear(32, 24), "up": ColumnParallelLinear(32, 48), "down": RowParallelLinear(24, 32)}
    )
    with pytest.raises(ConfigError) as refused:
        exchange(layer, "blocks.3", "rowwise")
    ways = "on this one: leave --fp8 out, or use --fp8 skip=3 for this block"
    expected = [("gate", "24 x 32"), ("down", "32 x 24")]
    needs = "--fp8 rowwise needs multiples of 16 features on each rank, and"
    assert [*refused.value.problems] == [f"{needs} blocks.3.{name} has {size} {ways}" for name, size in expected]


# ---- the loss scale --------------------------------------------------------------------------------------------------


def scaler(**changes: object) -> LossScaler:
    values = {"precision": "fp16", "initial_loss_scale": 16.0, "loss_scale_window": 3, "hysteresis": 2} | changes
    return LossScaler(PrecisionConfig(**values).resolve(1))  # type: ignore[arg-type]


# Settings; good (+) and overflowing (-) steps; and the scale after each.
SCALES: dict[str, tuple[dict[str, Any], str, list[float]]] = {
    "it doubles after a window of good steps": ({}, "+++++++", [16, 16, 32, 32, 32, 64, 64]),
    "it halves after as many overflows as hysteresis allows": ({}, "----", [16, 8, 4, 2]),
    "growth restores the allowance": ({}, "-+++--", [16, 16, 16, 32, 32, 16]),
    "no overflow lowers the least": ({"hysteresis": 1, "min_loss_scale": 8.0}, "--", [8, 8]),
    "growth ends within fp32": ({"initial_loss_scale": 2.0**126, "loss_scale_window": 1}, "+++", [2.0**127] * 3),
    "an overflow begins the window anew": ({"hysteresis": 1}, "++-+++", [16, 16, 8, 8, 8, 16]),
    "a fixed scale stays": ({"loss_scale": 128.0}, "-++++++++++", [128] * 11),
    "and that of bf16": ({"precision": "bf16"}, "-++++++++++", [1] * 11),
}


@pytest.mark.parametrize("case", SCALES)
def test_the_scale_step_by_step(case: str) -> None:
    changes, steps, expected = SCALES[case]
    one, found = scaler(**changes), []
    for number, step in enumerate(steps):
        if step == "+":
            one.good_step()
        else:
            could_be_lowered = one.overflow()
            assert could_be_lowered == (number == 0) or not case.startswith("no overflow")
        found.append(one.scale)
    assert found == expected


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_and_backward_are_the_plain_product_bit_for_bit(dtype: torch.dtype) -> None:
    streams = RandomStreams(7, torch.device("cpu"))
    dropout = Dropout(0.3, streams, "blocks.0.mlp_dropout")
    x = torch.randn(5, 33, 17).to(dtype).requires_grad_()
    gradient = torch.randn(5, 33, 17).to(dtype)
    mask = torch.empty(x.shape).bernoulli_(0.7, generator=streams.generator("blocks.0.mlp_dropout", 0))
    factor = mask.div_(0.7)  # fp32, whatever x is

    output = dropout(x)
    output.backward(gradient)
    assert output.dtype == dtype
    assert torch.equal(output, (x.detach().float() * factor).to(dtype))
    assert not torch.equal(output, Dropout(0.3, streams, "blocks.0.mlp_dropout", shard=1)(x))  # of another rank's part
    assert x.grad is not None
    assert torch.equal(x.grad, (gradient.float() * factor).to(dtype))
    assert float((factor == 0).float().mean()) == pytest.approx(0.3, abs=0.05)


def test_the_mean_of_bf16_activations_stays() -> None:
    """Over n = 2^24 elements the mean strays by sqrt(p / (1 - p) / n) = 8e-5 of itself; five times that is allowed, and
    4e-4 more, as the products of only 128 different mantissas are rounded: four times 2^-9 / sqrt(3 x 128). A factor of
    1 / 0.9 in bf16, 1.109, makes the mean 1.6e-3 too small."""
    streams, p = RandomStreams(7, torch.device("cpu")), 0.1
    dropout = Dropout(p, streams, "blocks.0.mlp_dropout")
    x = (1.0 + torch.rand(2**20, generator=torch.Generator().manual_seed(5))).bfloat16()
    mean = 0.0
    for microbatch in range(16):
        streams.microbatch = microbatch
        mean += float(dropout(x).double().mean() / x.double().mean()) / 16
    assert mean == pytest.approx(1.0, abs=5 * math.sqrt(p / (1 - p) / 2**24) + 4e-4)


def test_one_byte_an_element_is_kept() -> None:
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    dropout = Dropout(0.1, RandomStreams(7, torch.device("cpu")), "blocks.0.mlp_dropout")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dropout(torch.randn(8, 16, requires_grad=True))
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) == 8 * 16


# ---- products of many experts ----------------------------------------------------------------------------------------

COUNTS = [(3, 0, 5, 1), (0, 0, 0), (0, 7), (4,)]


class Sum:
    """Where gradients are added, as ZeRO's buckets do."""

    def __init__(self, total: Tensor) -> None:
        self.total, self.terms = total, 0

    def buffer(self) -> tuple[Tensor, bool]:
        return self.total, self.terms > 0

    def added(self) -> None:
        self.terms += 1


def results(counts: tuple[int, ...], dtype: torch.dtype, *, sums: bool) -> list[Tensor]:
    """Output and gradients of a layer; with `sums` the weight's after two passes, in fp32."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), 16, generator=generator).to(dtype).requires_grad_()
    shape = (len(counts), 24, 16)
    weight = ShardedParameter(torch.randn(shape, generator=generator).to(dtype), ShardSpec(shape=shape))
    total = Sum(torch.full(shape, torch.nan))
    weight.accumulator = total if sums else None  # type: ignore[assignment]  # no look-up adds rows here
    grad = torch.randn(sum(counts), 24, generator=generator).to(dtype)
    for _ in range(2 if sums else 1):
        y = GroupedProducts(TORCH, RowGroups(counts)).linear(x, weight)
        y.backward(grad)
    assert x.grad is not None
    of_weight = total.total if sums else weight.grad
    assert of_weight is not None
    return [y.detach(), x.grad, of_weight]


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped_mm")
def test_torchs_grouped_product_is_the_loop(
    counts: tuple[int, ...], sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts without rows get gradients of zero, also where no expert has any."""
    expected = results(counts, torch.float32, sums=False)
    if sums:
        expected[1:] = [2 * gradient for gradient in expected[1:]]
    monkeypatch.setattr(experts, "grouped_implementation", lambda x, inputs, outputs: "grouped_mm")
    for one, other in zip(results(counts, torch.float32, sums=sums), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    of_idle = [expert for expert, count in enumerate(counts) if count == 0]
    assert not expected[2][of_idle].any()


def test_a_cpu_and_other_products_take_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grouped_implementation(torch.zeros(2, 16, dtype=torch.bfloat16), 16, 24) == "loop"

    class Doubled(Products):
        """As FP8 would be: each expert's product is its own."""

        def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return 2 * super().output(x, weight, bias)

    monkeypatch.setattr(experts, "grouped_implementation", lambda x, inputs, outputs: "grouped_mm")
    x, weight = torch.randn(5, 16), torch.randn(2, 24, 16)
    y = GroupedProducts(Doubled(), RowGroups((2, 3))).output(x, weight, None)
    torch.testing.assert_close(y, 2 * torch.cat([x[:2] @ weight[0].t(), x[2:] @ weight[1].t()]))
