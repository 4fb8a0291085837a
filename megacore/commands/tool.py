"""What the command-line tools share: exit status 2 and no traceback for what a user can cause. Problems of a
configuration are listed as the trainer lists them, and any other mistake is one clear line."""

from __future__ import annotations

import argparse
import errno
import functools
import io
import itertools
import math
import os
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Self

from megacore.config.cli import GRACE_SECONDS, refusal
from megacore.config.fields import LARGEST_INT
from megacore.config.messages import one_of
from megacore.config.numbers import nearest_ints, parse_int
from megacore.errors import EXIT_REFUSED, ConfigError, UserError
from megacore.files import output_is_closed
from megacore.remote import is_url

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_OUTPUT_CLOSED = 141  # as of a program that SIGPIPE ends
EXIT_TERMINATED = 143
_MORE_ROOM = "make room there, or give an output path on another disk"
_NO_ROOM = {
    errno.ENOSPC: _MORE_ROOM,
    errno.EDQUOT: _MORE_ROOM,
    errno.EFBIG: "raise the largest size of a file (ulimit -f), or give an output path on a file system that allows it",
}


class _Refusal(Exception):
    """A command line that cannot be understood."""


class Refused(NamedTuple):
    """Words of a command line that are refused."""

    flag: str  # that they begin with
    said: str
    place: int  # of the first of them
    length: int
    instead: tuple[str, ...] = ()  # words that are read in their place


def with_config(words: Sequence[str]) -> list[str]:
    """The words of a tool that takes a run's flags, in which RUN, an output directory that comes first, is --config."""
    if words and not words[0].startswith("-") and os.path.isdir(words[0]):
        return ["--config", os.path.join(words[0], "config.toml"), *words[1:]]
    return list(words)


class ToolParser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line. It refuses empty values, but of flags whose metavar is TEXT, and
    flags that are given twice with different values."""

    run_flag: str | None = None  # `older` of a flag

    @classmethod
    def of(cls, name: str, *, prog: str | None = None, usage: str | None = None, **named: Any) -> Self:
        """The parser of a table of flags.toml. `named`: what its rows have by name, types, choices and defaults, and
        parts of its help."""
        table = {"usage": usage, **_tables()[name]}
        flags, after = table.pop("flags"), table.pop("after", None)
        made = cls(prog=prog or f"{name}.py", **table)
        made.add_rows({**(rows_of(after) if after else {}), **flags}, **named)
        return made

    def add_rows(self, rows: Mapping[str, Any], **named: Any) -> None:
        """Add flags as flags.toml has them; `named` as for `of`."""
        for words, row in rows.items():
            settings = {"help": row} if isinstance(row, str) else dict(row)
            settings |= {key: named[value] for key, value in settings.items() if str(value) in named}
            self.flag(words, settings.pop("help").format(**named), **settings)

    def flag(
        self,
        words: str,
        help: str,
        type: Callable[[str], Any] | str | None = None,
        default: Any = None,
        older: str | None = None,
        is_alternative: bool = False,
        **more: Any,
    ) -> None:
        """Add a flag whose help ends with its default.

        Args:
            words: names and metavar, as in "-o --output FILE"; with names alone and without choices it is a switch.
            help: what it does. Where the default is no value, the help says it.
            type: makes a value of a word, or raises ArgumentTypeError; or its name in flags.toml.
            default: its value where it is not given.
            older: a flag with a value that is accepted for it, where it is RUN, the first positional argument.
            is_alternative: one of all flags that are is given.
            more: for `add_argument`.
        """
        names = [word for word in words.split() if word.startswith("-")] or words.split()[:1]
        self.run_flag = older or self.run_flag
        if metavar := words.split()[len(names) :]:
            more["metavar"] = tuple(metavar) if len(metavar) > 1 else metavar[0]
        elif "choices" not in more:
            more["action"] = "store_true"
        if type is not None:
            more["type"] = _type(type) if isinstance(type, str) else type
        if default is not None:
            more["default"] = default
            if "Default:" not in help and default != []:
                values = default if isinstance(default, list) else [default]
                shown = " ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in values)
                help = f"{help.rstrip('.')}. Default: {shown}.".removeprefix(". ")
        to: Any = self
        if is_alternative:
            to = (self._mutually_exclusive_groups or [self.add_mutually_exclusive_group(required=True)])[0]
        to.add_argument(*names, help=help, **more)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for empty in self.empty_flags(words):
            self.error(empty.said)
        return super().parse_known_args(self._with_run_first(words), namespace)

    def _with_run_first(self, words: list[str]) -> list[str]:
        """The words with a run in its place that is given by its older flag."""
        for place, word in enumerate(words):
            flag, equals, value = word.partition("=")
            # First, as argparse gives positional arguments their values in order.
            if self.run_flag is not None and flag == self.run_flag:
                end = place + (1 if equals else 2)
                run = value if equals else "".join(words[place + 1 : end])
                if not run:
                    self.error(f"{flag} is empty: give it a value, or the run alone, as in output/mine")
                return [run, *words[:place], *words[end:]]
        return words

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        for contradiction in self.contradictions(sys.argv[1:] if args is None else args):
            self.error(contradiction)
        return super().parse_args(args, namespace)

    def empty_flags(self, words: Sequence[str]) -> Iterator[Refused]:
        for place, word in enumerate(words):
            flag, equals, value = word.partition("=")
            action = self._option_string_actions.get(flag)
            if action is None or action.nargs == 0 or action.metavar == "TEXT":
                continue
            if (equals and not value) or (not equals and list(words[place + 1 : place + 2]) == [""]):
                way = f"use {one_of(list(action.choices))}" if action.choices is not None else "give it a value"
                also = "" if action.required else ", or leave the flag out"
                yield Refused(flag, f"{flag} is empty: {way}{also}", place, 1 if equals else 2)

    def contradictions(self, words: Sequence[str]) -> Iterator[str]:
        """Flags that are given twice with different values, of which argparse takes the last."""
        values: dict[str, dict[str, str]] = {}  # by destination, the flag of each value
        several = set[str]()
        # What follows -- is no flag, however it is spelled.
        words = list(itertools.takewhile(lambda word: word != "--", words))
        for place, word in enumerate(words):
            flag, equals, text = word.partition("=")
            action = self._option_string_actions.get(flag)
            if action is None or action.nargs == 0 or isinstance(action, argparse._AppendAction):
                continue
            following = list(itertools.takewhile(lambda one: not self._is_flag(one), words[place + 1 :]))
            if action.nargs is None:
                del following[1:]
            elif action.nargs == "?":
                following = [one for one in following[:1] if one in (action.choices or ())] or [str(action.const)]
            else:
                several.add(action.dest)
            values.setdefault(action.dest, {}).setdefault(text if equals else " ".join(following), flag)
        for name, flags in values.items():
            if len(flags) > 1:
                both = " and as ".join(f"{flag} {text}" for text, flag in flags.items())
                way_out = "give all of its values after one flag" if name in several else "keep one of them"
                yield f"{next(iter(flags.values()))} is given twice, as {both}: {way_out}"

    def _is_flag(self, word: str) -> bool:
        return word.startswith("--") or word.partition("=")[0] in self._option_string_actions

    def error(self, message: str) -> NoReturn:
        raise _Refusal(f"{message} (--help lists the flags)")


def run_tool(parser: ToolParser, argv: Sequence[str] | None, action: Callable[[argparse.Namespace], int | None]) -> int:
    """Parse a command line, run an action with it, and turn what goes wrong into a line and an exit status: what the
    action returns, or 0 done, 2 refused, 1 failed (disk full, a dead worker), 130 or 143 interrupted, 141 nobody reads
    the output. `argv`: None: the command line."""
    previous = _terminate_like_interrupt()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name need not be valid UTF-8
    try:
        status = action(parser.parse_args(argv)) or 0
    except SystemExit as stop:  # --help, or SIGTERM
        output_is_closed()
        return stop.code if isinstance(stop.code, int) else 0
    except ConfigError as error:
        return _say(refusal(parser.prog, error.problems), EXIT_REFUSED)
    except (_Refusal, UserError) as error:
        return _say(f"{parser.prog}: error: {error}", EXIT_REFUSED)
    except KeyboardInterrupt:
        return _say(f"{parser.prog}: error: interrupted; nothing was written", EXIT_INTERRUPTED)
    except BrokenExecutor:
        # None of a parser without the flag.
        way_out = "fewer --workers" if parser.get_default("workers") is not None else "a machine with more free memory"
        why = "a worker process died, perhaps for lack of memory"
        return _say(f"{parser.prog}: error: {why}: use {way_out}", EXIT_FAILED)
    except BrokenPipeError:  # dead workers are a BrokenExecutor
        output_is_closed()
        return EXIT_OUTPUT_CLOSED
    except OSError as error:
        return _say(f"{parser.prog}: error: {os_problem(error)}", EXIT_FAILED)
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
    return EXIT_OUTPUT_CLOSED if output_is_closed() else status


def os_problem(error: OSError) -> str:
    """What the operating system refused, of which file, and the way out where one is known."""
    where = f"{error.filename}: " if error.filename else ""
    way_out = f"; {_NO_ROOM[error.errno]}" if error.errno in _NO_ROOM else ""
    return f"{where}{error.strerror or error}{way_out}"


def _say(message: str, status: int) -> int:
    """Print why the tool ends. What all ranks of a node are refused, the first of them says for all. A launcher ends
    all ranks as soon as one exits, so that the others wait for it."""
    if status == EXIT_REFUSED and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(GRACE_SECONDS)
        return status
    print(message, file=sys.stderr, flush=True)
    return status


def _terminate_like_interrupt() -> Callable[[int, FrameType | None], object] | int | None:
    """Let SIGTERM raise SystemExit; the former handler, or None where handlers cannot be set."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(EXIT_TERMINATED)

    # Only the main thread may set handlers; a tool that a test or a server calls elsewhere works without.
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, stop)


def local_path(text: str) -> Path:
    """A path, for argparse: a URL is refused."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text} is a URL, but this must be a path")
    return Path(text)


def add_program(parser: ToolParser) -> None:
    """Add the flag of tools that build the model of a checkpoint (models/program.py)."""
    parser.flag("--program FILE.py", "Python file to execute first, with layers or names of your own")


def whole(least: int, most: int = LARGEST_INT) -> Callable[[str], int]:
    """A type for argparse: the whole numbers from `least` to `most`. A refusal names numbers that it accepts."""

    def parsed(text: str) -> int:
        try:
            value = parse_int(text)
        except ValueError as error:
            accepted = [number for number in nearest_ints(text) if least <= number <= most]
            ways = one_of(accepted) if accepted else _range(least, most)
            raise argparse.ArgumentTypeError(f"{error}: use {ways}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least}: use {_range(least, most)}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} must be at most {most}: use {most} or less")
        return value

    return parsed


def _range(least: int, most: int) -> str:
    return f"{least} or more" if most >= LARGEST_INT else f"{least} to {most}"


positive = whole(1)
"""An integer of at least 1, for argparse."""


def _type(name: str) -> Callable[[str], Any]:
    """A type of flags.toml."""
    kind, *bounds = name.split()
    if kind == "whole":
        return whole(*map(int, bounds))
    if kind == "number":
        return number(*bounds)
    types: Mapping[str, Callable[[str], Any]] = {"path": Path, "local_path": local_path, "float": float}
    return types[kind]


def number(low: str, high: str, example: str) -> Callable[[str], float]:
    """A type for argparse: the numbers between two, as the text of a number has them."""

    def parsed(text: str) -> float:
        if not float(low) <= (value := float_or_nan(text)) <= float(high):
            raise argparse.ArgumentTypeError(f"{text} must be a number from {low} to {high}, as in {example}")
        return value

    return parsed


@functools.cache
def _tables() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name("flags.toml").read_text(encoding="utf-8"))


def rows_of(table: str) -> Mapping[str, Any]:
    """The flags of a table of flags.toml."""
    rows: Mapping[str, Any] = _tables()[table]["flags"]
    return rows


def float_or_nan(text: str) -> float:
    """A number; NaN, which is in no range, where the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
