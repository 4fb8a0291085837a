"""examples/custom_block, and the optimizer of docs/extend: on every layout they compute what plain torch computes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import custom_block
from gated_convolution import GatedConvolution
from megacore.config import OptimizerConfig, ParallelConfig
from megacore.parallel.mesh import ALONE, build_mesh
from megacore.train.engine import Layer, PipelineEngine
from tests.distributed import run_distributed
from tests.pages import ROOT, write_files


def plain_block(block: GatedConvolution, x: torch.Tensor) -> torch.Tensor:
    """The formula of the docstring, position by position."""
    n = block.norm(x)
    value, gate = block.value(n), block.gate(n)
    mixed = value.clone()
    for position in range(x.shape[1]):
        for back in range(min(position + 1, block.convolution.reach)):
            weight = block.convolution.weight[:, block.convolution.reach - 1 - back]
            mixed[:, position] = mixed[:, position] + weight * value[:, position - back]
    return x + block.down(mixed * torch.sigmoid(gate))


def test_the_block_is_its_formula_and_sees_no_later_position() -> None:
    block = GatedConvolution(6, 8, 3, group=ALONE)
    for parameter in block.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    x = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(2))
    y = block(x)
    torch.testing.assert_close(y, plain_block(block, x), rtol=1e-5, atol=1e-5)
    changed = x.clone()
    changed[:, 4:] = 0
    assert torch.equal(block(changed)[:, :4], y[:, :4])


def losses_of(rank: int, ranks: int, layout: dict[str, int]) -> list[float]:
    return custom_block.train(ParallelConfig(device="cpu", **layout), 4, log_every=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [{"tp": 2}, pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.slow)], ids=str)
def test_the_block_trains_alike_on_every_layout(layout: dict[str, int]) -> None:
    (alone,) = run_distributed(losses_of, 1, {}, init=False)
    assert alone[-1] < alone[0]
    for found in run_distributed(losses_of, 2 * layout.get("pp", 1), layout, init=False):
        assert found == pytest.approx(alone, rel=1e-5)


LR, MOMENTUM, WEIGHT_DECAY = 2e-3, 0.9, 0.01
LAYERS = [
    Layer("in", nn.Linear, 20, 64),
    Layer("act", nn.GELU),
    Layer("mid", nn.Linear, 64, 64),
    Layer("head", nn.Linear, 64, 4),
]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(step))
    return x, x[:, :4].argmax(dim=1)


def signum_of_the_paper(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain torch: one process, the whole batch."""
    modules = {layer.name: layer.build(1234) for layer in LAYERS}
    model = nn.Sequential(*modules.values())
    momenta = [torch.zeros_like(parameter) for parameter in model.parameters()]
    losses = []
    for step in range(steps):
        x, labels = batch(step)
        loss = F.cross_entropy(model(x), labels)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient, momentum in zip(model.parameters(), gradients, momenta, strict=True):
                momentum.mul_(MOMENTUM).add_(gradient, alpha=1 - MOMENTUM)
                decay = WEIGHT_DECAY if parameter.dim() > 1 else 0.0
                parameter.mul_(1 - LR * decay).sub_(momentum.sign(), alpha=LR)
    names = [f"{name}.{local}" for name, module in modules.items() for local, _ in module.named_parameters()]
    return losses, dict(zip(names, model.parameters(), strict=True))


Trained = tuple[list[float], dict[str, list[float]]]


def trained(rank: int, ranks: int, layout: dict[str, int], signum: str) -> Trained:
    mesh = build_mesh(parallel := ParallelConfig(device="cpu", **layout))  # type: ignore[arg-type]
    engine = PipelineEngine(
        LAYERS,
        loss=F.cross_entropy,
        parallel=parallel,
        mesh=mesh,
        num_microbatches=4 // mesh.batch.size,
        optimizer=OptimizerConfig(lr=LR, lr_decay_style="constant", weight_decay=WEIGHT_DECAY, clip_grad=0.0),
        optimizer_settings=runpy.run_path(signum)["SignumConfig"](signum_momentum=MOMENTUM),
        train_iters=5,
        reproducible=True,  # a sign makes much of a rounding error: with this flag there are none between layouts
    )
    losses = [float(engine.train_batch(engine.split(*batch(step)))) for step in range(5)]
    weights = {name: weight.flatten().tolist() for name, weight in engine.state_dict().items()}
    engine.close()
    return losses, weights


_SLOW = [pytest.param(layout, marks=pytest.mark.slow) for layout in ({"zero_stage": 1}, {"zero_stage": 2}, {"pp": 2})]


@pytest.mark.parametrize("layout", [{"zero_stage": 3}, *_SLOW], ids=str)
def test_the_optimizer_takes_the_steps_of_the_paper_on_every_layout(layout: dict[str, int], tmp_path: Path) -> None:
    write_files(ROOT / "docs" / "extend" / "optimizer.md", tmp_path)
    signum = str(tmp_path / "signum.py")
    losses, weights = run_distributed(trained, 1, {}, signum, init=False)[0]
    expected, reference = signum_of_the_paper(5)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert weights.keys() == reference.keys()
    for name, weight in weights.items():
        off = [abs(a - b) > 1e-6 for a, b in zip(weight, reference[name].flatten().tolist(), strict=True)]
        assert sum(off) <= 2, f"{name}: a gradient near 0 may round to the other sign, and no more"
    assert run_distributed(trained, 2, layout, signum, init=False) == [(losses, weights)] * 2
