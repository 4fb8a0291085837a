"""The section of number formats, and of the loss scale of fp16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from megacore.config.fields import Flag, Range, Section
from megacore.config.rules import AtLeast, Needs, Rule, rows

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""By number format."""
# Backward starts from the loss scale in fp32, where it must be neither 0 nor infinite.
_LOSS_SCALES = Range(1e-37, 1e38)
_FP16 = Needs(precision="fp16")
_DYNAMIC = Needs(precision="fp16", loss_scale=None)
_FP8 = Needs(fp8=("blockwise", "rowwise", "tensorwise"))


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """Number formats, and the loss scale of fp16."""

    rules: ClassVar[Sequence[Rule]] = (AtLeast("initial_loss_scale", "min_loss_scale"), *rows("precision"))
    former_defaults: ClassVar[Mapping[str, Any]] = {"initial_loss_scale": 65536.0}

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of parameters and activations. auto: bf16 on accelerators with fast bf16 products and with --fp8,
    else fp32. Master weights and optimizer moments are fp32."""
    fp8: Annotated[Literal["none", "blockwise", "tensorwise", "rowwise"], Flag(alone="blockwise")] = "none"
    """Computes outputs and input gradients of the linear layers of blocks in fp8. blockwise: a scale for each 128
    values of activations and 128 x 128 of weights. tensorwise: one for each matrix. rowwise: one for each row. Alone:
    blockwise."""
    fp8_skip: Annotated[str | None, Flag(metavar="N,N,..."), _FP8] = None
    """Blocks that stay in 16 bits, by number; -1 is the last one."""
    fp8_check_every: Annotated[int, Range(0), _FP8] = 100
    """Steps from one measurement of fp8's errors to the next, from step 1 on. 0: none is made."""
    fp8_budget: Annotated[float, Range(above=0), _FP8] = 0.1
    """Error of a product, relative to 16 bits, above which its layer stays in 16 bits from then on."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which gradients are accumulated and reduced. bf16 halves memory and traffic, and rounds each sum
    to 8 bits."""
    grad_reduce_compression: Literal["none", "bf16", "int8"] = "none"
    """Number format in which gradients are sent. int8: a scale for each 256 elements, and one fp32 number per parameter
    that carries the rounding error to the next message. none: --grad-reduce-dtype."""
    loss_scale: Annotated[float | None, _LOSS_SCALES, Flag(), _FP16] = None
    """Fixed loss scale for --precision fp16. Default: a dynamic loss scale."""
    initial_loss_scale: Annotated[float | None, _LOSS_SCALES, Flag(), _DYNAMIC] = None
    """First value of the dynamic loss scale of --precision fp16. Default: 65536 x microbatches in a global batch,
    rounded up to a power of two."""
    min_loss_scale: Annotated[float, _LOSS_SCALES, _DYNAMIC] = 1.0
    """Smallest dynamic loss scale. The run stops at an overflow that would halve it further."""
    loss_scale_window: Annotated[int, Range(1), _DYNAMIC] = 1000
    """Consecutive steps without overflow after which the loss scale doubles."""
    hysteresis: Annotated[int, Range(1), _DYNAMIC] = 2
    """Overflows at which the loss scale first halves. Then each overflow halves it, until it doubles again."""

    def resolve(self, microbatches: int) -> ResolvedPrecision:
        """This section with the number format and, where the loss scale is dynamic, its first value."""
        if self.precision == "auto" and self.fp8 != "none":
            return self.resolved_as(ResolvedPrecision, precision="bf16")
        if self.precision == "auto":
            return self.resolved_as(UndecidedPrecision, precision="fp32")
        if self.precision != "fp16" or self.loss_scale is not None or self.initial_loss_scale is not None:
            return self.resolved_as(ResolvedPrecision)
        # The usual 2^16 is meant for the mean loss of one microbatch. Here the loss is the mean over the global batch,
        # so that one microbatch's gradients are smaller by the number of microbatches.
        scale = 65536.0 * (1 << (microbatches - 1).bit_length())
        return self.resolved_as(ResolvedPrecision, initial_loss_scale=max(scale, self.min_loss_scale))


@dataclass(frozen=True, kw_only=True, eq=False)
class ResolvedPrecision(PrecisionConfig):
    """The precision section of a run whose number format is known. Two are equal if their settings are."""

    precision: Literal["fp32", "bf16", "fp16"] = field()

    @property
    def has_dynamic_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.precision == "fp16" and self.loss_scale is None

    @property
    def first_loss_scale(self) -> float:
        """The loss scale of the first step; 1 where gradients are not scaled."""
        if self.has_dynamic_scale and self.initial_loss_scale is not None:  # `resolve` has filled it in
            return self.initial_loss_scale
        return 1.0 if self.loss_scale is None else self.loss_scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ResolvedPrecision) and astuple(self) == astuple(other)

    __hash__ = PrecisionConfig.__hash__

    def for_device(self, *, bf16: bool) -> ResolvedPrecision:
        """This section on a device that computes bf16 fast, or not: an explicit --precision stays as it is."""
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class UndecidedPrecision(ResolvedPrecision):
    """The section of a run with --precision auto before its device is known. Until then it is fp32."""

    def for_device(self, *, bf16: bool) -> ResolvedPrecision:
        return self.resolved_as(ResolvedPrecision, precision="bf16" if bf16 else "fp32")
