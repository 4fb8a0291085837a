"""Every rule between settings, from the tables themselves: something violates it, its message names its flags, and what
the message proposes keeps it.

A command line of tests/argv.toml violates a rule, or else values that follow from its row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megacore.config import Config
from megacore.config.bert import BertConfig
from megacore.config.constraints import RULES, settings_of
from megacore.config.fields import FieldInfo, field_infos
from megacore.config.flags import all_fields
from megacore.config.optimizers import OPTIMIZERS
from megacore.config.problem import WORLD_SIZE, Change, Problem
from megacore.config.rules import Needs, Rule, Settings
from megacore.config.schema import sections_of
from megacore.config.spelling import fields_in
from megacore.config.training import TrainingConfig
from megacore.config.validation import Validation, degrees_product, violations
from tests import test_argv
from tests.unit import refusals

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
        holds = [v for v in among[_name(term)] if ((str(v) == text) != differs if equals else v != default)]
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
        if isinstance(way, Change) and way.values and way.text.removeprefix("use ") in message.removeprefix(said):
            yield way.values


def with_values(run: Validation, change: Mapping[str, Any]) -> Validation:
    """A run with other values by field; None: what a run has that does not give it."""
    infos, values = all_fields(type(run.config)), dict(change)
    ranks = values.pop(WORLD_SIZE, None)
    for name, value in values.items():
        values[name] = infos[name].default if value is None else value
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
