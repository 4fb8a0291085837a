"""--reproducible-blocks: what is chosen, and what is refused."""

from __future__ import annotations

import pytest

from megacore.config.reproducible import canonical_blocks
from tests.unit.refusals import GOOD, alone, parse, refuse

__all__ = ["alone", "refuse"]
SHAPE = ["--seq-length", "64", "--hidden-size", "96", "--reproducible"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--num-attention-heads 8", 8),
        ("--num-attention-heads 16", 8),
        ("--num-attention-heads 12", 4),
        ("--num-attention-heads 6", 2),
        ("--num-attention-heads 3", 1),
        ("--num-attention-heads 8 --ffn-hidden-size 100", 4),
        ("--num-attention-heads 8 --reproducible-blocks 2", 2),
        ("--num-attention-heads 8 --num-experts 4 --disable-bias-linear", 8),
        ("--num-attention-heads 8 --num-experts 4 --disable-bias-linear --moe-ffn-hidden-size 36", 4),
        ("--num-attention-heads 8 --num-query-groups 4", 8),
        ("--num-attention-heads 8 --num-query-groups 4 --qk-layernorm --qk-layernorm-all-heads", 4),
        ("--num-attention-heads 8 --no-reproducible", 1),
    ],
)
def test_the_model_decides_the_number_of_blocks(flags: str, expected: int) -> None:
    shape = SHAPE[:-1] if "--no-reproducible" in flags else SHAPE
    assert canonical_blocks(parse(*GOOD, *shape, *flags.split())) == expected
