"""The flags of experts: what they mean, and what is refused with them, all at once and with a way out."""

from __future__ import annotations

import pytest
import torch

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


def test_which_blocks_hold_experts() -> None:
    assert all(parse(*EXPERTS).experts.holds(block) for block in range(3))
    spread = parse(*EXPERTS, "--moe-first-dense-layers", "1", "--moe-layer-freq", "2").experts
    assert [spread.holds(block) for block in range(5)] == [False, True, False, True, False]


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
