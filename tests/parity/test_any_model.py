"""The engine trains plain nn.Modules as plain torch does, whatever the layout and the schedule: small models as lists
of layers, their batches and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config import AdamWConfig, OptimizerConfig, ParallelConfig, WatchConfig
from megacore.models.plain import Layer
from megacore.train.engine import PipelineEngine
from tests.distributed import run_distributed
from tests.matrix.runner import changes_of
from tests.parity.runs import gather

SEED = 7
OPTIMIZER = OptimizerConfig(
    lr=1e-2, min_lr=1e-3, lr_decay_style="linear", lr_warmup_iters=2, clip_grad=0.5, weight_decay=0.1
)
ADAMW = AdamWConfig(adam_beta1=0.9, adam_beta2=0.999, adam_eps=1e-8)  # the defaults of torch.optim.AdamW
Pair = tuple[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model and what it is trained on; `batch(step)` is the microbatches of a step, all replicas together."""

    layers: list[Layer]
    batch: Callable[[int], list[Pair]]
    loss: Callable[[Any, Any], Tensor]
    reduction: str = "mean"
    count: Callable[[Any], Tensor] | None = None


class Embed(nn.Module):
    """Token ids -> hidden states, a float factor for each position that later stages only read, and a bool mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(13, 8) * 0.5)
        self.register_buffer("factors", torch.linspace(0.5, 1.5, 5))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factors = self.get_buffer("factors").expand(ids.shape)
        return F.embedding(ids, self.weight), factors, ids != 0


class Mix(nn.Module):
    """Three tensors in, three out, of which two go through as they came."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, factors, mask = x
        change = self.down(torch.tanh(self.up(hidden))) * factors.unsqueeze(-1)
        return hidden + change.masked_fill(~mask.unsqueeze(-1), 0.0), factors, mask


class Unembed(nn.Module):
    """Hidden states -> logits, with the embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(13, 8))

    def forward(self, x: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return x[0] @ self.weight.T


def images(step: int) -> list[Pair]:
    """Four microbatches of different sizes."""
    draw = torch.Generator().manual_seed(step)
    sizes = [3, 2, 4, 3]
    return [(torch.randn(n, 3, 8, 8, generator=draw), torch.randint(0, 10, (n,), generator=draw)) for n in sizes]


def tokens(step: int) -> list[Pair]:
    """Four microbatches with different numbers of tokens that count; -100 do not."""
    draw = torch.Generator().manual_seed(step)
    pairs = []
    for counted in (1, 9, 4, 15):
        targets = torch.randint(0, 13, (3, 5), generator=draw)
        targets.view(-1)[counted:] = -100
        pairs.append((torch.randint(0, 13, (3, 5), generator=draw), targets))
    return pairs


def vectors(step: int) -> list[Pair]:
    """Four microbatches of one size."""
    draw = torch.Generator().manual_seed(step)
    return [(torch.randn(2, 6, generator=draw), torch.randn(2, 6, generator=draw)) for _ in range(4)]


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def counted_tokens(targets: Tensor) -> Tensor:
    return (targets != -100).sum()


CNN = Model(
    layers=[
        Layer("stem", nn.Conv2d, 3, 6, 3, padding=1, bias=False),  # its gradient would be rounding alone
        Layer("norm", nn.BatchNorm2d, 6),
        Layer("relu", nn.ReLU, inplace=True),
        Layer("down", nn.Conv2d, 6, 8, 3, stride=2),
        Layer("act", nn.GELU),
        Layer("pool", nn.AdaptiveAvgPool2d, 2),
        Layer("flat", nn.Flatten),
        Layer("head", nn.Linear, 32, 10),
    ],
    batch=images,
    loss=F.cross_entropy,
)
TOKENS = Model(
    layers=[
        Layer("embed", Embed),
        *(Layer(f"mix{i}", Mix) for i in range(4)),
        Layer("again", Mix).tied("mix0"),
        Layer("head", Unembed).tied({"weight": "embed.weight"}),
    ],
    batch=tokens,
    loss=summed_cross_entropy,
    reduction="sum",
    count=counted_tokens,
)
# Stages without parameters, one of them the first, wherever stages are dealt out evenly.
BARE = Model(
    layers=[
        Layer("twice", nn.Identity),
        Layer("in", nn.Linear, 6, 6),
        Layer("tanh", nn.Tanh),
        Layer("out", nn.Linear, 6, 6, bias=False).tied({"weight": "in.weight"}),
    ],
    batch=vectors,
    loss=F.mse_loss,
    count=lambda _: torch.tensor(2.0),
)
MODELS = {"cnn": CNN, "tokens": TOKENS, "bare": BARE}


@dataclass(frozen=True)
class Result:
    """Losses and gradient norms of each step, gradients of the first (clipped), and what the training leaves."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    final: dict[str, Tensor]
    evaluated: float


def plain_torch(model: Model, steps: int) -> Result:
    """nn.Sequential, loss.backward() of every microbatch, clip_grad_norm_ and torch.optim.AdamW."""
    built = [layer.build(SEED) for layer in model.layers]
    _tie(model.layers, built)
    net = nn.Sequential(*built)
    names = {
        id(p): f"{layer.name}.{n}"
        for layer, m in reversed([*zip(model.layers, built, strict=True)])
        for n, p in m.named_parameters()
    }
    matrices = [p for p in net.parameters() if p.dim() >= 2]
    vectors = [p for p in net.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        batch = model.batch(step)
        total = sum(_count(model, inputs, targets) for inputs, targets in batch)
        optimizer.zero_grad()
        losses.append(0.0)
        for inputs, targets in batch:
            loss = _summed(model, net, inputs, targets) / total
            loss.backward()
            losses[-1] += loss.item()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), OPTIMIZER.clip_grad).item())
        if step == 0:
            gradients = {names[id(p)]: p.grad.clone() for p in net.parameters() if p.grad is not None}
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * 0.5 if step == 0 else linear_decay(step + 1, steps)
        optimizer.step()
    net.eval()
    with torch.no_grad():
        batch = model.batch(steps)
        total = sum(_count(model, inputs, targets) for inputs, targets in batch)
        evaluated = float(sum(_summed(model, net, inputs, targets) for inputs, targets in batch) / total)
    final = {names[id(p)]: p.detach() for p in net.parameters()}
    return Result(losses, norms, gradients, final, evaluated)


def linear_decay(step: int, steps: int) -> float:
    """The learning rate of a step from the end of the warm-up on, written out again."""
    progress = (step - 2) / (steps - 2)
    return OPTIMIZER.lr + (OPTIMIZER.end_lr - OPTIMIZER.lr) * progress


def _count(model: Model, inputs: Any, targets: Any) -> float:
    return float(len(inputs) if model.count is None else model.count(targets))


def _summed(model: Model, net: nn.Module, inputs: Any, targets: Any) -> Tensor:
    loss = model.loss(net(inputs.clone()), targets)
    return loss * _count(model, inputs, targets) if model.reduction == "mean" else loss


def _tie(layers: list[Layer], built: list[nn.Module]) -> None:
    by_name = {layer.name: module for layer, module in zip(layers, built, strict=True)}
    for layer, module in zip(layers, built, strict=True):
        local = [name for name, _ in module.named_parameters()]
        ties = {name: f"{layer.ties}.{name}" for name in local} if isinstance(layer.ties, str) else layer.ties
        for name, target in ties.items():
            owner, _, attribute = name.rpartition(".")
            first, _, rest = target.partition(".")
            setattr(module.get_submodule(owner), attribute, by_name[first].get_parameter(rest))


# ---- every layout and schedule


STEPS = 4
# A model, and words as in tests/matrix, by ranks. In `make test` every model, schedule and ZeRO stage is there once.
CASES = {
    1: ["cnn", "tokens zb", "bare compiled"],
    2: ["cnn pp2 interleaved virtual2", "cnn dp2 z3", "tokens pp2 uniform zb", "tokens dp2 z2", "bare pp2"],
    4: ["bare pp4 uniform zb", "tokens pp2 dp2 zb z1"],
}
MORE = {
    2: [
        *(f"{name} pp2 {words}" for name in MODELS for words in ("", "interleaved virtual2", "uniform zb")),
        *("cnn pp2 gpipe", "cnn dp2", "tokens dp2 z1"),
    ],
    4: [
        *(f"{name} {words}" for name in MODELS for words in ("pp4 uniform", "pp4 uniform zb", "pp2 dp2 zb")),
        *("cnn pp4 uniform interleaved virtual2", "cnn pp2 dp2 interleaved virtual2 z3", "tokens pp2 dp2 z2"),
        *("tokens pp2 dp2 interleaved virtual2 z3", "tokens pp2 dp2 zb z3", "bare pp2 dp2 uniform z3"),
        *("bare pp2 dp2 uniform zb z2", "cnn pp4 uniform compiled", "tokens pp2 dp2 zb compiled"),
    ],
}


def parse(case: str) -> tuple[Model, dict[str, Any]]:
    """The model of a case, and its changes by field name."""
    name, _, words = case.partition(" ")
    return MODELS[name], changes_of(words.replace("uniform", "pipeline_balance=uniform"))


def make_engine(case: str) -> PipelineEngine:
    model, changes = parse(case)
    options = {name: changes.pop(name) for name in [*changes] if name.startswith("compile")}
    return PipelineEngine(
        model.layers,
        loss=model.loss,
        reduction=model.reduction,
        count=model.count,
        parallel=ParallelConfig(**{"pp": 1, "dp": 1, "device": "cpu", "bucket_size_mb": 1e-3, **changes}),
        optimizer=OPTIMIZER,
        optimizer_settings=ADAMW,
        num_microbatches=4 // changes.get("dp", 1),
        train_iters=STEPS,
        seed=SEED,
        watch=WatchConfig(hang_timeout_minutes=0.0),
        **options,
    )


def train(case: str) -> Result:
    """Train on this rank; every rank returns what came out."""
    engine, (model, _) = make_engine(case), parse(case)
    own = slice(engine.mesh.batch.rank, None, engine.mesh.batch.size)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        losses.append(float(engine.train_batch(model.batch(step)[own])))
        norms.append(float(engine.grad_norm))
        if step == 0:
            gradients = gather(engine, engine.mesh, lambda owned: owned.gradient)
    final = gather(engine, engine.mesh, lambda owned: owned.master)
    return Result(losses, norms, gradients, final, engine.evaluate(model.batch(STEPS)[own]))


def train_all(rank: int, world_size: int, cases: list[str]) -> list[Result]:
    return [train(case) for case in cases]


@cache
def reference(name: str) -> Result:
    return plain_torch(MODELS[name], STEPS)


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        *(pytest.param(*item, id=f"{item[0]} ranks") for item in CASES.items()),
        *(pytest.param(*item, id=f"{item[0]} ranks more", marks=pytest.mark.slow) for item in MORE.items()),
    ],
)
def test_it_trains_as_plain_torch_does(world_size: int, cases: list[str]) -> None:
    results = run_distributed(train_all, world_size, cases, timeout=240, stay=True)[0]
    for case, found in zip(cases, results, strict=True):
        print(case)  # shown where it fails
        expected = reference(case.split()[0])
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)
        assert found.norms == pytest.approx(expected.norms, rel=1e-6)
        assert found.gradients.keys() == expected.gradients.keys()
        for parameter, gradient in expected.gradients.items():
            error = (found.gradients[parameter] - gradient).abs().max()
            assert float(error) <= 1e-6 * max(1.0, float(gradient.abs().max())), parameter
            torch.testing.assert_close(found.final[parameter], expected.final[parameter], rtol=1e-5, atol=1e-6)
        if not case.startswith("cnn") or "dp" not in case:  # batch norm's running statistics are those of a replica
            assert found.evaluated == pytest.approx(expected.evaluated, rel=1e-6)
