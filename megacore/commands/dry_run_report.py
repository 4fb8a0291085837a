"""`--dry-run=full` in words: what every kind of rank holds, counted beside what is planned, or why it fails."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from megacore.config import ResolvedConfig
from megacore.config.dimensions import coordinates_of, describe_degrees, describe_rank, pipeline_dimension
from megacore.config.messages import counted
from megacore.errors import UserError
from megacore.models.outline import outline
from megacore.parallel.processors import available_cores
from megacore.plan.cluster import Cluster
from megacore.plan.memory import plan_memory
from megacore.plan.plan_json import cluster_json, layout_flags, layout_json, run_json
from megacore.plan.plan_report import fit_json, layout_lines, misfits
from megacore.plan.planner import Plan, by_formula, exact, make_plan
from megacore.plan.size_unit import SizeUnit, memory_unit
from megacore.tracer.dry_run import RankReport, run_ranks

_HEADER = """\
State after a step and memory peak during it, in {unit}: counted, and planned (docs/guides/memory.md) for this number
of microbatches. A negative difference means that the planned peak is too small. Parameters are those of a rank,
with the padding of the vocabulary. The first and the last rank along tp and dp of each pipeline stage run. Stages that
hold equal layers and take the same actions share a row, which names the ranks of the first of these stages.
"""
_COLUMNS = (
    "stage",
    "ranks",
    "parameters",
    "state",
    "planned",
    "peak",
    "planned",
    "difference",
    "microbatches",
    "result",
)


def report_ranks(config: ResolvedConfig, cluster: Cluster, *, is_named: bool, as_json: bool) -> None:
    """Take steps of every kind of rank and print what came of it, as JSON when all are done. `cluster`: whose kind of
    device computes. `is_named`: the job is for it, so that the report says if it does not fit there. Raises ConfigError
    where a setting cannot run on fake tensors, UserError where a rank failed."""
    config = config.for_device(on_cpu=cluster.on_cpu)
    reports = run_ranks(config, on_cpu=cluster.on_cpu, workers=available_cores())
    plan = make_plan(config, cluster) if is_named else None
    if as_json:
        done = list(reports)
        print(json.dumps(_json(config, plan, done), indent=1))
    else:
        done = _print_table(config, plan, reports, on_cpu=cluster.on_cpu)
    if failed := [report for report in done if report.problem is not None]:
        raise UserError(
            f"{len(failed)} of {counted(len(done), 'kind of rank', 'kinds of rank')} cannot take a train step; the "
            f"first: {_in_words(config, failed[0])}"
        )


def _print_table(
    config: ResolvedConfig, plan: Plan | None, reports: Iterable[RankReport], *, on_cpu: bool
) -> list[RankReport]:
    """Print a stage as soon as its ranks are done, then all problems and differences; returns all reports."""
    ranks = counted(config.parallel.ranks, "CPU" if on_cpu else "accelerator")
    print(f"# Dry run: {config.model.preset or 'model'} on {ranks}, {describe_degrees(config.parallel.degrees)}\n")
    unit = memory_unit(plan_memory(config, outline(config), on_cpu=on_cpu))
    print("\n".join(layout_lines(config)) + "\n")
    print(_HEADER.format(unit=unit.name))
    if plan is not None:
        for line in misfits(plan, unit):
            print(f"{line} This is planned, for a whole step on {plan.cluster.name}; --dry-run proposes changes.\n")
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
    state = [unit.number(sum(sizes.values()), 3) for sizes in (report.state, report.planned_state)]
    peak = ["", "", ""]
    if report.is_filled:
        peak = [unit.number(size, 3) for size in (report.peak, planned.expected_tensors)]
        peak.append(f"{planned.expected_tensors / report.peak - 1:+.1%}")
    return f"{report.parameters:,}", *state, *peak, str(report.microbatches[-1]), report.result


def _in_words(config: ResolvedConfig, report: RankReport) -> str:
    what = "; ".join(report.differences) if report.problem is None else report.problem
    return f"rank {report.rank} ({describe_rank(report.rank, config.parallel.degrees)}): {what}"


def _json(config: ResolvedConfig, plan: Plan | None, reports: Sequence[RankReport]) -> dict[str, Any]:
    ranks = [_figures(config, report) for report in reports]
    report = {**run_json(config, outline(config)), "layout": layout_json(config), "flags": layout_flags(config)}
    if plan is not None:
        report |= {**cluster_json(config, plan.cluster, capacity=plan.capacity), **fit_json(plan)}
    return {**report, "ranks": ranks}


def _figures(config: ResolvedConfig, report: RankReport) -> dict[str, Any]:
    """What a rank holds: counted, and planned."""
    planned, has_peak = report.planned, report.is_filled
    coordinates = coordinates_of(report.rank, config.parallel.degrees)
    peak = by_formula(planned.expected_tensors, low=planned.expected_tensors)
    counted = {
        "parameters": report.parameters,
        "state_bytes": dict(report.state),
        "tensor_peak_bytes": report.peak if has_peak else None,
    }
    return {
        "rank": report.rank,
        "alike": list(report.alike),
        "coordinates": {f"{name}_rank": number for name, number in coordinates.items()},
        "result": report.result,
        "problem": report.problem,
        "differences": report.differences,
        "microbatches": list(report.microbatches),
        "counted": counted if report.problem is None else None,
        "planned": {
            "parameters": asdict(exact(planned.parameters, "parameters")),
            "state": {kind: asdict(by_formula(size, low=size)) for kind, size in report.planned_state.items()},
            "tensor_peak": asdict(peak) if has_peak else None,
        },
    }
