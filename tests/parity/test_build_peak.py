"""While a run is built on ZeRO-3, one layer at most is whole: from the seed, from a checkpoint, and where layers come
with their values. torch's profiler counts what the allocator gives and takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
from torch import nn
from torch.profiler import ProfilerActivity, profile

from megacore.config import ParallelConfig
from megacore.models.plain import Layer
from megacore.parallel.mesh import build_mesh
from megacore.train.engine import PipelineEngine
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parity.runs import Layout, make_config, make_trainer

_SMALL = 1 << 16  # bytes: seeds, numbers that ranks agree on, blocks of random values
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_layers": 12}


@dataclass(frozen=True)
class Held:
    """Bytes: most at once while building, what is left afterwards, the largest layer and the whole stage in fp32."""

    peak: int
    kept: int
    layer: int
    stage: int


def held_while(build: Callable[[], Trainer | PipelineEngine]) -> Held:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        built = build()
    changes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    levels = [0, *accumulate(changes)]
    data_parallel = built.model.data_parallel
    layers = [4 * sum(bucket.layout.size for bucket in needs) for needs in data_parallel._needs]
    return Held(peak=max(levels), kept=levels[-1], layer=max(layers), stage=sum(layers))


def trainers(rank: int, world_size: int, layout: Layout, directory: str, load: str | None, precision: str) -> Held:
    config = make_config(layout, directory, zero_stage=3, precision=precision, load=load, micro_batch_size=1, **SIZES)
    mesh = build_mesh(config.parallel)
    return held_while(partial(make_trainer, config, mesh))


def save_one(rank: int, world_size: int, directory: str) -> None:
    config = make_config((1, 1, 1), directory, **SIZES)
    trainer = make_trainer(config, build_mesh(config.parallel))
    trainer.train_step(next(trainer.batches))
    trainer.save()


def engines(rank: int, world_size: int) -> Held:
    layers = [Layer(str(number), nn.Linear, 256, 256) for number in range(6)]
    parallel = ParallelConfig(dp=world_size, zero_stage=3, device="cpu")
    return held_while(lambda: PipelineEngine(layers, loss=nn.MSELoss(), train_iters=1, parallel=parallel))


def check(found: list[Held]) -> None:
    for held in found:
        allowed = held.kept + held.layer + _SMALL
        assert 0 < held.peak <= allowed, held
        assert allowed < held.stage, "a whole stage in fp32 must not be allowed"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loads", [False, True])
def test_a_run_is_built_and_loaded_layer_by_layer(loads: bool, precision: str, tmp_path: Path) -> None:
    if loads:
        run_distributed(save_one, 1, str(tmp_path / "saved"))
    load = str(tmp_path / "saved") if loads else None
    check(run_distributed(trainers, 4, (1, 1, 4), str(tmp_path / "run"), load, precision))


def test_plain_layers_with_their_own_values_are_divided_as_they_come() -> None:
    check(run_distributed(engines, 4))
