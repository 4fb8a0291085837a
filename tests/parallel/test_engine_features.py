"""The engine has what the trainer has: recomputation, offload, checkpoints of any layout, and tensor parallelism for
layers that are split; stages hand on what is not real, and replicas may use different parameters. Its 16-bit formats
are in test_deepspeed_engine.py."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacore.config import OptimizerConfig, ParallelConfig, SGDConfig, WatchConfig
from megacore.errors import CheckpointError, ConfigError, UserError
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from megacore.train.engine import Layer, PipelineEngine
from tests.distributed import RankFailed, run_distributed
from tests.parallel.test_engine import UNIFORM, batch, engine_of, linear
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


def tied_engine(stages: int) -> PipelineEngine:
    """Trains a matrix that two stages use, and that the optimizer takes whole."""
    layers = [linear("blocks.0"), Layer("act", nn.Tanh), linear("blocks.2").tied("blocks.0")]
    return engine_of(layers, stages, optimizer=OptimizerConfig(optimizer="adafactor", lr=1e-2, clip_grad=0.0))


def save_tied(rank: int, world_size: int, directory: str) -> list[float]:
    engine = tied_engine(world_size)
    train(engine, 0, 2)
    engine.save(directory)
    return train(engine, 2, 4)


def test_the_state_of_a_tied_matrix_is_saved_once(tmp_path: Path) -> None:
    """Of its rows and columns too."""
    after, one = run_distributed(save_tied, 2, str(tmp_path))[0], tied_engine(1)
    one.load(tmp_path)
    assert train(one, 2, 4) == pytest.approx(after, rel=1e-6)


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
    watch, layers = WatchConfig(hang_timeout_minutes=minutes), [Layer("in", nn.Linear, 4, 4), Layer("halts", Halts)]
    engine = engine_of(layers, 2, 2, num_microbatches=1, output_dir=output_dir, watch=watch)
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


# ---- what stages of any model may hand to each other; layers that no gradient passes or that are checkpointed


class Codes(nn.Module):
    """Whole numbers out: no gradient comes back."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() * 2).long().clamp(0, 9)


class Spectrum(nn.Module):
    """Complex numbers out, of which the next stage takes the conjugates' real and imaginary parts."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


class Parts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.conj().real + x.conj().imag


def between_stages() -> list[list[Layer]]:
    """Models whose stages hand each other what is not real, on three stages of layers of their own."""
    embedding = Layer("b", lambda: nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(36, 6)))
    return [[Layer("a", Codes), embedding, linear("c")], [linear("a"), Layer("b", Spectrum), Layer("c", Parts)]]


def train_between(rank: int, world_size: int, schedules: list[str]) -> list[list[float]]:
    found = []
    for layers in between_stages():
        for schedule in schedules:
            engine = engine_of(layers, world_size, parallel=UNIFORM | {"schedule": schedule})
            found.append([engine.train_batch(engine.split(*batch(step))).item() for step in range(3)])
            found[-1] += [float(engine.grad_norm), engine.evaluate(engine.split(*batch(3)))]
    return found


def test_stages_may_hand_on_what_is_not_real() -> None:
    """Integers, behind which no gradient travels, and complex numbers, whose gradients are complex."""
    expected = train_between(0, 1, ["1f1b", "1f1b"])
    for found, one in zip(run_distributed(train_between, 3, ["1f1b", "zero-bubble"])[0], expected, strict=True):
        assert found == pytest.approx(one, rel=1e-6)


class Checkpointed(nn.Module):
    """Two linear layers that keep only their input."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return result


class Detach(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def train_one_step(rank: int, world_size: int, layers: list[Layer], schedule: str = "1f1b") -> tuple[Any, ...]:
    engine = engine_of(layers, world_size, parallel=UNIFORM | {"schedule": schedule})
    before = engine.state_dict()
    loss = engine.train_batch(engine.split(*batch(0))).item()
    return loss, before, engine.state_dict()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # when the layers are tried
def test_checkpointed_layers_are_split_or_refused() -> None:
    layers = [linear("a"), Layer("b", Checkpointed, False), linear("c")]
    split, whole = (train_one_step(0, 1, layers, schedule) for schedule in ("zero-bubble", "1f1b"))
    assert split[0] == whole[0]
    for name, weight in whole[2].items():
        torch.testing.assert_close(split[2][name], weight, rtol=1e-5, atol=1e-6)
    layers = [linear("a"), Layer("b", Checkpointed, True), linear("c")]
    assert train_one_step(0, 1, layers)[0] == whole[0]
    with pytest.raises(UserError, match="use_reentrant=True, whose backward cannot be split"):
        train_one_step(0, 1, layers, "zero-bubble")


def test_what_a_later_stage_detaches_has_a_gradient_of_zero() -> None:
    """As the manual says: weight decay alone moves it, and on one stage nothing does."""
    layers = [linear("a"), Layer("b", Detach), linear("c")]
    alone, cut = train_one_step(0, 1, layers), run_distributed(train_one_step, 3, layers)[0]
    assert cut[0] == pytest.approx(alone[0], rel=1e-6)
    assert torch.equal(alone[2]["a.weight"], alone[1]["a.weight"])
    decayed = alone[1]["a.weight"] * (1 - 1e-2 * OptimizerConfig().weight_decay)
    torch.testing.assert_close(cut[2]["a.weight"], decayed, rtol=1e-6, atol=0)
    assert torch.equal(cut[2]["a.bias"], alone[2]["a.bias"])
    for name in ("c.weight", "c.bias"):
        torch.testing.assert_close(cut[2][name], alone[2][name], rtol=1e-6, atol=1e-8)


# ---- replicas that use different parameters in the same microbatch: experts, and layers that are left out


STEPS, SAMPLES = 4, 16


class Choose(nn.Module):
    """Another expert for each sign of the last column, which passes through, behind a layer for one sign only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.positive = nn.Linear(width, width)
        self.negative = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h, sign = x[:, :-1], x[:, -1:]
        positive = bool(sign[0] > 0)
        h = h + self.before(h) if positive else h
        return torch.cat([self.positive(h) if positive else self.negative(h), sign], 1)


class Skip(nn.Module):
    """A residual layer that microbatches of one sign leave out."""

    def __init__(self, width: int, sign: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.sign = sign

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :-1] + self.inner(x[:, :-1]), x[:, -1:]], 1) if x[0, -1] * self.sign > 0 else x


class First(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.inner(x), x[:, :1]], 1)


class Last(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, :-1])


def train_chosen(width: int, dp: int = 1, **parallel: Any) -> tuple[list[float], dict[str, Tensor]]:
    layers = [
        Layer("first", First, width),
        Layer("choose", Choose, width),
        Layer("skip", Skip, width, 1),
        Layer("other", Skip, width, -1),
        Layer("last", Last, width),
    ]
    # Plain SGD: an error of a gradient is an error of a weight, in proportion.
    optimizer = OptimizerConfig(optimizer="sgd", lr=0.1, weight_decay=0.0, lr_decay_style="constant", clip_grad=0.0)
    plain = SGDConfig(sgd_momentum=0.0)
    engine = engine_of(layers, dp=dp, parallel=parallel, optimizer=optimizer, optimizer_settings=plain)
    losses = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        x, y = (torch.randn(SAMPLES, 6, generator=draw) for _ in range(2))
        # Microbatches take turns at the replicas: of each two one is positive, and in odd steps all are.
        signs = torch.tensor([1.0, 1.0 if step % 2 else -1.0]).repeat(2).repeat_interleave(SAMPLES // 4)
        x[:, 0] = x[:, 0].abs() * signs
        losses.append(engine.train_batch(engine.split(x, y)).item())
    return losses, engine.state_dict()


def train_all(rank: int, world_size: int, width: int, cases: list[dict[str, Any]]) -> list[Any]:
    return [train_chosen(width, dp=world_size, **case) for case in cases]


@pytest.mark.parametrize(("width", "bucket_size_mb"), [(8, 1e-6), pytest.param(64, 25.0, marks=pytest.mark.slow)])
def test_replicas_may_use_different_parameters(width: int, bucket_size_mb: float) -> None:
    """Buckets of one parameter, of which several are of one size; and of a quarter of the model."""
    expected, weights = train_chosen(width)
    cases = [{"zero_stage": stage, "bucket_size_mb": bucket_size_mb} for stage in range(4)]
    for found in run_distributed(train_all, 2, width, cases, stay=True):
        for case, (losses, state) in zip(cases, found, strict=True):
            assert losses == pytest.approx(expected, rel=1e-5), case
            wrong = {name for name, weight in weights.items() if (state[name] - weight).abs().max() > 1e-6}
            assert not wrong, case
