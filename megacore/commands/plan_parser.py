"""The command line of a plan: the planner's flags among those of the trainer, read so that all problems come together.
The planner's flags are read here, and all other words are left to the trainer's parser. What is wrong with the first is
reported with what is wrong with the rest, in the words of the trainer."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megacore.commands.tool import ToolParser, float_or_nan
from megacore.config import Config
from megacore.config.flags import flags_by_name, read_flags
from megacore.config.messages import nearest_name

ENTRIES = ("pretrain_gpt.py", "pretrain_bert.py")


class PlanParser(ToolParser):
    """Leaves the flags that it does not know to the trainer's parser, and collects what is wrong with its own. The
    parsed namespace has, beside the values: `flags`, the words for the trainer; `problems`, what is wrong so far;
    `given`, the planner's flags that were given; `misspelled`, those that were probably meant or have no value."""

    def __init__(self, **settings: Any) -> None:
        self.elsewhere: dict[str, str] = {}  # flags of other modes, with what to do instead
        super().__init__(**settings)

    def parse_args(self, argv: Any = None, namespace: Any = None) -> Any:
        """As argparse has it; what belongs to the trainer is in `flags`."""
        found = self.scan(sys.argv[1:] if argv is None else argv)
        known = found.values
        known.flags, known.problems = found.rest, found.problems
        known.given, known.misspelled = found.given, found.misread
        _take_entry(known)
        for flag, way_out in self.elsewhere.items():
            if flag in (word.split("=")[0] for word in known.flags):
                known.problems.append(f"{flag} {way_out}")
                known.flags = without(known.flags, [flag])
        return known


def print_json(args: argparse.Namespace, report: Mapping[str, Any]) -> None:
    """Print a report, with what --fit found."""
    print(json.dumps({**report, **args.fitted}, indent=1))


def dashed(word: str) -> str:
    """A flag without underscores in its name; other words as they are."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else word


def take_misspelled(args: argparse.Namespace, flags: Collection[str], kind: type[Config]) -> None:
    """Report words of `flags` that are flags neither of the planner nor of the trainer, where a flag of the planner is
    meant, which is added to `misspelled`."""
    known = [*flags, *flags_by_name(kind)]
    refused = (said.partition(" is not a flag") for said in read_flags(args.flags, kind).problems)
    for flag in [first for first, is_unknown, _ in refused if is_unknown]:
        if (near := nearest_name(flag, known)) in flags:
            args.problems.append(f"{flag} is not a flag: did you mean {near}?")
            args.misspelled.add(near)
            args.flags = without(args.flags, [flag])


def without(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """A command line without some flags and the words up to the next one; layouts of --compare are no flags."""
    kept, is_kept = list[str](), True
    for word in words:
        if word.startswith("--") and " " not in word:
            is_kept = dashed(word).partition("=")[0] not in flags
        if is_kept:
            kept.append(word)
    return kept


def idle_flags(given: Collection[str], needs: Mapping[str, str], meant: Collection[str]) -> Iterator[str]:
    """That a flag changes nothing without another, which `needs` has; `meant` were probably given too."""
    for flag, other in needs.items():
        if flag in given and other not in given and other not in meant:
            yield f"{flag} has no effect without {other}: add {other}, or leave it out"


def _take_entry(known: argparse.Namespace) -> None:
    """The entry point may also follow the flags."""
    for words in (known.flags, getattr(known, "compare", None) or []):
        found = next((word for word in words if Path(word).name in ENTRIES), None)
        if known.entry is None and found is not None:
            words.remove(found)
            known.entry = found


def named_entry(words: Sequence[str]) -> str:
    """The entry point on a command line, for its help."""
    return next((word for word in words if Path(word).name in ENTRIES), ENTRIES[0])


def entry_of(config: str) -> str:
    """The entry point that a configuration file is of."""
    with contextlib.suppress(OSError, UnicodeDecodeError):  # reading it in full says so
        if "\n[bert]\n" in Path(config).read_text(encoding="utf-8"):
            return "pretrain_bert.py"
    return ENTRIES[0]


# ---- values ----------------------------------------------------------------------------------------------------------


def gigabytes(text: str) -> float:
    """Of argparse: 10^9 bytes."""
    if not 0 < (value := float_or_nan(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0, as in 80")
    return value
