"""From the words of a command line to values of fields, and every problem with them.

argparse stops at the first word that it cannot read. Here unknown flags, values that belong to no flag and unreadable
values are all collected, so that one message can name them together. Of a flag that is given twice the last value
counts, as in argparse, because scripts end in "$@"; a note says so. Underscores count as dashes, and aliases as the
flag itself.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megacore.config import megatron_flags
from megacore.config.deepspeed_flags import DEEPSPEED_FLAGS
from megacore.config.dimensions import degree_fields, fill_degrees, size_of_role
from megacore.config.dry_run_flags import DRY_RUN_FLAGS, REHEARSE
from megacore.config.fields import LARGEST_INT, FieldInfo, field_infos, flag_and_value
from megacore.config.megatron_flags import ELSEWHERE, FOREIGN, LISTS, SYNONYMS
from megacore.config.megatron_model import NOTATIONS
from megacore.config.megatron_values import ForeignFlag, ForeignSetting, MissingField, Shape, Translation, translate
from megacore.config.messages import nearest_name, number, one_of
from megacore.config.numbers import nearest_ints, parse_float, parse_int
from megacore.config.schema import Config, sections_of

_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_PARSERS: Mapping[type, Callable[[str], Any]] = {int: parse_int, float: parse_float}


@dataclass
class Given:
    """What one source, the command line or a file, sets.

    Attributes:
        values: values by field.
        problems: what is wrong with the source.
        unread: fields that the source sets to a value which could not be read.
        foreign: settings of other trainers, which `translate_foreign` makes fields of.
        names: flags of the command line as they are spelled there.
        refused: other trainers' flags that are not accepted, by what to use instead.
        translated: settings of other trainers and the flags that they became, by where they come from.
        idle: settings that change nothing here, by where they come from.
        notes: what to tell the user about the source.
    """

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    foreign: list[ForeignSetting] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)
    translated: dict[str, dict[str, str]] = field(default_factory=dict)
    idle: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def translation_notes(self) -> list[str]:
        """A note with the settings of each other trainer that were translated, and one with those that change
        nothing."""
        notes = []
        for origin, translated in self.translated.items():
            if became := "; ".join(f"{source} -> {ours}" for source, ours in translated.items() if ours):
                notes.append(f"translated from {origin}: {became}")
        return notes + [f"{origin}'s, and without effect here: {', '.join(idle)}" for origin, idle in self.idle.items()]


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
    registered=(),
    range=None,
    aliases=(),
    metavar="FILE.toml",
    default=None,
)
CONFIG_DOC = (
    "Reads settings from a TOML file with the tables [model], [parallel], ..., such as the OUTPUT_DIR/config.toml of a "
    "run. Flags override it. Default: no file."
)
DEEPSPEED_INFO = dataclasses.replace(
    CONFIG_INFO, name="deepspeed_config", aliases=("--deepscale-config",), metavar="FILE.json"
)
DEEPSPEED_DOC = (
    "Reads settings from a DeepSpeed configuration and translates them (docs/guides/coming-from-deepspeed.md). A key "
    'that has no counterpart and would change the result is refused by name. A value "auto" leaves the setting to the '
    "flags. Default: no file."
)
FILES: Mapping[str, tuple[FieldInfo, str]] = {
    info.name: (info, doc) for info, doc in ((CONFIG_INFO, CONFIG_DOC), (DEEPSPEED_INFO, DEEPSPEED_DOC))
}
"""Flags that name a file of settings, and are no field, with their help texts."""


def read_flags(argv: Sequence[str], kind: type[Config] = Config) -> Given:
    """Reads a command line without the program's name. The paths of `--config` and
    `--deepspeed-config` are among the values under their names in `FILES`."""
    flags = flags_by_name(kind)
    given = Given()
    words: dict[str, _Word] = {}
    for word in _words(argv, given):
        info = flags.get(word.flag)
        given.names.append(word.flag)
        if (foreign := _foreign_flag(word)) is not None:
            given.foreign = [other for other in given.foreign if other.source.partition(" ")[0] != word.flag]
            given.foreign.append(_foreign(word, foreign))
            _note_repeated(words.get(word.flag), word, given)
            words[word.flag] = word
        elif info is None:
            _refuse_unknown(word, flags, given)
        else:
            _note_repeated(words.get(info.name), word, given)
            words[info.name] = word
            _read_value(word, info, given)
    for text, names in given.refused.items():
        said = f"is {text}" if len(names) == 1 else f"are {_of_several(text)}"
        given.problems.append(f"{_all_of(names)} {said} (docs/guides/coming-from-megatron.md)")
    return given


def _all_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def without_fields(argv: Sequence[str], fields: Collection[str], kind: type[Config] = Config) -> list[str]:
    """A command line without the flags of some fields, however they are spelled, also by other trainers, and their
    values."""
    flags, kept, is_kept = flags_by_name(kind), list[str](), True
    for text in argv:
        if text.startswith("-") and not _is_number(text):
            name = text.partition("=")[0].replace("_", "-")
            info, foreign = flags.get(name), FOREIGN.get(name) or DEEPSPEED_FLAGS.get(name)
            sets = foreign.fields if foreign is not None else () if info is None else (info.name,)
            is_kept = not any(field in fields for field in sets)
        if is_kept:
            kept.append(text)
    return kept


def _foreign_flag(word: _Word) -> ForeignFlag | None:
    """What a flag of Megatron-LM or Megatron-DeepSpeed becomes; None for others."""
    if word.flag in LISTS and any("[" in value for value in word.values):
        return LISTS[word.flag]
    return FOREIGN.get(word.flag) or DEEPSPEED_FLAGS.get(word.flag)


def _foreign(word: _Word, foreign: ForeignFlag) -> ForeignSetting:
    return ForeignSetting(
        origin="Megatron-DeepSpeed" if word.flag in DEEPSPEED_FLAGS else "Megatron-LM",
        source=" ".join([word.flag, *word.values]),
        fields=foreign.fields,
        translate=partial(translate, foreign, word.flag, tuple(word.values)),
        is_idle=foreign.is_idle,
        is_last=foreign.is_last,
    )


def translate_foreign(given: Given, values: Mapping[str, Any], config: Config, world_size: int) -> None:
    """Translates settings of other trainers that have the same meaning in another form.

    Args:
        given: what the command line sets. It receives the fields, and what is wrong with the settings.
        values: the values by field that all sources set. A setting that contradicts them is refused.
        config: the configuration of these values, for its number of layers and degrees.
        world_size: the number of processes, for the number of replicas.
    """
    sources = {name: flag_and_value(name, value) for name, value in values.items()}
    implied: dict[str, Any] = {}
    became: dict[tuple[str, str], Translation] = {}
    for setting in sorted(given.foreign, key=lambda one: one.is_last):
        source = setting.source
        try:
            translation = setting.translate(_shape(config, given, values, world_size))
        except ValueError as error:
            is_said = isinstance(error, MissingField) and error.name in given.unread
            if not is_said and (problem := f"{setting.where}{error}") not in given.problems:  # several may read a key
                given.problems.append(problem)
            given.unread.update(setting.fields)
            continue
        for name in translation.dropped:
            given.values.pop(name, None)
            sources.pop(name, None)
        given.notes += [f"{setting.where}{source}: {translation.note}"] if translation.note else []
        for name, value in translation.values.items():
            if name in sources and {**values, **given.values}[name] != value:
                given.problems.append(
                    f"{setting.where}{source} is {flag_and_value(name, value)}, and {sources[name]} is given as well: "
                    "keep one of them"
                )
                given.unread.add(name)
                continue
            given.values[name], sources[name] = value, f"{setting.where}{source}"
        implied |= translation.implied
        if setting.is_idle:
            given.idle.setdefault(setting.origin, []).append(source)
        else:
            became[setting.origin, source] = translation
    if "schedule_csv" in values:
        implied.pop("schedule", None)
    if values.keys() & {"preset", "init_from_hf"}:  # which set the shape
        implied = {name: value for name, value in implied.items() if name not in field_infos(type(config.model))}
    given.values.update({k: v for k, v in implied.items() if k not in values and k not in given.values})
    every = {**values, **given.values}
    for (origin, source), translation in became.items():
        took_effect = [name for name, value in translation.implied.items() if every.get(name) == value]
        fields = [*(name for name in translation.values if name in every), *took_effect]
        # A later setting may have replaced what this one became.
        ours = ", ".join(flag_and_value(name, translation.values.get(name, every[name])) for name in fields)
        given.translated.setdefault(origin, {})[source] = ours


def _shape(config: Config, given: Given, values: Mapping[str, Any], world_size: int) -> Shape:
    """What translations depend on, as far as it is known."""
    settings = {**values, **given.values}
    known = {
        "num_layers": config.model.num_layers,
        "pp": config.parallel.pp,
        "hidden_size": config.model.hidden_size,
        "micro_batch_size": config.training.micro_batch_size,
        "global_batch_size": config.training.global_batch_size,
        "train_iters": config.training.train_iters,
        "lr_decay_iters": config.optimizer.lr_decay_iters,
    }
    numbers = {name: _positive_number(given.values.get(name, value)) for name, value in known.items()}
    if "micro_batch_size" not in settings:
        numbers["micro_batch_size"] = None
    ramp = None if config.rampup.problems() else config.rampup.ramp()
    replicas = _replicas(config, settings, world_size)
    others = {name: value for name, _, value in (setting.source.partition(" ") for setting in given.foreign)}
    return Shape(**numbers, replicas=replicas, settings=settings, others=others, ramp=ramp, load=config.checkpoint.load)


def _replicas(config: Config, settings: Mapping[str, Any], world_size: int) -> int | None:
    """The number of data-parallel ranks; None where the degrees do not fit the number of processes."""
    degrees = {name: settings[name] for name in degree_fields() if name in settings}
    parallel = dataclasses.replace(config.parallel, **degrees)
    given = (getattr(parallel, name) for name in degree_fields())
    if any(degree is not None and _positive_number(degree) is None for degree in given):
        return None
    return size_of_role("batch", fill_degrees(parallel, world_size)) or None


def _positive_number(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _words(argv: Sequence[str], given: Given) -> Iterator[_Word]:
    word: _Word | None = None
    for text in argv:
        if text.startswith("-") and not _is_number(text):
            if word is not None:
                yield word
            name, equals, value = text.partition("=")
            word = _Word(name.replace("_", "-"), [value] if equals else [])
        elif word is not None:
            word.values.append(text)
        else:
            given.problems.append(f"'{text}' belongs to no flag: every value follows its flag, as in --train-iters 100")
    if word is not None:
        yield word


def _note_repeated(first: _Word | None, last: _Word, given: Given) -> None:
    if first is not None and (first.values or first.flag) != (last.values or last.flag):
        one, other = (" ".join([word.flag, *(value or "''" for value in word.values)]) for word in (first, last))
        given.notes.append(f"{one} is followed by {other}, which counts")


def _read_value(word: _Word, info: FieldInfo, given: Given) -> None:
    try:
        if info.name in NOTATIONS and len(word.values) == 1 and "," in word.values[0]:
            value: Any = word.values[0]
            ours = NOTATIONS[info.name](word.flag, value)
        else:
            value = _value(word, info)
            ours = SYNONYMS.get(info.name, {}).get(value, value) if info.kind is str else value
            if info.kind is str and (why := ELSEWHERE.get(info.name, {}).get(value)):
                raise ValueError(f"{word.flag} {value} is a Megatron-LM value that megacore does not support: {why}")
        given.values[info.name] = ours
        if ours != value:
            of_megatron = given.translated.setdefault("Megatron-LM", {})
            of_megatron[f"{word.flag} {value}"] = flag_and_value(info.name, ours)
    except ValueError as error:
        given.problems.append(str(error))
        given.unread.add(info.name)


def _value(word: _Word, info: FieldInfo) -> Any:
    """The value of a flag.

    Raises:
        ValueError: the words after it are too few, too many, or unreadable.
    """
    values = word.values
    if info.kind is bool:
        if values:
            raise ValueError(
                f"{word.flag} {values[0]}: a switch takes no value: use {info.flag} or {_negative(info.flag)}"
            )
        return word.flag in info.flags
    if not values:
        raise ValueError(f"{word.flag} needs a value: {word.flag} {info.metavar}")
    if info.kind is tuple:
        return tuple(values)
    if len(values) > 1:
        extra = " ".join(values[1:])
        raise ValueError(
            f"'{extra}' belongs to no flag (it follows {word.flag} {values[0]}): leave it out, or name its flag"
        )
    if info.optional and values[0] == "None":
        return None
    if not values[0] and not info.choices:
        raise ValueError(f"{word.flag} is empty: give it a value, or leave the flag out")
    try:
        return _PARSERS.get(info.kind, info.kind)(values[0])  # `validate` checks the range and the choices
    except ValueError:
        expected = "whole number" if info.kind is int else "number"
        raise ValueError(f"{word.flag} '{values[0]}' is not a {expected}: {_example(values[0], info)}") from None


def _example(text: str, info: FieldInfo) -> str:
    """The whole numbers next to what was given, if it is a number; else the default."""
    if info.kind is int:
        accepted = [n for n in nearest_ints(text) if n <= LARGEST_INT and (info.range is None or n in info.range)]
        if accepted:
            return f"use {one_of(accepted)}"
    has_default = info.default not in (None, dataclasses.MISSING)
    return f"use, for example, {number(info.default)}" if has_default else f"write {info.metavar} in digits"


# ---- refusals --------------------------------------------------------------------------------------------------------


def _of_several(text: str) -> str:
    """What `megatron_flags.advice` says of one flag, said of several."""
    several = {"a Megatron-LM flag": "Megatron-LM flags", "without it,": "without them,", "leave it": "leave them"}
    for one, more in several.items():
        text = text.replace(one, more)
    return text


def _refuse_unknown(word: _Word, flags: dict[str, FieldInfo], given: Given) -> None:
    if info := flags.get("--" + word.flag.removeprefix("--no-")):  # --no-lr
        given.problems.append(f"{word.flag}: only a switch can be turned off: use {info.flag} {info.metavar}")
        return
    if text := megatron_flags.advice(word.flag):
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
    near = nearest_name(word.flag, flags)
    if near is None:
        given.problems.append(f"{word.flag} is not a flag: --help all lists them")
        return
    given.problems.append(f"{word.flag} is not a flag: did you mean {near}?")
    given.unread.add(flags[near].name)


# ---- names -----------------------------------------------------------------------------------------------------------


def flags_by_name(kind: type[Config] = Config) -> dict[str, FieldInfo]:
    """The field of each flag, alias, and `--no-` form of a switch."""
    fields = (*all_fields(kind).values(), CONFIG_INFO, DEEPSPEED_INFO)
    positive = {name: info for info in fields for name in info.flags}
    return positive | {_negative(name): info for name, info in positive.items() if info.kind is bool}


def flag_names(kind: type[Config] = Config) -> dict[str, tuple[str, ...]]:
    """Each flag with its aliases and, for a switch, the form that turns it off."""
    return {
        info.flag: (*info.aliases, *([_negative(info.flag)] if info.kind is bool else []))
        for info in (CONFIG_INFO, DEEPSPEED_INFO, *all_fields(kind).values())
    }


def _negative(flag: str) -> str:
    return "--no-" + flag.removeprefix("--")


def _is_number(text: str) -> bool:
    try:
        parse_float(text)
    except ValueError:
        return False
    return True
