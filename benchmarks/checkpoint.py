"""Saving and loading a training state beside torch.save and torch.distributed.checkpoint, and what --async-save stalls.

    python benchmarks/checkpoint.py [--megabytes 768] [--rounds 5] [--directory DIR]

One process, fp32 weights and both moments of AdamW. All save to the same disk and flush it. Ours takes SHA-256 and XXH3
of every byte besides, compares the XXH3 when it loads, and fills the optimizer; the others check nothing. Rounds
alternate; the median counts. To reach: 0.7 of the faster of the two, and a stall below 15% of a save that is waited
for.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from benchmarks.gpu_check.device import open_device, timed
from benchmarks.gpu_check.markdown import checkpoint as section_of
from benchmarks.gpu_check.records import Records, one_line, part_parser
from benchmarks.in_turn import take_turns
from megacore.checkpoint.load import load_checkpoint, read_together
from megacore.checkpoint.save import CheckpointSaver
from megacore.checkpoint.state import TrainingState
from megacore.config import AdamWConfig, Config, TrainingConfig
from megacore.optim.adamw import AdamW
from megacore.parallel.mesh import ALONE, Mesh
from megacore.parallel.sharding import replicated
from megacore.zero.data_parallel import DataParallel
from megacore.zero.options import ZeroOptions

WIDTH = 1024
SIDES = ("ours", "torch", "dcp")  # dcp: torch.distributed.checkpoint
WAYS = ("ours", "background")


class Layer(torch.nn.Module):
    """A matrix of 4 WIDTH x WIDTH, and a bias."""

    def __init__(self, number: int, device: torch.device) -> None:
        super().__init__()
        self.weight, self.bias = replicated(4 * WIDTH, WIDTH, device=device), replicated(4 * WIDTH, device=device)
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            torch.nn.init.normal_(parameter)
            parameter.named(f"layers.{number}.{name}")


def training_state(megabytes: int, device: torch.device) -> TrainingState:
    """Weights and moments of about so many MB on a device, after one update."""
    layers = [Layer(number, device) for number in range(max(1, round(megabytes * 1e6 / (12 * 4 * WIDTH * WIDTH))))]
    data_parallel = DataParallel([layers], Mesh(device=device), options=ZeroOptions(), bucket_bytes=25 << 20)
    optimizer = AdamW(data_parallel.runs, AdamWConfig(), weight_decay=0.01)
    with torch.no_grad():
        gradients = [torch.randn_like(run.master) for run in data_parallel.runs]
        optimizer.step(data_parallel.runs, gradients, lr=3e-4, factor=torch.ones(()))
    return TrainingState(
        step=1, consumed_samples=1, data_parallel=data_parallel, optimizer=optimizer, counters={"updates": 1}
    )


class Sides:
    """The ways to save and load one state in a directory."""

    def __init__(self, state: TrainingState, directory: Path, device: torch.device) -> None:
        self.state, self.directory, self.device = state, directory, device
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        config = Config(training=TrainingConfig(train_iters=1)).with_values({"mock_data": True})
        ways = {name: {"output_dir": str(directory / name), "async_save": name == "background"} for name in WAYS}
        resolved = (config.with_values(values).resolve(1, vocab_size=1) for values in ways.values())
        self.saver, self.background = (CheckpointSaver(one, Mesh(device=device)) for one in resolved)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of the state as it is now: what is loaded may have replaced them."""
        return {f"{kind}/{spec.name}": tensor for kind, spec, tensor, _ in self.state.entries()}

    def save_ours(self) -> None:
        self.saver.begin(self.state)
        self.saver.finish()

    def save_torch(self) -> None:
        with open(self.directory / "torch.pt", "wb") as file:
            torch.save(self.tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def save_dcp(self) -> None:
        writer = dcp.FileSystemWriter(self.directory / "dcp", overwrite=True)
        dcp.save(self.tensors, storage_writer=writer, no_dist=True)

    def load_ours(self) -> None:
        load_checkpoint(*read_together(self.directory / "ours", ALONE), self.state, ALONE)

    def load_torch(self) -> None:
        read = torch.load(self.directory / "torch.pt", weights_only=True)
        for name, tensor in self.tensors.items():
            tensor.copy_(read[name])

    def load_dcp(self) -> None:
        dcp.load(self.tensors, storage_reader=dcp.FileSystemReader(self.directory / "dcp"), no_dist=True)

    def save_and_load(self, who: str) -> tuple[float, float]:
        """Seconds of each."""
        if who == "ours":
            shutil.rmtree(self.directory / who, ignore_errors=True)
        save, load = (timed(getattr(self, f"{act}_{who}"), self.device) for act in ("save", "load"))
        print(f"{who}: save {save:.2f} s, load {load:.2f} s", flush=True)
        return save, load

    def stall(self) -> float:
        """Seconds for which --async-save keeps a run waiting."""
        seconds = timed(lambda: self.background.begin(self.state), self.device)
        self.background.finish()
        shutil.rmtree(self.directory / "background")
        return seconds


def measure(sides: Sides, rounds: int) -> dict[str, float]:
    """Median seconds of every save and load, and of what --async-save stalls.

    Where one of the others cannot save what lies on this device, its figures are missing.

    Args:
        sides: what is compared.
        rounds: how many count.
    """

    def failed(who: str, error: BaseException) -> None:
        if who in ("ours", "stall"):
            raise error
        print(f"{who}: {one_line(error)}")

    runs: dict[str, Callable[[], Any]] = {who: partial(sides.save_and_load, who) for who in SIDES}
    errors = (Exception, CheckpointException)  # the latter is no Exception
    taken = take_turns({**runs, "stall": sides.stall}, rounds, failures=errors, failed=failed)
    median = {"stall": statistics.median(taken.pop("stall"))}
    for who, pairs in taken.items():
        save, load = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
        median |= {f"save_{who}": save, f"load_{who}": load}
    return median


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print its figures."""
    parser = part_parser(__doc__, device="cpu")
    parser.add_argument("--megabytes", type=int, help="of the training state (768; 50 with --small)")
    parser.add_argument("--rounds", type=int, help="that count (5; 1 with --small)")
    parser.add_argument("--directory", type=Path, help="where to write; default: the system's temporary directory")
    args = parser.parse_args(argv)
    device = open_device(args.device)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder, torch.no_grad():
        sides = Sides(training_state(args.megabytes or (50 if args.small else 768), device), Path(folder), device)
        median = measure(sides, args.rounds or (1 if args.small else 5))
    record = {"bytes": sides.bytes, "seconds": median}
    print(section_of(record))
    Records(args.records).add("checkpoint", **record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
