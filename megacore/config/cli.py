"""From a command line to a checked configuration: defaults < preset < `--config` file < flags.

Every rank of a run calls `parse_config` with the same words and comes to the same result, before torch is imported. A
configuration that cannot run is refused by every rank with exit status 2, and one message, from rank 0, names all that
is wrong with it. What depends on a machine's own disk is reported by the first rank of that machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, overload

from megacore.config import Config, ModelConfig, resolve, sections_of, validate
from megacore.config.fields import field_infos
from megacore.config.flags import Given, all_fields, flag_names, read_flags
from megacore.config.help import print_help
from megacore.config.messages import counted
from megacore.config.missing_files import missing_files
from megacore.config.toml import read_toml, save_toml
from megacore.errors import EXIT_REFUSED, ConfigError, UserError

__all__ = ["flag_names", "leave_for_launcher", "load_toml", "parse_config", "save_toml"]

# A launcher ends all ranks as soon as one exits, so that a rank with nothing to say must not be faster than the one
# that reports. It waits this long for the launcher to end it.
GRACE_SECONDS = 5.0

C = TypeVar("C", bound=Config)


@overload
def parse_config(
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    shape: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    complete: Callable[[Config], Config] | None = None,
    checks: Sequence[Callable[[Config], object]] = (),
) -> Config: ...


@overload
def parse_config(
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    kind: type[C],
    shape: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    complete: Callable[[C], C] | None = None,
    checks: Sequence[Callable[[C], object]] = (),
) -> C: ...


def parse_config(
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    kind: type[C] = Config,  # type: ignore[assignment]
    shape: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    complete: Callable[[C], C] | None = None,
    checks: Sequence[Callable[[C], object]] = (),
) -> C:
    """Reads, checks and resolves the configuration of a run, or refuses it and exits.

    Args:
        argv: the command line without the program's name.
        prog: the program's name, for the help text.
        description: the help text's first paragraph.
        shape: further defaults that follow from given values, such as a model's shape from a file that is named. Every
            rank calls it; what it refuses is reported with the rest.
        kind: the entry point's kind of configuration, whose sections have its flags.
        complete: fills what only the input files know (the vocabulary's size). Every rank calls it: it must be cheap.
        checks: look at the input files as closely as they like, even where `complete` or one another failed, so that
            all problems come together. Only the first rank of each machine calls them: where one refuses, that rank
            exits and the launcher ends the others, which wait for it at the rendezvous.

    Raises:
        SystemExit: with status 2 where the configuration or an input is refused, with 0 after `--help`.
    """
    process = _Process.of_environment()
    if "--help" in argv or "-h" in argv:
        if process.rank == 0:
            print_help(prog, description, kind)
        raise SystemExit(0)
    reading = _read(argv, process, kind, shape)
    if reading.shared or reading.here:
        _refuse(prog, process, reading)
    config = resolve(reading.config, process.world_size)
    completed = _ask(complete, config, reading)
    for check in checks if process.local_rank == 0 else ():
        _ask(check, config if completed is None else completed, reading)
    if reading.here:
        _refuse(prog, process, reading)
    if process.rank == 0:
        for note in reading.notes:
            print(f"megacore: note: {note}", file=sys.stderr)
    return config if completed is None else completed


def load_toml(path: str | Path, kind: type[C] = Config) -> C:  # type: ignore[assignment]
    """Reads a configuration from a TOML file alone, as `save_toml` wrote it.

    Raises:
        ConfigError: everything in the file that cannot be read, or is impossible whatever the number of processes.
    """
    given = read_toml(path, kind)
    config = _build(kind, _with_defaults(kind, given.values))
    own = [problem for name in sections_of(kind) for problem in getattr(config, name).problems()]
    own += config.wrong_fields(frozenset()).values()
    if given.problems or own:
        raise ConfigError(given.problems or [f"{path}: {problem}" for problem in own])
    return config


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Process:
    """This process's place in the run, from the variables that every launcher sets; alone where there are none."""

    rank: int
    local_rank: int
    world_size: int
    problems: tuple[str, ...] = ()

    @staticmethod
    def of_environment() -> _Process:
        problems: list[str] = []

        def read(name: str, default: int, low: int = 0) -> int:
            text = os.environ.get(name) or str(default)
            if text.isdecimal() and int(text) >= low:
                return int(text)
            problems.append(f"the environment's {name} is '{text}', not a number from {low}: start through torchrun")
            return default

        rank = read("RANK", 0)
        world_size = read("WORLD_SIZE", rank + 1, low=1)
        if rank >= world_size:
            problems.append(
                f"the environment's RANK {rank} must be below WORLD_SIZE {world_size}: start through torchrun"
            )
        port = os.environ.get("MASTER_PORT", "")
        if world_size > 1 and not (os.environ.get("MASTER_ADDR") and port.isdecimal() and 0 < int(port) < 1 << 16):
            problems.append(
                f"the environment's WORLD_SIZE is {world_size}, but its MASTER_ADDR and MASTER_PORT do not say where "
                "the ranks meet: start through torchrun"
            )
        return _Process(rank, read("LOCAL_RANK", rank), world_size, tuple(problems))


@dataclass(frozen=True)
class _Reading(Generic[C]):
    """What the sources give together, and what is wrong: the same on every rank, or with this machine's files."""

    config: C
    shared: list[str]
    here: list[str]
    notes: list[str]
    source: str | None  # the configuration file


def _read(
    argv: Sequence[str],
    process: _Process,
    kind: type[C],
    shape: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> _Reading[C]:
    flags = read_flags(argv, kind)
    path = flags.values.pop("config", None)
    file = Given() if path is None else read_toml(path, kind)
    given = {**file.values, **flags.values}
    shaped, unshaped = _shaped(shape, given)
    config = _build(kind, _with_defaults(kind, {**shaped, **given}))
    file_unread = set(all_fields(kind)) if "config" in flags.unread else file.unread
    unread = frozenset((file_unread - flags.values.keys()) | flags.unread)
    shared = flags.problems
    if not process.problems:
        shared = shared + validate(config, process.world_size, unread=unread)
    # The first rank of a machine looks at the disk for all of them.
    on_disk = missing_files(config) if process.local_rank == 0 else []
    here = [*process.problems, *file.problems, *on_disk, *unshaped]
    return _Reading(config, shared, here, _overridden_preset(kind, flags, file, path), path)


def _shaped(
    shape: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None, given: Mapping[str, Any]
) -> tuple[Mapping[str, Any], list[str]]:
    """What `shape` makes of the given values, and why it does not."""
    try:
        return ({} if shape is None else shape(given)), []
    except UserError as error:
        return {}, [str(error)]


def _with_defaults(kind: type[Config], given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, over what the preset says, over the entry point's own defaults; of these two without what has no
    effect beside what is given, which would read as given itself."""
    preset: dict[str, Any] = dict(kind.presets.get(given.get("preset") or "", {}))
    if given.get("tokenizer") is not None:
        preset.pop("vocab_size", None)
    assumed = {**kind.defaults({**preset, **given}), **preset}
    model = {k: v for k, v in {**assumed, **given}.items() if k in field_infos(ModelConfig)}
    idle = ModelConfig(**model).idle_fields
    return {**{k: v for k, v in assumed.items() if k not in idle}, **given}


def _overridden_preset(kind: type[Config], flags: Given, file: Given, path: str | None) -> list[str]:
    """A preset that is asked for by flag, and of which the file leaves only a part, is worth a word."""
    preset = kind.presets.get(flags.values.get("preset") or "", {})
    changed = [f"{k} {file.values[k]} (preset: {v})" for k, v in preset.items() if file.values.get(k, v) != v]
    changed = [text for text in changed if text.split()[0] not in flags.values]
    if not changed:
        return []
    return [f"--config {path} is stronger than --preset {flags.values['preset']}: {', '.join(changed)}"]


def _build(kind: type[C], values: Mapping[str, Any]) -> C:
    """A configuration from values by field. A required field without one becomes None, which `validate` reports."""
    sections = {
        name: section(**{k: values.get(k) for k, info in field_infos(section).items() if k in values or info.required})
        for name, section in sections_of(kind).items()
    }
    return kind(**sections)  # type: ignore[arg-type]


def _ask(hook: Callable[[C], Any] | None, config: C, reading: _Reading[C]) -> Any:
    """What a hook makes of the configuration; what it refuses is noted, each problem once."""
    if hook is None:
        return None
    try:
        return hook(config)
    except UserError as error:
        found = getattr(error, "problems", (str(error),))
        reading.here.extend(problem for problem in found if problem not in reading.here)
        return None


# ---- refusing --------------------------------------------------------------------------------------------------------


def _refuse(prog: str, process: _Process, reading: _Reading[C]) -> NoReturn:
    """Says once what is wrong, and ends this rank."""
    if process.local_rank != 0:
        time.sleep(GRACE_SECONDS)
        raise SystemExit(EXIT_REFUSED)
    everything = _message(prog, reading.shared + reading.here, reading.source)
    leave_for_launcher(everything)
    if process.rank == 0:
        print(everything, file=sys.stderr, flush=True)
    elif reading.here:
        print(_message(prog, reading.here, None, host=socket.gethostname()), file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE_SECONDS)
    raise SystemExit(EXIT_REFUSED)


def _message(prog: str, problems: Sequence[str], source: str | None, *, host: str | None = None) -> str:
    where = f" on {host}" if host else ""
    lines = [f"megacore: refused{where}: {counted(len(problems), 'problem')}"]
    lines += ["  - " + _printable(problem).replace("\n", "\n    ") for problem in problems]
    if source:
        lines.append(f"Keys of {source} go by their flags here: num_layers is --num-layers.")
    lines.append(f"All flags and their defaults: {prog} --help")
    return "\n".join(lines)


def _printable(text: str) -> str:
    """The text without characters that would move a terminal's cursor or break a line."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def leave_for_launcher(text: str) -> None:
    """Writes the message where torchrun looks for the cause of a failure, in its own format."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    cause = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):  # the message on the terminal is what counts
        Path(path).write_text(json.dumps({"message": cause}), encoding="utf-8")
