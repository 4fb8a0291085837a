"""What the pipeline's runtime itself costs an action, in microseconds.

    python benchmarks/pipeline_overhead.py

The time of a stage that does next to nothing, on one rank, less that of autograd alone on it; the best of many runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from megacore.config import ParallelConfig
from megacore.models.spec import LayerSpec
from megacore.parallel.mesh import ALONE
from megacore.parallel.random import RandomStreams
from megacore.parallel.sharding import replicated
from megacore.pipeline.runtime import PipelineRuntime
from megacore.pipeline.stage import Stage, TensorSpec
from megacore.pipeline.transport import Transport


class _Nothing(nn.Module):
    """x times one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = replicated(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _Microbatch:
    index = 0
    values = torch.ones(1)


class _Sum:
    loss_shape = evaluation_shape = ()

    def __init__(self, streams: RandomStreams) -> None:
        self.streams = streams

    def first_input(self, microbatch: _Microbatch) -> Tensor:
        return microbatch.values

    def last_inputs(self, microbatch: _Microbatch) -> tuple[Tensor, ...]:
        return ()

    def loss(self, output: Tensor, microbatch: _Microbatch) -> Tensor:
        return output.sum()

    evaluation_loss = loss

    def stage_input_specs(self, microbatch: _Microbatch, stage: int) -> tuple[TensorSpec, ...]:
        return ()  # there is one stage


class _One:
    def __init__(self) -> None:
        self._value = torch.ones(())

    def value(self) -> Tensor:
        return self._value


class _NoSink:
    def begin_backward(self, chunk: int, *, last: bool, all_weights: bool = False) -> None: ...
    def end_backward(self, chunk: int) -> None: ...


def overhead_microseconds(count: int = 200) -> float:
    """What the runtime adds to an action on one rank."""
    device = torch.device("cpu")
    stage = Stage([LayerSpec(name="nothing", build=_Nothing, parameters=1, is_block=True)])
    runtime = PipelineRuntime(
        [stage],
        ALONE,
        transport=Transport(ALONE, device),
        parallel=ParallelConfig(schedule="1f1b"),
        task=_Sum(RandomStreams(0, device)),
    )
    batch = [_Microbatch()] * count
    one = torch.ones(())

    def alone() -> None:
        for microbatch in batch:
            stage(microbatch.values).sum().backward(one)

    def best(call: Callable[[], object]) -> float:
        times = []
        for _ in range(20):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    return (best(lambda: runtime.train_step(batch, _One(), _NoSink())) - best(alone)) / (2 * count) * 1e6


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{overhead_microseconds():.0f} microseconds per action")
