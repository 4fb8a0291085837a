"""What a command line of Megatron-LM means beyond the rows of tests/argv.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacore.checkpoint.manifest import find_checkpoint
from megacore.config.model import padded_rows
from megacore.errors import CheckpointError
from tests.unit import refusals
from tests.unit.refusals import GOOD, parse

alone, refuse = refusals.alone, refusals.refuse  # fixtures


def test_a_checkpoint_of_megatron_is_told_from_none(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    (tmp_path / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    for given in (tmp_path, tmp_path / "iter_0000010"):
        with pytest.raises(CheckpointError, match=f"--from megatron --to megacore --input {given} --output DIR"):
            find_checkpoint(given)


def test_a_split_may_be_quoted_as_megatrons_scripts_do() -> None:
    quoted, plain = (parse(*GOOD, "--split", split).data for split in ("'99,1,0'", "99,1"))
    assert quoted.split_shares() == plain.split_shares()


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
