"""The spike guard's rule and adaptive clipping against independent references, and where the run stops."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from megacore.config import OptimizerConfig, SpikeConfig
from megacore.errors import TrainingDiverged
from megacore.optim.adaptive_clip import AdaptiveClip
from megacore.optim.spikes import SpikeGuard
from megacore.train.rollback import Rollbacks

# ---- the rule


def guard(*accepted: float, **options: Any) -> SpikeGuard:
    """One that has accepted a loss and a norm as often as its window is long."""
    made = SpikeGuard(SpikeConfig(**options), warmup_steps=0)
    for _ in range(options["spike_window"] if accepted else 0):
        made.accept(*accepted)
    return made


def limit_by_numpy(values: list[float], threshold: float) -> float:
    middle = np.median(values)
    deviation = 1.4826 * np.median(np.abs(np.asarray(values) - middle))
    return float(middle + threshold * max(deviation, 0.01 * abs(middle)))


@pytest.mark.parametrize("window", [9, 16])
def test_the_limit_is_median_plus_robust_deviations_of_accepted_values(window: int) -> None:
    random = np.random.default_rng(0)
    judge = guard(spike_window=window, spike_threshold=6.0, on_spike="skip")
    losses, norms, spikes = list[float](), list[float](), 0
    for step in range(1, 120):
        loss, norm = random.normal(3.0, 0.05), abs(random.standard_cauchy())
        limits = judge.limits(step)
        if len(losses) < window // 2:
            assert limits.loss.value == limits.norm.value == math.inf
        else:
            assert limits.loss.value == pytest.approx(limit_by_numpy(losses[-window:], 6.0), rel=1e-14)
            assert limits.norm.value == pytest.approx(limit_by_numpy(norms[-window:], 6.0), rel=1e-14)
        if limits.exceeded(loss, norm) is not None:
            judge.reject()
            spikes += 1
        else:
            judge.accept(loss, norm)
            losses.append(loss)
            norms.append(norm)
    assert judge.total == spikes > 5


def test_values_that_hardly_vary_make_no_spike_of_a_small_change() -> None:
    limits = guard(2.0, 0.5, spike_window=4, spike_threshold=10.0).limits(5)
    assert (limits.loss.value, limits.norm.value) == pytest.approx((2.2, 1.0), rel=1e-14)  # 1% of losses, 10% of norms
    assert limits.exceeded(2.2, 1.0) is None
    assert limits.exceeded(2.21, 0.5) == "the loss 2.21 is above 2.2 (median 2, robust deviation 0.02)"
    both = limits.exceeded(3.0, 1.1)
    assert both is not None
    assert both.count("is above") == 2


def test_nothing_is_judged_in_the_warm_up_without_a_guard_or_without_a_gradient() -> None:
    late = SpikeGuard(SpikeConfig(spike_window=4), warmup_steps=10)
    for _ in range(4):
        late.accept(1.0, 1.0)
    off = guard(1.0, 1.0, on_spike="none", spike_window=4)
    assert late.limits(10).exceeded(100.0, 1.0) is None
    assert late.limits(11).exceeded(100.0, 1.0) is not None
    assert off.limits(500).exceeded(100.0, 1.0) is None
    assert guard(0.0, 0.0, spike_window=4).series() == {"accepted_losses": [], "accepted_norms": []}


def test_a_new_level_that_is_only_warned_of_is_taken_over() -> None:
    judge = guard(2.0, 1.0, spike_window=8)
    for step in range(4):
        assert judge.limits(9 + step).exceeded(9.0, 9.0) is not None
        judge.reject()
    for _ in range(4):
        assert judge.limits(13).loss.value == math.inf
        judge.accept(9.0, 9.0)
    assert judge.limits(17).exceeded(9.5, 9.5) is None
    assert (judge.limits(17).exceeded(19.0, 19.0) or "").count("is above") == 2


# ---- adaptive clipping


def clipped_by_zclip(norms: list[float], alpha: float, threshold: float, warmup: int) -> list[float]:
    """ZClip as the paper's algorithm 1 reads, with a least deviation, in numpy, on a whole series of norms."""
    mean, variance, result = np.mean(norms[:warmup]), np.var(norms[:warmup]), norms[:warmup]
    for norm in norms[warmup:]:
        deviation = np.maximum(np.sqrt(variance), mean / 10)
        score = (norm - mean) / (deviation + 1e-6)
        kept = mean + threshold**2 / score * deviation if score > threshold else norm
        mean = alpha * mean + (1 - alpha) * kept
        variance = alpha * variance + (1 - alpha) * (kept - mean) ** 2
        result.append(float(kept))
    return result


@pytest.mark.parametrize("spread", [0.2, 0.05])  # with the smaller one, the least deviation counts
def test_adaptive_clipping_follows_the_paper(spread: float) -> None:
    random = np.random.default_rng(1)
    norms = [float(n) for n in np.exp(random.normal(0.0, spread, 200)) * np.where(random.random(200) < 0.05, 20.0, 1.0)]
    config = OptimizerConfig(
        clip_grad_adaptive=True, clip_grad_warmup_iters=25, clip_grad_decay=0.9, clip_grad_z_threshold=2.0
    )
    clip, found = AdaptiveClip(config), []
    for number, norm in enumerate(norms):
        if number in (10, 100):  # resumed in the warm-up, and after it
            state, clip = clip.series(), AdaptiveClip(config)
            clip.load(state["clip_moments"], state["clip_warmup_norms"])
        value = torch.tensor(norm, dtype=torch.float64)
        found.append(min(norm, float(clip.limit(value))))
        clip.observe(value)
    expected = clipped_by_zclip(norms, 0.9, 2.0, 25)
    assert found == pytest.approx(expected, rel=1e-12)
    assert sum(kept < norm for kept, norm in zip(found, norms, strict=True)) > 5


# ---- when a run stops


def rollbacks(**options: Any) -> Rollbacks:
    spikes = SpikeConfig(on_spike="rollback", **options)
    return Rollbacks(cast(Any, SimpleNamespace(spikes=spikes, training=SimpleNamespace(global_batch_size=8))))


def saved_after(done: Rollbacks, *, step: int = 10, further: int = 0, batches: int | None = 2, batch: int = 8) -> Any:
    settings = {"spike_skip_batches": batches, "global_batch_size": batch}
    position = done.done[-1].stop_sample + further
    return SimpleNamespace(step=step, consumed_samples=position, settings=settings)


def test_a_larger_skip_extends_only_a_rollback_that_the_run_continues_right_after() -> None:
    kept = rollbacks(spike_skip_batches=2)
    kept.add("a spike", from_step=12, to_step=10, first_sample=80, stop_sample=96)
    for batches, stop in ((5, 96 + 5 * 8), (2, None), (0, None)):
        resumed = rollbacks(spike_skip_batches=batches)
        for later in (saved_after(kept, step=11, further=8), saved_after(kept, batches=None)):
            resumed.load(kept.series())
            assert resumed.extend(later) is None
        extended = resumed.extend(saved_after(kept))
        assert (extended and extended.stop_sample) == stop
        assert resumed.done[-1].stop_sample == (stop or 112)
    with pytest.raises(TrainingDiverged, match=r"resume from the checkpoint of step 10, in a new --output-dir, with a"):
        kept.add("a spike", from_step=12, to_step=11, first_sample=200, stop_sample=208)
    assert rollbacks().extend(saved_after(kept)) is None


def test_a_spike_that_comes_back_stops_and_so_does_one_too_many() -> None:
    kept = rollbacks(max_rollbacks=2)
    kept.add("a spike", from_step=12, to_step=10, first_sample=80, stop_sample=96)
    resumed = rollbacks(max_rollbacks=2)
    resumed.load(kept.series())
    for one in (kept, resumed):  # a run that is started again after the rollback does not begin to count anew
        with pytest.raises(TrainingDiverged, match=r"step 12: a spike: a spike again after the rollback to step 10"):
            one.add("a spike", from_step=12, to_step=10, first_sample=192, stop_sample=208)
    # A checkpoint that was saved since the rollback, on request or by a job that ended, does not make it another fault.
    with pytest.raises(TrainingDiverged, match=r"step 12: a spike: a spike again after the rollback to step 10, on"):
        kept.add("a spike", from_step=12, to_step=11, first_sample=200, stop_sample=208)
    kept.add("another", from_step=13, to_step=10, first_sample=192, stop_sample=216)  # past it: another fault
    with pytest.raises(
        TrainingDiverged, match=r"there were 2 rollbacks already \(--on-spike max-rollbacks=2\): step 12 -> step"
    ):
        kept.add("a third", from_step=30, to_step=20, first_sample=400, stop_sample=480)
