"""What the engine promises beside right numbers: lazy layers, equal bits, state on any layout, and clear refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from megacore.config import (
    AdamWConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    WatchConfig,
)
from megacore.errors import ConfigError, UserError
from megacore.layers.block import TransformerBlock
from megacore.layers.context import BuildContext
from megacore.layers.rotary import Rotary
from megacore.parallel.context import SequenceShards
from megacore.parallel.mesh import Group
from megacore.parallel.random import RandomStreams
from megacore.parallel.tensor import VocabParallelEmbedding
from megacore.train.callbacks import Callback, Run
from megacore.train.engine import Layer, PipelineEngine
from tests.distributed import run_distributed
from tests.parallel.test_callbacks import Collect, Diary

BUILT: list[str] = []
UNWATCHED = {"watch": WatchConfig(hang_timeout_minutes=0.0)}  # spares a process per engine


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


def test_a_step_after_the_last_is_refused() -> None:
    engine = engine_of([linear("a")], train_iters=1)
    engine.train_batch(engine.split(*batch(0)))
    with pytest.raises(UserError, match="after step 1, but train_iters is 1"):
        engine.train_batch(engine.split(*batch(1)))


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
    context = BuildContext(device=device, streams=RandomStreams(1, device), beside=("padding",))
    block = TransformerBlock(settings.resolve(seq_length=4), context, "a", mlp=lambda model, context: Experts())
    padding = torch.tensor([[0, 0, 1, 1]])
    block((torch.randn(1, 4, 8), padding))
    assert [each is padding for each in told] == [True]


def test_a_wrong_batch_is_refused() -> None:
    engine = engine_of([linear("a")])
    with pytest.raises(UserError, match="got 3 microbatches, but num_microbatches is 4"):
        engine.train_batch(engine.split(*batch(0))[:3])
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
