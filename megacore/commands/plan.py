"""The command behind tools/plan.py and `pretrain_gpt.py --dry-run`: from flags to a plan, a search, pictures. The flags
of the run are read and validated as the trainer does it. Nothing here loads torch."""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megacore import has_ring
from megacore.commands.pictures import report_with_pictures
from megacore.commands.plan_compare import Reads, run_compare
from megacore.commands.plan_operators import require_operators, run_operators
from megacore.commands.plan_parser import (
    ENTRIES,
    PlanParser,
    dashed,
    entry_of,
    gigabytes,
    idle_flags,
    named_entry,
    print_json,
    take_misspelled,
)
from megacore.commands.plan_search import (
    MOST_RANKS,
    OF_DEGREES,
    OF_ONE_LAYOUT,
    SEARCHED,
    add_limits,
    lacks_recompute,
    require_possible_limits,
    run_search,
    searched,
    wrong_given,
    wrong_limits,
)
from megacore.commands.tool import rows_of, run_tool, with_config
from megacore.config import Config, ResolvedConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import given_values, parse_config
from megacore.config.dry_run_flags import DRY_RUN, DRY_RUN_FLAGS
from megacore.config.fields import LARGEST_INT
from megacore.config.flags import read_flags, without_fields
from megacore.config.given import Given
from megacore.config.messages import did_you_mean, one_of
from megacore.config.missing_files import missing_files
from megacore.config.other_trainers import other_trainers
from megacore.config.parallel import AUTO_SCHEDULE, DEVICES
from megacore.config.toml import read_toml
from megacore.drawing.canvas import require_writable
from megacore.errors import Collected, ConfigError
from megacore.pipeline.schedule_file import check_schedule
from megacore.plan.cluster import CLUSTERS, Cluster, cluster_named
from megacore.plan.memory import plan_memory
from megacore.plan.plan_picture import memory_picture, timeline_picture
from megacore.plan.plan_report import as_json, markdown
from megacore.plan.planner import Plan, make_plan, scheduled
from megacore.plan.software import MEGACORE, SOFTWARE, software_named
from megacore.tracer.fake_settings import unfit_settings, unfit_values
from megacore.tracer.memory import traced_memory

_DATA_FIELDS = {"mock_data", "data_path", "train_data_path", "valid_data_path", "valid_sets"}
# Sources of the batch and of --dp. With one of them the run that a search starts from has as many ranks as its given
# degrees say: on all ranks of the search it would need a microbatch for each, and the given --dp would be too small.
_BATCH_OR_REPLICAS = {"global_batch_size", "dp", "config"}
_UNNEEDED = ("--data-path", "--valid-sets", "--tokenizer", "--load", "--pretrained-checkpoint")  # files of a run
_NEEDS = {"--goodput": "--tokens", "--price-per-hour": "--tokens", "--top": "--search", "--fit-out": "--fit"}
_WITHOUT_EFFECT = {
    "--operators": (
        *("--search", "--timeline", "--memory-timeline", "--tokens", "--price-per-hour", "--software", "--estimate"),
        *("--compare",),
    ),
    "--compare": ("--search", "--timeline", "--memory-timeline"),
}
_BUDGET = "--budget"
_SOURCES_OF_BATCH = {"global_batch_size", "rampup_batch_size"}
_SOURCES_OF_MODEL = {"preset", "init_from_hf"}
_SOURCES_OF_VOCABULARY = {"preset", "tokenizer", "vocab_size", "init_from_hf"}


def plan_tool(argv: Sequence[str] | None = None) -> int:
    """tools/plan.py; the exit status is 0 done, 2 refused."""
    words = list(sys.argv[1:] if argv is None else argv)
    if (has_ladder := has_ring("ladder")) and any(word.partition("=")[0] == _BUDGET for word in words):
        status: int = importlib.import_module("megacore.ladder.dial").main(words)
        return status
    given = with_config(words)
    if given != words:
        given = [entry_of(given[1]), *given]
    named = named_entry(given)
    parser = _parser("plan.py", f"plan.py {named} --cluster NAME [flags of {Path(named).name}]")
    parser.add_rows(rows_of("plan.py"), entries=one_of(ENTRIES))
    if has_ladder:
        parser.flag(f"{_BUDGET} BUDGET", 'propose a run, as for "8 h on 8 x h100"')
    parser.set_defaults(help_of=parser.prog, own_flags=parser.names())
    parser.elsewhere[_BUDGET] = "needs megacore/ladder, which is not installed: leave it out"
    parser.elsewhere[DRY_RUN] = (
        f"has no effect here, as plan.py always plans: leave it out, or use {named} {DRY_RUN}=full"
    )
    return run_tool(parser, given, _plan)


def plan_run(argv: Sequence[str], entry: str) -> int:
    """`--dry-run` of an entry point: plan the run in place of it; `--dry-run=full`: take a step of it without devices.
    Returns the exit status: 0 done, 2 refused, or a rank failed."""
    words = [dashed(word) for word in argv]
    if f"{DRY_RUN}=full" in words or (DRY_RUN, "full") in itertools.pairwise(words):
        parser = _full_parser(entry)
        action = _run_fully
        way_out = f"has no effect with {DRY_RUN}=full, which computes no time: leave it out, or use {DRY_RUN}"
        of_plans = _parser(entry, entry).names() - parser.names()
        parser.elsewhere |= dict.fromkeys(sorted(of_plans), way_out)
    else:
        parser = _parser(f"{entry} --dry-run", f"{entry} --dry-run [--world-size N] [--cluster NAME] [flags of a run]")
        action = _plan
    parser.flag(DRY_RUN, DRY_RUN_FLAGS[DRY_RUN].doc, nargs="?", const="plan", choices=("plan", "full"))
    parser.elsewhere["--calibrate"] = "is a flag of tools/plan.py: use python tools/plan.py --calibrate DIR"
    for flag in ("--fit", "--fit-out"):
        parser.elsewhere[flag] = "is a flag of tools/plan.py: use python tools/plan.py --fit ROWS.csv"
    parser.set_defaults(own_flags=parser.names(), entry=entry, calibrate=None, fit=None, fit_out=None)
    parser.set_defaults(is_dry_run=True, help_of=entry)
    return run_tool(parser, argv, action)


def _full_parser(entry: str) -> PlanParser:
    usage = f"{entry} --dry-run=full [--world-size N] [--cluster NAME] [flags of a run]"
    parser = PlanParser.of("dry_run_full", prog=f"{entry} --dry-run=full", usage=usage, clusters=", ".join(CLUSTERS))
    parser.set_defaults(cluster="h100")  # for a job of GPUs: any of them, as no time is computed
    # What only the plan has.
    parser.set_defaults(search=False, timeline=None, memory_timeline=None, picture=None, price_per_hour=None)
    parser.set_defaults(software=None, operators=False, compare=None, is_full=True)
    return parser


def _parser(prog: str, usage: str) -> PlanParser:
    known = {"clusters": ", ".join(CLUSTERS), "software": one_of(list(SOFTWARE)), "gigabytes": gigabytes}
    parser = PlanParser.of("plan", prog=prog, usage=usage, **known)
    add_limits(parser)
    parser.set_defaults(is_dry_run=False, is_full=False, fitted={})
    return parser


def _plan(args: argparse.Namespace) -> None:
    if args.calibrate is not None:
        from megacore.commands.plan_calibration import run_calibration

        run_calibration(args)
        return
    if "--calibrate" in args.misspelled:
        raise ConfigError(args.problems)
    read = _read if args.fit is None else _with_fit(args)
    if args.compare is not None:
        run_compare(args, _kind(args), read)
        return
    config, cluster = read(args)
    if args.search:
        run_search(args, config, cluster)
        return
    if args.operators:
        run_operators(args, config, cluster)
        return
    plan = make_plan(scheduled(config, cluster), cluster, find_memory=plan_memory if args.estimate else traced_memory)
    pictures = ((args.timeline, timeline_picture), (args.memory_timeline, memory_picture))
    report_with_pictures([(path, partial(picture, plan)) for path, picture in pictures], partial(_report, args, plan))


def _with_fit(args: argparse.Namespace) -> Reads:
    """`_read`, with the cluster that the rows of --fit say it is."""
    from megacore.commands.plan_fit import fitted_cluster, measured_rows, without_notes

    entry = args.entry if args.entry in ENTRIES else ENTRIES[0]
    planner = [f"--cluster={args.cluster}", *([] if args.software is None else [f"--software={args.software}"])]

    def resolved(flags: Sequence[str]) -> ResolvedConfig:
        with without_notes():
            return read_plan([entry, *planner, *flags], help_of=args.help_of)[1]

    rows = measured_rows(args, _kind(args), None if args.cluster is None else resolved)
    software = args.software
    config, shipped = _read(args)
    if shipped.kinds:
        raise ConfigError([f"--fit needs one kind of device, and --cluster {args.cluster} has several: name one"])
    fitted = fitted_cluster(args, rows, shipped)
    args.software = software  # as given: a layout may have a cluster of its own

    def read(other: argparse.Namespace) -> tuple[ResolvedConfig, Cluster]:
        if other is args:
            return config, fitted
        own, cluster = _read(other)
        return own, fitted if cluster == shipped else cluster

    return read


def read_plan(
    words: Sequence[str], *, help_of: str = "plan.py", problems: Sequence[str] = ()
) -> tuple[argparse.Namespace, ResolvedConfig, Cluster]:
    """What tools/plan.py reads of its words: its own flags, the configuration, and the cluster. `problems`: what the
    caller has found wrong. Raises ConfigError with everything that is wrong."""
    parser = _parser(help_of, help_of)
    parser.add_argument("entry", nargs="?")
    parser.set_defaults(own_flags=parser.names(), help_of=help_of)
    args = parser.parse_args(words)
    args.problems += problems
    return args, *_read(args, exits=False)


def _report(args: argparse.Namespace, plan: Plan) -> None:
    if args.json:
        print_json(args, as_json(plan, tokens=args.tokens, goodput=args.goodput))
    else:
        print(markdown(plan, tokens=args.tokens, goodput=args.goodput))


def _run_fully(args: argparse.Namespace) -> None:
    from megacore.commands.dry_run_report import report_ranks

    config, cluster = _read(args)
    report_ranks(scheduled(config, cluster), cluster, is_named="--cluster" in args.given, as_json=args.json)


def _kind(args: argparse.Namespace) -> type[Config]:
    return BertConfig if args.entry and Path(args.entry).name == "pretrain_bert.py" else Config


def _read(args: argparse.Namespace, *, exits: bool = True) -> tuple[ResolvedConfig, Cluster]:
    """The configuration and the cluster, or a refusal with everything that is wrong with both; `exits` is that of
    `parse_config`."""
    entry, kind = Path(args.entry).name if args.entry else None, _kind(args)
    take_misspelled(args, args.own_flags, kind)
    problems: list[str] = [*args.problems, *idle_flags(args.given, _NEEDS, args.misspelled)]
    cluster = _cluster(args, problems)
    if entry not in ENTRIES:
        named = "no entry point is given" if entry is None else f"{entry} is no entry point"
        problems.append(f"{named}: use {one_of(ENTRIES)} first" + (did_you_mean(entry, ENTRIES) if entry else ""))
    for flag in ("--timeline", "--memory-timeline", "--picture"):
        path = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if path is not None:
            with Collected(problems):
                require_writable(path, flag)
    for mode in _WITHOUT_EFFECT.keys() & args.given:
        idle = (flag for flag in _WITHOUT_EFFECT[mode] if flag in args.given)
        problems += [f"{flag} has no effect with {mode}: leave one of them out" for flag in idle]
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
    typed = dict(given)
    file = Given() if given.get("config") is None else read_toml(given["config"], kind)
    args.foreign = {name for setting in reading.foreign for name in setting.fields}
    args.of_file = {*file.values, *file.unread}
    if args.search and given.get("deepspeed_config") is not None:
        problems += _take_deepspeed(args, given["deepspeed_config"])
    if args.search and args.foreign & set(SEARCHED):
        problems += _take_foreign(args, reading, kind)
    args.given_device = given.get("device")
    problems += _wrong_device(given, cluster)
    args.unfit = [*unfit_values(given_values(args.flags, kind, _shape_for(kind))[0])] if args.is_full else []
    problems += args.unfit
    args.usual_batch = _usual_batch(args, reading, file)
    args.has_file = "config" in given
    args.may_offload = "offload_optimizer" not in given
    args.names_batch = args.usual_batch is not None or ("config" in given and "global_batch_size" not in given)
    args.fixed = {name: given[name] for name in SEARCHED if name in given and given[name] != AUTO_SCHEDULE}
    if (blocks := file.values.get("recompute_num_layers")) is not None and args.search:  # which no flag takes back
        args.fixed = {"recompute": "full", "recompute_num_layers": blocks, **args.fixed}
    problems += [*wrong_limits(args, cluster), *wrong_given(args, given)]
    if args.world_size is not None and args.world_size > MOST_RANKS:
        problems.append(f"--world-size {args.world_size} must be at most {MOST_RANKS}")
    is_smaller = args.search and (given.keys() | args.foreign) & _BATCH_OR_REPLICAS
    config = parse_config(
        _with_defaults(args, given, kind, problems),
        prog=args.help_of,
        description="Plan a run.",
        kind=kind,
        shape=_shape_for(kind),
        vocabulary=_vocabulary_size,
        checks=[
            check_schedule,
            lambda resolved: cluster and cluster.used_by(args.world_size or resolved.parallel.ranks),
            lambda resolved: _require_peak(resolved, cluster),
            lambda resolved: require_possible_limits(resolved, cluster, args),
            lambda resolved: _require_full_dry_run(resolved, cluster, args),
            lambda resolved: require_operators(resolved, cluster) if args.operators else None,
            lambda resolved: _print_notes(resolved, cluster),  # on the first rank of each machine, as all checks
        ],
        planned=True,
        files_elsewhere=True,
        may_be_launched=args.is_dry_run,
        searched=searched(args),
        computes_on_cpu=None if cluster is None else lambda _: cluster.on_cpu,
        world_size=None if args.usual_batch is not None or is_smaller else args.world_size,
        problems=problems,
        typed={} if args.search else typed,
        exits=exits and args.compare is None,
    )
    assert cluster is not None
    return _on_cluster(config, cluster), cluster.used_by(args.world_size or config.parallel.ranks)


def _shape_for(kind: type[Config]) -> Callable[[Mapping[str, Any]], dict[str, Any]] | None:
    """`shape_from_hf` for models that a directory of Hugging Face's may describe."""
    return None if kind is BertConfig else _shape_from_hf


def _shape_from_hf(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("init_from_hf") is None:
        return {}
    from megacore.convert.start import shape_from_hf

    return shape_from_hf(given)


def _vocabulary_size(config: Config) -> int:
    """As `vocabulary_size` of the data has it."""
    tokenizer, size = config.data.tokenizer, config.model.vocab_size
    is_here = tokenizer is not None and os.path.exists(tokenizer)
    if size and not is_here:
        return size
    if tokenizer is not None and not is_here:
        raise ConfigError(
            [f"--tokenizer {tokenizer} is not on this machine: add --vocab-size N, all that a plan needs"]
        )
    from megacore.data.gpt.build import vocabulary_size

    return vocabulary_size(config)


def _require_full_dry_run(config: ResolvedConfig, cluster: Cluster | None, args: argparse.Namespace) -> None:
    if not args.is_full:
        return
    problems = [problem for problem in unfit_settings(config) if problem not in args.unfit]
    is_named = args.given_device is not None  # by a flag, which is refused in other words
    if config.parallel.device == "cpu" and cluster is not None and not cluster.on_cpu and not is_named:
        problems.append(f"device = cpu: {DRY_RUN}=full takes the job for one of {args.cluster}; add --cluster cpu")
    if problems:
        raise ConfigError(problems)


def _cluster(args: argparse.Namespace, problems: list[str]) -> Cluster | None:
    software = MEGACORE
    with Collected(problems):
        software = MEGACORE if args.software is None else software_named(args.software)
    name = args.cluster or ("laptop" if args.is_dry_run else None)
    if name is None and "--cluster" in args.misspelled:
        return None
    if name is None:
        problems.append(f"--cluster is missing: use {one_of(list(CLUSTERS))}, or a file that ends in .toml")
        return None
    cluster = None
    with Collected(problems):
        cluster = cluster_named(name)
    if cluster is None:
        return None
    if args.price_per_hour is not None:
        cluster = replace(cluster, price_per_hour=args.price_per_hour)
    if args.software in (None, cluster.software.name):
        args.software = cluster.software.name
        return cluster
    return replace(cluster, software=software, layouts=None)  # those are of the trainer that was fitted


def _take_foreign(args: argparse.Namespace, reading: Given, kind: type[Config]) -> Iterator[str]:
    """Take what other trainers' flags say of a layout for given, as a search keeps it; what is wrong with those that
    the run does not begin from."""
    values, problems = given_values(args.flags, kind, _shape_for(kind))
    for name in args.foreign.intersection(SEARCHED):
        reading.values.pop(name, None)  # as in `--recompute-method uniform`, which takes no number of blocks
        reading.values |= {name: values[name]} if name in values else {}
    left_out = [setting.source for setting in reading.foreign if set(setting.fields) & set(OF_DEGREES)]
    yield from (problem for problem in problems if problem.startswith(tuple(left_out)))


def _take_deepspeed(args: argparse.Namespace, path: str) -> Iterator[str]:
    """Take what a DeepSpeed configuration says of a layout for given, as no flag may say otherwise; what it says of one
    layout only is refused."""
    settings, problems = other_trainers().settings_of_search(path)
    yield from problems
    # What follows from the batch alone is no value that the search must keep.
    args.foreign |= {name for setting in settings if not setting.is_last for name in setting.fields}
    args.foreign |= {"global_batch_size"} & {name for setting in settings for name in setting.fields}


def _wrong_device(given: Mapping[str, Any], cluster: Cluster | None) -> Iterator[str]:
    """That the flags of the run ask for another device than the cluster's."""
    device = given.get("device", "auto")
    if device not in DEVICES:
        yield f"--device {device} is not known: use {one_of(DEVICES)}{did_you_mean(device, DEVICES)}"
        return
    if cluster is None or device == "auto" or cluster.on_cpu == (device == "cpu"):
        return
    kind = "computes on CPUs" if cluster.on_cpu else "has accelerators"
    other = "cpu" if device == "cpu" else "h100"
    yield f"--device {device}: the cluster {cluster.name} {kind}: leave it out, or use --cluster {other}"


def _with_defaults(
    args: argparse.Namespace, given: Mapping[str, Any], kind: type[Config], problems: list[str]
) -> list[str]:
    """The flags of the run, with those that runs of the software usually have, and mock data and a number of steps
    where tools/plan.py is not given them; without those that the layouts of a search may not have."""
    flags = without_fields(args.flags, (*OF_DEGREES, *OF_ONE_LAYOUT), kind) if args.search else list(args.flags)
    if lacks_recompute(args, given):  # which is refused; what else is wrong is still to be found
        flags += ["--recompute", "full"]
    if args.usual_batch is not None:
        flags += ["--global-batch-size", str(args.usual_batch)]
    if "config" not in given:
        flags = [*flags, *_usual_flags(args, given)]
    if args.is_dry_run or "config" in args.unread:
        return flags
    named = given.keys() | args.unread | args.of_file | args.foreign
    defaults = [] if named & _DATA_FIELDS else ["--mock-data"]
    defaults += [] if "train_iters" in named else ["--train-iters", "1000"]
    if "--mock-data" in defaults and not named & _SOURCES_OF_VOCABULARY:
        problems.append("the model needs a vocabulary: use --preset NAME, --vocab-size N or --tokenizer PATH")
        defaults += ["--vocab-size", "50257"]  # the run is refused; what else is wrong with it is still to be found
    return [*flags, *defaults]


def _usual_batch(args: argparse.Namespace, reading: Given, file: Given) -> int | None:
    """The batch of a search where nothing gives one: a microbatch for each rank, whatever the degrees are. None: the
    batch is given, or follows from settings of another trainer or from a ramp."""
    given = reading.values
    decided = {*given, *reading.unread, *args.of_file, *args.foreign}
    is_unknown = "micro_batch_size" in args.foreign - given.keys()
    if not args.search or args.world_size is None or decided & _SOURCES_OF_BATCH or is_unknown:
        return None
    micro = {**file.values, **given}.get("micro_batch_size", 1)
    replicas = {**file.values, **given}.get("dp") or 1
    batch = math.lcm(args.world_size, max(replicas, 1)) * max(micro, 1)  # of a --dp that is to be refused by itself
    return int(batch) if batch <= LARGEST_INT else int(args.world_size)


def _usual_flags(args: argparse.Namespace, given: Mapping[str, Any]) -> Iterator[str]:
    """Flags that runs of the software have where these are left out, for what neither a model nor a file decides."""
    decided = {*given, *args.unread, *(SEARCHED if args.search else ())}
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


def _print_notes(config: ResolvedConfig, cluster: Cluster | None) -> None:
    missing = missing_files(config) if config.model.vocab_size else []  # 0: it is not known, and the plan is refused
    lacking = (problem.partition(": use")[0] for problem in missing if problem.startswith(_UNNEEDED))
    notes = (f"{problem}; a plan does not need it" for problem in lacking)
    for note in (*notes, *(cluster.notes if cluster else ())):
        print(f"megacore: note: {note}", file=sys.stderr)


def _require_peak(config: ResolvedConfig, cluster: Cluster | None) -> None:
    if cluster is None or config.logging.peak_tflops is not None:
        return
    precision = _on_cluster(config, cluster).precision.precision
    if cluster.peak(precision) is None:
        known = one_of([form for form in ("bf16", "fp16", "fp32") if cluster.peak(form) is not None])
        raise ConfigError(
            [f"--precision {precision}: the peak of {cluster.name} in it is not known: use {known}, or --peak-tflops"]
        )
