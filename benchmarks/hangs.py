"""Random hangs: is the right rank named, how soon, and does every process end?

    python -m benchmarks.hangs --trials 50 --seed 0
    python -m benchmarks.hangs --healthy-steps 2000

Each trial draws a layout of 2 to 8 ranks, a place in the run, a fault and the rank that has it. It prints one line per
trial, and then how many named the right rank, how many named another one with certainty, and the longest delays.

With --healthy-steps no rank hangs: one is slow in every forward, and saves, evaluations and logging are slow, each
longer than the timeout. Any report is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.parallel.heartbeat import Phase
from megacore.watch.budget import STEPS, TIMES
from tests.e2e.hanging import HANG, MARK
from tests.e2e.launching import small_run, under_torchrun

HANGING = Path(__file__).resolve().parents[1] / "tests" / "e2e" / "hanging.py"
PAIRS = [{"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}]
LAYOUTS = [{"dp": 2}, {"pp": 2}, {"tp": 2}, {"dp": 3}, {"pp": 4}, *PAIRS]
LARGE = [{"pp": 2, "dp": 2, "tp": 2}, {"pp": 2, "dp": 4}, {"pp": 3, "dp": 2}]
# Place -> (section, whose budget holds, the first of its calls that is drawn, and the last one).
PLACES = {
    "start": (Phase.START, 1, 1), "build": (Phase.START, 1, 1), "data": (Phase.STEP, 10, 60),
    "forward": (Phase.STEP, 10, 60), "backward": (Phase.STEP, 10, 60), "step": (Phase.STEP, 5, 40),
    "sink": (Phase.SINK, 2, 8), "evaluate": (Phase.EVALUATE, 2, 6), "save": (Phase.SAVE, 1, 4),
    "collective": (Phase.STEP, 15, 40), "message": (Phase.STEP, 60, 120),
}  # fmt: skip
FAULTS = ("stop", "kill", "sleep", "lock")
START, END = 240.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a trial ended.

    Attributes:
        said: first line of the message; empty if there was none in time.
        result: right, unsure (nobody, or the wrong one without certainty), innocent (the wrong one, as if it were
            sure), or not reached: the machine was too slow for the run to come to its fault.
        delay: seconds between the fault and the message, beyond what its phase is allowed: its multiple of the timeout
            or, where that is longer, ten median steps.
        end: seconds until the last process was gone.
    """

    said: str
    result: str
    delay: float
    end: float


def main(argv: Sequence[str]) -> int:
    """Run the trials; returns 1 if the wrong rank was named with certainty, or too often none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--trials", type=int, default=50)
    add("--seed", type=int, default=0)
    add("--minutes", type=float, default=0.05, help="--hang-timeout-minutes of the runs")
    add("--large", type=float, default=0.15, help="share of trials with 6 or 8 ranks")
    add("--healthy-steps", type=int, default=0, help="count false alarms in so many steps instead")
    options = parser.parse_args(argv)
    if options.healthy_steps:
        return healthy(options.healthy_steps, minutes=options.minutes)
    return trials(options.trials, seed=options.seed, minutes=options.minutes, large=options.large)


@contextmanager
def started(ranks: int, plan: object, minutes: float, **settings: Any) -> Iterator[tuple[Any, Path]]:
    """A run with what it plans to suffer, and its folder, which has `mark` once it has come to it."""
    with tempfile.TemporaryDirectory(prefix="hangs-") as name:
        folder = Path(name)
        os.environ |= {HANG: json.dumps(plan), MARK: str(folder / "mark")}
        settings |= {"hang_timeout_minutes": minutes, "eval_iters": 1, "keep_last": 1}
        flags = small_run(folder / "out", **settings)
        with under_torchrun(folder / "logs", ranks, HANGING, *flags) as job:
            yield job, folder


def trials(count: int, *, seed: int, minutes: float, large: float) -> int:
    """Run random trials; returns 1 if the wrong rank was named with certainty, or the right one in less than 96%.

    Args:
        count: of trials.
        seed: of what is drawn.
        minutes: `--hang-timeout-minutes` of the runs.
        large: share of trials with 6 or 8 ranks.
    """
    results: Counter[str] = Counter()
    delays, ends = [], []
    for trial in range(count):
        draw = random.Random(f"{seed}-{trial}")
        layout = draw.choice(LARGE if draw.random() < large else LAYOUTS)
        ranks = layout.get("pp", 1) * layout.get("dp", 1) * layout.get("tp", 1)
        at = draw.choice([place for place in PLACES if place != "message" or "pp" in layout])
        fault = draw.choice({"collective": ("skip", "skip-last"), "message": ("lengthen", "shorten")}.get(at, FAULTS))
        victim = 0 if at == "sink" else draw.randrange(ranks)
        section, first, last = PLACES[at]
        plan = {"rank": victim, "at": at, "call": draw.randint(first, last), "fault": fault}
        at_once = fault in ("kill", "lengthen", "shorten")
        allowed = 0.0 if at_once else 60 * minutes * (TIMES[section] if fault in ("sleep", "lock") else 1.0)
        outcome = run(layout, ranks, plan, minutes=minutes, allowed=allowed)
        results[outcome.result] += 1
        if outcome.said:
            delays.append(outcome.delay)
            ends.append(outcome.end)
        took = f"{outcome.delay:+.1f} s, gone {outcome.end:.1f} s"
        print(f"{trial:3} {layout} {plan}: {outcome.result}, {took} | {outcome.said[:100]}")
        sys.stdout.flush()
    print(f"{dict(results)} of {count}")
    if delays:
        late, gone = max(delays), max(ends)
        print(f"reports at most {late:.1f} s late; every process gone at most {gone:.1f} s after its report")
    return int(results["innocent"] > 0 or results["right"] < 0.96 * (count - results["not reached"]))


def healthy(steps: int, *, minutes: float) -> int:
    """Run so many slow steps; returns 1 if one of them was taken for a hang.

    Args:
        steps: of the run.
        minutes: `--hang-timeout-minutes` of the run.
    """
    slow = [
        {"rank": 1, "at": "forward", "call": 1, "fault": "slow", "seconds": 0.02},
        {"rank": 0, "at": "save", "call": 1, "fault": "slow", "seconds": 90 * minutes},
        {"rank": 1, "at": "evaluate", "call": 1, "fault": "slow", "seconds": 75 * minutes},
        {"rank": 0, "at": "sink", "call": 1, "fault": "slow", "seconds": 75 * minutes},
    ]
    every = {"log_interval": steps // 20, "eval_interval": steps // 10, "save_interval": steps // 10}
    every = {name: max(1, interval) for name, interval in every.items()}
    sizes = {"pp": 2, "train_iters": steps, "global_batch_size": 2, "num_layers": 2}
    with started(2, slow, minutes, **sizes, **every) as (job, _):
        while job.torchrun.poll() is None:
            time.sleep(0.5)
        alarms, done = job.said().count("megacore: hang"), f"done: {steps} steps" in job.said("stdout")
    print(f"{alarms} false alarms in {steps} steps; the run {'finished' if done else 'did not finish'}")
    return int(alarms > 0 or not done)


def run(layout: dict[str, int], ranks: int, plan: dict[str, object], *, minutes: float, allowed: float) -> Outcome:
    """Start a run with the fault, and see what it says and when it is gone."""
    every = {"log_interval": 2, "eval_interval": 4, "save_interval": 3}
    # Where a step has no log, ranks hang that otherwise meet in sums of other sizes.
    sizes = {**layout, "num_layers": 4, "global_batch_size": 4 * layout.get("dp", 1), "train_iters": 1_000_000}
    with started(ranks, plan, minutes, **sizes, **every) as (job, folder):
        deadline = time.monotonic() + START
        while not ("megacore:" in job.said() or job.torchrun.poll() is not None or time.monotonic() > deadline):
            time.sleep(0.05)
        said_at, said = time.time(), job.said()
        deadline = time.monotonic() + END
        while job.pids() and time.monotonic() < deadline:
            time.sleep(0.05)
        end = time.time() - said_at
        if "megacore:" not in said:  # a rank died at start, and torchrun has ended the others at once
            summary = (job.logs / "torchrun.err").read_text()
            found = re.search(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", summary, re.DOTALL)
            said = f"torchrun: rank {found[1]} (exitcode {found[2]})" if found else ""
        is_reached = (folder / "mark").exists()
        happened = float((folder / "mark").read_text()) if is_reached else said_at
        for report in (folder / "out").glob("hang-*.json"):
            content = json.loads(report.read_text())
            if content["verdict"]["kind"] not in ("stopped", "gone"):
                # The draw does not know the section that the rank was in, such as the first step.
                victim = next(one for one in content["ranks"] if one["identity"]["rank"] == plan["rank"])
                of_section = 60 * minutes * TIMES[Phase[victim["section"]]]
                allowed = max(allowed, of_section, STEPS * max(rank["median_step"] for rank in content["ranks"]))
    message = next((line for line in said.splitlines() if line.startswith(("megacore:", "torchrun:"))), "")
    cause = message.partition("probably because of")[2] or message.partition("); ")[2]  # of sizes that differ
    head = (cause or message).partition("(")[0]
    named = {int(number) for number in re.findall(r"\brank (\d+)", head)}
    is_open = not message or any(word in message for word in ("probably", "cycle", "undetermined"))
    result = "right" if named == {plan["rank"]} else "unsure" if is_open else "innocent"
    if not is_reached and not message:
        result = "not reached"
    return Outcome(said=message, result=result, delay=said_at - happened - allowed, end=end)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
