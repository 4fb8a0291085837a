"""What must hold between the number of steps and what happens in some of them: the learning-rate schedule, traces,
checks, evaluation and the guard against loss spikes.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacore.config.checkpoint import AUTO
from megacore.config.fields import field_infos
from megacore.config.messages import counted
from megacore.config.problem import Change, Problem, Values, up_to
from megacore.config.rules import Rules
from megacore.config.schema import Config
from megacore.config.spelling import flag, flag_and_value

DURATION_RULES = Rules()


def _larger(name: str, above: int) -> Change:
    """A larger number of steps, tried with one that is well above a bound."""
    return Change(f"a larger {flag(name)}", {name: 2 * (above + 1)})


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
    name = "lr_decay_iters" if optimizer.lr_decay_iters else "train_iters"
    length, iters = f"{flag(name)} {end}", config.training.train_iters
    if not optimizer.lr_decay_iters and end != iters:  # a schedule in full batches
        ramp = " ".join(config.rampup.rampup_batch_size)
        length = f"the {end} full batches of --train-iters {iters} with --rampup-batch-size {ramp}"
    if warmup >= end:
        rises = optimizer.lr_decay_style == "1cycle"  # whose warm-up has a step at least
        yield Problem(
            f"--lr-warmup-iters {warmup} must be below {length}",
            up_to("lr_warmup_iters", warmup, end - 1, low=1 if rises else 0),
            _larger(name, warmup),
        )
    elif optimizer.lr_decay_style == "WSD" and final is not None and warmup + final > end:
        yield Problem(
            f"--lr-warmup-iters {warmup} + --lr-decay-style wsd-decay-iters={final} = {warmup + final} must be at "
            f"most {length}",
            Values(name="lr_wsd_decay_iters", among=range(end - warmup, 0, -1), near=final, bound="or less"),
        )


@DURATION_RULES.about("lr_range_test", "load", "train_iters")
def _range_test(config: Config, world_size: int) -> Iterator[str]:
    if not config.optimizer.lr_range_test:
        return
    if config.checkpoint.load not in (None, AUTO):
        yield Problem(
            f"--lr-range-test begins with the first step, but --load {config.checkpoint.load} continues",
            Change("leave it out", {"lr_range_test": False}),
        )
    if config.training.train_iters < 10:
        yield Problem(
            "--lr-range-test needs 10 steps or more",
            Change(f"--train-iters 100 instead of {config.training.train_iters}", {"train_iters": 100}),
        )


@DURATION_RULES.about("trace_steps", "train_iters")
def _traced(config: Config, world_size: int) -> Iterator[str]:
    steps, last = config.logging.trace_steps, config.training.train_iters
    most = max(last - 1, 1)  # the first step is not traced, unless it is the only one
    if config.logging.trace and steps is not None and steps > most:
        yield Problem(
            f"--trace steps={steps} must be at most {most} with --train-iters {last}, because the trace begins after "
            "the first step",
            Values(name="trace_steps", among=range(most, 0, -1), near=steps, bound="or less"),
            _larger("train_iters", steps),
        )


@DURATION_RULES.about("profile_steps", "train_iters")
def _profiled(config: Config, world_size: int) -> Iterator[str]:
    try:
        profiled, last = config.logging.profiled_steps(), config.training.train_iters
    except ValueError:  # the section reports it
        return
    if profiled and profiled[-1] > last:
        within = f"{min(profiled[0], last)}:{last}"
        yield Problem(
            f"--profile-steps {config.logging.profile_steps} must end within --train-iters {last}",
            Change(f"--profile-steps {within}", {"profile_steps": within}),
            _larger("train_iters", profiled[-1]),
        )


@DURATION_RULES.about("replay_interval", "check_replicas_interval", "train_iters")
def _check_intervals(config: Config, world_size: int) -> Iterator[str]:
    watch, last = config.watch, config.training.train_iters
    default = field_infos(type(watch))["check_replicas_interval"].default
    if watch.replay_interval > last:
        yield Problem(
            f"--replay-interval {watch.replay_interval} must be at most --train-iters {last}, because no step would be "
            "replayed",
            up_to("replay_interval", watch.replay_interval, last),
            Change("leave it out", {"replay_interval": 0}),
        )
    if watch.check_replicas_interval > last and watch.check_replicas_interval != default:
        yield Problem(
            f"--check-replicas-interval {watch.check_replicas_interval} must be at most --train-iters {last}, because "
            "only saves would be checked",
            up_to("check_replicas_interval", watch.check_replicas_interval, last),
            Change("leave it out", {"check_replicas_interval": default}),
        )


@DURATION_RULES.about("on_spike", "save_interval")
def _rollback(config: Config, world_size: int) -> Iterator[str]:
    if config.spikes.on_spike == "rollback" and config.checkpoint.save_interval is None:
        yield Problem(
            "--on-spike rollback needs checkpoints to return to",
            Change("--save-interval, for example with 100", {"save_interval": 100}),
            Change("--on-spike skip", {"on_spike": "skip"}),
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
        yield Problem(
            f"{given} has no effect in {counted(last, 'step')} (--train-iters): the guard needs {half} accepted steps, "
            f"half of --on-spike window={spikes.spike_window}",
            Values(name="spike_window", among=range(most, 3, -1), near=spikes.spike_window, bound="or less"),
            _larger("train_iters", half),
        )
    elif warmup >= last:
        yield Problem(
            f"{given} has no effect in {counted(last, 'step')} (--train-iters): the guard begins after "
            f"--lr-warmup-iters {warmup}",
            Change("a smaller one", {"lr_warmup_iters": 0}),
            _larger("train_iters", warmup),
        )


@DURATION_RULES.about("on_spike", "save_interval", "spike_skip_batches", "max_rollbacks", "train_iters", "load")
def _rollbacks_beyond(config: Config, world_size: int) -> Iterator[str]:
    spikes, last, interval = config.spikes, config.training.train_iters, config.checkpoint.save_interval
    if spikes.on_spike != "rollback":
        return
    if interval is not None and interval >= last and config.checkpoint.load is None:
        yield Problem(
            f"--save-interval {interval} must be below --train-iters {last} with --on-spike rollback, because there "
            "would be no checkpoint to return to",
            up_to("save_interval", interval, last - 1),
            _larger("train_iters", interval),
        )
    for name in ("spike_skip_batches", "max_rollbacks"):
        value, default = getattr(spikes, name), field_infos(type(spikes))[name].default
        if value > last and value != default:
            said = f"{flag_and_value(name, value)} must be at most --train-iters {last}"
            yield Problem(said, up_to(name, value, last))


@DURATION_RULES.about("skip_train", "lr_range_test")
def _evaluated_range(config: Config, world_size: int) -> Iterator[str]:
    if config.training.skip_train and config.optimizer.lr_range_test:
        yield "--lr-range-test trains, and --skip-train does not: leave one of them out"
