"""`--init-from-hf`: a run on any layout starts from transformers' weights, the loss and the gradients of its first step
are transformers' own, and flags that contradict config.json are refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.audit.command import main
from megacore.convert.from_hf import open_model
from megacore.convert.start import WeightsFromHF
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.train.gpt_task import GPTTask
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.e2e.launching import alone, words
from tests.parity.hf_models import CONFIGS, VOCAB, as_stored, make_model, save_model
from tests.parity.runs import Layout, RaggedData, gather, make_config

SEQUENCE = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of transformers."""
    return save_model(make_model("gpt2"), tmp_path_factory.mktemp("init") / "hf")


def begin(mesh: Mesh, layout: Layout, source: Path, output: str, changes: dict[str, Any]) -> Trainer:
    """Build a run from the directory, without dropout."""
    config = make_config(layout, output, **changes)
    model = dataclasses.replace(open_model(source).config, hidden_dropout=0.0, attention_dropout=0.0)
    config = dataclasses.replace(config, model=model)
    task = GPTTask(config, mesh, weights=WeightsFromHF(source))
    return Trainer(config, mesh, task, Words(config.training.global_batch_size), None)


class Words(RaggedData):
    """Samples of the tiny models' vocabulary."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {k: v % VOCAB if k != "loss_mask" else v for k, v in super().__getitem__(index).items()}


def loss_of(model: nn.Module, batch: int) -> Tensor:
    """Of transformers' model, over the tokens that count."""
    samples = [Words(batch)[number] for number in range(batch)]
    tokens, labels, mask = (
        torch.stack([torch.as_tensor(sample[key]) for sample in samples]) for key in ("tokens", "labels", "loss_mask")
    )
    losses = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


First = tuple[float, float, dict[str, Tensor]]  # loss, norm of the gradient, and the gradient by tensor


def first_step(trainer: Trainer) -> First:
    result = trainer.train_step(next(trainer.batches))
    return float(result.loss), float(result.grad_norm), gather(trainer, trainer.mesh, lambda owned: owned.gradient)


def require_that_of_transformers(found: First, model: nn.Module, directory: Path) -> None:
    """Loss, global norm and every gradient are those of transformers' own model."""
    loss, norm, gradients = found
    expected = loss_of(model, 8)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    theirs = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert norm == pytest.approx(float(torch.stack([one.double().norm() for one in theirs.values()]).norm()), rel=1e-6)
    stored = as_stored(theirs)
    steps = {step.ours: step for step in open_model(directory).plan if not step.is_buffer}
    assert gradients.keys() == steps.keys()
    for name, step in steps.items():
        wanted = step.assemble(lambda number, step=step: stored[step.theirs[number]])  # type: ignore[misc]
        # Relative to the tensor's own size: an entry of it may be zero but for rounding (the key's bias is).
        error = (gradients[name] - wanted).abs().max()
        assert error <= 1e-5 * wanted.abs().max() + 1e-7, f"gradient of {name}: {error}"


def first_steps(rank: int, world_size: int, sources: dict[str, str], output: str) -> dict[str, First]:
    """Of every model, on two tensor-parallel ranks of two stages."""
    found = {}
    for name, source in sources.items():
        layout, changes = (2, 2, 1), {"clip_grad": 0.0, "sequence_parallel": True}
        mesh = build_mesh(make_config(layout, output, **changes).parallel)
        found[name] = first_step(begin(mesh, layout, Path(source), output, changes))
    return found if rank == 0 else {}


@pytest.mark.parametrize(
    "names",
    [["gpt2", "stablelm-12b", "qwen3-moe", "gemma3"], pytest.param([*CONFIGS], marks=pytest.mark.slow)],
    ids=["four", "all"],
)
def test_the_first_step_on_two_by_two_ranks_is_that_of_transformers(names: list[str], tmp_path: Path) -> None:
    """Each rank normalises its heads with their own weights, and reads the slices of its experts."""
    models = {name: make_model(name) for name in names}
    sources = {name: str(save_model(model, tmp_path / name)) for name, model in models.items()}
    found = run_distributed(first_steps, 4, sources, str(tmp_path / "run"), timeout=300)[0]
    for name, model in models.items():
        print(name)  # shown where it fails
        require_that_of_transformers(found[name], model, Path(sources[name]))


def test_the_program_takes_the_shape_from_the_directory_and_is_replayed(directory: Path, tmp_path: Path) -> None:
    flags = words(init_from_hf=directory, mock_data=True, seq_length=SEQUENCE, train_iters=2, eval_interval=0)
    done = alone(*flags, *words(output_dir=tmp_path / "run", ledger=True), timeout=120)
    assert done.returncode == 0, done.stderr
    assert "num_layers = 3" in (tmp_path / "run" / "config.toml").read_text()
    assert main([str(tmp_path / "run"), "--replay", "1", "--device", "cpu"]) == 0


def test_flags_that_contradict_the_directory_or_lead_to_none_are_refused(directory: Path, tmp_path: Path) -> None:
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
    done = alone(*words(init_from_hf=tmp_path / "none", mock_data=True, train_iters=2))
    assert done.returncode == 2
    assert "none is not a directory" in done.stderr
