"""`--init-from-hf`: a run on any layout starts from transformers' weights, its first losses are transformers' own, and
flags that contradict config.json are refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.convert.from_hf import open_model
from megacore.convert.start import WeightsFromHF
from megacore.parallel.mesh import build_mesh
from megacore.parallel.sharding import ShardSpec
from megacore.train.gpt_task import GPTTask
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.e2e.launching import alone, words
from tests.parity.hf_models import VOCAB, make_model, save_model
from tests.parity.runs import Layout, RaggedData, gather, make_config

SEQUENCE = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of transformers."""
    return save_model(make_model("gpt2"), tmp_path_factory.mktemp("init") / "hf")


def start(rank: int, world_size: int, layout: Layout, source: str, output: str, changes: dict[str, Any]) -> Any:
    """Build a run from the directory; the whole weights, and the first loss."""
    config = make_config(layout, output, **changes)
    model = dataclasses.replace(open_model(Path(source)).config, hidden_dropout=0.0, attention_dropout=0.0)
    config = dataclasses.replace(config, model=model)
    mesh = build_mesh(config.parallel)
    task = GPTTask(config, mesh, weights=WeightsFromHF(Path(source)))
    data = Words(config.training.global_batch_size)
    trainer = Trainer(config, mesh, task, data, None)
    weights = gather(trainer, mesh, lambda owned: owned.master)
    first = trainer.train_step(next(trainer.batches)).loss
    return (weights, float(first)) if rank == 0 else None


class Words(RaggedData):
    """Samples of the tiny models' vocabulary."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {k: v % VOCAB if k != "loss_mask" else v for k, v in super().__getitem__(index).items()}


def expected_loss(name: str, batch: int) -> float:
    model = make_model(name)
    samples = [Words(batch)[number] for number in range(batch)]
    tokens, labels, mask = (
        torch.stack([torch.as_tensor(sample[key]) for sample in samples]) for key in ("tokens", "labels", "loss_mask")
    )
    losses = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten(), reduction="none")
    return float(((losses * mask.flatten()).sum() / mask.sum()).detach())


@pytest.mark.parametrize(
    ("layout", "changes"),
    [((2, 2, 1), {}), pytest.param((4, 1, 2), {"zero_stage": 3}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_run_starts_from_the_weights(
    layout: Layout, changes: dict[str, Any], directory: Path, tmp_path: Path
) -> None:
    compare("gpt2", directory, layout, changes, tmp_path)


def test_a_run_with_norms_of_each_head_starts_from_the_weights(tmp_path: Path) -> None:
    """Each rank normalises its heads with their own weights."""
    source = save_model(make_model("stablelm-12b"), tmp_path / "hf")
    compare("stablelm-12b", source, (2, 2, 1), {}, tmp_path / "run")


_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "olmoe", "deepseek-v3")]


@pytest.mark.parametrize("name", ["qwen3-moe", *_SLOW])
def test_a_run_with_experts_starts_from_the_weights(name: str, tmp_path: Path) -> None:
    """Every rank reads the slices of its experts."""
    source = save_model(make_model(name), tmp_path / "hf")
    compare(name, source, (2, 1, 2), {"ep": 2, "zero_stage": 1}, tmp_path / "run")


def compare(name: str, directory: Path, layout: Layout, changes: dict[str, Any], tmp_path: Path) -> None:
    tp, pp, dp = layout
    found = run_distributed(start, tp * pp * dp, layout, str(directory), str(tmp_path), changes, timeout=120)[0]
    weights, loss = found
    hf = open_model(directory)
    for step in hf.plan:
        if step.is_buffer:  # the loss depends on it
            continue
        whole: Tensor = step.slice(spec_of(step.ours, step.shape), hf.stored.tensors)
        assert torch.equal(weights[step.ours], whole), step.ours
    assert loss == pytest.approx(expected_loss(name, 8), abs=1e-6)


def spec_of(name: str, shape: tuple[int, ...]) -> ShardSpec:
    return ShardSpec(name=name, shape=shape)


def test_the_program_takes_the_shape_from_the_directory(directory: Path, tmp_path: Path) -> None:
    flags = words(init_from_hf=directory, mock_data=True, seq_length=SEQUENCE, train_iters=2, eval_interval=0)
    done = alone(*flags, *words(output_dir=tmp_path / "run", log_interval=1), timeout=120)
    assert done.returncode == 0, done.stderr
    assert "num_layers = 3" in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.slow
def test_the_program_takes_experts_from_the_directory(tmp_path: Path) -> None:
    source = save_model(make_model("mixtral"), tmp_path / "hf")
    flags = words(init_from_hf=source, mock_data=True, seq_length=SEQUENCE, train_iters=2, eval_interval=0)
    done = alone(*flags, *words(output_dir=tmp_path / "run", log_interval=1), timeout=120)
    assert done.returncode == 0, done.stderr
    assert "num_experts = 4" in (tmp_path / "run" / "config.toml").read_text()
    done = alone(*flags, "--moe-router-topk", 3, *words(output_dir=tmp_path / "again"))
    assert done.returncode == 2
    assert f"--moe-router-topk 3 contradicts {source}/config.json, which makes it 2" in done.stderr


def test_flags_that_contradict_the_directory_are_refused(directory: Path, tmp_path: Path) -> None:
    flags = words(
        init_from_hf=directory, mock_data=True, seq_length=SEQUENCE, train_iters=2, output_dir=tmp_path / "run"
    )
    done = alone(*flags, "--num-layers", 4, "--norm-epsilon", 1e-6)
    assert done.returncode == 2
    assert f"--num-layers 4 contradicts {directory}/config.json, which makes it 3" in done.stderr
    assert "--norm-epsilon 1e-06 contradicts" in done.stderr
    done = alone(*flags, "--preset", "gpt2-tiny")
    assert done.returncode == 2
    assert "--preset gpt2-tiny has no effect with --init-from-hf" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    done = alone(*words(init_from_hf=tmp_path / "none", mock_data=True, train_iters=2))
    assert done.returncode == 2
    assert "refused: 1 problem" in done.stderr
    assert "none is not a directory" in done.stderr
