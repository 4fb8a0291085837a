"""What a refusal proposes is valid: each value is checked on all constraints, with everything else as given."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megacore.config import SECTIONS, Config, violations
from megacore.config.fields import FieldInfo, field_infos
from megacore.config.optimizers import OPTIMIZERS
from megacore.config.spelling import flag
from megacore.config.validation import Validation, degrees_product
from tests.unit.refusals import field_of, proposals
from tests.unit.test_config import make

# Of random configurations, what each field is drawn from.
_DRAWN: dict[str, dict[str, list[Any]]] = json.loads(Path(__file__).with_name("proposals.json").read_text())
_Runs = Iterator[tuple[dict[str, Any], int | None]]


def _layouts() -> _Runs:
    """Values by field, most of them wrong, and the number of processes; None: as many as the degrees say."""
    draw = random.Random(7)
    while True:
        values = {name: draw.choice(among) for name, among in _DRAWN["layouts"].items()}
        if draw.random() < 0.3:
            values |= {
                "disable_bias_linear": True,
                **{name: draw.choice(among) for name, among in _DRAWN["experts"].items()},
            }
        # Most of the rest as in a valid layout, so that few constraints are violated at once.
        kept = draw.sample(sorted(values), k=draw.randint(3, 9))
        experts: dict[str, Any] = {
            name: values[name] for name in ("num_experts", "disable_bias_linear") if name in values
        }
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
            given = {info.name: value, **chosen}
            about = [one for one in violations(make(**given), 1) if re.match(rf"{info.flag}[ =]", one)]
            assert about, f"{info.flag} {value}"
            proposed = [change for change in proposals(about[0]) if set(map(flag, change)) == {info.flag}]
            assert proposed or not info.range, about
            for change in proposed:
                changed = make(**{**chosen, **dict(zip([info.name], change.values(), strict=True))})
                assert info.name not in getattr(changed, section).wrong_fields(), about


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
