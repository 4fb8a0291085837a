"""Every rule between settings, from the tables themselves: something violates it, its message names its flags, and what
the message proposes keeps it.

A command line of tests/argv.toml violates a rule, or else values that follow from its row.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megacore.config import SECTIONS, Config
from megacore.config.bert import BertConfig
from megacore.config.constraints import RULES, settings_of
from megacore.config.fields import FieldInfo, field_infos
from megacore.config.flags import all_fields
from megacore.config.optimizers import OPTIMIZERS
from megacore.config.problem import WORLD_SIZE, Change, Problem
from megacore.config.rules import Needs, Rule, Settings
from megacore.config.schema import sections_of
from megacore.config.spelling import fields_in, flag
from megacore.config.training import TrainingConfig
from megacore.config.validation import Validation, degrees_product, violations
from tests import test_argv
from tests.unit import refusals
from tests.unit.refusals import field_of, proposals
from tests.unit.test_config import make

alone = refusals.alone  # fixture
BASES = {
    kind: kind(training=TrainingConfig(train_iters=100)).with_values(
        {**kind.defaults({}), "mock_data": True, "vocab_size": 64}
    )
    for kind in (Config, BertConfig)
}
NUMBERS = {int: (2, 3, 4, 8, 1, 0), float: (2e-5, 1e-5, 0.5, 0.0, 2.0, 3.5)}


@dataclass(frozen=True)
class Case:
    """A rule.

    Attributes:
        table: the section that has it, or else what it is between.
        kind: the configuration that has it.
        field: of `Needs`, whose it is.
    """

    table: str
    kind: type[Config]
    rule: Any
    field: str = ""

    def __str__(self) -> str:
        terms = self.field or " ".join(getattr(self.rule, "terms", ()))
        return f"{self.table}: {terms or getattr(self.rule, '__name__', repr(self.rule))}:"

    @property
    def fields(self) -> dict[str, bool]:
        """Those that its row names, each with whether a message must name it too."""
        rule = self.rule
        if isinstance(rule, Needs):
            return {self.field: True} | dict.fromkeys((*filter(None, [rule.owner]), *rule.values), False)
        names = dict.fromkeys(filter(None, (getattr(rule, of, "") for of in ("name", "number", "unit", "bound"))), True)
        return names | {_name(term): False for term in self.terms}

    @property
    def terms(self) -> tuple[str, ...]:
        return (*getattr(self.rule, "terms", ()), *getattr(self.rule, "when", ()))

    def problems(self, run: Validation, c: Settings | None = None) -> list[str]:
        """What it says of a run, whose settings may be at hand."""
        c = settings(run) if c is None else c
        rule: Rule = (lambda c: self.rule.violated(c, self.field)) if isinstance(self.rule, Needs) else self.rule
        return [*c.violated([rule])]


def _name(term: str) -> str:
    return term.partition("=")[0].removesuffix("!")


def settings(run: Validation) -> Settings:
    """Those of a run, as rules read them."""
    sections = (getattr(run.config, name) for name in sections_of(type(run.config)))
    unread = run.unread.union(*(one.wrong_fields() for one in sections))
    return settings_of(run.config, run.world_size, unread | run.config.wrong_fields(unread).keys())


def cases() -> Iterator[Case]:
    """Every rule of every section, between them, and of an entry point."""
    sections = {section: (name, kind) for kind in (BertConfig, Config) for name, section in sections_of(kind).items()}
    for section, (name, kind) in sections.items():
        yield from (Case(name, kind, rule) for rule in section.rules)
        yield from (Case(name, kind, info.needs, field) for field, info in field_infos(section).items() if info.needs)
    yield from (Case("between sections", Config, rule) for rule in RULES)
    yield from (Case("pretrain_bert.py", BertConfig, rule) for rule in BertConfig.rules)


def written_runs(directory: Path) -> list[Validation]:
    """Those that rows of tests/argv.toml refuse, those with fewer problems first."""
    found: list[tuple[int, Validation]] = []

    def record(run: Validation) -> list[str]:
        left = violations(run.config, run.world_size, unread=run.unread, on_cpu=run.on_cpu)
        found.append((len(left), run))
        return left

    rows = [row for subject in test_argv.TABLES for row in test_argv.rows_of(subject) if test_argv.is_refused(row)]
    with mock.patch.object(Validation, "messages", record), pytest.MonkeyPatch.context() as patch:
        for number, row in enumerate(rows):
            (place := directory / str(number)).mkdir()
            patch.chdir(place)
            test_argv.place_files(row)
            test_argv.answer(row, row["words"])
    return [run for _, run in sorted(found, key=lambda one: one[0])]


def derived_runs(case: Case) -> Iterator[Validation]:
    """Those with values of the fields that its row names."""
    infos = all_fields(case.kind)
    among = {name: [infos[name].default, *possible(infos[name])] for name in case.fields if name in infos}
    for term in (*case.terms, *([case.field] if case.field else [])):
        name, equals, text = term.partition("=")
        default, differs = infos[_name(term)].default, name.endswith("!")
        holds = [v for v in among[_name(term)] if ((str(v) in text.split("|")) != differs if equals else v != default)]
        among[_name(term)] = holds
    if case.table in OPTIMIZERS:
        among["optimizer"] = [case.table]
    for values in itertools.product(*among.values()):
        config = BASES[case.kind].with_values(dict(zip(among, values, strict=True)))
        yield Validation(config=config, world_size=degrees_product(config), follows_degrees=True)


def possible(info: FieldInfo) -> list[Any]:
    """Values of a field."""
    values: Any = {bool: (True, False), str: info.choices or ("x",), tuple: (("x",), ()), **NUMBERS}[info.kind]
    return [*(v for v in values if info.range is None or v in info.range), *([None] if info.optional else [])]


def wrong(case: Case, run: Validation) -> Iterator[str]:
    """What is wrong with the messages about a rule that a run violates."""
    problems, messages = case.problems(run), run.messages()
    for problem in problems:
        said = problem.said if isinstance(problem, Problem) else problem.partition(": ")[0]
        named, own = fields_in(said.replace("--no-", "--")), case.fields or all_fields(case.kind)
        if not named & own.keys() or not {name for name, must in case.fields.items() if must} <= named:
            yield f"does not name its flags: {said}"
        if (message := next((one for one in messages if one.startswith(said)), None)) is None:
            yield f"says {problem}, which is not among {messages}"
        elif message == said:
            yield f"proposes nothing: {said}"
        else:
            for change in changes(problem, message, said):
                changed = with_values(run, change)
                left = violations(changed.config, changed.world_size, unread=run.unread, on_cpu=run.on_cpu)
                if (len(problems) == 1 and case.problems(changed)) or (len(messages) == 1 and left):
                    yield f"{change} of {message!r} leaves {left}"


def changes(problem: str, message: str, said: str) -> Iterator[Mapping[str, Any]]:
    """What a message proposes: values by field."""
    yield from refusals.proposals(message)
    for way in getattr(problem, "ways", ()):
        is_tried = isinstance(way, Change) and not way.turns_on  # else a message may name one more beside it
        if is_tried and way.values and way.text.removeprefix("use ") in message.removeprefix(said):
            yield way.values


def with_values(run: Validation, change: Mapping[str, Any]) -> Validation:
    """A run with other values by field; None: what a run has that does not give it."""
    infos, ranks = all_fields(type(run.config)), change.get(WORLD_SIZE)
    values = {k: infos[k].default if v is None else v for k, v in change.items() if k != WORLD_SIZE}
    if "bert_style" in values:  # whose defaults a command line gets
        every = {name for defaults in BertConfig.all_defaults().values() for name in defaults}
        values = {name: infos[name].default for name in every} | BertConfig.defaults(values) | values
    config = run.config.with_values(values)
    degrees = degrees_product(config) if run.follows_degrees else run.world_size
    return replace(run, config=config, world_size=ranks or degrees)


def test_every_rule_names_its_flags_and_what_keeps_it(tmp_path: Path) -> None:
    found: dict[int, Validation] = {}
    rules = list(cases())
    for run in written_runs(tmp_path):
        c = settings(run)
        for number, case in enumerate(rules):
            if number not in found and isinstance(run.config, case.kind) and case.problems(run, c):
                found[number] = run
    failures = []
    for number, case in enumerate(rules):
        violating = found.get(number) or next(filter(case.problems, derived_runs(case)), None)
        if violating is None:
            failures.append(f"{case}: nothing violates it: add a row to tests/argv.toml")
        else:
            failures += [f"{case} {line}" for line in wrong(case, violating)]
    assert not failures, "\n".join(failures)


# ---- random layouts, and values beyond their bounds ------------------------------------------------------------------

# Of random configurations, what each field is drawn from.
_DRAWN: dict[str, dict[str, list[Any]]] = json.loads(Path(__file__).with_name("proposals.json").read_text())
_Runs = Iterator[tuple[dict[str, Any], int | None]]


def _layouts() -> _Runs:
    """Values by field, most of them wrong, and the number of processes; None: as many as the degrees say."""
    draw = random.Random(7)
    while True:
        values = {name: draw.choice(among) for name, among in _DRAWN["layouts"].items()}
        if draw.random() < 0.3:
            experts = {name: draw.choice(among) for name, among in _DRAWN["experts"].items()}
            values |= {"disable_bias_linear": True, **experts}
        # Most of the rest as in a valid layout, so that few constraints are violated at once.
        kept = draw.sample(sorted(values), k=draw.randint(3, 9))
        experts = {name: values[name] for name in ("num_experts", "disable_bias_linear") if name in values}
        usual: dict[str, Any] = {"num_layers": 12, "num_attention_heads": 12, "hidden_size": 96, "seq_length": 96}
        yield {**usual, **experts, **{name: values[name] for name in kept}}, draw.choice((None, 1, 6, 8, 12))


def _runs() -> _Runs:
    """The same of what depends on the number of steps and on the batch."""
    draw = random.Random(11)
    while True:
        values = {name: draw.choice(among) for name, among in _DRAWN["runs"].items()}
        kept = draw.sample(sorted(values), k=draw.randint(3, 8))
        yield {"train_iters": 12, **{name: values[name] for name in kept}}, draw.choice((None, 1, 2))


def _made(values: Mapping[str, Any], world_size: int | None) -> tuple[Config, int]:
    """A configuration, and the number of its processes."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    config = make(**{name: value for name, value in given.items() if name != "world_size" and value is not None})
    ranks = values.get("world_size", world_size)
    return config, degrees_product(config) if ranks is None else ranks


def _is_about(problem: str, names: set[str]) -> bool:
    return bool(names & {field_of(flag) for flag in re.findall(r"--[a-z-]+", problem.partition(": ")[0])})


@pytest.mark.parametrize("kind", [_layouts, _runs])
def test_every_proposal_of_a_random_layout_is_valid(kind: Callable[[], _Runs]) -> None:
    layouts, tried, proposed = kind(), 0, 0
    while tried < 40 or proposed <= 60:
        values, world_size = next(layouts)
        config, ranks = _made(values, world_size)
        if not (problems := Validation(config=config, world_size=ranks, follows_degrees=world_size is None).messages()):
            continue
        tried += 1
        assert not problems[0].endswith(": the change proposed above solves this too")  # which a line above names
        for problem in problems:
            for changes in proposals(problem):
                proposed += 1
                left = violations(*_made({**values, **changes}, world_size))
                given = f"{values} on {world_size}: {changes} of {problem!r} leaves {left}"
                assert len(problems) > 1 or not left, given
                assert not [other for other in left if _is_about(other, set(changes))], given


_BEYOND = (0, -1, -(2**70), 2**70, 0.5, math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_value_beyond_its_bounds_is_refused_with_one_that_is_valid(section: str) -> None:
    """Whatever the field, and without an exception."""
    chosen = {"optimizer": section} if section in OPTIMIZERS else {}  # whose settings are read
    for info in field_infos(SECTIONS[section]).values():
        for value in _wrong_values(info):
            given = {**_needed(info), info.name: value, **chosen}
            about = [one for one in violations(make(**given), 1) if re.match(rf"{info.flag}[ =]", one)]
            assert about, f"{info.flag} {value}"
            proposed = [change for change in proposals(about[0]) if set(map(flag, change)) == {info.flag}]
            assert proposed or not info.range, about
            for change in proposed:
                changed = make(**{**_needed(info), **chosen, **dict(zip([info.name], change.values(), strict=True))})
                assert info.name not in getattr(changed, section).wrong_fields(), about


def _needed(info: FieldInfo) -> dict[str, Any]:
    """What the field has no effect without."""
    needs, infos = info.needs or Needs(), all_fields()
    owners = {one: infos[one].example or (infos[one].kind is bool or "x") for one in [needs.owner] if one}
    return owners | {one: v[0] if isinstance(v, tuple | range) else v for one, v in needs.values.items()}


def _wrong_values(info: FieldInfo) -> Iterator[Any]:
    """Values outside of a field's range, some of them just so, and a name that no registry has."""
    if info.choices:
        yield "no-such-name"
    if info.range is not None:
        low, high = info.range.low, info.range.high
        least = 1 if info.kind is int else 1e-9
        edges = [info.range.above, info.range.below, low and low - least * abs(low), high and high + least * abs(high)]
        for value in (*_BEYOND, *(edge for edge in edges if edge is not None)):
            if value not in info.range and not (info.kind is int and value == 0.5):
                yield value
