"""From command-line words to values of fields, with every problem found on the way.

tyro and argparse stop at the first word they cannot read, and take the last value of a flag that is given twice. Here
each word is accounted for: unknown flags, values that belong to no flag, contradictions and unreadable values are all
collected, so that one message can name them together. Underscores count as dashes, and aliases as the flag itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megacore.config import Config, megatron_flags, sections_of
from megacore.config.fields import FieldInfo, field_infos
from megacore.config.messages import nearest_name


@dataclass
class Given:
    """What one source, the command line or a file, gives: values by field, and what is wrong with the source."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)  # fields that were meant, but whose value could not be read


@dataclass
class _Word:
    """A flag as it stands on the command line, with the words that follow it up to the next flag."""

    flag: str
    values: list[str]


def all_fields(kind: type[Config] = Config) -> dict[str, FieldInfo]:
    """Every field of every section of a kind of configuration, by its name."""
    return {name: info for section in sections_of(kind).values() for name, info in field_infos(section).items()}


CONFIG_INFO = FieldInfo(
    name="config",
    kind=str,
    optional=True,
    choices=(),
    range=None,
    aliases=(),
    metavar="FILE.toml",
    default=None,
)
CONFIG_DOC = (
    "A TOML file of settings, in tables [model], [parallel], ... as in OUTPUT_DIR/config.toml; flags are stronger."
)


def read_flags(argv: Sequence[str], kind: type[Config] = Config) -> Given:
    """Reads command-line words, without the program's name; the `--config` file is among the values as `config`."""
    fields = {**all_fields(kind), "config": CONFIG_INFO}
    known = {name: info for info in fields.values() for name in info.flags}
    given = Given()
    texts: dict[str, _Word] = {}
    for word in _words(argv, given):
        info = known.get(word.flag) or known.get(_positive(word.flag))
        if info is None or (word.flag not in known and info.kind is not bool):
            _refuse_unknown(word, info, known, given)
        elif info.name in texts:
            _refuse_contradiction(texts[info.name], word, info, given)
        else:
            texts[info.name] = word
            _read_value(word, info, given)
    return given


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


def _read_value(word: _Word, info: FieldInfo, given: Given) -> None:
    try:
        given.values[info.name] = _value(word, info)
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
            off = _negative(info.flag)
            raise ValueError(f"{word.flag} {values[0]}: a switch takes no value: use {info.flag} or {off}")
        return word.flag in info.flags
    if not values:
        raise ValueError(f"{word.flag} needs a value: {word.flag} {info.metavar}")
    if info.kind is tuple:
        return tuple(values)
    if len(values) > 1:
        extra = " ".join(values[1:])
        raise ValueError(
            f"{word.flag} {values[0]} {extra}: '{extra}' belongs to no flag: leave it out, or name its flag"
        )
    if info.optional and values[0] == "None":
        return None
    try:
        return info.kind(values[0])  # whether it is in range, or among the choices, is for `validate`
    except ValueError:
        expected = "whole number" if info.kind is int else "number"
        message = f"{word.flag} '{values[0]}' is not a {expected}: {_example(values[0], info)}"
    raise ValueError(message)


def _example(text: str, info: FieldInfo) -> str:
    if info.kind is int and _is_number(text) and float(text).is_integer():
        return f"use {int(float(text))}"
    return f"use, for example, {info.default}" if info.default else f"give {info.metavar}, in digits"


# ---- refusals --------------------------------------------------------------------------------------------------------


def _refuse_unknown(word: _Word, info: FieldInfo | None, known: dict[str, FieldInfo], given: Given) -> None:
    if info is not None:  # --no-lr
        given.problems.append(f"{word.flag}: only a switch can be turned off: use {info.flag} {info.metavar}")
        return
    if text := megatron_flags.advice(word.flag):
        given.problems.append(f"{word.flag} {text} (docs/coming-from-megatron.md)")
        return
    near = nearest_name(word.flag, [*known, *_switched_off(known)])
    if near is None:
        given.problems.append(f"{word.flag} is not a flag: --help lists all of them")
        return
    given.problems.append(f"{word.flag} is not a flag: did you mean {near}?")
    given.unread.add((known.get(near) or known[_positive(near)]).name)


def _refuse_contradiction(first: _Word, second: _Word, info: FieldInfo, given: Given) -> None:
    if _meaning(first, info) == _meaning(second, info):
        return
    both = " and as ".join(" ".join([w.flag, *w.values]) for w in (first, second))
    way_out = "give all of its values after one flag" if info.kind is tuple else "keep one of them"
    given.values.pop(info.name, None)
    given.problems.append(f"{info.flag} is given twice, as {both}: {way_out}")
    given.unread.add(info.name)


def _meaning(word: _Word, info: FieldInfo) -> Any:
    try:
        return _value(word, info)
    except ValueError:
        return (word.flag, *word.values)


# ---- names -----------------------------------------------------------------------------------------------------------


def flag_names(kind: type[Config] = Config) -> dict[str, tuple[str, ...]]:
    """Each flag with its aliases and, for a switch, the form that turns it off."""
    return {
        info.flag: (*info.aliases, *([_negative(info.flag)] if info.kind is bool else []))
        for info in (CONFIG_INFO, *all_fields(kind).values())
    }


def _switched_off(known: dict[str, FieldInfo]) -> list[str]:
    return [_negative(name) for name, info in known.items() if info.kind is bool]


def _negative(flag: str) -> str:
    return "--no-" + flag.removeprefix("--")


def _positive(flag: str) -> str:
    return "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
