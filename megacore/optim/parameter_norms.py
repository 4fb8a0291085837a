"""Sums of squares of whole parameters, however they are divided over ranks: one collective for all of them. Every
element is counted once: a parameter knows whether this rank counts it (`ShardSpec.is_counted_by`), and replicas that
hold the same elements, as on ZeRO stage 0, divide the parameters among themselves. The matrix of every expert counts as
a parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.parallel.collectives import all_gather_objects, all_reduce_job_
from megacore.parallel.mesh import Mesh
from megacore.zero.exact_sums import square_sum_from_units, square_sum_units
from megacore.zero.local_segments import LocalRun, LocalSegment


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """What this rank updates of one parameter, or of the matrix of one expert."""

    row: int  # of the parameter in a table of sums
    in_run: slice  # its elements of the run
    size: int  # elements of the whole parameter
    is_counted: bool  # whether this rank adds its squares


class ParameterNorms:
    """The table of parameters, which all ranks make together. `exact`: sums depend neither on order nor on layout."""

    def __init__(self, segments: Sequence[LocalSegment], mesh: Mesh, *, exact: bool) -> None:
        self._mesh, self._exact = mesh, exact
        keys = {key: None for local in segments for key, _ in _pieces(local)}
        everyone = all_gather_objects(list(keys), mesh.world)
        self._rows = {key: row for row, key in enumerate(sorted({key for of_rank in everyone for key in of_rank}))}
        self.parts_of: dict[LocalRun, list[Part]] = {local.run: [] for local in segments}  # each run's parts
        for local in segments:
            first = local.segment.shard_slice.start - local.run.shard_slice.start
            holders = local.bucket.group if local.bucket.options.stage == 0 else local.bucket.across
            for key, elements in _pieces(local):
                row = self._rows[key]
                part = Part(
                    row=row,
                    in_run=slice(first + elements.start, first + elements.stop),
                    size=math.prod(local.spec.shape[1:] if _is_stack(local) else local.spec.shape),
                    is_counted=row % holders.size == holders.rank and local.spec.is_counted_by(mesh),
                )
                self.parts_of[local.run].append(part)

    def table(self, columns: int) -> Tensor:
        """Zeros to which `add` adds: a row for each parameter."""
        if self._exact:
            units = square_sum_units(torch.zeros(0))
            return units.new_zeros(len(self._rows), columns, len(units), device=self._mesh.device)
        return torch.zeros(len(self._rows), columns, dtype=torch.float64, device=self._mesh.device)

    def add(self, table: Tensor, part: Part, values: Sequence[Tensor]) -> None:
        """Add the squares of one flat tensor per column, each of the part's elements."""
        if not part.is_counted:
            return
        for column, value in enumerate(values):
            square = square_sum_units(value) if self._exact else torch.linalg.vector_norm(value.double()).square()
            table[part.row, column] += square.to(table.device)

    def summed(self, table: Tensor) -> Tensor:
        """The sums of squares over all ranks, fp64 [parameters, columns]; all ranks call this together."""
        if self._mesh.world.size > 1:
            all_reduce_job_(table, self._mesh)
        if not self._exact:
            return table
        return torch.stack([square_sum_from_units(units) for units in table.flatten(0, 1)]).view(table.shape[:2])


def _pieces(local: LocalSegment) -> list[tuple[tuple[str, int], slice]]:
    """The elements of a segment that belong to one parameter, with its name and the number of the expert (otherwise
    0)."""
    spec, segment = local.spec, local.segment
    if not _is_stack(local):
        return [((spec.name, 0), slice(0, segment.stop - segment.start))]
    size = math.prod(spec.local_shape[1:])
    pieces = []
    for expert in range(segment.start // size, -(-segment.stop // size)):
        start, stop = max(segment.start, expert * size), min(segment.stop, (expert + 1) * size)
        key = (spec.name, spec.slices[0][0] + expert)
        pieces.append((key, slice(start - segment.start, stop - segment.start)))
    return pieces


def _is_stack(local: LocalSegment) -> bool:
    """Whether a parameter has the matrices of several experts."""
    return local.spec.replica_role == "expert_replicas" and len(local.spec.shape) == 3
