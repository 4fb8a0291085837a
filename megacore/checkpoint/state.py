"""What a checkpoint holds of a rank: tensors by (kind, global name), each with the slice of the global tensor that
it is.

Kinds are `model` for the fp32 weights and the optimizer's own names for its state (`exp_avg`, `exp_avg_sq`,
`momentum_buffer`). How data-parallel ranks divide them is undone here, and vocabulary padding is left out, so that
nothing written depends on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megacore.optim.bucket import Bucket
from megacore.optim.data_parallel import DataParallel, OwnedSegment
from megacore.parallel.sharding import ShardSpec

MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """A rank's view of the run.

    Attributes:
        step: steps done.
        consumed_samples: the data loader's whole state.
        data_parallel: holds the weights.
        optimizer: holds the state of what this rank owns; None where it owns nothing.
        kinds: names of the optimizer's per-element state, the same on every rank.
        tied_copies: names of parameters that another stage holds and saves.
        counters: further numbers, the same on every rank (updates done, loss scale).
    """

    step: int
    consumed_samples: int
    data_parallel: DataParallel
    optimizer: torch.optim.Optimizer | None
    kinds: tuple[str, ...]
    tied_copies: frozenset[str] = frozenset()
    counters: dict[str, float] = field(default_factory=dict)

    def entries(self) -> Iterator[tuple[str, ShardSpec, Tensor]]:
        """(kind, slice, fp32 tensor without padding) of the stage; all data-parallel ranks go through them together."""
        for bucket in self.data_parallel.buckets:
            specs = {parameter.spec.name: parameter.spec for parameter in bucket.parameters}
            for kind in (MODEL, *self.kinds):
                shard = bucket.master if kind == MODEL else self._optimizer_shard(bucket, kind)
                for name, whole in bucket.whole(shard).items():
                    yield kind, specs[name], specs[name].own(whole)

    def fill(self, read: Callable[[str, ShardSpec], Tensor], kinds: tuple[str, ...], updates: int) -> None:
        """Set everything that this rank owns, and publish the weights.

        Args:
            read: (kind, slice) -> that slice of the global tensor.
            kinds: the optimizer state that there is to read.
            updates: updates that the optimizer has done, which its bias correction counts.
        """
        for parameter in self.data_parallel.parameters:
            for kind in (MODEL, *kinds):
                whole = torch.zeros(parameter.shape)
                parameter.spec.own(whole).copy_(read(kind, parameter.spec))
                for owned in self.data_parallel.segments_of(parameter.spec.name):
                    self._fill_segment(owned, kind, whole.reshape(-1), updates)
        self.data_parallel.publish()

    @torch.no_grad()
    def _fill_segment(self, owned: OwnedSegment, kind: str, whole: Tensor, updates: int) -> None:
        values = whole[owned.segment.start : owned.segment.stop]
        if kind == MODEL:
            owned.master.copy_(values)
            return
        assert self.optimizer is not None
        state = self.optimizer.state[owned.master]
        state[kind] = values.to(owned.master.device, copy=True)
        if isinstance(self.optimizer, torch.optim.AdamW):
            state["step"] = torch.tensor(float(updates), device=owned.master.device)

    def _optimizer_shard(self, bucket: Bucket, kind: str) -> Tensor:
        shard = torch.zeros_like(bucket.master)
        for owned in self.data_parallel.segments:
            if owned.bucket is bucket and self.optimizer is not None:
                state = self.optimizer.state.get(owned.master, {}).get(kind)
                if state is not None:
                    shard[owned.segment.place] = state
        return shard
