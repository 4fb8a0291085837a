"""`make gpu-check` without a GPU: its parts end on time and one by one, its figures are true, its wheels are complete.

tests/e2e/test_gpu_check.py runs the whole command."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import kernels
from benchmarks.gpu_check import download, parts, training, wheels
from benchmarks.gpu_check.fitting import largest_fitting
from benchmarks.gpu_check.parts import Outcome, Part, run_parts
from benchmarks.gpu_check.records import Record, Records, read_records
from megacore.errors import ConfigError
from megacore.parallel.host_memory import AvailableMemory
from megacore.plan import fit
from tests.patience import patience, scaled, until
from tests.unit.test_distributed_harness import gone

CPU = torch.device("cpu")
RECORD = (
    "import json, sys; file = open(sys.argv[-1], 'a'); print(json.dumps({'kind': 'x', 'n': 1}), file=file, flush=True)"
)


def outcomes_of(directory: Path, seconds: float, *parts: Part) -> list[Outcome]:
    return run_parts(parts, directory, seconds=seconds, environment=os.environ, report=lambda _: None)


def part(name: str, code: str, weight: float = 1.0, *, required: bool = False) -> Part:
    return Part(name=name, arguments=["-c", f"{RECORD}; {code}"], weight=weight, required=required)


# ---- parts


def test_a_part_that_fails_and_one_that_hangs_leave_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_LEAST_SECONDS", 0.1)
    hangs = "import subprocess, time; print(subprocess.Popen(['sleep', '100']).pid, flush=True); time.sleep(100)"
    found = outcomes_of(
        tmp_path,
        400.0,
        part("fails", "raise ValueError('no such kernel')", weight=400.0),
        part("hangs", hangs, weight=scaled(1)),  # of 400 seconds
        part("runs", "pass", weight=400.0),
    )
    assert [(one.status, one.exit_status) for one in found] == [("failed", 1), ("cut off", None), ("done", 0)]
    assert [one.records for one in found] == [[{"kind": "x", "n": 1}]] * 3  # also of those that did not end well
    assert "no such kernel" in found[0].log_tail
    assert found[2].log_tail == ""
    child = int(found[1].log_tail)
    until(lambda: gone(child), 5, "a part's own process is left")


def test_the_time_that_a_part_leaves_goes_to_the_others(tmp_path: Path) -> None:
    first, second = outcomes_of(tmp_path, 100.0, part("a", "pass", 3.0), part("b", "pass", 1.0))
    assert first.limit_seconds == pytest.approx(75.0, abs=0.1)
    assert second.limit_seconds == pytest.approx(100.0 - first.seconds, abs=patience(0.5))


def test_without_a_required_part_nothing_else_starts(tmp_path: Path) -> None:
    found = outcomes_of(tmp_path, 100.0, part("a", "sys.exit(2)", required=True), part("b", "pass"))
    assert [one.status for one in found] == ["failed", "not started"]


def test_a_line_that_was_cut_off_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "records"
    records = Records(path)
    records.add("kernel", seconds=0.5)
    with path.open("a") as file:
        file.write('{"kind": "ker')
    assert read_records(path) == [{"kind": "kernel", "seconds": 0.5}]


# ---- the largest micro batch


@pytest.mark.parametrize("memory", [10, 11, 99, 100, 1000, 4097])
@pytest.mark.parametrize("known", [True, False])
def test_the_largest_micro_batch_is_found(memory: int, known: bool) -> None:
    """Peak 7 + 3 b, of which 6% may not be filled by a guess: it must fit, and be close to the best."""
    tried = []

    def peak(size: int) -> int | None:
        tried.append(size)
        return 7 + 3 * size if 7 + 3 * size <= memory else None

    best = min((memory - 7) // 3, 1024)
    found = largest_fitting(peak, memory=memory if known else None, at_most=1024)
    assert found <= best and len(tried) <= 7
    if known or best < 64:
        assert found >= best * 0.8 - 1


# ---- training


def recorded(path: Path, kind: str) -> Record:
    (found,) = [record for record in read_records(path) if record["kind"] == kind]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of the small GPT-2."""
    path = tmp_path_factory.mktemp("training") / "records"
    threads = torch.get_num_threads()
    assert training.main(["--shape", "gpt2-small", "--small", "--device", "cpu", "--records", str(path)]) == 0
    torch.set_num_threads(threads)
    return path


def test_training_is_measured_beside_its_formulas(trained: Path) -> None:
    """GPT-2 of 2 layers, h 64, V 512, s 64: 12 L h^2 + 13 L h + V h + s h + 2 h parameters; bf16 with fp32 sums.

    The peak: Korthikanti et al. 2022, arXiv 2205.05198: 34 s b h bytes per block with fused attention; at the beginning
    of backward besides logits, the head's input, its norm's output and its gradient, and the tied table's gradient.
    Operations: Narayanan et al. 2021: 72 B s L h^2 (1 + s / 6 h + V / 12 L h); causal attention has half of the second
    term.
    """
    found = recorded(trained, "training")
    h, layers, vocabulary, length, batch = 64, 2, 512, 64, 4
    assert [record["micro_batch"] for record in read_records(trained) if record["kind"] == "fit"] == [1, 2, 4]
    assert (found["micro_batch"], found["seq_length"]) == (batch, length)
    assert found["tokens_per_second"] == pytest.approx(batch * length / found["step_seconds"])
    assert found["step_seconds"] == pytest.approx(sorted(found["seconds_of_each_step"])[1], rel=1e-2)
    assert found["mfu_full"] is None  # a CPU's peak is unknown
    count = layers * (12 * h**2 + 13 * h) + vocabulary * h + length * h + 2 * h
    state = {"params": 2 * count, "grads": 4 * count, "optimizer": 12 * count, "buffers": 0}
    assert found["state_bytes_predicted"] == state
    assert found["state_bytes_counted"] == pytest.approx(state, rel=1e-2)
    sbh = length * batch * h
    kept, logits, stream = layers * 34 * sbh, 2 * length * batch * vocabulary, 2 * 3 * sbh
    peak = 18 * count + kept + logits + stream + 2 * h * vocabulary
    assert found["peak_bytes_predicted"] == pytest.approx(peak, rel=0.05)  # an estimate
    base = 72 * batch * length * layers * h**2 / found["step_seconds"] / 1e12
    attention, head = length / (6 * h), vocabulary / (12 * layers * h)
    assert found["tflops_full"] == pytest.approx(base * (1 + attention + head), rel=1e-9)
    assert found["tflops_causal"] == pytest.approx(base * (1 + attention / 2 + head), rel=1e-9)


def test_too_large_a_micro_batch_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits while it is tried may not fit for longer; the largest one that does is then measured."""
    asked = []

    def measure(run: training.Run, micro_batch: int, records: Records) -> None:
        asked.append(micro_batch)
        if micro_batch > 5:
            raise torch.OutOfMemoryError("out of memory")

    earlier, path = tmp_path / "earlier", tmp_path / "records"
    Records(earlier).add("training", shape="gpt2-xl", micro_batch=20)
    monkeypatch.setattr(training, "measure", measure)
    words = ["--shape", "gpt2-xl", "--small", "--device", "cpu", "--like", str(earlier), "--records", str(path)]
    assert training.main(words) == 0
    assert asked == [20, 10, 5]
    assert [record["micro_batch"] for record in read_records(path)] == [20, 10]


def test_what_the_memory_check_refuses_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula may be wrong: what fits is found on the device. With the check this run would be refused."""
    monkeypatch.setattr(fit, "host_memory", lambda: AvailableMemory(1.0, "left by the test"))
    run = training.Run(shape="gpt2-small", mode="plain", device=CPU, directory=tmp_path, small=True)
    config = training.config_of("gpt2-small", "plain", 1, tmp_path, small=True)
    checked = replace(config, training=replace(config.training, memory_check=True))
    with pytest.raises(ConfigError, match="left by the test"), training.trainer_of(checked, CPU):
        pass
    assert run.peak_bytes(1) is not None


# ---- kernels


def test_a_kernel_that_raises_leaves_the_others() -> None:
    def broken(*_: Tensor) -> Tensor:
        raise RuntimeError("an illegal memory access was encountered\nand a long explanation")

    every = list(kernels.Workloads(device=CPU, small=True))
    first, bad, last = every[0], replace(every[1], ours=broken), every[-1]
    figures: list[kernels.Figure] = []
    failed = kernels.measure_all([first, bad, last], CPU, copy=1e9, compile_too=False, report=figures.append)
    assert failed == 1
    errors = [figure for figure in figures if figure.error]
    assert [(one.operator, one.implementation) for one in errors] == [(bad.name, "megacore")]
    assert errors[0].error == "RuntimeError: an illegal memory access was encountered"
    timed = {(figure.operator, figure.implementation) for figure in figures if figure.seconds is not None}
    assert timed == {(one.name, who) for one in (first, bad, last) for who in ("megacore", "torch")} - {
        (bad.name, "megacore")
    }
    assert all(figure.share_of_copy == pytest.approx(figure.bytes / figure.seconds / 1e9)  # type: ignore[operator]
               for figure in figures if figure.seconds is not None)  # fmt: skip


# ---- the page


# ---- wheels


def test_the_wheels_are_what_setup_cfg_requires_pinned() -> None:
    """All of them at the pinned version, nothing that comes with a GPU's torch, and what those need that are named."""
    found = dict(line.split("==") for line in download.wanted())
    named = {wheels.name_of(line) for line in wheels.requirements()}
    assert named - download.PROVIDED <= found.keys()
    assert not found.keys() & (download.PROVIDED | {"ruff", "mypy", "matplotlib"})
    assert not [name for name in found if name.startswith("nvidia")]
    assert {"markdown-it-py", "iniconfig", "execnet"} <= found.keys()  # of rich, pytest, xdist
    assert all(version == download.pins().get(name, version) for name, version in found.items())
