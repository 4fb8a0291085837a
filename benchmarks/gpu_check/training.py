"""Training of one shape in bf16 at the largest micro batch that fits: speed, memory, and where the time goes.

    python -m benchmarks.gpu_check.training --shape gpt2-xl --mode plain

A step is one microbatch and one update, so that the cost of the update shows in full. Weights are drawn on the device:
the trainer's own initialisation is the same on every layout, and takes longer than the measurement. Dropout is off.
Times are medians of single steps between device events, with the data loader running; nothing waits for the device
in between but the trainer itself.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.gpu_check.device import heaviest, host_synchronisations, open_device, total_memory
from benchmarks.gpu_check.fitting import largest_fitting
from benchmarks.gpu_check.records import Records, one_line, part_parser, read_records
from benchmarks.workload import megacore_step, megacore_trainer
from megacore.config import Config, ResolvedConfig
from megacore.config.cli import parse_config
from megacore.data.gpt.build import vocabulary_size
from megacore.models.flops import block_flops, flops_per_sequence, head_flops
from megacore.parallel.mesh import Mesh
from megacore.parallel.sharding import ShardedParameter
from megacore.plan.memory import plan_memory
from megacore.train.callbacks import Callback
from megacore.train.metrics import device_name, peak_memory_bytes, synchronize
from megacore.train.peaks import peak_tflops
from megacore.train.trainer import Trainer
from megacore.zero.memory import measured_bytes

Mode = Literal["plain", "compiled", "offload"]
_WARM_UP_STEPS, _STEPS, _LEAST_STEPS = 3, 12, 3
_SECONDS_OF_STEPS = 15.0
_LARGEST_MICRO_BATCH, _LARGEST_SMALL = 1024, 4


class Shape(NamedTuple):
    """A model as flags of pretrain_gpt.py: to measure, and one of the same kind that any machine can train."""

    flags: str
    small: str


_TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 128 "
    "--vocab-size 512 --seq-length 64"
)
SHAPES = {
    "gpt2-small": Shape("--preset gpt2-small", "--preset gpt2-tiny"),
    "gpt2-xl": Shape("--preset gpt2-xl", "--preset gpt2-tiny --num-layers 3"),
    "llama-3.2-1b": Shape("--preset llama-3.2-1b", f"--preset llama-3.2-1b {_TINY}"),
    # Mixtral's blocks at a size of which one device holds the whole state: 8 experts, of which a token uses 2.
    "experts": Shape(
        "--preset mixtral-8x7b --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --num-query-groups 4 "
        "--ffn-hidden-size 3584 --seq-length 4096",
        f"--preset mixtral-8x7b {_TINY}",
    ),
}
# What fits is found by trying: without the memory check, which refuses by formula.
_COMMON = (
    "--mock-data --precision bf16 --hidden-dropout 0 --attention-dropout 0 --lr 1e-4 --eval-interval 0 "
    "--no-memory-check --train-iters 100000"
)


def config_of(shape: str, mode: Mode, micro_batch: int, directory: Path, *, small: bool) -> ResolvedConfig:
    """The configuration, as pretrain_gpt.py would make it of the same flags."""
    model = SHAPES[shape].small if small else SHAPES[shape].flags
    extra = {"plain": "", "offload": "--offload-optimizer", "compiled": "--compile"}[mode]
    if mode == "compiled" and small:  # for tests, which shall not wait for a compiler
        extra += " --compile backend=aot-eager"
    batch = f"--micro-batch-size {micro_batch} --global-batch-size {micro_batch}"
    flags = [*f"{_COMMON} {model} {batch} {extra}".split(), "--output-dir", str(directory)]
    return parse_config(flags, prog="training", description="", kind=Config, vocabulary=vocabulary_size)


class DrawnOnDevice:
    """Initial values of the usual size, drawn where they are needed."""

    @torch.no_grad()
    def fill(self, parameters: Iterable[ShardedParameter]) -> None:
        """Give a rank's named parameters their values, in place."""
        for parameter in parameters:
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0 if parameter.spec.name.endswith("norm.weight") else 0.0)


@contextmanager
def trainer_of(config: ResolvedConfig, device: torch.device) -> Iterator[Trainer]:
    """A trainer, of which nothing is left on the device afterwards."""
    trainer = megacore_trainer(config, Mesh(device=device), weights=DrawnOnDevice())
    try:
        yield trainer
    finally:
        trainer.callbacks.call(Callback.on_stop, None)
        del trainer
        _free(device)


def _free(device: torch.device) -> None:
    while gc.collect():  # what C++ holds is only seen as garbage once its owner is gone
        pass
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is measured.

    Attributes:
        shape: which model.
        mode: plain, compiled (--compile) or with the optimizer offloaded.
        device: where.
        directory: for what a trainer writes.
        small: the small form of the model.
    """

    shape: str
    mode: Mode
    device: torch.device
    directory: Path
    small: bool

    def trainer(self, micro_batch: int) -> AbstractContextManager[Trainer]:
        """A context with a trainer of this run."""
        config = config_of(self.shape, self.mode, micro_batch, self.directory, small=self.small)
        return trainer_of(config, self.device)

    def peak_bytes(self, micro_batch: int) -> int | None:
        """Most memory in use during two steps; None if they do not fit."""
        try:
            _free(self.device)
            with self.trainer(micro_batch) as trainer:
                step = megacore_step(trainer)
                step()
                step()  # the optimizer's state exists from the first step's end on
                synchronize(self.device)
                return peak_memory_bytes(self.device)
        except torch.OutOfMemoryError:
            return None


def find_micro_batch(run: Run, records: Records) -> int:
    """The largest micro batch that fits; each try is recorded."""
    note = partial(records.add, shape=run.shape, mode=run.mode)

    def attempt(micro_batch: int) -> int | None:
        start = time.perf_counter()
        peak = run.peak_bytes(micro_batch)
        seconds = round(time.perf_counter() - start, 2)
        note("fit", micro_batch=micro_batch, peak_bytes=peak, seconds=seconds)
        return peak

    at_most = _LARGEST_SMALL if run.small else _LARGEST_MICRO_BATCH
    return largest_fitting(attempt, memory=total_memory(run.device), at_most=at_most)


def measure(run: Run, micro_batch: int, records: Records) -> None:
    """Time steps, count memory and synchronisations, and profile one step."""
    _free(run.device)
    with run.trainer(micro_batch) as trainer:
        step = megacore_step(trainer)
        for _ in range(_WARM_UP_STEPS):
            step()
        seconds = step_seconds(step, run.device, most=_LEAST_STEPS if run.small else _STEPS)
        synchronize(run.device)
        note = partial(records.add, shape=run.shape, mode=run.mode)
        note(
            "training",
            micro_batch=micro_batch,
            **speed(trainer.config, micro_batch, statistics.median(seconds), run.device),
            seconds_of_each_step=[round(one, 5) for one in seconds],
            **memory(trainer),
        )
        note("synchronisations", per_step=host_synchronisations(step, run.device))
        note("profile", **heaviest(step, run.device))


def step_seconds(step: Callable[[], object], device: torch.device, *, most: int) -> list[float]:
    """Seconds of consecutive steps: as many as fit into the time for them, but a few at least."""
    marks, started = [_Mark(device)], time.perf_counter()
    while len(marks) <= most:
        step()
        marks.append(_Mark(device))
        if len(marks) > _LEAST_STEPS and time.perf_counter() - started > _SECONDS_OF_STEPS:
            break
    synchronize(device)
    return [after.since(before) for before, after in pairwise(marks)]


class _Mark:
    """A point in time on the device: an event on CUDA, else the host's clock once the device is done."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            synchronize(device)
        self._time = time.perf_counter()

    def since(self, earlier: _Mark) -> float:
        """Seconds between the two."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._time - earlier._time


def speed(config: ResolvedConfig, micro_batch: int, seconds: float, device: torch.device) -> dict[str, Any]:
    """Tokens per second, and the share of the device's peak by both conventions.

    `full` counts every query against every key, as Narayanan et al. 2021 do; `causal` counts the half that a causal
    model needs.
    """
    length = config.data.seq_length
    full = flops_per_sequence(config.model, length) * micro_batch / seconds / 1e12
    causal = causal_flops(config) * micro_batch / seconds / 1e12
    peak = peak_tflops(device_name(device), "bf16")
    return {
        "seq_length": length,
        "step_seconds": seconds,
        "tokens_per_second": micro_batch * length / seconds,
        "tflops_full": full,
        "tflops_causal": causal,
        "mfu_full": None if peak is None else full / peak,
        "mfu_causal": None if peak is None else causal / peak,
    }


def causal_flops(config: ResolvedConfig) -> float:
    """Operations of one sequence, forward and backward, with half of the attention's."""
    model, length = config.model, config.data.seq_length
    block = (block_flops(model, length) + block_flops(model, 0)) / 2  # of length 0: everything but attention
    return 3.0 * length * (model.num_layers * block + head_flops(model))


def memory(trainer: Trainer) -> dict[str, Any]:
    """Bytes of the state and of the peak, by formula and as measured."""
    counted = measured_bytes(trainer.model.data_parallel, trainer.update.optimizer)
    config, on_cpu, peak = trainer.config, trainer.mesh.device.type == "cpu", peak_memory_bytes(trainer.mesh.device)
    in_host_memory = ("optimizer", "buffers") if config.parallel.offload_optimizer else ()
    on_device = sum(size for kind, size in counted.items() if kind not in in_host_memory)
    (rank,) = plan_memory(config, trainer.task.layers, on_cpu=on_cpu)
    tokens = config.training.global_batch_size * config.data.seq_length
    return {
        "state_bytes_predicted": {kind: round(size) for kind, size in trainer.metrics.predicted_memory.items()},
        "state_bytes_counted": counted,
        "peak_bytes": peak,
        "peak_bytes_predicted": round(rank.expected_tensors),
        # On a CPU the peak is the whole process's, and says nothing about activations.
        "beyond_state_bytes_per_token": None if on_cpu else (peak - on_device) / tokens,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one shape; 1 if it does not fit or fails."""
    parser = part_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--mode", choices=("plain", "compiled", "offload"), default="plain")
    parser.add_argument("--like", type=Path, metavar="FILE", help="begin at the micro batch of this earlier record")
    options = parser.parse_args(argv)
    records = Records(options.records)
    if options.small:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        device = open_device(options.device)
        run = Run(shape=options.shape, mode=options.mode, device=device, directory=Path(folder), small=options.small)
        micro_batch = _earlier(options.like, options.shape) or find_micro_batch(run, records)
        while micro_batch:
            try:
                measure(run, micro_batch, records)
                return 0
            except torch.OutOfMemoryError as error:
                records.add("fit", shape=run.shape, mode=run.mode, micro_batch=micro_batch, error=one_line(error))
            micro_batch //= 2
    print(f"{options.shape}: not even a micro batch of 1 fits", file=sys.stderr)
    return 1


def _earlier(path: Path | None, shape: str) -> int | None:
    """The micro batch of a shape's earlier record."""
    found = [] if path is None else read_records(path)
    sizes = [record["micro_batch"] for record in found if record["kind"] == "training" and record["shape"] == shape]
    return sizes[-1] if sizes else None


if __name__ == "__main__":
    sys.exit(main())
