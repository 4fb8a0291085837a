"""`tools/plan.py --search`: its flags, what is wrong with them, and what is printed of what it finds."""

from __future__ import annotations

import argparse
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megacore.commands.pictures import report_with_pictures
from megacore.commands.plan_parser import PlanParser, print_json
from megacore.config import Config, ParallelConfig, ResolvedConfig
from megacore.config.dimensions import degree_fields
from megacore.config.messages import divisors
from megacore.config.parallel import AUTO_SCHEDULE, STAGED_SCHEDULES
from megacore.config.solve import Searched
from megacore.config.spelling import flag_and_value
from megacore.errors import ConfigError
from megacore.plan.cluster import Cluster
from megacore.plan.memory import plan_memory
from megacore.plan.plan_picture import frontier_picture
from megacore.plan.planner import make_plan, scheduled, usable_bytes, usable_host_bytes
from megacore.plan.search import Found, search, with_memory
from megacore.plan.search_conflicts import conflicts, ways_of_search
from megacore.plan.search_report import search_json, search_table
from megacore.plan.search_space import RECOMPUTED, Constraints, context_degrees
from megacore.tracer.memory import traced_memory

SEARCHED = (
    *degree_fields(), "ep", "etp", "schedule", "virtual_stages", "pipeline_balance", "micro_batch_size", "zero_stage",
    "sequence_parallel", "recompute", "recompute_num_layers",
)  # fmt: skip
"""Fields that a search chooses, unless they are given."""
OF_DEGREES = ("schedule", "virtual_stages", "sequence_parallel", "ep", "etp")
"""Fields that need certain degrees, such as --sequence-parallel with --tp 2. The run that a search starts from may have
other degrees, so that it is resolved without them."""
OF_ONE_LAYOUT = ("schedule_csv", "pipeline_layout")
"""Fields that only one layout can have; a search refuses them."""
MOST_RANKS = 1 << 20
"""The largest --world-size."""
# Limits: flags without their dashes and "max" or "min".
_LEAST = (*degree_fields(), "ep")
_MOST = (*_LEAST, "micro-batch-size", "zero-stage", "virtual-stages")
_LIMITS = {"max": operator.le, "min": operator.ge}


def add_limits(parser: PlanParser) -> None:
    """The limits of a search."""
    for name in _MOST:
        parser.flag(
            f"--max-{name} N", f"--search: largest --{name}", "whole 0 3" if name == "zero-stage" else "whole 1"
        )
        if name in _LEAST:
            parser.flag(f"--min-{name} N", f"--search: smallest --{name}", "whole 1")


def wrong_given(args: argparse.Namespace, given: Mapping[str, Any]) -> Iterator[str]:
    """Values of the run that a search cannot keep."""
    if not args.search:
        return
    for name in OF_ONE_LAYOUT:
        if name in given:
            yield f"{flag_and_value(name, given[name])} is for one layout: leave it out, or leave --search out"
    for name in OF_DEGREES:  # which `_with_defaults` leaves out
        if name in given:
            yield from ParallelConfig(**{name: given[name]}).wrong_fields().values()
    schedule, virtual = given.get("schedule", AUTO_SCHEDULE), given.get("virtual_stages", 1)
    yield from _without_effect_in_search(args, given)
    if virtual > 1 and schedule not in (*STAGED_SCHEDULES, AUTO_SCHEDULE):
        yield (
            f"--virtual-stages {virtual} has no effect with --schedule {schedule}: leave it out, or use "
            "--schedule interleaved"
        )
    if args.max_virtual_stages == 1 and schedule == "interleaved" and virtual == 1:
        yield (
            "--max-virtual-stages 1 leaves no --virtual-stages for --schedule interleaved, which has 2 or more: leave "
            "it out, use --max-virtual-stages 2 or more, or another --schedule"
        )


def _without_effect_in_search(args: argparse.Namespace, given: Mapping[str, Any]) -> Iterator[str]:
    """Flags of a search that change nothing beside others, or contradict them."""
    for name, (kind, keeps) in itertools.product(_MOST, _LIMITS.items()):
        value, limit = given.get(name.replace("-", "_")), getattr(args, f"{kind}_{name.replace('-', '_')}", None)
        if value is not None and limit is not None and keeps(value, limit):
            yield f"--{kind}-{name} {limit} has no effect with --{name} {value}: leave one of them out"
    if (only := _only_one("pp", args, given)) is not None:
        for name in ("schedule", "pipeline_balance"):
            if name in args.fixed:
                flag = flag_and_value(name, given[name])
                yield f"--search tries {flag} only in pipelines, and {only} leaves none: leave one of them out"
    if (only := _only_one("tp", args, given)) is not None and given.get("sequence_parallel"):
        yield f"--sequence-parallel has no effect with {only}: leave one of them out"
    schedule, most = args.fixed.get("schedule", "interleaved"), args.max_virtual_stages
    if most is not None and "virtual_stages" not in given and schedule != "interleaved":
        yield f"--max-virtual-stages {most} has no effect with --schedule {schedule}: leave one of them out"
    if lacks_recompute(args, given):
        layers = given["recompute_num_layers"]
        yield f"--recompute-num-layers {layers} is for --recompute full: add --recompute full, or leave it out"


def _only_one(name: str, args: argparse.Namespace, given: Mapping[str, Any]) -> str | None:
    """The flag that leaves a degree no value but 1."""
    if given.get(name) == 1:
        return f"--{name} 1"
    return f"--max-{name} 1" if getattr(args, f"max_{name}") == 1 and name not in given else None


def lacks_recompute(args: argparse.Namespace, given: Mapping[str, Any]) -> bool:
    """Whether --search is given a number of blocks to recompute and nothing says how."""
    named = {*given, *args.unread, *args.foreign}
    return args.search and "recompute_num_layers" in given and not named & {"recompute", "config", "deepspeed_config"}


def wrong_limits(args: argparse.Namespace, cluster: Cluster | None) -> Iterator[str]:
    """Limits of a search that are not asked for, or that no layout can keep."""
    flags = [*(f"max-{name}" for name in _MOST), *(f"min-{name}" for name in _LEAST), "max-memory-gb"]
    given = {flag: value for flag in flags if (value := getattr(args, flag.replace("-", "_"), None)) is not None}
    if not args.search:
        for flag, value in given.items():
            yield f"--{flag} {value} limits --search: add --search, or leave it out"
    limit = given.get("max-memory-gb")
    if args.search and args.world_size is not None and cluster is not None and limit is not None:
        usable = usable_bytes(cluster, args.world_size) / 1e9
        if limit > usable:
            yield (
                f"--max-memory-gb {limit:g} must be at most {_three_digits(usable, math.floor)}, which is what a rank "
                f"may take of {cluster.name}: leave it out, or give a cluster file with more memory_gb"
            )


def require_possible_limits(config: ResolvedConfig, cluster: Cluster | None, args: argparse.Namespace) -> None:
    """A valid layout keeps all that is given. Raises ConfigError with what is wrong."""
    if not args.search or args.world_size is None or cluster is None or not 1 <= args.world_size <= MOST_RANKS:
        return
    if problems := list(conflicts(config, cluster, _constraints(args), batch_of_ranks=args.usual_batch is not None)):
        raise ConfigError(problems)


def run_search(args: argparse.Namespace, config: ResolvedConfig, cluster: Cluster) -> None:
    """Search, and print and draw what is found. Raises as `found_layouts`; UserError where the picture cannot be drawn
    or written."""
    found = found_layouts(args, config, cluster)
    report_with_pictures(
        [(args.picture, partial(frontier_picture, found, args.top))], partial(_report, args, found, config)
    )


def found_layouts(args: argparse.Namespace, config: ResolvedConfig, cluster: Cluster) -> Found:
    """Search. Raises ConfigError where no layout is valid, or none fits."""
    constraints = _constraints(args)
    may_offload = args.may_offload and not config.offloads and not cluster.on_cpu
    named = {"global_batch_size": args.names_batch, "defaults": args.has_file}
    named_fields = frozenset(name for name, is_named in named.items() if is_named)
    found = search(config, cluster, replace(constraints, may_offload=may_offload), named=named_fields)
    if not args.estimate and found.layouts:
        found = with_memory(found, args.top, traced_memory)
    _require_found(found, config, cluster, constraints, batch_of_ranks=args.usual_batch is not None)
    return found


def _report(args: argparse.Namespace, found: Found, config: ResolvedConfig) -> None:
    own = None
    if args.has_file and config.parallel.ranks == args.world_size:  # the search began from the layout of the file
        find = plan_memory if args.estimate else traced_memory
        own = make_plan(scheduled(config, found.cluster), found.cluster, find_memory=find)
    if args.json:
        print_json(args, search_json(found, own, top=args.top, tokens=args.tokens, goodput=args.goodput))
    else:
        print(search_table(found, own, top=args.top, tokens=args.tokens, goodput=args.goodput))


def searched(args: argparse.Namespace) -> Searched | None:
    """What a search chooses of the fields that other flags may need; None: there is no search, or its ranks are not
    known."""
    if not args.search or args.world_size is None or not 1 <= args.world_size <= MOST_RANKS:
        return None
    constraints = _constraints(args)

    def values(config: Config) -> Mapping[str, Sequence[Any]]:
        length = config.data.seq_length
        possible: dict[str, Sequence[Any]] = {
            **dict.fromkeys(degree_fields(), divisors(args.world_size, most=None)),
            "cp": context_degrees(config, constraints) if isinstance(length, int) and length > 0 else [],
            "zero_stage": range(4),
            "sequence_parallel": (False, True),
            "recompute": tuple(RECOMPUTED),
        }
        return {name: constraints.among(name, some) for name, some in possible.items() if name not in args.fixed}

    return Searched(ranks=args.world_size, values=values, allows=constraints.within_limits)


def _constraints(args: argparse.Namespace) -> Constraints:
    """The limits of a search."""
    return Constraints(
        world_size=args.world_size,
        most={
            name: value
            for name in (flag.replace("-", "_") for flag in _MOST)
            if (value := getattr(args, f"max_{name}")) is not None
        },
        least={name: value for name in _LEAST if (value := getattr(args, f"min_{name}")) is not None},
        fixed=args.fixed,
        memory_bytes=None if args.max_memory_gb is None else args.max_memory_gb * 1e9,
    )


def _require_found(
    found: Found, config: ResolvedConfig, cluster: Cluster, constraints: Constraints, *, batch_of_ranks: bool
) -> None:
    if found.layouts:
        return
    if not found.tried:
        raise ConfigError([f"--search: no layout of --world-size {constraints.world_size} is worth a try: use another"])
    ways = []
    if found.least_memory is not None:
        least = _three_digits(found.least_memory / 1e9, math.ceil)
        needed = f"the smallest needs {least} GB per rank"
        if float(least) <= usable_bytes(cluster, constraints.world_size) / 1e9:
            ways.append(f"--max-memory-gb {least}")
    else:
        needed = _needed_on_host(found)
    ways += ways_of_search(config, cluster, constraints, found, batch_of_ranks=batch_of_ranks)
    is_limited = bool(constraints.most or constraints.least or constraints.fixed)
    if is_limited:
        ways.append("fewer limits")
    if not ways:
        more = "a cluster file with a smaller gpus_per_node, so that fewer ranks share memory"
        ways = [more if cluster.on_cpu and constraints.world_size > 1 else "more ranks", "a smaller model"]
    limits = " and the given limits" if is_limited or constraints.memory_bytes is not None else ""
    raise ConfigError(
        [
            f"--search: no layout of --world-size {constraints.world_size} fits {cluster.name}{limits} "
            f"({found.tried:,} valid layouts); {needed}: use {', or '.join(ways)}"
        ]
    )


def _needed_on_host(found: Found) -> str:
    """What the layouts lack that fit on the device."""
    usable = usable_host_bytes(found.cluster)
    assert found.least_on_host is not None and usable is not None
    needed = _three_digits(found.least_on_host / 1e9, math.ceil)
    return (
        f"of those that fit on the device, the one that offloads least needs {needed} GB of host memory per node, of "
        f"{_three_digits(usable / 1e9, math.floor)} usable"
    )


def _three_digits(value: float, rounded: Callable[[float], int]) -> str:
    """A positive number in three digits, `rounded` up or down as math.ceil and math.floor do."""
    digits = max(2 - math.floor(math.log10(value)), 0)
    return f"{rounded(value * 10**digits) / 10**digits:.{digits}f}"
