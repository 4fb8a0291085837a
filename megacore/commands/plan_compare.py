"""`tools/plan.py --compare`: layouts of one run side by side."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import math
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megacore.commands.plan_parser import PlanParser, print_json, without
from megacore.config import Config, ResolvedConfig
from megacore.config.dimensions import degree_fields
from megacore.config.flags import read_flags, without_fields
from megacore.config.toml import read_toml
from megacore.errors import ConfigError
from megacore.models.outline import outline
from megacore.plan.cluster import Cluster
from megacore.plan.compare import comparison_json, comparison_table, letter, told_together
from megacore.plan.memory import plan_memory
from megacore.plan.planner import Plan, make_plan, scheduled
from megacore.plan.state import whole_parameters
from megacore.tracer.memory import traced_memory

_NOTE = "megacore: note: "
Reads = Callable[[argparse.Namespace], tuple[ResolvedConfig, Cluster]]


def run_compare(args: argparse.Namespace, kind: type[Config], read: Reads) -> None:
    """Plan every layout, and print them side by side; one is compared with the flags as given. `read`: the
    configuration and the cluster of a command line. Raises ConfigError with what is wrong with the run, a layout, or
    comparing them."""
    given = args.compare if len(args.compare) > 1 else ["", *args.compare]
    runs, refused, notes = [], dict[str, list[str]](), list[tuple[str, str]]()
    for number, layout in enumerate(given):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                runs.append(read(_with_layout(args, layout, kind)))
        except ConfigError as error:
            refused[layout] = list(error.problems)
        for line in said.getvalue().splitlines():
            if line.startswith(_NOTE):
                notes.append((line.removeprefix(_NOTE), letter(number)))
            else:
                print(line, file=sys.stderr)
    if refused:
        shared = [one for one in next(iter(refused.values())) if all(one in refused.get(text, []) for text in given)]
        of_layouts = [
            f"--compare {text!r}: {one}" if text else one
            for text, problems in refused.items() for one in problems if one not in shared
        ]  # fmt: skip
        raise ConfigError([*shared, *of_layouts])
    for note in told_together(notes, [letter(number) for number in range(len(given))]):
        print(f"{_NOTE}{note}", file=sys.stderr)
    _require_same_work([config for config, _ in runs])
    find = plan_memory if args.estimate else traced_memory
    plans: list[Plan] = [make_plan(scheduled(config, on), on, find_memory=find) for config, on in runs]
    if args.json:
        print_json(args, comparison_json(plans, given, tokens=args.tokens, goodput=args.goodput))
    else:
        print(comparison_table(plans, given, tokens=args.tokens, goodput=args.goodput))


def _with_layout(args: argparse.Namespace, layout: str, kind: type[Config]) -> argparse.Namespace:
    """The command line with the flags of a layout in the place of those that it has."""
    parser = PlanParser(allow_abbrev=False, add_help=False)
    for flag in ("--cluster", "--software"):
        parser.add_argument(flag)
    parser.set_defaults(entry=None)
    try:
        words = shlex.split(layout)
    except ValueError as error:
        raise ConfigError([f"{error}: close the quotes"]) from None
    if words and not words[0].startswith("-"):
        raise ConfigError([f'{words[0]} is no flag: give the flags of a layout in quotes, as in --compare "--tp 8"'])
    own, merged = parser.parse_args(words), copy.copy(args)
    shared = sorted({word.split("=")[0] for word in own.flags} & args.own_flags)
    own.problems += [f"{flag} is for all layouts: give it outside of the quotes" for flag in shared]
    own.flags = without(own.flags, shared)
    reading = read_flags(own.flags, kind)
    fields = {*reading.values, *reading.unread, *(name for setting in reading.foreign for name in setting.fields)}
    follows = _replicas(args, reading.values, kind)
    fields |= {"dp"} if follows else set()
    merged.flags = [*without_fields(args.flags, fields, kind), *own.flags, *follows]
    merged.problems, merged.misspelled = [*args.problems, *own.problems], {*args.misspelled}
    merged.cluster, merged.software = own.cluster or args.cluster, own.software or args.software
    return merged


def _replicas(args: argparse.Namespace, layout: Mapping[str, Any], kind: type[Config]) -> list[str]:
    """The --dp with which a layout of other degrees has as many ranks as the run; nothing where it names its own, or
    there is none."""
    degrees, typed = degree_fields(), read_flags(args.flags, kind).values
    run = {**(read_toml(typed["config"], kind).values if "config" in typed else {}), **typed}
    if "dp" in layout or not layout.keys() & set(degrees) or (args.world_size is None and "dp" not in run):
        return []
    world = args.world_size or math.prod(run.get(name) or 1 for name in degrees)
    replicas, rest = divmod(world, math.prod({**run, **layout}.get(name) or 1 for name in degrees if name != "dp"))
    return [] if rest else ["--dp", str(replicas)]


def _require_same_work(configs: list[ResolvedConfig]) -> None:
    """A step of each layout is one of the same number of tokens on the same number of ranks. Raises ConfigError where
    it is not; with flags that make it so."""
    ranks = [config.parallel.ranks for config in configs]
    batches = [config.training.global_batch_size for config in configs]
    problems = []
    if len(set(ranks)) > 1:
        way_out = f"add --world-size {max(ranks)}, from which --dp follows"
        problems.append(f"--compare: the layouts have {', '.join(map(str, ranks))} ranks: {way_out}")
    if len(set(batches)) > 1:
        way_out = f"add --global-batch-size {max(batches)}"
        problems.append(f"--compare: a step trains {', '.join(map(str, batches))} sequences: {way_out}")
    lengths = [config.data.seq_length for config in configs]
    if len(set(lengths)) > 1:
        problems.append(f"--compare: sequences have {', '.join(map(str, lengths))} tokens: use one --seq-length")
    sizes = [whole_parameters(config, outline(config)) for config in configs]
    if len(set(sizes)) > 1:
        models = ", ".join(f"{size / 1e9:,.3g}B" for size in sizes)
        problems.append(f"--compare: the models have {models} parameters: give one --preset, outside of the quotes")
    if problems:
        raise ConfigError(problems)
