"""A user's schedule from a CSV file: one row per rank, one computation per cell, in the order of execution. `0F0` is
the forward of microbatch 0 at stage 0, `2B1` the backward of microbatch 1 at stage 2, or `2I1` and later `2W1` its two
halves; empty cells are skipped. Stages go round the ranks, or down and up again where the first rank holds the last
one. Sends and receives are added, and the schedule is proven, as for the built-in ones. Read without torch."""

from __future__ import annotations

import csv
import re
from functools import lru_cache
from pathlib import Path

from megacore.config import ParallelConfig, ResolvedConfig
from megacore.files import unreadable
from megacore.pipeline.schedule import (
    Action,
    Op,
    Placement,
    Schedule,
    ScheduleError,
    build_schedule,
    placement_of,
    with_transfers,
)
from megacore.pipeline.validation import prove

_CELL = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")


def load_schedule(path: Path) -> Schedule:
    """Read and prove a schedule. Raises ScheduleError where that fails, or a cell is no computation."""
    example = "write one row per rank, such as 0F0,0F1,0B0,0B1"
    try:
        if problem := unreadable(path):
            raise ScheduleError(f"{path} cannot be read as a schedule: it {problem}")
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    except OSError as error:
        raise ScheduleError(f"{path} cannot be read as a schedule: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise ScheduleError(f"{path} cannot be read as a schedule, because it is not a CSV file: {example}") from None
    order = [[_action(cell.strip(), path, rank) for cell in row if cell.strip()] for rank, row in enumerate(rows)]
    if not order:
        raise ScheduleError(f"{path} holds no computation: {example}")
    stages = 1 + max(action.stage for row in order for action in row)
    if stages % len(order):
        raise ScheduleError(
            f"{path} has {stages} stages on {len(order)} ranks: all have as many, so that the number of "
            "stages must be a multiple of the number of rows"
        )
    virtual = stages // len(order)
    is_v = virtual == 2 and len(order) > 1 and any(action.stage == stages - 1 for action in order[0])
    placement = Placement(len(order), virtual, is_v)
    microbatches = 1 + max(action.microbatch for row in order for action in row)
    try:
        for rank, row in enumerate(order):
            if strays := [action for action in row if placement.rank_of(action.stage) != rank]:
                raise ScheduleError(f"rank {rank}: {strays[0]} belongs on rank {placement.rank_of(strays[0].stage)}")
        schedule = with_transfers(path.stem, order, virtual_stages=virtual, microbatches=microbatches, is_v=is_v)
        prove(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    return schedule


def check_schedule(config: ResolvedConfig) -> None:
    """Compare the schedule of `--schedule-csv`, if any, with the run that it is to serve. Raises ScheduleError where it
    cannot be run, or is for other degrees or another number of microbatches."""
    if config.parallel.schedule_csv is None:
        return
    try:
        schedule = load_schedule(Path(config.parallel.schedule_csv))
    except ScheduleError as error:
        raise ScheduleError(f"--schedule-csv {error}") from None
    parallel = config.parallel
    there = (schedule.ranks, schedule.virtual_stages, schedule.microbatches)
    here = (parallel.pp, parallel.virtual_stages, config.microbatches)
    if there != here:
        raise ScheduleError(
            f"--schedule-csv {parallel.schedule_csv} is for --pp {there[0]}, --virtual-stages {there[1]} and "
            f"{there[2]} microbatches per replica, but the run has --pp {here[0]}, --virtual-stages {here[1]} "
            f"and {here[2]}"
        )


def placement(parallel: ParallelConfig) -> Placement:
    """Which pipeline rank holds which stage. Raises ScheduleError as `load_schedule`."""
    if parallel.schedule_csv is not None:
        return load_schedule(Path(parallel.schedule_csv)).placement
    return placement_of(parallel.schedule_name, parallel.pp, parallel.virtual_stages)


_built_schedule = lru_cache(maxsize=4)(build_schedule)  # the launch summary asks for it, and then the runtime


def training_schedule(parallel: ParallelConfig, microbatches: int) -> Schedule:
    """What all ranks of a pipeline do in a training step, as configured. `parallel`: names the schedule, or its file,
    and gives the pipeline's size. `microbatches`: per replica and step."""
    if parallel.schedule_csv is not None:
        return load_schedule(Path(parallel.schedule_csv))
    return _built_schedule(parallel.schedule_name, parallel.pp, microbatches, parallel.virtual_stages)


def _action(cell: str, path: Path, rank: int) -> Action:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"{path}, row {rank + 1}: {cell!r} is no computation: "
            "write stage, one of F, B, I, W, and microbatch, as in 0F3"
        )
    return Action(Op(match[2]), int(match[3]), int(match[1]))
