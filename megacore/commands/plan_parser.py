"""The command line of a plan: the planner's flags among those of the trainer, read so that all problems come together.
The planner's flags are read here, and all other words are left to the trainer's parser. What is wrong with the first is
reported with what is wrong with the rest, in the words of the trainer."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megacore.commands.tool import Refused, ToolParser, float_or_nan
from megacore.config import Config
from megacore.config.flags import flags_by_name, read_flags
from megacore.config.messages import did_you_mean, nearest_name, one_of
from megacore.errors import ConfigError

ENTRIES = ("pretrain_gpt.py", "pretrain_bert.py")


class _Complaint(Exception):
    """The first thing that argparse finds wrong."""


class PlanParser(ToolParser):
    """Leaves the flags that it does not know to the trainer's parser, and collects what is wrong with its own. The
    parsed namespace has, beside the values: `flags`, the words for the trainer; `problems`, what is wrong so far;
    `given`, the planner's flags that were given; `misspelled`, those that were probably meant or have no value."""

    def __init__(self, **settings: Any) -> None:
        self._problems: list[str] = []
        self.elsewhere: dict[str, str] = {}  # flags of other modes, with what to do instead
        super().__init__(**settings)

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        if (kind := settings.get("type")) is not None:
            settings["type"] = self._collecting(names[0], kind)
        return super().add_argument(*names, **settings)

    def _collecting(self, flag: str, kind: Callable[[str], Any]) -> Callable[[str], Any]:
        def value(text: str) -> Any:
            try:
                return kind(text)
            except (argparse.ArgumentTypeError, ValueError) as error:
                self._problems.append(f"{flag} {error}")
                return None

        return value

    def error(self, message: str) -> NoReturn:
        """Refuse the command line; `parse_args` goes on without the words that are wrong."""
        raise _Complaint(message)

    def _refused(self, message: str, words: Sequence[str]) -> Refused:
        """What argparse complains of, as the trainer says it, and the words that it is about. Raises ConfigError where
        it is about no flag."""
        found = re.fullmatch(r"argument (--[\w-]+): (.*)", message, re.DOTALL)
        if found is None:
            raise ConfigError([message])
        flag, why = found.groups()
        action = self._option_string_actions[flag]
        if why.startswith("expected "):  # one argument, or at least one
            said = f"{flag} needs a value: {flag} {action.metavar or ''}".rstrip()
            if action.nargs == "+":
                said += f', in quotes; flags of one word after a space, as in {flag} " --compile"'
            return Refused(flag, said, _place_without_value(words, flag), 1)
        joined = {place: word.partition("=")[2] for place, word in enumerate(words) if word.startswith(f"{flag}=")}
        if why.startswith("ignored explicit argument"):
            place, value = next(iter(joined.items()))
            return Refused(flag, f"{flag} {value}: a switch takes no value: use {flag}", place, 1, (flag,))
        if why.startswith("invalid choice") and action.choices is not None:
            choices = list(action.choices)
            apart = {place: value for place, (word, value) in enumerate(itertools.pairwise(words)) if word == flag}
            place, value = next(one for one in [*joined.items(), *apart.items()] if one[1] not in choices)
            said = f"{flag} {value} is not known: use {one_of(choices)}{did_you_mean(value, choices)}"
            return Refused(flag, said, place, 1 if place in joined else 2)
        raise ConfigError([f"{flag}: {why}"])

    def names(self) -> frozenset[str]:
        return frozenset(self._option_string_actions)

    def parse_args(self, argv: Any = None, namespace: Any = None) -> Any:
        """As argparse has it; what belongs to the trainer is in `flags`."""
        words = [self._with_dashes(word) for word in (sys.argv[1:] if argv is None else argv)]
        refused = [*self.empty_flags(words)]
        for empty in refused[::-1]:
            del words[empty.place : empty.place + empty.length]
        while True:
            self._problems = [one.said for one in refused]
            try:
                known, rest = self.parse_known_args(words, namespace)
                break
            except _Complaint as complaint:
                one = self._refused(str(complaint), words)
                refused.append(one)
                words[one.place : one.place + one.length] = one.instead
        known.flags = rest
        _give_back_value(known, words)
        _take_entry(known)
        self._problems += self.contradictions(words)
        for flag, way_out in self.elsewhere.items():
            if flag in (word.split("=")[0] for word in known.flags):
                self._problems.append(f"{flag} {way_out}")
                known.flags = without(known.flags, [flag])
        known.problems, known.misspelled = self._problems, {one.flag for one in refused}
        known.given = [flag for word in words if (flag := word.split("=")[0]) in self.names()]
        return known

    def _with_dashes(self, word: str) -> str:
        """A flag of ours that is spelled with underscores, which the trainer accepts too."""
        return flag if (flag := dashed(word)).partition("=")[0] in self.names() else word


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


def _place_without_value(words: Sequence[str], flag: str) -> int:
    """Where a flag ends the command line, or another flag follows it."""
    places = [place for place, word in enumerate(words) if word == flag]
    return next(
        (place for place in places if words[place + 1 : place + 2] == [] or words[place + 1][:1] == "-"), places[-1]
    )


def _give_back_value(known: argparse.Namespace, argv: Sequence[str]) -> None:
    """Without an entry point argparse takes for it the first value of a flag of the trainer: return it to the flag."""
    if known.entry is None or known.entry in ENTRIES or known.entry.endswith(".py"):
        return
    flag = next((before for before, word in itertools.pairwise(argv) if word == known.entry), None)
    if flag is not None and flag.startswith("--") and flag in known.flags:
        known.flags.insert(known.flags.index(flag) + 1, known.entry)
        known.entry = None


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
