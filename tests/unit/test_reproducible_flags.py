"""--reproducible-blocks: what is chosen, and what is refused."""

from __future__ import annotations

import pytest

from megacore.config.reproducible import canonical_blocks
from tests.unit.refusals import GOOD, Refuse, alone, parse, refuse

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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-attention-heads 8 --reproducible-blocks 6", "must be a power of two: use 4 or 8"),
        ("--num-attention-heads 4 --reproducible-blocks 8", "must divide --num-attention-heads 4: use 1, 2 or 4"),
        ("--num-attention-heads 8 --compile", "add --reproducible-blocks 1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(flags: str, message: str, refuse: Refuse) -> None:
    assert message in refuse(*GOOD, *SHAPE, *flags.split())


def test_blocks_without_the_promise_are_refused(refuse: Refuse) -> None:
    assert "add --reproducible" in refuse(*GOOD, "--reproducible-blocks", "4")


def test_tensor_parallelism_that_does_not_divide_the_blocks_is_refused(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    shape = ["--seq-length", "96", "--hidden-size", "96", "--num-attention-heads", "12", "--reproducible", "--tp", "3"]
    message = refuse(*GOOD, *shape)
    assert "4 blocks, which --tp 3 must divide: use --tp 1, or --reproducible-blocks 1" in message
    assert parse(*GOOD, *shape, "--reproducible-blocks", "1").parallel.tp == 3
