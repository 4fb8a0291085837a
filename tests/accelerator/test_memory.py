"""What a device holds while a run is built on ZeRO-3, and what the step in host memory copies and waits for."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.convert.from_hf import open_model
from megacore.convert.start import WeightsFromHF
from megacore.parallel.mesh import build_mesh
from megacore.train.gpt_task import GPTTask
from megacore.train.trainer import Trainer
from tests.accelerator.device import counting, needs_pretend
from tests.distributed import run_distributed
from tests.parity.hf_models import make_model, save_model
from tests.parity.runs import RaggedData, make_config, make_trainer

pytestmark = needs_pretend
SMALL = 1 << 12  # bytes: numbers that ranks agree on
DEEP = {"num_layers": 12, "hidden_size": 64, "num_attention_heads": 4}


@dataclass(frozen=True)
class Held:
    """Bytes of the device: most at once while building, what is left afterwards; and in fp32 the largest layer and the
    whole stage."""

    peak: int
    kept: int
    layer: int
    stage: int


def build(rank: int, world_size: int, directory: str, precision: str, hf: str | None, load: str | None) -> Held:
    """Build a trainer on ZeRO-3, from the seed, from transformers' weights or from a checkpoint."""
    config = make_config(
        (1, 1, world_size),
        directory,
        device="pretend",
        zero_stage=3,
        precision=precision,
        micro_batch_size=1,
        load=load,
        **DEEP,
    )
    if hf is not None:
        config = dataclasses.replace(config, model=open_model(Path(hf)).config)
    mesh = build_mesh(config.parallel)
    task = GPTTask(config, mesh, weights=None if hf is None else WeightsFromHF(Path(hf)))
    before = torch.accelerator.memory_allocated(mesh.device)
    torch.accelerator.reset_peak_memory_stats(mesh.device)
    trainer = Trainer(config, mesh, task, RaggedData(8), None)
    sizes = [4 * sum(b.layout.size for b in needs) for needs in trainer.model.data_parallel._needs]
    return Held(
        peak=torch.accelerator.max_memory_allocated(mesh.device) - before,
        kept=torch.accelerator.memory_allocated(mesh.device) - before,
        layer=max(sizes),
        stage=sum(sizes),
    )


def save_one(rank: int, world_size: int, directory: str) -> None:
    config = make_config((1, 1, 1), directory, **DEEP)
    trainer = make_trainer(config, build_mesh(config.parallel))
    trainer.train_step(next(trainer.batches))
    trainer.save()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("source", ["seed", "hf", "load"])
def test_one_layer_at_most_is_whole_while_a_run_is_built(source: str, precision: str, tmp_path: Path) -> None:
    hf = load = None
    if source == "hf":
        hf = str(save_model(make_model("gpt2"), tmp_path / "hf"))
    if source == "load":
        load = str(tmp_path / "saved")
        run_distributed(save_one, 1, load)
    for held in run_distributed(build, 4, str(tmp_path / "run"), precision, hf, load, backend="pretend"):
        allowed = held.kept + held.layer + SMALL
        assert 0 < held.peak <= allowed, held
        assert allowed < held.stage, "a whole stage in fp32 must not be allowed"


@dataclass(frozen=True)
class Copies:
    """Of one step with offload: bytes to the host and to the device, where the host waited how often, and what the rank
    owns: bytes in the device's format, and buckets; and how these travelled back."""

    down: int
    up: int
    waits: dict[str, int]
    owned: int
    buckets: int
    uploads: list[tuple[bool, bool]]


class Uploads(TorchDispatchMode):
    """Notes of each copy to the device whether it leaves the format as it is, and whether it is from pinned memory: a
    GPU does all others while the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[bool, bool]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten.copy_.default and args[0].device.type != "cpu" and args[1].device.type == "cpu":
            self.found.append((args[0].dtype == args[1].dtype, args[1].is_pinned()))
        return operator(*args, **(kwargs or {}))


def copies_of(rank: int, world_size: int, directory: str, precision: str) -> Copies:
    config = make_config(
        (1, 1, world_size),
        directory,
        device="pretend",
        zero_stage=2,
        precision=precision,
        offload_optimizer=True,
        grad_reduce_dtype="bf16" if precision == "bf16" else "fp32",
    )
    trainer = make_trainer(config, build_mesh(config.parallel))
    trainer.train_step(next(trainer.batches))
    batch = next(trainer.batches)
    with counting() as counted:
        trainer.train_step(batch)
    with Uploads() as uploads:
        trainer.model.data_parallel.publish()
    buckets = trainer.model.data_parallel.buckets
    return Copies(
        down=counted.bytes_to_host,
        up=counted.bytes_to_device,
        waits=Counter(cause.rpartition(" in ")[2] for cause in counted.sync_causes),
        owned=sum(bucket._shard_params.nbytes for bucket in buckets),
        buckets=len(buckets),
        uploads=uploads.found,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_go_back_while_the_next_bucket_is_updated(precision: str, tmp_path: Path) -> None:
    """The host waits for gradients, once a bucket, and never for weights; both travel in the device's format."""
    for found in run_distributed(copies_of, 2, str(tmp_path), precision, backend="pretend"):
        assert found.waits.pop("downloaded") == found.buckets
        assert found.waits.keys() <= {"to_host", "step_on_host"}, found.waits  # to step or to skip; the factor
        assert found.uploads == [(True, True)] * found.buckets
        assert found.down == pytest.approx(found.owned, abs=SMALL)
        assert found.up == pytest.approx(found.owned, abs=SMALL)  # the batch is small
