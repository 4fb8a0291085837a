"""The engine has what the trainer has: recomputation, offload, checkpoints of any layout, and tensor parallelism for
layers that are split. Its 16-bit formats are in test_deepspeed_engine.py."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megacore.config import OptimizerConfig, ParallelConfig, WatchConfig
from megacore.errors import CheckpointError, ConfigError
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from megacore.train.engine import Layer, PipelineEngine
from tests.distributed import RankFailed, run_distributed
from tests.parallel.test_engine import UNIFORM, batch, engine_of
from tests.patience import scaled_minutes, until

OPTIMIZER = OptimizerConfig(lr=1e-2, lr_decay_style="constant", weight_decay=0.1)


class Split(nn.Module):
    """A tuple of two: what is computed, and what passes by."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x), x


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.2)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return self.drop(self.linear(x[0])) + x[1]


def plain_layers() -> list[Layer]:
    return [
        Layer("in", nn.Linear, 6, 6),
        Layer("norm", nn.BatchNorm1d, 6),
        Layer("split", Split),
        Layer("joined", Joined),
        Layer("out", nn.Linear, 6, 6),
    ]


def engine_on(layers: list[Layer], pp: int = 1, dp: int = 1, **changes: Any) -> PipelineEngine:
    parallel = UNIFORM | changes.pop("parallel", {})
    return engine_of(layers, pp, dp, parallel=parallel, optimizer=OPTIMIZER, **changes)


def train(engine: PipelineEngine, first: int, last: int) -> list[float]:
    return [float(engine.train_batch(engine.split(*batch(step)))) for step in range(first, last)]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# ---- recomputation and offload


@pytest.mark.parametrize(
    "changes", [{"recompute": "full"}, {"parallel": {"offload_optimizer": True}}], ids=["recompute", "offload"]
)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_what_saves_memory_changes_no_bit(schedule: str, changes: dict[str, Any]) -> None:
    """Neither of the losses, nor of the weights, nor of BatchNorm's running averages."""
    plain = engine_on(plain_layers(), parallel={"schedule": schedule})
    changes = changes | {"parallel": {"schedule": schedule, **changes.get("parallel", {})}}
    saving = engine_on(plain_layers(), **changes)
    assert train(saving, 0, 3) == train(plain, 0, 3)
    assert same(saving.state_dict(), plain.state_dict())


# ---- checkpoints


def save_two_of_four(rank: int, world_size: int, directory: str) -> list[float]:
    engine = engine_on(plain_layers(), 2, 1, reproducible=True)
    train(engine, 0, 2)
    engine.save(directory)
    return train(engine, 2, 4)


def test_a_checkpoint_of_two_stages_continues_on_one_process_bitwise(tmp_path: Path) -> None:
    after = run_distributed(save_two_of_four, 2, str(tmp_path))[0]
    one = engine_on(plain_layers(), reproducible=True)
    one.load(tmp_path)
    assert one.step == 2
    assert train(one, 2, 4) == after
    assert one.state_dict()["norm.num_batches_tracked"] == 16
    with pytest.raises(CheckpointError, match=r"of another model: other\.weight is missing"):
        engine_on([Layer("other", nn.Linear, 6, 6)]).load(tmp_path)


# ---- tensor parallelism


def split_layers(mesh: Mesh) -> list[Layer]:
    return [
        Layer("in", nn.Linear, 6, 8),
        Layer("up", ColumnParallelLinear, 8, 16, group=mesh.layer),
        Layer("act", nn.GELU),
        Layer("down", RowParallelLinear, 16, 8, group=mesh.layer),
        Layer("out", nn.Linear, 8, 6),
    ]


def tensor_parallel(
    rank: int, world_size: int, tp: int, pp: int, zero_stage: int, directory: str
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    mesh = build_mesh(ParallelConfig(tp=tp, pp=pp, device="cpu"))
    assert mesh.batch.size == world_size // (tp * pp)
    parallel = {"tp": tp, "zero_stage": zero_stage}
    engine = engine_on(split_layers(mesh), pp, mesh.batch.size, mesh=mesh, parallel=parallel)
    losses, norms = [], []
    for step in range(3):
        losses += train(engine, step, step + 1)
        norms.append(float(engine.grad_norm))
    if directory:
        engine.save(directory)
    return losses, norms, engine.state_dict()


@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2), ParallelConfig(pp=2, dp=1)])
def test_a_mesh_that_needs_other_processes_is_refused(parallel: ParallelConfig) -> None:
    with pytest.raises(ConfigError, match=r"= 2, but the run has 1 process: use torchrun --nproc-per-node 2"):
        build_mesh(parallel)


@pytest.mark.parametrize(("tp", "pp", "zero_stage"), [(2, 1, 2), pytest.param(2, 2, 0, marks=pytest.mark.slow)])
def test_split_layers_train_as_on_one_process(tp: int, pp: int, zero_stage: int, tmp_path: Path) -> None:
    losses, norms, state = run_distributed(tensor_parallel, 1, 1, 1, 0, "")[0]
    assert state["up.weight"].shape == (16, 8) and state["up.weight"].std() > 0.01
    for result in run_distributed(tensor_parallel, 4, tp, pp, zero_stage, str(tmp_path)):
        assert result[0] == pytest.approx(losses, rel=1e-5)
        assert result[1] == pytest.approx(norms, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(result[2][name], value, rtol=1e-4, atol=1e-5)
    mesh = Mesh(device=torch.device("cpu"))
    one = engine_on(split_layers(mesh), mesh=mesh)
    one.load(tmp_path)
    assert one.step == 3
    torch.testing.assert_close(one.state_dict()["up.weight"], state["up.weight"], rtol=1e-4, atol=1e-5)


# ---- a hang

CALL = 4


class Halts(nn.Module):
    """Stops for good in one call on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == CALL and os.environ["RANK"] == "2":
            time.sleep(3600)
        return self.linear(x)


def hang(rank: int, world_size: int, output_dir: str, minutes: float) -> None:
    engine = PipelineEngine(
        [Layer("in", nn.Linear, 4, 4), Layer("halts", Halts)],
        loss=F.mse_loss,
        train_iters=10,
        parallel=ParallelConfig(pp=2, dp=2, device="cpu"),
        output_dir=output_dir,
        watch=WatchConfig(hang_timeout_minutes=minutes),
    )
    time.sleep(1.3 * 60.0 * minutes)  # in its own code a program takes as long as it likes
    while True:
        engine.train_batch(engine.split(torch.ones(4, 4), torch.zeros(4, 4)))


@pytest.mark.slow
def test_a_rank_that_hangs_in_the_engine_is_named_and_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="SIGTERM"):
        run_distributed(hang, 4, str(tmp_path), scaled_minutes(0.02))
    until(lambda: any(tmp_path.glob("hang-*.json")), 5, "no report")
    report = json.loads(next(tmp_path.glob("hang-*.json")).read_text())
    verdict = report["verdict"]
    assert (verdict["kind"], verdict["ranks"], verdict["is_certain"]) == ("holds up", [2], True)
    assert [rank["phase"] for rank in report["ranks"]][2] == "FORWARD"
    assert "in forward" in report["ranks"][2]["stack"]
