"""Train with servers and workers at several degrees of consistency, then kill a server and lose nothing.

    torchrun --nproc-per-node 5 examples/parameter_server/parameter_server.py --servers 2

The first ranks are servers, the others workers. Each row of the table is a training of its own: bulk-synchronous
(staleness 0), stale-synchronous, and asynchronous. `--kill-at N` adds one in which server 0 vanishes.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Listener

import torch
import torch.distributed as dist
from torch import Tensor

from client import ParameterClient
from hash_ring import HashRing
from megacore.commands.tool import ToolParser, positive, run_tool
from megacore.config import ParallelConfig
from megacore.config.numbers import parse_float, parse_int
from megacore.errors import UserError
from megacore.parallel.collectives import all_gather_objects, barrier
from megacore.parallel.mesh import Group, join_job
from server import ASYNCHRONOUS, Server, serve
from tasks import MODELS, Lines, accuracy, load, loss
from training import Plan, train_alone, work

LOOPBACK = ("127.0.0.1", 0)  # the system chooses the port
LONGEST_PAUSE = 60.0  # seconds


@dataclass(frozen=True)
class Report:
    """What one rank saw of a training.

    Attributes:
        seconds: of a worker's loop.
        lag: the most pushes by which a worker's values were old.
        dead: servers that a worker found dead.
        values: at the end, of the first worker.
        fewest_pushes: over all keys of a server and all workers; None: a worker, or a server that died.
    """

    seconds: float = 0.0
    lag: int = 0
    dead: tuple[int, ...] = ()
    values: list[list[float]] | None = None
    fewest_pushes: int | None = None


def train(group: Group, servers: int, plan: Plan, lines: Lines, *, staleness: int, dies_at: int | None) -> list[Report]:
    """One training; every rank gets the reports of all."""
    is_server = group.rank < servers
    secret = bytes.fromhex(all_gather_objects(secrets.token_hex(16), group)[0])
    listener = Listener(LOOPBACK, backlog=plan.workers, authkey=secret) if is_server else None
    addresses = all_gather_objects(listener.address if listener else None, group)[:servers]
    if listener is not None:
        dies = dies_at if group.rank == 0 else None
        report = run_server(group.rank, servers, plan, listener, staleness=staleness, dies_at=dies)
    else:
        report = run_worker(dict(enumerate(map(tuple, addresses))), secret, plan, lines, group.rank - servers)
    return all_gather_objects(report, group)


def run_server(
    number: int, servers: int, plan: Plan, listener: Listener, *, staleness: int, dies_at: int | None
) -> Report:
    """Serve until all workers have left."""
    ring, keys = HashRing(range(servers)), range(plan.keys)
    held = torch.tensor([key for key in keys if number in ring.holders(key, plan.keys)], dtype=torch.int64)
    server = Server(held, plan.initial_values()[held], workers=plan.workers, staleness=staleness)
    lived = serve(server, listener, plan.workers, dies_at=dies_at)
    return Report(fewest_pushes=int(server.clocks.min()) if lived and len(held) else None)


def run_worker(addresses: dict[int, tuple[str, int]], secret: bytes, plan: Plan, lines: Lines, worker: int) -> Report:
    """Train, and let the first worker read the result when all have pushed their last update."""
    client = ParameterClient(addresses, secret, worker=worker, keys=plan.keys)
    try:
        seconds = work(client, plan, lines, worker)
        values = client.pull().tolist() if worker == 0 else None
        return Report(seconds, client.largest_lag, tuple(client.dead), values)
    finally:
        client.close()


def run(options: argparse.Namespace) -> None:
    """Print a row for every degree of consistency, and what became of the killed server's keys."""
    _, group = join_job(ParallelConfig(device="cpu"))
    if not 2 <= options.servers < group.size:
        raise UserError(
            f"--servers {options.servers} with {group.size} processes: the others are workers, and a key is on two "
            f"servers; use --servers 2 and torchrun --nproc-per-node 4 or more"
        )
    if options.kill_at is not None and options.kill_at > options.steps:
        raise UserError(f"--kill-at {options.kill_at} is after the last of --steps {options.steps}: use less")
    lines, test = load()
    model, workers = MODELS[options.model], group.size - options.servers
    plan = Plan(model, options.steps, workers, straggle=options.straggle)
    say = print if group.is_first else lambda *words: None
    say(f"{options.servers} servers, {workers} workers, {model.size} parameters in {plan.keys} keys, each on 2 servers")
    say(f"{'staleness':>12s} {'steps/s':>8s} {'largest lag':>11s} {'test loss':>10s} {'accuracy':>9s}")
    undisturbed = plan.initial_values()
    for staleness in options.staleness:
        reports = train(group, options.servers, plan, lines, staleness=staleness, dies_at=None)
        values = final_values(reports, options.servers)
        undisturbed = values if staleness == 0 else undisturbed
        rate = sum(plan.steps / report.seconds for report in reports[options.servers :])
        lag = max(report.lag for report in reports)
        weights = values.flatten()[: model.size]
        name = "asynchronous" if staleness == ASYNCHRONOUS else str(staleness)
        say(
            f"{name:>12s} {rate:8.0f} {lag:11d} {float(loss(model, weights, test)):10.4f} "
            f"{accuracy(model, weights, test):9.1%}"
        )
    expected = train_alone(plan, lines)
    if 0 in options.staleness:
        say(f"staleness 0 and one process: largest difference {float((undisturbed - expected).abs().max()):.1e}")
    if options.kill_at is not None:
        reports = train(group, options.servers, plan, lines, staleness=0, dies_at=options.kill_at)
        values = final_values(reports, options.servers)
        pushes = {report.fewest_pushes for report in reports if report.fewest_pushes is not None}
        say(f"server 0 vanished at push {options.kill_at}; dead for the workers: {sorted({*reports[-1].dead})}")
        say(f"pushes of every worker in every key that is left: {sorted(pushes)} of {plan.steps}")
        say(f"killed and one process: largest difference {float((values - expected).abs().max()):.1e}")
    barrier(group)
    dist.destroy_process_group()


def final_values(reports: Sequence[Report], servers: int) -> Tensor:
    """What the first worker read at the end."""
    return torch.tensor(reports[servers].values, dtype=torch.float64)


def staleness_list(text: str) -> list[int]:
    """`0,2,async` as numbers."""
    try:
        values = [ASYNCHRONOUS if word == "async" else parse_int(word) for word in text.split(",")]
    except ValueError:
        values = [-1]
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text}: use numbers from 0, or async, with commas between them")
    return values


def pause(text: str) -> float:
    """A time to sleep, in seconds."""
    try:
        value = parse_float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not 0 <= value <= LONGEST_PAUSE:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to {LONGEST_PAUSE:g} seconds")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 if the command line cannot be used."""
    parser = ToolParser(
        prog="parameter_server.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=positive, default=2, metavar="N", help="of the processes (default 2)")
    parser.add_argument("--model", choices=sorted(MODELS), default="logistic", help="default logistic")
    parser.add_argument("--steps", type=positive, default=100, metavar="N", help="of each worker (default 100)")
    parser.add_argument(
        "--staleness", type=staleness_list, default="0,1,4,async", metavar="LIST", help="default 0,1,4,async"
    )
    parser.add_argument(
        "--straggle",
        type=pause,
        default=0.02,
        metavar="S",
        help="sleep in 1 of 4 steps, in seconds (default 0.02)",
    )
    parser.add_argument("--kill-at", type=positive, metavar="PUSH", help="train once more; server 0 vanishes there")
    return run_tool(parser, argv, run)


if __name__ == "__main__":
    sys.exit(main())
