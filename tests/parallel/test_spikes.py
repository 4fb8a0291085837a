"""The spike guard on real runs: a poisoned range of the data is skipped, or rolled back and skipped, on any layout."""

from __future__ import annotations

import csv
import gzip
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

from megacore import ops
from megacore.audit.command import main as audit
from megacore.checkpoint.manifest import read_manifest
from megacore.config import OptimizerConfig, SpikeConfig
from megacore.errors import ConfigError, TrainingDiverged
from megacore.optim.adaptive_clip import AdaptiveClip
from megacore.optim.spikes import SpikeGuard
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.train.callbacks import Callback, Run
from megacore.train.engine import Layer, PipelineEngine
from megacore.train.rollback import Rollbacks, rollbacks_of
from megacore.train.step import StepResult
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parallel.test_callbacks import scalars
from tests.parity.runs import BATCH, SEQUENCE, VOCAB, Layout, gather, make_config, make_trainer

STEPS, SAVE = 14, 4
LAST_SAVED = 8
POISON = range(9 * BATCH, 11 * BATCH)  # the samples of steps 10 and 11
SKIPPED = range(8 * BATCH, 11 * BATCH)  # since the checkpoint at step 8, and a batch after the spike
OPTIONS: dict[str, Any] = {"train_iters": STEPS, "log_interval": 1, "num_layers": 2, "lr": 1e-2, "hidden_size": 16}


class Text:
    """Samples of random tokens of which every next token is 7, but for a range of them, which is noise.

    Args:
        poison: samples that are noise.
        removed: samples that are not there: what follows them has moved up.
    """

    def __init__(self, poison: range = range(0), removed: range = range(0), samples: int = 40 * BATCH) -> None:
        self._poison, self._removed, self._samples = poison, removed, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        index += len(self._removed) if index >= self._removed.start and self._removed else 0
        random = np.random.default_rng(index)
        tokens = random.integers(0, VOCAB, SEQUENCE)
        labels = random.integers(0, VOCAB, SEQUENCE) if index in self._poison else np.full(SEQUENCE, 7)
        return {
            "tokens": tokens.astype(np.int64),
            "labels": labels.astype(np.int64),
            "loss_mask": np.ones(SEQUENCE, np.float32),
        }


class Losses(Callback):
    """The loss of every step that is done, and those that were skipped; of one that is done again the last loss. An
    overflow, by which fp16 searches for its loss scale, is no such skip."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}
        self.skipped: list[int] = []

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.by_step[result.step] = float(result.loss)
        if result.skipped is not None and "; loss scale" not in result.skipped:
            self.skipped.append(result.step)


def trainer_on(
    mesh: Mesh | None, layout: Layout, directory: Path, data: Text, losses: Losses, spikes: SpikeConfig, **changes: Any
) -> Trainer:
    options: dict[str, Any] = OPTIONS | {"save_interval": SAVE, "ledger": True} | changes
    config = make_config(layout, directory, **options, **vars(spikes))
    return make_trainer(config, mesh or build_mesh(config.parallel), data, callbacks=[losses])


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights, moments and the average of the weights, whole."""
    optimizer, mesh = trainer.update.optimizer, trainer.mesh
    state = gather(trainer, mesh, lambda owned: owned.master)
    kinds = ("exp_avg", "exp_avg_sq") if trainer.update.average is None else ("exp_avg", "exp_avg_sq", "ema")
    for kind in kinds:
        values = gather(trainer, mesh, lambda owned, kind=kind: owned.state(optimizer, kind))  # type: ignore[misc]
        state |= {f"{kind} {name}": value for name, value in values.items()}
    return state


GUARD: dict[str, Any] = {"spike_window": 4, "spike_threshold": 6.0}


def rolls_back(rank: int, world_size: int, layout: Layout, directory: str, changes: dict[str, Any]) -> None:
    found, expected = Losses(), Losses()
    guard = SpikeConfig(on_spike="rollback", spike_skip_batches=1, **GUARD)
    run = trainer_on(None, layout, Path(directory, "run"), Text(POISON), found, guard, **changes)
    run.run()
    run.saving.finish()
    checkpoint = Path(directory, "run", f"step_{LAST_SAVED:08d}")
    clean = Text(POISON, removed=SKIPPED)
    never = trainer_on(
        run.mesh, layout, Path(directory, "never"), clean, expected, SpikeConfig(on_spike="none"),
        load=str(checkpoint), **changes,
    )  # fmt: skip
    never.run()
    assert run.step == never.step == STEPS
    assert run.consumed_samples == STEPS * BATCH + len(SKIPPED)
    assert {step: found.by_step[step] for step in expected.by_step} == expected.by_step  # bit for bit
    assert list(expected.by_step) == list(range(LAST_SAVED + 1, STEPS + 1))
    curve = [found.by_step[step] for step in range(LAST_SAVED, STEPS + 1)]
    assert curve == sorted(curve, reverse=True)  # it falls on, past the rollback
    one, other = state_of(run), state_of(never)
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]
    assert found.skipped == [10]
    if rank == 0:
        _look_at_files(Path(directory, "run"))
    if world_size > 1:
        _resume_elsewhere(layout, Path(directory), expected, changes)


def _resume_elsewhere(layout: Layout, directory: Path, expected: Losses, changes: dict[str, Any]) -> None:
    """A run that is started again after the rollback, on another layout, before it has saved again."""
    tp, pp, dp = layout
    again, newest = Losses(), directory / "run" / f"step_{LAST_SAVED:08d}.2"
    guard = SpikeConfig(on_spike="rollback", spike_skip_batches=1, **GUARD)
    options = {**changes, "zero_stage": 1, "load": str(newest)}
    run = trainer_on(None, (dp, tp, pp), directory / "again", Text(POISON), again, guard, **options)
    run.run()
    assert again.skipped == []
    assert again.by_step == pytest.approx(expected.by_step, rel=1e-5 if "precision" not in changes else 1e-2)
    assert len(run.rollbacks.done) == 1


def _look_at_files(directory: Path) -> None:
    """Files tell of the rollback; metrics.jsonl has every step once."""
    again = read_manifest(directory / f"step_{LAST_SAVED:08d}.2")
    assert (again.step, again.consumed_samples) == (LAST_SAVED, SKIPPED.stop)
    for manifest in (again, read_manifest(directory / f"step_{STEPS:08d}")):
        (rollback,) = rollbacks_of(manifest.series)
        assert (rollback.from_step, rollback.to_step) == (10, LAST_SAVED)
        assert range(rollback.first_sample, rollback.stop_sample) == SKIPPED
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["train/rollbacks"] for record in records[LAST_SAVED - 1 :]] == [0] + [1] * (STEPS - LAST_SAVED)
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    (event,) = (event for event in events if event["event"] == "rollback")
    assert (event["step"], event["to_step"]) == (10, LAST_SAVED)
    assert event["skipped_samples"] == [SKIPPED.start, SKIPPED.stop]
    assert audit([str(directory)]) == 0, "the ledger follows the rollback"


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((1, 1, 2), {"async_save": True, "zero_stage": 2, "ema_decay": 0.9}),
        pytest.param((1, 2, 2), {"clip_grad_adaptive": True, "clip_grad_warmup_iters": 5}, marks=pytest.mark.slow),
        pytest.param((2, 1, 2), {"zero_stage": 3, "precision": "bf16", "keep_last": 9}, marks=pytest.mark.slow),
        pytest.param((1, 2, 1), {"schedule": "zero-bubble"}, marks=pytest.mark.slow),
        pytest.param((1, 1, 2), {"zero_stage": 1, "precision": "fp16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_a_poisoned_range_is_rolled_back_and_skipped(layout: Layout, changes: dict[str, Any], tmp_path: Path) -> None:
    """The run is bit for bit the one that never saw the range, from the checkpoint on."""
    tp, pp, dp = layout
    run_distributed(rolls_back, tp * pp * dp, layout, str(tmp_path), changes)


def outcome(directory: Path, mode: str, *, one_pass: bool = False, **changes: Any) -> tuple[Trainer, Losses]:
    """A run of one process, with the poison in steps 10 and 11."""
    losses = Losses()
    options = {"on_spike": mode, **(GUARD if mode != "none" else {})}
    with ops.kernels_chosen("triton" if one_pass else "torch"):
        mesh = Mesh(device=torch.device("cpu"))
        run = trainer_on(mesh, (1, 1, 1), directory, Text(POISON), losses, SpikeConfig(**options), **changes)
    assert run.model.data_parallel.options.one_pass is one_pass
    return run, losses


def test_a_warning_changes_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent, expected = outcome(tmp_path / "none", "none")
    silent.run()
    assert "| spike" not in capsys.readouterr().out
    warned, found = outcome(tmp_path / "warn", "warn")
    warned.run()
    assert found.by_step == expected.by_step
    assert found.skipped == []
    one, other = state_of(warned), state_of(silent)
    assert not [name for name in one if not torch.equal(one[name], other[name])]
    said = capsys.readouterr().out
    assert said.count("warning: step 10/14 | spike: the loss") == said.count("| spike:") == 1  # of two in a row
    assert warned.update.guard.total >= 2
    events = [json.loads(line) for line in (tmp_path / "warn" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "spike"][:2] == [10, 11]


FP16: dict[str, Any] = {"precision": "fp16", "initial_loss_scale": 256.0}  # nothing overflows


@pytest.mark.parametrize(
    ("mode", "one_pass"),  # before its first checkpoint, a rollback skips
    [("skip", True), *(pytest.param(*more, marks=pytest.mark.slow) for more in (("skip", False), ("rollback", True)))],
)
def test_a_skipped_spike_leaves_the_state_as_it_is(tmp_path: Path, mode: str, one_pass: bool) -> None:
    run, losses = outcome(tmp_path, mode, one_pass=one_pass, save_interval=100, **FP16)
    for number in range(1, STEPS + 1):
        before, updates, scaler = state_of(run) if number > 1 else {}, run.update.updates, run.update.scaler.state()
        result = run.train_step(next(run.batches))
        assert run.consumed_samples == number * BATCH
        if number in (10, 11):
            assert result.skipped is not None
            assert result.skipped == result.spike
            after = state_of(run)
            assert not [name for name in before if not torch.equal(before[name], after[name])]
            assert (run.update.updates, run.update.scaler.state()) == (updates, scaler)
    assert losses.skipped == [10, 11]
    assert (run.step, run.update.updates, run.update.skipped_steps) == (STEPS, STEPS - 2, 2)
    assert losses.by_step[12] < losses.by_step[9] < losses.by_step[10]


def test_data_that_are_too_few_for_a_rollback_stop_the_run(tmp_path: Path) -> None:
    spikes = SpikeConfig(on_spike="rollback", spike_skip_batches=1, **GUARD)
    data = Text(POISON, samples=STEPS * BATCH)
    run = trainer_on(Mesh(device=torch.device("cpu")), (1, 1, 1), tmp_path, data, Losses(), spikes)
    with pytest.raises(TrainingDiverged, match=r"the training data have 112 samples, too few for a rollback \(step 10"):
        run.run()


def test_what_a_run_writes_has_every_step_once(tmp_path: Path) -> None:
    """CSV, TensorBoard, the timeline and the profile follow metrics.jsonl: steps that a rollback undoes are gone."""
    spikes = SpikeConfig(on_spike="rollback", spike_skip_batches=1, **GUARD)
    files: dict[str, Any] = {"csv": True, "tensorboard_dir": str(tmp_path / "board"), "trace": True, "trace_steps": 10}
    files["profile_steps"] = f"{LAST_SAVED}:10"  # is written at the spike
    mesh = Mesh(device=torch.device("cpu"))
    run = trainer_on(mesh, (1, 1, 1), tmp_path, Text(POISON), Losses(), spikes, eval_interval=0, **files)
    run.run()
    assert len(run.rollbacks.done) == 1
    every = list(range(1, STEPS + 1))
    losses = [json.loads(line)["train/loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [(int(row["step"]), float(row["train/loss"])) for row in rows] == list(zip(every, losses, strict=True))
    assert scalars(tmp_path / "board")["train/loss"] == [
        (step, float(np.float32(loss))) for step, loss in zip(every, losses, strict=True)
    ]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    passes = [event["args"]["step"] for event in events if event["ph"] == "X" and event["cat"] == "pass"]
    assert passes == list(range(2, 12))
    (profile,) = (tmp_path / "profile").iterdir()
    names = [event.get("name") for event in json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]]
    assert names.count("aten::embedding") == 3 * BATCH // 2  # of steps 8 to 10 as first taken, in microbatches of 2


def test_the_engine_skips_and_refuses_a_rollback() -> None:
    layers = [Layer("linear", torch.nn.Linear, 2, 1, bias=False)]
    with pytest.raises(ConfigError, match="on_spike rollback: the engine does not read the data: use skip, or call"):
        PipelineEngine(layers, loss=mse_loss, train_iters=9, spikes=SpikeConfig(on_spike="rollback"))
    engine = PipelineEngine(layers, loss=mse_loss, train_iters=9, spikes=SpikeConfig(on_spike="skip", spike_window=4))
    inputs, targets = torch.ones(4, 2), torch.full((4, 1), 9.0)
    for _ in range(4):
        engine.train_batch([(inputs, targets)])
    before = engine.state_dict()["linear.weight"]
    with pytest.warns(UserWarning, match="step 5 is skipped: the loss .* is above"):
        engine.train_batch([(inputs, targets * 100)])
    assert torch.equal(engine.state_dict()["linear.weight"], before)


# ---- the rule, adaptive clipping, and when a run stops ---------------------------------------------------------------

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
    negative, limits = (guard(loss, 0.5, spike_window=4, spike_threshold=10.0).limits(5) for loss in (-2.0, 2.0))
    assert negative.loss.value == pytest.approx(-1.8, rel=1e-14)
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
        assert judge.counters() == {"spikes": step, "spikes_in_a_row": step}
        judge.reject()
    assert judge.counters() == {"spikes": 4, "spikes_in_a_row": 0}
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
