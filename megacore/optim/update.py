"""One update of the weights: from reduced gradients to published parameters, or to the decision to skip.

The decision is the same on every rank, because every rank looks at the same number: the global norm, into which a
loss or a gradient that is not finite anywhere has found its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.config import Config
from megacore.errors import TrainingStopped
from megacore.optim.clip import clip_factor, scale_gradients, totals
from megacore.optim.data_parallel import DataParallel
from megacore.optim.offload import step_on_host
from megacore.optim.optimizers import build_optimizer, update
from megacore.optim.precision import LossScaler
from megacore.parallel.collectives import all_gather_objects, all_reduce_
from megacore.parallel.mesh import Group, Mesh


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a step.

    Attributes:
        loss: summed over the global batch, fp64, equal on every rank; a scalar or several sums.
        norm: global gradient norm before clipping, without the loss scale; likewise.
        skipped: why the weights were left as they are, or None.
    """

    loss: Tensor
    norm: Tensor
    skipped: str | None = None


class WeightUpdate:
    """The optimizer over what this rank owns, and what guards it.

    Args:
        data_parallel: holds gradients and master weights.
        mesh: this rank's place.
        config: resolved.
        shared: global names of tied parameters, and the groups over which their gradients are summed.
        tied_copies: those of them that are counted on another rank.
    """

    def __init__(
        self,
        data_parallel: DataParallel,
        mesh: Mesh,
        config: Config,
        *,
        shared: Mapping[str, Group],
        tied_copies: Iterable[str],
    ) -> None:
        self.data_parallel, self.mesh = data_parallel, mesh
        self.optimizer = build_optimizer(data_parallel.segments, config.optimizer)
        self.scaler = LossScaler(config.precision)
        self.updates = 0
        self.skipped_steps = 0
        self._bad_steps, self._max_bad_steps = 0, config.training.max_bad_steps
        self._sequence_parallel = config.parallel.sequence_parallel
        self._clip = config.optimizer.clip_grad
        self._shared, self._tied_copies = dict(sorted(shared.items())), frozenset(tied_copies)

    @torch.no_grad()
    def apply(self, loss: Tensor, rate: float) -> Outcome:
        """Update the weights from the step's gradients and publish them, or skip the step on all ranks.

        Args:
            loss: this rank's share of the summed loss.
            rate: the learning rate.

        Raises:
            TrainingStopped: too many steps in a row were not finite, or the fp16 loss scale is at its minimum.
        """
        data_parallel = self.data_parallel
        data_parallel.finish()
        if self._sequence_parallel:
            self._sum_over_positions()
        for name, group in self._shared.items():
            self._sum_copies(name, group)
        data_parallel.settle()
        exact = data_parallel.options.exact_terms > 0
        scale = 1.0 if exact else self.scaler.scale  # that the gradients still carry
        total = totals(
            data_parallel.segments,
            self.mesh,
            sharded=data_parallel.options.stage > 0,
            tied_copies=self._tied_copies,
            loss=loss,
            overflow=data_parallel.overflow(),
            exact=exact,
        )
        norm = total.norm / scale
        if not torch.isfinite(norm):
            return Outcome(loss=total.loss, norm=norm, skipped=self._skip())
        factor = clip_factor(norm, self._clip) / scale
        if data_parallel.options.offload:
            step_on_host(data_parallel, self.optimizer, factor=factor, rate=rate)
        else:
            self._step_in_place(factor, rate)
        self.scaler.good_step()
        self.updates, self._bad_steps = self.updates + 1, 0
        return Outcome(loss=total.loss, norm=norm)

    def _step_in_place(self, factor: Tensor, rate: float) -> None:
        segments = self.data_parallel.segments
        gradients = [None if owned.gradient is None else owned.gradient.float() for owned in segments]
        scale_gradients([gradient for gradient in gradients if gradient is not None], factor)
        if self.optimizer is not None:
            update(self.optimizer, segments, gradients, rate)
        self.data_parallel.publish()

    def counters(self) -> dict[str, float]:
        """What a resumed run needs besides the tensors."""
        return {"updates": self.updates, "skipped_steps": self.skipped_steps, **self.scaler.state()}

    def load_counters(self, counters: dict[str, float]) -> None:
        """Continue counting where a checkpoint was made."""
        self.updates = int(counters.get("updates", 0))
        self.skipped_steps = int(counters.get("skipped_steps", 0))
        self.scaler.load_state(counters)

    def _sum_over_positions(self) -> None:
        """Parameters that tensor-parallel ranks hold whole saw only their own positions: sum, in one message."""
        whole = (owned for owned in self.data_parallel.segments if owned.spec.dim is None)
        gradients = [gradient for owned in whole if (gradient := owned.gradient) is not None]
        if gradients:
            flat = all_reduce_(torch.cat(gradients), self.mesh.tp)
            torch._foreach_copy_(gradients, list(flat.split([gradient.numel() for gradient in gradients])))

    def _sum_copies(self, name: str, group: Group) -> None:
        for owned in self.data_parallel.segments_of(name):
            gradient = owned.gradient
            assert gradient is not None
            all_reduce_(gradient, group)

    def _skip(self) -> str:
        """Account for a step that is not finite; returns what happened."""
        self.skipped_steps += 1
        where = self._source()
        if self.scaler.dynamic:
            before = self.scaler.scale
            self.scaler.overflow()
            return f"{where} overflowed; loss scale {before:g} -> {self.scaler.scale:g}"
        self._bad_steps += 1
        if self._bad_steps >= self._max_bad_steps:
            scale = f" a smaller --loss-scale than {self.scaler.scale:g}," if self.scaler.scale != 1.0 else ""
            raise TrainingStopped(
                f"{where} was not finite for {self._bad_steps} step(s) in a row "
                f"(--max-bad-steps {self._max_bad_steps}): look at the data of these steps, "
                f"or use{scale} a smaller --lr, a longer warm-up or --clip-grad"
            )
        return f"{where} is not finite"

    def _source(self) -> str:
        """Where what is not finite came from: of all ranks' offenders the one nearest to the loss."""
        mine = self.data_parallel.offender(self._shared)
        stage = 0 if mine is None else mine.chunk * self.mesh.pp.size + self.mesh.pp.rank
        found = all_gather_objects(None if mine is None else (stage, mine.place, mine.name), self.mesh.world)
        ranks = [rank for rank, offender in enumerate(found) if offender is not None]
        if not ranks:
            return "the loss"
        source = max(ranks, key=lambda rank: (found[rank][:2], -rank))
        options = self.data_parallel.options
        limit = f" (--reproducible takes entries up to {options.largest_exact:.3g})" if options.exact_terms else ""
        return f"the gradient of {found[source][2]} on rank {source}{limit}"
