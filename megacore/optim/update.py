"""One update of the weights: gradient norm, clipping, loss scale, and the optimizer step or the decision to skip it.

Every rank decides alike, because every rank has the same global norm, which is not finite if any rank's loss or
gradient is not. The norm, the loss and the votes of a step are sums over ranks, and a parallel layout holds some
elements more than once. Each is counted once: a parameter knows whether this rank counts it
(`ShardSpec.is_counted_by`), and its replicas divide the counting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from types import MappingProxyType

import torch
from torch import Tensor

from megacore.config import ResolvedConfig, ResolvedPrecision
from megacore.config.messages import counted, one_of
from megacore.errors import TrainingDiverged
from megacore.optim.adaptive_clip import AdaptiveClip
from megacore.optim.lr_schedules import momentum, weight_decay
from megacore.optim.nonfinite import (
    Copies,
    Culprit,
    LargestWeight,
    NonFinite,
    copies_of,
    describe_source,
    largest_weight,
    non_finite_gradient,
    non_finite_state,
)
from megacore.optim.offload import all_threads, host_cores, step_on_host
from megacore.optim.optimizers import build_optimizer
from megacore.optim.spikes import Limits, SpikeGuard
from megacore.optim.weight_average import WeightAverage
from megacore.parallel.collectives import all_reduce_, all_reduce_job_, all_reduce_tied_
from megacore.parallel.mesh import Holders, Mesh
from megacore.zero.data_parallel import DataParallel
from megacore.zero.exact_sums import square_sum_from_units, square_sum_units
from megacore.zero.local_segments import LocalSegment

_ROW = 4096
# Backward begins with the scale in fp32; 1e38 is the largest that can be configured, and its double is finite.
_LARGEST_SCALE = 2.0**127


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of an update."""

    loss: Tensor  # summed over the global batch, fp64, equal on every rank; a scalar or several sums, on the device
    norm: Tensor  # global gradient norm before clipping, without the loss scale; an fp64 scalar in host memory
    votes: tuple[int, ...] = ()  # summed over ranks
    skipped: str | None = None  # why the weights were left as they are, or None
    # Whether something was not finite, and it is no overflow that a smaller loss scale cures.
    is_unexpected: bool = False
    stop: str | None = None  # why training must end, or None
    remedies: str = ""  # where it must, what may help, in words
    spike: str | None = None  # which limit of the spike guard the step exceeds, in words, or None
    clip_limit: float = math.inf  # the norm that gradients may have, infinite if it has no limit


class WeightUpdate:
    """The optimizer over this rank's shards, with the norm, clipping and the checks before each step. `data_parallel`:
    holds gradients and master weights. `shared`: global names of tied parameters -> the ranks over which their
    gradients are summed. `skipped_in_a_row`: steps since the last update or load."""

    def __init__(
        self,
        data_parallel: DataParallel,
        mesh: Mesh,
        config: ResolvedConfig,
        *,
        shared: Mapping[str, Holders],
    ) -> None:
        self.data_parallel, self.mesh = data_parallel, mesh
        self.optimizer = build_optimizer(data_parallel.runs, config)  # over the shards
        self.optimizer.attach(data_parallel.segments, mesh, config)
        decay = config.average.ema_decay
        # Of the weights, with --ema-decay; None: there is none.
        self.average = None if decay is None else WeightAverage(data_parallel, self.optimizer, decay=decay)
        self.scaler = LossScaler(config.precision)  # of the loss
        self.updates = 0  # done, without skipped steps
        self.skipped_steps = self.skipped_in_a_row = 0
        # Mean loss of the last step that updated the weights; 0 before the first since the last load.
        self.last_loss = 0.0
        self._bad_steps, self._max_bad_steps = 0, config.training.max_bad_steps
        self._fp16, self._usual_overflows = config.precision.precision == "fp16", config.precision.hysteresis
        self._sequence_parallel = bool(config.parallel.sequence_parallel)
        self._config, self._train_iters = config.optimizer, config.training.train_iters
        self._ramp = config.batch_sizes if config.rampup.rampup_batch_size else None
        self._clip = config.optimizer.clip_grad
        self._adaptive_clip = AdaptiveClip(config.optimizer) if config.optimizer.clip_grad_adaptive else None
        warmup = config.optimizer.lr_warmup_iters * config.training.global_batch_size  # samples
        self.guard = SpikeGuard(config.spikes, warmup_steps=config.batch_sizes.steps(warmup))
        self._host_cores = host_cores(mesh.world) if data_parallel.options.offload else 1
        self._shared = dict(sorted(shared.items()))
        self._counted = counted_segments(data_parallel.segments, mesh)
        replicated = {local.spec.name for local in data_parallel.segments if local.spec.is_replicated}
        # Parameters whose gradients are summed over ranks besides the replicas.
        self._summed_further = {*shared, *(replicated if self._sequence_parallel else ())}

    @torch.no_grad()
    def apply(self, loss: Tensor, lr: float, *, step: int, per_count: Tensor, votes: Sequence[int] = ()) -> Outcome:
        """Update the weights from the step's gradients and publish them, or skip the step on all ranks.

        Only for this decision must the program wait for an accelerator, and where there is a step in one pass, the
        accelerator computes it meanwhile. With `offload` the program may also wait for the gradients of a bucket that
        it updates. Raises TrainingDiverged where too many steps in a row were spikes, which are skipped; or the fp16
        loss scale is at its minimum.

        Args:
            loss: this rank's share of the summed loss.
            step: number of the step, from 1.
            per_count: 1 / the global batch's count of each sum of the loss.
            votes: numbers that are summed over all ranks along with the loss, in the same reduction, such as requests
                to stop; as many on every rank.
        """
        options, limits = self.data_parallel.options, self.guard.limits(step)
        total = self._finish_gradients(loss, step=step, per_count=per_count, votes=votes)
        self._set_rates(step)
        if self.average is not None:
            self.average.begin()
        # The step in one pass is queued before the host decides, the others are taken afterwards.
        on_host = total.to_host(self._queued_before_decision(total, limits, lr))
        norm, summed_votes = on_host.norm / self._gradient_scale, tuple(map(int, on_host.votes.tolist()))
        if not torch.isfinite(norm):
            return dataclasses.replace(self._skip(on_host, step), loss=total.loss, norm=norm, votes=summed_votes)
        mean = float(on_host.mean)
        spike = limits.exceeded(mean, float(norm))
        if spike is not None:
            self._reject(spike, step)
            if self.guard.prevents_update:
                return Outcome(loss=total.loss, norm=norm, votes=summed_votes, skipped=spike, spike=spike)
        else:
            self.guard.accept(mean, float(norm))
        clip_limit = float(self._clip_limit(norm))
        if options.offload:
            factor = self._factor(norm)
            step_on_host(self.data_parallel, self.optimizer, factor=factor, lr=lr, cores=self._host_cores)
        elif not options.one_pass:
            self._step_in_place(self._factor(norm), lr)
        if self.average is not None:
            with all_threads(self._host_cores) if options.offload else nullcontext():
                self.average.update()
        self.scaler.good_step()
        self.updates, self._bad_steps, self.skipped_in_a_row, self.last_loss = self.updates + 1, 0, 0, mean
        if self._adaptive_clip is not None:
            self._adaptive_clip.observe(norm)
        return Outcome(loss=total.loss, norm=norm, votes=summed_votes, spike=spike, clip_limit=clip_limit)

    @torch.no_grad()
    def gradient_norm(self, loss: Tensor, *, step: int, per_count: Tensor) -> Tensor:
        """The global norm of gradients that no update follows, without the loss scale: an fp64 scalar on the device.
        All ranks call this together, after a backward. `loss`: as for `apply`."""
        return self._finish_gradients(loss, step=step, per_count=per_count).norm / self._gradient_scale

    @property
    def _gradient_scale(self) -> float:
        """What is still a factor of finished gradients."""
        return 1.0 if self.data_parallel.options.exact_terms > 0 else self.scaler.scale

    def _finish_gradients(self, loss: Tensor, *, step: int, per_count: Tensor, votes: Sequence[int] = ()) -> Totals:
        """Sum the gradients over all that hold a part of them, and the squares, the loss and the votes over ranks."""
        data_parallel = self.data_parallel
        data_parallel.finish()
        data_parallel.record_norms(self._summed_further)
        if self._sequence_parallel:
            self._all_reduce_replicated_grads()
        for name, holders in self._shared.items():
            self._all_reduce_tied_grads(name, holders)
        data_parallel.convert_exact_sums()
        data_parallel.drop_frozen_gradients()
        return totals(
            self._counted,
            self.mesh,
            loss=loss,
            overflow_poison=data_parallel.overflow(),
            weight_poison=data_parallel.weight_check(step),
            per_count=per_count,
            votes=votes,
            exact=data_parallel.options.exact_terms > 0,
        )

    def _set_rates(self, step: int) -> None:
        optimizer, config = self.optimizer, self._config
        optimizer.weight_decay = weight_decay(step, config, train_iters=self._train_iters)
        if (usual := optimizer.usual_momentum) is not None:
            position = step if self._ramp is None else self._ramp.full_steps(step)  # as the learning rate
            optimizer.momentum = momentum(position, config, usual=usual, train_iters=self._train_iters)

    def _reject(self, spike: str, step: int) -> None:
        """Count a spike. Raises TrainingDiverged where too many in a row left the weights as they are."""
        self.guard.reject()
        if not self.guard.prevents_update:
            return
        self._count_skipped()
        if self.guard.in_a_row >= self._max_bad_steps:
            raise TrainingDiverged(
                f"{spike}, a spike for {counted(self.guard.in_a_row, 'step')} in a row "
                f"(--max-bad-steps {self._max_bad_steps}), which left the weights unchanged "
                f"({self.largest_weight()}): use a smaller --lr, --clip-grad-adaptive or a larger --on-spike threshold"
                f"{self._earlier_checkpoint(step)}"
            )

    def _queued_before_decision(self, total: Totals, limits: Limits, lr: float) -> Callable[[], None] | None:
        """What the accelerator is given to do while the host waits for the sums, and decides."""
        if self.data_parallel.options.offload:
            return self.data_parallel.begin_download
        if not self.data_parallel.options.one_pass:
            return None
        norm = total.norm / self._gradient_scale
        factor = self._factor(norm)
        if self.guard.prevents_update:
            factor = factor.masked_fill(limits.are_exceeded(total.mean, norm), torch.nan)
        return partial(self._step_in_one_pass, factor.float(), lr)

    def _factor(self, norm: Tensor) -> Tensor:
        """What gradients are multiplied by: the clipping and the loss scale; NaN for a norm that is not finite."""
        return clip_factor(norm, self._clip_limit(norm)).where(norm.isfinite(), torch.nan) / self._gradient_scale

    def _clip_limit(self, norm: Tensor) -> Tensor | float:
        """The norm that the gradients may have; infinite if it has no limit."""
        fixed = self._clip or math.inf
        return fixed if self._adaptive_clip is None else self._adaptive_clip.limit(norm).clamp(max=fixed)

    def _step_in_one_pass(self, factor: Tensor, lr: float) -> None:
        """Queue the step before the host knows whether it is skipped: the device computes while the host waits for that
        decision, which the device reads in the factor. Of a step that it skips the same weights are published."""
        for bucket in self.data_parallel.in_order_of_use():
            if bucket.runs:
                self.optimizer.step_shard(bucket.runs, lr=lr, factor=factor, number=self.updates + 1)
            bucket.publish(written=True)

    def _step_in_place(self, factor: Tensor, lr: float) -> None:
        """Bucket by bucket: no more than the gradients of one exist a second time, in fp32."""
        for bucket in self.data_parallel.in_order_of_use():
            gradients = [None if gradient is None else gradient.float() for gradient in bucket.gradients_of_runs()]
            self.optimizer.step(bucket.runs, gradients, lr=lr, factor=factor)
            del gradients  # not while the next bucket's are made
            if not self.optimizer.defers:
                bucket.publish()
        if self.optimizer.defers:
            self.optimizer.finish()
            self.data_parallel.publish()

    def counters(self) -> dict[str, float]:
        counters = {"updates": self.updates, "skipped_steps": self.skipped_steps, "bad_steps": self._bad_steps}
        return {**counters, **self.guard.counters(), **self.scaler.state()}

    def series(self) -> dict[str, list[float]]:
        own = self.guard.series() | self.optimizer.series()
        return own | ({} if self._adaptive_clip is None else self._adaptive_clip.series())

    def load_counters(
        self, counters: dict[str, float], series: Mapping[str, Sequence[float]] = MappingProxyType({})
    ) -> None:
        self.guard.load(counters, series)
        self.optimizer.load_series(series)
        if self._adaptive_clip is not None:
            self._adaptive_clip.load(series.get("clip_moments", ()), series.get("clip_warmup_norms", ()))
        self.updates = int(counters.get("updates", 0))
        self.skipped_steps = int(counters.get("skipped_steps", 0))
        self._bad_steps = int(counters.get("bad_steps", 0))
        self.skipped_in_a_row, self.last_loss = 0, 0.0  # those of a step that a rollback undoes
        self.scaler.load_state(counters)

    def _all_reduce_replicated_grads(self) -> None:
        """With sequence parallelism, gradients of parameters that each tensor-parallel rank has whole cover only this
        rank's positions: sum them over these ranks, in one message."""
        replicated = [local for local in self.data_parallel.segments if local.spec.is_replicated]
        found = [(local, gradient) for local in replicated if (gradient := local.gradient) is not None]
        if found:
            gradients = [gradient for _, gradient in found]
            flat = all_reduce_(torch.cat(gradients), self.mesh.layer)
            torch._foreach_copy_(gradients, list(flat.split([gradient.numel() for gradient in gradients])))
            for local, gradient in found:
                local.write_gradient(gradient)

    def _all_reduce_tied_grads(self, name: str, holders: Holders) -> None:
        for local in self.data_parallel.segments_of(name):
            gradient = local.gradient
            assert gradient is not None
            local.write_gradient(all_reduce_tied_(gradient, holders))

    def _count_skipped(self) -> None:
        self.skipped_steps, self.skipped_in_a_row = self.skipped_steps + 1, self.skipped_in_a_row + 1

    def _earlier_checkpoint(self, step: int) -> str:
        """Which checkpoints do not have the weights of a step that was skipped, for the end of a message."""
        last = step - self.skipped_in_a_row
        return f", from a checkpoint before step {last}, the last that updated the weights" if last > 1 else ""

    def _skip(self, total: Totals, step: int) -> Outcome:
        """Count a step that is not finite, and lower a dynamic loss scale, which helps only where gradients overflow.
        Raises TrainingDiverged where the loss scale is at its minimum."""
        self._count_skipped()
        loss_is_finite = bool(total.loss.isfinite().all())
        scaled = self.scaler.scale != 1.0
        where = describe_source(self.data_parallel, self.mesh, loss_is_finite=loss_is_finite, scaled=scaled)
        if self.scaler.dynamic and loss_is_finite and total.weight_poison.isfinite():
            before = self.scaler.scale
            if not self.scaler.overflow():
                raise TrainingDiverged(
                    f"{where} overflowed fp16 even at the smallest loss scale, --loss-scale min={before:g} "
                    f"({self.largest_weight()}): the run diverges. Use --precision bf16, a smaller --lr or a longer "
                    f"warm-up{self._earlier_checkpoint(step)}"
                )
            skipped = f"{where} overflowed; loss scale {before:g} -> {self.scaler.scale:g}"
            return Outcome(loss=total.loss, norm=total.norm, skipped=skipped)
        self._bad_steps += 1
        stop = None
        if self._bad_steps >= self._max_bad_steps:
            never = "" if self.updates else ", and no step has updated the weights"
            stop = (
                f"{where} was not finite for {counted(self._bad_steps, 'step')} in a row "
                f"(--max-bad-steps {self._max_bad_steps}){never}"
            )
        remedies = self.remedies(loss_is_finite=loss_is_finite) + self._earlier_checkpoint(step)
        skipped = f"{where} is not finite"
        return Outcome(
            loss=total.loss, norm=total.norm, skipped=skipped, is_unexpected=True, stop=stop, remedies=remedies
        )

    def remedies(self, *, loss_is_finite: bool) -> str:
        """What may keep steps finite where the data is not to blame. Before the first update no --lr has an effect."""
        scale, found = self.scaler.scale, list[str]()
        if loss_is_finite and scale != 1.0:
            dynamic = self.scaler.dynamic
            found.append(f"--loss-scale initial={scale:g}" if dynamic else f"a smaller --loss-scale than {scale:g}")
        found += ["--precision bf16"] if self._fp16 else []
        start = ["--init-method-std 0.02", "other weights to start from"]
        return one_of([*found, *(["a smaller --lr", "a longer warm-up", "--clip-grad"] if self.updates else start)])

    def non_finite_state(self) -> list[NonFinite]:
        """Weights and moments that are not finite, of all ranks, which call this together."""
        return non_finite_state(self.data_parallel, self.optimizer, self.mesh)

    def largest_weight(self) -> LargestWeight:
        """Of all ranks, which call this together."""
        return largest_weight(self.data_parallel, self.mesh)

    @property
    def doubts_weights(self) -> bool:
        """Whether the weights may be why the last steps were skipped. A dynamic loss scale is found by overflows, many
        at the beginning and later as many as it takes to lower it."""
        is_spike = self.guard.prevents_update and self.guard.in_a_row > 0
        is_search = self.updates == 0 or self.skipped_in_a_row <= self._usual_overflows
        return self._bad_steps > 0 or is_spike or not is_search

    def copies_of(self, entry: NonFinite) -> Copies:
        """The copies of a weight or moment that is not finite on a rank; all ranks call this together."""
        return copies_of(entry, self.data_parallel, self.optimizer, self.mesh)

    def non_finite_gradient(self) -> Culprit | None:
        """The first gradient of the last backward that was not finite, of all ranks, which call this together."""
        return non_finite_gradient(self.data_parallel, self.mesh)


# ---- sums over all ranks: the gradient norm, the loss and the votes of a step


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over all ranks, fp64 and equal on every rank."""

    norm: Tensor  # the 2-norm of the whole model's gradient; not finite if any gradient, or the loss, is not
    loss: Tensor  # the loss summed over the global batch
    mean: Tensor  # the mean loss, a scalar
    weight_poison: Tensor  # a scalar: 0 if the weights are finite on all ranks, otherwise not finite
    votes: Tensor  # of all ranks, [votes]

    def to_host(self, queue_more: Callable[[], None] | None = None) -> Totals:
        """Copy to the host, once, and wait. `queue_more`: queues work on the accelerator behind the copy, before the
        wait."""
        scalars = (self.norm, self.mean, self.weight_poison)
        numbers, copied = torch.cat([*(x.view(1) for x in scalars), self.loss.reshape(-1), self.votes]), None
        if numbers.device.type != "cpu":
            source, numbers = numbers, torch.empty_like(numbers, device="cpu", pin_memory=True)
            numbers.copy_(source, non_blocking=True)
            copied = torch.Event(source.device)
            copied.record()
        if queue_more is not None:
            queue_more()
        if copied is not None:
            copied.synchronize()
        (norm, mean, poison), loss, votes = numbers.split([len(scalars), self.loss.numel(), self.votes.numel()])
        return Totals(norm=norm, mean=mean, weight_poison=poison, loss=loss.view_as(self.loss), votes=votes)


def counted_segments(segments: Iterable[LocalSegment], mesh: Mesh) -> list[LocalSegment]:
    """Those of this rank's segments that it counts in sums over the model."""
    return [local for local in segments if local.spec.is_counted_by(mesh)]


@torch.no_grad()
def totals(
    segments: Iterable[LocalSegment],
    mesh: Mesh,
    *,
    loss: Tensor | float = 0.0,
    overflow_poison: Tensor | float = 0.0,
    weight_poison: Tensor | float = 0.0,
    per_count: Tensor | float = 1.0,
    votes: Sequence[int] = (),
    exact: bool = False,
) -> Totals:
    """Sum over all ranks.

    Args:
        segments: the `counted_segments` of this rank, with gradients that are already summed over replicas.
        loss: this rank's share of the summed loss, or of several sums, the same on the ranks of its layer group.
        overflow_poison: 0, or not finite if a gradient on this rank was not.
        weight_poison: 0, or not finite if a weight on this rank is not.
        per_count: what each sum of the loss is multiplied by for the mean loss.
        votes: this rank's terms of further sums; as many on every rank.
        exact: sum so that the bits depend neither on the order nor on the layout.
    """
    by_bucket = _counted_gradients(segments)
    shares = torch.as_tensor(loss, dtype=torch.float64, device=mesh.device)
    sums = torch.zeros(3 + shares.numel() + len(votes), dtype=torch.float64, device=mesh.device)
    squares, overflows, weights, losses, ballot = sums.split([1, 1, 1, shares.numel(), len(votes)])
    overflows += overflow_poison  # each of the two is 0, or not finite: then the norm is not finite on any rank
    weights += weight_poison
    if mesh.layer.is_first and mesh.copies.is_first:
        losses.copy_(shares.flatten())
    for number, vote in enumerate(votes):
        if vote:  # `ballot[number] = vote` would copy from the host, for which an accelerator is waited for
            ballot[number].fill_(vote)
    if exact:
        flat = chain(chain.from_iterable(gradients for gradients, _ in by_bucket), [sums.new_zeros(0)])
        units = torch.stack([square_sum_units(gradient) for gradient in flat]).sum(0)
    else:
        sizes = SquareSum()
        for gradients, weight in by_bucket:
            for gradient in gradients:
                sizes.add(gradient, weight)
        squares += sizes.value()
    if mesh.world.size > 1:
        for numbers in (units, sums) if exact else (sums,):
            all_reduce_job_(numbers, mesh)
    square = square_sum_from_units(units) if exact else squares[0]
    poison = 0.0 * sums[1 : 3 + shares.numel()].sum()  # of a loss, a weight or an overflow that is not finite: NaN
    total = losses.view_as(shares)
    return Totals(
        norm=square.sqrt() + poison, loss=total, mean=(total * per_count).sum(), weight_poison=weights[0], votes=ballot
    )


def _counted_gradients(counted: Iterable[LocalSegment]) -> Iterator[tuple[list[Tensor], int]]:
    """The flat gradients whose squares this rank adds, a bucket's at a time, and how often: over all ranks each of the
    model's entries once. Where replicas keep their own gradients, it is the mean of their squares."""
    for bucket, members in groupby(counted, key=attrgetter("run.bucket")):
        gradients = bucket.gradients([local.segment for local in members])
        if not bucket.sums_gradients:
            yield gradients, bucket.group.size
            continue
        holders = bucket.group if bucket.options.stage == 0 else bucket.across
        if holders.size > 1:  # each of them has all of these: it adds its part
            gradients = [part_of_rank(gradient, holders.rank, holders.size) for gradient in gradients]
        yield gradients, 1


def part_of_rank(flat: Tensor, rank: int, ranks: int) -> Tensor:
    """`flat.tensor_split(ranks)[rank]`, at a cost that does not grow with the number of ranks."""
    size, longer = divmod(flat.numel(), ranks)  # the first `longer` parts have one element more
    return flat.narrow(0, rank * size + min(rank, longer), size + (rank < longer))


class SquareSum:
    """A weighted sum of squares of many tensors, at the speed of fp32: short rows in fp32, what is no whole row and all
    sums in fp64. A single fp32 reduction over a large tensor is off by up to a thousandth on a CPU (20 million
    elements, torch 2.13); this one by about 1e-8, so that neither size nor order of summation shows. A tensor costs one
    launch, and all of them together a few more."""

    def __init__(self) -> None:
        self._norms: dict[tuple[int, torch.dtype], list[Tensor]] = {}  # by weight, and of rows or of what is no row

    def add(self, tensor: Tensor, weight: int = 1) -> None:
        """Count a tensor so many times; it may change afterwards."""
        flat = tensor.reshape(-1)
        full = flat.numel() // _ROW * _ROW  # elements of complete rows
        for rows, dtype in ((flat[:full].view(-1, _ROW), torch.float32), (flat[None, full:], torch.float64)):
            if rows.numel():
                norms = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
                self._norms.setdefault((weight, dtype), []).append(norms)

    def value(self) -> Tensor | float:
        """The sum, an fp64 scalar; 0 of no tensors."""
        return sum(torch.cat(each).double().square_().sum() * weight for (weight, _), each in self._norms.items())


def clip_factor(norm: Tensor, limit: Tensor | float) -> Tensor:
    """The factor that clips gradients to a norm of at most `limit` (Pascanu et al. 2013, arXiv 1211.5063). `norm`: the
    global norm. `limit`: largest norm; 0 or infinity does not clip."""
    if isinstance(limit, float) and limit in (0.0, math.inf):
        return torch.ones_like(norm)
    return (limit / (norm + 1e-6)).clamp(max=1.0)


# ---- the fp16 loss scale


class LossScaler:
    """The factor by which the loss is multiplied before backward and gradients are divided after it, which keeps fp16
    gradients in range (Micikevicius et al. 2018, arXiv 1710.03740).

    A dynamic scale doubles after `loss_scale_window` good steps in a row, and halves once `hysteresis` steps have
    overflowed without it having doubled in between; each further overflow then halves it again, until it has doubled.
    Outside fp16, and where `loss_scale` is given, the scale is fixed. `config`: precision and the scale's rules,
    resolved.
    """

    def __init__(self, config: ResolvedPrecision) -> None:
        self._config = config
        self.dynamic, self.scale = config.has_dynamic_scale, config.first_loss_scale
        self._good_steps, self._allowance = 0, config.hysteresis

    def good_step(self) -> None:
        if not self.dynamic:
            return
        self._good_steps += 1
        if self._good_steps % self._config.loss_scale_window == 0:
            self.scale = min(self.scale * 2.0, _LARGEST_SCALE)
            self._allowance = self._config.hysteresis

    def overflow(self) -> bool:
        """A gradient was not finite, though the loss was finite. False: the scale is at its minimum already."""
        if not self.dynamic:
            return True
        self._good_steps = 0
        self._allowance = max(self._allowance - 1, 0)
        if self._allowance > 0:
            return True
        if self.scale <= self._config.min_loss_scale:
            return False
        self.scale = max(self.scale / 2.0, self._config.min_loss_scale)
        return True

    def state(self) -> dict[str, float]:
        """The state for a resumed run; empty if the scale is fixed."""
        if not self.dynamic:
            return {}
        return {"scale": self.scale, "good_steps": self._good_steps, "allowance": self._allowance}

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from the state of a run with a dynamic scale; without one the scale stays as configured."""
        if self.dynamic:
            self.scale = state.get("scale", self.scale)
            self._good_steps = int(state.get("good_steps", self._good_steps))
            self._allowance = int(state.get("allowance", self._allowance))
