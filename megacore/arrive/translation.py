"""How settings of other trainers that mean the same in another form are translated, exactly or not at all.

Unlike an alias, such a setting has other units or another notation: a switch for a value, samples instead of steps,
layers per virtual stage instead of the number of stages, or the layout of a pipeline in other letters. The modules of
each trainer have the translations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from megacore.config.dimensions import degree_fields, fill_degrees, size_of_role
from megacore.config.fields import field_infos
from megacore.config.given import Given
from megacore.config.numbers import parse_float, parse_int
from megacore.config.rampup import Ramp
from megacore.config.schema import Config
from megacore.config.spelling import flag_and_value


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


def translate_settings(given: Given, values: Mapping[str, Any], config: Config, world_size: int) -> None:
    """Translates settings of other trainers that have the same meaning in another form.

    Args:
        given: what sets them. It receives the fields, and what is wrong with the settings.
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
