"""Schedules against those of torch, and by hand; the range test's suggestion; the picture of a schedule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.commands.lr_range import PICTURE, TABLE
from megacore.commands.pretrain_gpt import train
from megacore.config import OptimizerConfig
from megacore.config.rampup import BatchSizes, Ramp
from megacore.optim.lr_schedules import learning_rate, momentum, weight_decay
from megacore.parallel.mesh import Mesh
from tests.parity.runs import make_config
from tests.unit.refusals import GOOD, parse
from tools import draw_lr

STEPS = 40


def rates(**changes: Any) -> list[float]:
    config = OptimizerConfig(lr=0.1, **{"min_lr": 0.0, **changes})
    return [learning_rate(step, config, train_iters=STEPS) for step in range(1, STEPS + 1)]


def torchs(scheduler: Any, **options: Any) -> tuple[list[float], list[float]]:
    """The rates and momenta that a scheduler of torch gives to SGD."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.95)
    schedule = scheduler(optimizer, **options)
    found = []
    for _ in range(STEPS):
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        schedule.step()
    return [rate for rate, _ in found], [value for _, value in found]


@pytest.mark.parametrize(("style", "theirs"), [("cosine", "cos"), ("linear", "linear")])
def test_1cycle_is_torchs_with_its_momentum(style: str, theirs: str) -> None:
    options: dict[str, Any] = {"max_lr": 0.1, "total_steps": STEPS + 1, "pct_start": 12 / (STEPS + 1)}
    options |= {"final_div_factor": 1e9, "anneal_strategy": theirs}
    # torch ends one step later than it counts: its last of T steps is number T - 1 from 0.
    expected, momenta = torchs(torch.optim.lr_scheduler.OneCycleLR, **options, max_momentum=0.95)
    changes: dict[str, Any] = {"lr_decay_style": "1cycle", "lr_warmup_iters": 12, "lr_cycle_style": style}
    changes["lr_decay_iters"] = STEPS + 1
    assert rates(**changes) == pytest.approx(expected, rel=1e-6, abs=1e-11)
    config = OptimizerConfig(lr=0.1, **changes)
    found = [momentum(step, config, usual=0.95, train_iters=STEPS) for step in range(1, STEPS + 1)]
    assert found == pytest.approx(momenta, rel=1e-9)


@pytest.mark.parametrize(("factor", "warmup"), [(1, 0), (2, 0), (2, 5)])
def test_restarts_are_torchs(factor: int, warmup: int) -> None:
    options = {"T_0": 6, "T_mult": factor, "eta_min": 0.01}
    expected, _ = torchs(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, **options)
    changes: dict[str, Any] = {"lr_decay_style": "cosine-restarts", "lr_restart_iters": 6, "min_lr": 0.01}
    found = rates(**changes, lr_restart_factor=float(factor), lr_warmup_iters=warmup)
    begin = max(warmup, 1)  # the first update of ours is number 1, that of torch number 0
    assert found[begin - 1 : -1] == pytest.approx(expected[begin - warmup : STEPS - warmup][: STEPS - begin], rel=1e-9)
    assert found[-1] == 0.01


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 8])
def test_a_step_has_the_rate_of_megatrons_next_step(style: str, warmup: int) -> None:
    """Megatron-LM's rate depends on the steps before the one that it is for (docs/guides/coming-from-megatron.md)."""
    shape = {"linear": lambda x: 1 - x, "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x))}[style]
    theirs = [0.01 + (0.1 - 0.01) * before / warmup for before in range(warmup)]
    theirs += [0.1 * shape((before - warmup) / (STEPS - warmup)) for before in range(warmup, STEPS + 1)]
    first = {"lr_warmup_init": 0.01} if warmup else {}
    ours = rates(lr_decay_style=style, lr_warmup_iters=warmup, **first)
    assert ours == pytest.approx(theirs[1:])
    assert theirs[0] == pytest.approx(0.01 if warmup else 0.1)


def test_polynomial_is_torchs() -> None:
    expected, _ = torchs(torch.optim.lr_scheduler.PolynomialLR, total_iters=STEPS, power=3.0)
    assert rates(lr_decay_style="polynomial", lr_decay_power=3.0)[:-1] == pytest.approx(expected[1:], rel=1e-9)


LINEAR, COSINE = 0.02 + 0.28 / STEPS, 0.02 + 0.28 * 0.5 * (1 - math.cos(math.pi / STEPS))


@pytest.mark.parametrize(
    ("style", "expected"),
    [("constant", [0.1, 0.1, 0.1]), ("linear", [LINEAR, 0.16, 0.3]), ("cosine", [COSINE, 0.16, 0.3])],
)
def test_weight_decay_changes_over_the_run(style: str, expected: list[float]) -> None:
    ends = {} if style == "constant" else {"start_weight_decay": 0.02, "end_weight_decay": 0.3}
    config = OptimizerConfig(weight_decay=0.1, weight_decay_incr_style=style, **ends)  # type: ignore[arg-type]
    assert [weight_decay(step, config, train_iters=STEPS) for step in (1, STEPS // 2, STEPS)] == pytest.approx(expected)


def test_a_range_test_leaves_its_curve_and_a_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a rate for each step, also of a ramp of the batch."""
    changes: dict[str, Any] = {"lr_range_test": True, "lr_range_test_start": 1e-4, "lr": 10.0, "num_layers": 1}
    changes["rampup_batch_size"] = ("4", "4", "8")
    config = make_config((1, 1, 1), tmp_path, **changes, lr_warmup_iters=0, train_iters=60)
    train(config, Mesh(device=torch.device("cpu")))  # as the entry point does
    rows = (tmp_path / TABLE).read_text(encoding="utf-8").splitlines()[1:]
    expected = [1e-4 * 1e5 ** (i / 59) for i in range(len(rows))]
    assert [float(row.split(",")[0]) for row in rows] == pytest.approx(expected)
    assert 10 < len(rows) < 60, "the loss diverges before the last rate"
    assert "<line" in (tmp_path / PICTURE).read_text(encoding="utf-8")
    assert "range test: the loss falls fastest at a learning rate of" in capsys.readouterr().out


def test_a_picture_has_every_value_that_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--train-iters 50 --lr-warmup-iters 15 --lr-decay-style 1cycle --tp 2 --weight-decay-incr-style linear"
    more = "--start-weight-decay 0 --end-weight-decay 0.1"
    assert draw_lr.main([*flags.split(), *more.split(), "-o", str(tmp_path / "a.svg")]) == 0
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert all(f">{title}<" in text for title in ("learning rate", "weight decay", "momentum"))
    assert text.count("<line") >= 3 * 49
    (tmp_path / "config.toml").write_text("[training]\ntrain_iters = 3\n[optimizer]\nlr = 0.25\n", encoding="utf-8")
    for words, rate in (("--train-iters 3 --lr 0.5", "0.5"), (str(tmp_path), "0.25")):  # by flags, or of a run
        capsys.readouterr()
        assert draw_lr.main([*words.split(), "--lr-decay-style", "constant"]) == 0
        assert capsys.readouterr().out.splitlines()[1:] == [f"{step:9d}{rate:>15}" for step in (1, 2, 3)]
    assert draw_lr.main(["--train-iters", "2147483647"]) == 0  # only what is shown is computed
    assert capsys.readouterr().out.splitlines()[-1].split() == ["2147483647", "3e-05"]
    assert draw_lr.main(["--lr", "0.5"]) == 2
    assert "--train-iters is missing" in capsys.readouterr().err
    assert parse(*GOOD).optimizer.lr_decay_style == "cosine"


# ---- ramps of the batch ----------------------------------------------------------------------------------------------

RAMPS = [(1536, 16, 16, 5_859_375), (2048, 192, 16, 9_765_625), (64, 8, 8, 1000), (16, 4, 12, 7), (32, 32, 8, 100)]


def reference(full: int, start: int, increment: int, samples: int, steps: int) -> list[int]:
    """The sizes as Megatron-LM's calculator gives them from the samples consumed so far."""
    increments, consumed, sizes = (full - start) // increment, 0, list[int]()
    for _ in range(steps):
        level = increments if consumed >= samples else consumed * increments // samples
        sizes.append(start + level * increment)
        consumed += sizes[-1]
    return sizes


@pytest.mark.parametrize(("full", "start", "increment", "samples"), RAMPS)
def test_sizes_follow_the_samples(full: int, start: int, increment: int, samples: int) -> None:
    ramp = BatchSizes(full, Ramp(start, increment, samples))
    steps = ramp.steps(samples) + 50
    expected = reference(full, start, increment, samples, steps)
    assert [ramp.of_step(step) for step in range(1, steps + 1)] == expected
    assert expected[-1] == full
    total = 0
    for step, size in enumerate(expected, 1):
        assert ramp.steps(total) == ramp.steps(total + size - 1) == step - 1
        total += size
        assert ramp.samples(step) == total
    assert ramp.samples(0) == 0
