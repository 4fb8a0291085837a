"""The engine's promises beside right numbers: lazy layers, equal bits, state on any layout, clear refusals; and those
of megacore.initialize, which takes DeepSpeed's files."""

from __future__ import annotations

import json
import os
import random
import re
import time
import warnings
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import megacore
from megacore.config import (
    AdamWConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ResolvedParallel,
    SGDConfig,
    WatchConfig,
)
from megacore.config.parallel import V_SCHEDULES
from megacore.errors import CheckpointError, ConfigError, UserError
from megacore.layers.block import TransformerBlock
from megacore.layers.context import BuildContext
from megacore.layers.rotary import Rotary
from megacore.models.spec import LayerSpec
from megacore.parallel.context import SequenceShards
from megacore.parallel.mesh import Group, Mesh, build_mesh
from megacore.parallel.random import RandomStreams
from megacore.parallel.sharding import replicated
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megacore.pipeline.runtime import PipelineRuntime
from megacore.pipeline.schedule import SCHEDULES, placement_of
from megacore.pipeline.stage import Stage, TensorSpec
from megacore.pipeline.transport import Transport
from megacore.train.callbacks import Callback, Run
from megacore.train.engine import Layer, PipelineEngine
from tests.distributed import RankFailed, run_distributed
from tests.parallel.test_callbacks import Collect, Diary
from tests.patience import scaled_minutes, until

BUILT: list[str] = []
UNWATCHED: dict[str, Any] = {"watch": WatchConfig(hang_timeout_minutes=0.0)}  # spares a process per engine


def recorded(name: str, size: int) -> nn.Module:
    layer = nn.Linear(size, size)
    if layer.weight.device.type != "meta":
        BUILT.append(name)
    return layer


class Odd(nn.Module):
    """What plain models do: a frozen weight, one matrix used twice, a reparametrised one, an LSTM, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.once = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6)
        self.twice.weight = self.once.weight
        self.normed = weight_norm(nn.Linear(6, 6))
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.twice(torch.tanh(self.once(x + self.frozen)))) * self.gain
        return x + self.recurrent(self.normed(x).unsqueeze(1))[0].squeeze(1)


class Beside(nn.Module):
    """An output that depends on a weight, but not on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x), self.level.weight.exp()


class Join(nn.Module):
    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return x[0] @ x[1]


def odd_layers() -> list[Layer]:
    return [
        Layer("a", Odd),
        Layer("b", Odd).tied({"normed.bias": "a.normed.bias"}),
        Layer("c", Beside),
        Layer("d", Join),
    ]


def engine_of(layers: Any, pp: int = 1, dp: int = 1, **changes: Any) -> PipelineEngine:
    degrees = {"pp": pp, "dp": dp, "device": "cpu", "bucket_size_mb": 1e-4} | changes.pop("parallel", {})
    optimizer = OptimizerConfig(lr=1e-2, lr_decay_style="constant")
    settings: dict[str, Any] = {"optimizer": optimizer, "loss": F.mse_loss, "train_iters": 10, **UNWATCHED}
    settings |= {"parallel": ParallelConfig(**degrees), "num_microbatches": 4 // dp}
    return PipelineEngine(layers, **settings | changes)


def batch(step: int, samples: int = 12) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(samples, 6, generator=draw), torch.randn(samples, 6, generator=draw)


def sequential() -> nn.Sequential:
    """A model that is built before the engine, with dropout that does nothing and a matrix that is used twice."""
    first, again = nn.Linear(6, 6), nn.Linear(6, 6)
    again.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), again, nn.Sequential(nn.LayerNorm(6), nn.Dropout(0.0)), nn.Linear(6, 6))


def train_sequential(
    rank: int, ranks: int, pp: int, make: partial[torch.optim.Optimizer], *, by_hand: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps, and the weights; every rank builds another model, of which the first one's counts."""
    torch.manual_seed(rank)
    model, losses = sequential(), list[float]()
    if by_hand:
        optimizer = make(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch(step)[0]), batch(step)[1])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model.state_dict()
    engine = engine_of(model, pp=pp, dp=ranks // pp, optimizer=make)
    losses = [float(engine.train_batch(engine.split(*batch(step)))) for step in range(3)]
    state = engine.state_dict()
    engine.close()
    return losses, state


@pytest.mark.parametrize(
    ("pp", "make"),
    [
        (2, partial(torch.optim.AdamW, lr=1e-2, weight_decay=3.0)),
        pytest.param(2, partial(torch.optim.Adam, lr=1e-2, weight_decay=0.3), marks=pytest.mark.slow),
        (1, partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=3.0)),
    ],
)
def test_a_sequential_model_trains_as_in_torch(pp: int, make: partial[torch.optim.Optimizer]) -> None:
    """Vectors decay as there, too."""
    in_torch, expected = train_sequential(0, 1, 1, make, by_hand=True)
    (losses, state), *_ = run_distributed(train_sequential, 2, pp, make)
    assert losses == pytest.approx(in_torch, rel=1e-5)
    model = sequential()
    again = {"2.weight": state["0.weight"]}  # a tied weight is there once
    model.load_state_dict(state | again)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6)


class Quick(AdamWConfig):
    """Settings that no optimizer is registered for."""


class Asks(Callback):
    """Stops the run in its second step, and adds a figure to what is logged."""

    def on_step_begin(self, run: Run, step: int) -> None:
        if step == 2:
            run.request_stop("enough")

    def figures(self, run: Run) -> dict[str, float]:
        return {"mine": 7.0}


def test_callbacks_see_the_events_of_the_engine(tmp_path: Path) -> None:
    diary, collect = Diary(), Collect()
    engine = engine_of([linear("a")], train_iters=3, callbacks=[Asks(), diary, collect], output_dir=tmp_path)
    for step in range(2):
        assert engine.stop_reason is None
        engine.train_batch(engine.split(*batch(step)))
    assert engine.stop_reason == "enough"
    engine.log({"train/loss": 0.5})
    assert collect.columns == {"step": [2], "train/loss": [0.5], "mine": [7.0]}
    engine.evaluate(engine.split(*batch(0)))
    engine.save(tmp_path)
    steps = ["begin 1", "end 1", "begin 2", "end 2"]
    assert diary.calls == [*steps, "log 2", "evaluate 2", "save 2 True"]
    with pytest.raises(UserError, match="layer 'a' fails") as raised:
        engine.train_batch([(torch.zeros(3, 5), torch.zeros(3, 6))] * 4)
    assert diary.calls[-1] == f"error {raised.value}"
    engine.close()
    assert diary.calls[-1] == "stop enough"


def train_odd(rank: int, world_size: int, pp: int, changes: list[dict[str, Any]]) -> list[Any]:
    found = []
    for parallel in changes:
        engine = engine_of(odd_layers(), pp, world_size // pp, parallel=parallel, reproducible=True)
        losses = [engine.train_batch(engine.split(*batch(step))).item() for step in range(3)]
        state = engine.state_dict()
        found.append((losses, {name: tensor.numpy().tobytes() for name, tensor in state.items()}))
    return found


UNIFORM = {"pipeline_balance": "uniform"}
LAYOUTS: list[tuple[int, int, list[dict[str, Any]]]] = [
    (1, 1, [{}, {"schedule": "zero-bubble"}]),
    (2, 2, [UNIFORM | {"schedule": "zero-bubble"}, UNIFORM | {"schedule": "interleaved", "virtual_stages": 2}]),
    (4, 2, [UNIFORM | {"schedule": "zero-bubble", "zero_stage": 3}]),
]
MORE_LAYOUTS: list[tuple[int, int, list[dict[str, Any]]]] = [
    LAYOUTS[0],
    (4, 4, [{"schedule": "zero-bubble"}, {"schedule": "gpipe"}]),
    (4, 2, [UNIFORM | {"schedule": "zero-bubble", "zero_stage": stage} for stage in (1, 2)]),
]


@pytest.mark.parametrize(
    "layouts", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=pytest.mark.slow)], ids=["usual", "more"]
)
def test_no_layout_changes_a_bit_of_an_odd_model(layouts: list[tuple[int, int, list[dict[str, Any]]]]) -> None:
    """With reproducible; dropout and initial values too are the same."""
    found = [run_distributed(train_odd, world, pp, changes)[0] for world, pp, changes in layouts]
    expected = found[0][0]
    assert "a.frozen" in expected[1]
    assert "b.normed.bias" not in expected[1]
    for results in found:
        for losses, state in results:
            assert losses == expected[0]
            assert state == expected[1]


def build_and_carry(rank: int, world_size: int) -> tuple[list[str], dict[str, Any], float, list[float]]:
    layers = [Layer(f"layer{i}", recorded, f"layer{i}", 6) for i in range(4)] + [Layer("norm", nn.BatchNorm1d, 6)]
    torch.manual_seed(99)
    before = torch.get_rng_state()
    engine = engine_of(layers, 2, 2, parallel={"zero_stage": 3, "schedule": "1f1b"})
    losses = [engine.train_batch(engine.split(*batch(0))).item()]
    assert torch.equal(torch.get_rng_state(), before), "the program's own random numbers are not touched"
    # One replica meets a size that the other one does not.
    samples = 7 if engine.mesh.batch.rank == 0 else 3
    pairs = [tuple(part[:samples] for part in batch(step)) for step in (1, 2)]
    losses.append(engine.train_batch(pairs).item())  # type: ignore[arg-type]
    evaluated = engine.evaluate([batch(9)], metric=lambda output, targets: (output > targets).sum())
    assert engine.stages[0][0] == 0 and engine.stages[-1][-1] == 4
    return BUILT, engine.state_dict(), evaluated, losses


def test_a_rank_builds_its_own_layers_and_its_state_fits_any_layout() -> None:
    found = run_distributed(build_and_carry, 4)
    first, last = found[0][0], found[2][0]
    assert first and last and sorted(first + last) == [f"layer{i}" for i in range(4)]
    assert found[1][0] == first
    one = engine_of([*[Layer(f"layer{i}", nn.Linear, 6, 6) for i in range(4)], Layer("norm", nn.BatchNorm1d, 6)])
    one.load_state_dict(found[0][1])
    assert one.state_dict().keys() == found[0][1].keys()
    assert all(torch.equal(tensor, found[0][1][name]) for name, tensor in one.state_dict().items())
    assert all(result[3] == found[0][3] for result in found)
    assert one.state_dict()["norm.num_batches_tracked"] == 4
    with pytest.raises(UserError, match=r"state of 'layer0\.weight' is missing"):
        one.load_state_dict({})


def linear(name: str, size: int = 6) -> Layer:
    return Layer(name, nn.Linear, size, size)


ONE, TWO, SEQUENCES = [linear("a")], [linear("a"), linear("b")], {"parallel": {"cp": 2}}
PLAIN = {"optimizer": OptimizerConfig()}
REFUSED: list[tuple[Any, dict[str, Any], str]] = [  # layers, changes, what is said
    ([], {}, "the model has no layers"),
    ([linear("a"), linear("a")], {}, "2 layers are named 'a': names must be unique"),
    ([linear("a"), linear("b").tied({"weight": "a.wieght"})], {}, r"'a.wieght', which does not exist \(did you mean a"),
    ([linear("a").tied("b"), linear("b")], {}, "'b.weight', which comes later"),
    ([linear("a"), linear("b", 5).tied("a")], {}, r"\[5, 5\] to 'a.weight' of shape \[6, 6\]"),
    ([Layer("a", nn.LazyLinear, 6), linear("b")], {}, "a.weight gets its shape from its first input"),
    ([Layer("a", nn.Linear, 6, 6, dtype=torch.float64)], {}, "a.weight is torch.float64"),
    ([nn.Linear(6, 6), int], {}, "layer 1 is the class int: give a Layer or a torch.nn.Module"),
    (nn.Sequential, {}, "layers is the class Sequential: give a list of Layers and torch.nn.Modules"),
    ([nn.ModuleList([nn.Linear(6, 6)])], {}, "layer 0 is a ModuleList, which computes nothing: use torch.nn.Seq"),
    (nn.Sequential(VocabParallelEmbedding(8, 6)), {}, r"module '0' has a VocabParallelEmbedding.*Layer\(\"0\", Voc"),
    ([Layer("a", dict)], {}, "layer 'a' makes a dict: it must make a torch.nn.Module"),  # type: ignore[arg-type]
    (ONE, {"optimiser": 1, "train_iters": None}, r"(?s)argument optimiser \(did you mean optimizer\?\).*is missing:"),
    (ONE, PLAIN | {"optimizer_settings": Quick()}, "Quick is of no registered optimizer: use AdamWConfig"),
    (ONE, {"optimizer": OptimizerConfig(optimizer="sgd"), "optimizer_settings": AdamWConfig()},
     "optimizer sgd and optimizer_settings AdamWConfig, which is of adamw, exclude each other: use SGDConfig"),
    (ONE, PLAIN | {"logging": LoggingConfig(trace=True, trace_steps=1)}, "trace True is GPT's"),
    (ONE, {"optimizer": torch.optim.RMSprop}, "optimizer RMSprop is not in megacore: use AdamW or SGD"),
    (ONE, {"optimizer": "adamw"}, "optimizer is of type str: use torch.optim.AdamW, Adam or SGD, partial"),
    (ONE, {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "of type SGD, which holds parameters that "),
    (ONE, {"optimizer": partial(torch.optim.AdamW, lr=-1.0)}, "AdamW.* cannot be made .*: use torch.optim.AdamW, Adam"),
    (ONE, PLAIN | {"logging": LoggingConfig(log_interval=5)}, "log_interval 5 is GPT's"),
    (ONE, PLAIN | {"precision": PrecisionConfig(fp8="rowwise")}, "fp8 rowwise is of GPT's and BERT's blocks: leave it"),
    (TWO, {"pp": 4}, "= 4 stages, but the model has 2 layers: use 2 stages or less"),
    (TWO, {"parallel": {"tp": 2}}, "tp 2: no layer is split; use tp 1, or layers such as ColumnParallelLinear"),
    (TWO, SEQUENCES, 'reduction "mean" with cp 2 needs count'),
    (TWO, SEQUENCES | {"reproducible": True}, "reproducible with cp 2: layers of your own"),
    (TWO, {"parallel": {"cp": 2, "cp_comm": "ring"}}, r'build them with SequenceShards\(mesh.sequence, "ring"\)'),
    (TWO, {"parallel": {"pipeline_layout": "E,t|t,H"}}, r"pipeline_layout E,t\|t,H is GPT's"),
    # Layers that mix positions, each by name.
    (odd_layers(), SEQUENCES,
     r"(?s)layer 'a' has a LSTM, which would see only its rank's positions with cp 2.*layer 'b' has a LSTM, which"),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "changes", "said"), REFUSED, ids=lambda value: value if type(value) is str else "")
def test_a_wrong_model_or_setting_is_refused(layers: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError if changes else UserError, match=said):
        engine_of(layers, **changes)


def test_a_rotary_of_whole_sequences_is_refused_where_ranks_divide_them() -> None:
    """Beside blocks that are built for divided ones it would turn keys by local positions, at a plausible loss."""
    model = ModelConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=11, position_embedding_type="rope"
    )
    resolved, device = model.resolve(seq_length=8), torch.device("cpu")
    shards = SequenceShards(Group(ranks=(0, 1), rank=0))
    context = BuildContext(sequence=shards, device=device, streams=RandomStreams(1, device))
    for rotary, said in ((Rotary.of(resolved), True), (Rotary.of(resolved, shards), False)):
        block = Layer("a", TransformerBlock, resolved, context, "a", rotary=rotary)
        with pytest.raises(ConfigError) as refused:
            engine_of([block, linear("b")], parallel={"cp": 2})
        assert ("layer 'a' has a Rotary of whole sequences, which cp 2 divides" in str(refused.value)) is said


@pytest.mark.parametrize("shared", [False, True])
def test_a_subclass_of_the_block_has_the_arrangement_of_its_model(shared: bool) -> None:
    class Own(TransformerBlock):
        pass

    settings = ModelConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=11, parallel_residual=True,
        shared_parallel_norm=shared,
    )  # fmt: skip
    model, device = settings.resolve(seq_length=4), torch.device("cpu")
    context = BuildContext(device=device, streams=RandomStreams(1, device))
    block, own = TransformerBlock(model, context, "a"), Own(model, context, "a")
    torch.manual_seed(0)
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    own.load_state_dict(block.state_dict())
    x = torch.randn(1, 4, 8)
    assert isinstance(own, Own)
    assert torch.equal(own(x), block(x))


@pytest.mark.parametrize("placement", ["before", "after", "both"])
def test_a_block_tells_what_leaves_padding_out_where_it_is(placement: Any) -> None:
    told = []

    class Experts(nn.Identity):
        leaves_padding_out = True

        def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
            told.append(padding)
            return x

    settings = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=11, norm_placement=placement)
    device = torch.device("cpu")
    context = BuildContext(device=device, streams=RandomStreams(1, device), side_inputs=("padding",))
    block = TransformerBlock(settings.resolve(seq_length=4), context, "a", mlp=lambda model, context: Experts())
    padding = torch.tensor([[0, 0, 1, 1]])
    block((torch.randn(1, 4, 8), padding))
    assert [each is padding for each in told] == [True]


def test_a_wrong_batch_is_refused() -> None:
    engine = engine_of([linear("a")], train_iters=1)
    with pytest.raises(UserError, match="got 3 microbatches, but num_microbatches is 4"):
        engine.train_batch(engine.split(*batch(0))[:3])
    engine.train_batch(engine.split(*batch(0)))
    with pytest.raises(UserError, match="after step 1, but train_iters is 1"):
        engine.train_batch(engine.split(*batch(1)))
    with pytest.raises(UserError, match="3 samples are too few for 4 microbatches"):
        engine.split(*batch(0, samples=3))
    with pytest.raises(UserError, match=r"evaluate got \[0\] microbatches"):
        engine.evaluate([])
    other = engine_of([linear("a")], loss=lambda y, t: (y - t) ** 2)
    with pytest.raises(UserError, match=r"the loss returns a tensor of shape \[3, 6\]"):
        other.train_batch(other.split(*batch(0)))


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return {"dict": {"y": x}, "list": [x, x], "single": (x,), "nested": (x, (x, x))}[self.value]


def refusals(rank: int, world_size: int) -> list[str]:
    said = []
    wrong = [Layer("b", Returns, kind) for kind in ("dict", "list", "single", "nested")] + [linear("b", 7)]
    for layer in wrong:
        engine = engine_of([linear("a"), layer, linear("c")], world_size, parallel=UNIFORM)
        try:
            engine.train_batch(engine.split(*batch(0)))
        except UserError as error:
            said.append(str(error))
    return said


def test_outputs_that_cannot_be_handed_on_are_refused_on_every_rank() -> None:
    one, other = run_distributed(refusals, 2)
    assert one == other
    must = "it must return a tensor, or a tuple of two tensors or more"
    for said, what in zip(one, ["a dict", "a list", "a tuple of 1", "a tuple of Tensor, tuple"], strict=False):
        assert said == f"layer 'b' returns {what}: {must}"
    assert one[4].startswith("layer 'b' fails on its input ([3, 6] torch.float32): RuntimeError")


# ---- features --------------------------------------------------------------------------------------------------------

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


class Moody(nn.Module):
    """As many numbers in training as in evaluation, but in another shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 3) if self.training else x


def test_another_shape_in_training_is_refused() -> None:
    layers = [linear("a"), Layer("b", Moody), Layer("c", nn.Unflatten, 0, (-1, 1)), linear("d")]
    with pytest.raises(RankFailed, match=r"'a', 'b' return \(\[6, 3\] torch.float32\) in training, but returned "):
        run_distributed(train_one_step, 2, layers)


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
        self.always = nn.Linear(width, width)
        self.before = nn.Linear(width, width)
        self.positive = nn.Linear(width, width)
        self.negative = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h, sign = self.always(x[:, :-1]), x[:, -1:]
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


def train_chosen(width: int, dp: int = 1, **parallel: Any) -> tuple[list[float], dict[str, Tensor]]:
    layers = [Layer("choose", Choose, width), Layer("skip", Skip, width, 1), Layer("other", Skip, width, -1)]
    # Plain SGD: an error of a gradient is an error of a weight, in proportion.
    optimizer = OptimizerConfig(optimizer="sgd", lr=0.1, weight_decay=0.0, lr_decay_style="constant", clip_grad=0.0)
    plain = SGDConfig(sgd_momentum=0.0)
    engine = engine_of(layers, dp=dp, parallel=parallel, optimizer=optimizer, optimizer_settings=plain)
    losses = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        x, y = (torch.randn(SAMPLES, width + 1, generator=draw) for _ in range(2))
        # Microbatches take turns at the replicas: of each two one is positive, and in odd steps all are.
        signs = torch.tensor([1.0, 1.0 if step % 2 else -1.0]).repeat(2).repeat_interleave(SAMPLES // 4)
        x[:, -1] = x[:, -1].abs() * signs
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


# ---- DeepSpeed's engine ----------------------------------------------------------------------------------------------

MICRO, ACCUMULATION, UPDATES = 3, 2, 4


class Net(nn.Module):
    """With a keyword argument, a tied weight, a frozen weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 8)
        self.outer = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.outer.weight
        self.head = nn.Linear(8, 4)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, *, gain: float = 1.0) -> dict[str, Tensor]:
        h = torch.tanh(self.inner(x)) * self.frozen
        return {"logits": self.head(self.again(torch.tanh(self.outer(h)))) * gain}


def net(seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def data(step: int, number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(MICRO, 5, generator=draw), torch.randint(4, (MICRO,), generator=draw)


def document(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        **changes,
    }


def groups(model: nn.Module) -> list[dict[str, Any]]:
    learning = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in learning if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in learning if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=1e-2, betas=(0.9, 0.95))


def plain(replicas: int, rates: list[float] | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of the same training in plain torch, on one process with all replicas' samples."""
    model = net()
    optimizer = adamw(model)
    losses = []
    for step in range(UPDATES):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 if rates is None else rates[step]
        total = 0.0
        for number in range(ACCUMULATION * replicas):
            x, y = data(step, number)
            loss = F.cross_entropy(model(x, gain=2.0)["logits"], y) / (ACCUMULATION * replicas)
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model.state_dict()


def engine_losses(engine: Any, steps: range) -> list[float]:
    """The loop of a program for DeepSpeed; the losses of the steps over all replicas."""
    losses = []
    replicas, rank = engine.mesh.batch.size, engine.mesh.batch.rank
    for step in steps:
        for number in range(engine.gradient_accumulation_steps()):
            x, y = data(step, number * replicas + rank)
            loss = F.cross_entropy(engine(x, gain=2.0)["logits"].float(), y)
            engine.backward(loss)
            engine.step()
        losses.append(float(engine.last_result.loss))
    return losses


def on_rank(rank: int, ranks: int, zero: int, where: str) -> tuple[list[float], dict[str, Tensor]]:
    changes = {"zero_optimization": {"stage": zero, "reduce_bucket_size": 30}}
    engine, *_ = megacore.initialize(model=net(seed=rank), config=document(**changes), **UNWATCHED)
    losses = engine_losses(engine, range(2))
    engine.save_checkpoint(where, client_state={"note": 7})
    again, *_ = megacore.initialize(model=net(seed=9), config=document(**changes), mesh=engine.mesh, **UNWATCHED)
    path, state = again.load_checkpoint(where)
    assert path is not None
    assert (again.global_steps, again.micro_steps, state) == (2, 2 * ACCUMULATION, {"note": 7})
    return losses + engine_losses(again, range(2, UPDATES)), again.module_state_dict()


def assert_equal(got: tuple[list[float], dict[str, Tensor]], want: tuple[list[float], dict[str, Tensor]]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    for name, tensor in want[1].items():
        if name != "again.weight":  # the same tensor as outer.weight
            torch.testing.assert_close(got[1][name], tensor, rtol=1e-6, atol=1e-6)


def test_the_last_checkpoint_is_loaded_whatever_its_tag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, *_ = megacore.initialize(model=net(), config=document(), **UNWATCHED)
    engine_losses(engine, range(1))
    engine.save_checkpoint(tmp_path)
    engine_losses(engine, range(1, 3))
    engine.save_checkpoint(tmp_path, tag="epoch2")
    path, _ = engine.load_checkpoint(tmp_path)
    assert (Path(str(path)).parent, engine.global_steps) == (tmp_path / "epoch2", 3)
    assert (engine.local_rank, engine.zero_optimization_stage()) == (0, 0)
    assert engine.load_checkpoint(tmp_path, tag="epoch3") == (None, {})
    assert f"note: {tmp_path / 'epoch3'} does not exist: nothing is loaded" in capsys.readouterr().err
    engine.save_checkpoint(tmp_path)
    path, _ = engine.load_checkpoint(tmp_path)
    assert Path(str(path)).parent == tmp_path


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 1, 3])
def test_replicas_and_zero_stages_equal_plain_torch_also_after_a_resume(zero: int, tmp_path: Path) -> None:
    results = run_distributed(on_rank, 2, zero, str(tmp_path))
    for result in results:
        assert_equal(result, plain(2))


@pytest.mark.parametrize(("form", "bound"), [("bf16", 0.05), ("fp16", 0.01)])
def test_sixteen_bits_stay_near_fp32(form: str, bound: float) -> None:
    settings = {"enabled": True, **({"initial_scale_power": 8} if form == "fp16" else {})}
    engine, *_ = megacore.initialize(model=net(), config=document(**{form: settings}), **UNWATCHED)
    assert next(engine.module.parameters()).dtype == (torch.bfloat16 if form == "bf16" else torch.float16)
    losses, _ = plain(1)
    assert engine_losses(engine, range(UPDATES)) == pytest.approx(losses, rel=bound)
    assert engine.module_state_dict()["head.weight"].dtype == torch.float32  # master weights


def test_the_learning_rate_is_that_of_the_configuration_or_of_a_scheduler_of_torchs() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 4e-3, "warmup_num_steps": 4, "warmup_type": "linear"}}
    config = document(scheduler=scheduler)
    engine, optimizer, _, schedule = megacore.initialize(model=net(), config=config, **UNWATCHED)
    rates = []
    for step in range(UPDATES):
        rates.append(optimizer.param_groups[0]["lr"])
        assert schedule.get_last_lr() == [rates[-1]] == engine.get_lr()
        engine_losses(engine, range(step, step + 1))
        assert engine.pipeline.lr == rates[-1]
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])
    assert_equal(([], engine.module_state_dict()), ([], plain(1, rates)[1]))

    def halved(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    engine, _, _, _ = megacore.initialize(model=net(), config=document(), lr_scheduler=halved, **UNWATCHED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = engine_losses(engine, range(UPDATES))
    expected = plain(1, [1e-2 * 0.5**step for step in range(UPDATES)])
    assert_equal((losses, engine.module_state_dict()), expected)


class Loss(nn.Module):
    """A model whose output is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x, gain=2.0)["logits"], y)


class Numbered(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 4 * MICRO

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((5,), float(index)), torch.tensor(index % 4)


def test_train_batch_takes_a_model_that_returns_its_loss() -> None:
    engine, *_ = megacore.initialize(model=Loss(), config=document(), **UNWATCHED)
    losses = []
    for step in range(UPDATES):
        losses.append(float(engine.train_batch(iter([data(step, 0), data(step, 1)]))))
    want_losses, want = plain(1)
    assert losses == pytest.approx(want_losses, rel=1e-6)
    torch.testing.assert_close(engine.module_state_dict()["net.head.weight"], want["head.weight"], rtol=1e-6, atol=1e-6)
    evaluated = float(engine.eval_batch(iter([data(0, 0), data(0, 1)])))
    with torch.no_grad():
        expected = sum(float(engine.module(*data(0, number))) for number in range(2)) / 2
    assert evaluated == pytest.approx(expected, rel=1e-6)


def test_training_data_become_a_loader_of_microbatches() -> None:
    engine, _, loader, _ = megacore.initialize(model=Loss(), config=document(), training_data=Numbered(), **UNWATCHED)
    assert loader is not None
    seen = sorted(int(x) for inputs, _ in loader for x in inputs[:, 0])
    assert seen == list(range(4 * MICRO))
    for _ in range(3):  # more than an epoch
        engine.train_batch()
    assert engine.global_steps == 3


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        (
            {"optimizer": {"type": "ZeroOneAdam"}, "zero_optimization": {"stages": 1}},
            {},
            "is not a key of.*\n.*ZeroOneAdam",
        ),
        ({"optimizer": {"type": "Muon"}}, {}, "optimizer muon of an engine needs the names of the matrices"),
        ({"scheduler": {"type": "LRRangeTest"}}, {}, "needs the length of the run, which an engine does not know"),
        ({"checkpoint": {"writer": {"decoupled": True}}}, {}, "--async-save is of the training programs"),
        ({}, {"mpu": object()}, "mpu is given"),
        ({}, {"model_parameters": []}, "model_parameters leaves out inner.weight"),
    ],
)
def test_what_is_not_possible_is_refused(changes: dict[str, Any], arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        megacore.initialize(model=net(), config=document(**changes), **arguments, **UNWATCHED)


def test_two_optimizers_and_several_decays_are_refused() -> None:
    model, config = net(), document()
    with pytest.raises(ConfigError, match="the configuration has one too"):
        megacore.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=config, **UNWATCHED)
    del config["optimizer"]
    only_vectors, decaying = groups(model), [group | {"weight_decay": 0.1} for group in groups(model)]
    only_vectors[0]["weight_decay"], only_vectors[1]["weight_decay"] = 0.0, 0.1
    with pytest.raises(ConfigError, match="give the matrices one value, and the vectors one value or 0"):
        megacore.initialize(model=model, optimizer=torch.optim.AdamW(only_vectors), config=config, **UNWATCHED)
    with pytest.raises(ConfigError, match="give vectors a group with weight_decay 0"):
        megacore.initialize(model=model, model_parameters=decaying, config=document(), **UNWATCHED)


def test_a_step_that_overflows_or_is_not_finite_changes_nothing() -> None:
    settings = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
    scheduler = torch.optim.lr_scheduler.StepLR
    engine, _, _, schedule = megacore.initialize(
        model=net(), config=document(fp16=settings), lr_scheduler=lambda made: scheduler(made, 1, 0.5), **UNWATCHED
    )
    before = engine.module_state_dict()
    with pytest.warns(UserWarning, match="step 1 is skipped"):
        engine_losses(engine, range(1))
    assert schedule.get_last_lr() == [1e-2]
    assert all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())
    engine, *_ = megacore.initialize(model=net(), config=document(), **UNWATCHED)
    for number in range(ACCUMULATION):
        x, y = data(0, number)
        engine.backward(F.cross_entropy(engine(x / (1 - number))["logits"], y))
    with pytest.warns(UserWarning, match="step 1 is skipped"):
        engine.step()
    assert all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())
    engine_losses(engine, range(1, 2))
    assert engine.global_steps == 2


def test_the_script_of_the_manual_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "guides" / "any-model.md").read_text(encoding="utf-8")
    part = manual.partition("## The API of DeepSpeed")[2]
    (script,) = re.findall(r"```python\n(.*?)```", part.partition("\n## ")[0], re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    assert [path.name for path in Path("output/any").glob("step_*.json")] == ["step_00000010.client.json"]


def test_a_loop_in_the_wrong_order_is_refused() -> None:
    engine, optimizer, *_ = megacore.initialize(model=net(), config=document(), **UNWATCHED)
    with pytest.raises(UserError, match=r"call engine\.step"):
        optimizer.step()
    for number in range(ACCUMULATION):
        engine.backward(F.cross_entropy(engine(data(0, number)[0])["logits"], data(0, number)[1]))
    with pytest.raises(UserError, match="is called for microbatch 3 of a step of 2"):
        engine.backward(torch.zeros((), requires_grad=True))


# ---- the runtime


EAGER, RENDEZVOUS = 8, 1 << 19  # elements: 32 bytes, 2 MiB


@dataclass(frozen=True)
class Microbatch:
    index: int
    values: Tensor


class Scale(nn.Module):
    """x times a number to learn."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.weight = replicated(1)
        with torch.no_grad():
            self.weight.fill_(factor(stage))

    def forward(self, x: Tensor) -> Tensor:
        self.last_input = weakref.ref(x)
        return x * self.weight


class Summed:
    """The loss is the weighted sum of what the last stage gives, and messages have `size` elements."""

    loss_shape = evaluation_shape = ()

    def __init__(self, size: int, device: torch.device) -> None:
        self.streams, self.size = RandomStreams(0, device), size

    def first_input(self, microbatch: Microbatch) -> Tensor:
        return microbatch.values

    def last_inputs(self, weight: Any, microbatch: Microbatch) -> tuple[Tensor, ...]:
        return ()

    def loss(self, output: Tensor, microbatch: Microbatch) -> Tensor:
        return output.sum() * (microbatch.index + 1)

    evaluation_loss = loss

    def stage_input_specs(self, microbatch: Microbatch, stage: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec((self.size,), torch.float32),)


class One:
    """No weight."""

    def value(self) -> Tensor:
        return torch.ones(())


class Nobody:
    """Gradients stay where autograd puts them."""

    def begin_backward(self, chunk: int, *, last: bool, all_weights: bool = False) -> None: ...
    def end_backward(self, chunk: int) -> None: ...


def factor(stage: int) -> float:
    return 2.0 if stage % 2 else 0.5


def run_cases(rank: int, world_size: int, cases: list[tuple[str, int, int, int]]) -> None:
    """Each case: schedule, microbatches, virtual stages, elements of a message."""
    mesh = build_mesh(ResolvedParallel(pp=world_size, dp=1, device="cpu"))
    for name, count, virtual, size in cases:
        stages, held = world_size * virtual, placement_of(name, world_size, virtual).stages_of(rank)
        chunks = [
            Stage([LayerSpec(name=f"layer{s}", build=lambda s=s: Scale(s), parameters=1, is_block=True)])  # type: ignore[misc]
            for s in held
        ]
        runtime = PipelineRuntime(
            chunks,
            mesh.pipeline,
            transport=Transport(mesh.pipeline, mesh.device),
            parallel=ResolvedParallel(pp=world_size, dp=1, schedule=name, virtual_stages=virtual),  # type: ignore[arg-type]
            task=Summed(size, mesh.device),
        )
        batch = [Microbatch(i, torch.full((size,), float(i + 1))) for i in range(count)]
        total = runtime.train_step(batch, One(), Nobody())
        whole = size * sum((i + 1.0) ** 2 for i in range(count))  # of the loss, but for the product of all factors
        product = torch.tensor([factor(s) for s in range(stages)]).prod().item()
        if runtime.holds_loss:
            assert total.item() == pytest.approx(whole * product, rel=1e-6), (name, count, virtual, size)
        for chunk, stage in zip(chunks, held, strict=True):
            (weight,) = chunk.parameters()
            assert stage == 0 or chunk.layers[0].last_input() is None, "a microbatch is held after the step"  # type: ignore[operator]
            assert weight.grad is not None
            assert weight.grad.item() == pytest.approx(whole * product / factor(stage), rel=1e-5)
        evaluated = runtime.evaluate(batch)
        assert not runtime.holds_loss or evaluated.item() == pytest.approx(whole * product, rel=1e-6)


def random_cases(ranks: int, number: int) -> list[Any]:
    draw = random.Random(ranks)
    found = []
    for _ in range(number):
        name = draw.choice(SCHEDULES)
        virtual = draw.randint(2, 3) if name == "interleaved" else 1 + (name in V_SCHEDULES)
        size = draw.choice([EAGER, draw.randint(1, 5000), RENDEZVOUS])
        found.append((name, draw.randint(1, 6 if size == RENDEZVOUS else 16), virtual, size))
    return found


@pytest.mark.parametrize(
    ("ranks", "number"), [(4, 8), *(pytest.param(ranks, 40, marks=pytest.mark.slow) for ranks in (2, 3, 4, 5))]
)
def test_no_case_hangs_or_miscounts(ranks: int, number: int) -> None:
    run_distributed(run_cases, ranks, random_cases(ranks, number), timeout=300, stay=True)


def test_a_loss_of_another_shape_is_refused() -> None:
    """Autograd's engine would sum a gradient of the task's shape."""
    mesh, task = Mesh(device=torch.device("cpu")), Summed(4, torch.device("cpu"))
    task.loss_shape = (2,)  # type: ignore[assignment]
    stage = Stage([LayerSpec(name="layer0", build=lambda: Scale(0), parameters=1, is_block=True)])
    transport = Transport(mesh.pipeline, mesh.device)
    runtime = PipelineRuntime(
        [stage], mesh.pipeline, transport=transport, parallel=ResolvedParallel(pp=1, dp=1), task=task
    )
    with pytest.raises(ValueError, match=r"the loss has the shape \(\), and its task says \(2,\)"):
        runtime.train_step([Microbatch(0, torch.ones(4))], One(), Nobody())
