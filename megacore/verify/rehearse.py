"""`--rehearse`: a command line of many processes, cut to this machine and run: same features, small sizes, few steps.
The largest layout with the same kinds of parallelism that fits is chosen, the model is narrowed for it, and a launcher
of its own starts it. Under another launcher, rank 0 does so and the other ranks end at once."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megacore.checkpoint.check import settings_to_continue
from megacore.commands.dry_run import is_dry_run
from megacore.commands.tool import ToolParser, positive, run_tool
from megacore.config import Config, ResolvedConfig, ResolvedPrecision
from megacore.config.bert import BertConfig
from megacore.config.checkpoint import StartConfig
from megacore.config.cli import parse_config, refusal
from megacore.config.dimensions import ranks_of_role
from megacore.config.dry_run_flags import REHEARSE
from megacore.config.flags import all_fields
from megacore.config.messages import counted
from megacore.config.missing_files import missing_files
from megacore.config.nodes import launcher_number
from megacore.config.parallel import ResolvedParallel
from megacore.config.rampup import RampupConfig
from megacore.config.spelling import flag, flag_and_value
from megacore.config.toml import save_toml
from megacore.config.validation import violations
from megacore.convert.start import shape_from_hf
from megacore.data.gpt.build import vocabulary_size
from megacore.errors import EXIT_REFUSED, ConfigError, UserError
from megacore.parallel.processors import computes_on_cpu
from megacore.train.starting import REHEARSAL
from megacore.verify.narrow import fixed, narrow

PROCESSES = 8
"""At most, where no number is given."""
BEHIND = "MEGACORE_REHEARSE_PATH"
"""The variable in which tools/rehearse.py keeps the PATH of a script that it runs, for what is not replaced."""
_MORE = (2, 4, 8, 16, 32, 64)  # processes that are tried where fewer do not suffice
_STEPS = 4
_INTERVAL = 2  # steps between evaluations, and between checkpoints
_LOSS_SCALE = 1024.0
_GPT2_VOCABULARY = 50257
_WIDTH = 110
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_DEGREES, _INPUTS = _TABLES["degrees"], tuple(_TABLES["inputs"])
# What the variables of a launcher begin with: the cut run has a launcher of its own.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PET_", REHEARSAL)


def is_rehearsal(argv: Sequence[str]) -> bool:
    """Whether `--rehearse` is among the flags of an entry point, or its variable is set and no plan is asked for."""
    is_flag = any(word.split("=")[0] == REHEARSE for word in argv)
    return is_flag or (bool(os.environ.get(REHEARSAL)) and not is_dry_run(argv))


def rehearse(argv: Sequence[str], entry: str) -> int:
    """Cut the run of an entry point and start it; the exit status: that of the cut run, or 2 where the command line is
    refused."""
    try:
        if launcher_number("RANK", 0):
            return 0
    except ConfigError as error:
        print(refusal(entry, error.problems), file=sys.stderr)
        return EXIT_REFUSED
    own, words = ([word for word in argv if (word.split("=")[0] == REHEARSE) == is_own] for is_own in (True, False))
    parser = ToolParser(prog=f"{entry} {REHEARSE}" if own else REHEARSAL, add_help=False)
    parser.add_argument(REHEARSE, nargs="?", type=positive, const=PROCESSES)
    allow = f"{REHEARSE}={{}}" if own else "--processes {}" if BEHIND in os.environ else f"{REHEARSAL}={{}}"

    def run(given: argparse.Namespace) -> int:
        if is_dry_run(words):
            raise UserError(f"{REHEARSE} runs and --dry-run plans: leave one of them out")
        return _run(cut(words, entry, given.rehearse, allow), entry)

    return run_tool(parser, own or [f"{REHEARSE}={os.environ[REHEARSAL]}"], run)


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A run that is cut to this machine."""

    full: ResolvedConfig  # the run as it is given, resolved
    cut: ResolvedConfig  # the run that is started, resolved
    lacking: tuple[str, ...]  # what is wrong with the files that this machine lacks
    left_out: tuple[str, ...]  # what of the run the cut one cannot have


def cut(words: Sequence[str], entry: str, most: int, allow: str = f"{REHEARSAL}={{}}") -> Rehearsal:
    """A run cut to this machine. `entry`: the name of its entry point; `allow`: how the user says how many processes
    it may have. Raises ConfigError with a file that the shape of the model or the schedule is in is missing; UserError
    where no layout of so few processes has all other features."""
    is_bert = entry == "pretrain_bert.py"
    full: ResolvedConfig = parse_config(
        words,
        prog=entry,
        description="",
        kind=BertConfig if is_bert else Config,
        shape=None if is_bert else shape_from_hf,
        continued=settings_to_continue,
        vocabulary=_vocabulary,
        planned=True,
        files_elsewhere=True,
        world_size=launcher_number("WORLD_SIZE", low=1) if os.environ.get("WORLD_SIZE") else None,
    )
    lacking = tuple(problem for problem in missing_files(full) if not problem.startswith("--output-dir"))
    found = _valid_cut(full, most, lacking)
    if isinstance(found, Rehearsal):
        return found
    more = next((n for n in _MORE if n > most and isinstance(_valid_cut(full, n, lacking), Rehearsal)), None)
    way_out = f"; allow more, as in {allow.format(more)}" if more else ""
    raise UserError(f"no cut of this run to at most {counted(most, 'process', 'processes')} is valid: {found}{way_out}")


def _valid_cut(full: ResolvedConfig, most: int, lacking: tuple[str, ...]) -> Rehearsal | str:
    """The first cut to at most so many processes that is valid, or what is wrong with the first one."""
    problems: list[str] = []
    parallel = full.parallel
    small_ones = {
        "virtual_stages": min(parallel.virtual_stages, 2),
        "zero_shard_size": None if parallel.zero_shard_size is None else 2,
    }
    names = {"rampup": "--rampup-batch-size", "precision": flag_and_value("fp8", full.precision.fp8)}
    options: list[dict[str, Any]] = [{}, {"rampup": RampupConfig()}]
    if full.precision.fp8 != "none":  # its tiles may be wider than the narrow model, which stays in 16 bits then
        options += [{**one, "precision": ResolvedPrecision(precision="bf16")} for one in options]
    for degrees in _layouts(parallel, most):
        small = _small(full.with_degrees({**degrees, **small_ones}), lacking)
        for changes in options:
            candidate = replace(small, **changes)
            if not (found := violations(candidate, candidate.parallel.ranks)):
                lost = (text for section, text in names.items() if section in changes)
                left_out = (*_left_out(full, candidate), *lost)
                return Rehearsal(full=full, cut=candidate, lacking=lacking, left_out=left_out)
            problems = problems or found
    return problems[0]


def _vocabulary(config: Config) -> int:
    """The size of the vocabulary; without a tokenizer's file, that of GPT-2."""
    try:
        return vocabulary_size(config)
    except UserError:
        return _GPT2_VOCABULARY


def _layouts(parallel: ResolvedParallel, most: int) -> Iterator[dict[str, int]]:
    """Degrees of at most so many ranks, those with the most kinds of parallelism first, and of these the smallest."""
    degrees = {name: getattr(parallel, name) for name in _DEGREES}
    first = ("dp", *_DEGREES) if parallel.zero_stage else _DEGREES
    options = [sorted({1, min(degree, 2), min(degree, 4)}) for degree in degrees.values()]
    found = []
    for chosen in itertools.product(*options):
        cut = dict(zip(degrees, chosen, strict=True))
        ranks = math.prod(cut[name] for name in _DEGREES if name != "ep")
        lost = [degrees[name] > 1 and cut[name] == 1 for name in first]
        if ranks <= most:
            found.append((sum(lost), lost, ranks, max(chosen), chosen, cut))
    for *_, cut in sorted(found, key=lambda one: one[:-1]):
        yield cut


def _small(full: ResolvedConfig, lacking: Sequence[str]) -> ResolvedConfig:
    """The run with small sizes and few steps. What is no size, degree or duration stays as it is."""
    parallel, small = full.parallel, narrow(full).config
    training, optimizer, checkpoint, logging = full.training, full.optimizer, full.checkpoint, full.logging
    unit = small.training.micro_batch_size * ranks_of_role("batch", parallel)
    if parallel.schedule == "interleaved":
        unit *= parallel.pp
    batch = small.training.global_batch_size
    ramp = tuple(map(str, (unit, unit, 2 * unit))) if full.rampup.rampup_batch_size else ()
    data, vocabulary = small.data, small.model.vocab_size
    if not any(problem.startswith(_INPUTS) for problem in lacking) and not full.data.mock_data:
        data, vocabulary = replace(full.data, seq_length=data.seq_length), full.model.vocab_size
    precision, scale = full.precision, full.precision.initial_loss_scale
    if scale is not None:  # one that does not skip all of the few steps
        precision = replace(precision, initial_loss_scale=min(scale, _LOSS_SCALE))
    few = {name: min(steps, most) for name, most in _TABLES["few_steps"].items() if (steps := getattr(optimizer, name))}
    evaluates = training.eval_interval > 0 and full.eval_iters > 0
    return replace(
        small,
        model=replace(small.model, vocab_size=vocabulary, init_method_std=full.model.init_method_std),
        parallel=replace(small.parallel, device=_device(parallel), bucket_size_mb=parallel.bucket_size_mb),
        precision=precision,
        data=data,
        optimizer=replace(optimizer, **few),
        training=replace(
            small.training,
            global_batch_size=2 * unit if ramp else batch,
            train_iters=_STEPS,
            eval_interval=_INTERVAL if evaluates else 0,
            eval_iters=int(evaluates),
            kernels=training.kernels,
        ),
        rampup=RampupConfig(rampup_batch_size=ramp),
        checkpoint=replace(
            checkpoint, **fixed(_TABLES["checkpoint"]), save_interval=checkpoint.save_interval and _INTERVAL
        ),
        start=StartConfig(),
        logging=replace(logging, **fixed(_TABLES["logging"])),
        watch=replace(
            full.watch,
            check_replicas_interval=min(full.watch.check_replicas_interval, _STEPS),
            replay_interval=min(full.watch.replay_interval, _STEPS),
            **{name: full.watch.infos[name].default for name in _TABLES["watch"]["defaults"]},
        ),
        spikes=full.spikes,
        average=full.average,
    )


def _device(parallel: ResolvedParallel) -> str:
    """The device, or the CPU where this machine has too few of it."""
    if computes_on_cpu(parallel.device):
        return "cpu"
    import torch

    return parallel.device if torch.accelerator.device_count() >= parallel.ranks else "cpu"


def _switched_off(full: ResolvedConfig, cut: ResolvedConfig) -> list[str]:
    """Features whose group has several ranks in the run, and one in the cut one."""
    sizes = {name: [ranks_of_role(role, c.parallel) for c in (full, cut)] for name, role in _TABLES["used_by"].items()}
    return [name for name, (before, after) in sizes.items() if before > 1 and after == 1]


def _left_out(full: ResolvedConfig, cut: ResolvedConfig) -> Iterator[str]:
    """What of the run the cut one does not have."""
    for name in (*_DEGREES, "virtual_stages"):
        if (degree := getattr(full.parallel, name)) > 1 and getattr(cut.parallel, name) == 1:
            yield flag_and_value(name, degree)
    for name in _switched_off(full, cut):
        if full.value(name) not in (None, False, "auto"):
            yield flag_and_value(name, full.value(name))
    for name in (name for name in _TABLES["dropped"] if name in all_fields(type(full))):
        if full.value(name) and not cut.value(name):
            yield flag_and_value(name, full.value(name))


# ---- running and saying ----------------------------------------------------------------------------------------------


def _run(rehearsal: Rehearsal, entry: str) -> int:
    """Start the cut run in a folder of its own, which goes with it; returns its exit status."""
    cut = rehearsal.cut
    print("\n".join(_table(rehearsal)), flush=True)
    ranks = cut.parallel.ranks
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        save_toml(replace(cut, training=replace(cut.training, output_dir=f"{folder}/run")), f"{folder}/cut.toml")
        command = [sys.executable, *launcher, sys.argv[0], "--config", f"{folder}/cut.toml"]
        status = subprocess.run(command, env=environment, check=False).returncode
    said = _conclusion(rehearsal, entry) if status == 0 else f"rehearsal: the cut run ended with status {status}"
    print(textwrap.fill(said, _WIDTH, break_on_hyphens=False), flush=True)
    return status


def _table(rehearsal: Rehearsal) -> Iterator[str]:
    """What is cut, what is kept, and what is missing here."""
    full, cut = rehearsal.full, rehearsal.cut
    yield "rehearsal: yours -> rehearsed"
    rows = [("processes", str(full.parallel.ranks), str(cut.parallel.ranks))]
    for name in _TABLES["sizes"]:
        if (before := full.value(name)) != (after := cut.value(name)):
            rows.append((flag(name), str(before), "left out" if after is None else str(after)))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, old, new in rows:
        yield f"  {name:{widths[0]}}  {old:>{widths[1]}} -> {new}"
    off = _switched_off(full, cut)
    features = (name for name in _TABLES["features"] if name not in off and full.value(name) not in (None, False))
    kept = [flag_and_value(name, full.value(name)) for name in features]
    yield textwrap.fill(f"kept: {' '.join(kept)}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    for problem in rehearsal.lacking:
        instead = "; mock data instead" if problem.startswith(_INPUTS) else ""
        yield f"not on this machine: {problem.partition(': use')[0]}{instead}"


def _conclusion(rehearsal: Rehearsal, entry: str) -> str:
    full, cut = rehearsal.full, rehearsal.cut
    done = [f"trained {_STEPS} steps", *(["evaluated"] if cut.training.eval_interval else [])]
    done += ["saved a checkpoint"] if cut.checkpoint.save_interval else []
    unchecked = ["memory and time at full size (--dry-run)", "other machines and their network"]
    unchecked += ["accelerators"] if computes_on_cpu(cut.parallel.device) else []
    unchecked += ["your data and tokenizer"] if cut.data.mock_data and not full.data.mock_data else []
    return (
        f"rehearsed: {entry} accepts the whole command line on {counted(full.parallel.ranks, 'process', 'processes')}, "
        f"and cut to {cut.parallel.ranks} it {', '.join(done[:-1])}{' and ' * (len(done) > 1)}{done[-1]}; not checked: "
        f"{', '.join([*unchecked, *rehearsal.left_out])}"
    )
