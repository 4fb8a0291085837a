"""tools/inspect_checkpoint.py lists, verifies and compares, and its exit status says what it found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megacore.parallel.mesh import Mesh
from tests.parity.runs import make_config, make_trainer
from tools.inspect_checkpoint import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 and 2, and one beside the second that is the same."""
    directory = tmp_path_factory.mktemp("run")
    trainer = make_trainer(make_config((1, 1, 1), directory), Mesh(device=torch.device("cpu")))
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
        trainer.save()
    loaded = make_config((1, 1, 1), directory, load=str(directory / "step_00000002"))
    make_trainer(loaded, Mesh(device=torch.device("cpu"))).save()
    return directory


def test_a_run_is_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["checkpoint", "step", "serial", "MB", "mesh", "state"]
    assert [line[:3] for line in lines[1:]] == [
        ["step_00000002.2", "2", "3"],
        ["step_00000002", "2", "2"],
        ["step_00000001", "1", "1"],
    ]
    layout = ["pp", "1", "x", "dp", "1", "x", "tp", "1"]
    assert [line[4:] for line in lines[1:]] == [
        [*layout, "not", "verified,", "latest"],
        [*layout, "not", "verified"],
        [*layout, "not", "verified"],
    ]


def test_a_checkpoint_is_shown_and_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run / "step_00000001"), "--verify"]) == 0
    text = capsys.readouterr().out
    assert "step 1, 8 samples, schema 2" in text
    assert "written on  pp 1 x dp 1 x tp 1" in text
    assert "every file has the size, the SHA-256 and the XXH3 of the manifest" in text
    assert ["embedding.tokens.weight", "131x32", "float32", "1", "model", "exp_avg", "exp_avg_sq"] in [
        line.split() for line in text.splitlines()
    ]


def test_two_are_compared_bit_for_bit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--diff", str(run / "step_00000002"), str(run / "step_00000002.2")]) == 0
    assert "tensors are equal bit for bit, 0 differ" in capsys.readouterr().out
    assert main(["--diff", str(run / "step_00000001"), str(run)]) == 1
    text = capsys.readouterr().out
    assert "  model blocks.0.attention.output.bias: 32 of 32 elements differ, by up to 0.0005" in text  # the rate
    assert "  step: 1 and 2" in text


def test_damage_is_named_and_ends_with_status_1(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "step_00000001"
    copy.mkdir()
    for file in (run / "step_00000001").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert main([str(tmp_path), "--verify"]) == 0
    capsys.readouterr()
    file = copy / "exp_avg-pp0-tp0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert main([str(tmp_path)]) == 0  # which does not read it
    for name in (tmp_path, copy):
        capsys.readouterr()
        assert main([str(name), "--verify"]) == 1
        assert f"damaged: {file} has" in capsys.readouterr().out
    assert main(["--diff", str(copy), str(run / "step_00000001")]) == 2
    assert f"{file} has" in capsys.readouterr().err


def test_what_lost_its_manifest_is_listed_as_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step_00000003").mkdir()
    assert main([str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert ["step_00000003", "damaged"] in [line.split() for line in text.splitlines()]
    assert f"damaged: {tmp_path}/step_00000003/manifest.json is missing" in text
