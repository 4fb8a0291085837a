"""Whether `--retune` chooses what an exhaustive search would: random small models, all of whose settings take turns.

    python -m benchmarks.retune                        # 2 and 4 ranks, three models each, in 8 minutes
    python -m benchmarks.retune --ranks 8 --models 1 --seconds 60

Every rank is a process with one thread. All settings that the planner's search knows, on all layouts of the ranks, take
their steps by turns in one group of processes, so that a machine which others use slows all of them alike: first all,
then the faster half, and so on. Left out is recomputation, which takes time and saves memory that is not lacking here.
A choice is made from the times as they came, as a run makes it (megacore/survive/retune.py): `--after` steps in a row
for a visit, the best two a second time. It is then compared with the best by the medians of the last rounds, which all
that were near it took. It begins with random settings.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.comparison.configuration import resolved_configuration
from benchmarks.workload import megacore_step, megacore_trainer
from megacore.config import ResolvedConfig, violations
from megacore.parallel.collectives import all_gather_objects, barrier
from megacore.parallel.mesh import build_mesh
from megacore.plan.fastest_schedule import typical_cluster
from megacore.plan.next_layout import Measured, next_layout
from megacore.plan.plan_json import layout_flags
from megacore.plan.search import search
from megacore.plan.search_space import Constraints
from megacore.survive.retune import Trial, to_visit_again
from tests.distributed import run_distributed
from tools.generated_pages import table

_SIZES = {  # of which a model draws one each
    "layers": (2, 4, 6), "hidden": (64, 128, 192), "heads": (4, 8), "seq": (32, 64, 128), "vocab": (512, 4096),
    "batch": (4, 8, 16),
}  # fmt: skip
_LEAST = 8  # settings that are measured to the end
_ROUNDS = 6  # between two halvings


def settings_of(config: ResolvedConfig) -> list[ResolvedConfig]:
    """All settings of a model on the same number of ranks."""
    ranks = config.parallel.ranks
    found = search(config, typical_cluster(on_cpu=True), Constraints(world_size=ranks, fixed={"recompute": "none"}))
    known = {layout_flags(one.config): one.config for one in found.layouts if not violations(one.config, ranks)}
    return list(known.values())


def measure(rank: int, world_size: int, configs: Sequence[ResolvedConfig], seconds: float) -> list[list[float]]:
    """The seconds of the steps of all settings; the slower ones have fewer."""
    torch.set_num_threads(1)
    meshes = [build_mesh(config.parallel) for config in configs]
    with contextlib.redirect_stdout(None):  # the launch summaries
        steps = [megacore_step(megacore_trainer(*both)) for both in zip(configs, meshes, strict=True)]
    for step in steps:
        step()  # which allocates
    taken, left = [list[float]() for _ in configs], list(range(len(configs)))
    world, begun, is_over = meshes[0].world, time.perf_counter(), False
    while not is_over:
        for turn in range(_ROUNDS):
            for number in left[:: -1 if turn % 2 else 1]:
                barrier(world)
                start = time.perf_counter()
                steps[number]()
                barrier(world)
                taken[number].append(time.perf_counter() - start)
        left.sort(key=lambda number: statistics.median(taken[number]))
        said = left[: max(len(left) // 2, _LEAST)], time.perf_counter() - begun > seconds
        left, is_over = all_gather_objects(said, world)[0]
    return taken


def choose(
    configs: Sequence[ResolvedConfig], taken: Sequence[Sequence[float]], options: argparse.Namespace
) -> list[int]:
    """The settings that a run would try, by number, and last the one that it would keep. It begins with the first."""
    numbers = {layout_flags(config): number for number, config in enumerate(configs)}

    def visit(trial: Trial) -> Trial:
        samples = taken[numbers[trial.values["flags"]]][trial.visits * options.after :][: options.after]
        seconds = statistics.median(samples) if samples else trial.seconds
        return replace(trial, seconds=seconds, visits=trial.visits + 1)

    tried, failed = [visit(Trial(values={"flags": layout_flags(configs[0])}, expected=0.0))], list[ResolvedConfig]()
    while len(tried) <= options.settings:
        measured = [Measured(config=configs[numbers[one.values["flags"]]], seconds=one.seconds) for one in tried]
        found = next_layout(measured, device_name="cpu", failed=failed, fixed={"recompute": "none"})
        if found is None:
            break
        if (flags := layout_flags(found.config)) in numbers:
            tried.append(visit(Trial(values={"flags": flags}, expected=found.seconds)))
        else:
            failed.append(found.config)  # the other search had left it out
    for again in to_visit_again(tried):
        tried[tried.index(again)] = visit(again)
    kept = min(tried, key=lambda trial: trial.seconds)
    return [numbers[one.values["flags"]] for one in (*tried, kept)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", type=int, default=3, help="for each number of ranks")
    parser.add_argument("--seconds", type=float, default=50.0, help="of measuring, for each model")
    parser.add_argument("--after", type=int, default=5, help="steps of a visit")
    parser.add_argument("--settings", type=int, default=8, help="others that a run may try")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    draw, shares, rows = random.Random(options.seed), list[float](), list[tuple[str, ...]]()
    for ranks in (number for number in options.ranks for _ in range(options.models)):
        sizes = {name: draw.choice(values) for name, values in _SIZES.items()}
        with tempfile.TemporaryDirectory() as directory:
            config = resolved_configuration(
                argparse.Namespace(**sizes), directory, micro_batch=1, ranks=ranks, dp=1, pp=1, tp=ranks, device="cpu",
                check_replicas_interval=0,
            )  # fmt: skip
            configs = settings_of(config)
            draw.shuffle(configs)
            taken: list[list[float]] = run_distributed(measure, ranks, configs, options.seconds, timeout=1200)[0]
        *tried, kept = choose(configs, taken, options)
        best = min(range(len(configs)), key=lambda number: statistics.median(taken[number]))
        # Beside the best, in the rounds of both.
        speeds = [
            statistics.median(taken[best][: len(taken[one])]) / statistics.median(taken[one]) for one in (0, kept)
        ]
        shares.append(speeds[1])
        names = (", ".join(f"{name} {size}" for name, size in sizes.items()), layout_flags(configs[kept]))
        figures = str(len(configs)), str(len(tried) - 1), f"{speeds[0]:.0%}", f"{speeds[1]:.1%}"
        rows.append((str(ranks), names[0], *figures, names[1]))
        print(f"{rows[-1]}; best: {layout_flags(configs[best])}", file=sys.stderr, flush=True)
    head = ("ranks", "model", "settings", "tried", "speed at the start", "speed of the choice", "choice")
    print(table(head, rows))
    good = sum(share >= 0.97 for share in shares)
    print(f"\nSpeeds beside the best of all settings. 97% or more: {good} of {len(shares)}; least {min(shares):.1%}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
