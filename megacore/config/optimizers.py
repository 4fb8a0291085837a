"""The optimizers that a run can choose, and the average of its weights: the settings and the state of each. Settings
are here, as sections, because flags are checked and memory is planned before torch is loaded. The step of an optimizer
is a class in its own file (megacore/optim/adamw.py), which megacore/optim/optimizers.py lists."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

from megacore.config.fields import Flag, Range, Section
from megacore.config.rules import AtLeast, Rule, rows

_BYTES = {"float32": 4, "bfloat16": 2}
BLOCK = 256
"""Elements with one scale, where an optimizer keeps its state in 8 bits."""
PART = 1 << 20
"""Most elements whose moments exist in fp32 at a time, where an optimizer keeps them in fewer bits."""


@dataclass(frozen=True, kw_only=True)
class StateKind:
    """One tensor that an optimizer keeps for each parameter besides the weight."""

    name: str  # of the tensor, in checkpoints too
    # What has one number: each element, each row or column of a matrix, or the parameter as a whole. All but the first
    # exist only for parameters that the optimizer takes whole.
    per: Literal["element", "row", "column", "parameter"] = "element"
    # Which ones have it: all, those that the optimizer takes whole, or the others.
    parameters: Literal["all", "whole", "others"] = "all"
    dtype: Literal["float32", "bfloat16"] = "float32"  # in which it is kept, and stored in checkpoints
    in_blocks: bool = False  # it is kept in 8 bits, with an fp32 scale for each block of `BLOCK` elements
    first: Literal["zeros", "weights"] = "zeros"  # what it is before the first update

    @property
    def bytes_per_element(self) -> float:
        """Of one number, a mean over a block and its scale."""
        return 1 + 4 / BLOCK if self.in_blocks else _BYTES[self.dtype]

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        return {"element": parameter, "row": parameter[:1], "column": parameter[1:], "parameter": ()}[self.per]

    def exists(self, *, whole: bool) -> bool:
        return self.parameters in ("all", "whole" if whole else "others") and (whole or self.per == "element")


MOMENTS = (StateKind(name="exp_avg"), StateKind(name="exp_avg_sq"))
"""The running means of gradients and of their squares."""


class OptimizerSettings(Section):
    """The settings of one optimizer. A subclass is a section of the configuration, named as the optimizer."""

    earlier_table: ClassVar[str | None] = "optimizer"
    shares: ClassVar[tuple[str, ...]] = ()
    """Other optimizers whose settings this one reads too, by name."""

    kinds: ClassVar[tuple[StateKind, ...]] = ()
    """What the optimizer keeps beside the weights, unless its settings say so."""

    @property
    def state(self) -> tuple[StateKind, ...]:
        """What the optimizer keeps beside the weights."""
        return self.kinds

    @property
    def shard_unit(self) -> int:
        """Elements that no shard should divide: parameters and shards begin at multiples of it in a bucket."""
        return BLOCK if any(kind.in_blocks for kind in self.state) else 1

    momentum_format: ClassVar[Literal["sign"] | None] = None
    """Format in which the replicas sum the momentum instead of the gradients, after a warm-up (compression.py)."""
    uncompressed: ClassVar[str | None] = None
    """The optimizer that this one is in its warm-up; None: it has none."""
    joins_slices: ClassVar[bool] = False
    """Whether the optimizer joins the slices of a tensor-parallel matrix itself, where it needs the matrix whole."""

    def takes_whole(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the optimizer needs all of a parameter, given its global name and shape, so that no shard may cut
        it."""
        return False

    def width_power(self, name: str) -> float:
        """The power of the width that muP divides the learning rate of a matrix of blocks by, given its global name."""
        return 1.0

    def direction_bytes(self, precision: str) -> int:
        """Bytes of an element of the direction in which `joins_slices` moves a matrix, by --precision."""
        return 4

    @property
    def newton_schulz_steps(self) -> int:
        """Steps of the iteration that makes the direction of a matrix orthogonal; 0: there is none. It computes in the
        format of the direction."""
        return 0

    @property
    def split_qkv(self) -> Literal["none", "qkv", "heads"]:
        """The matrices that the iteration sees in the projection to queries, keys and values."""
        return "none"

    def work_of(self, shape: tuple[int, ...]) -> float:
        """The work of updating a parameter that is taken whole, in any unit: ranks get equal parts of it."""
        return float(math.prod(shape))

    @property
    def takes_some_whole(self) -> bool:
        """Whether there may be such parameters at all; they need --tp 1."""
        return type(self).takes_whole is not OptimizerSettings.takes_whole

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of state per element, without the master weight: those of the kind of parameter that has more."""
        return max(self.bytes_of(whole=whole) for whole in (False, True))

    def bytes_of(self, *, whole: bool) -> float:
        """Bytes of state per element of the parameters that the optimizer takes whole, or of the others."""
        return sum(kind.bytes_per_element for kind in self.state if kind.per == "element" and kind.exists(whole=whole))

    def factor_bytes(self, shape: tuple[int, ...]) -> float:
        """Bytes of state of a parameter that the optimizer takes whole, beside those per element."""
        kinds = [kind for kind in self.state if kind.per != "element" and kind.exists(whole=True)]
        return sum(kind.bytes_per_element * math.prod(kind.shape(shape)) for kind in kinds)


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerSettings):
    """Settings of --optimizer adamw, and of the other optimizers with Adam's moments."""

    former_defaults: ClassVar[Mapping[str, Any]] = {"adam_beta2": 0.999}

    adam_beta1: Annotated[float, Range(0, below=1)] = 0.9
    """Decay rate of the mean of the gradients."""
    adam_beta2: Annotated[float, Range(0, below=1)] = 0.95
    """Decay rate of the mean of the squared gradients."""
    adam_eps: Annotated[float, Range(above=0)] = 1e-8
    """Term added to Adam's denominator."""
    moments_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """Number format of both moments of --optimizer adamw. bf16: rounded stochastically. int8: with a scale for each 256
    elements."""

    @property
    def state(self) -> tuple[StateKind, ...]:
        dtype: Literal["float32", "bfloat16"] = "bfloat16" if self.moments_dtype == "bf16" else "float32"
        return tuple(replace(kind, dtype=dtype, in_blocks=self.moments_dtype == "int8") for kind in MOMENTS)


@dataclass(frozen=True, kw_only=True)
class AdamConfig(OptimizerSettings):
    """Settings of --optimizer adam: those of [adamw]."""

    kinds: ClassVar[tuple[StateKind, ...]] = MOMENTS
    shares: ClassVar[tuple[str, ...]] = ("adamw",)


@dataclass(frozen=True, kw_only=True)
class SGDConfig(OptimizerSettings):
    """Settings of --optimizer sgd."""

    rules: ClassVar[Sequence[Rule]] = (*rows("sgd"),)

    sgd_momentum: Annotated[float, Range(0, below=1)] = 0.9
    """Momentum of --optimizer sgd. 0: none."""
    sgd_nesterov: bool = False
    """Use Nesterov's momentum."""

    @property
    def state(self) -> tuple[StateKind, ...]:
        return (StateKind(name="momentum_buffer"),) if self.sgd_momentum else ()


@dataclass(frozen=True, kw_only=True)
class LionConfig(OptimizerSettings):
    """Settings of --optimizer lion."""

    kinds: ClassVar[tuple[StateKind, ...]] = MOMENTS[:1]

    lion_beta1: Annotated[float, Range(0, below=1)] = 0.9
    """Weight of the momentum in the sum with the gradient whose sign is Lion's step."""
    lion_beta2: Annotated[float, Range(0, below=1)] = 0.99
    """Decay rate of Lion's momentum."""


@dataclass(frozen=True, kw_only=True)
class LambConfig(OptimizerSettings):
    """Settings of --optimizer lamb, beside those of [adamw]."""

    kinds: ClassVar[tuple[StateKind, ...]] = MOMENTS
    shares: ClassVar[tuple[str, ...]] = ("adamw",)

    rules: ClassVar[Sequence[Rule]] = (AtLeast("lamb_max_coeff", "lamb_min_coeff"),)

    lamb_min_coeff: Annotated[float, Range(0)] = 0.0
    """Least trust ratio: norm of a matrix / norm of its step."""
    lamb_max_coeff: Annotated[float | None, Range(above=0)] = None
    """Largest trust ratio. Default: no limit."""


@dataclass(frozen=True, kw_only=True)
class OneBitAdamConfig(OptimizerSettings):
    """Settings of --optimizer onebitadam, beside those of [adamw]; --optimizer onebitlamb reads them too."""

    kinds: ClassVar[tuple[StateKind, ...]] = MOMENTS
    shares: ClassVar[tuple[str, ...]] = ("adamw",)
    momentum_format: ClassVar[Literal["sign"] | None] = "sign"
    uncompressed: ClassVar[str | None] = "adamw"

    onebit_freeze_step: Annotated[int | None, Range(1)] = None
    """Updates of the warm-up, in which onebitadam is AdamW and onebitlamb LAMB. Then the variance is frozen, and
    replicas send one bit per element of the momentum. Default: a fifth of --train-iters."""

    def warm_up(self, train_iters: int) -> int:
        """Updates of the warm-up."""
        return self.onebit_freeze_step or max(1, train_iters // 5)


@dataclass(frozen=True, kw_only=True)
class OneBitLambConfig(OptimizerSettings):
    """Settings of --optimizer onebitlamb, beside those of [lamb], [adamw] and [onebitadam]."""

    kinds: ClassVar[tuple[StateKind, ...]] = (*MOMENTS, StateKind(name="exp_avg_sq_fresh"))
    shares: ClassVar[tuple[str, ...]] = ("adamw", "lamb", "onebitadam")
    momentum_format: ClassVar[Literal["sign"] | None] = "sign"
    uncompressed: ClassVar[str | None] = "lamb"

    rules: ClassVar[Sequence[Rule]] = (AtLeast("onebit_factor_max", "onebit_factor_min"),)

    onebit_coeff_beta: Annotated[float, Range(0, below=1)] = 0.9
    """Decay rate of the mean of a matrix's trust ratio in the warm-up of --optimizer onebitlamb."""
    onebit_factor_min: Annotated[float, Range(above=0)] = 0.5
    """Least factor of that mean after the warm-up."""
    onebit_factor_max: Annotated[float, Range(above=0)] = 4.0
    """Largest factor of that mean after the warm-up."""
    onebit_factor_threshold: Annotated[float, Range(above=0, below=1)] = 0.1
    """Largest relative change of that factor in an update."""


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerSettings):
    """Settings of --optimizer muon, beside those of [adamw]."""

    kinds: ClassVar[tuple[StateKind, ...]] = (
        StateKind(name="momentum", parameters="whole"),
        *(replace(kind, parameters="others") for kind in MOMENTS),
    )
    shares: ClassVar[tuple[str, ...]] = ("adamw",)
    joins_slices: ClassVar[bool] = True

    muon_parameters: Annotated[str, Flag(metavar="PATTERN")] = "blocks.*"
    """Matrices that Muon updates, by a pattern of global names. AdamW updates the rest."""
    muon_momentum: Annotated[float, Range(0, below=1)] = 0.95
    """Decay rate of Muon's momentum."""
    muon_nesterov: Annotated[bool, Flag(("--muon-use-nesterov",))] = True
    """Use Nesterov's momentum."""
    muon_num_ns_steps: Annotated[int, Range(1, 99)] = 5
    """Newton-Schulz steps that make the momentum of a matrix orthogonal."""
    muon_ns_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the Newton-Schulz steps. auto: fp32 with --precision fp32, else bf16."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Factor of the learning rate for an r x c matrix. spectral: sqrt(max(r, c)). unit_rms_norm: sqrt(r / c).
    shape_scaling: sqrt(max(1, r / c))."""
    muon_extra_scale_factor: Annotated[float, Range(above=0)] = 0.2
    """Another factor of that rate. With spectral, 0.2 gives steps as large as AdamW's."""
    muon_split_qkv: Literal["none", "qkv", "heads"] = "qkv"
    """What is one matrix in the query, key and value projection. none: all of it. qkv: the queries, the keys, the
    values. heads: each head's queries, keys or values."""

    def takes_whole(self, name: str, shape: tuple[int, ...]) -> bool:
        is_matrix = len(shape) == 2 or (len(shape) == 3 and ".experts." in name)
        is_matrix = is_matrix and not name.endswith("bias")  # of experts, a vector each
        return is_matrix and min(shape[-2:]) > 1 and fnmatchcase(name, self.muon_parameters)

    def width_power(self, name: str) -> float:
        # The spectral norm of a step should not depend on the width (Yang et al. 2023, arXiv 2310.17813). That of an
        # orthogonal matrix is 1, so that only sqrt(max(r, c)) is to be undone.
        if not fnmatchcase(name, self.muon_parameters):
            return super().width_power(name)
        return 0.5 if self.muon_scale_mode == "spectral" else 0.0

    def direction_bytes(self, precision: str) -> int:
        narrow = self.muon_ns_dtype == "bf16" or (self.muon_ns_dtype == "auto" and precision != "fp32")
        return 2 if narrow else 4

    @property
    def newton_schulz_steps(self) -> int:
        return self.muon_num_ns_steps

    @property
    def split_qkv(self) -> Literal["none", "qkv", "heads"]:
        return self.muon_split_qkv

    def work_of(self, shape: tuple[int, ...]) -> float:
        """FLOPs of a Newton-Schulz step: X X^T, its square, and their product with X."""
        rows, columns = sorted(shape[-2:])
        # The step works on the wide form of a matrix: X X^T is as small as it can be.
        return math.prod(shape[:-2]) * (4.0 * rows**2 * columns + 2.0 * rows**3)


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig(OptimizerSettings):
    """Settings of --optimizer adafactor."""

    kinds: ClassVar[tuple[StateKind, ...]] = (
        StateKind(name="exp_avg_sq_row", per="row", parameters="whole"),
        StateKind(name="exp_avg_sq_col", per="column", parameters="whole"),
        StateKind(name="exp_avg_sq", parameters="others"),
    )

    adafactor_beta2_decay: Annotated[float, Range(below=0)] = -0.8
    """Weight of a gradient in the second moments: the step's number to this power."""
    adafactor_eps1: Annotated[float, Range(above=0)] = 1e-7
    """Least root of a second moment."""
    adafactor_eps2: Annotated[float, Range(above=0)] = 1e-3
    """Least root mean square of a parameter, which multiplies the learning rate."""
    adafactor_clip: Annotated[float, Range(above=0)] = 1.0
    """Largest root mean square of a parameter's step / learning rate."""

    def takes_whole(self, name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and name.startswith("blocks.") and not name.endswith("bias")


OPTIMIZERS: dict[str, type[OptimizerSettings]] = {
    "adamw": AdamWConfig,
    "adam": AdamConfig,
    "sgd": SGDConfig,
    "lion": LionConfig,
    "lamb": LambConfig,
    "onebitadam": OneBitAdamConfig,
    "onebitlamb": OneBitLambConfig,
    "muon": MuonConfig,
    "adafactor": AdafactorConfig,
}
"""The settings of every optimizer, by the value of --optimizer and the name of the section in `Config`."""


def sections_read(optimizer: str) -> tuple[str, ...]:
    """The sections of settings that an optimizer reads, its own first."""
    return (optimizer, *OPTIMIZERS[optimizer].shares) if optimizer in OPTIMIZERS else (optimizer,)


EMA = StateKind(name="ema", first="weights")
"""The average, which is kept beside the optimizer's state."""


@dataclass(frozen=True, kw_only=True)
class AverageConfig(Section):
    """An exponential moving average of the weights."""

    ema_decay: Annotated[float | None, Range(above=0, below=1), Flag(example=0.999)] = None
    """Keeps an exponential moving average of the weights, which each update changes to D x average + (1 - D) x weights
    (docs/reference/optimizers.md). Default: none."""
    eval_ema: bool = False
    """Evaluates the average of --ema-decay instead of the weights."""

    @property
    def state(self) -> tuple[StateKind, ...]:
        """What is kept beside the optimizer's state."""
        return () if self.ema_decay is None else (EMA,)

    @property
    def bytes_per_parameter(self) -> float:
        return sum(kind.bytes_per_element for kind in self.state)
