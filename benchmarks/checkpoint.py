"""Saving and loading a training state beside torch.save and torch.distributed.checkpoint, and what --async-save stalls.

    python benchmarks/checkpoint.py [--megabytes 768] [--rounds 5] [--directory DIR]

One process, fp32 weights and both moments of AdamW. All save to the same disk and flush it. Ours takes SHA-256 and XXH3
of every byte besides, compares the XXH3 when it loads, and fills the optimizer; the others check nothing. Rounds
alternate; the median counts. To reach: 0.7 of the faster of the two, and a stall below 15% of a save that is waited
for.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from megacore.checkpoint.load import load_checkpoint
from megacore.checkpoint.save import CheckpointSaver
from megacore.checkpoint.state import TrainingState
from megacore.config import CheckpointConfig, Config, DataConfig, OptimizerConfig, TrainingConfig
from megacore.optim.optimizers import build_optimizer
from megacore.parallel.mesh import ALONE, Mesh
from megacore.parallel.sharding import replicated
from megacore.zero.data_parallel import DataParallel, ZeroOptions

WIDTH = 1024


class Layer(torch.nn.Module):
    """A matrix of 4 WIDTH x WIDTH, and a bias."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight, self.bias = replicated(4 * WIDTH, WIDTH), replicated(4 * WIDTH)
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            torch.nn.init.normal_(parameter)
            parameter.named(f"layers.{number}.{name}")


def training_state(megabytes: int) -> TrainingState:
    """Weights and moments of about so many MB, after one update."""
    layers = [Layer(number) for number in range(max(1, round(megabytes * 1e6 / (12 * 4 * WIDTH * WIDTH))))]
    data_parallel = DataParallel([layers], ALONE, options=ZeroOptions(), bucket_bytes=25 << 20)
    optimizer = build_optimizer(data_parallel.segments, OptimizerConfig())
    for owned in data_parallel.segments:
        owned.master.grad = torch.randn_like(owned.master)
    optimizer.step()
    for owned in data_parallel.segments:
        owned.master.grad = None
    return TrainingState(
        step=1,
        consumed_samples=0,
        data_parallel=data_parallel,
        optimizer=optimizer,
        kinds=("exp_avg", "exp_avg_sq"),
        counters={"updates": 1},
    )


def config_of(directory: Path, *, async_save: bool) -> Config:
    return Config(
        training=TrainingConfig(train_iters=1, output_dir=str(directory)),
        data=DataConfig(mock_data=True),
        checkpoint=CheckpointConfig(async_save=async_save),
    )


def timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


class Sides:
    """The ways to save and load one state in a directory."""

    def __init__(self, state: TrainingState, directory: Path) -> None:
        self.state, self.directory = state, directory
        self.tensors = {f"{kind}/{spec.name}": tensor for kind, spec, tensor in state.entries()}
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        mesh = Mesh(device=torch.device("cpu"))
        self.saver = CheckpointSaver(config_of(directory / "ours", async_save=False), mesh)
        self.background = CheckpointSaver(config_of(directory / "background", async_save=True), mesh)

    def save_ours(self) -> None:
        self.saver.begin(self.state)
        self.saver.finish()

    def save_torch(self) -> None:
        with open(self.directory / "torch.pt", "wb") as file:
            torch.save(self.tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def save_dcp(self) -> None:
        dcp.save(
            self.tensors, storage_writer=dcp.FileSystemWriter(self.directory / "dcp", overwrite=True), no_dist=True
        )

    def load_ours(self) -> None:
        load_checkpoint(self.directory / "ours", self.state)

    def load_torch(self) -> None:
        read = torch.load(self.directory / "torch.pt", weights_only=True)
        for name, tensor in self.tensors.items():
            tensor.copy_(read[name])

    def load_dcp(self) -> None:
        dcp.load(self.tensors, storage_reader=dcp.FileSystemReader(self.directory / "dcp"), no_dist=True)


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to write; default: the system's temporary directory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder, torch.no_grad():
        sides = Sides(training_state(args.megabytes), Path(folder))
        seconds: dict[str, list[float]] = {}
        for number in range(args.rounds + 1):
            for name in ("save_ours", "save_torch", "save_dcp", "load_ours", "load_torch", "load_dcp"):
                if name == "save_ours":
                    shutil.rmtree(Path(folder) / "ours", ignore_errors=True)
                if name == "load_ours":
                    sides.tensors = {f"{kind}/{spec.name}": t for kind, spec, t in sides.state.entries()}
                seconds.setdefault(name, []).append(timed(getattr(sides, name)))
            seconds.setdefault("stall", []).append(timed(lambda: sides.background.begin(sides.state)))
            sides.background.finish()
            shutil.rmtree(Path(folder) / "background")
            print(f"round {number}: " + ", ".join(f"{name} {taken[-1]:.2f} s" for name, taken in seconds.items()))
    median = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}  # the first warms up
    print(f"{sides.bytes / 1e6:,.0f} MB")
    for act in ("save", "load"):
        speeds = {who: sides.bytes / median[f"{act}_{who}"] / 1e9 for who in ("ours", "torch", "dcp")}
        faster = max(speeds["torch"], speeds["dcp"])
        print(
            f"{act}: ours {speeds['ours']:.2f} GB/s, torch {speeds['torch']:.2f}, "
            f"torch.distributed.checkpoint {speeds['dcp']:.2f}; ours / the faster {speeds['ours'] / faster:.2f}"
        )
    print(f"stall of --async-save: {median['stall']:.3f} s, {median['stall'] / median['save_ours']:.1%} of a save")


if __name__ == "__main__":
    main()
