"""The flags of experts: what they mean, and what is refused with them, all at once and with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megacore.config import Config
from megacore.config.bert import BertConfig
from megacore.config.cli import load_toml, parse_config, save_toml
from megacore.config.experts import ARCHITECTURE_OF_EXPERTS
from megacore.errors import ConfigError
from megacore.train.launch import _for_device
from tests.unit.refusals import GOOD, Refuse, alone, parse, problems, refuse

__all__ = ["alone", "refuse"]
EXPERTS = [*GOOD, "--num-experts", "8", "--disable-bias-linear"]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of eight processes."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("ranks")
def test_the_flags_have_megatrons_names_too_and_defaults_follow() -> None:
    ours = ["--tp", "2", "--sequence-parallel", "--ep", "4", "--etp", "1", "--moe-shared-expert-size", "64"]
    theirs = [
        "--tp",
        "2",
        "--sequence-parallel",
        "--expert-model-parallel-size",
        "4",
        "--expert-tensor-parallel-size",
        "1",
    ]
    theirs += ["--moe-shared-expert-intermediate-size", "64"]
    one, other = parse(*EXPERTS, *ours), parse(*EXPERTS, *theirs)
    assert (one.parallel, one.model) == (other.parallel, other.model)
    assert one.model.experts is not None and one.model.experts.moe_ffn_hidden_size == one.model.inner_size == 3072
    assert one.model.experts.active_inner_size == 2 * 3072 + 64
    assert [one.experts.holds(block) for block in range(3)] == [True, True, True]
    spread = parse(*EXPERTS, "--moe-first-dense-layers", "1", "--moe-layer-freq", "2").experts
    assert [spread.holds(block) for block in range(5)] == [False, True, False, True, False]
    assert parse(*GOOD, "--tp", "2").parallel.expert_split == 2


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--ep 3", "--ep 3 must divide --num-experts 8: use --ep 1, 2, 4 or 8"),
        ("--ep 8 --pp 2", "--ep 8 must divide the 4 ranks of a stage (--dp 4): use --ep 1, 2 or 4, or start 16"),
        (
            "--ep 8 --tp 2",
            "--ep 8 x --etp 2 = 16 must divide the 8 ranks of a stage (--dp 4 x --tp 2): use --ep 1, 2 or 4",
        ),
        ("--tp 4 --etp 2", "--etp 2 must be 1 or --tp 4: use --etp 4, or leave it out"),
        ("--tp 2 --etp 1", "--etp 1 with --tp 2 needs --sequence-parallel"),
        ("--moe-router-topk 9", "--moe-router-topk 9 must be at most --num-experts 8"),
        ("--moe-router-topk 1", "use --moe-router-pre-softmax, or --moe-router-topk 2 or more"),
        (
            "--moe-router-score-function sigmoid --moe-router-pre-softmax",
            "--moe-router-pre-softmax has no effect with --moe-router-score-function sigmoid",
        ),
        ("--tp 2 --moe-ffn-hidden-size 33", "--etp 2 must divide --moe-ffn-hidden-size 33"),
        (
            "--tp 2 --moe-shared-expert-size 33",
            "--tp 2 must divide --moe-shared-expert-size 33: use --moe-shared-expert-size 32 or 34, or",
        ),
        (
            "--moe-router-num-groups 3 --moe-router-group-topk 2",
            "--moe-router-num-groups 3 must divide --num-experts 8",
        ),
        ("--moe-router-num-groups 4", "--moe-router-num-groups 4 needs --moe-router-group-topk: use 1 to 4"),
        ("--moe-router-num-groups 4 --moe-router-group-topk 5", "--moe-router-group-topk 5 must be at most"),
        (
            "--moe-router-num-groups 4 --moe-router-group-topk 3 --moe-router-topk 4",
            "--moe-router-group-topk 3 must divide --moe-router-topk 4: use 1, 2 or 4",
        ),
        (
            "--moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 4",
            "--moe-router-topk 4 is more than the 2 experts of 1 of 4 groups",
        ),
        ("--moe-router-group-topk 2", "--moe-router-group-topk 2 has no effect with no groups"),
        ("--moe-router-bias-update-rate 0.1", "--moe-router-bias-update-rate 0.1 has no effect with no bias"),
        ("--moe-shared-expert-gate", "--moe-shared-expert-gate has no effect with no shared expert"),
        ("--moe-first-dense-layers 12", "--moe-first-dense-layers 12 must be below --num-layers 12"),
        ("--moe-first-dense-layers 1 --num-layers 1", "must be below --num-layers 1: use 0, or leave"),
        ("--no-disable-bias-linear", "--num-experts needs --disable-bias-linear"),
        ("--moe-token-drop-policy position", "--moe-token-drop-policy position has no effect with no capacity"),
        ("--moe-expert-capacity-factor 0", "--moe-expert-capacity-factor 0 must be above 0"),
        ("--moe-input-jitter-eps 1", "--moe-input-jitter-eps 1 must be at least 0 and below 1"),
        (
            "--moe-router-load-balancing-type global_aux_loss",
            "--moe-router-load-balancing-type global_aux_loss has no effect with no such loss",
        ),
        (
            "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --micro-batch-size 2",
            "use --micro-batch-size 1, or --moe-router-load-balancing-type seq_aux_loss or global_aux_loss",
        ),
        ("--reproducible --cp 2 --ep 2", "between which --ep 2 would divide them: use --ep 1, or --cp 1"),
        ("--reproducible --tp 2 --etp 1", "which the --tp 2 ranks divide: use --etp 2"),
        ("--compile --recompute full --moe-router-enable-expert-bias", "use --recompute light, leave --compile out"),
    ],
)
def test_what_does_not_fit_is_refused(flags: str, expected: str, refuse: Refuse) -> None:
    given = [word for word in EXPERTS if not ("--no-disable" in flags and word == "--disable-bias-linear")]
    found = problems(refuse(*given, *flags.split()))
    assert any(expected in problem for problem in found), found


def test_one_process_has_no_ranks_to_divide_experts_over(refuse: Refuse) -> None:
    said = (
        "--ep 2 must divide the only rank of a stage: use --ep 1, or start 2 processes (torchrun "
        "--nproc-per-node 2; for a plan --world-size)"
    )
    assert problems(refuse(*EXPERTS, "--ep", "2")) == [said]


@pytest.mark.usefixtures("ranks")
def test_every_problem_is_named_at_once(refuse: Refuse) -> None:
    flags = "--ep 3 --moe-router-topk 9 --moe-token-drop-policy position --moe-ffn-hidden-size 33 --tp 2 --etp 2"
    assert len(problems(refuse(*EXPERTS, *flags.split()))) == 5


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    "flags",
    [
        "--reproducible --ep 4",
        "--compile --compile-backend aot-eager",
        "--offload-activations",
        "--recompute full --schedule zero-bubble --pp 2",
        "--recompute full --tp 2 --distribute-saved-activations",
        "--packing best-fit",
    ],
)
def test_what_goes_with_experts(flags: str) -> None:
    config = parse(*EXPERTS, *flags.split())
    assert config.model.experts is not None
    assert ("padding" in config.beside_hidden_states) == ("--packing" in flags)


@pytest.mark.usefixtures("ranks")
def test_flags_without_experts_have_no_effect_and_are_refused(refuse: Refuse) -> None:
    flags = "--ep 2 --etp 1 --moe-aux-loss-coeff 0.1 --moe-router-topk 4"
    assert len(problems(refuse(*GOOD, *flags.split()))) == 4


def test_bert_refuses_them(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(EXPERTS, prog="pretrain_bert.py", description="", kind=BertConfig)
    assert "--num-experts 8 is for pretrain_gpt.py" in capfd.readouterr().err


def test_a_file_has_a_table_of_experts(tmp_path: Path) -> None:
    config = parse(*EXPERTS, "--moe-aux-loss-coeff", "0.5")
    save_toml(config, tmp_path / "config.toml")
    read = load_toml(tmp_path / "config.toml", Config)
    assert read.experts == config.experts
    assert read.resolve(1).model == config.model


def test_the_architecture_is_what_the_model_computes() -> None:
    assert {"num_experts", "moe_router_topk"} <= set(ARCHITECTURE_OF_EXPERTS)
    assert "moe_aux_loss_coeff" not in ARCHITECTURE_OF_EXPERTS


@pytest.mark.usefixtures("ranks")
def test_whole_experts_per_rank_go_with_the_default_of_the_device(refuse: Refuse) -> None:
    flags = [*EXPERTS, "--tp", "2", "--etp", "1"]
    said = "--etp 1 with --tp 2 needs --sequence-parallel"
    assert parse(*flags, computes_on_cpu=lambda _: False).parallel.sequence_parallel is None
    for hooks in ({}, {"computes_on_cpu": lambda _: True}):
        (problem,) = problems(refuse(*flags, **hooks))
        assert problem.startswith(said) and problem.endswith(": add it, or use --etp 2")
    for off in (["--no-sequence-parallel"], ["--seq-length", "33"]):  # by a flag, and as --tp does not divide it
        assert said in refuse(*flags, *off, computes_on_cpu=lambda _: False)
    (problem,) = problems(refuse(*flags, "--seq-length", "0", computes_on_cpu=lambda _: False))
    assert problem.startswith("--seq-length 0")  # and nothing of a default that depends on it


@pytest.mark.usefixtures("ranks")
def test_a_run_whose_device_has_another_default_is_refused() -> None:
    config = parse(*EXPERTS, "--tp", "2", "--etp", "1", computes_on_cpu=lambda _: False)
    with pytest.raises(ConfigError, match=r"--etp 1 with --tp 2 needs --sequence-parallel.*: add it, or use --etp 2"):
        _for_device(config, torch.device("cpu"))
