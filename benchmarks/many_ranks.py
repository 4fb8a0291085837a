"""Many ranks on one machine: a whole job of gloo ranks trains a tiny GPT, its losses are compared with one process.

    python benchmarks/many_ranks.py --tp 4 --pp 12 --dp 8          384 ranks, as BLOOM-176B was trained on
    python benchmarks/many_ranks.py --tp 2 --pp 2 --dp 2 --tp 4 --pp 4 --dp 2 --tp 4 --pp 12 --dp 2      a table

Every rank is a process that runs pretrain_gpt.py, from its flags to its exit. The processes are forked from a server
that has torch and megacore loaded (tests/distributed.py), so that they share that memory. What a launch costs a rank is
measured inside: CPU seconds do not depend on how many other ranks wait for the same cores, as seconds
on the clock do. Flags that are not listed here go to pretrain_gpt.py. What it would refuse of any layout is refused
before a rank starts. The exit status is 1 where a loss differs, 2 after a refusal.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from argparse import ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacore.commands.pretrain_gpt import read_config
from megacore.commands.tool import PassingParser, float_or_nan, positive, require_none, run_tool
from megacore.config.fields import field_infos
from megacore.config.flags import read_flags, without_fields
from megacore.config.parallel import ParallelConfig
from megacore.errors import UserError
from tools.generated_pages import table

if TYPE_CHECKING:
    from megacore.train.trainer import Trainer

_MOST_VIRTUAL = 64  # stages per rank for which the model is made deep enough
TOLERANCE = 1e-5  # relative, of a loss
MOST_RANKS = 4096  # of a job: processes of one machine, of 37 MB each
ONE = (1, 1, 1)
# Fields that say how ranks share the work, which one process cannot do.
_OF_SEVERAL_RANKS = frozenset(field_infos(ParallelConfig)) - {"tp", "pp", "dp", "device", "distributed_timeout_minutes"}
Degrees = tuple[int, int, int]
_TCP_INFO_BYTES = 120  # where bytes acknowledged and bytes received follow each other in Linux's struct tcp_info


@dataclass
class RankCosts:
    """What a rank measured of itself.

    Attributes:
        launch: seconds on the clock, until the first step.
        steps: seconds of each step on the clock.
        cpu_seconds: of all threads, from its first line to the first step.
        store_bytes: to and from the job's store until then.
        groups: process groups that it is in, that of all ranks included.
        sockets: open after the last step.
    """

    launch: float = 0.0
    steps: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    store_bytes: int = 0
    groups: int = 0
    sockets: int = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that ran.

    Attributes:
        ranks: what each measured.
        losses: of each step.
        seconds: on the clock, from the first fork to the last exit.
    """

    ranks: list[RankCosts]
    losses: list[float]
    seconds: float


def run_job(degrees: Degrees, flags: Sequence[str], *, timeout: float) -> Job:
    """Run pretrain_gpt.py on tp x pp x dp ranks.

    Args:
        degrees: tp, pp and dp.
        flags: further ones.
        timeout: seconds.
    """
    # Here, so that a wrong flag is refused before torch is loaded.
    from tests.distributed import run_distributed

    with tempfile.TemporaryDirectory(prefix="many-ranks-") as directory:
        argv = _command(degrees, flags, directory)
        start = time.perf_counter()
        ranks = run_distributed(train, math.prod(degrees), argv, timeout=timeout, init=False)
        seconds = time.perf_counter() - start
        lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    losses = [record["train/loss"] for line in lines if "train/loss" in (record := json.loads(line))]
    return Job(ranks=ranks, losses=losses, seconds=seconds)


def _command(degrees: Degrees, flags: Sequence[str], directory: str) -> list[str]:
    """The words for pretrain_gpt.py."""
    words = zip(("--tp", "--pp", "--dp"), map(str, degrees), strict=True)
    return [*(word for pair in words for word in pair), *flags, "--output-dir", directory]


def train(rank: int, world_size: int, argv: Sequence[str]) -> RankCosts:
    """Run pretrain_gpt.py on this rank, and measure it."""
    import torch.distributed as dist

    from megacore.train.trainer import Trainer

    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)  # which the harness sets: a run decides by itself
    costs, start, cpu = RankCosts(), time.perf_counter(), time.process_time()

    def run(self: Trainer) -> None:
        costs.launch = time.perf_counter() - start
        costs.cpu_seconds = time.process_time() - cpu
        costs.store_bytes, costs.groups = _store_bytes(), len(dist.distributed_c10d._world.pg_map)
        Trainer_run(self)
        costs.sockets = len(list(_sockets()))

    def train_step(self: Trainer, microbatches: Sequence[Any]) -> Any:
        begin = time.perf_counter()
        result = Trainer_step(self, microbatches)
        costs.steps.append(time.perf_counter() - begin)
        return result

    Trainer_run, Trainer_step = Trainer.run, Trainer.train_step
    with (
        open(os.devnull, "w") as nowhere,
        mock.patch.object(Trainer, "run", run),
        mock.patch.object(Trainer, "train_step", train_step),
        mock.patch.object(sys, "stdout", nowhere),
    ):
        if status := importlib.import_module("pretrain_gpt").main(list(argv)):
            raise RuntimeError(f"rank {rank} ended with status {status}")
    return costs


def _sockets() -> Iterator[int]:
    """This process's open sockets."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield int(name)
        except OSError:  # that of the listing itself
            continue


def _store_bytes() -> int:
    """Bytes that the kernel has counted on this process's connections with the job's store."""
    total = 0
    for descriptor in _sockets():
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            try:
                is_store = connection.getpeername()[1] == int(os.environ.get("MASTER_PORT", "0"))
            except (OSError, IndexError):  # it listens, or is no connection of TCP
                continue
            if is_store:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES + 16)
                total += sum(struct.unpack_from("QQ", info, _TCP_INFO_BYTES))
    return total


def tiny_model(layouts: Sequence[Degrees], options: Namespace) -> list[str]:
    """Flags of a GPT with a block or more for every stage, and of batches for every replica."""
    tp, pp, dp = (math.lcm(*degrees) for degrees in zip(*layouts, strict=True))
    heads, given = max(tp, 4), read_flags(options.flags).values
    virtual = given.get("virtual_stages", 1)
    layers = max(pp * (virtual if 0 < virtual <= _MOST_VIRTUAL else 1), 12)
    # Without dropout, whose masks depend on tp.
    words = (
        f"--num-layers {layers} --hidden-size {8 * heads} --num-attention-heads {heads} --seq-length 16 "
        f"--vocab-size 128 --micro-batch-size 1 --global-batch-size {dp * options.microbatches} "
        f"--train-iters {options.steps} --log-interval 1 --eval-interval 0 --lr 0.01 --hidden-dropout 0 "
        "--attention-dropout 0"
    ).split()
    pairs = zip(words[::2], words[1::2], strict=True)
    kept = [word for pair in pairs if pair[0][2:].replace("-", "_") not in given for word in pair]
    # Every rank would count the memory that it shares with the others as its own.
    return ["--mock-data", "--device", "cpu", *kept, "--no-memory-check", *options.flags]


def rows(degrees: Degrees, job: Job, worst: float) -> dict[str, str]:
    """The columns of a job's row in the table."""
    ranks, count = job.ranks, len(job.ranks)
    first, *others = (max(seconds) for seconds in zip(*(rank.steps for rank in ranks), strict=True))
    stored, most = sum(rank.store_bytes for rank in ranks), max(rank.sockets for rank in ranks)
    return {
        "ranks": f"{count} ({' x '.join(map(str, degrees))})",
        "CPU s/rank": f"{sum(rank.cpu_seconds for rank in ranks) / count:.2f}",
        "launch, s": f"{max(rank.launch for rank in ranks):.1f}", "store, KB/rank": f"{stored / count / 1e3:.1f}",
        "groups/rank": str(max(rank.groups for rank in ranks)), "sockets/rank": str(most),
        "first step, s": f"{first:.1f}", "later steps, s": f"{statistics.median(others):.1f}" if others else "",
        "total, s": f"{job.seconds:.0f}", "loss differs by": f"{worst:.1e}",
    }  # fmt: skip


class _Parser(PassingParser):
    """Leaves the flags that it does not know to pretrain_gpt.py, and refuses what that would refuse of any layout."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse has it, with `layouts` (tp, pp and dp of each) and `flags`.

        Raises:
            UserError: degrees are missing, or too many processes are asked for.
            SystemExit: pretrain_gpt.py refuses a layout, and has said why.
        """
        options = super().parse_args(args, namespace)
        require_none(options.problems)
        columns = [getattr(options, name) for name in ("tp", "pp", "dp")]
        if not len(columns[0]) == len(columns[1]) == len(columns[2]) > 0:
            raise UserError("every layout needs --tp, --pp and --dp: give each once per layout")
        options.layouts = list(zip(*columns, strict=True))
        for degrees in options.layouts:
            if (ranks := math.prod(degrees)) > MOST_RANKS:
                raise UserError(f"{ranks:,} ranks are {ranks:,} processes of this machine: use {MOST_RANKS:,} or less")
        flags = tiny_model(options.layouts, options)
        for degrees in options.layouts:
            _check(degrees, flags)
        _check(ONE, without_fields(flags, _OF_SEVERAL_RANKS))
        return options


def _check(degrees: Degrees, flags: Sequence[str]) -> None:
    """Refuse what pretrain_gpt.py would refuse of a layout."""
    config = read_config(_command(degrees, flags, tempfile.gettempdir()), prog="many_ranks.py", planned=True)
    if config.parallel.ranks != math.prod(degrees):
        raise UserError("a layout has --tp, --pp and --dp: leave other degrees out")


def _parser() -> _Parser:
    parser = _Parser(
        prog="many_ranks.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name in ("tp", "pp", "dp"):
        parser.flag(f"--{name} N", "once for each layout", positive, [], action="append")
    parser.flag("--steps N", "of each job", positive, 3)
    parser.flag("--microbatches N", "of each replica and step", positive, 2)
    parser.flag("--timeout S", "seconds that a job may take", _seconds, 900.0)
    return parser


def _seconds(text: str) -> float:
    if not 0 < (value := float_or_nan(text)) < math.inf:
        raise ArgumentTypeError(f"{text} must be a number of seconds above 0")
    return value


def parse(argv: Sequence[str]) -> Namespace:
    """The flags of this benchmark; `layouts` has tp, pp and dp of each, `flags` are those of pretrain_gpt.py."""
    return _parser().parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the layouts and one process, print the table, and return the exit status."""
    return run_tool(_parser(), argv, _run)


def _run(options: Namespace) -> int:
    """Print the table; 1 where a loss differs from that of one process by more than rounding."""
    differ = False
    flags = tiny_model(options.layouts, options)
    expected = run_job(ONE, without_fields(flags, _OF_SEVERAL_RANKS), timeout=options.timeout).losses
    for number, degrees in enumerate(options.layouts):
        job = run_job(degrees, flags, timeout=options.timeout)
        worst = max(abs(a - b) / abs(b) for a, b in zip(job.losses, expected, strict=True))
        row = rows(degrees, job, worst)
        print("\n".join(table(list(row), [list(row.values())]).splitlines()[2 * (number > 0) :]), flush=True)
        differ |= not worst <= TOLERANCE
    return int(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
