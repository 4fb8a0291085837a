"""Tokens per second of the pipeline schedules beside torch.distributed.pipelining's, on one model and one batch, and
beside DeepSpeed's PipelineModule where that is installed.

    torchrun --nproc-per-node 2 benchmarks/pipeline.py
    torchrun --nproc-per-node 4 benchmarks/pipeline.py --rounds 6

All train the same GPT (8 layers by default, hidden 256, sequence 256, vocabulary 8192, untied head; AdamW, no clipping)
on 4 microbatches of 2 sequences, on gloo with one thread a rank, the stages cut alike. Rounds alternate between all of
them, and the first step after a change is not counted. Each of ours is compared, round by round, with torch's schedule
of the same name, with DeepSpeed (1F1B) and with the fastest of torch's. The last line is what the runtime itself costs
an action: the time of a stage that does next to nothing, less that of autograd alone on it.

DeepSpeed on a CPU wants DS_ACCELERATOR=cpu in the environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from benchmarks.workload import (
    PlainBlock,
    Step,
    add_sizes,
    configuration,
    dataset,
    megacore_step,
    megacore_trainer,
)
from megacore.config import ParallelConfig, ResolvedConfig
from megacore.models.spec import LayerSpec
from megacore.parallel.mesh import ALONE, Mesh, build_mesh, leave, world_size
from megacore.parallel.random import RandomStreams
from megacore.parallel.sharding import replicated
from megacore.pipeline.runtime import PipelineRuntime
from megacore.pipeline.stage import Stage, TensorSpec
from megacore.pipeline.transport import Transport
from megacore.train.ending import exit_with

ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]

# Schedule -> stages per rank.
OURS: dict[ScheduleName, int] = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zero-bubble": 1}
DEEPSPEED = "DeepSpeed"
THEIRS: dict[ScheduleName, int] = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zero-bubble": 2}


class PlainStage(nn.Module):
    """Some consecutive blocks of a plain GPT-2, with the embedding or the head where it is the first or the last."""

    def __init__(self, config: ResolvedConfig, blocks: int, *, first: bool, last: bool) -> None:
        super().__init__()
        m = config.model
        self.tokens = nn.Embedding(m.vocab_size, m.hidden_size) if first else None
        self.positions = nn.Embedding(config.data.seq_length, m.hidden_size) if first else None
        self.blocks = nn.ModuleList(PlainBlock(m.hidden_size, m.num_attention_heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(m.hidden_size) if last else None
        self.head = nn.Linear(m.hidden_size, m.vocab_size, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def blocks_of(config: ResolvedConfig, stage: range) -> int:
    """How many of a stage's layers are blocks; layer 0 is the embedding and the last one the head."""
    return sum(0 < number <= config.model.num_layers for number in stage)


def theirs(config: ResolvedConfig, mesh: Mesh, name: ScheduleName, stages: list[range]) -> Step:
    """A step under torch's schedule of this name, the stages cut as ours are."""
    training, virtual, last = config.training, THEIRS[name], len(stages) - 1
    own: list[Any] = []
    for index in range(mesh.pipeline.rank, len(stages), mesh.pipeline.size):
        module = PlainStage(config, blocks_of(config, stages[index]), first=index == 0, last=index == last)
        own.append(PipelineStage(module, index, len(stages), mesh.device, group=mesh.pipeline.handle))
    count = training.global_batch_size // training.micro_batch_size

    kinds = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
    many = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}
    schedule = kinds[name](own[0], count, cross_entropy) if virtual == 1 else many[name](own, count, cross_entropy)
    o = config.optimizer
    parameters = [p for stage in own for p in stage.submod.parameters()]
    adamw = torch.optim.AdamW(
        parameters,
        lr=o.lr,
        betas=(config.adamw.adam_beta1, config.adamw.adam_beta2),
        weight_decay=o.weight_decay,
        fused=True,
    )
    data, batch, position = dataset(config), training.global_batch_size, 0

    def step() -> None:
        nonlocal position
        samples = [data[position + i] for i in range(batch)]
        position += batch
        tokens, labels = (torch.stack([torch.as_tensor(s[k]) for s in samples]) for k in ("tokens", "labels"))
        adamw.zero_grad()
        inputs = (tokens,) if mesh.pipeline.is_first else ()
        targets: dict[str, Any] = {"target": labels, "losses": []} if mesh.pipeline.is_last else {}
        schedule.step(*inputs, **targets)
        adamw.step()

    return step


def deepspeeds(config: ResolvedConfig, mesh: Mesh, stages: list[range]) -> Step:
    """A step under DeepSpeed's PipelineModule (1F1B), the stages cut as ours are."""
    import deepspeed
    from deepspeed.pipe import LayerSpec as Layer
    from deepspeed.pipe import PipelineModule

    training, o, last = config.training, config.optimizer, len(stages) - 1
    layers = [
        Layer(PlainStage, config, blocks_of(config, stage), first=index == 0, last=index == last)
        for index, stage in enumerate(stages)
    ]
    deepspeed.init_distributed(dist_backend=dist.get_backend())
    engine, *_ = deepspeed.initialize(
        model=PipelineModule(layers, num_stages=mesh.pipeline.size, loss_fn=cross_entropy, partition_method="uniform"),
        config={
            "train_batch_size": training.global_batch_size,
            "train_micro_batch_size_per_gpu": training.micro_batch_size,
            "gradient_clipping": 0.0,
            "steps_per_print": 1 << 30,
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": o.lr,
                    "betas": [config.adamw.adam_beta1, config.adamw.adam_beta2],
                    "weight_decay": o.weight_decay,
                    "torch_adam": True,
                },
            },
        },
    )
    samples = microbatches(config)
    return lambda: engine.train_batch(data_iter=samples) and None


def microbatches(config: ResolvedConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels without end."""
    data, size, position = dataset(config), config.training.micro_batch_size, 0
    while True:
        samples = [data[position + i] for i in range(size)]
        position += size
        tokens, labels = (torch.stack([torch.as_tensor(s[k]) for s in samples]) for k in ("tokens", "labels"))
        yield tokens, labels


def report(seconds: dict[str, list[float]], tokens: int, ranks: int) -> None:
    """A Markdown table of all, and of ours against theirs."""
    print(f"\n{ranks} ranks, {tokens:,} tokens a step, torch {torch.__version__}\n")
    rates = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    fastest = max((name for name in rates if name.startswith("torch ")), key=rates.__getitem__)
    others = [DEEPSPEED] if DEEPSPEED in rates else []
    heads = ["schedule", "tokens/s", "/ torch's of that name", f"/ {fastest}", *(f"/ {other}" for other in others)]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name in OURS:
        ratios = [
            statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True))
            for other in (f"torch {name}", fastest, *others)
        ]
        print(f"| {name} | {rates[name]:,.0f} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |")
    print("\nTheirs, tokens/s:", ", ".join(f"{name} {rates[name]:,.0f}" for name in rates if name not in OURS))


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, layers=8, microbatches=4, rounds=8, steps=2)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        configs = {
            name: configuration(
                arguments,
                directory,
                parallel=ParallelConfig(
                    pp=world_size(), schedule=name, virtual_stages=virtual, pipeline_balance="flops"
                ),
                micro_batch=arguments.batch // arguments.microbatches,
            )
            for name, virtual in OURS.items()
        }
        mesh = build_mesh(configs["1f1b"].parallel)
        trainers = {name: megacore_trainer(config, mesh) for name, config in configs.items()}
        steps: dict[str, Step] = {name: megacore_step(trainer) for name, trainer in trainers.items()}
        for schedule, virtual in THEIRS.items():
            like = next(ours for ours, stages in OURS.items() if stages == virtual)
            steps[f"torch {schedule}"] = theirs(configs[schedule], mesh, schedule, trainers[like].model.stages)
        if importlib.util.find_spec("deepspeed") is not None:
            steps[DEEPSPEED] = deepspeeds(configs["1f1b"], mesh, trainers["1f1b"].model.stages)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for step in steps.values():
            step()
        for _ in range(arguments.rounds):
            for name, step in steps.items():
                step()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(arguments.steps):
                    step()
                dist.barrier()
                seconds[name].append((time.perf_counter() - start) / arguments.steps)
        if mesh.world.rank == 0:
            report(seconds, arguments.batch * arguments.seq, mesh.world.size)
            print(f"\nruntime: {overhead_microseconds():.0f} microseconds an action")
    leave(mesh)
    return 0


if __name__ == "__main__":
    exit_with(main())
