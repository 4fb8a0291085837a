"""A tree without an outer ring trains all the same, and says what is missing where it is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ("--mock-data", "--vocab-size", "128", "--preset", "gpt2-tiny", "--train-iters", "2")
# An editable installation would find in the repository what the copy lacks.
SITE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
"""


def tree_without(ring: str, tree: Path) -> Path:
    """A copy of the repository's sources without one ring."""
    for name in ("megacore", "kernels"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns(ring, "__pycache__"))
    (tree / "megacore" / ring / "__pycache__").mkdir(parents=True)  # as a deletion leaves it
    for name in ("pretrain_gpt.py", "pretrain_bert.py"):
        shutil.copy(ROOT / name, tree)
    (tree / "sitecustomize.py").write_text(SITE)
    return tree


@pytest.fixture
def without_plan(tmp_path: Path) -> Path:
    return tree_without("plan", tmp_path)


def run(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_without_the_planner_a_pipeline_trains(without_plan: Path) -> None:
    """--schedule auto is 1F1B, and nothing is predicted of memory."""
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "pretrain_gpt.py", "--pp", "2")
    done = run(without_plan, *launch, *MODEL, "--micro-batch-size", "1", "--global-batch-size", "4")
    assert done.returncode == 0, done.stderr
    assert "done: 2 steps" in done.stdout and "1f1b" in done.stdout.lower() and "by formula" not in done.stdout


def test_without_the_watchdog_two_ranks_train(tmp_path: Path) -> None:
    tree = tree_without("watch", tmp_path)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "pretrain_gpt.py", "--dp", "2")
    done = run(tree, *launch, *MODEL, "--micro-batch-size", "1", "--global-batch-size", "4")
    assert done.returncode == 0 and "done: 2 steps" in done.stdout, done.stderr


@pytest.mark.parametrize("entry", ["pretrain_gpt.py", "pretrain_bert.py"])
def test_a_dry_run_says_that_the_planner_is_missing(entry: str, without_plan: Path) -> None:
    done = run(without_plan, entry, "--dry-run", *MODEL)
    assert done.returncode == 2 and "megacore/plan, which is not installed" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_ways_of_other_trainers_megacores_own_flags_train(tmp_path: Path) -> None:
    tree = tree_without("arrive", tmp_path)
    done = run(tree, "-c", "import megacore; print(hasattr(megacore, 'initialize'), 'Trainer' in dir(megacore))")
    assert (done.stdout, done.stderr) == ("False True\n", "")
    done = run(tree, "pretrain_gpt.py", *MODEL)
    assert (done.returncode, done.stderr) == (0, "")
    done = run(tree, "pretrain_gpt.py", *MODEL, "--train-samples", "9", "--deepspeed-config", "ds.json")
    assert done.returncode == 2 and "--train-samples is not a flag" in done.stderr
    assert "--deepspeed-config is not a flag" in done.stderr
