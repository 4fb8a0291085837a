"""Rules between fields as rows: a row says when it is violated, in which words, and which values keep it.

    Divides("tp", "num_attention_heads")            --tp 3 must divide --num-attention-heads 16: use 1
    AtMost("moe_router_topk", "num_experts")        --moe-router-topk 8 must be at most --num-experts 4: use 4 or less
    Excludes("survive skip_train", "...")           {0} has no effect with {1}: leave it out
    Annotated[float, Needs(lr_decay_style="WSD")]   ... has no effect with --lr-decay-style cosine: leave it out

A rule that computes something real is a function of `Settings`. Rules within a section are in its class, those between
sections in constraints.py; validation.py checks them all. A term of a row names a field that is not at its default, or
a field with a value that it has or has not: `recompute=light`, `norm_placement!=before`, `precision=fp32|fp16`.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

from megacore.config.messages import one_of
from megacore.config.numbers import is_number
from megacore.config.problem import Change, Problem, Values, Way, divisors_of, multiples_of, up_to
from megacore.config.spelling import OWNERS, field_and_text, flag, flag_and_value, with_value

FURTHER = 64
"""Values beyond a bound that are tried."""


class Unread(Exception):
    """A rule reads a field whose value is refused, so that nothing can be said."""


class Settings:
    """The fields of sections by name, as rules read them; properties of a section read from here too. `wrong` fields,
    whose value is refused whatever the others are, raise `Unread`; `further` are other attributes."""

    def __init__(self, sections: Sequence[Any], wrong: frozenset[str], **further: Any) -> None:
        values = self.__dict__
        for section in sections:
            values.update(section.__dict__)
        given = {name for section in sections for name in section.set_fields}
        for name in (*wrong, "set_fields"):  # a section's own
            values.pop(name, None)
        values.update(further, _kinds=list(map(type, sections)), _sections=sections, _given=given, _wrong=wrong)

    def __getattr__(self, name: str) -> Any:
        if name in self._wrong:
            raise Unread
        for kind in self._kinds:
            found = getattr(kind, name, None)
            if isinstance(found, property) and found.fget is not None:
                self.__dict__[name] = found.fget(self)  # for the next rule
                return self.__dict__[name]
            if found is not None and callable(found):
                return MethodType(found, self)
        raise AttributeError(f"no section has {name}")

    def read(self, *names: str) -> None:
        """End the rule if the value of one of these fields is refused."""
        for name in names:
            getattr(self, name)

    def default(self, name: str) -> Any:
        """The default of a field that has one."""
        return self._info(name).default

    def _info(self, name: str) -> Any:
        return next(section.infos[name] for section in self._sections if name in section.infos)

    def is_set(self, name: str) -> bool:
        """Whether a field has neither its default nor that of an earlier version, which its files have written out."""
        if name in self._wrong:
            raise Unread
        return name in self._given

    def is_idle(self, needs: Needs | None) -> bool:
        """Whether a field that needs something has no effect, as far as that can be read."""
        try:
            return needs is not None and needs.lacking(self) is not None
        except Unread:
            return False

    def hold(self, terms: Iterable[str]) -> bool:
        """Whether all of some terms hold."""
        return all(map(self._holds, terms))

    def _holds(self, term: str) -> bool:
        if "=" not in term:
            return self.is_set(term)
        name, _, text = term.partition("=")
        return (str(getattr(self, name.removesuffix("!"))) in text.split("|")) != name.endswith("!")

    def given(self, name: str) -> str:
        """A field with its value, as on a command line."""
        return flag_and_value(name, getattr(self, name))

    def enabled(self, name: str) -> Change:
        """The way out that gives a field a value; it is tried where the field has an example."""
        info = self._info(name)
        example = True if info.default is False else info.example
        if example is not None:
            return replace(use(name, example), turns_on=True)
        return Change(f"use {with_value(info.flag, info.metavar) if info.kind is str else info.flag}")

    def without(self, name: str, text: str = "leave it out") -> Change:
        """The way out that leaves a field at its default, and with it the parameters of its flag."""
        return Change(text, self._left_out(name))

    def _left_out(self, *names: str) -> dict[str, Any]:
        given = [field for field, (owner, _) in OWNERS.items() if owner in names and field in self._given]
        return {name: self.default(name) for name in (*names, *given)}

    def out(self, name: str) -> Change:
        """The same with its name."""
        return self.without(name, f"leave {flag(name)} out")

    def way(self, text: str, it: str = "") -> Way:
        """A way out in words, with the values that these give fields, if they name some; `it`: the field that they may
        call so."""
        if text == "leave it out":
            return self.without(it)
        if left_out := re.fullmatch(r"leave (--.+) out", text):
            return Change(text, self._left_out(*(field_and_text(one)[0] for one in left_out[1].split(" and "))))
        words = re.sub(r" \(.*\)$", "", text.removeprefix("use "))
        if bound := re.fullmatch(r"(--.+) (\d+) or more", words):
            name, least = field_and_text(bound[1])[0], int(bound[2])
            among = range(least, least + FURTHER)
            return Values(name=name, among=among, near=self._near(name), bound="or more", most=3)
        values = {name: self._value(name, word) for name, word in map(field_and_text, re.split(" (?=--)", words))}
        (name, value), *others = values.items()
        if type(value) is int and not others:  # a value of one field, beside which other rules may name further ones
            return Values(name=name, among=[value], near=self._near(name))
        return Change(text, {} if None in values.values() else values)

    def _near(self, name: str) -> int:
        """What a field has, which need not be read; 0 for nothing."""
        return self.__dict__.get(name) or 0

    def _value(self, name: str, word: str) -> Any:
        """What a word means as the value of a field; None: nothing."""
        info = next((section.infos[name] for section in self._sections if name in section.infos), None)
        if info is None or (info.kind is bool and word):
            return None
        if info.kind in (bool, str):
            return info.kind is bool or (word if word in info.choices else None)
        return info.kind(word) if info.kind in (int, float) and is_number(word) else None

    def violated(self, rules: Iterable[Rule]) -> Iterator[str]:
        """What is violated of some rules."""
        for rule in rules:
            try:
                yield from rule(self)
            except Unread:
                continue


Rule = Callable[[Settings], Iterable[str]]
"""Yields what is wrong."""


class Readable:
    """Methods of a section read its notations: what they refuse is violated."""

    def __init__(self, *methods: str) -> None:
        self.methods = methods

    def __call__(self, c: Settings) -> Iterator[str]:
        for method in self.methods:
            try:
                getattr(c, method)()
            except ValueError as error:
                yield str(error)


def _field(term: str) -> str:
    return term.partition("=")[0].removesuffix("!")


def use(name: str, value: Any) -> Change:
    """The way out that gives a field a value."""
    return Change(f"use {flag_and_value(name, value)}", {name: value})


class Excludes:
    """Terms that do not hold together, and the sentence about it: a row of rules.toml, which says how it is written."""

    def __init__(self, terms: str, sentence: str) -> None:
        self.terms = terms.split()
        said, _, ways = sentence.rpartition(": ")
        self.said, self.ways = (said, ways.split(", or ")) if said else (ways, ["leave one of them out"])

    def __call__(self, c: Settings) -> Iterator[str]:
        if c.hold(self.terms):
            names = [_field(term) for term in self.terms]
            given = [c.given(name) for name in names]
            yield Problem(self.said.format(*given), *(c.way(way.format(*given), names[0]) for way in self.ways))


_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def rows(table: str) -> Iterator[Excludes]:
    """What a table of rules.toml excludes: a rule for each field of a term that names several."""
    for terms, sentence in _ROWS[table].items():
        for each in itertools.product(*([term] if "=" in term else term.split("|") for term in terms.split())):
            yield Excludes(" ".join(each), sentence)


class Needs:
    """What a field has no effect without, in its annotation: a flag `owner` that is given, or fields with a value, one
    of several, which are not tried, or a range from the least on."""

    def __init__(self, owner: str | None = None, **values: Any) -> None:
        self.owner, self.values = owner, values

    def lacking(self, c: Settings) -> str | None:
        """The first field that is not as it must be."""
        if self.owner is not None and not c.is_set(self.owner):
            return self.owner
        return next((name for name, wanted in self.values.items() if not _accepts(wanted, getattr(c, name))), None)

    def violated(self, c: Settings, field: str) -> Iterator[str]:
        """That a field is set although it has no effect."""
        if not c.is_set(field) or (name := self.lacking(c)) is None:
            return
        has_no_value = not c.default(name) and (name == self.owner or self.values[name] is True)
        given = f"without {flag(name)}" if has_no_value else f"with {c.given(name)}"
        # --clip-grad-adaptive z-threshold=3 would turn on what it needs.
        own = has_no_value and OWNERS.get(field, ("",))[0] == name
        said = f"{flag_and_value(field, getattr(c, field), own=own)} has no effect {given}"
        # That the owner is missing joins its parameters to no group: each names it as a way out.
        yield Problem(said, c.without(field), self._way(c, name), only=(field,) if has_no_value else ())

    def _way(self, c: Settings, name: str) -> Way:
        if name == self.owner:
            return c.enabled(name)
        wanted, near = self.values[name], getattr(c, name)
        if isinstance(wanted, range):
            return Values(name=name, among=wanted, near=near, bound="or more")
        if wanted == c.default(name) and not wanted:
            return c.out(name)
        if not isinstance(wanted, tuple):
            return use(name, wanted)
        if isinstance(wanted[0], int):
            return Values(name=name, among=wanted, near=near)
        return Change(f"use {with_value(flag(name), one_of(wanted))}")


def _accepts(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, range):
        return bool(value >= wanted.start)
    return value in wanted if isinstance(wanted, tuple) else value == wanted


@dataclass(frozen=True)
class Divides:
    """The value of a field divides that of another one; `when` terms hold."""

    name: str  # of the divisor
    number: str  # of what it divides
    multiple: bool = True  # whether another value of that is a way out
    why: str = ""  # follows the constraint
    about_number: bool = False  # the message is about what is divided, and proposes other values of it first
    when: Sequence[str] = ()

    def __call__(self, c: Settings) -> Iterator[str]:
        if not c.hold(self.when):
            return
        divisor, value = getattr(c, self.name), getattr(c, self.number)
        if divisor and value and value % divisor:
            names, words = [self.name, self.number], "must divide"
            ways = [divisors_of(self.name, divisor, value, bare=not self.multiple)]
            ways += [multiples_of(self.number, value, divisor)] if self.multiple else []
            if self.about_number:
                names, words, ways = names[::-1], "must be a multiple of", ways[::-1]
            yield Problem(f"{c.given(names[0])} {words} {c.given(names[1])}{self.why}", *ways)


@dataclass(frozen=True)
class AtMost:
    """The value of a field is at most, or below, that of another one; `when` terms hold. None is within any bound."""

    name: str  # of the field
    bound: str  # the other one
    strict: bool = False  # it is not equal either
    least: int = 1  # from which values of the field are tried
    why: str = ""  # follows the constraint
    # Ways out beside a smaller value: `more` of the bound, one that is `larger`, `out`, without the flag, or
    # others in words.
    use: Sequence[str] = ()
    when: Sequence[str] = ()
    words: ClassVar[tuple[str, str]] = "at most", "below"

    def __call__(self, c: Settings) -> Iterator[str]:
        value, bound = getattr(c, self.name), getattr(c, self.bound)
        if value is None or bound is None or self._keeps(value, bound) or not c.hold(self.when):
            return
        said = f"{c.given(self.name)} must be {self.words[self.strict]} {_beside(c, self.name, self.bound)}{self.why}"
        yield Problem(said, *self._ways(c, value, bound))

    def _keeps(self, value: float, bound: float) -> bool:
        return value < bound or (value == bound and not self.strict)

    def _ways(self, c: Settings, value: Any, bound: Any) -> Iterator[Way]:
        if isinstance(bound, float):
            yield from self._rates(c, value, bound)
            return
        ways: dict[str, Way] = {
            "more": Values(name=self.bound, among=range(value, value + FURTHER), near=bound, bound="or more"),
            "larger": larger(self.bound, value),
            "out": c.without(self.name),
        }
        yield up_to(self.name, value, bound - self.strict, low=self.least)
        yield from (ways.get(way) or c.way(way) for way in self.use)

    def _rates(self, c: Settings, value: float, bound: float) -> Iterator[Way]:
        """Numbers with a fraction that keep the rule; what is just below a bound has no name."""
        least, most = c.default(self.name), c.default(self.bound)
        if not self.strict:
            yield Change(f"use {flag_and_value(self.name, bound)} or less", {self.name: bound})
        elif least is not None and least < bound:
            yield use(self.name, least)
        if self.strict and most is not None and most > value:
            yield use(self.bound, most)
        else:
            larger = 2 * value if self.strict else value
            yield Change(flag_and_value(self.bound, larger), {self.bound: larger})


class AtLeast(AtMost):
    """The value of a field with a fraction is at least, or above, that of another one."""

    words = "at least", "above"

    def _keeps(self, value: float, bound: float) -> bool:
        return value > bound or (value == bound and not self.strict)

    def _ways(self, c: Settings, value: Any, bound: Any) -> Iterator[Way]:
        default = c.default(self.name)
        if not self.strict:
            yield Change(f"use {flag_and_value(self.name, bound)} or more", {self.name: bound})
        else:  # what is just above a bound has no name
            yield use(self.name, default) if default > bound else Change("use a larger one")


def _beside(c: Settings, name: str, other: str) -> str:
    """A field with its value, after one of the same flag without that flag."""
    owners = [OWNERS.get(one, ("",))[0] for one in (name, other)]
    return c.given(other).partition(" ")[2] if owners[0] and owners[0] == owners[1] else c.given(other)


def larger(name: str, above: int) -> Change:
    """A larger number of steps, well above a bound."""
    return Change(flag_and_value(name, 2 * (above + 1)), {name: 2 * (above + 1)})
