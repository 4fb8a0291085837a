"""What must hold between the number of steps and what happens in some of them: the learning-rate schedule, traces,
checks, evaluation and the guard against loss spikes.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacore.config.checkpoint import AUTO
from megacore.config.fields import field_infos, flag_and_value
from megacore.config.messages import at_most, counted
from megacore.config.problem import Change, Problem, Values
from megacore.config.rules import Rules
from megacore.config.schema import Config

DURATION_RULES = Rules()


@DURATION_RULES.about(
    "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters", "train_iters", "global_batch_size",
    "rampup_batch_size",
)  # fmt: skip
def _schedule(config: Config, world_size: int) -> Iterator[str]:
    yield from schedule_problems(config)


def schedule_problems(config: Config) -> Iterator[str]:
    """What is wrong with the lengths of the parts of the learning-rate schedule beside each other."""
    optimizer, end = config.optimizer, config.lr_decay_iters
    warmup, final = optimizer.lr_warmup_iters, optimizer.lr_wsd_decay_iters
    name = "--lr-decay-iters" if optimizer.lr_decay_iters else "--train-iters"
    length, iters = f"{name} {end}", config.training.train_iters
    if not optimizer.lr_decay_iters and end != iters:  # a schedule in full batches
        ramp = " ".join(config.rampup.rampup_batch_size)
        length = f"the {end} full batches of --train-iters {iters} with --rampup-batch-size {ramp}"
    if warmup >= end:
        rises = optimizer.lr_decay_style == "1cycle"  # whose warm-up has a step at least
        smaller = "" if rises and end == 1 else f"{at_most(end - 1)}, or "
        yield f"--lr-warmup-iters {warmup} must be below {length}: use {smaller}a larger {name}"
    elif optimizer.lr_decay_style == "WSD" and final is not None and warmup + final > end:
        yield (
            f"--lr-warmup-iters {warmup} + --lr-wsd-decay-iters {final} = {warmup + final} must be at most "
            f"{length}: use --lr-wsd-decay-iters {end - warmup} or less"
        )


@DURATION_RULES.about("lr_range_test", "load", "train_iters")
def _range_test(config: Config, world_size: int) -> Iterator[str]:
    if not config.optimizer.lr_range_test:
        return
    if config.checkpoint.load not in (None, AUTO):
        yield f"--lr-range-test begins with the first step, but --load {config.checkpoint.load} continues: leave it out"
    if config.training.train_iters < 10:
        yield f"--lr-range-test needs 10 steps or more: use --train-iters 100 instead of {config.training.train_iters}"


@DURATION_RULES.about("trace_steps", "train_iters")
def _traced(config: Config, world_size: int) -> Iterator[str]:
    steps, last = config.logging.trace_steps, config.training.train_iters
    most = max(last - 1, 1)  # the first step is not traced, unless it is the only one
    if config.logging.trace and steps is not None and steps > most:
        yield Problem(
            f"--trace-steps {steps} must be at most {most} with --train-iters {last}, because the trace begins after "
            "the first step",
            Values(name="trace_steps", among=range(most, 0, -1), near=steps, bound="or less"),
            Change("use a larger --train-iters"),
        )


@DURATION_RULES.about("profile_steps", "train_iters")
def _profiled(config: Config, world_size: int) -> Iterator[str]:
    try:
        profiled, last = config.logging.profiled_steps(), config.training.train_iters
    except ValueError:  # the section reports it
        return
    if profiled and profiled[-1] > last:
        yield (
            f"--profile-steps {config.logging.profile_steps} must end within --train-iters {last}: use "
            f"--profile-steps {min(profiled[0], last)}:{last}, or a larger --train-iters"
        )


@DURATION_RULES.about("replay_interval", "check_replicas_interval", "train_iters")
def _check_intervals(config: Config, world_size: int) -> Iterator[str]:
    watch, last = config.watch, config.training.train_iters
    default = field_infos(type(watch))["check_replicas_interval"].default
    if watch.replay_interval > last:
        yield (
            f"--replay-interval {watch.replay_interval} must be at most --train-iters {last}, because no step would be "
            f"replayed: use {last} or less, or leave it out"
        )
    if watch.check_replicas_interval > last and watch.check_replicas_interval != default:
        yield (
            f"--check-replicas-interval {watch.check_replicas_interval} must be at most --train-iters {last}, because "
            f"only saves would be checked: use {last} or less, or leave it out"
        )


@DURATION_RULES.about("on_spike", "save_interval")
def _rollback(config: Config, world_size: int) -> Iterator[str]:
    if config.spikes.on_spike == "rollback" and config.checkpoint.save_interval is None:
        yield (
            "--on-spike rollback needs checkpoints to return to: use --save-interval, for example with 100, or "
            "--on-spike skip"
        )


@DURATION_RULES.about("on_spike", "max_bad_steps")
def _rollback_first(config: Config, world_size: int) -> Iterator[str]:
    if config.spikes.on_spike == "rollback" and config.training.max_bad_steps == 1:
        yield (
            "--on-spike rollback needs --max-bad-steps 2 or more: with 1 the first spike ends the run, before it can "
            "go back"
        )


@DURATION_RULES.about("on_spike", "spike_window", "lr_warmup_iters", "train_iters")
def _idle_guard(config: Config, world_size: int) -> Iterator[str]:
    spikes, last, warmup = config.spikes, config.training.train_iters, config.optimizer.lr_warmup_iters
    default = field_infos(type(spikes))["spike_window"].default
    if spikes.on_spike == "none" or (spikes.on_spike == "warn" and spikes.spike_window == default):
        return
    half, given = spikes.spike_window // 2, f"--on-spike {spikes.on_spike}"
    if half >= last:
        most = 2 * last - 1
        smaller = f"use --spike-window {most} or less, or " if most >= 4 else "use "
        yield (
            f"{given} has no effect in {counted(last, 'step')} (--train-iters): the guard needs {half} accepted steps, "
            f"half of --spike-window {spikes.spike_window}: {smaller}a larger --train-iters"
        )
    elif warmup >= last:
        yield (
            f"{given} has no effect in {counted(last, 'step')} (--train-iters): the guard begins after "
            f"--lr-warmup-iters {warmup}: use a smaller one, or a larger --train-iters"
        )


@DURATION_RULES.about("on_spike", "save_interval", "spike_skip_batches", "max_rollbacks", "train_iters", "load")
def _rollbacks_beyond(config: Config, world_size: int) -> Iterator[str]:
    spikes, last, interval = config.spikes, config.training.train_iters, config.checkpoint.save_interval
    if spikes.on_spike != "rollback":
        return
    if interval is not None and interval >= last and config.checkpoint.load is None:
        below = f"use {last - 1} or less, or " if last > 1 else "use "
        yield (
            f"--save-interval {interval} must be below --train-iters {last} with --on-spike rollback, because there "
            f"would be no checkpoint to return to: {below}a larger --train-iters"
        )
    for name in ("spike_skip_batches", "max_rollbacks"):
        value, default = getattr(spikes, name), field_infos(type(spikes))[name].default
        if value > last and value != default:
            yield f"{flag_and_value(name, value)} must be at most --train-iters {last}: use {last} or less"


@DURATION_RULES.about("skip_train", "lr_range_test")
def _evaluated_range(config: Config, world_size: int) -> Iterator[str]:
    if config.training.skip_train and config.optimizer.lr_range_test:
        yield "--lr-range-test trains, and --skip-train does not: leave one of them out"
