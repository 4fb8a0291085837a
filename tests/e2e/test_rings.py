"""A tree without an outer ring trains all the same, and says what is missing where it is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launching import ROOT, free_port

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


def start(tree: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"} | variables
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *words], cwd=tree, env=environment, stdout=pipe, stderr=pipe, text=True)


def run(tree: Path, *words: str) -> tuple[int, str, str]:
    """The exit status of a command, its output and its errors."""
    process = start(tree, *words)
    output, errors = process.communicate()
    return process.returncode, output, errors


def of_two_ranks(tree: Path, *flags: str) -> str:
    """What a run on two ranks prints that are started by hand, which is faster than torchrun."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("pretrain_gpt.py", *MODEL, "--micro-batch-size", "1", "--global-batch-size", "4", *flags)
    first, second = (start(tree, *words, **job, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2))
    output, errors = first.communicate()
    assert (first.returncode, second.wait()) == (0, 0), errors + second.communicate()[1]
    assert "done: 2 steps" in output
    return output


def test_without_the_planner_a_pipeline_trains_and_a_dry_run_says_that_it_is_missing(tmp_path: Path) -> None:
    """--schedule auto is 1F1B, and nothing is predicted of memory."""
    tree = tree_without("plan", tmp_path)
    output = of_two_ranks(tree, "--pp", "2")
    assert "1f1b" in output.lower() and "by formula" not in output
    check_dry_run(tree, "pretrain_gpt.py")


def test_without_the_watchdog_two_ranks_train(tmp_path: Path) -> None:
    of_two_ranks(tree_without("watch", tmp_path), "--dp", "2")


def test_without_the_observers_two_ranks_train_and_the_run_says_that_nothing_is_recorded(tmp_path: Path) -> None:
    tree = tree_without("observe", tmp_path)
    output = of_two_ranks(tree, "--dp", "2", "--save-interval", "1")
    assert "step 1/2" not in output and not (tree / "output" / "metrics.jsonl").exists()
    assert (tree / "output" / "step_00000002").is_dir()
    status, output, errors = run(tree, "pretrain_gpt.py", *MODEL, "--load", "auto", "--train-iters", "4")
    assert status == 0 and "megacore/observe is not installed: nothing of the run is recorded" in errors, errors
    assert "continues" in output and "done: 4 steps" in output


@pytest.mark.parametrize(("ring", "flag"), [("audit", "--ledger"), ("survive", "--survive")])
def test_without_a_ring_a_run_trains_and_its_flag_is_refused(tmp_path: Path, ring: str, flag: str) -> None:
    tree = tree_without(ring, tmp_path)
    assert run(tree, "pretrain_gpt.py", *MODEL)[0] == 0
    status, _, errors = run(tree, "pretrain_gpt.py", *MODEL, flag)
    assert status == 2 and f"{flag} needs megacore/{ring}, which is not installed: leave it out" in errors


@pytest.mark.slow
def test_a_dry_run_of_bert_says_that_the_planner_is_missing(tmp_path: Path) -> None:
    check_dry_run(tree_without("plan", tmp_path), "pretrain_bert.py")


def check_dry_run(tree: Path, program: str) -> None:
    status, _, errors = run(tree, program, "--dry-run", *MODEL)
    assert status == 2 and "megacore/plan, which is not installed" in errors
    assert "Traceback" not in errors


# In one interpreter: what megacore offers, a run, and a run with flags of other trainers.
WITHOUT_ARRIVE = """
import sys
import megacore
print(hasattr(megacore, "initialize"), "Trainer" in dir(megacore))
from pretrain_gpt import main
print("trained:", main(sys.argv[1:]), file=sys.stderr)
sys.exit(main([*sys.argv[1:], "--train-samples", "9", "--deepspeed-config", "ds.json"]))
"""


def test_without_the_ways_of_other_trainers_megacores_own_flags_train(tmp_path: Path) -> None:
    status, output, errors = run(tree_without("arrive", tmp_path), "-c", WITHOUT_ARRIVE, *MODEL)
    assert output.startswith("False True\n") and errors.startswith("trained: 0\n"), errors
    assert status == 2 and "--train-samples is not a flag" in errors
    assert "--deepspeed-config is not a flag" in errors
