"""Matrix products of 8-bit floating-point numbers (Micikevicius et al. 2022, arXiv 2209.05433).

A tile of a matrix is divided by one scale and rounded to e4m3 (4 significant bits, up to 448) or e5m2 (3 bits, up to
57344). A recipe says how large tiles are:

- blockwise: 1 x 128 of activations and gradients, 128 x 128 of weights, all e4m3 (DeepSeek-V3, arXiv 2412.19437,
  section 3.3). A tile is no larger than what a rank holds, so that no layout changes a number.
- tensorwise: one tile, gradients e5m2 (Transformer Engine's current scaling, with its hybrid format).
- rowwise: a row, along which the product sums, all e4m3 (torchao's recipe of this name).

Scales are powers of two, as Transformer Engine's are for blocks and torchao's for rows. Division by one rounds nothing,
so that a number is rounded once, and the rounded number times its scale is exact in bf16. A device that cannot multiply
in fp8 therefore multiplies the very same numbers in bf16, and a CPU in fp64, where their sums are next to exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from megacore.ops.dispatch import on_accelerator

BLOCK = 128
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# A scale is no smaller, so that the smallest number of a tile, 2^-16 of a scale in e5m2, is a normal number in fp32.
_SMALLEST_SCALE = 2.0**-100

Tile = tuple[int | None, int | None]
"""Rows and columns; None: all."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the operands of products are quantised."""

    name: str  # of the recipe
    rows: Tile  # the tile of activations and of gradients, whose columns are summed over
    weights: Tile  # the tile of a weight, whose columns are summed over
    gradients: torch.dtype = _E4M3  # the format of gradients; everything else is e4m3


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="blockwise", rows=(1, BLOCK), weights=(BLOCK, BLOCK)),
        Recipe(name="tensorwise", rows=(None, None), weights=(None, None), gradients=_E5M2),
        Recipe(name="rowwise", rows=(1, None), weights=(1, None)),
    )
}


@dataclass(frozen=True)
class Quantised:
    """A matrix [r, c] in fp8."""

    values: Tensor  # [r, c], divided by the scale of their tile
    scales: Tensor  # fp32 [tiles along r, tiles along c]

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The matrix [r, c] that the product sees."""
        (rows, columns), (tall, wide) = self.values.shape, self.scales.shape
        tiles = self.values.to(dtype).view(tall, rows // tall, wide, columns // wide)
        return (tiles * self.scales.to(dtype)[:, None, :, None]).view(rows, columns)


def quantise(x: Tensor, form: torch.dtype, tile: Tile) -> Quantised:
    """x / scale of each tile, rounded to the nearest number of the format, ties to even. The largest finite number of a
    tile decides the scale. NaN and infinity become NaN, which no product hides. `x`: [r, c] in fp32 or 16 bits. `form`:
    float8_e4m3fn or float8_e5m2. `tile`: its size, which divides x."""
    largest = torch.finfo(form).max
    rows, columns = (size or whole for size, whole in zip(tile, x.shape, strict=True))
    tiles = x.float().reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    is_finite = tiles.isfinite()
    scales = _power_of_two(torch.where(is_finite, tiles.abs(), 0.0).amax((1, 3), keepdim=True) / largest)
    values = torch.where(is_finite, (tiles / scales).clamp(-largest, largest), torch.nan)
    return Quantised(values.view(x.shape).to(form), scales[:, 0, :, 0])


def _power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below a positive x, in fp32: a fraction above 1 carries to the exponent."""
    bits = x.clamp(min=_SMALLEST_SCALE).view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def product(a: Quantised, b: Quantised, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """a b^T of matrices of one recipe, [n, k] and [o, k] -> [n, o] of a dtype."""
    if not on_accelerator(a.values):
        return (a.dequantised(torch.float64) @ b.dequantised(torch.float64).t()).to(dtype)
    if _is_native(recipe, a.values, dtype):
        return _NATIVE[recipe.name](a, b, dtype)
    return _in_bf16(a, b).to(dtype)


def _in_bf16(a: Quantised, b: Quantised) -> Tensor:
    return a.dequantised(torch.bfloat16) @ b.dequantised(torch.bfloat16).t()


# ---- the device's own products: the second operand is column-major, and scales are laid out as cuBLAS asks for


def _blockwise(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    tile, block = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    padded = F.pad(b.scales, (0, -b.scales.shape[1] % 4))  # to a multiple of 16 bytes
    scales = a.scales.t().contiguous().t(), padded.t()
    return F.scaled_mm(a.values, b.values.t(), scales[0], tile, scales[1], block, output_dtype=dtype)


def _tensorwise(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(a.values, b.values.t(), a.scales.view(()), b.scales.view(()), out_dtype=dtype)


def _rowwise(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(a.values, b.values.t(), a.scales, b.scales.t(), out_dtype=dtype)


_NATIVE: dict[str, Callable[[Quantised, Quantised, torch.dtype], Tensor]] = {
    "blockwise": _blockwise,
    "tensorwise": _tensorwise,
    "rowwise": _rowwise,
}


def _is_native(recipe: Recipe, values: Tensor, dtype: torch.dtype) -> bool:
    """Whether the device multiplies in fp8. A plan is made for one that does."""
    if isinstance(values, FakeTensor):
        return True
    return _runs_natively(recipe.name, values.device, values.dtype, dtype)


@cache
def _runs_natively(name: str, device: torch.device, form: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether the device's product gives what bf16 gives: tried once, on numbers that show a misplaced scale."""
    recipe, size = RECIPES[name], 2 * BLOCK
    with unset_fake_temporarily(), torch.no_grad():
        numbers = torch.arange(size * size, device=device, dtype=torch.float32)
        x = (numbers.sin() * (numbers % 97 - 48).exp2().sqrt()).view(size, size)
        a, b = quantise(x, form, recipe.rows), quantise(x.roll(1), _E4M3, recipe.weights)
        expected = _in_bf16(a, b).float()
        try:
            error = float((_NATIVE[name](a, b, dtype).float() - expected).norm() / expected.norm())
            reason = f"its result is off by {error:.1g}" if not error < 2e-2 else None
        except (RuntimeError, ValueError, TypeError, AttributeError) as failure:  # by torch's version and the device
            reason = str(failure).partition("\n")[0]
    if reason is not None:
        warnings.warn(
            f"--fp8 {name}: {device} does not multiply {form} to {dtype} ({reason}); the same numbers are "
            "multiplied in bf16",
            stacklevel=1,
        )
    return reason is None
