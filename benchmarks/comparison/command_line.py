"""The command line of benchmarks/compare.py: all that is wrong with it is refused together, before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.comparison.fit import misfits
from benchmarks.comparison.job import KINDS, PEERS, Layout, Sizes, is_combination, layouts, rank_counts
from megacore.commands.plan_parser import PlanParser
from megacore.commands.tool import whole
from megacore.config.messages import nearest_name
from megacore.errors import ConfigError
from megacore.files import why_unwritable

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "docs" / "reports" / "measured.md"
_MOST_RANKS = 1024  # processes of one machine, for each framework


class _Parser(PlanParser):
    """Refuses all that is wrong with a command line together; the parsed namespace has `sizes` too."""

    def parse_args(self, argv: Any = None, namespace: Any = None) -> Any:
        """As argparse has it.

        Raises:
            ConfigError: all problems.
        """
        arguments = super().parse_args(argv, namespace)
        problems = [*arguments.problems, *self._unknown(arguments.flags)]
        for flag, known in (("peers", PEERS), ("modes", tuple(KINDS))):
            problems += _unknown_names(flag, getattr(arguments, flag), known)
        if (why := _why_no_directory(arguments.output)) is not None:
            problems.append(f"--output {arguments.output} {why}: choose another directory")
        problems += _no_mode(arguments)
        problems += _wrong_sizes(arguments)
        if problems:
            raise ConfigError(problems)
        return arguments

    def _unknown(self, words: Sequence[str]) -> Iterator[str]:
        """Words that are no flags, nor their values."""
        for word in itertools.takewhile(lambda word: not word.startswith("-"), words):
            yield f"{word} belongs to no flag: leave it out"
        for flag in [word.split("=")[0] for word in words if word.startswith("-")]:
            near = nearest_name(flag, self.names())
            yield f"{flag} is not a flag: " + (f"did you mean {near}?" if near else "--help lists them")


def _unknown_names(flag: str, names: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    for name in names:
        if name not in known:
            near = nearest_name(name, known)
            way_out = f"did you mean {near}?" if near else f"use {', '.join(known)}"
            yield f"--{flag} {name} is not known: {way_out}"


def _no_mode(arguments: argparse.Namespace) -> Iterator[str]:
    """That none of the given modes can run."""
    known = [kind for kind in arguments.modes if kind in KINDS]
    if "--modes" not in arguments.given or arguments.ranks is None or len(known) < len(arguments.modes):
        return
    if not known:
        yield f"--modes names none: use one of {', '.join(KINDS)}, or leave it out"
    elif not any(layout.kind in known for layout in _asked(arguments)):
        least = min(4 if is_combination(kind) else 2 for kind in known)
        yield (
            f"--modes {','.join(known)} needs {least} ranks or more, and --ranks is {arguments.ranks}: use --ranks "
            f"{least} or more, or other modes"
        )


def _asked(arguments: argparse.Namespace) -> list[Layout]:
    """The layouts that are measured, if the sizes fit."""
    modes = [kind for kind in arguments.modes if kind in KINDS]
    return [layout for count in rank_counts(arguments.ranks or 1) for layout in layouts(modes, count)]


def _why_no_directory(path: Path) -> str | None:
    """Why results cannot be written into a directory, which need not exist; None where they can."""
    if os.path.lexists(path):
        return why_unwritable(path / "results.json") if path.is_dir() else "is not a directory"
    path = path.absolute()
    while not os.path.lexists(path.parent):
        path = path.parent
    return why_unwritable(path)


def _wrong_sizes(arguments: argparse.Namespace) -> list[str]:
    """Sizes that a layout cannot divide, where they or the layouts were chosen: of all layouts with the default sizes,
    those that cannot be are left out. With a chosen number of ranks, the replicas of data parallelism must divide the
    batch. Adds `sizes` to the arguments."""
    fields = [field.name for field in dataclasses.fields(Sizes)]
    unread = {name for name in fields if getattr(arguments, name) is None}
    arguments.sizes = Sizes(**{name: getattr(arguments, name) for name in fields if name not in unread})
    asked = _asked(arguments)
    is_megatron = "--peers" in arguments.given and "megatron-core" in arguments.peers
    found = misfits(arguments.sizes, asked, is_megatron=is_megatron)
    if unread & {"hidden", "heads"}:
        found.pop("hidden", None)
    chosen = {name for name in found if {"--modes", f"--{name}"} & {*arguments.given}}
    of_replicas = [layout for layout in asked if layout.dp == layout.ranks]
    if "--ranks" in arguments.given and "batch" in misfits(arguments.sizes, of_replicas):
        chosen.add("batch")
    return [problem for name, problem in found.items() if name == "hidden" or name in chosen - unread]


def parser(description: str = "") -> PlanParser:
    """The flags of compare.py, below a description of it; `sizes` are among what is parsed."""
    flags = _Parser(
        prog="compare.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags.set_defaults(entry=None)  # which a plan has
    add = flags.add_argument
    add("--ranks", type=whole(1, _MOST_RANKS), default=2, metavar="N",
        help="most ranks. Default: 2; combinations take 4")  # fmt: skip
    add("--peers", type=_names, metavar="TEXT", default=list(PEERS), help=f"from {','.join(PEERS)}. Default: all")
    add("--modes", type=_names, default=list(KINDS), help=f"from {','.join(KINDS)}. Default: all")
    add("--rounds", type=whole(1), default=6, metavar="N", help="rounds of each framework. Default: 6")
    add("--steps", type=whole(1), default=2, metavar="N", help="steps of a round. Default: 2")
    add("--patience", type=whole(1), default=300, metavar="S",
        help="seconds that a framework has to start, and for each turn; else it is left out. Default: 300")  # fmt: skip
    add("--memory-limit-mib", type=whole(0), default=1024, metavar="N",
        help="memory per rank of the largest model; 0: do not seek it. Default: 1024")  # fmt: skip
    add("--output", type=Path, default=ROOT / "output" / "compare", metavar="DIR", help="Default: output/compare")
    add("--measured", action="store_true", help=f"write the section of {MEASURED.relative_to(ROOT)} as well")
    for field in dataclasses.fields(Sizes):
        add(f"--{field.name}", type=whole(1), default=field.default, metavar="N", help=f"Default: {field.default}")
    return flags


def _names(text: str) -> list[str]:
    """For argparse: names separated by commas, each once."""
    return list(dict.fromkeys(name for name in text.split(",") if name))
