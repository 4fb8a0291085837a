"""Draw the schedules of a run: the learning rate, and the weight decay and the momentum where they change.

    python tools/draw_lr.py --train-iters 1000 --lr-warmup-iters 50 -o lr.svg
    python tools/draw_lr.py --train-iters 1000 --lr-decay-style 1cycle --lr-warmup-iters 300 -o lr.png
    python tools/draw_lr.py output/mine -o lr.svg                  # of a run
    python tools/draw_lr.py --train-iters 100                      # a table in the terminal

It takes the flags of pretrain_gpt.py: paste a command line, and those that are not about schedules change nothing.
docs/reference/optimizers.md explains the schedules. Nothing here loads torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.commands.tool import PassingParser, run_tool, with_config
from megacore.config import Config, OptimizerConfig, OptimizerSettings, TrainingConfig
from megacore.config.constraints import schedule_problems
from megacore.config.fields import Section, field_infos
from megacore.config.flags import read_flags
from megacore.config.given import Given
from megacore.config.optimizers import OPTIMIZERS
from megacore.config.other_trainers import other_trainers
from megacore.config.rampup import BatchSizes, RampupConfig, ramp_problems
from megacore.config.spelling import flag_and_value
from megacore.config.toml import read_toml
from megacore.drawing.canvas import require_writable, save
from megacore.drawing.curves import Curve, curves
from megacore.errors import Collected, ConfigError
from megacore.optim.lr_schedules import learning_rate, momentum, weight_decay

_MOST_POINTS, _ROWS = 800, 21
_MOMENTA = ("adam_beta1", "sgd_momentum", "lion_beta1", "muon_momentum")
_S = TypeVar("_S", bound=Section)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 done, 2 refused."""
    parser = PassingParser.of("draw_lr")
    words = with_config(sys.argv[1:] if argv is None else argv)
    return run_tool(parser, words, _draw)


def _draw(args: argparse.Namespace) -> None:
    if args.output is not None:
        with Collected(args.problems):
            require_writable(args.output)
    config, settings, iterations, sizes = _configuration(args.flags, args.problems)
    if args.output is None:
        steps = sorted({1 + round(i * (iterations - 1) / (_ROWS - 1)) for i in range(_ROWS)})
    else:
        steps = sorted({*range(1, iterations + 1, -(-iterations // _MOST_POINTS)), iterations})
    # Of the learning rate and the momentum: they follow the samples, but in a range test.
    positions: Sequence[float] = steps if config.lr_range_test else [sizes.full_steps(step) for step in steps]
    rates = {"learning rate": [learning_rate(at, config, train_iters=iterations) for at in positions]}
    if config.weight_decay_incr_style != "constant":
        rates["weight decay"] = [weight_decay(step, config, train_iters=iterations) for step in steps]
    usual = next((float(getattr(settings, name)) for name in _MOMENTA if hasattr(settings, name)), None)
    if config.lr_decay_style == "1cycle" and usual:
        rates["momentum"] = [momentum(at, config, usual=usual, train_iters=iterations) for at in positions]
    if args.output is None:
        print("step".rjust(9), *(title.rjust(14) for title in rates))
        for step, *values in zip(steps, *rates.values(), strict=True):
            print(str(step).rjust(9), *(f"{value:14.6g}" for value in values))
        return
    points = {title: list(zip(map(float, steps), values, strict=True)) for title, values in rates.items()}
    panels = [Curve(title=title, points=of) for title, of in points.items()]
    save(curves(f"Schedules over {iterations} steps", panels, x_title="step"), args.output)
    print(args.output)


def _configuration(
    flags: Sequence[str], wrong: Sequence[str] = (), optimizer: str | None = None
) -> tuple[OptimizerConfig, OptimizerSettings, int, BatchSizes]:
    """The section of the optimizer, the settings that have its momentum, the number of steps, and their batch sizes.

    Args:
        flags: the words of the command line.
        wrong: problems that are reported with the others.
        optimizer: the one that another source chooses, where that is known.

    Raises:
        ConfigError: a flag is wrong, or --train-iters is missing.
    """
    given = read_flags(flags, Config, optimizer=optimizer)
    path = given.values.pop("config", None)
    file = Given() if path is None else read_toml(path, Config)
    _translate(given, file.values)
    values = {**file.values, **given.values}
    if given.by_optimizer:
        return _configuration(flags, wrong, values.get("optimizer", OptimizerConfig().optimizer))
    problems = [*wrong, *given.problems, *file.problems]
    if "train_iters" not in values:
        raise ConfigError(problems or ["--train-iters is missing: use --train-iters 1000"])
    whole = _built(values)
    config, training, rampup = whole.optimizer, whole.training, whole.rampup
    problems += [*config.problems(), *training.problems()]
    full = training.global_batch_size
    if words := rampup.rampup_batch_size:
        shown = flag_and_value("rampup_batch_size", words)
        problems += ramp_problems(shown, rampup.ramp(), full, replica_samples=0, steps=training.train_iters)
    if not problems:
        problems += schedule_problems(whole)
    if problems:
        raise ConfigError(problems)
    sizes = BatchSizes(full or 1, rampup.ramp())
    config = replace(config, lr_decay_iters=whole.lr_decay_iters)
    kind = OPTIMIZERS[config.optimizer]
    kind = OPTIMIZERS["adamw"] if "adamw" in kind.shares and config.optimizer != "muon" else kind
    return config, _section(kind, values), training.train_iters, sizes


def _section(kind: type[_S], values: Mapping[str, Any]) -> _S:
    """A section, with the defaults for what is not given."""
    return kind(**{name: values[name] for name in field_infos(kind) if name in values})


def _translate(given: Given, values: Mapping[str, Any]) -> None:
    """Translates the settings of other trainers that are about schedules or the length of the run."""
    drawn = {"train_iters", *field_infos(OptimizerConfig)}
    given.foreign = [setting for setting in given.foreign if drawn & set(setting.fields)]
    values = {**values, **given.values}
    other_trainers().translate_settings(given, values, _built({"train_iters": None, **values}), world_size=1)


def _built(values: Mapping[str, Any]) -> Config:
    """A configuration with these values in the sections that schedules depend on."""
    sections = {"optimizer": OptimizerConfig, "rampup": RampupConfig}
    others: dict[str, Any] = {name: _section(kind, values) for name, kind in sections.items()}
    return Config(training=_section(TrainingConfig, values), **others)


if __name__ == "__main__":
    sys.exit(main())
