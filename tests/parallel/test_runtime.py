"""The runtime on real processes: any schedule, any number of microbatches, small and large messages, without a hang and
with the right gradients."""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.config import ResolvedParallel
from megacore.config.parallel import V_SCHEDULES
from megacore.models.spec import LayerSpec
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.parallel.random import RandomStreams
from megacore.parallel.sharding import replicated
from megacore.pipeline.runtime import PipelineRuntime
from megacore.pipeline.schedule import SCHEDULES, placement_of
from megacore.pipeline.stage import Stage, TensorSpec
from megacore.pipeline.transport import Transport
from tests.distributed import run_distributed

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
