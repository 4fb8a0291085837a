"""From a command line to a checked and resolved configuration: defaults < preset < `--config` file < flags.

Every rank calls `parse_config` with the same arguments and gets the same result, before torch is imported. Every rank
refuses an invalid configuration with exit status 2, and one message, from rank 0, names everything that is wrong. What
is wrong with the files of a machine is reported by the first rank of that machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, cast

import megacore
from megacore.config.constraints import idle_optimizers
from megacore.config.dimensions import degree_fields
from megacore.config.flags import CONFIG_INFO, all_fields, fields_of_parameter, flags_by_name, read_flags
from megacore.config.given import Given
from megacore.config.help import help_text, help_topic
from megacore.config.messages import counted
from megacore.config.missing_files import NEEDED_BY_PLANS, missing_files
from megacore.config.nodes import launched_processes, launcher_number
from megacore.config.other_trainers import other_trainers
from megacore.config.problem import Change, Problem, Values
from megacore.config.schema import (
    UNKNOWN_VOCAB_SIZE,
    Config,
    ResolvedConfig,
    section_of,
    sections_of,
    with_registered,
)
from megacore.config.solve import Searched
from megacore.config.sources import Sources, built
from megacore.config.spelling import fields_in, flag_and_value
from megacore.config.toml import read_toml
from megacore.config.validation import Validation, degrees_product
from megacore.errors import EXIT_REFUSED, Collected, ConfigError, UserError
from megacore.files import output_is_closed, replace_bytes
from megacore.remote import is_url

# A launcher ends all ranks as soon as one exits. A rank with nothing to report must therefore not exit before the one
# that reports: it waits this long for the launcher to end it.
GRACE_SECONDS = 5.0
# A name server of a cluster may learn the address of the first node only after the others have started.
NAME_SECONDS = 30.0

C = TypeVar("C", bound=Config)
T = TypeVar("T")
R = TypeVar("R", bound=ResolvedConfig)
R_co = TypeVar("R_co", bound=ResolvedConfig, covariant=True)

Shape = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ConfigKind(Protocol[R_co]):
    """An entry point's kind of configuration, `Config` or a subclass, by what it resolves to."""

    def resolve(self, world_size: int, *, vocab_size: int | None = None) -> R_co: ...


def parse_config(
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    kind: type[ConfigKind[R]],
    shape: Shape | None = None,
    continued: Shape | None = None,
    vocabulary: Callable[[Config], int] | None = None,
    checks: Sequence[Callable[[R], object]] = (),
    planned: bool = False,
    files_elsewhere: bool = False,
    world_size: int | None = None,
    may_be_launched: bool = False,
    searched: Searched | None = None,
    computes_on_cpu: Callable[[str], bool] | None = None,
    problems: Sequence[str] = (),
    typed: Mapping[str, Any] | None = None,
    exits: bool = True,
) -> R:
    """Reads, checks and resolves the configuration of a run, or refuses it and exits.

    Args:
        kind: the entry point's kind of configuration. The fields of its sections are the flags.
        shape: maps the given values to further defaults, such as a model's shape from a file they name; on every
            rank.
        vocabulary: returns the size of the vocabulary, which only the tokenizer may know. Every rank calls it, so
            it must be cheap. Without it `--vocab-size` must be given.
        checks: look at the input files, on the first rank of each machine only: where one refuses, that rank exits
            and the launcher ends the others, which wait at the rendezvous. They run even if `vocabulary` or another
            check fails, so that all problems are reported together; the vocabulary is then `UNKNOWN_VOCAB_SIZE`.
        planned: the run has as many processes as its degrees say, whatever the launcher states.
        files_elsewhere: files that this machine lacks are no problem, but for those that a plan needs too.
        world_size: processes of a planned run, where given.
        may_be_launched: without `world_size`, a planned run has its launcher's processes, if its degrees allow it.
        searched: what a search chooses: flags that need other values of that are not refused, and the run gets
            these.
        computes_on_cpu: given --device. None: not known, and what is on by default on accelerators only counts as
            off.
        problems: what the caller has found wrong; reported with the others.
        typed: values by field that the user has given, if the caller has added to `argv`.
        exits: whether the process ends where the configuration is refused.

    Raises:
        SystemExit: with status 2 if the configuration or an input is refused, with 0 after `--help` and
            `--version`.
        ConfigError: everything that is wrong with it, where the process does not end.
    """
    config_class = with_registered(cast(type[Config], kind))
    started = launched_processes() if may_be_launched else 0
    process = _planned_process(argv, config_class, shape, started) if planned else _Process.of_environment()
    if planned and world_size is not None:
        process = replace(process, world_size=world_size, follows_degrees=False)
    _answer_question(argv, prog, description, config_class, process)
    sources = _sources(argv, config_class, shape, continued, is_planned=planned, world_size=process.world_size)
    flags, file, config = sources.flags, sources.file, sources.config()
    found = [*flags.problems, *_without_value(flags, config, file.unread)]  # what every rank finds wrong
    spares, started = 0 if planned else config.watch.spares, process.world_size
    if spares >= started:
        # So many are proposed that the given degrees fit: what else is wrong is found for these.
        most = max(started - degrees_product(config), 0)
        given, use = (flag_and_value("spare_ranks", number) for number in (spares, most))
        found.append(
            f"{given} leaves none of {counted(started, 'process', 'processes')} to train: use {use}, or start more"
        )
        spares = most
    process = replace(process, world_size=started - spares)
    if not process.problems:
        file_unread = set(all_fields(config_class)) if "config" in flags.unread else file.unread
        unread = frozenset((file_unread - flags.values.keys()) | flags.unread)
        # What was probably meant by a misspelled name is checked with the rest.
        misspelled = config.misspelled(unread)
        found += [sources.as_given(said) for _, said in misspelled.values()]
        validation = Validation(
            config=sources.config({name: near for name, (near, _) in misspelled.items()}),
            world_size=process.world_size,
            unread=unread,
            follows_degrees=process.follows_degrees,
            searched=searched,
            on_cpu=None if computes_on_cpu is None else computes_on_cpu(config.parallel.device),
            further=partial(_idle_flags, flags),
        ).of_start()
        config, process = validation.config, replace(process, world_size=validation.world_size)
        found += map(sources.as_given, validation.messages())
    # The first rank of a machine looks at its disk for all of them.
    on_disk = missing_files(config, process.world_size) if process.local_rank == 0 else []
    on_disk = [problem for problem in on_disk if not files_elsewhere or problem.startswith(NEEDED_BY_PLANS)]
    here = [*process.problems, *_unknown_address(process), *file.problems, *on_disk, *sources.problems]  # this machine
    is_valid = not (found or here)
    here += problems
    # `problems` of the caller do not end the reading: its checks may find more, and all are reported together.
    if not is_valid:
        _refuse(prog, process, sources, found, here, exits=exits)
    vocab_size = _call(vocabulary, config, here)
    # The checks still run after `vocabulary` failed, and need some size.
    if here and config.model.vocab_size is None:
        vocab_size = UNKNOWN_VOCAB_SIZE
    resolved = cast(ConfigKind[R], config).resolve(process.world_size, vocab_size=vocab_size)
    for check in checks if process.local_rank == 0 else ():
        _call(check, resolved, here)
    if here:
        _refuse(prog, process, sources, found, here, exits=exits)
    if process.rank == 0:
        for note in [*sources.all_notes(config), *sources.without_effect(resolved, typed)]:
            print(f"megacore: note: {note}", file=sys.stderr)
    return resolved


def given_values(
    argv: Sequence[str], kind: type[Config], shape: Shape | None = None
) -> tuple[Mapping[str, Any], Sequence[str]]:
    """The values by field that a command line and its files set, those of other trainers' flags among them, and what is
    wrong with them; arguments as for `parse_config`."""
    sources = _sources(argv, with_registered(kind), shape, is_planned=True)
    return sources.given, sources.flags.problems


def load_toml(path: str | Path, kind: type[C] = Config) -> C:  # type: ignore[assignment]
    """A configuration from a TOML file of `save_toml`. Raises ConfigError with everything that cannot be read, or is
    invalid for any number of processes."""
    kind = with_registered(kind)
    given = read_toml(path, kind)
    config = built(kind, given.values)
    problems = [problem for name in sections_of(kind) for problem in getattr(config, name).problems()]
    problems += config.wrong_fields(frozenset()).values()
    if given.problems or problems:
        raise ConfigError(given.problems or [f"{path}: {problem}" for problem in problems])
    return config


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Process:
    """This process's ranks, from the variables that every launcher sets. Without them it is the only process. A planned
    run whose size is not given has as many processes as its degrees say: `follows_degrees`."""

    rank: int
    local_rank: int
    world_size: int
    problems: tuple[str, ...] = ()
    follows_degrees: bool = False

    @staticmethod
    def of_environment() -> _Process:
        problems: list[str] = []

        def read(name: str, default: int, low: int = 0) -> int:
            with Collected(problems):
                return launcher_number(name, default, low=low)
            return default

        rank = read("RANK", 0)
        world_size = read("WORLD_SIZE", rank + 1, low=1)
        local_rank = read("LOCAL_RANK", rank)
        # A wrong value is refused here with the others, before torch is imported.
        for name, low in (("LOCAL_WORLD_SIZE", 1), ("GROUP_RANK", 0)):  # which only the run itself reads
            read(name, low, low)
        if rank >= world_size:
            problems.append(
                f"the environment's RANK {rank} must be below WORLD_SIZE {world_size}: start through torchrun"
            )
            rank = local_rank = 0  # no other process reports it: this one must not stay silent
        port = os.environ.get("MASTER_PORT", "")
        if world_size > 1 and not (os.environ.get("MASTER_ADDR") and port.isdecimal() and 0 < int(port) < 1 << 16):
            problems.append(
                f"the environment's WORLD_SIZE is {world_size}, but its MASTER_ADDR and MASTER_PORT do not say where "
                "the ranks meet: start through torchrun"
            )
        return _Process(rank, local_rank, world_size, tuple(problems))


def _planned_process(argv: Sequence[str], kind: type[Config], shape: Shape | None, started: int) -> _Process:
    """The first process of a run that has as many as were started, if its degrees allow it, or else as they say."""
    alone = _Process(0, 0, 1)
    if help_topic(argv) is not None or "--version" in argv:
        return alone
    config = _sources(argv, kind, shape, is_planned=True).config()
    ranks, started = degrees_product(config), started - config.watch.spares
    has_derived = any(getattr(config.parallel, name) is None for name in degree_fields())
    if started > 1 and (started == ranks or (has_derived and started % ranks == 0)):
        return replace(alone, world_size=started)
    return _Process(0, 0, ranks, follows_degrees=True)


def _sources(
    argv: Sequence[str],
    kind: type[C],
    shape: Shape | None = None,
    continued: Shape | None = None,
    *,
    is_planned: bool = False,
    world_size: int = 1,
    optimizer: str | None = None,
) -> Sources[C]:
    flags = read_flags(argv, kind, optimizer=optimizer)
    typed = dict(flags.values)
    _save_in_directory(flags)
    others = other_trainers()
    notes = others.adjust(flags, is_planned=is_planned)
    path = flags.values.pop(CONFIG_INFO.name, None)
    file = Given() if path is None else read_toml(path, kind)
    _save_in_directory(file)
    given, problems, shaped = {**file.values, **flags.values}, list[str](), dict[str, Any]()
    with Collected(problems):
        shaped = {} if shape is None else dict(shape(given))
    sources = Sources(
        kind=kind,
        flags=flags,
        typed=typed,
        file=file,
        path=path,
        shape=shaped,
        former={} if continued is None else {k: v for k, v in continued(given).items() if k not in shaped},
        theirs=others.defaults(flags, given),
        problems=problems,
        notes=notes,
    )
    spares = 0 if is_planned else sources.config().watch.spares  # which have no part of a batch
    others.translate(flags, file.values, sources.config, max(world_size - spares, 1))
    if not flags.by_optimizer:
        return sources
    chosen = sources.config().optimizer.optimizer  # now it is known which
    return _sources(argv, kind, shape, continued, is_planned=is_planned, world_size=world_size, optimizer=chosen)


def _unknown_address(process: _Process) -> list[str]:
    """Whether the address at which the ranks meet has no meaning on this machine; its first rank asks."""
    if process.world_size == 1 or process.local_rank != 0 or process.problems or "MASTER_ADDR" not in os.environ:
        return []
    address, deadline = os.environ["MASTER_ADDR"], time.monotonic() + NAME_SECONDS
    while True:
        try:
            socket.getaddrinfo(address, int(os.environ["MASTER_PORT"]), type=socket.SOCK_STREAM)
            return []
        except (OSError, UnicodeError) as error:  # an address with an empty or too long part cannot even be asked for
            reason = getattr(error, "strerror", None) or str(error)
        if time.monotonic() >= deadline:
            return [
                f"the environment's MASTER_ADDR {address!r} cannot be resolved: {reason}: set it to the name or IP "
                "address of the node of rank 0, or start through torchrun with --master-addr or --rdzv-endpoint"
            ]
        time.sleep(1.0)


def _idle_flags(flags: Given, config: Config) -> list[str]:
    """Flags that ask for what the layout cannot do. A file may say the same: it holds what another layout resolved."""
    if flags.values.get("sequence_parallel") and config.parallel.sequence_parallel and config.parallel.tp == 1:
        return [
            Problem(
                "--sequence-parallel has no effect with --tp 1, which has no ranks to split the sequence over",
                Change("leave it out", {"sequence_parallel": None}),
                Values(name="tp", among=range(2, 34), near=1, bound="or more"),
            )
        ]
    return []


def _without_value(flags: Given, config: Config, unread: set[str]) -> Iterator[str]:
    """Parameters that have the value which they have anyway, after a flag that no source gives one, or of an optimizer
    that is not chosen. Of other values, rules say so."""
    kind, idle = type(config), set(idle_optimizers(config))
    infos, every = flags_by_name(kind), all_fields(kind)
    for spelled in (name for name in dict.fromkeys(flags.names) if name in infos and infos[name].owner in every):
        info, owner = infos[spelled], every[str(infos[spelled].owner)]
        sections = {name: section_of(kind, name) for name in fields_of_parameter(spelled) or (info.name,)}
        if {owner.name, info.name, "config"} & (flags.unread | unread) or any(
            name in getattr(config, section).set_fields for name, section in sections.items()
        ):
            continue
        needs_value = " " in spelled and owner.kind is not bool and info.needs and info.needs.owner == owner.name
        if needs_value and not config.value(owner.name):
            yield f"{spelled} has no effect without a value of {owner.flag}: leave it out"
        elif set(sections.values()) <= idle:
            yield f"{spelled} has no effect with --optimizer {config.optimizer.optimizer}: leave it out"


def _save_in_directory(given: Given) -> None:
    """Takes `--save DIR` for `--output-dir`: only a URL is another place than that of all else that a run writes."""
    save, output = given.values.get("save"), given.values.get("output_dir")
    if not isinstance(save, str) or is_url(save):
        return
    del given.values["save"]
    if output is None:
        given.values["output_dir"] = save
    elif os.path.abspath(output) != os.path.abspath(save):
        given.problems.append(
            f"--save {save} and --output-dir {output} contradict each other, as a directory of checkpoints is the "
            "output directory: give one of them, or --save URL for checkpoints in an object store"
        )


def _call(hook: Callable[[Any], T] | None, config: Config, problems: list[str]) -> T | None:
    """What a hook returns for the configuration. The problems that it raises are added, each once."""
    with Collected(problems):
        return None if hook is None else hook(config)
    return None


# ---- help ------------------------------------------------------------------------------------------------------------


def _answer_question(argv: Sequence[str], prog: str, description: str, kind: type[Config], process: _Process) -> None:
    """Prints the help or the version if the command line asks for it, on rank 0, and exits."""
    topic = help_topic(argv)
    if topic is None and "--version" not in argv:
        return
    text, status = f"megacore {megacore.__version__}", 0
    if topic is not None:
        try:
            text = help_text(topic, kind, prog=prog, description=description)
        except UserError as error:
            text, status = f"megacore: {error}", EXIT_REFUSED
    if process.rank == 0:
        with contextlib.suppress(BrokenPipeError):  # `--help all | head`
            print(text, file=sys.stderr if status else sys.stdout)
        output_is_closed()
    raise SystemExit(status)


# ---- refusing --------------------------------------------------------------------------------------------------------


def _refuse(
    prog: str, process: _Process, sources: Sources[Any], found: list[str], here: list[str], *, exits: bool
) -> NoReturn:
    """Ends the process with what every rank has found wrong, and what is wrong on this machine."""
    if not exits:
        raise ConfigError([printable(problem) for problem in (*found, *here)])
    if process.local_rank != 0:
        time.sleep(GRACE_SECONDS)
        raise SystemExit(EXIT_REFUSED)
    message = refusal(prog, found + here, sources)
    leave_for_launcher(message)
    if process.rank == 0:
        print(message, file=sys.stderr, flush=True)
    elif here:
        print(refusal(prog, here, where=f" on {socket.gethostname()}"), file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE_SECONDS)
    raise SystemExit(EXIT_REFUSED)


def refusal(prog: str, problems: Sequence[str], sources: Sources[Any] | None = None, where: str = "") -> str:
    """The text by which the program `prog` refuses what it is given, with where it comes from, and on which machine."""
    lines = [f"megacore: refused{where}: {counted(len(problems), 'problem')}"]
    lines += ["  - " + printable(problem).replace("\n", "\n    ") for problem in problems]
    if sources is not None:
        lines += map(printable, _of_other_trainers(problems, sources.flags.translated))
        if sources.path and not sources.file.unread.issuperset(all_fields(sources.kind)):
            lines.append(f"Keys of {sources.path} are shown as their flags: num_layers is --num-layers.")
    lines.append(f"Flags and their defaults: {prog} --help")
    return "\n".join(lines)


def _of_other_trainers(problems: Sequence[str], translated: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Where the flags of the problems come from, if that is not the command line."""
    refused = fields_in(" ".join(problems))
    for origin, settings in translated.items():
        for source, ours in settings.items():
            if refused & fields_in(ours) and not any(source in problem for problem in problems):
                change = "" if source.startswith("--") else ": change it there"
                yield f"Translated: {source} of {origin} is {ours}{change}."


def printable(text: str) -> str:
    """The text without characters that would move a terminal's cursor or break a line."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def leave_for_launcher(text: str) -> None:
    """Writes the message where torchrun looks for the cause of a failure, in torchrun's format."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    cause = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):  # the message on the terminal is what counts
        # Whole or absent: torchrun reads the file as soon as a rank has ended, maybe while another one writes it.
        replace_bytes(Path(path), json.dumps({"message": cause}).encode(), durable=False)
