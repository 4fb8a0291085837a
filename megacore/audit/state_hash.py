"""A 64-bit hash of global tensors, of which each rank adds up what it holds: equal on every layout.

A tensor is read as integers x of its element size. Its hash is the sum of x[i, j, ...] * a[i] * b[j] * ... modulo 2^64,
with fixed random odd factors for the indices of each dimension (as observe/bit_hash.py has them for flat tensors), and
a factor for the tensor's name. The sum of integers depends neither on the order nor on who adds which part, so that
slices of any layout, and shards of slices, give the same number. Odd factors have inverses: a single changed bit always
shows, and other differences go unnoticed with a probability of at most 2^-26 (bit_hash.py says when).

It finds accidents. Whoever wants to can make two tensors with one hash; against that the ledger has the SHA-256 of the
manifest of each checkpoint.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from megacore.checkpoint.load import Reader
from megacore.checkpoint.state import BUFFERS, WEIGHTS, spec_of_state
from megacore.config.optimizers import StateKind
from megacore.data import Batch
from megacore.observe.bit_hash import odd_numbers
from megacore.parallel.collectives import all_gather_objects, all_reduce_job_
from megacore.parallel.heartbeat import Phase, section
from megacore.parallel.mesh import Mesh
from megacore.parallel.random import stable_hash
from megacore.parallel.sharding import ShardSpec, Slices, split_evenly
from megacore.train.step import TrainStep
from megacore.zero.local_segments import LocalSegment

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements in one operator: the products of a processor's stay in its cache, and a device's are many enough to fill it.
_ON_CPU, _ON_DEVICE = 1 << 17, 1 << 22
SHORT = 4  # digits
_READ = 1 << 24  # elements of a checkpoint's tensor in memory at a time

_SAMPLES = 1 << 16  # numbers of samples are counted modulo this, for which there are factors

TensorName = tuple[str, str]
"""The kind (`model`, `exp_avg`, ...) and the global name."""
Hashes = dict[str, dict[str, str]]
"""The hash of each tensor in hexadecimal, by kind and global name."""


class Part(NamedTuple):
    """Consecutive elements of a local tensor."""

    values: Tensor
    start: int  # the first of them, in the flattened local tensor
    shape: Sequence[int]  # of the local tensor, padding at the end of dimensions included
    slices: Slices  # of the global tensor that it holds


@torch.no_grad()
def part_hash(part: Part) -> Tensor:
    """What the part adds to the hash of its tensor, an int64 scalar on its device."""
    elements = _integers(part.values.detach()).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=elements.device)
    shape, slices = (tuple(part.shape), part.slices) if part.shape else ((1,), ((0, 1),))
    if not elements.numel():
        return total
    of_rows, columns = _factors(shape, slices, elements.device)
    row, column = divmod(part.start, shape[-1])
    if column:  # it begins within a row
        rest = elements[: shape[-1] - column]
        total += (rest * columns[column : column + len(rest)]).sum() * of_rows[row]
        elements, row = elements[len(rest) :], row + 1
    full = len(elements) // shape[-1]
    rows = elements[: full * shape[-1]].view(full, shape[-1])
    step = max(1, (_ON_CPU if elements.device.type == "cpu" else _ON_DEVICE) // shape[-1])
    for first in range(0, full, step):
        sums = (rows[first : first + step] * columns).sum(1)
        total += (sums * of_rows[row + first : row + first + len(sums)]).sum()
    if len(rest := elements[full * shape[-1] :]):
        total += (rest * columns[: len(rest)]).sum() * of_rows[row + full]
    return total


class Element(NamedTuple):
    """One that explains by itself why a tensor has another hash."""

    place: tuple[int, ...]  # its indices in the global tensor
    here: float
    there: float


@torch.no_grad()
def elements_that_explain(part: Part, difference: int) -> list[Element]:
    """Elements of a part of which one alone, with another value, changes the hash of its tensor by `difference`. Of a
    difference in several elements there is none, but for one chance in 2^31 an element."""
    if not part.values.numel():
        return []
    bits = _integers(part.values.detach()).reshape(-1).cpu()
    shape, slices = (tuple(part.shape), part.slices) if part.shape else ((1,), ((0, 1),))
    of_rows, columns = _factors(shape, slices, bits.device)
    places = torch.arange(part.start, part.start + len(bits))
    factors = of_rows[places // shape[-1]] * columns[places % shape[-1]]  # 0 where it is padding
    inverse = factors.clone()
    for _ in range(5):  # Newton's iteration modulo 2^64: an odd number is its own inverse modulo 8
        inverse *= 2 - factors * inverse
    changes = inverse * (difference - (1 << 64) if difference >> 63 else difference)
    others = bits.long() + changes
    range_ = torch.iinfo(bits.dtype)
    found = (factors != 0) & (changes != 0) & (others >= range_.min) & (others <= range_.max)
    found &= changes.abs() < 1 << 8 * bits.element_size()  # no overflow
    elements = []
    for place in found.nonzero().flatten().tolist():
        local = torch.unravel_index(places[place], shape)
        index = tuple(int(i) + first for i, (first, _) in zip(local, slices, strict=True))
        there = others[place].to(bits.dtype).view(part.values.dtype)
        elements.append(Element(index[: len(part.shape)], float(part.values.reshape(-1)[place]), float(there)))
    return elements


def _integers(tensor: Tensor) -> Tensor:
    """The bits of each element."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


@functools.lru_cache(maxsize=256)
def _factors(shape: tuple[int, ...], slices: Slices, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the rows and of the columns of a local tensor as a matrix; 0 where it is padding."""
    each = []
    for number, (size, (start, stop)) in enumerate(zip(reversed(shape), reversed(slices), strict=True)):
        factors = torch.zeros(size, dtype=torch.int64, device=device)
        factors[: stop - start] = odd_numbers(number + 2, max(stop, 1), device)[start:stop]
        each.append(factors)
    columns, *leading = each
    rows = torch.ones(1, dtype=torch.int64, device=device)
    for factors in leading:  # the dimension before the columns first
        rows = (factors[:, None] * rows).view(-1)
    return rows, columns


def name_factor(*name: str | int) -> int:
    """An odd number that depends on a name, in the range of int64."""
    factor = stable_hash(*name) | 1
    return factor - (1 << 64) if factor >= 1 << 63 else factor


@torch.no_grad()
def batch_hash(microbatches: Iterable[Batch]) -> Tensor:
    """What microbatches add to the hash of a step's samples, by their numbers in the run; int64, on their device."""
    sums = []
    for microbatch in microbatches:
        for name in (field.name for field in fields(microbatch) if field.name != "index"):
            values = _integers(getattr(microbatch, name))
            rows = values.view(len(values), -1)  # a sample each
            first = microbatch.index * len(rows) % _SAMPLES
            columns, of_rows = (
                odd_numbers(n, size, rows.device) for n, size in ((2, rows.shape[1]), (3, 2 * _SAMPLES))
            )
            of_samples = (rows * columns[: rows.shape[1]]).sum(1)
            total = (of_samples * of_rows[first : first + len(rows)]).sum()
            sums.append(total * name_factor("samples", name))
    return torch.stack(sums).sum()


class StateHash:
    """The hashes of weights, optimizer state and buffers; all ranks call each method together."""

    def __init__(self, steps: TrainStep, mesh: Mesh) -> None:
        self._steps, self._mesh = steps, mesh
        shapes = {p.spec.name: tuple(p.shape) for p in steps.model.data_parallel.parameters}
        self._shapes: dict[str, tuple[int, ...]] = shapes
        own = [name for name, _ in self._parts()]
        everyone = all_gather_objects(sorted(set(own)), mesh.world)
        # Of all tensors of the model, the same on every rank.
        self.names: list[TensorName] = sorted({name for names in everyone for name in names})
        places = {name: place for place, name in enumerate(self.names)}
        self._places = torch.tensor([places[name] for name in own], dtype=torch.int64, device=mesh.device)

    @torch.no_grad()
    @section(Phase.CHECK)
    def sums(self, *further: Tensor) -> Tensor:
        """The hash of each of `names`, and this rank's further terms; int64, on the device, summed over all ranks."""
        zero = torch.zeros((), dtype=torch.int64, device=self._mesh.device)
        terms = [zero if part is None else part_hash(part).to(zero.device) for _, part in self._parts()]
        total = zero.new_zeros(len(self.names))
        if terms:
            total.index_add_(0, self._places, torch.stack(terms))
        return all_reduce_job_(torch.cat([total, *(term.reshape(1) for term in further)]), self._mesh)

    def hashes(self, sums: Tensor | None = None) -> Hashes:
        """Of the tensors, from `sums` that are in host memory already, or as they are now."""
        found: Hashes = {}
        for (kind, name), value in zip(self.names, (self.sums() if sums is None else sums).tolist(), strict=False):
            found.setdefault(kind, {})[name] = in_hex(value)
        return found

    def elements_that_explain(self, name: TensorName, difference: int) -> list[Element]:
        """Elements that this rank counts, as the function of this name."""
        parts = [part for of, part in self._parts() if of == name and part is not None]
        return [element for part in parts for element in elements_that_explain(part, difference)]

    def _parts(self) -> Iterator[tuple[TensorName, Part | None]]:
        """What this rank counts; None of state before its first update, whose values are zero."""
        steps, mesh = self._steps, self._mesh
        optimizer = steps.update.optimizer
        for local in steps.model.data_parallel.segments:
            holders = local.bucket.group if local.bucket.options.stage == 0 else local.bucket.across
            for kind in (WEIGHTS, *optimizer.kinds):
                spec = spec_of_state(kind, local.spec)
                if not kind.exists(whole=local.run.shape is not None) or not spec.is_counted_by(mesh):
                    continue
                values, name = self._values(local, kind), (kind.name, spec.name)
                if values is None:
                    yield name, None
                    continue
                # Each of those who hold the same counts its share.
                first, last = split_evenly(values.numel(), holders.rank, holders.size)
                is_element = kind.per == "element"
                start = first + (local.segment.start if is_element else 0)
                shape = self._shapes[spec.name] if is_element else spec.shape
                yield name, Part(values[first:last], start, shape, spec.slices)
        for hook in steps.hooks:
            for of_hook, buffer in hook.buffers().items():
                spec = ShardSpec(name=of_hook, shape=tuple(buffer.shape))
                if spec.is_counted_by(mesh) and mesh.replicas.is_first:
                    yield (BUFFERS, of_hook), Part(buffer.reshape(-1), 0, spec.shape, spec.slices)

    def _values(self, local: LocalSegment, kind: StateKind) -> Tensor | None:
        """As a checkpoint has them."""
        state = local.master if kind is WEIGHTS else self._steps.update.optimizer.values(local, kind.name)
        if state is None:
            return local.master if kind.first == "weights" else None
        return state.to(getattr(torch, kind.dtype))


def stored_hash(reader: Reader, kind: str, name: str, shape: Sequence[int]) -> str:
    """The hash of a tensor of a checkpoint, some of its rows in memory at a time."""
    total, rows = 0, max(1, _READ // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0] if shape else 1, rows):
        slices = ((first, min(first + rows, shape[0])), *((0, size) for size in shape[1:])) if shape else ()
        values = reader.read(kind, name, slices)
        total += int(part_hash(Part(values, 0, values.shape, slices)))
    return in_hex(total)


def totals(hashes: Hashes) -> dict[str, str]:
    """One hash for each kind of tensor."""
    return {
        kind: in_hex(sum(int(text, 16) * name_factor(kind, name) for name, text in of_kind.items()))
        for kind, of_kind in hashes.items()
    }


def shortened(hashes: Hashes) -> str:
    """The first digits of the hash of each tensor, which tell which ones differ where a total does: a changed bit of an
    element changes no lower bits."""
    return "".join(text[:SHORT] for of_kind in hashes.values() for text in of_kind.values())


def in_hex(value: int) -> str:
    """A number modulo 2^64, 16 digits."""
    return f"{value % (1 << 64):016x}"
