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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from benchmarks.gpu_check.device import heaviest, host_synchronisations, open_device, total_memory
from benchmarks.gpu_check.fitting import largest_fitting
from benchmarks.gpu_check.records import Records, one_line, part_parser, read_records
from benchmarks.workload import megacore_step, megacore_trainer
from megacore.commands.pretrain_gpt import read_config
from megacore.config import ResolvedConfig
from megacore.models.flops import Attention, flops_per_sequence
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


_TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 128 "
    "--vocab-size 512 --seq-length 64"
)
# Models as flags of pretrain_gpt.py: to measure, and one of the same kind that any machine can train.
SHAPES = {
    "gpt2-small": ("--preset gpt2-small", "--preset gpt2-tiny"),
    "gpt2-xl": ("--preset gpt2-xl", "--preset gpt2-tiny --num-layers 3"),
    "llama-3.2-1b": ("--preset llama-3.2-1b", f"--preset llama-3.2-1b {_TINY}"),
    # Mixtral's blocks at a size of which one device holds the whole state: 8 experts, of which a token uses 2.
    "experts": (
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


_OF_MODE: dict[Mode, str] = {"plain": "", "offload": "--offload-optimizer", "compiled": "--compile"}


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

    @contextmanager
    def trainer(self, micro_batch: int) -> Iterator[Trainer]:
        """A trainer of this run, of which nothing is left on the device afterwards."""
        _free(self.device)
        flags = f"{_COMMON} {SHAPES[self.shape][self.small]} {_OF_MODE[self.mode]}"
        if self.mode == "compiled" and self.small:  # for tests, which shall not wait for a compiler
            flags += " backend=aot-eager"
        flags += f" --micro-batch-size {micro_batch} --global-batch-size {micro_batch} --output-dir {self.directory}"
        config = read_config(flags.split(), prog="training")
        trainer = megacore_trainer(config, Mesh(device=self.device), weights=DrawnOnDevice())
        try:
            yield trainer
        finally:
            trainer.callbacks.call(Callback.on_stop, None)
            del trainer
            _free(self.device)

    def peak_bytes(self, micro_batch: int) -> int | None:
        """Most memory in use during two steps; None if they do not fit."""
        try:
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

    def attempt(micro_batch: int) -> int | None:
        start, peak = time.perf_counter(), run.peak_bytes(micro_batch)
        tried = {"micro_batch": micro_batch, "peak_bytes": peak, "seconds": round(time.perf_counter() - start, 2)}
        records.add("fit", shape=run.shape, mode=run.mode, **tried)
        return peak

    at_most = _LARGEST_SMALL if run.small else _LARGEST_MICRO_BATCH
    return largest_fitting(attempt, memory=total_memory(run.device), at_most=at_most)


def measure(run: Run, micro_batch: int, records: Records) -> None:
    """Time steps, count memory and synchronisations, and profile one step."""
    with run.trainer(micro_batch) as trainer:
        step = megacore_step(trainer)
        for _ in range(_WARM_UP_STEPS):
            step()
        seconds = step_seconds(step, run.device, most=_LEAST_STEPS if run.small else _STEPS)
        synchronize(run.device)
        note = partial(records.add, shape=run.shape, mode=run.mode)
        figures = speed(trainer.config, micro_batch, statistics.median(seconds), run.device)
        figures |= {"seconds_of_each_step": [round(one, 5) for one in seconds], **memory(trainer)}
        note("training", micro_batch=micro_batch, **figures)
        note("synchronisations", per_step=host_synchronisations(step, run.device))
        note("profile", **heaviest(step, run.device))


def step_seconds(step: Callable[[], object], device: torch.device, *, most: int) -> list[float]:
    """Seconds of consecutive steps: as many as fit into the time for them, but a few at least."""
    marks, started = [_mark(device)], time.perf_counter()
    while len(marks) <= most:
        step()
        marks.append(_mark(device))
        if len(marks) > _LEAST_STEPS and time.perf_counter() - started > _SECONDS_OF_STEPS:
            break
    synchronize(device)
    if device.type == "cuda":
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
    return [after - before for before, after in pairwise(marks)]


def _mark(device: torch.device) -> Any:
    """A point in time on the device: an event on CUDA, else the host's clock once the device is done."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    synchronize(device)
    return time.perf_counter()


def speed(config: ResolvedConfig, micro_batch: int, seconds: float, device: torch.device) -> dict[str, Any]:
    """Tokens per second, and the share of the device's peak by both conventions.

    `full` counts every query against every key, as Narayanan et al. 2021 do; `causal` counts the half that a causal
    model needs.
    """
    length, peak = config.data.seq_length, peak_tflops(device_name(device), "bf16")
    rate = micro_batch * length / seconds
    found: dict[str, Any] = {"seq_length": length, "step_seconds": seconds, "tokens_per_second": rate}
    for name in get_args(Attention):
        rate = flops_per_sequence(config.model, length, attention=name) * micro_batch / seconds / 1e12
        found |= {f"tflops_{name}": rate, f"mfu_{name}": None if peak is None else rate / peak}
    return found


def memory(trainer: Trainer) -> dict[str, Any]:
    """Bytes of the state and of the peak, by formula and as measured."""
    counted = measured_bytes(trainer.model.data_parallel, trainer.update.optimizer)
    config, on_cpu, peak = trainer.config, trainer.mesh.device.type == "cpu", peak_memory_bytes(trainer.mesh.device)
    in_host_memory = ("optimizer", "buffers") if config.parallel.offload_optimizer else ()
    on_device = sum(size for kind, size in counted.items() if kind not in in_host_memory)
    (rank,) = plan_memory(config, trainer.task.layers, on_cpu=on_cpu)
    tokens = config.training.global_batch_size * config.data.seq_length
    predicted = {kind: round(size) for kind, size in trainer.metrics.predicted_memory.items()}
    # On a CPU the peak is the whole process's, and says nothing about activations.
    beyond = None if on_cpu else (peak - on_device) / tokens
    peaks = {"peak_bytes": peak, "peak_bytes_predicted": round(rank.expected_tensors)}
    states = {"state_bytes_predicted": predicted, "state_bytes_counted": counted}
    return {**states, **peaks, "beyond_state_bytes_per_token": beyond}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one shape; 1 if it does not fit or fails."""
    parser = part_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--mode", choices=("plain", "compiled", "offload"), default="plain")
    parser.add_argument("--like", type=Path, metavar="FILE", help="begin at the micro batch of this earlier record")
    options = parser.parse_args(argv)
    records, like = Records(options.records), options.like
    earlier = [] if like is None else [one for one in read_records(like) if one["kind"] == "training"]
    if options.small:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        device = open_device(options.device)
        run = Run(shape=options.shape, mode=options.mode, device=device, directory=Path(folder), small=options.small)
        micro_batch = earlier[-1]["micro_batch"] if earlier else find_micro_batch(run, records)
        while micro_batch:
            try:
                measure(run, micro_batch, records)
                return 0
            except torch.OutOfMemoryError as error:
                records.add("fit", shape=run.shape, mode=run.mode, micro_batch=micro_batch, error=one_line(error))
            micro_batch //= 2
    print(f"{options.shape}: not even a micro batch of 1 fits", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
