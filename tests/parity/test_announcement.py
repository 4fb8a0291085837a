"""What is known of a run is said, and its memory asked, before the model is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megacore.config import OptimizerConfig
from megacore.errors import ConfigError
from megacore.parallel.host_memory import AvailableMemory
from megacore.parallel.mesh import build_mesh
from megacore.plan import fit
from megacore.plan.memory import GIB
from megacore.train import step
from megacore.train.engine import Layer, PipelineEngine
from tests.parity.runs import make_config, make_trainer


def test_the_summary_comes_before_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any) -> None:
        raise AssertionError("built")

    monkeypatch.setattr(step, "parallelize", build)
    config = make_config((1, 1, 1), tmp_path, peak_tflops=2.0)
    with pytest.raises(AssertionError, match="built"):
        make_trainer(config, build_mesh(config.parallel))
    said = capsys.readouterr().out
    assert "topology  pp 1 x dp 1 x tp 1 = 1 rank" in said
    assert "MFU is a share of 2 TFLOP/s (cpu, fp32)" in said
    assert "MiB of state on the fullest rank, by formula" in said


def test_what_does_not_fit_is_refused_before_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "host_memory", lambda: AvailableMemory(float(2**16), "a small machine"))
    monkeypatch.setattr(step, "parallelize", lambda *_: pytest.fail("built"))
    config = make_config((1, 1, 1), tmp_path)
    with pytest.raises(
        ConfigError, match=r"needs at least [\d.]+ MiB .* but 64\.0 KiB are available \(a small machine\)"
    ):
        make_trainer(config, build_mesh(config.parallel))


def test_the_engine_counts_the_state_of_any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of 2^28 numbers, 16 bytes each with AdamW."""
    monkeypatch.setattr(fit, "host_memory", lambda: AvailableMemory(3.9 * GIB, "a small machine"))
    layers = [Layer("wide", nn.Linear, 1 << 14, 1 << 14, bias=False)]
    with pytest.raises(ConfigError, match=r"state        4\.0 GiB.*\nmemory_check=False"):
        PipelineEngine(layers, loss=nn.functional.mse_loss, train_iters=1, optimizer=OptimizerConfig())
