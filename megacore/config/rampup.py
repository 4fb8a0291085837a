"""The batch-size ramp: a run begins with a small global batch and grows it by equal increments, at equal distances in
samples, as in Megatron-LM. The size follows from the step's number alone, so that a resumed run, on any layout, takes
the same samples."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from megacore.config.dimensions import degree_fields
from megacore.config.fields import LARGEST_INT, Flag, Section
from megacore.config.messages import divisors, multiples
from megacore.config.numbers import parse_int
from megacore.config.problem import Change, Problem
from megacore.config.spelling import flag_and_value


class Ramp(NamedTuple):
    """The numbers of --rampup-batch-size."""

    start: int  # the first global batch size
    increment: int  # by which it grows
    samples: int  # over which it grows to --global-batch-size


@dataclass(frozen=True, kw_only=True)
class RampupConfig(Section):
    """The growth of the global batch size at the start."""

    rampup_batch_size: Annotated[tuple[str, ...], Flag(metavar="START INCREMENT SAMPLES")] = ()
    """Global batches grow from START samples, in equal intervals by INCREMENT, to --global-batch-size after SAMPLES
    samples. START and INCREMENT are multiples of --micro-batch-size x --dp. The learning rate follows the samples."""

    def ramp(self) -> Ramp | None:
        """The ramp; None where there is none, or the value is not three whole numbers of 1 or more."""
        try:
            numbers = [parse_int(word) for word in self.rampup_batch_size]
        except ValueError:
            return None
        return Ramp(*numbers) if len(numbers) == 3 and all(1 <= one <= LARGEST_INT for one in numbers) else None


class BatchSizes:
    """The global batch size of every step of a run. `ramp`: how the run gets there; None: it begins there."""

    def __init__(self, full: int, ramp: Ramp | None = None) -> None:
        self.full = full
        steps, samples = 0, 0
        self._sizes: list[int] = []
        self._first_steps: list[int] = []  # steps before each size
        self._first_samples: list[int] = []  # samples before each size
        increments = 0 if ramp is None else (full - ramp.start) // ramp.increment
        while ramp is not None and samples < ramp.samples:
            level = samples * increments // ramp.samples
            size, end = ramp.start + level * ramp.increment, -(-(level + 1) * ramp.samples // max(increments, 1))
            self._append(size, steps, samples)
            taken = -(-(end - samples) // size)
            steps, samples = steps + taken, samples + taken * size
        self._append(full, steps, samples)

    def _append(self, size: int, steps: int, samples: int) -> None:
        self._sizes.append(size)
        self._first_steps.append(steps)
        self._first_samples.append(samples)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every size, in the order of the run."""
        return tuple(self._sizes)

    def of_step(self, step: int) -> int:
        """The samples of a step, counted from 1."""
        return self._sizes[bisect.bisect_left(self._first_steps, step) - 1]

    def samples(self, steps: int) -> int:
        """The samples of the first `steps` steps."""
        level = max(bisect.bisect_left(self._first_steps, steps) - 1, 0)
        return self._first_samples[level] + (steps - self._first_steps[level]) * self._sizes[level]

    def steps(self, samples: int) -> int:
        """How many steps a number of samples suffices for."""
        level = bisect.bisect_right(self._first_samples, samples) - 1
        return self._first_steps[level] + (samples - self._first_samples[level]) // self._sizes[level]

    def full_steps(self, steps: int) -> float:
        """The first `steps` steps in steps of the full batch size, where the learning rate's schedule is: it follows
        the samples."""
        # A step with half of --global-batch-size advances the learning rate's schedule by half a step.
        return steps if len(self._sizes) == 1 else self.samples(steps) / self.full


def ramp_problems(given: str, ramp: Ramp | None, full: int | None, replica_samples: int, steps: int) -> Iterator[str]:
    """What is wrong with a ramp beside --global-batch-size and the samples of a microbatch on all replicas, in a run of
    some steps. `given`: the flag with its value; `ramp`: None where that cannot be read."""
    unit = max(replica_samples, 1)
    if ramp is None:
        most = full if full is not None and full >= 2 * unit else 2 * unit
        half = Ramp(unit, unit, max(most * steps // 2, 1))
        values = {"rampup_batch_size": tuple(map(str, half))} | ({} if most == full else {"global_batch_size": most})
        words = " ".join(flag_and_value(name, value) for name, value in values.items())
        said = f"{given} must be three whole numbers of 1 or more, START INCREMENT SAMPLES"
        yield Problem(said, Change(words, values), Change("leave it out", {"rampup_batch_size": ()}))
        return
    reached = -(-max(ramp.start + 2 * ramp.increment, 2 * unit) // unit) * unit if full is None else full
    nearest = _nearest(ramp, reached, unit)
    changed = {} if nearest is None else {"rampup_batch_size": tuple(map(str, nearest))}
    way = Change(flag_and_value("rampup_batch_size", nearest), changed) if changed else None
    if full is None:
        values = {"global_batch_size": reached} | ({} if nearest == ramp else changed)
        words = " ".join(flag_and_value(name, value) for name, value in values.items())
        yield Problem(f"{given} needs the batch size that it grows to", Change(words, values))
        return
    if ramp.start > full:
        yield Problem(f"{given} begins above --global-batch-size {full}", way)
    elif (full - ramp.start) % ramp.increment:
        yield Problem(f"{given} does not reach --global-batch-size {full} in increments of {ramp.increment}", way)
    for name, value in (("START", ramp.start), ("INCREMENT", ramp.increment)):
        if replica_samples and value % replica_samples:
            yield Problem(
                f"{given}: {name} {value} must be a multiple of --micro-batch-size x the replicas = {replica_samples}",
                way,
                about=("micro_batch_size", *degree_fields()),
            )


def _nearest(ramp: Ramp, full: int, unit: int) -> Ramp | None:
    """The ramp that is most like another one and grows to a batch size in multiples of a unit; None where there is none
    near."""

    def distance(other: Ramp) -> float:
        return abs(math.log2(other.start / ramp.start)) + abs(math.log2(other.increment / ramp.increment))

    starts = [start for start in multiples(min(ramp.start, full), unit) if start < full and (full - start) % unit == 0]
    found = (
        Ramp(start, unit * increment, ramp.samples)
        for start in starts
        for increment in divisors((full - start) // unit, most=None)
    )
    return min(found, key=distance, default=None)
