"""How flags of Megatron-LM that mean the same in another form are translated, exactly or not at all.

Unlike an alias, such a flag has other units or another notation: a switch for a value, samples instead of steps, layers
per virtual stage instead of the number of stages, or the layout of a pipeline in other letters. megatron_model.py and
megatron_training.py have the translations, and megatron_flags.py the table of all flags.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from megacore.config.numbers import parse_float, parse_int
from megacore.config.rampup import Ramp


@dataclass(frozen=True)
class Translation:
    """The fields that a flag sets.

    Attributes:
        values: what the flag says, by field.
        implied: values that follow from it, by field, where nothing else sets them.
        dropped: fields whose values on the command line mean nothing beside the flag.
        note: what to tell the user.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    note: str = ""


class MissingField(ValueError):
    """A setting that has no translation while a field is not given."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class Shape:
    """What a translation may depend on. None: not given, or an invalid value, which `validate` reports.

    Attributes:
        replicas: data-parallel ranks.
        settings: what is given so far, by field.
        others: settings of other trainers that are given, with their values as text.
    """

    num_layers: int | None
    pp: int | None
    hidden_size: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    ramp: Ramp | None = None
    load: str | None = None
    train_iters: int | None = None
    lr_decay_iters: int | None = None
    replicas: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of Megatron-LM: what it becomes, in words and as a function of its value ("" for a switch).

    Attributes:
        becomes: in words.
        fields: that it sets.
        translate: from the flag, its value and the shape of the run.
        is_switch: it takes no value.
        is_list: it takes any number of values, which `translate` gets with blanks between.
        is_idle: it changes nothing here.
        is_last: it depends on what others become.
    """

    becomes: str
    fields: tuple[str, ...]
    translate: Callable[[str, str, Shape], Translation]
    is_switch: bool = False
    is_list: bool = False
    is_idle: bool = False
    is_last: bool = False


@dataclass(frozen=True, kw_only=True)
class ForeignSetting:
    """A setting of another trainer, as a command line or a file gives it.

    Attributes:
        origin: the trainer, or its file.
        source: the setting and its value, for messages.
        fields: that it sets.
        translate: from the shape of the run. Raises ValueError for a value without a translation.
        where: precedes the source in messages.
        is_idle: it changes nothing here.
        is_last: it depends on what others become.
    """

    origin: str
    source: str
    fields: tuple[str, ...]
    translate: Callable[[Shape], Translation]
    where: str = ""
    is_idle: bool = False
    is_last: bool = False


def translate(foreign: ForeignFlag, flag: str, words: Sequence[str], shape: Shape) -> Translation:
    """Translates a flag with its values.

    Args:
        foreign: what the flag becomes.
        flag: the flag.
        words: its values on the command line.
        shape: of the run.

    Raises:
        ValueError: it has too few or too many values, or one that has no translation; the message names the way out.
    """
    if foreign.is_switch:
        if words:
            raise ValueError(f"{flag} {words[0]}: a switch takes no value: leave the value out")
        return foreign.translate(flag, "", shape)
    if foreign.is_list:
        return foreign.translate(flag, " ".join(words), shape)
    if len(words) != 1:
        way_out = "give it one, or leave the flag out" if foreign.is_idle else f"it is {foreign.becomes}"
        raise ValueError(f"{flag} needs one value, and has {len(words) or 'none'}: {way_out}")
    return foreign.translate(flag, words[0], shape)


def whole_number(flag: str, text: str, *, least: int = 1) -> int:
    """The value of a flag that counts.

    Raises:
        ValueError: it is not a whole number of `least` or more.
    """
    with contextlib.suppress(ValueError):
        if (number := parse_int(text)) >= least:
            return number
    raise ValueError(f"{flag} '{text}' is not a whole number of {least} or more: use, for example, 2")


def is_number(text: str) -> bool:
    """Whether a word is a number."""
    try:
        parse_float(text)
    except ValueError:
        return False
    return True


def nearest(count: float | Fraction) -> int:
    """The nearest whole number, and the larger one of two that are as near."""
    return math.floor(count + Fraction(1, 2) if isinstance(count, Fraction) else count + 0.5)


def fraction(flag: str, text: str) -> Fraction:
    """The value of a flag that is a share.

    Raises:
        ValueError: it is not a number of at least 0 and below 1.
    """
    try:
        value = Fraction(repr(parse_float(text)))  # as it is written, and not the binary number next to it
    except ValueError:  # nan and inf too
        value = Fraction(-1)
    if not 0 <= value < 1:
        raise ValueError(f"{flag} '{text}' is not a number of at least 0 and below 1: use, for example, 0.01")
    return value
