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
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from megacore.config.cli import GRACE_SECONDS, leave_for_launcher, printable, refusal
from megacore.config.fields import LARGEST_INT
from megacore.config.messages import did_you_mean, nearest_name, one_of
from megacore.config.numbers import is_number, nearest_ints, parse_int
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


@dataclass
class Scanned:
    """What a command line says.

    Attributes:
        values: of the parser's flags, as argparse has them.
        rest: words of other flags.
        problems: everything that is wrong with the parser's own flags.
        given: these flags, as they are spelled in the parser, but those that lack a value.
        misread: those without a value that can be read.
        seen: what is given, by destination, with a readable value or not.
    """

    values: argparse.Namespace
    rest: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    misread: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)


def with_config(words: Sequence[str]) -> list[str]:
    """The words of a tool that takes a run's flags, in which RUN, an output directory that comes first, is --config."""
    if words and not words[0].startswith("-") and os.path.isdir(words[0]):
        return ["--config", os.path.join(words[0], "config.toml"), *words[1:]]
    return list(words)


class ToolParser(argparse.ArgumentParser):
    """An argument parser that finds everything that is wrong with a command line. It refuses empty values, but of flags
    whose metavar is TEXT, and flags that are given twice with different values."""

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

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse has it. Raises UserError with everything that is wrong."""
        found = self.scan(sys.argv[1:] if args is None else args)
        flags = [word.partition("=")[0] for word in found.rest if self._is_flag(word)]
        unknown = [flag for flag in flags if flag not in self.names()]  # which may follow --
        for flag in unknown:
            near = nearest_name(flag, self.names())
            found.problems.append(f"{flag} is not a flag" + (f": did you mean {near}?" if near else ": leave it out"))
            found.seen |= {self._option_string_actions[near].dest} if near else set()
        if not unknown and found.rest:
            found.problems.append(f"'{' '.join(found.rest)}' belongs to no flag: leave it out")
        require_none([*found.problems, *self._missing(found)])
        return found.values

    def names(self) -> frozenset[str]:
        """All flags, by each of their names."""
        return frozenset(self._option_string_actions)

    def scan(self, words: Sequence[str]) -> Scanned:
        """Read a command line to its end, whatever is wrong with it."""
        usual = {action.dest: action.default for action in self._actions if action.default is not argparse.SUPPRESS}
        found = Scanned(argparse.Namespace(**(usual | self._defaults)))
        waiting = self._get_positional_actions()
        texts: dict[str, dict[str, str]] = {}  # by destination, the flag of each value
        # Its older flag gives the run, wherever it stands.
        run = waiting.pop(0) if self.run_flag in [word.partition("=")[0] for word in words] else None
        left, is_rest, ended = list(words), False, False
        while left:
            word = left.pop(0)
            flag, equals, text = word.partition("=")
            if (short := self._option_string_actions.get(word[:2])) and short.nargs != 0 and flag != word[:2]:  # -oFILE
                flag, equals, text = word[:2], "-", word[2:]
            flag = self._spelled(flag)
            action = run if flag == self.run_flag else self._option_string_actions.get(flag)
            if word == "--" and not ended:  # no flag follows
                ended, is_rest = True, False
                continue
            if action is not None and not ended:
                values = [text] if equals else self._following(action, left)
                is_rest = False
            elif waiting and not is_rest and (ended or not self._is_flag(word)):
                action = waiting.pop(0)
                flag, values = str(action.metavar), [word]
                if action.nargs == argparse.REMAINDER:
                    values, left = [word, *left], []
            else:
                is_rest = is_rest or (self._is_flag(word) and not ended)
                found.rest.append(word)
                continue
            try:
                value = self._value(action, flag, values, bool(equals))
            except ValueError as error:
                found.problems.append(str(error))
                found.misread.add(flag)
            else:
                action(self, found.values, value, flag)
            lacks_value = not values and action.nargs not in (0, "?")
            found.given += [flag] if action.option_strings and not lacks_value else []
            texts.setdefault(action.dest, {}).setdefault(" ".join(values or [str(action.const)]), flag)
        found.seen.update(texts)
        found.problems += self._repeated(texts)
        return found

    def _spelled(self, flag: str) -> str:
        """A flag as it is spelled here, if it is one with underscores, or begins like only one."""
        dashed = flag.replace("_", "-") if flag.startswith("--") else flag
        if not self.allow_abbrev or not flag.startswith("--") or dashed in self.names():
            return dashed
        like = [name for name in self.names() if name.startswith(dashed)]
        return like[0] if len(like) == 1 else dashed

    def _is_flag(self, word: str) -> bool:
        is_one = len(word) > 1 and word.startswith("-") and " " not in word and not is_number(word)
        return is_one or word.partition("=")[0] in self.names()

    def _following(self, action: argparse.Action, left: list[str]) -> list[str]:
        """Take the values of a flag from the words that are left."""
        most = 1 if action.nargs in (None, "?") else action.nargs if isinstance(action.nargs, int) else len(left)
        found = list(itertools.takewhile(lambda word: not self._is_flag(word), left[:most]))
        del left[: len(found)]
        return found

    def _value(self, action: argparse.Action, flag: str, values: list[str], is_joined: bool) -> Any:
        """What the words after a flag stand for. Raises ValueError with the sentence that refuses them."""
        shown, choices = f"{flag} {' '.join(values)}".rstrip(), list(action.choices or ())
        if action.nargs == 0:
            if is_joined:
                raise ValueError(f"{shown}: a switch takes no value: use {flag}")
            return []
        if "" in values and action.metavar != "TEXT":
            way = f"use {one_of(choices)}" if choices else "give it a value"
            way += ", or the run alone, as in output/mine" if flag == self.run_flag else ""
            raise ValueError(f"{flag} is empty: {way}" + ("" if action.required else ", or leave the flag out"))
        if not values and action.nargs == "?":
            return action.const
        if len(values) < (action.nargs if isinstance(action.nargs, int) else 1):
            metavar = action.metavar if isinstance(action.metavar, tuple) else [action.metavar or one_of(choices)]
            count = "a value" if len(metavar) == 1 else f"{len(metavar)} values"
            said = f"{flag} needs {count}: {flag} {' '.join(metavar)}"
            if action.nargs == "+" and metavar == ["FLAGS"]:
                said += f', in quotes; flags of one word after a space, as in {flag} " --compile"'
            raise ValueError(said)
        found = []
        for text in values:
            try:
                found.append(text if action.type is None else action.type(text))  # type: ignore[operator]
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{flag} {error}") from None
            except ValueError:
                raise ValueError(f"{flag} {text} is not a number") from None
            if choices and found[-1] not in choices:
                raise ValueError(
                    f"{flag} {text} is not known: use {one_of(choices)}{did_you_mean(text, map(str, choices))}"
                )
        return found[0] if action.nargs in (None, "?") else found

    def _repeated(self, texts: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
        """Flags that are given twice with different values, of which argparse takes the last."""
        by_name = {action.dest: action for action in self._actions}
        for name, flags in texts.items():
            if len(flags) > 1 and not isinstance(by_name[name], argparse._AppendAction):
                both = " and as ".join(f"{flag} {text}" for text, flag in flags.items())
                is_one = by_name[name].nargs in (None, "?")
                way = "keep one of them" if is_one else "give all of its values after one flag"
                yield f"{next(iter(flags.values()))} is given twice, as {both}: {way}"

    def _missing(self, found: Scanned) -> Iterator[str]:
        """What must be given and is not, and alternatives that are given together."""
        for action in self._actions:
            if not action.required or action.dest in found.seen:
                continue
            if action.option_strings:
                flag = action.option_strings[0]
                yield f"{flag} is missing: add {flag} {action.metavar or one_of(list(action.choices or ()))}"
            elif all(self._is_flag(word) for word in found.rest):  # no other word may have been meant
                yield f"{action.metavar} is missing: {action.help}"
        for group in self._mutually_exclusive_groups:
            names = {one.dest: (one.option_strings or [str(one.metavar)])[0] for one in group._group_actions}
            both = [name for dest, name in names.items() if dest in found.seen]
            if not both:
                yield f"one of {', '.join(names.values())} is missing"
            if len(both) > 1:
                yield f"{' and '.join(both)} exclude each other: keep one of them"

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def require_none(problems: Sequence[str]) -> None:
    """Refuse a command line with problems: in one line, or as the trainer lists several. Raises UserError."""
    if problems:
        raise ConfigError(problems) if len(problems) > 1 else UserError(problems[0])


class PassingParser(ToolParser):
    """A parser of a tool that takes a run's flags: what it does not know is in `flags`, and what is wrong with its own
    in `problems`, for the tool to refuse with what is wrong with those."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse has it."""
        found = self.scan(sys.argv[1:] if args is None else args)
        found.values.flags = found.rest
        found.values.problems = [*found.problems, *self._missing(replace(found, rest=[]))]
        return found.values


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
    except UserError as error:
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
    leave_for_launcher(message)
    print(printable(message), file=sys.stderr, flush=True)
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
    """Add the flag of tools that build the model of a checkpoint (inference/program.py)."""
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
