"""`--dry-run=full` in words: what every kind of rank holds, counted beside the planner's formulas, or why it fails."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from megacore.config import ResolvedConfig
from megacore.config.dimensions import coordinates_of, describe_degrees, describe_rank, pipeline_dimension
from megacore.config.messages import counted
from megacore.errors import UserError
from megacore.parallel.processors import available_cores
from megacore.plan.memory import plan_memory
from megacore.plan.outline import outline
from megacore.plan.size_unit import SizeUnit, memory_unit
from megacore.train.dry_run import RankReport, run_ranks

_HEADER = """\
State after a step and memory peak during it, in {unit}: counted, and by the formulas of docs/guides/memory.md for this
number of microbatches. The first and the last rank along tp and dp of each pipeline stage run. Stages that hold equal
layers and take the same actions share a row, which names the ranks of the first of these stages.
"""
_COLUMNS = ("stage", "ranks", "parameters", "state", "formula", "peak", "formula", "microbatches", "result")


def report_ranks(config: ResolvedConfig, *, on_cpu: bool, as_json: bool) -> None:
    """Take steps of every kind of rank and print what came of it.

    Args:
        config: resolved, for any number of ranks.
        on_cpu: whether the job computes on CPUs.
        as_json: print JSON when all are done.

    Raises:
        ConfigError: a setting cannot run on fake tensors.
        UserError: a rank failed.
    """
    reports = run_ranks(config, on_cpu=on_cpu, workers=available_cores())
    if as_json:
        done = list(reports)
        print(json.dumps([_figures(config, report) for report in done], indent=1))
    else:
        done = _print_table(config, reports, on_cpu=on_cpu)
    if failed := [report for report in done if report.problem is not None]:
        raise UserError(
            f"{len(failed)} of {counted(len(done), 'kind of rank', 'kinds of rank')} cannot take a train step; the "
            f"first: {_in_words(config, failed[0])}"
        )


def _print_table(config: ResolvedConfig, reports: Iterable[RankReport], *, on_cpu: bool) -> list[RankReport]:
    """Print a stage as soon as its ranks are done, then all problems and differences; returns all reports."""
    ranks = counted(config.parallel.ranks, "CPU" if on_cpu else "accelerator")
    print(f"# Dry run: {config.model.preset or 'model'} on {ranks}, {describe_degrees(config.parallel.degrees)}\n")
    unit = memory_unit(plan_memory(config, outline(config), on_cpu=on_cpu))
    print(_HEADER.format(unit=unit.name))
    print(f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|", flush=True)
    done = []
    for _, of_stage in groupby(reports, lambda report: report.planned.pp_rank):
        members = list(of_stage)
        for (stages, row), equal in groupby(members, lambda report: (_stages(config, report), _row(report, unit))):
            numbers = ", ".join(str(report.rank) for report in equal)
            print(f"| {stages} | {numbers} | {' | '.join(row)} |", flush=True)
        done += members
    notes = [_in_words(config, report) for report in done if report.result != "OK"]
    kinds = counted(len(done), "kind of rank", "kinds of rank")
    print("\n" + "\n".join([*(f"- {note}" for note in notes), f"{kinds}, {len(done) - len(notes)} of them OK"]))
    return done


def _stages(config: ResolvedConfig, report: RankReport) -> str:
    """The stage of a rank, and those of the ranks that are like it."""
    degrees = config.parallel.degrees
    stages = [coordinates_of(rank, degrees)[pipeline_dimension()] for rank in (report.rank, *report.alike)]
    is_run = len(stages) > 2 and stages[-1] - stages[0] == len(stages) - 1
    return f"{stages[0]} to {stages[-1]}" if is_run else ", ".join(map(str, stages))


def _row(report: RankReport, unit: SizeUnit) -> tuple[str, ...]:
    """What the table says of a rank, but for its number."""
    if report.problem is not None:
        return ("",) * (len(_COLUMNS) - 3) + (report.result,)
    planned = report.planned
    sizes = [sum(report.state.values()), sum(report.planned_state.values())]
    if report.is_filled:
        sizes += [report.peak, planned.expected_tensors]
    cells = [unit.number(size, 3) for size in sizes] + [""] * (4 - len(sizes))
    return f"{report.parameters:,}", *cells, str(report.microbatches[-1]), report.result


def _in_words(config: ResolvedConfig, report: RankReport) -> str:
    what = "; ".join(report.differences) if report.problem is None else report.problem
    return f"rank {report.rank} ({describe_rank(report.rank, config.parallel.degrees)}): {what}"


def _figures(config: ResolvedConfig, report: RankReport) -> dict[str, Any]:
    planned = report.planned
    return {
        "rank": report.rank,
        "alike": list(report.alike),
        "coordinates": coordinates_of(report.rank, config.parallel.degrees),
        "result": report.result,
        "problem": report.problem,
        "differences": report.differences,
        "microbatches": list(report.microbatches),
        "parameters": {"counted": report.parameters, "formula": planned.parameters},
        "state_bytes": {"counted": dict(report.state), "formula": dict(report.planned_state)},
        "peak_bytes": {"counted": report.peak, "formula": planned.expected_tensors} if report.is_filled else None,
    }
