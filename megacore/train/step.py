"""One train step, for the trainer and the engine: from microbatches to updated weights. Every rank runs its
microbatches through its stages (pipeline/runtime.py). Gradients are summed over data-parallel ranks while the last
backward runs. Then the weights are updated, or the step is skipped (optim/update.py). Each sum of the loss is divided
by its count (of tokens, for example) over the global batch, which is known before the first backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from megacore.checkpoint import Manifest, TrainingState, load_checkpoint, read_together
from megacore.config import OptimizerConfig, ResolvedConfig
from megacore.config.messages import counted
from megacore.errors import CheckpointError, SilentCorruption, TrainingDiverged, TrainingStopped
from megacore.optim.lr_schedules import learning_rate
from megacore.optim.nonfinite import IMPLAUSIBLE_WEIGHT, describe_non_finite
from megacore.optim.update import Outcome, WeightUpdate
from megacore.parallel.collectives import all_reduce_, start_all_reduce_
from megacore.parallel.heartbeat import Phase, operations_differ, phase, section, votes_on_operations
from megacore.parallel.mesh import Group, Mesh
from megacore.remote import Location
from megacore.train.expert_balance import ExpertBalance
from megacore.train.fp8_errors import Fp8Errors
from megacore.train.observers import observers
from megacore.train.parallelize import ParallelModel, parallelize
from megacore.train.step_hooks import StepHook
from megacore.train.task import Task
from megacore.train.watchdog import watchdog

Hook = TypeVar("Hook", bound=StepHook)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The cause of a step that was not finite, equal on every rank."""

    cause: str  # weights, moments, hardware, data, overflow or undetermined
    lines: tuple[str, ...]  # the evidence, each a sentence
    is_permanent: bool = False  # whether no further step can be finite
    # Whether a computer was in error: copies of a weight or moment on other ranks are finite, or the step is, computed
    # again.
    is_corruption: bool = False
    suspects_weights: bool = False  # whether finite weights may be the cause
    names_remedy: bool = False  # whether a line says what to do

    def __str__(self) -> str:
        return f"likely cause: {self.cause}: {'; '.join(self.lines)}"

    def way_out(self, remedies: str) -> str:
        """What to do about it, after a colon: the data comes first only where it is to blame, and last in doubt."""
        if self.names_remedy:
            return ""
        if self.cause == "data":
            return f": look at the data of these steps, or use {remedies}"
        return f": use {remedies}{'' if self.cause == 'overflow' else ', or look at the data of these steps'}"


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of a train step, equal on every rank."""

    step: int  # its number, from 1
    loss: Tensor  # mean loss of the global batch, the sum of the main `means`; an fp64 scalar on the device
    means: Tensor  # mean of each term of the loss over the global batch, fp64 [terms] or a scalar, on the device
    # The numbers (of tokens, for example) that the sums of the terms were divided by; shape and dtype as `means`.
    counts: Tensor
    grad_norm: Tensor  # global gradient norm before clipping, an fp64 scalar in host memory
    lr: float
    skipped: str | None  # why the weights were left as they are, or None
    votes: tuple[int, ...]  # summed over ranks
    diagnosis: Diagnosis | None = None  # the cause, where something was not finite
    spike: str | None = None  # which limit of the spike guard the step exceeds, in words, or None
    clip_limit: float = math.inf  # the norm that gradients may have, infinite if it has no limit


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over evaluated global batches, and the counts of their terms; fp64, of the task's evaluation shape."""

    means: Tensor
    counts: Tensor


class BatchLossWeight:
    """The loss weight, 1 / the global batch's counts; they are summed over ranks while the first forward runs.
    `counts`: the counts of this rank's microbatches, fp64; replaced in place by their sum over `group`. `loss_scale`:
    the fp16 loss scale, a further factor of `value`; or that of each sum of the loss."""

    def __init__(self, counts: Tensor, group: Group, loss_scale: float | Tensor) -> None:
        self.counts, self._loss_scale = counts, loss_scale
        self._sum = start_all_reduce_(counts, group) if group.size > 1 else None

    def per_count(self) -> Tensor:
        """1 / counts, fp64; 0 where nothing is counted."""
        if self._sum is not None:
            self._sum.wait()
        return torch.where(self.counts > 0, 1.0 / self.counts, 0.0)

    def value(self) -> Tensor:
        return (self.per_count() * self._loss_scale).float()


class TrainStep:
    """A task's model on this rank, its optimizer, and the steps that train it: `compute_gradients`, then
    `update_weights`. What the caller does between the two overlaps with the work of an accelerator."""

    def __init__(self, task: Task, config: ResolvedConfig, mesh: Mesh) -> None:
        self.task, self.config, self.mesh = task, config, mesh
        watchdog().note_mesh(config, mesh)
        self.model = parallelize(task, config, mesh)  # this rank's part of the model
        # The optimizer, and the checks before its step.
        self.update = WeightUpdate(
            self.model.data_parallel,
            mesh,
            config,
            shared=self.model.shared,
        )
        self.hooks = step_hooks(self.model, config, mesh)  # what else takes part
        self.step = 0
        self._ramp = config.batch_sizes if config.rampup.rampup_batch_size else None
        self._decoupled = config.optimizer.decoupled
        self.dataset: Any = None  # that microbatches come from in order, if it is known
        # Learning rate of the next step, where the caller sets it; None: that of the configuration.
        self.rate: float | None = None
        self._microbatches: Sequence[Any] = ()
        self._loss_weight: BatchLossWeight | None = None
        # The steps since the last update or load that were not finite, and had a diagnosis.
        self.not_finite: list[StepResult] = []
        self._summed_loss: Tensor | None = None

    def compute_gradients(self, microbatches: Sequence[Any]) -> None:
        """Forward and backward of this replica's microbatches. This must not wait for an accelerator: no `float`,
        `item` or `tolist` of a tensor on the device, and no copy of a tensor from the host.
        tests/accelerator/test_synchronizations.py checks it. Only a replay waits. `microbatches`: this data-parallel
        rank's share of the global batch, on the device. Raises SilentCorruption where a microbatch that was computed
        again gave other numbers."""
        self._microbatches = microbatches = [self.task.of_rank(microbatch) for microbatch in microbatches]
        for hook in self.hooks:
            hook.before_gradients(self, microbatches)
        loss_weight = self.begin(torch.stack([self.task.counts(microbatch) for microbatch in microbatches]).sum(0))
        computes = next(filter(None, (hook.computes(self.step + 1) for hook in self.hooks)), None)
        if computes is not None:
            self._summed_loss = computes(microbatches, loss_weight)
        else:
            self._summed_loss = self.model.runtime.train_step(microbatches, loss_weight, self.model.data_parallel)

    def begin(self, counts: Tensor, *, updates: bool = True) -> BatchLossWeight:
        """Begin a step: drop the gradients of the last one. `counts`: of this rank's microbatches together, fp64 of
        the loss's shape; replaced by the global batch's. `updates`: whether the weights are updated from these
        gradients."""
        scale = self.update.scaler.scale
        self._loss_weight = BatchLossWeight(counts, self.mesh.loss, scale * self.task.loss_factors)
        # False where the optimizer's ranks exchange momentum instead of gradients.
        sums_gradients = self.update.optimizer.begin_step(self.update.updates)
        self.model.data_parallel.begin_step(scale, sums_gradients=sums_gradients, compresses=updates)
        for hook in self.hooks:
            hook.begin_step(self.step + 1, scale)
        return self._loss_weight

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Backward of a microbatch whose forward the caller has run, between `begin` and `update_weights`, without
        pipeline. `loss`: summed over what `begin` counts, a scalar. `is_last`: of the step's microbatches."""
        assert self._loss_weight is not None, "begin comes first"
        data_parallel, summed = self.model.data_parallel, loss.detach().double()
        data_parallel.begin_backward(0, last=is_last, all_weights=True)
        (loss.float() * self._loss_weight.value()).backward()
        data_parallel.end_backward(0)
        self._summed_loss = summed if self._summed_loss is None else self._summed_loss + summed

    def update_weights(self, *, votes: Sequence[int] = ()) -> StepResult:
        """Update the weights from the gradients, or skip the step on all ranks.

        The decision waits for an accelerator, once. `votes`: numbers that are summed over all ranks along with the
        loss, in the same reduction, such as requests to stop; as many on every rank.

        Raises:
            SilentCorruption: a weight or a moment is not finite on a rank, and its copies on other ranks are; or
                the last of many steps in a row that were not finite is finite if it is computed again.
            TrainingDiverged: a weight or a moment is not finite, or too many steps in a row were spikes or not
                finite.
            TrainingStopped: ranks took part in an operation with different sizes.
        """
        assert self._loss_weight is not None and self._summed_loss is not None, "compute_gradients comes first"
        loss_weight, summed_loss, microbatches = self._loss_weight, self._summed_loss, self._microbatches
        self._loss_weight, self._summed_loss, self._microbatches = None, None, ()
        self.step += 1
        lr = self.lr()
        self.update.optimizer.decoupled_lr = self.decoupled_lr()
        ballot = (*votes, *(votes_on_operations() if self.mesh.world.size > 1 else ()))
        with phase(Phase.OPTIMIZER):
            per_count = loss_weight.per_count()
            judged = per_count
            if self.task.main_losses is not None:  # further terms are no part of the loss that guards look at
                judged = per_count * (torch.arange(per_count.numel(), device=per_count.device) < self.task.main_losses)
            outcome = self.update.apply(summed_loss, lr, step=self.step, per_count=judged, votes=ballot)
        if operations_differ(outcome.votes[len(votes) :], self.mesh.world.size):
            raise TrainingStopped(watchdog().different_operations(self.step, self.mesh))
        for hook in self.hooks:
            hook.after_update(self, outcome)
        means = outcome.loss * per_count
        diagnosis = None
        if outcome.skipped is None:
            self.not_finite.clear()
        if outcome.is_unexpected and microbatches:
            with section(Phase.EVALUATE):
                diagnosis = observers().diagnose(self, microbatches, loss_weight, last_loss=self.update.last_loss)
        if outcome.is_unexpected and outcome.stop is not None and diagnosis is None:  # its microbatches are gone
            raise TrainingDiverged(f"{outcome.stop}: use {outcome.remedies}, or look at the data of these steps")
        result = StepResult(
            step=self.step,
            loss=means.flatten()[: self.task.main_losses].sum(),
            means=means,
            counts=loss_weight.counts,
            grad_norm=outcome.norm,
            lr=lr,
            skipped=outcome.skipped,
            diagnosis=diagnosis,
            votes=outcome.votes[: len(votes)],
            spike=outcome.spike,
            clip_limit=outcome.clip_limit,
        )
        if diagnosis is not None:
            self.not_finite.append(result)
            self._end_if_hopeless(outcome, diagnosis)
        return result

    def _end_if_hopeless(self, outcome: Outcome, diagnosis: Diagnosis) -> None:
        ending = SilentCorruption if diagnosis.is_corruption else TrainingDiverged
        if diagnosis.is_permanent:
            raise ending(f"step {self.step} is not finite, {diagnosis}. {_way_on(diagnosis.is_corruption)}")
        if outcome.stop is not None and diagnosis.is_corruption:
            raise ending(f"{outcome.stop}, {diagnosis}. {_way_on(is_corruption=True)}")
        if outcome.stop is not None:
            raise ending(f"{outcome.stop}{diagnosis.way_out(outcome.remedies)} ({diagnosis})")

    def hook(self, kind: type[Hook]) -> Hook | None:
        return next((hook for hook in self.hooks if isinstance(hook, kind)), None)

    def figures(self) -> dict[str, float | None]:
        """What hooks add to the record of the last step; all ranks call this together."""
        return _joined(hook.figures() for hook in self.hooks)

    def require_finite(self) -> None:
        """Check weights and moments before a save; all ranks call this together. Raises SilentCorruption where one is
        not finite, and its copies on other ranks are; otherwise TrainingDiverged."""
        if non_finite := self.update.non_finite_state():
            fault = observers().fault_in_words(self, non_finite)
            ending = TrainingDiverged if fault is None else SilentCorruption
            raise ending(
                f"the state after step {self.step} is not finite and is not saved: first in forward order "
                f"{describe_non_finite(non_finite)}{'' if fault is None else f'; {fault}'}. "
                f"{_way_on(fault is not None)}"
            )

    def doubt(self) -> str | None:
        """Why the weights may be of no use, for `--load auto` to pass over them; None: sound. All ranks call this
        together."""
        if self.update.doubts_weights:
            return f"the last {counted(self.update.skipped_in_a_row, 'step')} did not change the weights"
        largest = self.update.largest_weight()
        return str(largest) if largest.value >= IMPLAUSIBLE_WEIGHT else None

    @property
    def suspects_weights(self) -> bool:
        """Whether two or more steps with these weights were not finite, and neither the data nor a machine is to blame.
        Spikes and overflows of a dynamic loss scale between them tell nothing about that. An overflow at the smallest
        loss scale is none of these steps either: with these weights the loss is finite, so that --precision bf16 can go
        on from them."""
        found = [each.diagnosis for each in self.not_finite if each.diagnosis is not None]
        if any(each.cause in ("data", "hardware") for each in found):
            return False
        return sum(each.suspects_weights for each in found) > 1

    def lr(self) -> float:
        return self._scheduled(self.config.optimizer) if self.rate is None else self.rate

    def decoupled_lr(self) -> float | None:
        """The learning rate of the embedding and the output layer in the last step; None: that of all parameters."""
        return None if self._decoupled is None else self._scheduled(self._decoupled)

    def _scheduled(self, optimizer: OptimizerConfig) -> float:
        steps: float = self.step
        if self._ramp is not None and not optimizer.lr_range_test:  # a range test has a rate for each step
            steps = self._ramp.full_steps(self.step)
        return learning_rate(steps, optimizer, train_iters=self.config.training.train_iters)

    @section(Phase.EVALUATE)
    def evaluate(self, batches: Iterable[Sequence[Any]]) -> Evaluation:
        """The task's evaluation over global batches, with --ema-decay eval of the average of the weights; dropout is
        off. `batches`: this replica's microbatches of each, on the device."""
        sums = torch.zeros(2, *self.task.evaluation_shape, dtype=torch.float64, device=self.mesh.device)
        average = self.update.average if self.config.average.eval_ema else None
        with nullcontext() if average is None else average.as_weights():
            for batch in batches:
                microbatches = [self.task.of_rank(microbatch) for microbatch in batch]
                sums[0] += self.model.runtime.evaluate(microbatches)
                if self.model.runtime.holds_loss:
                    sums[1] += torch.stack([self.task.evaluation_counts(m) for m in microbatches]).sum(0)
        all_reduce_(all_reduce_(sums, self.mesh.loss), self.mesh.pipeline)
        values, counts = sums
        return Evaluation(means=torch.where(counts > 0, values / counts, 0.0), counts=counts)

    def state(
        self,
        *,
        consumed_samples: int,
        in_doubt: bool = False,
        series: Mapping[str, list[float]] = MappingProxyType({}),
        buffers: Mapping[str, Tensor] | None = None,
    ) -> TrainingState:
        """This rank's view of the run, for a checkpoint. `consumed_samples`: the position in the data. `in_doubt`:
        whether there is a `doubt`. `buffers`: tensors by global name that are neither weights nor optimizer state."""
        return TrainingState(
            step=self.step,
            consumed_samples=consumed_samples,
            data_parallel=self.model.data_parallel,
            optimizer=self.update.optimizer,
            counters=self.update.counters()
            | {"learning_rate": self.lr(), "in_doubt": int(in_doubt)}
            | ({"own_layers": 1} if self.task.layers_from == "program" else {}),
            series={**self.update.series(), **_joined(hook.series() for hook in self.hooks), **series},
            buffers={**(buffers or {}), **_joined(hook.buffers() for hook in self.hooks)},
        )

    @section(Phase.LOAD)
    def load(
        self,
        directory: Location,
        *,
        buffers: Mapping[str, Tensor] | None = None,
        with_optimizer: bool = True,
        with_progress: bool = True,
    ) -> Manifest:
        """Continue from a checkpoint, of any layout; all ranks call this together. Returns the checkpoint's manifest,
        with the position in the data. Raises CheckpointError where a file is missing or damaged, or a tensor is missing
        or of another shape, each by name.

        Args:
            directory: a checkpoint, or a run's output directory, whose newest checkpoint is loaded.
            buffers: to fill, by global name.
            with_optimizer: whether to continue with the optimizer's state and the loss scale, instead of new ones.
            with_progress: whether to continue at the checkpoint's step, instead of step 0.
        """
        directory, manifest = read_together(directory, self.mesh.world)
        if self.task.layers_from == "configuration" and manifest.has_own_layers:
            raise CheckpointError(
                f"{directory} was trained by a program that describes its own layers: load it with that program"
            )
        state = self.state(consumed_samples=0, buffers=buffers)
        load_checkpoint(directory, manifest, state, self.mesh.world, with_optimizer=with_optimizer)
        self.not_finite.clear()
        if with_progress:
            self.step = manifest.step
        if with_optimizer:
            self.update.load_counters({"updates": manifest.step, **manifest.counters}, manifest.series)
        for hook in self.hooks if with_progress else ():
            hook.load_series(manifest.series)
        if non_finite := self.update.non_finite_state():
            raise CheckpointError(
                f"{directory} holds numbers that are not finite, first in forward order "
                f"{describe_non_finite(non_finite)}: use an earlier checkpoint"
            )
        return manifest


def _joined(of_hooks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for each in of_hooks for name, value in each.items()}


def _way_on(is_corruption: bool) -> str:
    """What to do after a weight or a moment was not finite."""
    if is_corruption:
        return "Continue with --load auto, and without that machine if it happens again (docs/guides/watching.md)"
    return (
        "Resume from the last checkpoint (--load auto). If the same step fails again, the run diverges: use a smaller "
        "--lr. If it does not, memory or a processor of that rank may be faulty"
    )


def step_hooks(model: ParallelModel, config: ResolvedConfig, mesh: Mesh) -> list[StepHook]:
    """The hooks (step_hooks.py) that a configuration asks for, in the order in which they are called."""
    hooks: list[StepHook] = []
    if config.model.experts is not None:
        hooks.append(ExpertBalance(model.chunks, config, mesh))
    hooks += observers().step_hooks(model, config, mesh)
    if config.precision.fp8 != "none":
        hooks.append(Fp8Errors(model.chunks, config, mesh))
    return hooks
