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


@pytest.fixture
def without_plan(tmp_path: Path) -> Path:
    """The repository's sources without the planner."""
    for name in ("megacore", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("plan", "__pycache__"))
    for name in ("pretrain_gpt.py", "pretrain_bert.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    return tmp_path


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


@pytest.mark.parametrize("entry", ["pretrain_gpt.py", "pretrain_bert.py"])
def test_a_dry_run_says_that_the_planner_is_missing(entry: str, without_plan: Path) -> None:
    done = run(without_plan, entry, "--dry-run", *MODEL)
    assert done.returncode == 2 and "megacore/plan, which is not installed" in done.stderr
    assert "Traceback" not in done.stderr
