"""AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) on one flat buffer, with unscaling, clipping, decay, the
skipping of a step and the 16-bit copy in the same pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.ops.dispatch import (
    FLOATS,
    custom_op,
    require,
    require_contiguous,
    require_same_device,
    require_shape,
    require_whole,
    runs_triton,
)

DECAY_GROUP = 32
"""Elements that have weight decay together, or do not."""


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """The numbers of one step; a ValueError names one that is out of its range."""

    step: int  # its number, from 1
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)  # decays of the means of gradients and of their squares
    epsilon: float = 1e-8  # added to the denominator
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require_whole(step=self.step)
        require(self.step >= 1, f"step is {self.step}: the first step is 1")
        require(all(0 <= beta < 1 for beta in self.betas), f"betas is {self.betas}: both must be in [0, 1)")
        for name in ("lr", "epsilon", "weight_decay"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} is {value}: it must be finite and not negative")

    @property
    def numbers(self) -> list[float]:
        """What weights keep, the rate, both betas, epsilon, and the root of the correction of the mean of squares."""
        (beta1, beta2), rate = self.betas, self.lr / (1.0 - self.betas[0] ** self.step)
        root = math.sqrt(1.0 - beta2**self.step)
        return [1.0 - self.lr * self.weight_decay, rate, beta1, beta2, self.epsilon, root]


@custom_op("megacore::adamw_", mutates_args=("parameter", "mean", "square", "copy"))
def _adamw_(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    copy: Tensor | None,
    decays: Tensor | None,
    factor: Tensor,
    numbers: Sequence[float],
) -> None:
    keep, rate, beta1, beta2, epsilon, root_correction2 = numbers
    if runs_triton(parameter, "parameter"):
        import megacore.kernels.adamw as kernel

        kernel.step_(
            parameter, gradient, mean, square, copy=copy, decays=decays, group=DECAY_GROUP, factor=factor,
            keep=keep, rate=rate, betas=(beta1, beta2), epsilon=epsilon, root_correction2=root_correction2,
        )  # fmt: skip
        return
    scaled = gradient.float() * factor
    new_mean = mean.lerp(scaled, 1.0 - beta1)
    new_square = (square * beta2).addcmul_(scaled, scaled, value=1.0 - beta2)
    kept = parameter * (keep if decays is None else _by_element(decays, parameter, keep))
    kept.addcdiv_(new_mean, (new_square.sqrt() / root_correction2).add_(epsilon), value=-rate)
    skipped = factor.isnan()
    for old, new in ((mean, new_mean), (square, new_square), (parameter, kept), (copy, kept)):
        if old is not None:
            old.copy_(torch.where(skipped, old, new.to(old.dtype)))


def _by_element(decays: Tensor, parameter: Tensor, keep: float) -> Tensor:
    factors = torch.where(decays != 0, keep, 1.0).to(parameter.dtype)
    return factors.repeat_interleave(DECAY_GROUP)[: parameter.numel()]


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    update: AdamWStep,
    factor: Tensor | None = None,
    copy: Tensor | None = None,
    decays: Tensor | None = None,
) -> None:
    """One step, in place; what `torch.optim.AdamW` does with `gradient * factor`. Raises ValueError where an argument's
    device, dtype, shape, strides or range do not fit.

    Args:
        parameter: [n] fp32 master weights.
        gradient: [n] fp32, fp16 or bf16; left as it is.
        mean: [n] fp32, running mean of gradients.
        square: [n] fp32, running mean of squared gradients.
        update: the numbers of this step.
        factor: one fp32 number on the device: 1 / loss scale times the clipping factor. None: 1. NaN skips the
            step: nothing changes.
        copy: [n] fp16 or bf16, which receives the new parameters; None for none.
        decays: [ceil(n / 32)] uint8, 1 for each 32 elements with weight decay and 0 for those without. None: all
            have it.
    """
    require(parameter.dim() == 1, f"parameter has shape {tuple(parameter.shape)}: it must be flat, [n]")
    factor = torch.ones((), device=parameter.device) if factor is None else factor
    require(factor.shape in ((), (1,)), f"factor has shape {tuple(factor.shape)}: it must be one number, () or (1,)")
    for name, tensor in {"parameter": parameter, "mean": mean, "square": square, "factor": factor}.items():
        require(tensor.dtype == torch.float32, f"{name} is {tensor.dtype}: it must be torch.float32")
    require(gradient.dtype in FLOATS, f"gradient is {gradient.dtype}: it must be float32, float16 or bfloat16")
    tensors = {"parameter": parameter, "gradient": gradient, "mean": mean, "square": square}
    if copy is not None:
        require(copy.dtype in FLOATS[1:], f"copy is {copy.dtype}: it must be float16 or bfloat16")
        tensors["copy"] = copy
    require_shape(parameter.shape, "like parameter", **tensors)
    if decays is not None:
        require(decays.dtype == torch.uint8, f"decays is {decays.dtype}: it must be torch.uint8")
        groups = -(-parameter.numel() // DECAY_GROUP)
        require_shape((groups,), f"one for each {DECAY_GROUP} elements of parameter", decays=decays)
        tensors["decays"] = decays
    require_same_device(**tensors, factor=factor)
    require_contiguous(**tensors)
    _adamw_(parameter, gradient, mean, square, copy, decays, factor, update.numbers)
