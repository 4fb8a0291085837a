"""`tools/plan.py --calibrate`: fit a cluster file to a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from megacore.commands.plan_parser import take_misspelled
from megacore.config import Config
from megacore.errors import Collected, ConfigError
from megacore.files import replace_bytes, why_unwritable
from megacore.parallel.host_memory import host_capacity
from megacore.parallel.processors import available_cores
from megacore.plan.calibration import base_of, calibrate, calibration_json, calibration_text, machine_of, wrong_base
from megacore.plan.cluster import to_toml
from megacore.plan.measured_run import Launch, Machine, read_run


def run_calibration(args: argparse.Namespace) -> None:
    """Fit a cluster to the run in a directory, write its file there, and print what was found. Raises ConfigError with
    all that is wrong with the run and the flags."""
    directory: Path = args.calibrate
    take_misspelled(args, args.own_flags, Config)
    path, problems = directory / "cluster.toml", [*args.problems, *_without_effect(args)]
    run = base = None
    with Collected(problems):
        run = read_run(directory)
    with Collected(problems):
        base = base_of(args.cluster, Launch() if run is None else run.launch)
    if run is not None and base is not None:
        problems += wrong_base(base, run)
    if directory.is_dir() and (why := why_unwritable(path)) is not None:
        problems.append(f"--calibrate {directory}: {path.name} {why}, but the fitted cluster is written there")
    if problems or run is None or base is None:
        raise ConfigError(problems)
    for note in base.notes:
        print(f"megacore: note: {note}", file=sys.stderr)
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


def _this_machine() -> Machine | None:
    memory = host_capacity()
    if memory is None:
        return None
    source = "of this machine, as the run recorded none in events.jsonl"
    return Machine(cores=available_cores(), memory_bytes=memory, source=source)
