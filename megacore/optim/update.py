"""One update of the weights: from reduced gradients to published parameters, or to the decision to skip.

The decision is the same on every rank, because every rank looks at the same number: the global norm, into which a
loss or a gradient that is not finite anywhere has found its way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.errors import TrainingStopped
from megacore.optim.clip import clip_factor, totals
from megacore.optim.offload import step_on_host
from megacore.optim.optimizers import build_optimizer
from megacore.optim.precision import LossScaler
from megacore.parallel.collectives import all_gather_objects, all_reduce_, sum_copies_
from megacore.parallel.mesh import Holders, Mesh
from megacore.zero.data_parallel import DataParallel


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a step.

    Attributes:
        loss: summed over the global batch, fp64, equal on every rank; a scalar or several sums, on the device.
        norm: global gradient norm before clipping, without the loss scale; an fp64 scalar in host memory.
        votes: of all ranks, summed.
        skipped: why the weights were left as they are, or None.
    """

    loss: Tensor
    norm: Tensor
    votes: tuple[int, ...] = ()
    skipped: str | None = None


class WeightUpdate:
    """The optimizer over the shards that this rank updates, and what guards it.

    Args:
        data_parallel: holds gradients and master weights.
        mesh: this rank's groups.
        config: resolved.
        shared: global names of tied parameters, and the ranks over which their gradients are summed.
    """

    def __init__(
        self,
        data_parallel: DataParallel,
        mesh: Mesh,
        config: ResolvedConfig,
        *,
        shared: Mapping[str, Holders],
    ) -> None:
        self.data_parallel, self.mesh = data_parallel, mesh
        self.optimizer = build_optimizer(data_parallel.runs, config)
        self.scaler = LossScaler(config.precision)
        self.updates = 0
        self.skipped_steps = 0
        self._bad_steps, self._max_bad_steps = 0, config.training.max_bad_steps
        self._fp16 = config.precision.precision == "fp16"
        self._sequence_parallel = config.parallel.sequence_parallel
        self._clip = config.optimizer.clip_grad
        self._shared = dict(sorted(shared.items()))
        replicated = {owned.spec.name for owned in data_parallel.segments if owned.spec.is_replicated}
        self._added_to = {*shared, *(replicated if self._sequence_parallel else ())}  # by ranks other than replicas

    @torch.no_grad()
    def apply(self, loss: Tensor, lr: float, *, votes: Sequence[int] = ()) -> Outcome:
        """Update the weights from the step's gradients and publish them, or skip the step on all ranks.

        Which of the two is the only thing in a step that the program must know before it goes on, and so the only time
        that it waits for an accelerator (once more for each bucket with `offload`, whose gradients it works on).

        Args:
            loss: this rank's share of the summed loss.
            lr: the learning rate.
            votes: what this rank adds to sums over all ranks that travel along; as many on every rank.

        Raises:
            TrainingStopped: too many steps in a row were not finite, or the fp16 loss scale is at its minimum.
        """
        data_parallel = self.data_parallel
        data_parallel.finish()
        data_parallel.note(self._added_to)
        if self._sequence_parallel:
            self._sum_over_positions()
        for name, holders in self._shared.items():
            self._sum_copies(name, holders)
        data_parallel.settle()
        exact = data_parallel.options.exact_terms > 0
        scale = 1.0 if exact else self.scaler.scale  # that the gradients still carry
        total = totals(
            data_parallel.segments,
            self.mesh,
            loss=loss,
            overflow=data_parallel.overflow(),
            votes=votes,
            exact=exact,
        )
        known = total.to_host()
        norm, counted = known.norm / scale, tuple(map(int, known.votes.tolist()))
        if not torch.isfinite(norm):
            return Outcome(loss=total.loss, norm=norm, votes=counted, skipped=self._skip(known.loss))
        factor = clip_factor(norm, self._clip) / scale
        if data_parallel.options.offload:
            step_on_host(data_parallel, self.optimizer, factor=factor, lr=lr)
        else:
            self._step_in_place(factor, lr)
        self.scaler.good_step()
        self.updates, self._bad_steps = self.updates + 1, 0
        return Outcome(loss=total.loss, norm=norm, votes=counted)

    def _step_in_place(self, factor: Tensor, lr: float) -> None:
        runs = self.data_parallel.runs
        gradients = [None if (gradient := run.gradient) is None else gradient.float() for run in runs]
        self.optimizer.step(runs, gradients, lr=lr, factor=factor)
        self.data_parallel.publish()

    def counters(self) -> dict[str, float]:
        """What a resumed run needs besides the tensors."""
        counters = {"updates": self.updates, "skipped_steps": self.skipped_steps, "bad_steps": self._bad_steps}
        return {**counters, **self.scaler.state()}

    def load_counters(self, counters: dict[str, float]) -> None:
        """Continue counting where a checkpoint was made."""
        self.updates = int(counters.get("updates", 0))
        self.skipped_steps = int(counters.get("skipped_steps", 0))
        self._bad_steps = int(counters.get("bad_steps", 0))
        self.scaler.load_state(counters)

    def _sum_over_positions(self) -> None:
        """Parameters that are replicated over the layer group saw only this rank's positions: sum, in one message."""
        replicated = (owned for owned in self.data_parallel.segments if owned.spec.is_replicated)
        gradients = [gradient for owned in replicated if (gradient := owned.gradient) is not None]
        if gradients:
            flat = all_reduce_(torch.cat(gradients), self.mesh.layer)
            torch._foreach_copy_(gradients, list(flat.split([gradient.numel() for gradient in gradients])))

    def _sum_copies(self, name: str, holders: Holders) -> None:
        for owned in self.data_parallel.segments_of(name):
            gradient = owned.gradient
            assert gradient is not None
            sum_copies_(gradient, holders)

    def _skip(self, loss: Tensor) -> str:
        """Account for a step that is not finite; returns what happened.

        A smaller loss scale helps where gradients overflow. It does nothing for a loss, which does not carry it.

        Args:
            loss: of all ranks, in host memory.
        """
        self.skipped_steps += 1
        sound = bool(loss.isfinite().all())
        where = self._source(sound)
        if self.scaler.dynamic and sound:
            before = self.scaler.scale
            self.scaler.overflow(where)
            return f"{where} overflowed; loss scale {before:g} -> {self.scaler.scale:g}"
        self._bad_steps += 1
        if self._bad_steps >= self._max_bad_steps:
            scale = f" a smaller --loss-scale than {self.scaler.scale:g}," if sound and self.scaler.scale != 1.0 else ""
            wider = " --precision bf16," if self._fp16 else ""
            raise TrainingStopped(
                f"{where} was not finite for {self._bad_steps} step(s) in a row "
                f"(--max-bad-steps {self._max_bad_steps}): look at the data of these steps, "
                f"or use{scale}{wider} a smaller --lr, a longer warm-up or --clip-grad"
            )
        return f"{where} is not finite"

    def _source(self, sound: bool) -> str:
        """Where what is not finite came from: of all ranks' offenders the one nearest to the loss.

        Args:
            sound: whether the loss is finite.
        """
        mine, options = self.data_parallel.offender(), self.data_parallel.options
        stage = 0 if mine is None else mine.chunk * self.mesh.pipeline.size + self.mesh.pipeline.rank
        offender = None if mine is None else (stage, mine.position, mine.name)
        found, largest = zip(*all_gather_objects((offender, self._largest()), self.mesh.world), strict=True)
        value, name = max(largest)
        if sound and not options.exact_terms and math.isfinite(value):  # each gradient is, though its norm may not be
            scaled = " with the loss scale" if self.scaler.scale != 1.0 else ""
            return f"the sum of squared gradients in fp32 (largest entry{scaled} {value:.3g}, of {name})"
        ranks = [rank for rank, offender in enumerate(found) if offender is not None]
        if not ranks:
            return f"the gradient of {name}, summed over ranks," if sound else "the loss"
        source = max(ranks, key=lambda rank: (found[rank][:2], -rank))
        limit = f" (--reproducible takes entries up to {options.largest_exact:.3g})" if options.exact_terms else ""
        gradient = f"the gradient of {found[source][2]} on rank {source}{limit}"
        return gradient if sound else f"the loss (and {gradient})"

    def _largest(self) -> tuple[float, str]:
        """The largest entry of the gradients on this rank, once summed, and its parameter; infinite for NaN."""
        found = [(0.0, "")]
        for owned in self.data_parallel.segments:
            if (gradient := owned.gradient) is not None:
                value = float(gradient.abs().max())
                found.append((value if math.isfinite(value) else math.inf, owned.spec.name))
        return max(found)
