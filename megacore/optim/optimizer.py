"""The optimizer protocol: state beside this rank's master weights, and a step that updates both. A subclass implements
`update`. Its settings (megacore/config/optimizers.py) declare its state and the parameters that it needs whole; shard
boundaries, the memory plan and checkpoints follow from them. An entry in megacore/optim/optimizers.py makes it
selectable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.config.optimizers import AdamWConfig, OptimizerSettings, StateKind
from megacore.parallel.mesh import Mesh
from megacore.zero.local_segments import LocalRun, LocalSegment

S = TypeVar("S", bound=OptimizerSettings)


class Optimizer(ABC, Generic[S]):
    """Updates this rank's part of the master weights, run by run.

    A run is a flat part of a shard: parts of several parameters with the same weight decay, or exactly one parameter
    that the optimizer needs whole (`run.shape` is then its shape).

    `runs`: all that this rank updates; there may be none. `weight_decay`: of matrices; vectors (biases, norm weights)
    have none unless their `ParameterScale` says so. `adam`: the settings of Adam's moments, which several optimizers
    share.
    """

    counts_updates: ClassVar[bool] = False
    """Whether `update` needs the number of updates (`steps`), which a resumed run continues."""
    has_one_pass: ClassVar[bool] = False
    """Whether there is a `step_shard`, which runs on devices with Triton."""

    def __init__(
        self, runs: Sequence[LocalRun], settings: S, *, weight_decay: float, adam: AdamWConfig | None = None
    ) -> None:
        # `weight_decay`: of matrices, in the next update.
        self.runs, self.settings, self.weight_decay = list(runs), settings, weight_decay
        self.adam = settings if isinstance(settings, AdamWConfig) else adam or AdamWConfig()
        # In the next update; unused by an optimizer without `usual_momentum`.
        self.momentum = self.usual_momentum or 0.0
        # Learning rate of decoupled runs (`ParameterScale`) in the next update; None: that of the others.
        self.decoupled_lr: float | None = None
        self.kinds: tuple[StateKind, ...] = settings.state  # of state, the same on every rank
        # For each run its tensors by the name of their kind; empty before the run's first update. `step` is no kind: it
        # counts the run's updates (a float32 scalar), for bias correction.
        self.state: dict[LocalRun, dict[str, Tensor]] = {run: {} for run in runs}

    @property
    def usual_momentum(self) -> float | None:
        """The momentum that the settings state; None: the optimizer has none that a schedule may change."""
        return None

    @property
    def defers(self) -> bool:
        """Whether weights or state change in `finish`, once `update` has seen all buckets; the same on every rank."""
        return False

    def attach(self, segments: Sequence[LocalSegment], mesh: Mesh, config: ResolvedConfig) -> None:
        """Prepare for the first update; all ranks call this together. `segments`: that the runs consist of."""

    def begin_step(self, updates: int) -> bool:
        """Before the gradients of a step are computed: whether the update needs their sum over the replicas. Otherwise
        each rank has its own, and `step` sums what it needs. `updates`: done so far; the same on every rank."""
        return True

    def series(self) -> dict[str, list[float]]:
        """Lists of numbers of a resumed run that are not in tensors; the same on every rank."""
        return {}

    def load_series(self, series: Mapping[str, Sequence[float]]) -> None:
        """Continue from those of a checkpoint, which may have others too."""

    def keep(self, kind: StateKind) -> None:
        """Keep a further kind of state, which the optimizer does not use, as its own is kept: in checkpoints too."""
        self.kinds = (*self.kinds, kind)

    def finish(self) -> None:
        """End the update, for an optimizer that `defers`; all ranks call this together, after the last bucket."""

    def step(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor | None], *, lr: float, factor: Tensor) -> None:
        """Update the master weights of some runs. `gradients`: of each run, fp32 and reduced, are changed; None: the
        run stays. `factor`: what gradients are multiplied by first (clipping, loss scale), a scalar in host memory."""
        present = [(run, grad) for run, grad in zip(runs, gradients, strict=True) if grad is not None]
        scale_gradients([grad for _, grad in present], factor)
        alike: dict[tuple[float, float], list[tuple[LocalRun, Tensor]]] = {}
        for run, grad in present:
            if not run.scale.frozen:
                decay = self.weight_decay * (run.scale.weight_decay if run.is_matrix else run.scale.vector_decay)
                rate = lr if self.decoupled_lr is None or not run.scale.decoupled else self.decoupled_lr
                alike.setdefault((rate * run.scale.lr, decay), []).append((run, grad))
        for (rate, decay), members in alike.items():
            self.update([run for run, _ in members], [grad for _, grad in members], lr=rate, weight_decay=decay)

    def step_shard(self, runs: Sequence[LocalRun], *, lr: float, factor: Tensor, number: int) -> None:
        """Update the shard of a bucket in one pass, which writes the parameters in their 16-bit format too. `runs`: all
        of the bucket; one or more. `factor`: what gradients are multiplied by first; an fp32 scalar on the device. NaN:
        nothing may change. `number`: of this update, from 1."""
        raise NotImplementedError(f"{type(self).__name__} has no step in one pass")

    @abstractmethod
    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        """Update `run.master` and the state of each run. `runs`: one or more, with the same rates. `gradients`: of each
        run, fp32, flat, clipped and without the loss scale."""

    def tensors(self, kind: str, runs: Sequence[LocalRun]) -> list[Tensor]:
        """The state of one kind for each run; what is first where there was none."""
        each = next(one for one in self.kinds if one.name == kind)
        held = [self.state[run].get(kind) for run in runs]
        return [self.tensor(run, each) if state is None else state for run, state in zip(runs, held, strict=True)]

    def tensor(self, run: LocalRun, kind: StateKind) -> Tensor:
        """A run's state of one kind, or what is first; flat, unless the run is a whole parameter."""
        state = self.state[run]
        if kind.name not in state:
            shape = tuple(run.master.shape) if run.shape is None else kind.shape(run.shape)
            if kind.first == "weights":
                state[kind.name] = run.master.detach().clone().view(shape)
                return state[kind.name]
            state[kind.name] = torch.zeros(shape, dtype=getattr(torch, kind.dtype), device=run.master.device)
        return state[kind.name]

    def values(self, local: LocalSegment, name: str) -> Tensor | None:
        """What the state of a segment stands for, flat; None before the first update, and for what is no kind of it."""
        return local.state(self, name)

    def set_values(self, local: LocalSegment, kind: StateKind, values: Tensor) -> None:
        self.tensor(local.run, kind)
        part = local.state(self, kind.name)
        assert part is not None
        part.copy_(values)

    def steps(self, runs: Sequence[LocalRun]) -> list[Tensor]:
        """How many updates each run has had, float32 scalars where its weights are; `update` counts them up."""
        for run in runs:
            self.state[run].setdefault("step", torch.zeros((), dtype=torch.float32, device=run.master.device))
        return [self.state[run]["step"] for run in runs]

    def resume(self, updates: int) -> None:
        """Continue after `updates` updates, with the state that was loaded; all ranks call this together."""
        if self.counts_updates:
            for step in self.steps(self.runs):
                step.fill_(float(updates))


class AdamLike(Optimizer[S], Generic[S]):
    """With Adam's moments, the state `exp_avg` and `exp_avg_sq`."""

    counts_updates: ClassVar[bool] = True

    @property
    def usual_momentum(self) -> float:
        return self.adam.adam_beta1

    def adam_tensors(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor]) -> list[list[Tensor]]:
        """Weights, gradients, first and second moments of runs, and their updates so far, an fp32 scalar for each."""
        means, squares = self.tensors("exp_avg", runs), self.tensors("exp_avg_sq", runs)
        return [[run.master for run in runs], list(gradients), means, squares, self.steps(runs)]


@torch.no_grad()
def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply fp32 gradients in place by a scalar in host memory; a factor of exactly 1 costs nothing."""
    if gradients and (number := factor.item()) != 1.0:
        torch._foreach_mul_(list(gradients), number)
