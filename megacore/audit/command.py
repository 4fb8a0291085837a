"""tools/audit.py: check a ledger, checkpoints against it, another ledger, and steps that are computed again."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from argparse import Namespace
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from megacore.audit.check import (
    History,
    checkpoint_problems,
    different_facts,
    first_difference,
    in_ranges,
    uncovered,
)
from megacore.audit.commits import commits_since, first_change
from megacore.audit.ledger import FILE, BrokenLedger
from megacore.audit.replay import checkpoints_in, replay
from megacore.commands.tool import PassingParser, positive, require_none, run_tool
from megacore.config.cli import printable
from megacore.config.flags import flags_by_name, read_flags
from megacore.config.messages import counted, nearest_name
from megacore.errors import EXIT_REFUSED, UserError
from megacore.remote import Location, usable

EXIT_WRONG = 1
_NEVER = (
    "validation losses, gradients but for their norm, 16-bit copies of weights, frozen weights beside adapters, and "
    "whoever writes a whole new ledger with new checkpoints: keep the seal elsewhere, and give it with --seal"
)


class _Parser(PassingParser):
    """What it does not know is of the replay's layout."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known = super().parse_args(args, namespace)
        problems, wrong = known.problems, read_flags(known.flags).problems
        for said in wrong:
            flag, is_unknown, _ = said.partition(" is not a flag")
            near = nearest_name(flag, [*self.names(), *flags_by_name()]) if is_unknown else None
            known_as = f"{flag} is not a flag: did you mean {near}?" if near else said
            problems.append(known_as.removesuffix(" (--help all lists flags)"))
        if known.flags and not problems and known.replay is None and known.bisect is None:
            problems.append(f"{known.flags[0]} goes with --replay STEP, as in --replay 100")
        if "load" in read_flags(known.flags).values:
            problems.append("--load is not of the layout: name the checkpoint to begin with by --checkpoint DIR")
        if known.against is not None and known.bisect is None:
            problems.append(f"--against {known.against} goes with --bisect, as in --bisect --against {known.against}")
        if known.replay is not None and known.bisect:
            problems.append(f"--bisect {known.bisect} finds the step itself: leave out --replay")
        require_none(problems)
        return known


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 where all agrees, 1 where something does not, 2 for what is refused."""
    parser = _Parser(
        prog="audit.py",
        allow_abbrev=False,
        description="Check the ledger of a run: its chain, its checkpoints, and steps that are computed again.",
        epilog="Further flags are the layout and other settings of these steps, such as --tp 2 under torchrun.",
    )
    parser.add_argument("run", metavar="RUN", help=f"output directory of a run with --ledger, or its {FILE}")
    parser.add_argument("--checkpoint", metavar="DIR", help="checkpoint, or directory of some. Default: those of RUN")
    help = "compute a step again, or FIRST-LAST up to the first that differs"
    parser.add_argument("--replay", type=_steps, metavar="STEP", help=help)
    help = "find the first step of --replay, or of all, that is wrong or not as in another RUN, and what of it is"
    parser.add_argument("--bisect", nargs="?", const="", metavar="RUN", help=help)
    help = "with --bisect: find the commit since REV that changed the step, in the repository of megacore"
    parser.add_argument("--against", metavar="REV", help=help)
    parser.add_argument("--seal", metavar="SHA256", help="seal of an earlier audit, which must still be there")
    wrong: list[str] = []
    is_first = os.environ.get("RANK", "0") == "0"

    def audit(args: Namespace) -> None:
        with contextlib.redirect_stdout(sys.stdout if is_first else io.StringIO()):
            wrong.extend(_audit(args))

    status = run_tool(parser, argv, audit)
    if not is_first:  # one that ends with 1 takes the others down, and the first may still try commits
        wrong.clear()
    for problem in wrong:
        print(f"wrong: {printable(problem)}", flush=True)
    return status or (EXIT_WRONG if wrong else 0)


def _audit(args: Namespace) -> Iterator[str]:
    """Do what is asked, and print it; yields what is wrong."""
    if args.against is not None:
        commits_since(args.against)  # before what takes long
    try:
        history = History(_ledger_of(args.run))
        other = History(_ledger_of(args.bisect)) if args.bisect else None
    except BrokenLedger as error:
        yield str(error)
        return
    if args.seal is not None and args.seal not in {line.sha256 for line in history.lines}:
        yield f"{history.path} has no line with the seal {args.seal}: it was written anew, or cut off"
    steps = args.replay
    if other is not None:
        step = yield from _different(history, other)
        steps = None if step is None else range(step, step + 1)
    elif args.bisect is not None and steps is None:
        if not history.steps:
            raise UserError(f"{history.path} has no step yet: leave out --bisect, or wait for the first one")
        steps = range(min(history.steps), max(history.steps) + 1)
    if steps is not None:
        try:
            yield from _replayed(history, steps, args)
        except UserError as error:
            if other is None or args.against:
                raise
            print(f"  not computed again: {error}")
        return
    _print_summary(history)
    missing, checkpoints = set[str](), _checkpoints(args)
    for directory in checkpoints:
        problems = list(checkpoint_problems(directory, history))
        yield from problems
        if not problems:
            print(f"  {directory.name}: every tensor is what the ledger says")
            missing |= uncovered(directory, history)
    if args.checkpoint is None and Path(args.run).is_dir():
        there = {directory.name for directory in checkpoints}
        saved = [save for digest, save in history.saves.items() if save.kind == "save" and digest not in history.gone]
        if gone := {save.step for save in saved if save.record["checkpoint"] not in there}:
            print(f"  not there: checkpoints of step {in_ranges(gone)}, which the run saved")
    print(f"  not covered: {', '.join([*sorted(missing), _NEVER])}")


def _steps(text: str) -> range:
    """`120` or `100-120`."""
    first, _, last = text.partition("-")
    steps = range(positive(first), positive(last or first) + 1)
    if not steps:
        raise argparse.ArgumentTypeError(f"{text} ends before it begins: use {last}-{first}")
    return steps


def _ledger_of(name: str) -> Path:
    path = Path(name)
    return path / FILE if path.is_dir() else path


def _checkpoints(args: Namespace) -> list[Location]:
    """Those to check, in the order of their publication: by default the run's, if it is a directory."""
    if args.checkpoint is None and not Path(args.run).is_dir():
        return []
    found = checkpoints_in(usable(args.checkpoint or args.run))[::-1]
    if args.checkpoint is not None and not found:
        raise UserError(f"--checkpoint {args.checkpoint} holds none: give a step_NNNNNNNN directory, or a run's")
    return found


def _print_summary(history: History) -> None:
    starts = sum(line.kind == "start" for line in history.lines)
    print(f"{history.path}: {counted(len(history.lines), 'line')}, {counted(starts, 'start')}; every seal holds")
    hashed = [step for step, line in history.steps.items() if "state" in line.record]
    kinds = ", ".join(sorted(history.start.record["state"]))
    print(f"  steps {in_ranges(history.steps)}; of {counted(len(hashed), 'step')} the state: {kinds}")
    for number, steps in history.abandoned.items():
        print(f"  line {number} goes back behind steps {in_ranges(steps)}, which do not count")
    print(f"  seal {history.lines[-1].sha256}")


def _different(history: History, other: History) -> Generator[str, None, int | None]:
    """What differs in the first step that does; returns its number, None where none does."""
    common = sorted(history.steps.keys() & other.steps.keys())
    last, near = None, False
    for step in common:
        here, there = history.steps[step], other.steps[step]
        if found := first_difference(history, here, there.record, history.start_of(here).step):
            equal = "" if last is None or found[0] != "state" else f", and equal after step {last}"
            yield f"step {step} (lines {here.number} and {there.number}){equal}: {found[1]}"
            for fact in different_facts(history.facts_of(history.start), other.facts_of(other.start)):
                yield f"  {fact}"
            return step
        near = near or history.rounding_of(here) is not None
        if "state" in here.record and "state" in there.record:
            last = step
    print(f"  {counted(len(common), 'step')} agree with {other.path}{' to rounding' if near else ''}")
    return None


def _replayed(history: History, steps: range, args: Namespace) -> Iterator[str]:
    run = usable(args.checkpoint or str(history.path.parent))
    done = replay(history, steps, run, args.flags, narrows=args.bisect is not None)
    if done.status:
        raise (
            UserError(f"the replay ended with status {done.status}")
            if done.status == EXIT_REFUSED
            else SystemExit(done.status)
        )
    if os.environ.get("RANK", "0") != "0":
        return
    yield from done.problems
    if done.not_narrowed:
        print(f"  not compared with one process: {done.not_narrowed}")
    if not done.problems:
        if any(history.rounding_of(history.steps[step]) for step in steps):
            how = "to rounding, because the run is not --reproducible"
        elif done.compared:
            how = f"bit for bit, weights and moments after step {in_ranges(done.compared)}"
        else:
            how = "bit for bit in loss and norm: the ledger has no weights and moments of these steps"
        print(f"{history.path}: steps up to {steps[-1]}, computed again, agree {how}")
    if args.against is not None:
        words = [args.run, "--replay", str(done.step), *(["--checkpoint", args.checkpoint] if args.checkpoint else [])]
        yield from first_change(args.against, [*words, *args.flags])
