"""What a configuration field declares about itself (aliases, range, help text), and the base class of sections.

A section is a frozen dataclass that derives from `Section`. A field's annotation states its range and aliases, and what
it has no effect without (`tp: Annotated[int, Range(1), Flag(("--tensor-model-parallel-size",))] = 1`). The string under
it is its help text: first what the flag does, at last "Default: ..." where that depends on other flags. So `--help`,
the reference and the check at launch have one source. A resolved section (`ResolvedModel`) is a subclass that narrows
types (`vocab_size: int`); the rest is that of the section it narrows.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from megacore.config.messages import did_you_mean, number, one_of, shortened
from megacore.config.problem import Change, Problem, Values, Way
from megacore.config.rules import Needs, Rule, Settings
from megacore.config.spelling import OWNERS, flag, own_flag, with_value

# Larger integers are typing errors, and would overflow the 64-bit products that the data layer computes.
LARGEST_INT = 2**31 - 1
_TRIED = 60  # numbers from a bound on
_FEW = 8  # values of a range that are all named, at most
_LARGEST_FLOAT = sys.float_info.max

R = TypeVar("R", bound="Section")
T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    """Aliases of a field's flag (Megatron-LM's names, where the meaning is the same), the metavar of its value, a usual
    value to propose, and the value of the flag without one."""

    aliases: tuple[str, ...] = ()
    metavar: str | None = None
    example: Any = None
    alone: str | None = None


@dataclass(frozen=True)
class Range:
    """The closed interval [low, high] of a number; an `above` or `below` bound is excluded."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = (("at least", self.low), ("above", self.above), ("at most", self.high), ("below", self.below))
        return " and ".join(f"{words} {number(bound)}" for words, bound in bounds if bound is not None)


@dataclass(frozen=True)
class Choices:
    """The names that a field may have, of a registry that may grow."""

    names: Collection[str]


@dataclass(frozen=True, kw_only=True)
class FieldInfo:
    """One field of a section, as its annotation describes it."""

    name: str
    kind: type  # bool, int, float, str, or tuple for a tuple of strings
    metavar: str
    optional: bool = False
    registered: Collection[str] = ()  # the names that it may have; empty: any value of its kind
    range: Range | None = None
    aliases: tuple[str, ...] = ()
    default: Any = None  # dataclasses.MISSING where the field is required
    needs: Needs | None = None
    example: Any = None
    alone: str | None = None  # the value of the flag without one
    doc: str = ""  # the help text of a flag that is no field

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(self.registered)

    @property
    def flag(self) -> str:
        return flag(self.name)

    @property
    def owner(self) -> str | None:
        """The field of whose flag it is a parameter; None: it has a flag."""
        return OWNERS[self.name][0] if self.name in OWNERS else None

    @property
    def flags(self) -> tuple[str, ...]:
        """Every name of the flag, without the `--no-` form of a switch."""
        return (self.flag, *self.aliases)

    @property
    def usage(self) -> str:
        """The flag with what follows it."""
        return self.flag if self.kind is bool else with_value(self.flag, self.metavar)

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


def cached(function: Callable[[type], T]) -> Callable[[type], T]:
    """functools.cache, for which mypy takes no class for hashable."""
    return functools.cache(function)


@cached  # evaluating annotations takes milliseconds
def field_infos(section: type) -> dict[str, FieldInfo]:
    """Describes every field of a section class, in the order of its definition."""
    declared = get_type_hints(_declaring_class(section), include_extras=True)
    narrowed = get_type_hints(section)
    fields = [f for f in dataclasses.fields(section) if f.name in declared]  # a resolved section may have more
    defaults = {f.name: f.default for f in dataclasses.fields(_declaring_class(section))}  # a resolved one has none
    return {f.name: _describe(f, declared[f.name], narrowed[f.name], defaults) for f in fields}


def _declaring_class(section: type) -> type:
    """The section itself or, for a resolved section, the one that it narrows."""
    return next(base for base in reversed(section.__mro__) if dataclasses.is_dataclass(base))


def _describe(field: dataclasses.Field[Any], declared: Any, narrowed: Any, defaults: Mapping[str, Any]) -> FieldInfo:
    hint, *extras = get_args(declared) if get_origin(declared) is Annotated else (declared,)
    if type(None) in get_args(hint):
        hint = next(a for a in get_args(hint) if a is not type(None))
    choices: Collection[str] = get_args(hint) if get_origin(hint) is Literal else ()
    choices = next((e.names for e in extras if isinstance(e, Choices)), choices)
    kind = str if choices else (get_origin(hint) or hint)
    names = next((e for e in extras if isinstance(e, Flag)), Flag())
    needs = next((e for e in extras if isinstance(e, Needs)), None)
    # A parameter of a flag that is off by default means nothing without it.
    if needs is None and (owner := OWNERS.get(field.name, ("",))[0]) in defaults and not defaults[owner]:
        needs = Needs(owner)
    return FieldInfo(
        name=field.name,
        kind=kind,
        optional=type(None) in get_args(narrowed),
        registered=choices,
        range=next((e for e in extras if isinstance(e, Range)), None),
        aliases=((own_flag(field.name),) if field.name in OWNERS else ()) + names.aliases,
        metavar=names.metavar or (f"{{{','.join(choices)}}}" if choices else kind.__name__.upper()),
        default=defaults[field.name],
        needs=needs,
        example=names.example,
        alone=names.alone,
    )


@cached  # parsing the source takes milliseconds
def field_docs(section: type) -> Mapping[str, str]:
    """The help text of each field: the string under it in the source, which Python itself does not keep."""
    try:
        source = textwrap.dedent(inspect.getsource(_declaring_class(section)))
    except OSError:  # a class of one's own may come from where there is no file
        return MappingProxyType({})
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(statement.target, ast.Name)
            assert isinstance(following.value, ast.Constant)
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return MappingProxyType(docs)


class Section:
    """A part of the configuration that validates itself."""

    earlier_table: ClassVar[str | None] = None
    """The table that had these fields in files of an earlier version; they are read from there too."""
    former_names: ClassVar[Mapping[str, str]] = {}
    """Names of fields in files of an earlier version, and those that they have now."""
    former_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of an earlier version, whose config.toml has them written out, by field."""

    rules: ClassVar[Sequence[Rule]] = ()
    """What must hold between the fields of the section, beside what they say themselves."""

    @property
    def infos(self) -> Mapping[str, FieldInfo]:
        """What its fields declare, by name."""
        return field_infos(type(self))

    def wrong_fields(self) -> dict[str, str]:
        """The fields whose value is invalid whatever the other fields are, each with its message; of those that have no
        effect, which is said instead, none."""
        infos = self.infos  # whose defaults are valid
        values = ((name, _value_problem(infos[name], getattr(self, name))) for name in self.set_fields)
        messages = {name: message for name, message in values if message}
        c = Settings([self], frozenset(messages)) if messages else None
        return {name: said for name, said in messages.items() if not (c and c.is_idle(infos[name].needs))}

    @functools.cached_property  # what tries other values of a few fields asks all sections
    def set_fields(self) -> list[str]:
        """Fields with neither their default nor that of an earlier version, which its files have written out."""
        former, values = self.former_defaults, self.__dict__
        return [
            name
            for name, info in self.infos.items()
            if (value := values[name]) != info.default and (name not in former or value != former[name])
        ]

    def violated(self, c: Settings) -> Iterator[str]:
        """A message for each violated rule of this section, whose fields are in `c`."""
        infos = self.infos
        needs = [(name, needed) for name in self.set_fields if (needed := infos[name].needs)]
        yield from c.violated([*(partial(needed.violated, field=name) for name, needed in needs), *self.rules])

    @property
    def idle_fields(self) -> dict[str, str]:
        """Fields that have no effect, each with the field that disables it. The values need not be valid."""
        c, infos = Settings([self], frozenset()), field_infos(type(self))
        return {name: by for name, info in infos.items() if info.needs and (by := info.needs.lacking(c))}

    def problems(self) -> list[str]:
        wrong = self.wrong_fields()
        return [*wrong.values(), *self.violated(Settings([self], frozenset(wrong)))]

    def as_written(self) -> dict[str, Any]:
        """The fields as a file has them that repeats the run."""
        return {name: getattr(self, name) for name in self.infos}

    def resolved_as(self, kind: type[R], **values: Any) -> R:
        """This section as its resolved class, with the values of the fields that were derived."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}  # type: ignore[arg-type]
        return kind(**{**fields, **values})


def _value_problem(info: FieldInfo, value: Any) -> str | None:
    if value is None:
        usage = info.usage if info.example is None else f"for example {with_value(info.flag, info.example)}"
        return None if info.optional else f"{info.flag} is missing and has no default: use {usage}"
    if info.choices:
        if value in info.choices:
            return None
        if value == "":
            return f"{info.flag} is empty: use {one_of(info.choices)}"
        near = did_you_mean(str(value), info.choices)
        return f"{with_value(info.flag, value)} is not known: use {one_of(info.choices)}{near}"
    if info.kind in (str, tuple):
        return _text_problem(info, (value,) if info.kind is str else value)
    if info.kind in (int, float):
        return _number_problem(info, value)
    return None


def _text_problem(info: FieldInfo, texts: tuple[str, ...]) -> str | None:
    if not all(text.strip() for text in texts):
        others = "" if info.kind is tuple else ", or leave the flag out"  # a run needs data
        return f"{info.flag} is empty: give it a value{others}"
    for text in texts:
        if "\0" in text:
            return (
                f"{with_value(info.flag, ascii(text))} has a null byte, which no name of a file has: use another name"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"{with_value(info.flag, ascii(text))} is not valid UTF-8 and cannot be saved: use another name"
    return None


def _number_problem(info: FieldInfo, value: float) -> str | None:
    if not -_LARGEST_FLOAT <= value <= _LARGEST_FLOAT:  # an integer may exceed every float; NaN compares false
        return f"{with_value(info.flag, shortened(str(value), 40))} is not a finite number: {_way_out(info, value)}"
    if info.range is not None and value not in info.range:
        return Problem(f"{with_value(info.flag, number(value))} must be {info.range}", *_in_range(info, value))
    if info.kind is int and value > LARGEST_INT and (info.range is None or info.range.high is None):
        return Problem(
            f"{with_value(info.flag, str(value))} is above the largest accepted value", *_in_range(info, value)
        )
    return None


def _in_range(info: FieldInfo, value: float) -> Iterator[Way]:
    """The ways out of a number that is not in the range of its field."""
    bounds = info.range or Range()
    if info.kind is not int or bounds.above is not None or bounds.below is not None:
        yield Change(_way_out(info, value))
        return
    high = LARGEST_INT if bounds.high is None else int(bounds.high)
    low = -high if bounds.low is None else int(bounds.low)
    is_low, near = value < low, int(value)
    among = list(range(low, min(low + _TRIED, high + 1)))
    if high - low < _FEW:
        yield Values(name=info.name, among=among, near=near, bare=True, most=_FEW)
    elif is_low:
        yield Values(name=info.name, among=among, near=near, bound=_above_low(bounds), bare=True, most=4)
    else:  # the largest values, and where they violate another constraint, small ones
        powers = [1 << exponent for exponent in range(high.bit_length())]
        among = sorted({*range(max(high - 40, low), high + 1), *(n for n in powers if low <= n <= high), *among})[::-1]
        yield Values(name=info.name, among=among, near=near, bound="or less", bare=True, most=4)
    if info.optional and is_low:
        yield Change("leave the flag out", {info.name: None})


def _above_low(bounds: Range) -> str:
    """The values above the lowest of a range, in words that follow it."""
    return "or more" if bounds.high is None or bounds.high >= LARGEST_INT else f"to {number(bounds.high)}"


def _way_out(info: FieldInfo, value: float) -> str:
    """The nearest value in the range if there is one, else the default."""
    bounds = info.range or Range()
    is_finite = -_LARGEST_FLOAT <= value <= _LARGEST_FLOAT
    if is_finite:
        if bounds.low is not None and value < bounds.low:
            return f"use {number(bounds.low)} {_above_low(bounds)}" + (
                ", or leave the flag out" if info.optional else ""
            )
        if bounds.high is not None and value > bounds.high:
            return f"use {number(bounds.high)} or less"
    if isinstance(info.default, int | float):
        return f"use, for example, {number(info.default)} (the default)"
    if info.example is not None:
        return f"use, for example, {number(info.example)}"
    return "leave the flag out" if info.optional else "give a number"
