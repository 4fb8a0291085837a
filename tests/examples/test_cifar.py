"""examples/cifar: the same digits on every layout, through a checkpoint, and CIFAR-10's own files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import images
import train_cifar
from megacore.errors import DataError
from mixture_cnn import MixtureHead
from tests.distributed import run_distributed
from tests.examples.conftest import printed

SHORT = ["--steps", "4", "--batch", "16", "--log-every", "2"]


def test_a_pipeline_prints_the_digits_of_one_process() -> None:
    (alone,) = run_distributed(printed, 1, train_cifar.main, SHORT, init=False)
    assert run_distributed(printed, 2, train_cifar.main, [*SHORT, "--pp", "2"], init=False) == [alone, (0, "")]


@pytest.mark.slow
def test_every_layout_prints_the_same_digits_also_through_a_checkpoint(tmp_path: Path) -> None:
    (alone,) = run_distributed(printed, 1, train_cifar.main, SHORT, init=False)
    assert alone[0] == 0
    assert alone[1].count("accuracy") == 2
    saving = [*SHORT, "--pp", "2", "--zero-stage", "1", "--save", str(tmp_path / "net"), "--save-every", "2"]
    saving += ["--tensorboard", str(tmp_path / "events")]
    assert run_distributed(printed, 2, train_cifar.main, saving, init=False) == [alone, (0, "")]
    assert any((tmp_path / "events").rglob("events*"))
    loading = [*SHORT, "--zero-stage", "3", "--load", str(tmp_path / "net" / "step_00000002")]
    (status, text), _ = run_distributed(printed, 2, train_cifar.main, loading, init=False)
    assert status == 0
    assert text == alone[1].splitlines(keepends=True)[-1]


@pytest.mark.slow
def test_it_learns() -> None:
    ((_, text),) = run_distributed(printed, 1, train_cifar.main, ["--steps", "150"], init=False, timeout=300)
    assert float(text.split()[-1].rstrip("%")) > 90


def test_the_head_mixes_the_experts_that_the_gate_chooses() -> None:
    head = MixtureHead(5, 3, experts=4, chosen=2)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    for image, logits in zip(x, head(x), strict=True):
        scores = head.gate(image)
        best = scores.argsort(descending=True)[:2]
        shares = torch.exp(scores[best]) / torch.exp(scores[best]).sum()
        expected = sum(
            share * (head.experts.weight[3 * e : 3 * e + 3] @ image + head.experts.bias[3 * e : 3 * e + 3])
            for share, e in zip(shares, best.tolist(), strict=True)
        )
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


def write_files(directory: Path, labels: list[int]) -> np.ndarray:
    """Files as CIFAR-10's; the pixels of each."""
    directory.mkdir()
    pixels = np.random.default_rng(1).integers(0, 256, (6, len(labels), 3072), dtype=np.uint8)
    for i, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        records = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels[i]], axis=1)
        records.tofile(directory / f"{name}.bin")
    return pixels


def test_the_reader_takes_cifars_files(tmp_path: Path) -> None:
    pixels = write_files(tmp_path / "data", [3, 9])
    train, test = images.load(tmp_path / "data")
    assert train.labels.tolist() == [3, 9] * 5
    assert test.pixels.shape == (2, 3, 32, 32)
    restored = (test.pixels[1] * 0.251 + 0.473) * 255
    np.testing.assert_allclose(restored.flatten().numpy(), pixels[5, 1], atol=1e-3)
    path = tmp_path / "data" / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="6145 bytes"):
        images.load(tmp_path / "data")
    path.unlink()
    with pytest.raises(DataError, match=r"test_batch\.bin does not exist"):
        images.load(tmp_path / "data")
    write_files(tmp_path / "others", [3, 10])
    with pytest.raises(DataError, match="label 10: CIFAR-10 has 0 to 9"):
        images.load(tmp_path / "others")


def test_checkpoints_are_written_in_steps_without_a_log_line_too(tmp_path: Path) -> None:
    argv = ["--steps", "3", "--batch", "8", "--log-every", "3", "--save-every", "2", "--save", str(tmp_path / "net")]
    assert train_cifar.main(argv) == 0
    assert {"step_00000002", "step_00000003"} <= {path.name for path in (tmp_path / "net").iterdir()}
