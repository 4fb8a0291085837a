"""From the words of a command line to values of fields, and every problem with them, where argparse stops at the first.

Of a flag that is given twice the last value counts, because scripts end in "$@"; a note says so. Underscores count as
dashes. A parameter of a flag is a word after it, NAME=VALUE or a switch, and counts as a flag of two words:
`--rope-scaling factor`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacore.config.dry_run_flags import DRY_RUN_FLAGS, REHEARSE
from megacore.config.fields import LARGEST_INT, FieldInfo, field_infos
from megacore.config.given import Given
from megacore.config.messages import did_you_mean, is_misspelled, nearest_name, number, one_of
from megacore.config.numbers import is_number, nearest_ints, parse_float, parse_int
from megacore.config.optimizers import sections_read
from megacore.config.other_trainers import other_trainers
from megacore.config.schema import Config, section_of, sections_of
from megacore.config.spelling import PARAMETERS, fields_in, flag_and_value, is_shared, negative, with_value

_SIMILAR = 0.65  # flags that are less similar are not taken for one another: a wrong one trains another model
_OFF = ("0", "false", "no", "off")
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_PARSERS: Mapping[type, Callable[[str], Any]] = {int: parse_int, float: parse_float}


@dataclass
class _Word:
    """A flag on the command line, with the words that follow it up to the next flag."""

    flag: str
    values: list[str]


def all_fields(kind: type[Config] = Config) -> dict[str, FieldInfo]:
    """Every field of every section of a kind of configuration, by its name."""
    return {name: info for section in sections_of(kind).values() for name, info in field_infos(section).items()}


CONFIG_INFO = FieldInfo(
    name="config",
    kind=str,
    optional=True,
    metavar="FILE.toml",
    doc="Reads settings from a TOML file with the tables [model], [parallel], ..., such as the OUTPUT_DIR/config.toml "
    "of a run. Flags override it. Default: no file.",
)


def setting_files() -> dict[str, FieldInfo]:
    """Flags that name a file of settings, and are no field."""
    return {CONFIG_INFO.name: CONFIG_INFO, **other_trainers().files}


def read_flags(argv: Sequence[str], kind: type[Config] = Config, *, optimizer: str | None = None) -> Given:
    """Reads a command line without the program's name. The paths of files of settings are among the values under their
    names in `setting_files`. `optimizer`: the one that another source chooses, where the command line does not."""
    flags = flags_by_name(kind)
    given = Given()
    words: dict[str, _Word] = {}
    # All words are read before any value: --optimizer, which decides what its parameters mean, may come last.
    every = list(_with_parameters(_words(argv, given), flags, given))
    optimizer = _optimizer_of(every, flags) or optimizer
    for word in every:
        info = flags.get(word.flag)
        given.names.append(word.flag)
        if len(candidates := fields_of_parameter(word.flag)) > 1:
            if optimizer is None:
                given.by_optimizer.append(word.flag)
                continue
            info = all_fields(kind)[field_of_optimizer(candidates, optimizer, kind)]
        if (setting := other_trainers().setting_of(word.flag, word.values)) is not None:
            # The last one counts, as of megacore's own flags.
            given.foreign = [other for other in given.foreign if other.source.partition(" ")[0] != word.flag]
            given.foreign.append(setting)
            _note_repeated(words.get(word.flag), word, given)
            words[word.flag] = word
        elif info is None:
            _refuse_unknown(word, flags, given)
        else:
            _note_repeated(words.get(info.name), word, given)
            words[info.name] = word
            _read_value(word, info, given)
    given.problems += [other_trainers().refusal(names, advice) for advice, names in given.refused.items()]
    return given


def field_of_optimizer(candidates: Sequence[str], optimizer: str, kind: type[Config] = Config) -> str:
    """Which of the fields of one parameter of --optimizer an optimizer reads; the first if it reads none."""
    read = sections_read(optimizer)
    return next((name for name in candidates if section_of(kind, name) in read), candidates[0])


def _optimizer_of(words: Sequence[_Word], flags: Mapping[str, FieldInfo]) -> str | None:
    """The optimizer that a command line chooses; None: it leaves that to other sources."""
    read = Given()
    for word in words:
        if (info := flags.get(word.flag)) is not None and info.name == "optimizer":
            _read_value(word, info, read)
    return read.values.get("optimizer")


def without_fields(argv: Sequence[str], fields: Collection[str], kind: type[Config] = Config) -> list[str]:
    """A command line without the flags of some fields, however they are spelled, also by other trainers, and their
    values."""
    flags, kept, is_kept, name = flags_by_name(kind), list[str](), True, ""
    for text in argv:
        if text.startswith("-") and not is_number(text):
            name = text.partition("=")[0].replace("_", "-")
            info = flags.get(name)
            theirs = other_trainers().setting_of(name, ())
            sets = theirs.fields if theirs else () if info is None else (info.name,)
            is_kept = not any(field in fields for field in sets)
        if parameter := _parameter(name, text, flags):
            names = fields_of_parameter(parameter) or (flags[parameter].name,)
            if not any(field in fields for field in names):
                kept += [name, text] if not is_kept else [text]
        elif is_kept:
            kept.append(text)
    return kept


def _words(argv: Sequence[str], given: Given) -> list[_Word]:
    words = list[_Word]()
    for text in argv:
        if text.startswith("-") and not is_number(text):
            name, equals, value = text.partition("=")
            words.append(_Word(name.replace("_", "-"), [value] if equals else []))
        elif words:
            words[-1].values.append(text)
        else:
            given.problems.append(f"'{text}' belongs to no flag: leave it out, or name its flag before it")
    return words


def _with_parameters(words: Sequence[_Word], flags: Mapping[str, FieldInfo], given: Given) -> Iterator[_Word]:
    """Each flag, and each of its parameters as a flag of two words."""
    for word in words:
        owner = flags.get(word.flag)
        if owner is None or owner.name not in PARAMETERS:
            yield word
            continue
        values, found, is_read = list[str](), list[_Word](), True
        for text in word.values:
            name, equals, value = text.partition("=")
            is_text = owner.kind is str and not owner.choices and not values  # a name, which may be any word
            if (parameter := _parameter(owner.flag, text, flags)) and (equals or not is_text):
                found.append(_Word(parameter, [value] if equals else []))
            elif equals and not is_text:
                near, is_read = nearest_name(name, PARAMETERS[owner.name]), False
                few = sorted(PARAMETERS[owner.name]) if len(PARAMETERS[owner.name]) <= 4 else []
                way = did_you_mean(name, PARAMETERS[owner.name]) or (f": use {one_of(few)}" if few else "")
                given.problems.append(f"{word.flag} {text}: {owner.flag} has no parameter {name}{way}")
                given.unread.update(PARAMETERS[owner.name][near] if near else ())
            elif found and not found[-1].values and flags[found[-1].flag].kind is not bool:
                parameter, is_read = found.pop().flag, False
                given.problems.append(f"{parameter} {text} are two words: write {with_value(parameter, text)}")
                given.unread.add(flags[parameter].name)
            else:
                values.append(text)
        if values or (is_read and not found) or owner.kind is bool or owner.alone is not None:
            yield _Word(word.flag, values)
        yield from found


def _parameter(flag: str, text: str, flags: Mapping[str, FieldInfo]) -> str | None:
    """The parameter of a flag that a word after it sets, as a flag of two words; None: it is none."""
    name = f"{flag} {text.partition('=')[0].replace('_', '-')}"
    return name if name in flags else None


def fields_of_parameter(flag: str) -> tuple[str, ...]:
    """The fields that a flag of two words may be; none for other flags, and for the form that turns a switch off."""
    owner, _, name = flag.removeprefix("--").partition(" ")
    return PARAMETERS.get(owner.replace("-", "_"), {}).get(name.removeprefix("no-"), ())


def _note_repeated(first: _Word | None, last: _Word, given: Given) -> None:
    if first is not None and (first.values or first.flag) != (last.values or last.flag):
        one, other = (
            with_value(word.flag, " ".join(value or "''" for value in word.values)) if word.values else word.flag
            for word in (first, last)
        )
        given.notes.append(f"{one} is followed by {other}, which counts")


def _read_value(word: _Word, info: FieldInfo, given: Given) -> None:
    try:
        theirs = other_trainers().value_of(info.name, word.flag, word.values)
        if theirs is None and len(word.values) > 1 and info.kind not in (bool, tuple):
            first, *more = word.values
            after = f"it follows {word.flag} {first}"
            given.problems.append(f"'{' '.join(more)}' belongs to no flag ({after}): leave it out, or name its flag")
            given.unread.add(info.name)
            word = _Word(word.flag, [first])
        given.values[info.name] = _value(word, info) if theirs is None else theirs.value
        if theirs is not None:
            ours = flag_and_value(info.name, theirs.value)
            given.translated.setdefault(theirs.origin, {})[with_value(word.flag, word.values[0])] = ours
    except ValueError as error:
        given.problems.append(str(error))
        if isinstance(error, _Misread) and error.meant is not None:
            given.values[info.name] = error.meant
        else:
            given.unread.add(info.name)


class _Misread(ValueError):
    """A value that cannot be read, and the one that its message proposes, with which rules are checked; None: none."""

    def __init__(self, said: str, meant: Any) -> None:
        super().__init__(said)
        self.meant = meant


def _value(word: _Word, info: FieldInfo) -> Any:
    values = word.values
    if info.kind is bool:
        if values:
            given = with_value(word.flag, values[0] or "''")
            said = f"{given}: a switch takes no value: use {info.flag} or {negative(info.flag)}"
            raise _Misread(said, word.flag in info.flags and values[0].lower() not in _OFF)
        return word.flag in info.flags
    if not values and info.alone is not None:
        return info.alone
    if not values:
        raise ValueError(f"{word.flag} needs a value: use {_with_example(word.flag, info)}")
    if info.kind is tuple:
        return tuple(values)
    if info.optional and values[0] == "None":
        return None
    if not values[0] and not info.choices:
        raise ValueError(f"{word.flag} is empty: give it a value, or leave the flag out")
    try:
        return _PARSERS.get(info.kind, info.kind)(values[0])  # `validate` checks the range and the choices
    except ValueError:
        expected, (way, meant) = "whole number" if info.kind is int else "number", _example(values[0], info)
        raise _Misread(f"{with_value(word.flag, repr(values[0]))} is not a {expected}: {way}", meant) from None


def _with_example(flag: str, info: FieldInfo) -> str:
    """A flag with a usual value, if there is one."""
    usual = info.example if info.default in (None, "", (), dataclasses.MISSING) else info.default
    if usual is None or isinstance(usual, tuple):
        return with_value(flag, info.metavar)
    return f"for example {with_value(flag, number(usual) if isinstance(usual, int | float) else str(usual))}"


def _example(text: str, info: FieldInfo) -> tuple[str, Any]:
    """The whole numbers next to what was given, if it is a number; else the default. In words, and the first."""
    if info.kind is int:
        accepted = [n for n in nearest_ints(text) if n <= LARGEST_INT and (info.range is None or n in info.range)]
        if accepted:
            return f"use {one_of(accepted)}", accepted[0]
    usual = info.example if info.default in (None, dataclasses.MISSING) else info.default
    if usual is None:
        return f"write {info.metavar} in digits" + (", or leave it out" if info.optional else ""), None
    return f"use, for example, {number(usual)}", usual


# ---- refusals --------------------------------------------------------------------------------------------------------


def _refuse_unknown(word: _Word, flags: dict[str, FieldInfo], given: Given) -> None:
    if info := flags.get("--" + word.flag.removeprefix("--no-")):  # --no-lr
        given.problems.append(f"{word.flag}: only a switch can be turned off: use {_with_example(info.flag, info)}")
        return
    if text := other_trainers().advice(word.flag):
        if word.flag not in (names := given.refused.setdefault(text, [])):
            names.append(word.flag)
        instead = (flags[name].name for name in _FLAG.findall(text) if name in flags)
        given.unread.update(instead)  # what the flag would have set is not missing
        return
    if word.flag == REHEARSE:
        given.problems.append(f"{REHEARSE} starts a run, and nothing is started here: leave it out")
        return
    if word.flag in DRY_RUN_FLAGS:
        given.problems.append(f"{word.flag} has no effect without --dry-run: add --dry-run, or leave it out")
        return
    if theirs := other_trainers().name_of(word.flag, word.values):
        given.problems.append(f"{word.flag} is not a flag: did you mean {theirs}?")
        given.unread.update(fields_in(theirs))
        return
    # Only a word that differs by some letters is meant for a parameter of another flag.
    names = [name for name in flags if not flags[name].owner or is_misspelled(word.flag.lstrip("-"), name.lstrip("-"))]
    near = nearest_name(word.flag, names, similar=_SIMILAR)
    if near is None:
        given.problems.append(f"{word.flag} is not a flag: leave it out (--help all lists flags)")
        return
    meant = flags[near].flag if flags[near].owner else near
    given.problems.append(f"{word.flag} is not a flag: did you mean {meant}?")
    read, info = Given(), flags[near]
    if is_misspelled(word.flag, near) and info.name not in setting_files() and not is_shared(info.name):
        _read_value(_Word(near, word.values), info, read)  # rules are checked with what was meant
    given.values = {**read.values, **given.values}
    given.unread.update(() if read.values else [info.name])


# ---- names -----------------------------------------------------------------------------------------------------------


def flags_by_name(kind: type[Config] = Config) -> dict[str, FieldInfo]:
    """The field of each flag, alias, and `--no-` form of a switch."""
    fields = (*all_fields(kind).values(), *setting_files().values())
    positive = {name: info for info in fields for name in info.flags}
    return positive | {negative(name): info for name, info in positive.items() if info.kind is bool}
