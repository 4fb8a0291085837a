"""Every flag of Megatron-LM and of the programs that descend from it is known, with the values it takes there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megacore.arrive.deepspeed import DEEPSPEED_FLAGS
from megacore.arrive.megatron import FOREIGN, LISTS, NOT_YET, REPLACED
from megacore.arrive.translation import Run
from megacore.checkpoint.manifest import find_checkpoint
from megacore.config import Config, TrainingConfig
from megacore.config.bert import BertConfig
from megacore.config.flags import flags_by_name, read_flags
from megacore.config.model import padded_rows
from megacore.errors import CheckpointError
from tests.unit import refusals
from tests.unit.refusals import parse

NAMES = tomllib.loads(Path(__file__).with_name("megatron_names.toml").read_text())
THEIRS = {f"--{name}": words for words, names in NAMES.items() for name in names.split()}
VALUES: dict[str, list[str]] = {"none": [], "one": ["1"], "any": ["1", "2"]}
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
        (problem,) = read_flags([name, *VALUES[THEIRS[name]]]).problems
        assert problem.startswith(f"{name} is a Megatron-LM flag")
        assert "did you mean" not in problem


# Flags that have no effect with some of their values only.
READ = {"--dataloader-type", "--error-injection-rate", "--exit-signal", "--moe-router-dtype", "--muon-tp-mode"}
READ |= {"--rerun-mode", "--rope-type", "--softmax-type", "--spec"}
READ |= {name for name, flag in FOREIGN.items() if "any other value is refused" in flag.becomes}


@pytest.mark.parametrize("words", VALUES)
def test_flags_without_effect_set_nothing(words: str) -> None:
    idle = [name for name, flag in FOREIGN.items() if flag.is_idle and THEIRS[name] == words and name not in READ]
    given = read_flags([word for name in idle for word in (name, *VALUES[words])])
    assert idle
    assert not given.problems
    assert not given.values
    assert [setting for setting in given.foreign if not setting.is_idle] == []
    for setting in given.foreign:
        translation = setting.translate(Run(Config(training=TrainingConfig(train_iters=1))))
        assert not (translation.values or translation.implied or translation.dropped)


# ---- values ----------------------------------------------------------------------------------------------------------

alone, refuse = refusals.alone, refusals.refuse  # fixtures


def test_a_checkpoint_of_megatron_is_told_from_none(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    (tmp_path / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    for given in (tmp_path, tmp_path / "iter_0000010"):
        with pytest.raises(CheckpointError, match=f"--from megatron --to megacore --input {given} --output DIR"):
            find_checkpoint(given)


@pytest.mark.parametrize(("size", "tp"), [(128, 2), (127, 2), (1000, 1)])
def test_a_null_tokenizer_has_one_token_more(size: int, tp: int) -> None:
    """The token that ends a document is the last one, and padding comes after it, as Megatron-LM counts."""
    given = ["--mock-data", "--train-iters", "10", "--vocab-size", str(size), "--tokenizer-type", "NullTokenizer"]
    model = parse(*given).model
    padded = size + 1
    while padded % (128 * tp):
        padded += 1
    assert model.vocab_size == size + 1
    assert tp * padded_rows(model.vocab_size, tp, model.make_vocab_size_divisible_by) == padded
