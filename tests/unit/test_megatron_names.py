"""Every flag of Megatron-LM and of the programs that descend from it is known, with the values it takes there."""

from __future__ import annotations

import pytest

from megacore.config.bert import BertConfig
from megacore.config.deepspeed_flags import DEEPSPEED_FLAGS
from megacore.config.flags import flags_by_name, read_flags
from megacore.config.megatron_flags import FOREIGN, NOT_YET, REPLACED
from megacore.config.megatron_model import LISTS
from megacore.config.megatron_training import WITHOUT_FEATURE
from megacore.config.megatron_values import Shape
from tests.unit import megatron_names

THEIRS = {
    f"--{name}": words
    for words, names in (
        ("none", megatron_names.SWITCHES),
        ("one", megatron_names.VALUES),
        ("any", megatron_names.LISTS),
    )
    for name in names.split()
}
OURS = flags_by_name(BertConfig)
ACCEPTED = {**FOREIGN, **DEEPSPEED_FLAGS}
# Lists there, of which megacore has one: several balancing losses.
ONE_HERE = {"--moe-router-load-balancing-type", "--moe-aux-loss-coeff"}


def test_each_of_their_names_is_known_once() -> None:
    tables = [set(table) for table in (OURS, ACCEPTED, REPLACED, NOT_YET)]
    unknown = [name for name in THEIRS if not any(name in table for table in tables)]
    assert not unknown
    assert not [name for name in THEIRS if sum(name in table for table in tables) > 1]


def test_no_table_has_a_name_that_is_not_theirs() -> None:
    assert not (ACCEPTED.keys() | REPLACED.keys() | NOT_YET.keys()) - THEIRS.keys()
    assert LISTS.keys() <= OURS.keys() & THEIRS.keys()


def test_a_flag_takes_as_many_values_as_there() -> None:
    for name, words in THEIRS.items():
        if name in ACCEPTED:
            foreign = ACCEPTED[name]
            found = "none" if foreign.is_switch else "any" if foreign.is_list else "one"
        elif name in OURS:
            found = "none" if OURS[name].kind is bool else "any" if OURS[name].kind is tuple else "one"
        else:
            continue
        assert found == words or name in ONE_HERE, name


def test_each_refusal_names_its_flag_and_another_way() -> None:
    for name in (*REPLACED, *NOT_YET):
        value = {"none": [], "one": ["1"], "any": ["1", "2"]}[THEIRS[name]]
        (problem,) = read_flags([name, *value]).problems
        assert problem.startswith(f"{name} is a Megatron-LM flag")
        assert "did you mean" not in problem


@pytest.mark.parametrize("words", ["none", "one", "any"])
def test_flags_without_effect_set_nothing(words: str) -> None:
    argv = [
        word
        for name, foreign in FOREIGN.items()
        if foreign.is_idle and THEIRS[name] == words and not _reads_its_value(name)
        for word in (name, *{"none": [], "one": ["1"], "any": ["1", "2"]}[words])
    ]
    given = read_flags(argv)
    assert argv
    assert not given.problems
    assert not given.values
    assert [setting for setting in given.foreign if not setting.is_idle] == []
    for setting in given.foreign:
        translation = setting.translate(Shape(None, None))
        assert not (translation.values or translation.implied or translation.dropped)


def _reads_its_value(name: str) -> bool:
    """Whether a flag has no effect with some of its values only."""
    return name in {
        *WITHOUT_FEATURE,
        *(
            "--dataloader-type",
            "--error-injection-rate",
            "--exit-signal",
            "--moe-router-dtype",
            "--muon-tp-mode",
            "--rerun-mode",
        ),
        *("--rope-type", "--softmax-type", "--spec"),
    }
