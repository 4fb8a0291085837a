"""One AdamW step on flat buffers: 16 bytes read and 12 written a parameter, and 2 more for a 16-bit copy. Of a 16-bit
gradient 2 bytes are read instead of 4. The gradient's factor (unscaling times clipping) is read from the device, and so
is the decision to skip the step: no step waits for the host to know them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megacore.kernels.launch import blocks_of, launchable

# A thread updates four elements: 32 registers, so that all 64 warps of a processor are resident.
_BLOCK, _WARPS = 1024, 8


@launchable
@triton.jit
def _step(
    parameter_ptr, gradient_ptr, mean_ptr, square_ptr, copy_ptr, decays_ptr, factor_ptr, count,
    keep, rate, weight1, beta2, weight2, epsilon, root_correction2,
    HAS_COPY: tl.constexpr, HAS_DECAYS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)[:, None]
    at = group * GROUP + tl.arange(0, GROUP)[None, :]
    factor = tl.load(factor_ptr)
    inside = tl.where(factor == factor, at < count, False)  # nothing is inside where the factor is NaN
    gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0).to(tl.float32) * factor
    mean = tl.load(mean_ptr + at, mask=inside, other=0.0)
    square = tl.load(square_ptr + at, mask=inside, other=0.0)
    parameter = tl.load(parameter_ptr + at, mask=inside, other=0.0)
    if HAS_DECAYS:
        keep = tl.where(tl.load(decays_ptr + group, mask=group * GROUP < count, other=0) != 0, keep, 1.0)
    mean += weight1 * (gradient - mean)
    square = beta2 * square + weight2 * gradient * gradient
    parameter = parameter * keep - rate * mean / (tl.sqrt(square) / root_correction2 + epsilon)
    tl.store(mean_ptr + at, mean, mask=inside)
    tl.store(square_ptr + at, square, mask=inside)
    tl.store(parameter_ptr + at, parameter, mask=inside)
    if HAS_COPY:
        tl.store(copy_ptr + at, parameter.to(copy_ptr.dtype.element_ty), mask=inside)


def step_(
    parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, copy: Tensor | None, decays: Tensor | None,
    group: int, factor: Tensor, keep: float, rate: float, betas: tuple[float, float], epsilon: float,
    root_correction2: float,
) -> None:  # fmt: skip
    """Update parameter, mean and square, and write the copy.

    Args:
        parameter: [n] fp32.
        gradient: [n], any float.
        mean: [n] fp32, running mean of gradients.
        square: [n] fp32, running mean of squares.
        copy: [n] 16 bits, or None.
        decays: [ceil(n / group)] uint8, 1 for each group of elements with weight decay, or None: all have it.
        group: elements of a group, a power of two up to 1024.
        factor: one fp32 number, what the gradient is multiplied by. NaN: nothing is written.
        keep: 1 - lr * weight decay.
        rate: lr / (1 - beta1^t).
        betas: beta1 and beta2.
        root_correction2: sqrt(1 - beta2^t).
    """
    count = parameter.numel()
    if count:
        _step[(blocks_of(count, _BLOCK),)](
            parameter, gradient, mean, square, copy, decays, factor, count,
            # 1 - beta is taken here, in double precision: in single it would be off by 6e-5 for 0.999.
            keep, rate, 1.0 - betas[0], betas[1], 1.0 - betas[1], epsilon, root_correction2,
            HAS_COPY=copy is not None, HAS_DECAYS=decays is not None, GROUP=group, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
