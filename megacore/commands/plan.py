"""The command behind tools/plan.py and `pretrain_gpt.py --dry-run`: from flags to a plan, a search, pictures.

The flags of the run are read and validated as the trainer does it. Nothing here loads torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megacore.commands.plan_parser import ENTRIES, PlanParser, dashed, idle_flags, named_entry, take_misspelled
from megacore.commands.tool import positive, run_tool
from megacore.config import Config, ParallelConfig, ResolvedConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from megacore.config.dimensions import degree_fields
from megacore.config.dry_run_flags import DRY_RUN_FLAGS
from megacore.config.fields import flag_and_value
from megacore.config.flags import Given, read_flags, without_fields
from megacore.config.messages import did_you_mean, one_of
from megacore.config.parallel import AUTO_SCHEDULE
from megacore.config.toml import read_toml
from megacore.convert.start import shape_from_hf
from megacore.data.gpt.build import vocabulary_size
from megacore.errors import ConfigError, UserError
from megacore.files import replace_bytes, why_unwritable
from megacore.parallel.processors import available_cores
from megacore.pipeline.schedule_file import check_schedule
from megacore.plan.calibration import base_of, calibrate, machine_of, wrong_base
from megacore.plan.calibration_report import calibration_json, calibration_text
from megacore.plan.canvas import require_writable, save
from megacore.plan.cluster import CLUSTERS, Cluster, cluster_named, to_toml
from megacore.plan.measured_run import Launch, Machine, read_run
from megacore.plan.plan_picture import frontier_picture, memory_picture, timeline_picture
from megacore.plan.plan_report import as_json, markdown
from megacore.plan.planner import Plan, make_plan, scheduled, usable_bytes
from megacore.plan.room import host_capacity
from megacore.plan.search import Found, search
from megacore.plan.search_conflicts import conflict
from megacore.plan.search_report import search_json, search_table
from megacore.plan.search_space import Constraints, impossible_limits
from megacore.plan.software import MEGACORE, SOFTWARE, Software, software_named
from megacore.train.fake_settings import unfit_settings

_DRY_RUN = "--dry-run"
_T = TypeVar("_T")
_DATA_FIELDS = {"mock_data", "data_path"}
MOST_RANKS = 1 << 20


# Limits of --search: flags without their dashes and "max" or "min".
_LEAST = (*degree_fields(), "ep")
_MOST = (*_LEAST, "micro-batch-size", "zero-stage", "virtual-stages")
# Fields that --search chooses, unless they are given.
_SEARCHED = (
    *degree_fields(), "ep", "etp", "schedule", "virtual_stages", "pipeline_balance", "micro_batch_size", "zero_stage",
    "sequence_parallel", "recompute", "recompute_num_layers",
)  # fmt: skip
# Fields that need certain degrees, such as --sequence-parallel with --tp 2. The run that a search starts from may have
# other degrees, so that it is resolved without them.
_OF_DEGREES = ("schedule", "virtual_stages", "sequence_parallel", "ep", "etp")
# Sources of the batch and of --dp. With one of them the run that a search starts from has as many ranks as its given
# degrees say: on all ranks of the search it would need a microbatch for each, and the given --dp would be too small.
_BATCH_OR_REPLICAS = {"global_batch_size", "dp", "config"}
_NEEDS = {"--goodput": "--tokens", "--price-per-hour": "--tokens", "--top": "--search"}
# Fields that only one layout can have.
_OF_ONE_LAYOUT = ("schedule_csv", "pipeline_layout")
_SOURCES_OF_BATCH = {"global_batch_size", "rampup_batch_size", "deepspeed_config"}
_SOURCES_OF_MODEL = {"preset", "init_from_hf"}
_SOURCES_OF_VOCABULARY = {"preset", "tokenizer", "vocab_size", "init_from_hf", "config"}


def plan_tool(argv: Sequence[str] | None = None) -> int:
    """tools/plan.py; the exit status is 0 done, 2 refused."""
    given = list(sys.argv[1:] if argv is None else argv)
    named = named_entry(given)
    parser = _parser("plan.py", f"plan.py {named} --cluster NAME [flags of {Path(named).name}]")
    parser.add_argument("entry", nargs="?", metavar="ENTRY", help=f"entry point of the planned run: {one_of(ENTRIES)}")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="DIR",
        help="fit a cluster file to the run in this directory (its --output-dir)",
    )
    parser.set_defaults(help_of=parser.prog, own_flags=parser.names())
    parser.elsewhere[_DRY_RUN] = (
        f"has no effect here, as plan.py always plans: leave it out, or use {named} {_DRY_RUN}=full"
    )
    return run_tool(parser, given, _plan)


def is_dry_run(argv: Sequence[str]) -> bool:
    """Whether `--dry-run`, in either form, is among the flags of an entry point."""
    return any(word.split("=")[0] == _DRY_RUN for word in map(dashed, argv))


def dry_run(argv: Sequence[str], entry: str) -> int:
    """`--dry-run` of an entry point: plan the run in place of it; `--dry-run=full`: take a step of it without devices.

    Returns:
        The exit status: 0 done, 2 refused, or a rank failed.
    """
    words = [dashed(word) for word in argv]
    if f"{_DRY_RUN}=full" in words or (_DRY_RUN, "full") in itertools.pairwise(words):
        parser = _full_parser(entry)
        action = _run_fully
        way_out = f"has no effect with {_DRY_RUN}=full, which computes no time: leave it out, or use {_DRY_RUN}"
        of_plans = _parser(entry, entry).names() - parser.names()
        parser.elsewhere |= dict.fromkeys(sorted(of_plans), way_out)
    else:
        parser = _parser(f"{entry} --dry-run", f"{entry} --dry-run [--world-size N] [--cluster NAME] [flags of a run]")
        action = _plan
    _add_dry_run(parser)
    parser.elsewhere["--calibrate"] = "is a flag of tools/plan.py: use python tools/plan.py --calibrate DIR"
    parser.set_defaults(own_flags=parser.names(), entry=entry, calibrate=None, is_dry_run=True, help_of=entry)
    return run_tool(parser, argv, action)


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        _DRY_RUN,
        nargs="?",
        const="plan",
        choices=("plan", "full"),
        help=DRY_RUN_FLAGS[_DRY_RUN].text,
    )


def _full_parser(entry: str) -> PlanParser:
    parser = PlanParser(
        prog=f"{entry} --dry-run=full",
        usage=f"{entry} --dry-run=full [--world-size N] [--cluster NAME] [flags of a run]",
        description="Build every kind of rank of a job and run train steps of it, on tensors that have shapes, types "
        "and devices but no values. This needs no other rank, no GPU and no memory for the model. All other flags are "
        "those of the entry point. See docs/guides/planner.md.",
        allow_abbrev=False,
    )
    _add_common_flags(parser)
    parser.set_defaults(cluster="h100")  # for a job of GPUs: any of them, as no time is computed
    # What only the plan has.
    parser.set_defaults(search=False, timeline=None, memory_timeline=None, picture=None, price_per_hour=None)
    parser.set_defaults(software=None, is_full=True)
    return parser


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cluster", metavar="NAME", help=f"cluster to plan for: {', '.join(CLUSTERS)}, or a FILE.toml")
    add("--world-size", type=positive, metavar="N", help="number of ranks. Default: --tp x --cp x --pp x --dp")
    add("--json", action="store_true", help="print JSON instead of a report")


def _parser(prog: str, usage: str) -> PlanParser:
    parser = PlanParser(
        prog=prog,
        usage=usage,
        description="Predict what a training run needs before you pay for it: memory of every rank, step time, bytes "
        "sent, days and price. All other flags are those of the entry point: see its --help. Guide: "
        "docs/guides/planner.md.",
        allow_abbrev=False,
    )
    _add_common_flags(parser)
    add = parser.add_argument
    add(
        "--software",
        metavar="NAME",
        help=f"predict the step time of this trainer: {one_of(list(SOFTWARE))}. Default: {MEGACORE.name}",
    )
    add("--tokens", type=_tokens, metavar="N", help="also print days and price of training on N tokens, as in 300e9")
    add(
        "--goodput",
        type=_share,
        default=0.9,
        metavar="SHARE",
        help="share of the time in which training makes progress. Default: 0.9",
    )
    add("--price-per-hour", type=_price, metavar="USD", help="price per device and hour. Default: that of the cluster")
    add("--timeline", type=Path, metavar="FILE", help="draw the predicted timeline of the pipeline (.svg or .png)")
    add("--memory-timeline", type=Path, metavar="FILE", help="draw the memory of every rank over a step (.svg or .png)")
    add("--search", action="store_true", help="compare all layouts of --world-size ranks instead of planning one")
    add("--top", type=positive, default=10, metavar="N", help="number of layouts that --search prints. Default: 10")
    add(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw time and memory of the layouts that --search finds (.svg or .png)",
    )
    for name in _MOST:
        add(
            f"--max-{name}",
            type=positive if name != "zero-stage" else _stage,
            metavar="N",
            help=f"--search: largest --{name}",
        )
        if name in _LEAST:
            add(f"--min-{name}", type=positive, metavar="N", help=f"--search: smallest --{name}")
    add(
        "--max-memory-gb",
        type=_gigabytes,
        metavar="GB",
        help="--search: largest memory per rank in 10^9 bytes. Default: 97 %% of the device's, which the ranks of a "
        "CPU share",
    )
    parser.set_defaults(is_dry_run=False, is_full=False)
    return parser


@dataclass(frozen=True)
class _Request:
    """What is planned on what."""

    config: ResolvedConfig
    cluster: Cluster


def _plan(args: argparse.Namespace) -> None:
    if args.calibrate is not None:
        _calibrate(args)
        return
    if "--calibrate" in args.misspelled:
        raise ConfigError(args.problems)
    request = _read(args)
    request = replace(request, config=_on_cluster(request.config, request.cluster))
    if args.search:
        _search(args, request)
        return
    plan = make_plan(scheduled(request.config, request.cluster), request.cluster)
    if args.json:
        print(json.dumps(as_json(plan, tokens=args.tokens, goodput=args.goodput), indent=1))
    else:
        print(markdown(plan, tokens=args.tokens, goodput=args.goodput))
    _draw(args, plan)


def _run_fully(args: argparse.Namespace) -> None:
    from megacore.commands.dry_run import report_ranks

    request = _read(args)
    config = scheduled(_on_cluster(request.config, request.cluster), request.cluster)
    report_ranks(config, on_cpu=request.cluster.on_cpu, as_json=args.json)


def _draw(args: argparse.Namespace, plan: Plan) -> None:
    for path, picture in ((args.timeline, timeline_picture), (args.memory_timeline, memory_picture)):
        if path is not None:
            save(picture(plan), path)
            print(f"wrote {path}", file=sys.stderr)


def _read(args: argparse.Namespace) -> _Request:
    """The configuration and the cluster, or a refusal with everything that is wrong with both."""
    entry = Path(args.entry).name if args.entry else None
    kind: type[Config] = BertConfig if entry == "pretrain_bert.py" else Config
    take_misspelled(args, args.own_flags, kind)
    problems: list[str] = [*args.problems, *idle_flags(args.given, _NEEDS, args.misspelled)]
    cluster = _cluster(args, problems)
    if entry not in ENTRIES:
        named = "no entry point is given" if entry is None else f"{entry} is no entry point"
        problems.append(f"{named}: use {one_of(ENTRIES)} first" + (did_you_mean(entry, ENTRIES) if entry else ""))
    for flag in ("--timeline", "--memory-timeline", "--picture"):
        path = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if path is not None:
            try:
                require_writable(path, flag)
            except UserError as error:
                problems.append(str(error))
    if args.timeline is not None and args.timeline == args.memory_timeline:
        problems.append(f"--timeline and --memory-timeline are both {args.timeline}: give each another file")
    if args.picture is not None and not args.search:
        problems.append(f"--picture {args.picture} draws what --search finds: add --search, or use --timeline")
    if args.search:
        for name in ("timeline", "memory_timeline"):
            if getattr(args, name) is not None:
                problems.append(f"--{name.replace('_', '-')} draws one layout: leave --search out, or use --picture")
        if args.world_size is None and not any(problem.startswith("--world-size") for problem in problems):
            problems.append("--search needs --world-size: the number of ranks, as in --world-size 64")
    reading = read_flags(args.flags, kind)
    given, args.unread = reading.values, reading.unread
    args.foreign = {name for setting in reading.foreign for name in setting.fields}
    args.given_device = given.get("device")
    problems += _wrong_device(given, cluster)
    args.usual_batch = _usual_batch(args, reading, kind)
    args.names_batch = args.usual_batch is not None or ("config" in given and "global_batch_size" not in given)
    args.fixed = {name: given[name] for name in _SEARCHED if name in given and given[name] != AUTO_SCHEDULE}
    problems += [*_wrong_limits(args, cluster), *_wrong_given(args, given)]
    if args.world_size is not None and args.world_size > MOST_RANKS:
        problems.append(f"--world-size {args.world_size} must be at most {MOST_RANKS}")
    is_smaller = args.search and given.keys() & _BATCH_OR_REPLICAS
    config = parse_config(
        _with_defaults(args, given, kind, problems),
        prog=args.help_of,
        description="Plan a run.",
        kind=kind,
        shape=None if entry == "pretrain_bert.py" else shape_from_hf,
        vocabulary=vocabulary_size,
        checks=[
            check_schedule,
            lambda resolved: _require_peak(resolved, cluster),
            lambda resolved: _require_possible_limits(resolved, cluster, args),
            lambda resolved: _require_full_dry_run(resolved, cluster, args),
        ],
        planned=True,
        world_size=None if args.usual_batch is not None or is_smaller else args.world_size,
        problems=problems,
    )
    assert cluster is not None
    return _Request(config, cluster)


def _require_full_dry_run(config: ResolvedConfig, cluster: Cluster | None, args: argparse.Namespace) -> None:
    if not args.is_full:
        return
    problems = list(unfit_settings(config))
    is_named = args.given_device is not None  # by a flag, which is refused in other words
    if config.parallel.device == "cpu" and cluster is not None and not cluster.on_cpu and not is_named:
        problems.append(f"device = cpu: {_DRY_RUN}=full takes the job for one of {args.cluster}; add --cluster cpu")
    if problems:
        raise ConfigError(problems)


def _wrong_given(args: argparse.Namespace, given: Mapping[str, Any]) -> Iterator[str]:
    """Values of the run that a search cannot keep."""
    if not args.search:
        return
    for name in _OF_ONE_LAYOUT:
        if name in given:
            yield f"{flag_and_value(name, given[name])} is for one layout: leave it out, or leave --search out"
    for name in _OF_DEGREES:  # which `_with_defaults` leaves out
        if name in given:
            yield from ParallelConfig(**{name: given[name]}).wrong_fields().values()
    schedule, virtual = given.get("schedule", AUTO_SCHEDULE), given.get("virtual_stages", 1)
    yield from _without_effect_in_search(args, given)
    if virtual > 1 and schedule not in ("interleaved", AUTO_SCHEDULE):
        yield (
            f"--virtual-stages {virtual} has no effect with --schedule {schedule}: leave it out, or use "
            "--schedule interleaved"
        )
    if args.max_virtual_stages == 1 and schedule == "interleaved" and virtual == 1:
        yield (
            "--max-virtual-stages 1 leaves no --virtual-stages for --schedule interleaved, which has 2 or more: leave "
            "it out, use --max-virtual-stages 2 or more, or another --schedule"
        )
    for name in _MOST:
        field = name.replace("-", "_")
        value, most, least = given.get(field), getattr(args, f"max_{field}"), getattr(args, f"min_{field}", None)
        for limit, flag, is_kept in ((most, "max", "at most"), (least, "min", "at least")):
            if value is not None and limit is not None and (value > limit if flag == "max" else value < limit):
                yield f"--{name} {value} must be {is_kept} --{flag}-{name} {limit}"


def _without_effect_in_search(args: argparse.Namespace, given: Mapping[str, Any]) -> Iterator[str]:
    """Flags of a search that change nothing beside others."""
    for name in _MOST:
        field = name.replace("-", "_")
        if (value := given.get(field)) is None:
            continue
        most, least = getattr(args, f"max_{field}"), getattr(args, f"min_{field}", None)
        if most is not None and value <= most:
            yield f"--max-{name} {most} has no effect with --{name} {value}: leave one of them out"
        if least is not None and value >= least:
            yield f"--min-{name} {least} has no effect with --{name} {value}: leave one of them out"
    if (only := _only_one("pp", args, given)) is not None:
        for name in ("schedule", "pipeline_balance"):
            if name in args.fixed:
                flag = flag_and_value(name, given[name])
                yield f"{flag} has no effect with {only}, which leaves no pipeline: leave one of them out"
    if (only := _only_one("tp", args, given)) is not None and given.get("sequence_parallel"):
        yield f"--sequence-parallel has no effect with {only}: leave one of them out"
    schedule, most = args.fixed.get("schedule", "interleaved"), args.max_virtual_stages
    if most is not None and "virtual_stages" not in given and schedule != "interleaved":
        yield f"--max-virtual-stages {most} has no effect with --schedule {schedule}: leave one of them out"
    if _lacks_recompute(args, given):
        layers = given["recompute_num_layers"]
        yield f"--recompute-num-layers {layers} is for --recompute full: add --recompute full, or leave it out"


def _only_one(name: str, args: argparse.Namespace, given: Mapping[str, Any]) -> str | None:
    """The flag that leaves a degree no value but 1."""
    if given.get(name) == 1:
        return f"--{name} 1"
    return f"--max-{name} 1" if getattr(args, f"max_{name}") == 1 and name not in given else None


def _lacks_recompute(args: argparse.Namespace, given: Mapping[str, Any]) -> bool:
    """Whether --search is given a number of blocks to recompute and nothing says how."""
    named = {*given, *args.unread, *args.foreign}
    return args.search and "recompute_num_layers" in given and not named & {"recompute", "config", "deepspeed_config"}


def _wrong_limits(args: argparse.Namespace, cluster: Cluster | None) -> Iterator[str]:
    """Limits of a search that are not asked for, or that no layout can keep."""
    flags = [*(f"max-{name}" for name in _MOST), *(f"min-{name}" for name in _LEAST), "max-memory-gb"]
    given = {flag: value for flag in flags if (value := getattr(args, flag.replace("-", "_"), None)) is not None}
    if not args.search:
        for flag, value in given.items():
            yield f"--{flag} {value} limits --search: add --search, or leave it out"
    for name in _LEAST:
        least, most = given.get(f"min-{name}"), given.get(f"max-{name}")
        if least is not None and most is not None and least > most:
            yield f"--min-{name} {least} must be at most --max-{name} {most}"
    smallest = {}
    for name in degree_fields():
        if name in args.fixed:
            smallest[f"--{name}"] = args.fixed[name]
        elif f"min-{name}" in given:
            smallest[f"--min-{name}"] = given[f"min-{name}"]
    ranks = math.prod(smallest.values())
    if args.search and args.world_size is not None and ranks > args.world_size and len(smallest) > 1:
        product = " x ".join(f"{flag} {value}" for flag, value in smallest.items())
        yield f"{product} = {ranks} must be at most --world-size {args.world_size}"
    limit = given.get("max-memory-gb")
    if args.search and args.world_size is not None and cluster is not None and limit is not None:
        usable = usable_bytes(cluster, args.world_size) / 1e9
        if limit > usable:
            yield (
                f"--max-memory-gb {limit:g} must be at most {_three_digits(usable, math.floor)}, which is what a rank "
                f"may take of {cluster.name}: leave it out, or give a cluster file with more memory_gb"
            )


def _require_possible_limits(config: ResolvedConfig, cluster: Cluster | None, args: argparse.Namespace) -> None:
    if not args.search or args.world_size is None or cluster is None:
        return
    if problems := impossible_limits(config, _constraints(args)):
        raise ConfigError(problems)


def _cluster(args: argparse.Namespace, problems: list[str]) -> Cluster | None:
    software = _software(args, problems)
    name = args.cluster or ("laptop" if args.is_dry_run else None)
    if name is None and "--cluster" in args.misspelled:
        return None
    if name is None:
        problems.append(f"--cluster is missing: use {one_of(list(CLUSTERS))}, or a file that ends in .toml")
        return None
    try:
        cluster = cluster_named(name)
    except ConfigError as error:
        problems.extend(error.problems)
        return None
    if args.price_per_hour is not None:
        cluster = replace(cluster, price_per_hour=args.price_per_hour)
    return replace(cluster, software=software)


def _wrong_device(given: Mapping[str, Any], cluster: Cluster | None) -> Iterator[str]:
    """That the flags of the run ask for another device than the cluster's."""
    device = given.get("device", "auto")
    if cluster is None or device == "auto" or cluster.on_cpu == (device == "cpu"):
        return
    kind = "computes on CPUs" if cluster.on_cpu else "has accelerators"
    other = "cpu" if device == "cpu" else "h100"
    yield f"--device {device}: the cluster {cluster.name} {kind}: leave it out, or use --cluster {other}"


def _software(args: argparse.Namespace, problems: list[str]) -> Software:
    try:
        return MEGACORE if args.software is None else software_named(args.software)
    except ConfigError as error:
        problems.extend(error.problems)
        return MEGACORE


def _with_defaults(
    args: argparse.Namespace, given: Mapping[str, Any], kind: type[Config], problems: list[str]
) -> list[str]:
    """The flags of the run, with those that runs of the software usually have, and mock data and a number of steps
    where tools/plan.py is not given them; without those that the layouts of a search have and the layout that it begins
    from may not."""
    flags = without_fields(args.flags, _OF_DEGREES, kind) if args.search else list(args.flags)
    if _lacks_recompute(args, given):  # which is refused; what else is wrong is still to be found
        flags += ["--recompute", "full"]
    if args.usual_batch is not None:
        flags += ["--global-batch-size", str(args.usual_batch)]
    if "config" in given:
        return flags
    flags = [*flags, *_usual_flags(args, given)]
    if args.is_dry_run:
        return flags
    named = given.keys() | args.unread
    defaults = [] if named & _DATA_FIELDS else ["--mock-data"]
    defaults += [] if "train_iters" in named else ["--train-iters", "1000"]
    if "--mock-data" in defaults and not named & _SOURCES_OF_VOCABULARY:
        problems.append("the model needs a vocabulary: use --preset NAME, --vocab-size N or --tokenizer PATH")
        defaults += ["--vocab-size", "50257"]  # the run is refused; what else is wrong with it is still to be found
    return [*flags, *defaults]


def _usual_batch(args: argparse.Namespace, reading: Given, kind: type[Config]) -> int | None:
    """The batch of a search where nothing gives one: a microbatch for each rank, whatever the degrees are. None: the
    batch is given, or follows from settings of another trainer or from a ramp."""
    given = reading.values
    file = Given() if given.get("config") is None else read_toml(given["config"], kind)
    decided = {*given, *file.values, *reading.unread, *file.unread, *args.foreign}
    if not args.search or args.world_size is None or decided & _SOURCES_OF_BATCH or "micro_batch_size" in args.foreign:
        return None
    micro = {**file.values, **given}.get("micro_batch_size", 1)
    return int(args.world_size * max(micro, 1))


def _usual_flags(args: argparse.Namespace, given: Mapping[str, Any]) -> Iterator[str]:
    """Flags that runs of the software have where these are left out, for what neither a model nor a file decides."""
    decided = {*given, *args.unread, *(_SEARCHED if args.search else ())}
    if given.keys() & _SOURCES_OF_MODEL:
        decided |= {"hidden_dropout", "attention_dropout"}
    if given.keys() & {"virtual_stages", "pipeline_layout", "schedule_csv"}:
        decided |= {"schedule", "pipeline_balance"}
    for name, flags in SOFTWARE.get(args.software, MEGACORE).usual.items():
        if name not in decided:
            yield from flags.split()


def _on_cluster(config: ResolvedConfig, cluster: Cluster) -> ResolvedConfig:
    """With the number format that --precision auto has there."""
    bf16 = not cluster.on_cpu and cluster.peak("bf16") is not None
    return replace(config, precision=config.precision.for_device(bf16=bf16))


def _require_peak(config: ResolvedConfig, cluster: Cluster | None) -> None:
    if cluster is None or config.logging.peak_tflops is not None:
        return
    precision = _on_cluster(config, cluster).precision.precision
    if cluster.peak(precision) is None:
        known = one_of([form for form in ("bf16", "fp16", "fp32") if cluster.peak(form) is not None])
        raise ConfigError(
            [f"--precision {precision}: the peak of {cluster.name} in it is not known: use {known}, or --peak-tflops"]
        )


# ---- search and calibration ------------------------------------------------------------------------------------------


def _search(args: argparse.Namespace, request: _Request) -> None:
    constraints = _constraints(args)
    found = search(request.config, request.cluster, constraints, names_batch=args.names_batch)
    _require_found(found, request, constraints)
    if args.json:
        print(json.dumps(search_json(found, top=args.top, tokens=args.tokens, goodput=args.goodput), indent=1))
    else:
        print(search_table(found, top=args.top, tokens=args.tokens, goodput=args.goodput))
    if args.picture is not None:
        save(frontier_picture(found), args.picture)
        print(f"wrote {args.picture}", file=sys.stderr)


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


def _require_found(found: Found, request: _Request, constraints: Constraints) -> None:
    if found.layouts:
        return
    if not found.tried:
        raise ConfigError([conflict(request.config, request.cluster, constraints)])
    assert found.least_memory is not None
    least = _three_digits(found.least_memory / 1e9, math.ceil)
    is_limited = float(least) <= usable_bytes(request.cluster, constraints.world_size) / 1e9
    raise ConfigError(
        [
            f"--search: no layout of --world-size {constraints.world_size} fits {request.cluster.name} and the given "
            f"limits ({found.tried:,} valid layouts); the smallest needs {least} GB per rank: use "
            f"{f'--max-memory-gb {least}, ' if is_limited else ''}more ranks, a smaller --global-batch-size, or fewer "
            "limits"
        ]
    )


def _three_digits(value: float, rounded: Callable[[float], int]) -> str:
    """A positive number in three digits, `rounded` up or down as math.ceil and math.floor do."""
    digits = max(2 - math.floor(math.log10(value)), 0)
    return f"{rounded(value * 10**digits) / 10**digits:.{digits}f}"


def _calibrate(args: argparse.Namespace) -> None:
    directory: Path = args.calibrate
    take_misspelled(args, args.own_flags, Config)
    path, problems = directory / "cluster.toml", [*args.problems, *_without_effect(args)]
    run = _collected(partial(read_run, directory), problems)
    launch = Launch() if run is None else run.launch
    base = _collected(partial(base_of, args.cluster, launch), problems)
    if run is not None and base is not None:
        problems += wrong_base(base, run)
    if directory.is_dir() and (why := why_unwritable(path)) is not None:
        problems.append(f"--calibrate {directory}: {path.name} {why}, but the fitted cluster is written there")
    if problems or run is None or base is None:
        raise ConfigError(problems)
    fit = calibrate(run, base, machine_of(args.cluster, base, run, _this_machine()))
    replace_bytes(path, to_toml(fit.cluster).encode(), durable=False)
    if args.json:
        print(json.dumps(calibration_json(fit, path), indent=1))
        return
    print(calibration_text(fit))
    print(f"wrote {path}: use it with --cluster {path}")


def _without_effect(args: argparse.Namespace) -> Iterator[str]:
    """What is given beside --calibrate and changes nothing."""
    reads = "--calibrate, which reads the configuration of the run from its directory"
    if args.entry is not None:
        yield f"{args.entry} has no effect with {reads}: leave it out"
    flags = [*args.given, *(word.split("=")[0] for word in args.flags if word.startswith("--"))]
    for flag in dict.fromkeys(flags):
        if flag == "--software":
            yield f"--software {args.software} has no effect with --calibrate, which reads a run of megacore"
        elif flag not in ("--calibrate", "--cluster", "--json"):
            yield f"{flag} has no effect with --calibrate: leave it out"


def _collected(read: Callable[[], _T], problems: list[str]) -> _T | None:
    """What a function returns; or None, and what it refuses added to the problems."""
    try:
        return read()
    except ConfigError as error:
        problems.extend(error.problems)
        return None


def _this_machine() -> Machine | None:
    memory = host_capacity()
    if memory is None:
        return None
    source = "of this machine, as the run recorded none in events.jsonl"
    return Machine(cores=available_cores(), memory_bytes=memory, source=source)


def _tokens(text: str) -> float:
    return _number(text, low=1.0, high=1e18, example="300e9")


def _price(text: str) -> float:
    return _number(text, low=0.0, high=1e6, example="2.5")


def _gigabytes(text: str) -> float:
    if not 0 < (value := _float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0, as in 80")
    return value


def _share(text: str) -> float:
    return _number(text, low=0.01, high=1.0, example="0.9")


def _stage(text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise argparse.ArgumentTypeError(f"{text} must be 0, 1, 2 or 3")
    return int(text)


def _number(text: str, *, low: float, high: float, example: str) -> float:
    if not low <= (value := _float(text)) <= high:
        raise argparse.ArgumentTypeError(f"{text} must be a number from {low:g} to {high:g}, as in {example}")
    return value


def _float(text: str) -> float:
    """A number; NaN where the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
