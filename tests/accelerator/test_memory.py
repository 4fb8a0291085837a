"""What a device holds while a run is built on ZeRO-3, and what it is too small for; what the step in host memory copies
and waits for."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.convert.from_hf import open_model
from megacore.convert.start import WeightsFromHF
from megacore.errors import ConfigError
from megacore.parallel.host_memory import AvailableMemory
from megacore.parallel.mesh import build_mesh
from megacore.plan import fit
from megacore.train.gpt_task import GPTTask
from megacore.train.trainer import Trainer
from tests.accelerator.device import counting, limit_memory, needs_pretend
from tests.distributed import run_distributed
from tests.parity.hf_models import make_model, save_model
from tests.parity.runs import Layout, RaggedData, losses_around_a_skip, make_config, make_trainer

pytestmark = needs_pretend
SMALL = 1 << 12  # bytes: numbers that ranks agree on
DEEP = {"num_layers": 12, "global_batch_size": 4, "hidden_size": 64, "num_attention_heads": 4}


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


@pytest.mark.parametrize(("source", "precision"), [("seed", "bf16"), ("hf", "fp32"), ("load", "bf16")])
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


def left_of_runs(rank: int, world_size: int, directory: str, cases: list[tuple[Layout, dict[str, Any]]]) -> list[int]:
    """Bytes of the device that are left of each of two runs of two steps, one after the other."""
    left = []
    for layout, changes in cases:
        config = make_config(layout, directory, device="pretend", **{"num_layers": 2, **changes})
        mesh = build_mesh(config.parallel)
        for _ in range(2):
            before = torch.accelerator.memory_allocated(mesh.device)
            trainer = make_trainer(config, mesh)
            for _ in range(2):
                trainer.train_step(next(trainer.batches))
            held = torch.accelerator.memory_allocated(mesh.device) - before
            trainer.report.close()
            del trainer
            while gc.collect():  # what C++ holds is only seen as garbage once its owner is gone
                pass
            left.append(torch.accelerator.memory_allocated(mesh.device) - before)
            assert held > 8 * SMALL
    return left


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [((1, 1, 1), {"precision": "bf16", "loss_chunks": 2, "recompute": "full"})]),
        (
            2,
            [
                ((1, 1, 2), {"zero_stage": 3, "precision": "bf16"}),
                ((1, 2, 1), {"schedule": "zero-bubble"}),
                ((2, 1, 1), {"optimizer": "muon", "sequence_parallel": True}),
            ],
        ),
    ],
    ids=["1", "2"],
)
def test_a_run_that_is_over_leaves_nothing_on_the_device(
    ranks: int, cases: list[tuple[Layout, dict[str, Any]]], tmp_path: Path
) -> None:
    found = run_distributed(left_of_runs, ranks, str(tmp_path), cases, backend="pretend")
    assert all(left <= 2 * SMALL for of_rank in found for left in of_rank), found


def refused(rank: int, world_size: int, directory: str, changes: dict[str, Any]) -> str:
    """What a rank says where the device of the last one has 32 MiB, and the host 64 KiB; nothing is allocated."""
    fit.host_memory = partial(AvailableMemory, 2.0**16, "a small host")
    config = make_config((1, world_size, 1), directory, device="pretend", **changes)
    mesh = build_mesh(config.parallel)
    task, before = GPTTask(config, mesh), torch.accelerator.memory_allocated(mesh.device)
    if rank == world_size - 1:
        taken = torch.empty(1 << 20, device=mesh.device)  # 4 MiB
        limit_memory(before + (32 << 20))
    torch.accelerator.reset_peak_memory_stats(mesh.device)
    with pytest.raises(ConfigError) as error:
        Trainer(config, mesh, task, RaggedData(8), None)
    held = taken.nbytes if rank == world_size - 1 else 0
    assert torch.accelerator.max_memory_allocated(mesh.device) - before - held < SMALL  # what ranks tell each other
    return str(error.value)


def test_what_one_device_has_no_room_for_is_refused_on_all_before_it_is_built(tmp_path: Path) -> None:
    said = run_distributed(refused, 2, str(tmp_path), {"ffn_hidden_size": 1 << 15}, backend="pretend")
    assert said[0] == said[1]
    assert "but 28.0 MiB are available (free on pretend:1, which has " in said[0]
    assert "(rank 1: pp 1, dp 0, tp 0)" in said[0]


def test_what_the_host_has_no_room_for_is_not_offloaded(tmp_path: Path) -> None:
    for said in run_distributed(refused, 2, str(tmp_path), {"offload_optimizer": True}, backend="pretend"):
        assert re.search(r"--offload-optimizer needs 1\.\d MiB of host memory for 2 ranks .*, but 64\.0 KiB are", said)


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
    downloads: list[tuple[bool, bool]]


class Transfers(TorchDispatchMode):
    """Notes of each copy to the device whether it leaves the format as it is, and whether it is from pinned memory: a
    GPU does all others while the host waits. Of each copy to the host, whether it is a few numbers, and whether it is
    in the stream that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[tuple[bool, bool]] = []
        self.downloads: list[tuple[bool, bool]] = []
        self._main = torch.accelerator.current_stream()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if target.device.type != "cpu" and source.device.type == "cpu":
                self.uploads.append((target.dtype == source.dtype, source.is_pinned()))
            if target.device.type == "cpu" and source.device.type != "cpu":
                in_main = torch.accelerator.current_stream() == self._main
                self.downloads.append((source.numel() < 16, in_main))
        return operator(*args, **(kwargs or {}))


def copies_of(rank: int, world_size: int, directory: str) -> Copies:
    options = {"zero_stage": 2, "precision": "bf16", "grad_reduce_dtype": "bf16", "offload_optimizer": True}
    config = make_config((1, 1, world_size), directory, device="pretend", **options)
    trainer = make_trainer(config, build_mesh(config.parallel))
    trainer.train_step(next(trainer.batches))
    batch = next(trainer.batches)
    with counting() as counted:
        trainer.train_step(batch)
    with Transfers() as step:
        trainer.train_step(next(trainer.batches))
    with Transfers() as publication:
        trainer.model.data_parallel.publish()
    buckets = trainer.model.data_parallel.buckets
    return Copies(
        down=counted.bytes_to_host,
        up=counted.bytes_to_device,
        waits=Counter(cause.rpartition(" in ")[2] for cause in counted.sync_causes),
        owned=sum(bucket._shard_params.nbytes for bucket in buckets),
        buckets=len(buckets),
        uploads=publication.uploads,
        downloads=step.downloads,
    )


def test_weights_go_back_while_the_next_bucket_is_updated(tmp_path: Path) -> None:
    """The host waits for the decision, and never for weights; of gradients the pretend device is always done. These are
    queued behind the decision, beside what the device computes. Both travel in the device's format."""
    for found in run_distributed(copies_of, 2, str(tmp_path), backend="pretend"):
        assert found.waits == {"to_host": 1}
        assert found.downloads == [(True, True)] + [(False, False)] * found.buckets
        assert found.uploads == [(True, True)] * found.buckets
        assert found.down == pytest.approx(found.owned, abs=SMALL)
        assert found.up == pytest.approx(found.owned, abs=SMALL)  # the batch is small


def losses_by_offload(rank: int, world_size: int, directory: str) -> list[list[float]]:
    """Of steps one of which is skipped, without and with offload."""
    found, fp16 = [], {"precision": "fp16", "initial_loss_scale": 1024.0, "hysteresis": 2, "device": "pretend"}
    for offload in (False, True):
        options = {**fp16, "zero_stage": 2, "offload_optimizer": offload, "num_layers": 2}
        found.append(losses_around_a_skip(make_config((1, 1, world_size), f"{directory}/{offload}", **options)))
    return found


def test_gradients_of_a_skipped_step_on_their_way_to_the_host_do_no_harm(tmp_path: Path) -> None:
    """The device says so where their memory is written to before they are copied."""
    for plain, offloaded in run_distributed(losses_by_offload, 2, str(tmp_path), backend="pretend"):
        assert offloaded == plain
