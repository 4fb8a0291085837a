"""Check, draw and time collectives that are made of sends and receives.

    torchrun --nproc-per-node 4 examples/collectives/collectives.py --pictures output/collectives

Every collective is compared with torch.distributed's, its rounds and bytes with the textbook's formula, and its time
with the alpha-beta model, whose two numbers come from a ping-pong between ranks 0 and 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import algorithms
from cost_model import Cost, counted_cost, expected_cost, fit, median_seconds, ping_pong
from draw_messages import draw
from megacore.commands.tool import ToolParser, positive, run_tool
from megacore.config import ParallelConfig
from megacore.config.missing_files import unwritable
from megacore.drawing.canvas import save
from megacore.errors import ConfigError, UserError
from megacore.parallel.collectives import all_gather_objects, barrier
from megacore.parallel.mesh import Group, join_job
from wire import Message, Wire

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Comparison:
    """One collective: ours, and torch.distributed's on the same input."""

    name: str
    ours: Callable[[Wire], Tensor]
    library: Call
    counts: bool = True  # whether this rank's result has a meaning


def comparisons(x: Tensor, group: Group) -> list[Comparison]:
    """Every collective on x: [n, k], which differs between the ranks."""
    first, whole = group.rank == 0, group.handle
    part, same = x[group.rank], torch.arange(x.numel(), dtype=x.dtype).view_as(x)  # the root's input is known to all

    def summed() -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=whole)
        return total

    def broadcast() -> Tensor:
        received = same.clone() if first else torch.zeros_like(x)
        dist.broadcast(received, 0, group=whole)
        return received

    def reduced() -> Tensor:
        total = x.clone()
        dist.reduce(total, 0, group=whole)
        return total

    def scattered() -> Tensor:
        received = torch.empty_like(part)
        dist.scatter(received, list(same.unbind()) if first else None, 0, group=whole)
        return received

    def gathered() -> Tensor:
        parts = [torch.empty_like(part) for _ in range(group.size)]
        dist.gather(part, parts if first else None, 0, group=whole)
        return torch.stack(parts)

    def all_gathered() -> Tensor:
        parts = [torch.empty_like(part) for _ in range(group.size)]
        dist.all_gather(parts, part, group=whole)
        return torch.stack(parts)

    def exchanged() -> Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=whole)
        return received

    found = [
        Comparison("broadcast", lambda wire: algorithms.broadcast(wire, same.clone()), broadcast),
        Comparison("scatter", lambda wire: algorithms.scatter(wire, same), scattered),
        Comparison("gather", lambda wire: algorithms.gather(wire, part), gathered, first),
        Comparison("reduce", lambda wire: algorithms.reduce(wire, x), reduced, first),
        Comparison("all_gather", lambda wire: algorithms.all_gather(wire, part), all_gathered),
        Comparison("reduce_scatter", lambda wire: algorithms.reduce_scatter(wire, x), lambda: summed()[group.rank]),
        Comparison("all_reduce_ring", lambda wire: algorithms.all_reduce_ring(wire, x), summed),
        Comparison("all_reduce_tree", lambda wire: algorithms.all_reduce_tree(wire, x), summed),
        Comparison("all_reduce_halving", lambda wire: algorithms.all_reduce_halving(wire, x), summed),
        Comparison("all_to_all", lambda wire: algorithms.all_to_all(wire, x), exchanged),
    ]
    is_power_of_two = group.size & (group.size - 1) == 0
    return [each for each in found if is_power_of_two or each.name != "all_reduce_halving"]


@dataclass(frozen=True)
class Trial:
    """What one run of a collective showed: whether every rank's result is the library's, and all messages."""

    equal: bool
    messages: list[Message]
    cost: Cost


def run_once(comparison: Comparison, group: Group) -> Tensor:
    """What ours gives on this rank."""
    return comparison.ours(Wire(group))


def attempt(comparison: Comparison, group: Group) -> Trial:
    """Run ours once and compare it with the library; the same answer on every rank."""
    wire = Wire(group)
    ours = comparison.ours(wire)
    equal = torch.equal(ours, comparison.library()) or not comparison.counts
    reports = all_gather_objects((equal, wire.sent, wire.rounds), group)
    messages = [message for _, sent, _ in reports for message in sent]
    return Trial(all(equal for equal, _, _ in reports), messages, counted_cost(messages, max(r for _, _, r in reports)))


def example_input(nbytes: int, group: Group) -> Tensor:
    """[n, k] of about so many bytes: small whole numbers, whose sums are exact in any order."""
    columns = max(1, nbytes // 4 // group.size)
    draw_of_rank = torch.Generator().manual_seed(group.rank)
    return torch.randint(-100, 100, (group.size, columns), generator=draw_of_rank).float()


def run(options: argparse.Namespace) -> None:
    """Print the table and write the pictures."""
    if options.pictures is not None and (problems := unwritable("--pictures", options.pictures)):
        raise ConfigError(problems)
    _, group = join_job(ParallelConfig(device="cpu"))
    if group.size == 1:
        raise UserError("1 process has no other to talk to: use torchrun --nproc-per-node 4")
    say = print if group.is_first else lambda *words: None
    if group.is_first and options.pictures is not None:
        options.pictures.mkdir(parents=True, exist_ok=True)
    model = fit(*ping_pong(Wire(group), options.repeats))
    model = all_gather_objects(model, group)[0]
    rate = f"{1e-9 / model.beta:.2f} GB/s" if model.beta else "no measurable cost per byte"
    say(f"ping-pong of ranks 0 and 1: alpha {1e6 * model.alpha:.0f} us, 1 / beta {rate}")
    x = example_input(options.bytes, group)
    say(f"{x.nbytes} bytes on each of {group.size} ranks; milliseconds are medians of {options.repeats}")
    say(f"{'collective':19s} {'equal':>5s} {'rounds':>6s} {'bytes':>10s} {'model':>8s} {'measured':>8s} {'torch':>8s}")
    for comparison in comparisons(x, group):
        trial = attempt(comparison, group)
        if trial.cost != expected_cost(comparison.name, group.size, x.nbytes):
            raise AssertionError(f"{comparison.name} sent {trial.cost}, which is not what the formula says")
        ours = median_seconds(partial(run_once, comparison, group), options.repeats, group)
        library = median_seconds(comparison.library, options.repeats, group)
        times = "".join(f" {1e3 * seconds:8.2f}" for seconds in (model.seconds(trial.cost), ours, library))
        say(
            f"{comparison.name:19s} {'yes' if trial.equal else 'NO':>5s} {trial.cost.rounds:6d} "
            f"{trial.cost.nbytes:10.0f}{times}"
        )
        if group.is_first and options.pictures is not None:
            title = f"{comparison.name} of {group.size} ranks"
            picture = draw(title, trial.messages, group.size, trial.cost.rounds)
            save(picture, options.pictures / f"{comparison.name}.{options.format}")
    if options.pictures is not None:
        say(f"pictures: {options.pictures}/*.{options.format}")
    barrier(group)  # a rank that leaves early would close connections that others still use
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 if the command line cannot be used."""
    parser = ToolParser(
        prog="collectives.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=positive, default=1 << 20, metavar="N", help="per rank (default 1 MiB)")
    parser.add_argument("--repeats", type=positive, default=9, metavar="N", help="timed calls of each (default 9)")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="where to write a picture of each")
    parser.add_argument("--format", choices=("svg", "png"), default="svg", help="of the pictures (default svg)")
    return run_tool(parser, argv, run)


if __name__ == "__main__":
    sys.exit(main())
