"""Ranks that were started differently are refused at launch, with what differs and where."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacore.checkpoint.manifest import read_manifest
from megacore.config import ResolvedConfig
from megacore.train import same_run
from megacore.train.same_run import differences, facts
from tests.e2e.launching import (
    BERT_PROGRAM,
    PROGRAM,
    ROOT,
    START,
    alone,
    by_hand,
    environment,
    free_port,
    needs_proc,
    run_cold,
    small_run,
    started,
    under_torchrun,
)
from tests.parity.runs import make_config
from tests.patience import patience
from tests.unit import data_bytes

# Stands for the command lines of several nodes: flags by rank.
OTHERWISE = """
import os, runpy, sys
sys.argv = [{program!r}, *sys.argv[1:], *{flags!r}[int(os.environ["RANK"])]]
sys.path.insert(0, {root!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_with_own_flags(tmp_path: Path, flags: list[list[str]], *common: str) -> str:
    """Start as many ranks as there are lists, each with the flags of its list; what they said."""
    script = tmp_path / "otherwise.py"
    script.write_text(OTHERWISE.format(program=str(PROGRAM), root=str(PROGRAM.parent), flags=flags))
    with under_torchrun(tmp_path / "logs", len(flags), script, *common) as job:
        job.ends(60.0)
    return job.said()


@pytest.mark.parametrize("differs", [pytest.param("seed", marks=pytest.mark.slow), "output_dir"])
def test_without_torchrun_a_refusal_is_said_once_and_soon(tmp_path: Path, differs: str) -> None:
    """Rank 0 serves the store in which the ranks agree on who speaks."""
    port, began = free_port(), time.monotonic()
    with contextlib.ExitStack() as ranks:
        programs = []
        for rank, value in enumerate((1, 2)):
            given = {"dp": 2, "global_batch_size": 2, "output_dir": tmp_path / "out"}
            given[differs] = tmp_path / str(value) if differs == "output_dir" else value
            flags = small_run(**given)  # type: ignore[arg-type]
            program = started(PROGRAM, tmp_path / f"{rank}.err", *flags, **by_hand(rank, port))
            programs.append(ranks.enter_context(program))
        assert [program.wait(patience(60)) for program in programs] == [2, 2]
    said = [(tmp_path / f"{rank}.err").read_text() for rank in range(2)]
    assert time.monotonic() - began < patience(5)
    assert sum(text.count("refused on rank") for text in said) == sum(text.count("megacore: ") for text in said) == 1
    assert "frame #" not in "".join(said)


@needs_proc
def test_ranks_that_load_other_checkpoints_of_one_step_are_refused(tmp_path: Path) -> None:
    for seed in (1, 2):
        done = alone(*small_run(tmp_path / f"s{seed}", train_iters=1, seed=seed), timeout=60.0)
        assert done.returncode == 0, done.stderr
    loads = [["--load", str(tmp_path / name / "step_00000001")] for name in ("s1", "s2")]
    said = run_with_own_flags(tmp_path, loads, *small_run(tmp_path / "out", global_batch_size=2))
    assert said.count("megacore: refused on rank ") == 1
    first, second = (read_manifest(tmp_path / name / "step_00000001").manifest_sha256[:16] for name in ("s1", "s2"))
    assert (
        f"the ranks load different checkpoints: rank 0: {tmp_path}/s1/step_00000001 (step 1, manifest {first}); "
        f"rank 1: {tmp_path}/s2/step_00000001 (step 1, manifest {second}): give every rank the same one\n"
    ) in said
    assert "Traceback" not in said


def changed(config: ResolvedConfig, section: str, **values: object) -> ResolvedConfig:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def told(first: ResolvedConfig, other: ResolvedConfig) -> str:
    return "\n".join(differences([facts(first), facts(other)])[:-1])


def dataset(prefix: Path, last: int) -> Path:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    return data_bytes.write(prefix, [[[5, 6, last]]])


def test_a_path_may_differ_but_not_what_it_leads_to(tmp_path: Path) -> None:
    one, same, other = (dataset(tmp_path / name / "corpus", last) for name, last in (("a", 7), ("b", 7), ("c", 8)))
    plain = make_config((1, 1, 2), tmp_path / "out")
    base = changed(plain, "data", data_path=(str(one),), mock_data=False)
    moved = changed(base, "data", data_path=(str(same),), data_cache_path=None)
    assert told(base, changed(moved, "training", output_dir="elsewhere")) == ""
    text = told(base, changed(base, "data", data_path=(str(other),)))
    assert text.startswith("rank 1 (pp 0, dp 1, tp 0): --data-path, .bin of dataset 1 6 bytes (")
    assert "--load auto, rank 0: not given" in told(base, changed(base, "checkpoint", load="auto"))
    assert "No such file" in told(base, changed(base, "data", data_path=(str(tmp_path / "none"),)))


def test_weights_of_a_blend_are_compared(tmp_path: Path) -> None:
    one, other = (str(dataset(tmp_path / name, last)) for name, last in (("a", 7), ("b", 8)))
    plain = make_config((1, 1, 2), tmp_path / "out")
    base = changed(plain, "data", data_path=("0.3", one, "0.7", other), mock_data=False)
    text = told(base, changed(base, "data", data_path=("0.7", one, "0.3", other)))
    assert text == "rank 1 (pp 0, dp 1, tp 0): weights of --data-path 0.7 0.3, rank 0: 0.3 0.7"


@pytest.mark.parametrize("read_whole", [1 << 26, 1 << 20])
def test_a_byte_in_the_middle_of_a_dataset_is_compared(
    read_whole: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(same_run, "READ_WHOLE", read_whole)
    base = make_config((1, 1, 2), tmp_path / "out")
    configs = []
    for name in ("a", "b"):
        prefix = dataset(tmp_path / name, 7)
        content = bytearray(5 << 20)
        content[2_500_000] = ord(name)
        prefix.with_suffix(".idx").write_bytes(content)
        configs.append(changed(base, "data", data_path=(str(prefix),), mock_data=False))
    text = told(*configs)
    assert text.startswith("rank 1 (pp 0, dp 1, tp 0): --data-path, .idx of dataset 1 5242880 bytes (")
    assert "\n" not in text


def test_another_program_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = make_config((1, 1, 2), tmp_path)
    found = []
    for line in ("print(1)", "print(2)"):
        (tmp_path / "program.py").write_text(line)
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "program.py"), raising=False)
        found.append(facts(config))
    text = differences(found)
    assert text[0].startswith("rank 1 (pp 0, dp 1, tp 0): the program's source program.py ")
    assert len(text) == 2


def test_other_code_or_another_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = make_config((1, 1, 2), tmp_path)
    before = facts(config)
    assert any(name.startswith("megacore's kernels/") for name in before)
    monkeypatch.setattr(same_run.torch, "__version__", "2.0.0")
    text = differences([before, facts(config) | {"megacore's train/launch.py": "other"}])
    assert text[0].startswith("rank 1 (pp 0, dp 1, tp 0): version of torch 2.0.0, rank 0: ")
    assert text[1].startswith("rank 1 (pp 0, dp 1, tp 0): megacore's train/launch.py other, rank 0: ")


def test_ranks_that_differ_alike_share_a_line_and_most_ranks_are_right() -> None:
    first = {"--tp": "2", "--cp": "1", "--dp": "4", "--pp": "1", "--seed": "1"}
    lines = differences([first] * 4 + [first | {"--seed": "2"}] * 4)
    assert lines[:-1] == ["ranks 4 to 7 (the first: pp 0, dp 2, tp 0): --seed 2, ranks 0 to 3: 1"]
    most = {"--tp": "1", "--cp": "1", "--dp": "3", "--pp": "1", "--seed": "1"}
    lines = differences([most | {"--tp": "3", "--dp": "1"}, most, most])
    assert lines[:-1] == [
        "rank 0 (pp 0, dp 0, tp 0): --tp 3, ranks 1, 2: 1",
        "rank 0 (pp 0, dp 0, tp 0): --dp 1, ranks 1, 2: 3",
    ]


# ---- launches


@pytest.mark.parametrize("program", [PROGRAM, BERT_PROGRAM, ROOT / "tools" / "quickstart.py"])
def test_the_first_line_comes_within_a_second(program: Path) -> None:
    started = time.monotonic()
    with subprocess.Popen([sys.executable, program], env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line, elapsed = process.stdout.readline(), time.monotonic() - started
        process.kill()
    assert line in ("starting 1 process: reading flags and files\n", "quick start: looking for GPUs\n")
    assert elapsed < patience(1)


@needs_proc
def test_the_first_rank_says_how_far_the_start_has_come(tmp_path: Path) -> None:
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *small_run(tmp_path / "out", dp=2, train_iters=1)) as job:
        assert job.ends(START)[0] == 0
        said = [line for line in job.said("stdout").splitlines() if line.startswith("starting ")]
    assert [re.sub(r" +\d+\.\d s", " T s", line) for line in said] == [
        "starting 2 processes: reading flags and files",
        "starting T s | loading torch",
        "starting T s | joining 2 ranks and comparing them",
        "starting T s | preparing data and model",
    ]


@pytest.mark.slow
def test_finished_runs_end_with_status_0(tmp_path: Path) -> None:
    """Of processes that a launcher has started cold. Status 0 alone could hide a death that it does not see."""
    for number in range(10):
        flags = small_run(tmp_path / f"out{number}", tp=2, pp=2, train_iters=3, global_batch_size=8)
        with under_torchrun(tmp_path / f"logs{number}", 4, PROGRAM, *flags, cold=True) as job:
            status, _ = job.ends(START)
            said = job.said("stdout") + job.said()
        assert status == 0 and "terminate" not in said and "done: 3 steps" in said, said


def test_a_run_without_one_update_stops_with_status_4(tmp_path: Path) -> None:
    done = alone(*small_run(tmp_path, init_method_std=1e30, train_iters=2, seq_length=32, device="cpu"), timeout=60)
    assert done.returncode == 4, done.stderr
    assert "megacore: stopped: each of 2 steps was skipped" in done.stderr and "done" not in done.stdout


# ---- what a run loads: every rank pays for it, before its first step


CODE = """
import sys
import pretrain_gpt
for number, flags in enumerate(["", "--optimizer muon --normalization RMSNorm --recompute light"]):
    assert pretrain_gpt.main([*sys.argv[1:], "--output-dir", f"run{number}", *flags.split()]) == 0
slow = "torch._dynamo", "sympy", "triton", "transformers", "wandb"
print("loaded:", *(name for name in slow if name in sys.modules))
"""


def test_a_run_loads_neither_a_compiler_nor_what_it_does_not_use(tmp_path: Path) -> None:
    """torch would load its compiler at the first operator of ours, and sympy at the first backward: four seconds."""
    words = ["--mock-data", "--vocab-size", "128", "--preset", "gpt2-tiny", "--train-iters", "2"]
    done = run_cold(sys.executable, "-c", CODE, *words, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "loaded:"
