"""Tokens per second and memory of ZeRO stages 0 to 3 beside torch's own data parallelism, stage by stage.

    torchrun --nproc-per-node 2 benchmarks/zero.py                     # tokens/s, all side by side in one run
    torchrun --nproc-per-node 2 benchmarks/zero.py --only "stage 2"    # one of them alone, and its peak memory

| here | torch |
|---|---|
| stage 0 | DistributedDataParallel |
| stage 1 | DistributedDataParallel with ZeroRedundancyOptimizer |
| stage 2 | fully_shard(reshard_after_forward=False) |
| stage 3 | fully_shard(reshard_after_forward=True) |

All train the same GPT (4 layers, hidden 256, sequence 256, vocabulary 8192, untied head; AdamW, no clipping) on the
same number of sequences, on gloo with one thread a rank, or on NCCL where there are GPUs. A stage and its peer are in
memory together, no others: what models leave in the allocator decides how often the next ones ask the system for
memory, up to a tenth of a step. Rounds alternate between the two; ratios are taken round by round, and their median is
reported. Peak memory is the process's own (VmHWM), which only a run of one mode alone can tell apart: run "none" for
what is there before any model.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workload import PlainGPT, Step, add_sizes, configuration, dataset, megacore_step, megacore_trainer
from megacore.config import ParallelConfig, ResolvedConfig
from megacore.parallel.mesh import Mesh, build_mesh, leave, world_size
from megacore.train.ending import exit_with

PEERS = {"stage 0": "DDP", "stage 1": "ZeroRedundancyOptimizer", "stage 2": "FSDP2, kept", "stage 3": "FSDP2"}


def theirs(config: ResolvedConfig, mesh: Mesh, name: str) -> Step:
    """A step of the plain model under torch's own data parallelism, as its documentation writes it."""
    training = config.training
    torch.manual_seed(1)
    model: nn.Module = PlainGPT(config).to(mesh.device)
    if name.startswith("FSDP2"):
        for block in (*model.blocks, model):  # type: ignore[misc]
            fully_shard(block, reshard_after_forward=name == "FSDP2")
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    o = config.optimizer
    settings = {
        "lr": o.lr,
        "betas": (config.adamw.adam_beta1, config.adamw.adam_beta2),
        "weight_decay": o.weight_decay,
        "fused": True,
    }
    optimizer: torch.optim.Optimizer = (
        ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **settings)  # type: ignore[arg-type]
        if name == "ZeroRedundancyOptimizer"
        else torch.optim.AdamW(parameters, **settings)  # type: ignore[arg-type]
    )
    data, size = dataset(config), training.micro_batch_size
    pieces = training.global_batch_size // size // mesh.batch.size
    position = mesh.batch.rank

    def step() -> None:
        nonlocal position
        optimizer.zero_grad()
        for piece in range(pieces):
            samples = [data[position * size + i] for i in range(size)]
            position += mesh.batch.size
            tokens, labels = (
                torch.stack([torch.as_tensor(s[k]) for s in samples]).to(mesh.device) for k in ("tokens", "labels")
            )
            _synchronize_last(model, last=piece == pieces - 1)
            loss: Tensor = model(tokens, labels) / pieces
            loss.backward()
        optimizer.step()

    return step


def _synchronize_last(model: nn.Module, *, last: bool) -> None:
    """Gradients travel in the last microbatch alone, where torch can wait (FSDP2 keeps to its sharded gradients)."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = last


def measure(steps: dict[str, Step], rounds: int, count: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds per step of each, round by round; every rank waits for the slowest.

    The first step after a change is not counted: it runs on what the other left in the allocator and in the caches.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                step()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            dist.barrier()
            seconds[name].append((time.perf_counter() - start) / count)
    return seconds


def report(seconds: dict[str, list[float]], tokens: int, ranks: int) -> None:
    """One Markdown table: every stage beside its peer."""
    print(f"\n{ranks} ranks, {tokens:,} tokens a step, torch {torch.__version__}\n")
    print("| here | tokens/s | torch | tokens/s | ratio (median, range of rounds) |\n|---|---|---|---|---|")
    for stage, peer in PEERS.items():
        if stage in seconds and peer in seconds:
            ratios = [b / a for a, b in zip(seconds[stage], seconds[peer], strict=True)]
            mine, other = (tokens / statistics.median(seconds[name]) for name in (stage, peer))
            spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"
            print(f"| {stage} | {mine:,.0f} | {peer} | {other:,.0f} | {spread} |")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, rounds=10, steps=2)
    parser.add_argument("--micro-batch", type=int, help="default: a rank's share of the batch at once")
    parser.add_argument("--only", choices=["none", *PEERS, *PEERS.values()], help="this one alone, and its peak memory")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        micro_batch = arguments.micro_batch or arguments.batch // world_size()
        configs = {
            f"stage {stage}": configuration(
                arguments,
                directory,
                parallel=ParallelConfig(dp=world_size(), zero_stage=stage),
                micro_batch=micro_batch,
            )
            for stage in range(4)
        }
        mesh = build_mesh(configs["stage 0"].parallel)
        base = _peak_mib(mesh.device)
        seconds: dict[str, list[float]] = {}
        for pair in PEERS.items():
            steps = {
                name: megacore_step(megacore_trainer(configs[name], mesh))
                if name in PEERS
                else theirs(configs["stage 0"], mesh, name)
                for name in pair
                if arguments.only in (None, name)
            }
            seconds |= measure(steps, arguments.rounds, arguments.steps, mesh.device)
            del steps
            gc.collect()
        if mesh.world.rank == 0 and arguments.only is None:
            report(seconds, arguments.batch * arguments.seq, mesh.world.size)
        elif mesh.world.rank == 0:
            print(f"{arguments.only}: peak {_peak_mib(mesh.device):,.0f} MiB, {base:,.0f} before the model")
    leave(mesh)
    return 0


def _peak_mib(device: torch.device) -> float:
    if device.type != "cpu":
        return float(torch.accelerator.max_memory_allocated()) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    exit_with(main())
