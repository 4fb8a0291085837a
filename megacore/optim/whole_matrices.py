"""A function of whole matrices whose parts several ranks hold, each matrix computed on one rank.

Two divisions of the work come together. Replicas on ZeRO stage 0 hold the same matrices: each computes its share, and
they share the results; on the other stages a shard has whole matrices, which nobody else updates. The ranks of a layer
group hold slices of the same matrices: as many matrices as there are ranks travel at a time, each to the rank that
joins its slices, and its result back. No rank has more than one joined matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.parallel.collectives import RowsExchanged, all_gather_objects, start_all_gather
from megacore.parallel.mesh import Group, Mesh
from megacore.parallel.sharding import Slices
from megacore.zero.bucket import Bucket
from megacore.zero.layout import FlatLayout
from megacore.zero.local_segments import LocalSegment

Function = Callable[[str, Tensor], Tensor]
"""A matrix of the same shape, from the global name of a parameter and its whole value."""


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """A matrix whose slices the ranks of a group hold."""

    group: Group  # of one rank, if this rank has all of it
    slices: tuple[Slices, ...]  # of the ranks, in group order

    def sizes(self, rank: int) -> tuple[int, ...]:
        """Of a rank's slice."""
        return tuple(stop - start for start, stop in self.slices[rank])

    def elements(self, rank: int) -> int:
        return int(torch.Size(self.sizes(rank)).numel())

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return tuple(
            max(stop for _, stop in ranges) - min(start for start, _ in ranges)
            for ranges in zip(*self.slices, strict=True)
        )

    def view(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's slice of the whole."""
        first = [min(start for start, _ in ranges) for ranges in zip(*self.slices, strict=True)]
        ranges = zip(self.slices[rank], first, strict=True)
        return whole[tuple(slice(start - base, stop - base) for (start, stop), base in ranges)]


class WholeMatrices:
    """The matrices that this rank updates whole; all ranks make it together. `segments`: whole parameters of local
    tensors."""

    def __init__(self, segments: Sequence[LocalSegment], mesh: Mesh) -> None:
        self._device, self._mesh = mesh.device, mesh
        self._matrices: dict[str, _Matrix] = {}
        self._layouts: dict[tuple[str, ...], FlatLayout] = {}
        self._busy: dict[tuple[int, ...], list[float]] = {}  # work of the ranks of a replica group in the layouts
        for role, group in (("replicas", mesh.layer), ("expert_replicas", mesh.expert_layer)):
            held = {local.spec.name: local.spec for local in segments if local.spec.replica_role == role}
            cut = {name: spec.slices for name, spec in held.items() if not spec.is_replicated}
            everyone = all_gather_objects(cut, group)
            assert all(list(of_rank) == list(cut) for of_rank in everyone), (
                "ranks of a layer group update other matrices"
            )
            for name, spec in held.items():
                slices = tuple(of_rank[name] for of_rank in everyone) if name in cut else (spec.slices,)
                self._matrices[name] = _Matrix(group=group if name in cut else Group(), slices=slices)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the matrix whose slices the layer group holds; of several experts, those of this rank."""
        return self._matrices[name].shape

    def at_once(self, bucket: Bucket) -> int | None:
        """How many slices of a bucket must be given together; None: all. Fewer take more exchanges, more take more
        memory."""
        if bucket.options.stage == 0 and bucket.group.size > 1:
            return None
        is_expert = bucket.parameters[0].spec.replica_role == "expert_replicas"
        return (self._mesh.expert_layer if is_expert else self._mesh.layer).size

    def apply(self, bucket: Bucket, slices: Mapping[str, Tensor], function: Function) -> dict[str, Tensor]:
        """This rank's slices of the function's results; the ranks of the layer group call this together, and on stage 0
        those of the replica group. `slices`: by name, of the shape of the local parameter, and of one dtype. They are
        on any device. `function`: of one whole matrix."""
        if bucket.options.stage > 0 or bucket.group.size == 1:
            return self._joined(slices, function)
        layout = self._layout(bucket, tuple(slices))
        dtype = next(iter(slices.values())).dtype
        whole = torch.zeros(layout.size, dtype=dtype, device=self._device)
        own = [segment.name for segment in layout.segments(bucket.group.rank)]
        for name, result in self._joined({name: slices[name] for name in own}, function).items():
            whole[layout.slice_of(name)] = result.reshape(-1)
        first = bucket.group.rank * layout.shard_size
        start_all_gather(whole, whole[first : first + layout.shard_size], bucket.group).wait()
        return {name: whole[layout.slice_of(name)].view(part.shape) for name, part in slices.items()}

    def _layout(self, bucket: Bucket, names: tuple[str, ...]) -> FlatLayout:
        """Which replica computes which matrices: shares of similar size."""
        if names not in self._layouts:
            members = [parameter for parameter in bucket.parameters if parameter.spec.name in names]
            work_of, ranks = bucket.options.optimizer.work_of, bucket.group.ranks
            works = {parameter.spec.name: work_of(parameter.spec.shape) for parameter in members}
            layout = FlatLayout(members, len(ranks), works, busy=self._busy.get(ranks, ()))
            self._layouts[names], self._busy[ranks] = layout, layout.busy
        return self._layouts[names]

    def _joined(self, slices: Mapping[str, Tensor], function: Function) -> dict[str, Tensor]:
        results: dict[str, Tensor] = {}
        cut: dict[tuple[int, ...], list[str]] = {}
        for name, part in slices.items():
            group = self._matrices[name].group
            if group.size == 1:
                results[name] = function(name, part.to(self._device))
            else:
                cut.setdefault(group.ranks, []).append(name)
        for names in cut.values():
            group = self._matrices[names[0]].group
            for first in range(0, len(names), group.size):
                results |= self.exchanged(names[first : first + group.size], slices, group, function)
        return results

    def exchanged(
        self, names: Sequence[str], slices: Mapping[str, Tensor], group: Group, function: Function
    ) -> dict[str, Tensor]:
        """Results of at most as many matrices as the group has ranks: rank i computes that of the i-th."""
        rank, ranks, matrices = group.rank, range(group.size), [self._matrices[name] for name in names]
        to_each = [matrices[i].elements(rank) if i < len(names) else 0 for i in ranks]
        from_each = [matrices[rank].elements(i) if rank < len(names) else 0 for i in ranks]
        sent = [slices[name].to(self._device).reshape(-1) for name in names]
        answer = RowsExchanged(torch.cat(sent), to_each, from_each, group).wait()
        if rank < len(names):
            matrix = matrices[rank]
            whole = answer.new_empty(matrix.shape)
            for i, part in enumerate(answer.split(from_each)):
                matrix.view(whole, i).copy_(part.view(matrix.sizes(i)))
            del sent, part, answer  # the function needs memory
            result = function(names[rank], whole)
            answer = torch.cat([matrix.view(result, i).reshape(-1) for i in ranks])
            del whole, result
        returned = RowsExchanged(answer, from_each, to_each, group).wait()
        parts = returned.split(to_each[: len(names)])
        return {name: part.view(slices[name].shape) for name, part in zip(names, parts, strict=True)}
