"""fp16 through the real program: overflows skip steps and halve the scale on all ranks, or stop the run."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.launching import PROGRAM, alone, needs_proc, records_of, small_run, under_torchrun

# Scaled by this, every gradient of a small model leaves fp16's range, which ends at 65,504.
FAR_TOO_LARGE = 2.0**60


@needs_proc
def test_an_overflow_on_two_ranks_halves_the_scale_until_steps_count(tmp_path: Path) -> None:
    flags = small_run(
        tmp_path / "run",
        **{"precision": "fp16", "initial_loss_scale": 2.0**24, "hysteresis": 1, "train_iters": 16},
        **{"dp": 2, "zero_stage": 2, "global_batch_size": 2, "seq_length": 32, "device": "cpu"},
    )
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *flags) as job:
        status, text = job.ends(within=120)
        said = job.said("stdout")
    assert status == 0, text + said
    scales = [line.rpartition("loss scale ")[2] for line in said.splitlines() if "| skipped: " in line]
    assert scales, "an overflow was meant to happen"
    for k, scale in enumerate(scales):
        assert scale == f"{2.0 ** (24 - k):g} -> {2.0 ** (23 - k):g}"
    records = records_of(tmp_path / "run")
    assert records[-1]["train/loss"] < records[0]["train/loss"]


def test_a_run_without_one_update_stops_with_status_4(tmp_path: Path) -> None:
    done = alone(*small_run(tmp_path, init_method_std=1e30, train_iters=2, seq_length=32, device="cpu"), timeout=60)
    assert done.returncode == 4, done.stderr
    assert "megacore: stopped: each of 2 steps was skipped" in done.stderr and "done" not in done.stdout


def test_an_overflow_at_the_smallest_scale_stops_with_status_4(tmp_path: Path) -> None:
    scale = {"initial_loss_scale": FAR_TOO_LARGE, "min_loss_scale": FAR_TOO_LARGE / 2, "hysteresis": 1}
    done = alone(*small_run(tmp_path, precision="fp16", seq_length=32, device="cpu", **scale), timeout=60)
    assert done.returncode == 4, done.stderr
    assert "megacore: stopped: the gradient of " in done.stderr
    assert "overflowed fp16 even at the smallest loss scale, --min-loss-scale" in done.stderr
    assert "Use --precision bf16, a smaller --lr or a longer warm-up" in done.stderr
    assert "Traceback" not in done.stderr
