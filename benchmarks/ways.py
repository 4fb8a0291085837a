"""Training steps of several ways to run one small GPT, in turn in one group of processes.

    python -m benchmarks.ways balance --pp 2 --micro-batch 2 --rounds 40     # stages balanced by parameters, or by time
    python -m benchmarks.ways context --ranks 4 --seq 4096 --layers 2 --vocab 1024 --batch 4 --micro-batch 1
    python -m benchmarks.ways replicas --tp 2 --pp 2 --dp 2 --micro-batch 1  # a check of replicas; a replay; a ledger
    python -m benchmarks.ways reproducible --heads 8 --micro-batch 2         # and with --tp 2, --dp 2

Every rank is a process with one thread. Time is measured. Memory and communication are counted: the most bytes that
tensors of rank 0 take in a step above what it holds between steps, and the bytes that it sends, as tools/plan.py counts
them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, get_args

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.comparison.configuration import resolved_configuration
from benchmarks.in_turn import beside, take_turns
from benchmarks.workload import add_sizes, megacore_step, megacore_trainer
from megacore.models.outline import outline
from megacore.parallel.collectives import barrier
from megacore.parallel.context import ContextComm
from megacore.parallel.mesh import build_mesh, compute_reproducibly
from megacore.plan.traffic import rank_traffic
from tests.distributed import run_distributed

_BLOCKED = {"reproducible": True}
_REPLICAS = {"check_replicas_interval": 0}  # off by itself
# What is compared -> way -> fields of the configuration. The first way is what the others are compared with.
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "balance": {
        "1f1b, by parameters": {"schedule": "1f1b", "pipeline_balance": "parameters"},
        "1f1b, by time": {"schedule": "1f1b", "pipeline_balance": "time"},
        "zero-bubble, by time": {"schedule": "zero-bubble", "pipeline_balance": "time"},
    },
    "replicas": {
        "neither": _REPLICAS,
        "a check in every step": {"check_replicas_interval": 1},
        "a replay in every step": _REPLICAS | {"replay_interval": 1},
        "a ledger, in a step without hashes": _REPLICAS | {"ledger": True},  # --ledger interval: 20
        "a ledger with hashes of every step": _REPLICAS | {"ledger": True, "ledger_interval": 1},
    },
    "reproducible": {"ordinary": {}, "one block": _BLOCKED | {"reproducible_blocks": 1}, "blocks": _BLOCKED},
}


def ways(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The ways of a comparison, by name."""
    if options.of != "context":
        degrees = {"tp": options.tp, "pp": options.pp, "dp": options.dp, "zero_stage": options.zero_stage}
        return {name: degrees | changes for name, changes in WAYS[options.of].items()}
    divided = {f"cp, {comm}": {"cp": options.ranks, "cp_comm": comm} for comm in get_args(ContextComm)}
    return {"dp": {"dp": options.ranks}, **divided}


class Found(NamedTuple):
    """Of one way on rank 0: the seconds of every round, and bytes held and sent in a step."""

    seconds: list[float]
    held: int
    sent: float


def held_in(step: Callable[[], Any]) -> int:
    """Most bytes of tensors that the step allocates at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    changes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(changes, initial=0))


def train(rank: int, world_size: int, options: argparse.Namespace, directory: str) -> dict[str, Found]:
    """What each way takes."""
    torch.set_num_threads(1)
    if options.of == "reproducible":
        compute_reproducibly()
    steps, sent = dict[str, Callable[[], Any]](), dict[str, float]()
    for name, changes in ways(options).items():
        config = resolved_configuration(
            options, f"{directory}/{name}", micro_batch=options.micro_batch, ranks=world_size, device="cpu", **changes
        )
        mesh = build_mesh(config.parallel)
        with contextlib.redirect_stdout(None):  # the launch summary
            steps[name] = megacore_step(megacore_trainer(config, mesh))
        sent[name] = sum(transfer.sent_bytes for transfer in rank_traffic(config, outline(config), 0))

    def run(step: Callable[[], Any]) -> None:
        step()

    runs = {name: partial(run, step) for name, step in steps.items()}
    seconds = take_turns(runs, options.rounds, lambda: barrier(mesh.world))
    return {name: Found(seconds[name], held_in(step), sent[name]) for name, step in steps.items()}


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", choices=(*WAYS, "context"), help="what is compared")
    add_sizes(parser, micro_batch=1, rounds=9, ranks=2, tp=1, pp=1, dp=1, zero_stage=0)
    options = parser.parse_args(argv)
    ranks = options.ranks if options.of == "context" else options.tp * options.pp * options.dp
    with tempfile.TemporaryDirectory() as directory:
        found: dict[str, Found] = run_distributed(train, ranks, options, directory, timeout=1200)[0]
    seconds = {name: one.seconds for name, one in found.items()}
    held, sent = ([f"{getattr(one, of) / 2**20:.1f}" for one in found.values()] for of in ("held", "sent"))
    counted = {"MiB held": held, "MiB sent": sent}
    print(beside(seconds, next(iter(seconds)), options.batch * options.seq, counted))
    return 0


if __name__ == "__main__":
    sys.exit(main())
