"""How fast optimizers learn real text: steps to a given loss, each at its best learning rate.

    python -m benchmarks.optimizers                    # the table of docs/reports/measured.md
    python -m benchmarks.optimizers --only adamw muon --steps 300 --hidden 128

The text is the sources of Python's standard library, byte by byte; a tenth of its files is for validation. All runs
begin with the same weights and take the same samples. The loss to reach is that of AdamW after two thirds of the steps,
at its best learning rate. An optimizer's best rate is sought by factors of two: half of it and twice as much end in a
higher loss.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.comparison.configuration import resolved_configuration
from benchmarks.workload import Bytes, add_sizes
from megacore.config import AdamWConfig, ModelConfig, OptimizerConfig
from megacore.config.fields import field_infos
from megacore.parallel.mesh import build_mesh
from megacore.train.gpt_task import GPTTask
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tools.generated_pages import table
from tools.quickstart import source_files

Text = NDArray[np.uint8]
_MOST_BYTES = 8 << 20
_VALIDATION = 10  # one file of so many


@dataclass(frozen=True, kw_only=True)
class Way:
    """An optimizer with its settings, the learning rate that is tried first, and the replicas."""

    optimizer: str
    rate: float
    settings: dict[str, Any]
    weight_decay: float = 0.1
    compression: Literal["none", "bf16", "int8"] = "none"  # of the gradients
    ranks: int = 1  # that share the batch


# Where the workload that benchmarks share leaves the defaults of the flags.
_DEFAULTS = {
    name: field.default
    for kind in (ModelConfig, OptimizerConfig, AdamWConfig)
    for name, field in field_infos(kind).items()
    if name in ("hidden_dropout", "attention_dropout", "untie_embeddings_and_output_weights", "clip_grad", "adam_beta2")
}
WAYS: dict[str, Way] = {
    "adamw": Way(optimizer="adamw", rate=2e-3, settings={}),
    "adamw, bf16 moments": Way(optimizer="adamw", rate=2e-3, settings={"moments_dtype": "bf16"}),
    "adamw, int8 moments": Way(optimizer="adamw", rate=2e-3, settings={"moments_dtype": "int8"}),
    "adamw, int8 gradients, 2 replicas": Way(optimizer="adamw", rate=2e-3, settings={}, compression="int8", ranks=2),
    "onebitadam, 2 replicas": Way(optimizer="onebitadam", rate=2e-3, settings={}, ranks=2),
    "muon": Way(optimizer="muon", rate=8e-3, settings={}),
    "adafactor": Way(optimizer="adafactor", rate=8e-2, settings={}),
    "lamb": Way(optimizer="lamb", rate=4e-2, settings={}),
    "lion": Way(optimizer="lion", rate=1e-3, settings={}, weight_decay=1.0),
}


class Samples(Bytes):
    """So many windows of a text, whose places are drawn at once: the table of docs/reference/optimizers.md is of these
    draws."""

    def __init__(self, text: Text, length: int, samples: int, seed: int) -> None:
        super().__init__(text, length, seed=seed)
        self._starts = np.random.default_rng(seed).integers(0, len(text) - length - 1, samples)

    def __len__(self) -> int:
        return len(self._starts)

    def _start(self, index: int) -> int:
        return int(self._starts[index])


def texts() -> tuple[Text, Text]:
    """The bytes for training and for validation."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(source_files(Path(sysconfig.get_paths()["stdlib"]))):
        parts[number % _VALIDATION == 0].append(path.read_bytes())
    training, validation = (np.frombuffer(b"\n".join(files)[:_MOST_BYTES], np.uint8) for files in parts)
    return training, validation


def losses(way: Way, rate: float, options: argparse.Namespace) -> list[float]:
    """The validation losses of a run, after every `options.every` steps."""
    if way.ranks == 1:
        return losses_of_rank(0, 1, way, rate, options)
    found: list[float] = run_distributed(losses_of_rank, way.ranks, way, rate, options, timeout=600)[0]
    return found


def best_rate(way: Way, options: argparse.Namespace) -> tuple[float, list[float]]:
    """The learning rate whose run ends in the lowest loss, and the losses of that run. A run whose losses are not
    finite counts as the worst."""
    runs: dict[int, list[float]] = {}  # by the power of two by which the first rate is multiplied
    best = 0
    while missing := [power for power in (best, best + 1, best - 1) if power not in runs]:
        power = missing[0]
        runs[power] = losses(way, way.rate * 2.0**power, options)
        best = min(runs, key=lambda power: runs[power][-1] if math.isfinite(runs[power][-1]) else math.inf)
    return way.rate * 2.0**best, runs[best]


def losses_of_rank(rank: int, world_size: int, way: Way, rate: float, options: argparse.Namespace) -> list[float]:
    """Of one of the ranks, which know the same losses."""
    torch.set_num_threads(1)
    data = texts()
    with tempfile.TemporaryDirectory() as directory:
        config = resolved_configuration(
            options,
            directory,
            micro_batch=options.batch // world_size,
            ranks=world_size,
            dp=world_size,
            device="cpu",
            optimizer=way.optimizer,
            lr=rate,
            lr_warmup_iters=options.steps // 20,
            weight_decay=way.weight_decay,
            grad_reduce_compression=way.compression,
            train_iters=options.steps,
            eval_interval=options.every,
            eval_iters=8,
            **_DEFAULTS,
            **way.settings,
        )
        mesh = build_mesh(config.parallel)
        training = Samples(data[0], options.seq, options.steps * options.batch, 1)
        validation = Samples(data[1], options.seq, 8 * options.batch, 2)
        trainer = Trainer(config, mesh, GPTTask(config, mesh), training, validation)
        found = []
        for step in range(1, options.steps + 1):
            trainer.train_step(next(trainer.batches))
            if step % options.every == 0:
                found.append(trainer.evaluate() or 0.0)
    return found


def main(argv: list[str] | None = None) -> int:
    """Train and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, layers=2, hidden=64, seq=64, vocab=256, steps=150, every=5)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), help="default: all; adamw always runs")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, target = [], 0.0
    for name in dict.fromkeys(["adamw", *options.only]):
        rate, found = best_rate(WAYS[name], options)
        if name == "adamw":
            target = found[len(found) * 2 // 3 - 1]
        after = [options.every * (number + 1) for number, loss in enumerate(found) if loss <= target]
        rows.append((f"`{name}`", f"{rate:g}", after[0] if after else "not reached", f"{found[-1]:.3f}"))
        print(*rows[-1], file=sys.stderr, flush=True)
    head = ("optimizer", "best `--lr`", f"steps to a loss of {target:.3f}", f"loss after {options.steps} steps")
    print(table(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
