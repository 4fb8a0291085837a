"""A tree without an outer ring trains all the same, and says what is missing where it is asked for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.golden.trees import ROOT, Ended, Worker

Without = Callable[[str], Worker]
MODEL = ("--mock-data", "--vocab-size", "128", "--preset", "gpt2-tiny", "--train-iters", "2")
# An editable installation would find in the repository what the copy lacks.
SITE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
"""


@pytest.fixture
def without(tmp_path: Path) -> Iterator[Without]:
    """A process that runs programs of a copy of the repository's sources without one ring."""
    workers: list[Worker] = []

    def started(ring: str) -> Worker:
        tree = tmp_path / "tree"
        for name in ("megacore", "kernels"):  # with what is compiled of them, but for what another test writes just now
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns(ring, "*.pyc.*"))
        (tree / "megacore" / ring / "__pycache__").mkdir(parents=True)  # as a deletion leaves it
        for name in ("pretrain_gpt.py", "pretrain_bert.py"):
            shutil.copy(ROOT / name, tree)
        (tree / "sitecustomize.py").write_text(SITE)
        workers.append(Worker(tree))
        return workers[-1]

    yield started
    for worker in workers:
        worker.close()


def of_two_ranks(worker: Worker, *flags: str) -> str:
    """What a run on two ranks prints."""
    words = (*MODEL, "--micro-batch-size", "1", "--global-batch-size", "4", *flags)
    done = worker.run("pretrain_gpt.py", words, worker.tree, ranks=2)
    assert done.statuses == [0, 0] and "done: 2 steps" in done.out, done.err
    return done.out


def run(worker: Worker, *words: str, script: str = "pretrain_gpt.py") -> Ended:
    return worker.run(script, [*MODEL, *words], worker.tree)


def test_without_the_planner_a_pipeline_trains_and_a_dry_run_says_that_it_is_missing(without: Without) -> None:
    """--schedule auto is 1F1B, and nothing is predicted of memory."""
    worker = without("plan")
    output = of_two_ranks(worker, "--pp", "2")
    assert "1f1b" in output.lower() and "by formula" not in output
    for script in ("pretrain_gpt.py", "pretrain_bert.py"):
        done = run(worker, "--dry-run", script=script)
        assert done.statuses == [2] and "megacore/plan, which is not installed" in done.err, script
        assert "Traceback" not in done.err


def test_without_the_watchdog_two_ranks_train(without: Without) -> None:
    of_two_ranks(without("watch"), "--dp", "2")


def test_without_the_observers_two_ranks_train_and_the_run_says_that_nothing_is_recorded(without: Without) -> None:
    worker = without("observe")
    output = of_two_ranks(worker, "--dp", "2", "--save-interval", "1")
    assert "step 1/2" not in output and not (worker.tree / "output" / "metrics.jsonl").exists()
    assert (worker.tree / "output" / "step_00000002").is_dir()
    done = run(worker, "--load", "auto", "--train-iters", "4")
    assert done.statuses == [0] and "megacore/observe is not installed: nothing of the run is recorded" in done.err
    assert "continues" in done.out and "done: 4 steps" in done.out


@pytest.mark.parametrize(("ring", "flag"), [("audit", "--ledger"), ("survive", "--survive")])
def test_without_a_ring_a_run_trains_and_its_flag_is_refused(without: Without, ring: str, flag: str) -> None:
    worker = without(ring)
    assert run(worker).statuses == [0]
    refused = run(worker, flag)
    assert refused.statuses == [2]
    assert f"{flag} needs megacore/{ring}, which is not installed: leave it out" in refused.err


def test_without_the_ladder_a_run_is_planned_and_a_budget_is_refused(without: Without) -> None:
    worker = without("ladder")
    (worker.tree / "plan.py").write_text(
        "import sys\nfrom megacore.commands.plan import plan_tool\nsys.exit(plan_tool())"
    )
    flags = ("--preset", "gpt2-tiny", "--cluster", "laptop", "--estimate")
    assert worker.run("plan.py", ["pretrain_gpt.py", *flags], worker.tree).statuses == [0]
    refused = worker.run("plan.py", ["pretrain_gpt.py", *flags, "--budget", "8 h on 8 x h100"], worker.tree)
    assert refused.statuses == [2]
    assert "--budget needs megacore/ladder, which is not installed: leave it out" in refused.err


# In one interpreter: what megacore offers, a run, and a run with flags of other trainers.
WITHOUT_ARRIVE = """
import sys
import megacore
print(hasattr(megacore, "initialize"), "Trainer" in dir(megacore))
from pretrain_gpt import main
print("trained:", main(sys.argv[1:]), file=sys.stderr)
sys.exit(main([*sys.argv[1:], "--train-samples", "9", "--deepspeed-config", "ds.json"]))
"""


def test_without_the_ways_of_other_trainers_megacores_own_flags_train(without: Without) -> None:
    worker = without("arrive")
    (worker.tree / "both.py").write_text(WITHOUT_ARRIVE)
    done = run(worker, script="both.py")
    assert done.out.startswith("False True\n") and done.err.startswith("trained: 0\n"), done.err
    assert done.statuses == [2] and "--train-samples is not a flag" in done.err
    assert "--deepspeed-config is not a flag" in done.err
