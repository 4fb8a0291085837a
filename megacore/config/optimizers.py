"""The optimizers that a run can choose: the settings and the state of each.

An optimizer has two parts. Its settings are a section of the configuration and are here, because flags are checked
and memory is planned before torch is loaded. Its step is a class in a separate file (megacore/optim/adamw.py), which
megacore/optim/optimizers.py lists by these settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from megacore.config.fields import Range, Section
from megacore.config.messages import number

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class StateKind:
    """One tensor that an optimizer keeps for each parameter besides the weight.

    Attributes:
        name: of the tensor, in checkpoints too.
        per: what has one number: each element, each row of a matrix, or the parameter as a whole. The latter
            two exist only for parameters that the optimizer takes whole.
        parameters: which ones have it: all, those that the optimizer takes whole, or the others.
        dtype: in which it is kept.
    """

    name: str
    per: Literal["element", "row", "parameter"] = "element"
    parameters: Literal["all", "whole", "others"] = "all"
    dtype: Literal["float32", "bfloat16"] = "float32"

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor, from that of the parameter."""
        return {"element": parameter, "row": parameter[:1], "parameter": ()}[self.per]

    def exists(self, *, whole: bool) -> bool:
        """Whether a parameter has it.

        Args:
            whole: whether the optimizer takes that parameter whole.
        """
        return self.parameters in ("all", "whole" if whole else "others") and (whole or self.per == "element")


class OptimizerSettings(Section):
    """The settings of one optimizer. A subclass is a section of the configuration, named as the optimizer."""

    earlier_table: ClassVar[str | None] = "optimizer"
    shares: ClassVar[tuple[str, ...]] = ()
    """Other optimizers whose settings this one reads too, by name."""

    @property
    def state(self) -> tuple[StateKind, ...]:
        """What the optimizer keeps beside the weights."""
        return ()

    def takes_whole(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the optimizer needs all of a parameter at once, so that no shard may cut it.

        Args:
            name: global name of the parameter.
            shape: global shape.
        """
        return False

    @property
    def takes_some_whole(self) -> bool:
        """Whether there may be such parameters at all; they need --tp 1."""
        return type(self).takes_whole is not OptimizerSettings.takes_whole

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of state per element, without the master weight: those of the kind of parameter that has more."""
        kept = (
            sum(_BYTES[kind.dtype] for kind in self.state if kind.per == "element" and kind.exists(whole=whole))
            for whole in (False, True)
        )
        return max(kept)


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerSettings):
    """Settings of --optimizer adamw, and of the other optimizers with Adam's moments."""

    former_defaults: ClassVar[Mapping[str, Any]] = {"adam_beta2": 0.999}

    adam_beta1: Annotated[float, Range(0, below=1)] = 0.9
    """Decay rate of Adam's running mean of the gradients."""
    adam_beta2: Annotated[float, Range(0, below=1)] = 0.95
    """Decay rate of Adam's running mean of the squared gradients."""
    adam_eps: Annotated[float, Range(above=0)] = 1e-8
    """Epsilon: the term added to Adam's denominator."""

    @property
    def state(self) -> tuple[StateKind, ...]:
        return (StateKind(name="exp_avg"), StateKind(name="exp_avg_sq"))


@dataclass(frozen=True, kw_only=True)
class AdamConfig(OptimizerSettings):
    """Settings of --optimizer adam: those of [adamw]."""

    shares: ClassVar[tuple[str, ...]] = ("adamw",)

    @property
    def state(self) -> tuple[StateKind, ...]:
        return (StateKind(name="exp_avg"), StateKind(name="exp_avg_sq"))


@dataclass(frozen=True, kw_only=True)
class SGDConfig(OptimizerSettings):
    """Settings of --optimizer sgd."""

    sgd_momentum: Annotated[float, Range(0, below=1)] = 0.9
    """Momentum of --optimizer sgd. 0: no momentum."""
    sgd_nesterov: bool = False
    """Nesterov's momentum: the step follows the gradient plus --sgd-momentum times the updated momentum."""

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if not wrong & {"sgd_momentum", "sgd_nesterov"} and self.sgd_nesterov and not self.sgd_momentum:
            yield "--sgd-nesterov has no effect with --sgd-momentum 0: leave it out, or use --sgd-momentum 0.9"

    @property
    def state(self) -> tuple[StateKind, ...]:
        return (StateKind(name="momentum_buffer"),) if self.sgd_momentum else ()


@dataclass(frozen=True, kw_only=True)
class LionConfig(OptimizerSettings):
    """Settings of --optimizer lion."""

    lion_beta1: Annotated[float, Range(0, below=1)] = 0.9
    """Weight of the momentum in the sum with the gradient whose sign is Lion's step."""
    lion_beta2: Annotated[float, Range(0, below=1)] = 0.99
    """Decay rate of Lion's momentum."""

    @property
    def state(self) -> tuple[StateKind, ...]:
        return (StateKind(name="exp_avg"),)


@dataclass(frozen=True, kw_only=True)
class LambConfig(OptimizerSettings):
    """Settings of --optimizer lamb, beside those of [adamw]."""

    shares: ClassVar[tuple[str, ...]] = ("adamw",)

    lamb_min_coeff: Annotated[float, Range(0)] = 0.0
    """Least trust ratio: the norm of a matrix divided by that of its step."""
    lamb_max_coeff: Annotated[float | None, Range(above=0)] = None
    """Largest trust ratio. Default: no limit."""

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        least, most = self.lamb_min_coeff, self.lamb_max_coeff
        if not wrong & {"lamb_min_coeff", "lamb_max_coeff"} and most is not None and most < least:
            yield (
                f"--lamb-max-coeff {number(most)} must be at least --lamb-min-coeff {number(least)}: use "
                f"--lamb-max-coeff {number(least)} or more"
            )

    @property
    def state(self) -> tuple[StateKind, ...]:
        return (StateKind(name="exp_avg"), StateKind(name="exp_avg_sq"))


OPTIMIZERS: dict[str, type[OptimizerSettings]] = {
    "adamw": AdamWConfig,
    "adam": AdamConfig,
    "sgd": SGDConfig,
    "lion": LionConfig,
    "lamb": LambConfig,
}
"""The settings of every optimizer, by the value of --optimizer and the name of the section in `Config`."""
