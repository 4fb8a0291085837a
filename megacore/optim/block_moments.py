"""Adam's moments in 8 bits: an integer for each element, and an fp32 scale for each block of 256 (Dettmers et al. 2022,
arXiv 2110.02861, quantize optimizer states in blocks; the code here is a power of the integer).

Blocks lie along the flat whole parameter, whatever part of it a rank holds: bucket layouts let shards end on the edges
of blocks, and where tensor parallelism divides a block its ranks agree on the scale, the largest magnitude of all its
parts, in one collective per update for all such blocks. So every layout keeps the same numbers. Checkpoints hold the
values in fp32. To quantize such values again gives the same integers and scales: the largest of a block is exactly its
scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.config.optimizers import BLOCK, PART, StateKind
from megacore.optim.moments import KeptMoments, Moments, Part, global_indices, local_shape
from megacore.parallel.collectives import all_gather_objects, all_reduce_job_
from megacore.parallel.mesh import Mesh
from megacore.zero.local_segments import LocalRun, LocalSegment

SCALES = " scales"
"""What follows the name of a kind in the name of its scales."""
_MEAN_STEPS, _SQUARE_STEPS = 127, 255


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pieces:
    """The blocks of a segment, as far as it has them; padding counts as one more block."""

    numbers: Tensor  # of the blocks in the whole parameter, ascending, [pieces] int64
    lengths: Tensor  # elements of each in the segment, [pieces] int64
    offsets: Tensor  # of the first element of each in the segment, [pieces + 1] int64
    divided: Tensor  # which pieces are not their whole block, [pieces] bool
    first: int  # of its pieces among those of the run


@dataclass(frozen=True, kw_only=True, eq=False)
class _Waiting:
    """Values of divided blocks whose scales other ranks must agree on."""

    run: LocalRun  # that they are of
    column: int  # 0 for the mean, 1 for the square
    values: Tensor  # [n] fp32
    at: Tensor  # their positions in the run, [n] int64
    lengths: Tensor  # of their pieces, [pieces] int64
    pieces: Tensor  # numbers of these in the run
    rows: Tensor  # of their blocks in the table of scales


class BlockMoments(KeptMoments):
    """Moments as integers and scales; all ranks make it together, because they agree on divided blocks. For each run
    the state has, under the name of a kind, the integers of its elements, [n] int8 (mean) or uint8 (square), and under
    that name with `SCALES` a scale for each block that the run has a part of, [pieces] fp32. `kinds`: of the mean and
    of the square. `state`: of the optimizer, where integers and scales are kept."""

    def __init__(
        self,
        segments: Sequence[LocalSegment],
        kinds: tuple[StateKind, ...],
        state: Mapping[LocalRun, dict[str, Tensor]],
        *,
        mesh: Mesh,
    ) -> None:
        self._mesh = mesh
        self._pieces: dict[LocalSegment, _Pieces] = {}
        self._count: dict[LocalRun, int] = {}
        for local in segments:
            first = self._count.get(local.run, 0)
            self._pieces[local] = _pieces_of(local, first)
            self._count[local.run] = first + len(self._pieces[local].lengths)
        super().__init__(segments, kinds, state)
        self._rows = self._rows_of(segments)
        self._waiting: list[_Waiting] = []

    def _rows_of(self, segments: Sequence[LocalSegment]) -> dict[str, tuple[Tensor, int]]:
        """The divided blocks of each parameter, of all ranks, and their first row in the table."""
        mine: dict[str, Tensor] = {}
        for local in segments:
            pieces = self._pieces[local]
            divided = pieces.numbers[pieces.divided]
            mine[local.spec.name] = torch.cat([mine.get(local.spec.name, divided[:0]), divided])
        everyone = all_gather_objects({name: ids.numpy() for name, ids in mine.items() if len(ids)}, self._mesh.world)
        rows, used = {}, 0
        for name in sorted({name for of_rank in everyone for name in of_rank}):
            blocks = torch.cat([torch.from_numpy(of_rank[name]) for of_rank in everyone if name in of_rank]).unique()
            rows[name] = (blocks, used)
            used += len(blocks)
        self._table_size = used
        return rows

    @property
    def waits(self) -> bool:
        return self._table_size > 0

    def elements_of_parts(self, local: LocalSegment) -> list[slice]:
        offsets = self._pieces[local].offsets
        ends, size, found, start = offsets[1:], int(offsets[-1]), list[slice](), 0
        while start < size:
            following = int(torch.searchsorted(ends, start, right=True))
            last = int(torch.searchsorted(ends, start + PART, right=True)) - 1
            stop = int(ends[max(following, last)])
            found.append(slice(start, stop))
            start = stop
        return found

    def read(self, part: Part) -> Moments:
        return Moments(self._read(part, 0), self._read(part, 1))

    def write(self, part: Part, moments: Moments, step: Tensor) -> None:
        for column, values in enumerate(moments):
            self._write(part, column, values)

    def values(self, local: LocalSegment, column: int) -> Tensor | None:
        if self.kinds[column].name not in self.state[local.run]:
            return None
        return torch.cat([self._read(part, column) for part in self.parts[local.run] if part.local is local])

    def set_values(self, local: LocalSegment, column: int, values: Tensor) -> None:
        for part in self.parts[local.run]:
            if part.local is local:
                self._write(part, column, values[part.in_segment].to(local.run.master.device))

    def settle(self) -> None:
        if not self.waits:
            return
        table = torch.zeros(self._table_size, 2, device=self._mesh.device)
        for each in self._waiting:
            scales = self._scales(each.run, each.column)[each.pieces].to(table.device)
            table[:, each.column].scatter_reduce_(0, each.rows, scales.nan_to_num_(nan=torch.inf), "amax")
        all_reduce_job_(table, self._mesh, "max")
        for each in self._waiting:
            scales = table[each.rows, each.column].to(each.pieces.device)
            self._scales(each.run, each.column)[each.pieces] = scales
            of_elements = scales.repeat_interleave(each.lengths, output_size=len(each.values))
            self._codes(each.run, each.column)[each.at] = _ENCODERS[each.column](each.values, of_elements)
        self._waiting.clear()

    def _read(self, part: Part, column: int) -> Tensor:
        run, pieces, numbers = part.local.run, self._pieces[part.local], self._numbers(part)
        scales = self._scales(run, column)[_shifted(numbers, pieces.first)]
        codes = self._codes(run, column)[part.in_run]
        lengths = pieces.lengths[numbers].to(codes.device)
        return _DECODERS[column](codes, scales.repeat_interleave(lengths, output_size=len(codes)))

    def _write(self, part: Part, column: int, values: Tensor) -> None:
        """Quantize values of a part; those of divided blocks once more when their scales are known."""
        run, pieces, numbers = part.local.run, self._pieces[part.local], self._numbers(part)
        lengths = pieces.lengths[numbers].to(values.device)
        scales = torch.segment_reduce(values.abs(), "max", lengths=lengths, unsafe=True)
        self._scales(run, column)[_shifted(numbers, pieces.first)] = scales
        of_elements = scales.repeat_interleave(lengths, output_size=len(values))
        self._codes(run, column)[part.in_run] = _ENCODERS[column](values, of_elements)
        divided = pieces.divided[numbers].nonzero().view(-1)
        if not len(divided):
            return
        at = pieces.divided[numbers].repeat_interleave(pieces.lengths[numbers]).nonzero().view(-1).to(values.device)
        blocks, first = self._rows[part.local.spec.name]
        self._waiting.append(
            _Waiting(
                run=run,
                column=column,
                values=values[at],
                at=at + part.in_run.start,
                lengths=lengths[divided.to(values.device)],
                pieces=(divided + numbers.start + pieces.first).to(values.device),
                rows=(torch.searchsorted(blocks, pieces.numbers[numbers][divided]) + first).to(self._mesh.device),
            )
        )

    def _numbers(self, part: Part) -> slice:
        """Which pieces of its segment a part has."""
        offsets, elements = self._pieces[part.local].offsets, part.in_segment
        first, last = torch.searchsorted(offsets, torch.tensor([elements.start, elements.stop])).tolist()
        return slice(first, last)

    def _codes(self, run: LocalRun, column: int) -> Tensor:
        name = self.kinds[column].name
        if name not in self.state[run]:
            self.state[run][name] = torch.zeros_like(run.master, dtype=(torch.int8, torch.uint8)[column])
        return self.state[run][name]

    def _scales(self, run: LocalRun, column: int) -> Tensor:
        name = self.kinds[column].name + SCALES
        if name not in self.state[run]:
            self.state[run][name] = torch.zeros(self._count[run], device=run.master.device)
        return self.state[run][name]


def encoded_mean(values: Tensor, scales: Tensor) -> Tensor:
    """The integers from -127 to 127 nearest to 127 sign(x) sqrt(|x| / scale), [n] int8. `values`: [n] fp32, of
    magnitude at most their scale. `scales`: [n] fp32, of the elements; 0 where all values of the block are 0."""
    ratios = values.abs() / scales.where(scales > 0, 1.0)
    return ratios.sqrt_().mul_(_MEAN_STEPS).round_().copysign_(values).to(torch.int8)


def decoded_mean(codes: Tensor, scales: Tensor) -> Tensor:
    """scale x sign(c) (c / 127)^2, [n] fp32: finer near zero. `codes`: [n] int8. `scales`: [n] fp32, of the
    elements."""
    roots = codes.float().div_(_MEAN_STEPS)
    return roots.mul_(roots.abs()).mul_(scales)


def encoded_square(values: Tensor, scales: Tensor) -> Tensor:
    """The integers from 0 to 255 nearest to 255 (x / scale)^(1/4), [n] uint8; 0 only for 0, because the step is divided
    by the root of the value. `values`: [n] fp32, from 0 to their scale. `scales`: [n] fp32, of the elements; 0 where
    all values of the block are 0."""
    ratios = values / scales.where(scales > 0, 1.0)
    codes = ratios.sqrt_().sqrt_().mul_(_SQUARE_STEPS).round_()
    return codes.clamp_(min=1).mul_(values > 0).to(torch.uint8)


def decoded_square(codes: Tensor, scales: Tensor) -> Tensor:
    """scale x (c / 255)^4, [n] fp32. `codes`: [n] uint8. `scales`: [n] fp32, of the elements."""
    roots = codes.float().div_(_SQUARE_STEPS)
    return roots.square_().square_().mul_(scales)


_ENCODERS, _DECODERS = (encoded_mean, encoded_square), (decoded_mean, decoded_square)


def _shifted(numbers: slice, by: int) -> slice:
    return slice(numbers.start + by, numbers.stop + by)


def _pieces_of(local: LocalSegment, first: int) -> _Pieces:
    spec, shape, segment = local.spec, local_shape(local), local.segment
    size = math.prod(spec.shape)
    blocks = -(-size // BLOCK)
    cpu, found = torch.device("cpu"), list[tuple[Tensor, Tensor]]()
    for start in range(segment.start, segment.stop, PART):
        index = global_indices(spec, shape, start, min(start + PART, segment.stop), cpu)
        numbers = torch.where(index < size, index // BLOCK, blocks)
        found.append(torch.unique_consecutive(numbers, return_counts=True))
    numbers, inverse = torch.unique_consecutive(torch.cat([ids for ids, _ in found]), return_inverse=True)
    lengths = torch.zeros_like(numbers).scatter_add_(0, inverse, torch.cat([counts for _, counts in found]))
    whole = torch.where(numbers == blocks, 0, (size - numbers * BLOCK).clamp(max=BLOCK))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return _Pieces(numbers=numbers, lengths=lengths, offsets=offsets, divided=lengths < whole, first=first)
