"""Benchmarks: the parts of `make gpu-check` end on time and one by one, its figures are true, its wheels are complete.

tests/e2e/test_benchmarks.py runs the whole command."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import compare, gpu
from benchmarks.comparison.job import ONE, Layout, Sizes, layout_of
from benchmarks.comparison.results import Largest, Results, Row, markdown, replace_section
from benchmarks.gpu import Outcome, Part, run_parts
from benchmarks.gpu_check import training
from benchmarks.gpu_check.fitting import largest_fitting
from benchmarks.gpu_check.records import read_records
from megacore.train.peaks import Format, peak_tflops
from tests.patience import scaled, until
from tests.unit.test_distributed_harness import gone

CPU = torch.device("cpu")
RECORD = (
    "import json, sys; file = open(sys.argv[-1], 'a'); print(json.dumps({'kind': 'x', 'n': 1}), file=file, flush=True)"
)


def outcomes_of(directory: Path, seconds: float, *parts: Part) -> list[Outcome]:
    return list(run_parts(parts, directory, seconds=seconds, environment=os.environ))


def part(name: str, code: str, weight: float = 1.0, *, required: bool = False) -> Part:
    return Part(name=name, arguments=["-c", f"{RECORD}; {code}"], weight=weight, required=required)


# ---- parts


def test_a_part_that_fails_and_one_that_hangs_leave_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 0.1)
    hangs = "import subprocess, time; print(subprocess.Popen(['sleep', '100']).pid, flush=True); time.sleep(100)"
    fails = part("fails", "raise ValueError('no such kernel')", weight=400.0)
    # The second has one of 400 seconds.
    last = part("runs", "pass", weight=400.0)
    found = outcomes_of(tmp_path, 400.0, fails, part("hangs", hangs, weight=scaled(1)), last)
    assert [(one.status, one.exit_status) for one in found] == [("failed", 1), ("cut off", None), ("done", 0)]
    assert [one.records for one in found] == [[{"kind": "x", "n": 1}]] * 3  # also of those that did not end well
    assert "no such kernel" in found[0].log_tail
    assert found[2].log_tail == ""
    child = int(found[1].log_tail)
    until(lambda: gone(child), 5, "a part's own process is left")


def test_without_a_required_part_nothing_else_starts(tmp_path: Path) -> None:
    found = outcomes_of(tmp_path, 100.0, part("a", "sys.exit(2)", required=True), part("b", "pass"))
    assert [one.status for one in found] == ["failed", "not started"]


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


@pytest.mark.parametrize(("base", "each", "limit"), [(100, 10, 205), (100, 10, 130), (0, 7, 700), (50, 100, 320)])
def test_the_largest_model_is_found(base: int, each: int, limit: int) -> None:
    """The next larger one was tried, and no size twice."""
    tried: list[int] = []

    def peak(size: int) -> int:
        tried.append(size)
        return base + each * size

    found = largest_fitting(peak, memory=limit, at_most=4096, exact=True)
    assert found == (limit - base) // each and found + 1 in tried
    assert len(set(tried)) == len(tried) <= 5


# ---- training


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of the small GPT-2."""
    path = tmp_path_factory.mktemp("training") / "records"
    threads = torch.get_num_threads()
    assert training.main(["--shape", "gpt2-small", "--small", "--device", "cpu", "--records", str(path)]) == 0
    torch.set_num_threads(threads)
    return path


@pytest.mark.slow
def test_training_is_measured_beside_its_formulas(trained: Path) -> None:
    """GPT-2 of 2 layers, h 64, V 512, s 64: 12 L h^2 + 13 L h + V h + s h + 2 h parameters; bf16 with fp32 sums.

    The peak: Korthikanti et al. 2022, arXiv 2205.05198: 34 s b h bytes per block with fused attention; at the beginning
    of backward besides logits, the head's input, its norm's output and its gradient, and the tied table's gradient.
    Operations: Narayanan et al. 2021: 72 B s L h^2 (1 + s / 6 h + V / 12 L h); causal attention has half of the second
    term.
    """
    (found,) = [record for record in read_records(trained) if record["kind"] == "training"]
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


# ---- benchmarks/compare.py without a framework -----------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
TINY = Sizes(layers=4, hidden=16, heads=2, seq=8, vocab=100, batch=8)


def row(side: str, layout: Layout, seconds: list[float], losses: list[float]) -> Row:
    return Row(
        side=side, implementation=f"{side}: it", layout=layout, seconds=seconds, limit=1e9, peak=3 << 20,
        losses=losses,
    )  # fmt: skip


@pytest.fixture
def results() -> Results:
    """Two frameworks on one process and on two ranks; the rounds of the second are twice as slow."""
    found = Results(date="2026-01-02", machine="2 CPU cores", versions={"torch": "2"}, sizes=TINY)
    for layout in (ONE, layout_of("dp", 2)):
        found.rows.append(row("megacore", layout, [0.5, 1.0, 1.5], [4.0, 3.0]))
        found.rows.append(row("torch", layout, [1.0, 2.0, 3.0], [4.0, 3.0]))
    found.largest_sizes, found.limit_bytes = TINY, 1 << 30
    found.largest.append(Largest(side="torch", layout=layout_of("dp", 2), layers=7, parameters=5_000_000, peak=1 << 29))
    found.missing["deepspeed"] = "not installed"
    return found


def test_the_page_has_ratios_of_rounds_and_names_what_is_missing(results: Results, tmp_path: Path) -> None:
    text = markdown(results)
    for said in ("|data parallel |2 |64 |2.00 |", "5M (7)", "- deepspeed: not installed"):
        assert said in text
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- written by benchmarks/compare.py: begin -->\nold\n<!-- end -->\nb\n", encoding="utf-8")
    replace_section(page, text)
    assert page.read_text(encoding="utf-8").startswith("a\n<!-- written")
    assert "old" not in page.read_text(encoding="utf-8")


def test_losses_that_differ_are_named(results: Results) -> None:
    assert not list(results.disagreements())
    results.rows.append(row("megatron-core", ONE, [1.0], [4.0, 3.01]))
    ((found, apart),) = results.disagreements()
    assert found.side == "megatron-core" and apart == pytest.approx(0.01 / 3)


def test_a_run_that_is_ended_early_leaves_its_tables(tmp_path: Path) -> None:
    """A mode that is given twice counts once."""
    with mock.patch.object(compare.Comparison, "measure", side_effect=[None, None, KeyboardInterrupt]) as measure:
        assert compare.main(["--ranks", "4", "--peers", "torch", "--modes", "dp,dp", "--output", str(tmp_path)]) == 130
    assert [call.args[0].ranks for call in measure.call_args_list] == [1, 2, 4]
    assert (tmp_path / "results.md").is_file()


@pytest.mark.parametrize("program", ["compare.py", "many_ranks.py"])
def test_wrong_flags_are_refused_before_torch_is_loaded(program: str) -> None:
    code = f"import runpy, sys; sys.modules['torch'] = None; sys.argv = ['{program}', '--steps', '0']\n"
    code += f"runpy.run_path('benchmarks/{program}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count(f"{program}: error: ")) == (2, 1), done.stderr


# ---- peaks of devices ------------------------------------------------------------------------------------------------

PEAKS = tomllib.loads(Path(__file__).with_name("peaks.toml").read_text(encoding="utf-8"))["peaks"]


@pytest.mark.parametrize(("name", "form", "peak"), [(*row, None)[:3] for row in PEAKS])
def test_peaks(name: str, form: Format, peak: float | None) -> None:
    assert peak_tflops(name, form) == peak
