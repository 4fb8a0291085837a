"""A tree without an outer ring trains all the same, and says what is missing where it is asked for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.golden.trees import ROOT, Ended, Worker

MODEL = ("--mock-data", "--vocab-size", "128", "--preset", "gpt2-tiny", "--train-iters", "2")
# An editable installation would find in the repository what the copy lacks.
SITE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
"""


@dataclass(frozen=True)
class Copy:
    """A copy of the repository's sources without one ring. `worker`: forks its programs."""

    tree: Path
    worker: Worker

    def run(self, *words: str, script: str = "pretrain_gpt.py", ranks: int = 0) -> Ended:
        environment = {"PYTHONPATH": str(self.tree)}
        return self.worker.run(str(self.tree / script), words, self.tree, ranks=ranks, environment=environment)

    def of_two_ranks(self, *flags: str) -> str:
        """What a run on two ranks prints."""
        done = self.run(*MODEL, "--micro-batch-size", "1", "--global-batch-size", "4", *flags, ranks=2)
        assert done.statuses == [0, 0] and "done: 2 steps" in done.out, done.err
        return done.out


Without = Callable[[str], Copy]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A process that has torch and no megacore: each program imports that of its copy."""
    place = tmp_path_factory.mktemp("torch")
    (place / "sitecustomize.py").write_text(SITE)
    worker = Worker(place)
    yield worker
    worker.close()


@pytest.fixture
def without(worker: Worker, tmp_path: Path) -> Without:
    def copied(ring: str) -> Copy:
        tree = tmp_path / "tree"
        for name in ("megacore", "kernels"):  # with what is compiled of them, but for what another test writes just now
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns(ring, "*.pyc.*"))
        (tree / "megacore" / ring / "__pycache__").mkdir(parents=True)  # as a deletion leaves it
        for name in ("pretrain_gpt.py", "pretrain_bert.py"):
            shutil.copy(ROOT / name, tree)
        (tree / "sitecustomize.py").write_text(SITE)
        return Copy(tree, worker)

    return copied


def test_without_the_planner_a_pipeline_trains_and_a_dry_run_says_that_it_is_missing(without: Without) -> None:
    """--schedule auto is 1F1B, and nothing is predicted of memory."""
    copy = without("plan")
    output = copy.of_two_ranks("--pp", "2")
    assert "1f1b" in output.lower() and "by formula" not in output
    for script in ("pretrain_gpt.py", "pretrain_bert.py"):
        done = copy.run(*MODEL, "--dry-run", script=script)
        assert done.statuses == [2] and "megacore/plan, which is not installed" in done.err, script
        assert "Traceback" not in done.err


def test_without_the_watchdog_two_ranks_train(without: Without) -> None:
    without("watch").of_two_ranks("--dp", "2")


def test_without_the_observers_two_ranks_train_and_the_run_says_that_nothing_is_recorded(without: Without) -> None:
    copy = without("observe")
    output = copy.of_two_ranks("--dp", "2", "--save-interval", "1")
    assert "step 1/2" not in output and not (copy.tree / "output" / "metrics.jsonl").exists()
    assert (copy.tree / "output" / "step_00000002").is_dir()
    done = copy.run(*MODEL, "--load", "auto", "--train-iters", "4")
    assert done.statuses == [0] and "megacore/observe is not installed: nothing of the run is recorded" in done.err
    assert "continues" in done.out and "done: 4 steps" in done.out


@pytest.mark.parametrize(("ring", "flag"), [("audit", "--ledger"), ("survive", "--survive")])
def test_without_a_ring_a_run_trains_and_its_flag_is_refused(without: Without, ring: str, flag: str) -> None:
    copy = without(ring)
    assert copy.run(*MODEL).statuses == [0]
    refused = copy.run(*MODEL, flag)
    assert refused.statuses == [2]
    assert f"{flag} needs megacore/{ring}, which is not installed: leave it out" in refused.err


def test_without_the_ladder_a_run_is_planned_and_a_budget_is_refused(without: Without) -> None:
    copy = without("ladder")
    (copy.tree / "plan.py").write_text(
        "import sys\nfrom megacore.commands.plan import plan_tool\nsys.exit(plan_tool())"
    )
    flags = ("pretrain_gpt.py", "--preset", "gpt2-tiny", "--cluster", "laptop", "--estimate")
    assert copy.run(*flags, script="plan.py").statuses == [0]
    refused = copy.run(*flags, "--budget", "8 h on 8 x h100", script="plan.py")
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
    copy = without("arrive")
    (copy.tree / "both.py").write_text(WITHOUT_ARRIVE)
    done = copy.run(*MODEL, script="both.py")
    assert done.out.startswith("False True\n") and done.err.startswith("trained: 0\n"), done.err
    assert done.statuses == [2] and "--train-samples is not a flag" in done.err
    assert "--deepspeed-config is not a flag" in done.err
