"""`tools/plan.py --budget`: the run that ends with the lowest loss for a time, a price or a number of operations."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from megacore.commands.plan import read_plan
from megacore.commands.plan_parser import PlanParser
from megacore.commands.plan_search import found_layouts
from megacore.commands.tool import run_tool
from megacore.config import Config
from megacore.config.flags import read_flags, without_fields
from megacore.config.spelling import flag_and_value
from megacore.errors import ConfigError
from megacore.ladder.law import OPERATIONS, PUBLISHED
from megacore.ladder.rungs import (
    STYLE,
    Ladder,
    inner_size,
    read_ladder,
    schedule_flags,
    with_usual,
    without_tables,
)
from megacore.plan.cluster import cluster_named
from megacore.plan.memory import GIB
from megacore.plan.plan_report import four_digits
from megacore.plan.planner import Plan, make_plan
from megacore.plan.search import Layout

_HOURS = {"min": 1 / 60, "h": 1.0, "days": 24.0}
_UNITS = {
    **dict.fromkeys(("min", "minute", "minutes"), "min"), **dict.fromkeys(("h", "hour", "hours"), "h"),
    "day": "days", "days": "days", "usd": "USD", "flop": "flop",
}  # fmt: skip
_BUDGETS = "'8 h on 8 x h100', '500 USD on 8 x h100' or '1e21 flop on 8 x h100'"
_USUAL = {**STYLE, "seq_length": "--seq-length 2048"}
_DECIDED = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "preset", "config", "init_from_hf",
    "global_batch_size", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "train_iters", "mup_base_width",
)  # fmt: skip
_OF_A_LADDER = ("micro_batch_size", "eval_iters", "log_interval", "device")  # flags of its runs alone
_ENTRY = "pretrain_gpt.py"
_ROUNDS = 6
_SAVED = 1800  # seconds between checkpoints: what a failure costs at most


def best_batch(tokens: float) -> float:
    """Tokens of a step for a run of so many tokens (Step Law: Li et al. 2025, arXiv 2503.04715, as `best_rate`)."""
    return 0.58 * tokens**0.571


def best_rate(parameters: float, tokens: float) -> float:
    """The peak learning rate of AdamW. `parameters`: without embeddings, from 6e7 to 1e9 where it was fitted."""
    return float(min(1.79 * parameters**-0.713 * tokens**0.307, 1e-2))


class Budget(NamedTuple):
    """What a run may take: an amount of a unit (min, h, days, USD or flop) on a number of devices."""

    text: str
    amount: float
    unit: str
    ranks: int
    cluster: str


def budget(text: str) -> Budget:
    """Of argparse."""
    pattern = r"\s*(\d+(?:\.\d+)?(?:e\d\d?)?)\s*([a-z]+)\s+on\s+(\d+)\s*x\s*(\S+)\s*"
    found = re.fullmatch(pattern, text, re.IGNORECASE)
    unit = "" if found is None else _UNITS.get(found[2].lower(), "")
    if found is None or not unit or not (float(found[1]) > 0 and 0 < int(found[3]) <= 1 << 20):
        raise argparse.ArgumentTypeError(f"{text}: give an amount and devices, as in {_BUDGETS}")
    try:
        cluster_named(found[4])
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text}: {'; '.join(error.problems).removeprefix('--cluster ')}") from None
    return Budget(text, float(found[1]), unit, int(found[3]), found[4])


def _ratio(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not 0.1 <= float(text) <= 1e5:
        raise argparse.ArgumentTypeError(f"{text} must be a number from 0.1 to 100,000, as in 200")
    return float(text)


def main(argv: Sequence[str]) -> int:
    """Propose a run; the exit status is 0 done, 2 refused."""
    parser = PlanParser.of(
        "budget", prog="plan.py", budget=budget, read_ladder=read_ladder, ratio=_ratio, known=_BUDGETS
    )
    idle = ("--search", "--top", "--picture", "--tokens", "--compare", "--cluster", "--world-size")
    parser.elsewhere = dict.fromkeys(idle, "has no effect with --budget, which names the devices: leave it out")
    return run_tool(parser, argv, _propose)


def _propose(args: argparse.Namespace) -> None:
    asked: Budget = args.budget or Budget("", 1.0, "h", 8, "h100")  # what else is wrong is still to be found
    problems = list(args.problems)
    is_priced = asked.unit != "USD" or args.price_per_hour or cluster_named(asked.cluster).price_per_hour
    if not is_priced:
        problems.append(
            f"--budget {asked.text}: {asked.cluster} has no price: add --price-per-hour, as in --price-per-hour 2.5"
        )
        asked = asked._replace(unit="h")
    of_a_node = cluster_named(asked.cluster).device.node_ranks
    if asked.ranks > of_a_node and asked.ranks % of_a_node:
        whole = asked.ranks // of_a_node * of_a_node
        problems.append(f"--budget {asked.text}: nodes of {asked.cluster} have {of_a_node} devices: use {whole}")
    given = read_flags(args.flags, Config).values
    decided = [flag_and_value(name, given[name]) for name in _DECIDED if name in given]
    if Path(args.entry or _ENTRY).name != _ENTRY:
        problems.append(f"{args.entry}: --budget proposes runs of pretrain_gpt.py: leave it out")
    problems += [f"{spelled} is what --budget proposes: leave it out" for spelled in decided]
    words = [] if args.ladder is None else without_fields(args.ladder.words, (*_DECIDED, *_OF_A_LADDER))
    words = with_usual([*words, *without_fields(args.flags, _DECIDED)], STYLE if args.ladder else _USUAL)
    named = read_flags(words).values.keys()
    if not named & {"data_path", "train_data_path", "mock_data"}:
        words += ["--mock-data"]
    if not named & {"vocab_size", "tokenizer"}:
        words += ["--vocab-size", "50304"]
    report = _best(args, asked, words, problems)
    print(json.dumps(report, indent=1) if args.json else "\n".join(_in_words(report)))


def _best(args: argparse.Namespace, asked: Budget, words: Sequence[str], problems: Sequence[str]) -> dict[str, Any]:
    """The run of the lowest loss. The speed of a model says how many operations a time pays for, and these say which
    model is best: it is the one that agrees with its own speed, which a few rounds find."""
    ladder: Ladder | None = args.ladder
    law, cluster = PUBLISHED if ladder is None else ladder.law, cluster_named(asked.cluster)
    given = read_flags(words).values
    assert law is not None
    length, vocabulary = max(given.get("seq_length", 1), 1), given.get("vocab_size", 50_304)
    usd = cluster.price_per_hour if args.price_per_hour is None else args.price_per_hour
    hours = asked.amount / usd / asked.ranks if asked.unit == "USD" else asked.amount * _HOURS.get(asked.unit, 0.0)
    # Until the first plan: a usual share of the peak.
    operations = 0.4 * (cluster.peak("bf16") or 1e11) * asked.ranks * 3600 * hours * args.goodput or asked.amount
    shape, is_last, report = list[str](), False, dict[str, Any]()
    for number in range(_ROUNDS):
        parameters, tokens = law.best(operations)
        if args.tokens_per_parameter is not None:
            parameters = math.sqrt(operations / OPERATIONS / args.tokens_per_parameter)
            tokens = parameters * args.tokens_per_parameter
        tables = vocabulary if ladder is None else 0  # that parameters of the law count
        before, shape = shape, _shape(parameters, tables, is_gated="glu" in given.get("activation", ""))
        if shape == before and (is_last or args.estimate):
            break
        is_last = shape == before or number >= _ROUNDS - 2  # whose memory is traced
        width, layers = int(shape[1]), int(shape[3])
        batch_tokens, lr, further = best_batch(tokens), best_rate(12 * layers * width**2, tokens), list[str]()
        if ladder is not None:
            # The rate that muP carries over also suits more tokens in larger batches, roughly: the best one falls with
            # about tokens^-0.3 (Bjorck et al. 2024, arXiv 2409.19913), and rises with the root of the batch.
            batch_tokens *= ladder.batch_tokens / best_batch(ladder.most.tokens)
            lr = read_flags(ladder.words).values["lr"]
            further = f"--mup-base-width {ladder.widths[0]} head-size={ladder.head_size}".split()
        batch = asked.ranks * 2 ** max(round(math.log2(batch_tokens / length / asked.ranks)), 0)
        model = [*words, *shape, *further, "--lr", f"{lr:.3g}", "--global-batch-size", str(batch)]
        search = f"pretrain_gpt.py --search --top 1 --world-size {asked.ranks} --cluster {asked.cluster}".split()
        search += [] if is_last and not args.estimate else ["--estimate"]
        found_args, config, used = read_plan([*search, *model], problems=problems)
        try:
            found = found_layouts(found_args, config, replace(used, price_per_hour=usd))
        except ConfigError as error:
            of = f"--budget {asked.text}: of a model of {parameters:.3g} parameters, as with --tokens-per-parameter"
            raise ConfigError([f"{of} {tokens / parameters:.3g}, {problem}" for problem in error.problems]) from None
        plan = make_plan(found.layouts[0].config, found.cluster)
        vocabulary = plan.config.model.vocab_size
        parameters = _counted(plan, ladder)
        tokens = plan.tokens_per_second * 3600 * hours * args.goodput or operations / OPERATIONS / parameters
        operations = OPERATIONS * parameters * tokens
        report = _described(args, asked, plan, found.layouts[0], model, max(int(tokens / batch / length), 1))
    return report


def _counted(plan: Plan, ladder: Ladder | None) -> int:
    """The parameters of which the law speaks."""
    return plan.parameters if ladder is None else without_tables(plan.parameters, plan.config.model)


def _described(
    args: argparse.Namespace, asked: Budget, plan: Plan, layout: Layout, flags: Sequence[str], steps: int
) -> dict[str, Any]:
    """A run with all its figures."""
    model, batch, length = plan.config.model, plan.config.training.global_batch_size, plan.config.data.seq_length
    tokens, law = steps * batch * length, PUBLISHED if args.ladder is None else args.ladder.law
    counted = _counted(plan, args.ladder)
    days, usd = plan.cost(tokens, goodput=args.goodput)
    low, high = law.interval(counted, tokens)
    most = plan.cluster.device.node_ranks
    nodes = f" --nnodes {asked.ranks // most} --node-rank $NODE_RANK --master-addr $MASTER_ADDR" * (asked.ranks > most)
    launcher = "python" if asked.ranks == 1 else f"torchrun{nodes} --nproc-per-node {min(asked.ranks, most)}"
    origin = (
        "The sizes and the loss follow Besiroglu et al. 2024, batch and rate Li et al. 2025: other data and another "
        "tokenizer than yours. For a law of your own: tools/ladder.py, then --ladder ladder/ladder.json."
    )
    if args.ladder is not None:
        times = counted * tokens / args.ladder.most.parameters / args.ladder.most.tokens
        extrapolated = " More than 100 times: the interval is too narrow." * (times > 100)
        origin = (
            f"The loss is that of your ladder, whose largest run has 1 / {times:,.3g} of the operations and "
            f"{args.ladder.most.tokens / args.ladder.most.parameters:.3g} tokens per parameter of its blocks. Length "
            f"and rate are the ladder's: before a long run, try half and twice of the rate.{extrapolated}"
        )
    words = [*flags, *schedule_flags(steps, steps)]
    named, saved = read_flags(words, Config).values.keys(), max(round(_SAVED / plan.time.seconds), 1)
    words += [] if "save_interval" in named else f"--save-interval {saved} --keep-last 2".split() * (saved < steps)
    words += [] if "load" in named else ["--load", "auto"]
    return {
        "budget": asked._asdict(),
        "parameters": plan.parameters,
        "shape": {name: getattr(model, name) for name in ("num_layers", "hidden_size", "num_attention_heads")},
        "tokens": tokens,
        "tokens_per_parameter": tokens / counted,
        "law": "published" if args.ladder is None else "ladder",
        "train_iters": steps,
        "global_batch_size": batch,
        "seq_length": length,
        "lr": plan.config.optimizer.lr,
        "layout": layout.flags,
        "step_seconds": plan.time.seconds,
        "memory_gib": layout.memory_bytes / GIB,
        "hours": asdict(plan.timed(24 * days, "h")),
        "price": asdict(plan.timed(usd, "USD")),
        "price_per_hour": plan.cluster.price_per_hour,
        "is_price_assumed": args.price_per_hour is None,
        "goodput": args.goodput,
        "loss": {"value": law.loss(counted, tokens), "low": low, "high": high},
        "origin": origin,
        "command": f"{launcher} pretrain_gpt.py {shlex.join(words)} {layout.flags}",
    }


def _in_words(run: Mapping[str, Any]) -> Iterator[str]:
    layers, width, heads = run["shape"].values()
    hours, usd, loss = ([run[name][key] for key in ("value", "low", "high")] for name in ("hours", "price", "loss"))
    counted = " of the blocks" * (run["law"] == "ladder")
    assumed = "assumed" if run["is_price_assumed"] else "given"
    yield f"# {run['budget']['text']}\n"
    yield f"- model: {run['parameters']:,} parameters, {layers} layers of {width}, {heads} heads"
    yield f"- data: {run['tokens']:,} tokens, {run['tokens_per_parameter']:,.3g} per parameter{counted}"
    yield f"- {run['train_iters']:,} steps of {run['global_batch_size']:,} sequences of {run['seq_length']:,}"
    yield f"- peak learning rate: {run['lr']:g}"
    yield f"- layout: {run['layout']}"
    yield f"- step: {four_digits(run['step_seconds'])} s, {run['memory_gib']:.3g} GiB per rank"
    yield "- time: {} h ({} to {})".format(*map(four_digits, hours)) + f" at a goodput of {run['goodput']:.0%}"
    price_of = f"{run['price_per_hour']:g} per device and hour ({assumed})"
    yield "- price: {:,.0f} USD ({:,.0f} to {:,.0f})".format(*usd) + f" at {price_of}"
    yield "- held-out loss: {:.3f} ({:.3f} to {:.3f}) nats per token\n".format(*loss)
    yield f"{run['origin']}\n\n{run['command']}"


def _shape(parameters: float, vocabulary: int, *, is_gated: bool) -> list[str]:
    """Flags of a model of about so many parameters: a width of 64 times the layers at 0.1B parameters and of 128 times
    from 7B on, as the presets have it, and heads of 64 or, from a width of 2,048 on, of 128."""
    ratio = min(max(64 * (parameters / 1e8) ** 0.163, 32.0), 128.0)

    def width(layers: int) -> float:  # a block has 12 width^2
        return (math.sqrt(vocabulary**2 + 48 * layers * parameters) - vocabulary) / (24 * layers)

    layers = min(range(1, 200), key=lambda number: abs(math.log(max(width(number), 1) / number / ratio)))
    unit = 64 * 2 ** max(int(math.log2(width(layers) / 512)), 0)  # wide models have heads for tensor parallelism
    size = max(round(width(layers) / unit), 1) * unit
    layers = max(round((parameters - vocabulary * size) / (12 * size**2)), 1)
    inner = f" --ffn-hidden-size {inner_size(size)}" if is_gated else ""
    heads = size // (64 if size < 2048 else 128)
    return f"--hidden-size {size} --num-layers {layers} --num-attention-heads {heads}{inner}".split()
