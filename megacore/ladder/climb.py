"""`tools/ladder.py`: trains models of growing width on one data set, and fits the law of their held-out losses.

Each width trains once at a constant rate (WSD) and decays from three of its steps, so that a run of T steps costs
1.15 T and gives three losses, each at the end of a schedule (Hägele et al. 2024, arXiv 2405.18392). muP keeps one
learning rate right for all widths.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.commands.tool import PassingParser, positive, run_tool
from megacore.config import Config
from megacore.config.flags import read_flags
from megacore.config.spelling import flag_and_value
from megacore.drawing.canvas import Drawing, save
from megacore.drawing.curves import Curve, Dot, curves
from megacore.errors import ConfigError, TrainingStopped, UserError
from megacore.ladder.law import OPERATIONS, Law, Point, fit
from megacore.ladder.rungs import (
    STYLE,
    Ladder,
    ladder_of,
    schedule_flags,
    width_flags,
    with_usual,
    without_tables,
    write_ladder,
)
from megacore.models.outline import outline
from megacore.plan.state import whole_parameters

if TYPE_CHECKING:
    from megacore.commands.from_python import Pretrained

_USUAL = {
    **STYLE, "num_layers": "--num-layers 3", "seq_length": "--seq-length 128", "lr": "--lr 1e-2",
    "micro_batch_size": "--micro-batch-size 8", "global_batch_size": "--global-batch-size 8",
    "eval_iters": "--eval-iters 40",
}  # fmt: skip
_DECIDED = (
    "hidden_size", "num_attention_heads", "ffn_hidden_size", "mup_base_width", "mup_base_head_size", "preset", "config",
    "train_iters", "eval_interval", "lr_decay_style", "lr_warmup_iters", "min_lr", "load", "save_interval",
)  # fmt: skip
_UNIT = 20  # steps; parts of a run are whole for all multiples
_LEAST_RATIO = 5  # of tokens to parameters: with 0.2 a law missed a run of 10 times the operations by 11 %
_MOST_NOISE = 0.01  # more: the runs are too short for a law of this form
_PARTS = (4, 2, 1)  # of the steps of a width, after which a run ends


def main(argv: Sequence[str] | None = None) -> int:
    """Train a ladder; the exit status is 0 done, 2 refused."""
    parser = PassingParser(
        prog="ladder.py",
        usage="ladder.py [--minutes M] [--widths N ...] [--output-dir DIR] [flags of pretrain_gpt.py]",
        description="Train small models of growing width on your data, and fit loss(parameters, tokens) with its "
        "interval: ladder.json for tools/plan.py --budget, and ladder.svg. Repeat the command to go on after a stop. "
        "Further flags are those of pretrain_gpt.py, such as --data-path, --tokenizer and --lr of the first width.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--minutes", type=positive, default=5, metavar="M", help="time of all runs together. Default: 5")
    add(
        "--widths", type=positive, nargs="+", default=[32, 48, 64, 96, 128], metavar="N",
        help="4 to 8 hidden sizes with a common factor of 8 or more. Default: 32 48 64 96 128",
    )  # fmt: skip
    add("--output-dir", type=Path, default=Path("ladder"), metavar="DIR", help="Default: ladder")
    return run_tool(parser, argv, _climb)


def _climb(args: argparse.Namespace) -> None:
    widths, file = sorted(set(args.widths)), args.output_dir / "ladder.json"
    given, problems = read_flags(args.flags, Config), args.problems
    if not 4 <= len(widths) <= 8 or math.gcd(*widths) < 8:
        shown = " ".join(map(str, args.widths))
        problems.append(f"--widths {shown} must be 4 to 8 sizes with a common factor of 8 or more: use 32 48 64 96 128")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        problems.append(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: a ladder trains on one process: start it without torchrun"
        )
    problems += [
        f"{flag_and_value(name, given.values[name])} is what a ladder decides: leave it out"
        for name in _DECIDED
        if name in given.values
    ]
    ladder = Ladder(words=with_usual(args.flags, _USUAL), widths=widths)
    if file.exists():
        kept = ladder_of(file)
        if (list(kept.words), list(kept.widths)) != (ladder.words, ladder.widths):
            problems.append(
                f"{file} is of other flags: use another --output-dir, as in --output-dir {args.output_dir}-2"
            )
        ladder = kept
    if problems or given.problems:
        raise ConfigError([*problems, *given.problems])
    print(f"ladder of widths {' '.join(map(str, widths))}; the log of the runs is {args.output_dir / 'log.txt'}")
    if ladder.steps:
        print(f"{file} goes on with its own lengths: --minutes counts only for a new --output-dir")
    else:
        ladder = _with_steps(ladder, args)
        write_ladder(ladder, file)
    print(f"{'width':>5}{'parameters of blocks':>22}{'tokens':>14}  held-out loss")
    for number in range(len(widths)):
        ladder = _with_width(ladder, number, args.output_dir)
        write_ladder(ladder, file)
    law = fit(ladder.points)
    ladder = replace(ladder, law=law)
    write_ladder(ladder, file)
    save(_picture(ladder, law), args.output_dir / "ladder.svg")
    e, a, b, alpha, beta = law.constants
    print(f"loss(N, D) = {e:.4g} + {a:.4g} / N^{alpha:.3f} + {b:.4g} / D^{beta:.3f}; a run differs by {law.noise:.2%}")
    if law.noise > _MOST_NOISE:
        longer = f"train longer, as with --minutes {10 * args.minutes} --output-dir {args.output_dir}-2"
        print(f"megacore: warning: the law misses the runs of the ladder by {law.noise:.1%}: {longer}", file=sys.stderr)
    for times in (4, 10):
        parameters, tokens = (size * math.sqrt(times) for size in ladder.most[:2])
        low, high = law.interval(parameters, tokens)
        loss = law.loss(parameters, tokens)
        print(f"{times} times the operations of the largest run: {loss:.3f} ({low:.3f} to {high:.3f})")
    print(f"{args.output_dir / 'ladder.svg'}\nNext: python tools/plan.py --budget '8 h on 8 x h100' --ladder {file}")


def _with_steps(ladder: Ladder, args: argparse.Namespace) -> Ladder:
    """With as many steps for each width as the minutes allow, in proportion to its parameters."""
    start, costs, sizes, batch = time.monotonic(), list[float](), list[int](), 0
    for width in ladder.widths:
        words = [*schedule_flags(12, 12), "--log-interval", "6"]
        run = _trained(ladder, width, words, args.output_dir, f"probe-{width}")
        training = run.trainer.config.training
        batch = training.global_batch_size * run.trainer.config.data.seq_length
        sizes.append(_parameters(run))
        costs.append(sizes[-1] / run.records[-2]["perf/tokens_per_sec"])  # of the last steps
        shutil.rmtree(args.output_dir / f"probe-{width}")
    left = max(60 * args.minutes - (time.monotonic() - start), 1.0)
    ratio = left / sum(costs) / (1 + 0.2 * sum(1 / part for part in _PARTS if part > 1))
    steps = [_UNIT * max(round(ratio * size / batch / _UNIT), 1) for size in sizes]
    print(f"{ratio:.3g} tokens for each parameter of the blocks")
    if ratio < _LEAST_RATIO:
        enough = f"use --minutes {math.ceil(args.minutes * _LEAST_RATIO / ratio)}, or narrower --widths"
        print(
            f"megacore: warning: fewer than {_LEAST_RATIO} tokens for each parameter mislead: {enough}", file=sys.stderr
        )
    return replace(ladder, steps=steps, batch_tokens=batch)


def _with_width(ladder: Ladder, number: int, output: Path) -> Ladder:
    """With the runs of a width, if they are missing."""
    width, steps, points = ladder.widths[number], ladder.steps[number], list(ladder.points)
    if len(points) <= len(_PARTS) * number:
        folder = f"width-{width}"
        shutil.rmtree(output / folder, ignore_errors=True)  # of runs that were stopped
        words = [*schedule_flags(steps, steps), "--save-interval", str(steps // 5)]
        whole = _trained(ladder, width, words, output, f"{folder}/whole")
        for part in _PARTS:
            run, length = whole, steps // part
            if part > 1:
                begin = output / folder / "whole" / f"step_{length * 4 // 5:08}"
                words = [*schedule_flags(length, steps), "--load", str(begin)]
                run = _trained(ladder, width, words, output, f"{folder}/part-{part}")
            if "eval/loss" not in run.records[-1]:
                raise UserError("no held-out loss is measured: give the split a second share, as in --split 95,5,0")
            points.append(Point(_parameters(run), length * ladder.batch_tokens, run.records[-1]["eval/loss"]))
        shutil.rmtree(output / folder)  # the weights of small models are of no use
    for point in points[len(_PARTS) * number :]:
        print(f"{width:>5}{point.parameters:>22,}{point.tokens:>14,}  {point.loss:.4f}", flush=True)
    return replace(ladder, points=points)


def _trained(ladder: Ladder, width: int, words: Sequence[str], output: Path, name: str) -> Pretrained:
    from megacore.commands.from_python import pretrained  # loads torch

    usual = [*width_flags(width, ladder), "--eval-interval", "1000000000", "--output-dir", str(output / name)]
    output.mkdir(parents=True, exist_ok=True)
    with (output / "log.txt").open("a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            return pretrained([*ladder.words, *usual, *words])
        except TrainingStopped as error:
            raise UserError(f"width {width}: {error}: use a smaller --lr") from None


def _parameters(run: Pretrained) -> int:
    config = run.trainer.config
    return without_tables(whole_parameters(config, outline(config)), config.model)


def _picture(ladder: Ladder, law: Law) -> Drawing:
    """Losses over operations: the runs, the law at each width, and beyond the largest run with its interval."""
    most, decades = ladder.most, [0.25 * number for number in range(-8, 5)]
    beyond = [tuple(size * 10 ** (decade / 2) for size in most[:2]) for decade in decades]
    bounds = [law.interval(*sizes) for sizes in beyond]
    place = [OPERATIONS * parameters * tokens for parameters, tokens in beyond]
    whole = ladder.points[len(_PARTS) - 1 :: len(_PARTS)]
    along = [
        [
            (OPERATIONS * run.parameters * d, law.loss(run.parameters, d))
            for d in (run.tokens / 8, run.tokens / 2, run.tokens)
        ]
        for run in whole
    ]
    curve = Curve(
        title="held-out loss, nats per token; outer lines: within which 9 of 10 runs are expected",
        points=[(x, law.loss(*sizes)) for x, sizes in zip(place, beyond, strict=True)],
        others=[*(list(zip(place, bound, strict=True)) for bound in zip(*bounds, strict=True)), *along],
        dots=[Dot(OPERATIONS * run.parameters * run.tokens, run.loss) for run in ladder.points],
        marked=OPERATIONS * most.parameters * most.tokens,
    )
    return curves("Ladder", [curve], x_title="floating-point operations", logarithmic=True)
