"""Layouts whose ranks share one device, bit for bit against one rank on that device.

    python -m benchmarks.gpu_check.layouts --device cuda

Each trains a few steps with --reproducible and the device's own kernels, in fp32 and bf16: samples, losses, gradient
norms, weights and optimizer state must be equal, as a ledger compares them. What the ranks exchange goes through host
memory (one_device.py): this shows numbers, and says nothing of NCCL or of speed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.device import open_device
from benchmarks.gpu_check.one_device import share_one_device
from benchmarks.gpu_check.records import Records, part_parser, read_records
from megacore.audit.check import CAUSES
from megacore.audit.recorder import StepRecords
from megacore.commands.pretrain_gpt import read_config, trainer_of
from megacore.parallel.mesh import build_mesh, compute_reproducibly
from tests.distributed import RankFailed, run_distributed

STEPS = 3
_MODEL = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 1024"
_SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 128"
_RUN = (
    f"--mock-data --reproducible --train-iters {STEPS} --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
    "--lr-warmup-iters 1 --eval-interval 0 --no-memory-check"
)
_LLAMA = "--normalization RMSNorm --activation swiglu --position-embedding-type rope --disable-bias-linear"
MODELS = {
    "gpt2": "--hidden-dropout 0.1",
    "llama": f"{_LLAMA} --num-query-groups 2",
    "experts": f"{_LLAMA} --num-experts 4 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.1",
}
_DENSE = (
    *("--tp 2", "--tp 2 --sequence-parallel", "--pp 2", "--pp 2 --schedule zero-bubble", "--cp 2"),
    *("--dp 2", "--dp 2 --zero-stage 1", "--dp 2 --zero-stage 3"),
)
LAYOUTS: dict[str, Sequence[str]] = {
    "gpt2": _DENSE,
    "llama": _DENSE,
    "experts": ("--tp 2 --sequence-parallel", "--pp 2", "--cp 2", "--dp 2 --ep 2", "--dp 2 --ep 2 --zero-stage 2"),
}
Steps = list[dict[str, Any]]


def train(rank: int, ranks: int, runs: Sequence[str], device: str, path: str) -> None:
    """Take the steps of runs on this rank; the first one writes what a ledger says of them."""
    sharing = share_one_device(open_device(device).type)
    compute_reproducibly()
    try:
        for words in runs:
            with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(None):
                given = [*words.split(), "--device", device, "--output-dir", directory]
                config = read_config(given, prog="layouts", exits=False)
                trainer = trainer_of(config, build_mesh(config.parallel))
                said, steps = StepRecords(trainer), Steps()
                for _ in range(STEPS):
                    record, numbers = said.of(trainer.train_step(next(trainer.batches)), with_state=True)
                    steps.append(said.completed(record, numbers.cpu()))
                trainer.model.data_parallel.ready()
            if rank == 0:
                Records(Path(path)).add("steps", words=words, steps=steps)
    finally:
        sharing()


def difference(steps: Steps, expected: Steps) -> str:
    """The first thing of the first step that differs, in the order of the computation; empty where all is equal."""
    for step, alone in zip(steps, expected, strict=True):
        for name in CAUSES:
            if step.get(name) != alone.get(name):
                return f"{name} of step {step['step']}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all layouts of all models; 1 if one differs or fails."""
    options, wrong = part_parser(__doc__).parse_args(argv), 0
    records = Records(options.records)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine, perhaps without a network
    os.environ["PRETEND_DEVICES"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "steps.jsonl")
        for model, flags in MODELS.items():
            shape, error = _SMALL if options.small else _MODEL, ""
            bases = {precision: f"{_RUN} {shape} {flags} --precision {precision}" for precision in ("fp32", "bf16")}
            runs = {(p, layout): f"{base} {layout}" for p, base in bases.items() for layout in LAYOUTS[model]}
            for ranks, wanted in ((1, [*bases.values()]), (2, [*runs.values()])):
                try:
                    run_distributed(train, ranks, wanted, options.device, str(path), init=False, timeout=300)
                except RankFailed as failure:
                    error = f"{type(failure.exception).__name__}: {' '.join(str(failure.exception).split())[:200]}"
                    print(failure, file=sys.stderr)
            found = {one["words"]: one["steps"] for one in read_records(path)}
            for (precision, layout), words in runs.items():
                both = found.get(words), found.get(bases[precision])
                said = difference(both[0], both[1]) if both[0] and both[1] else error or "no result"
                wrong += bool(said)
                records.add("layout", model=model, precision=precision, layout=layout, said=said or "equal")
                print(f"{model:<8} {precision}  {layout:<32} {said or 'equal'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
