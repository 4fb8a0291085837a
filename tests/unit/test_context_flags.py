"""The flags of context parallelism: what they mean, and what is refused with them, all at once and with a way out."""

from __future__ import annotations

import pytest

from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from tests.unit.refusals import GOOD, Refuse, alone, parse, problems, refuse

__all__ = ["alone", "refuse"]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of eight processes."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("ranks")
def test_the_degree_counts_and_has_megatrons_name() -> None:
    for flag in ("--cp", "--context-parallel-size"):
        config = parse(*GOOD, flag, "2", "--tp", "2", "--seq-length", "32", "--global-batch-size", "8")
        assert config.parallel.degrees == {"pp": 1, "dp": 2, "cp": 2, "tp": 2}
        assert (config.microbatches, config.rank_positions) == (4, 16)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--cp 2", "ring"),  # 2 ranks send as much with each
        ("--cp 4", "ulysses"),  # heads of their own for keys: half of a ring's bytes
        ("--cp 4 --tp 2", "ring"),  # 12 heads / 2 are not divided by 4
        ("--cp 4 --num-attention-heads 16 --num-query-groups 4", "ring"),  # as much: 4 is not above 16/4 + 1
        ("--cp 4 --num-attention-heads 8 --num-query-groups 4", "ulysses"),
        ("--cp 4 --num-attention-heads 8 --num-query-groups 2", "ring"),  # key heads would be copied
        ("--cp 4 --cp-comm ring", "ring"),
    ],
)
def test_the_communication_that_sends_least_is_chosen(flags: str, expected: str) -> None:
    given = {"--num-attention-heads": "12"} | dict(zip(flags.split()[::2], flags.split()[1::2], strict=True))
    words = [word for pair in given.items() for word in pair]
    shape = ["--seq-length", "64", "--hidden-size", "96", "--global-batch-size", "8"]
    assert parse(*GOOD, *shape, *words).context_comm == expected


def test_beyond_a_node_keys_travel_while_attention_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = [*GOOD, "--seq-length", "64", "--hidden-size", "128", "--num-attention-heads", "16", "--cp", "4"]
    for tp, expected in ((2, "ulysses"), (4, "ring")):
        assert parse(*words, "--tp", str(tp)).context_comm == expected


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--cp 4 --seq-length 1028", "--seq-length 1028 must be a multiple of 8 with --cp 4"),
        ("--cp 4 --seq-length 1028", "use --seq-length 1024 or 1032, or --cp 1 or 2"),
        ("--cp 2 --seq-length 33", "--cp 2: use --seq-length 32 or 36, or --cp 1"),
        (
            "--cp 2 --tp 4 --sequence-parallel --seq-length 1028",
            "must be a multiple of 8 with --cp 2, --sequence-parallel and --tp 4",
        ),
        ("--cp 2 --attention-dropout 0.1", "--attention-dropout 0.1 is not possible with --cp 2"),
        ("--cp 2 --attention fused-softmax", "use --attention sdpa, or --cp 1"),
        ("--cp 2 --reproducible --reproducible-blocks 1", "--reproducible-blocks is 1: use --cp 1"),
        ("--cp 2 --reproducible --cp-comm ring", "--cp-comm ring adds up parts of attention"),
        ("--cp 4 --reproducible --num-attention-heads 12 --hidden-size 96", "4 blocks, which 2 x --cp 4 and --tp 1"),
        (
            "--cp 8 --cp-comm ulysses --num-attention-heads 12",
            "divides the 12 query heads and 12 key heads of a tp rank",
        ),
        ("--cp-comm allgather", "--cp-comm allgather has no effect with --cp 1"),
        ("--offload-activations --recompute light", "is not possible with --recompute light"),
        ("--offload-activations --compile", "--offload-activations is not possible with --compile"),
        ("--distribute-saved-activations --tp 2", "has no effect with --recompute none: leave it out"),
        ("--distribute-saved-activations --recompute full", "has no effect with --tp 1"),
        (
            "--distribute-saved-activations --recompute full --tp 2 --sequence-parallel",
            "which divides the inputs anyway",
        ),
        ("--distribute-saved-activations --recompute full --tp 8 --hidden-size 84", "--hidden-size 84 over --tp 8"),
        ("--cp 3", "--cp 3 x --pp 1 = 3 must divide the number of processes, but the run has 8 processes"),
        ("--cp 0", "--cp 0"),
    ],
)
def test_what_does_not_fit_is_refused(flags: str, expected: str, refuse: Refuse) -> None:
    found = problems(refuse(*GOOD, *flags.split()))
    assert any(expected in problem for problem in found), found


@pytest.mark.usefixtures("ranks")
def test_every_problem_is_named_at_once(refuse: Refuse) -> None:
    flags = "--cp 2 --seq-length 33 --attention-dropout 0.1 --attention fused-softmax"
    assert len(problems(refuse(*GOOD, *flags.split()))) == 3
    flags = "--cp 2 --seq-length 33 --cp-comm ring --reproducible --reproducible-blocks 3"
    assert len(problems(refuse(*GOOD, *flags.split()))) == 3  # positions, how they are exchanged, and the blocks


def test_degrees_of_one_are_not_named_where_there_are_none(refuse: Refuse) -> None:
    (problem,) = problems(refuse(*GOOD, "--tp", "2"))
    assert "cp" not in problem


@pytest.mark.usefixtures("ranks")
def test_bert_has_padding_which_a_ring_does_not_know(capfd: pytest.CaptureFixture[str]) -> None:
    flags = [*GOOD, "--cp", "2", "--attention-dropout", "0"]
    config = parse_config(flags, prog="pretrain_bert.py", description="", kind=BertConfig)
    assert config.context_comm == "allgather"
    with pytest.raises(SystemExit):
        parse_config([*flags, "--cp-comm", "ring"], prog="pretrain_bert.py", description="", kind=BertConfig)
    assert "use --cp-comm allgather or ulysses" in capfd.readouterr().err
