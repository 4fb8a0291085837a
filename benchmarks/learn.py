"""Loss on held-out text against minutes on a CPU: --recipe fast beside nanoGPT, transformers' Trainer and torch.

    python -m benchmarks.learn --text FILE.txt         # any text; without --text that of `tools/quickstart.py corpus`
    python -m benchmarks.learn --iters 20 --seeds 1    # a try; OMP_NUM_THREADS=2: on 2 cores
    python -m benchmarks.learn --output table.md       # writes the table too

Every character is a token. All train a GPT-2 of 4 blocks, 4 heads, width 128 and 64 positions, with equally many
parameters in blocks, on the first 90 % of the text. They are judged by the mean loss on windows of the rest, the same
for all, which the clock leaves out, as it does the making of a model. They run in turn, and every other seed begins at
the other end.

nanogpt         the CPU recipe of nanoGPT's README: 2,000 steps of 12 windows, AdamW, cosine from 1e-3 to 1e-4, in torch
transformers    the same with transformers.Trainer and its GPT-2; needs `accelerate`, and is left out without it
torch           nanogpt's model with megacore's batch, steps and linear decay, AdamW at 3e-3: what Muon, muP's
                initial values and megacore itself add to these
megacore        --recipe fast
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.in_turn import take_turns
from benchmarks.workload import megacore_trainer
from megacore.commands.tool import ToolParser, positive, run_tool
from megacore.config import Config
from megacore.config.cli import parse_config
from megacore.errors import UserError
from megacore.parallel.mesh import Mesh
from tools.generated_pages import table
from tools.quickstart import CORPUS

LAYERS, HEADS, WIDTH, BLOCK = 4, 4, 128, 64
BATCH, WARM_UP, RATE, LEAST_RATE = 12, 100, 1e-3, 1e-4  # nanoGPT's
OURS, PART = 32, 8  # megacore's batch in windows; its steps are a part of nanoGPT's
JUDGED = 512  # held-out windows
EVALUATIONS = 40  # of a run


class Text:
    """A text as numbers of its characters."""

    def __init__(self, text: str) -> None:
        kinds = sorted(set(text))
        number = {kind: index for index, kind in enumerate(kinds)}
        tokens = np.array([number[kind] for kind in text], np.int64)
        cut = len(tokens) * 9 // 10
        self.vocab, self._train, held_out = len(kinds), tokens[:cut], tokens[cut:]
        if len(held_out) < 2 * BLOCK:
            raise UserError(f"the text has {len(text):,} characters: use one of {20 * BLOCK:,} or more")
        self.judged = self._windows(held_out, np.linspace(0, len(held_out) - BLOCK - 1, JUDGED).astype(np.int64))

    def batch(self, random: np.random.Generator, windows: int) -> tuple[Tensor, Tensor]:
        """Tokens and their successors, int64 [windows, BLOCK] each, from random places of the training text."""
        return self._windows(self._train, random.integers(0, len(self._train) - BLOCK, windows))

    @staticmethod
    def _windows(tokens: NDArray[np.int64], starts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(tokens[starts[:, None] + np.arange(BLOCK + 1)])
        return rows[:, :-1], rows[:, 1:]


Point = tuple[float, float, float]
"""How far a run is: seconds of the clock, those of all its threads, and held-out loss."""


class Clock:
    """The seconds of a run's steps, and its held-out losses. `logits`: of tokens."""

    def __init__(self, logits: Callable[[Tensor], Tensor], text: Text, steps: int) -> None:
        self._logits, self._text, self._steps, self._step, self.points = logits, text, steps, 0, list[Point]()
        self.start()

    def start(self) -> None:
        """Called before the first step."""
        self._began = time.perf_counter(), time.process_time()

    def after_step(self) -> None:
        """Called after every step."""
        self._step += 1
        if self._step % max(1, self._steps // EVALUATIONS) and self._step < self._steps:
            return
        wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        tokens, labels = self._text.judged
        with torch.no_grad():
            loss = cross_entropy(self._logits(tokens)[..., : self._text.vocab].flatten(0, 1), labels.flatten())
        self.points.append((wall, cpu, float(loss)))
        self._began = time.perf_counter() - wall, time.process_time() - cpu


class Block(nn.Module):
    """A block of nanoGPT without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Net(nn.Module):
    """nanoGPT's model, with its initial values."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH, bias=False))
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return nn.functional.linear(self.blocks(x), self.tokens.weight)


def in_torch(text: Text, seed: int, *, steps: int, batch: int, rate: Callable[[int], float]) -> list[Point]:
    """A run in plain torch; `rate`: the learning rate of a step, from 1 on."""
    torch.manual_seed(seed)
    random, net = np.random.default_rng(seed), Net(text.vocab)
    by_decay = [{"params": [p for p in net.parameters() if p.dim() == 1 + n], "weight_decay": 0.1 * n} for n in (0, 1)]
    optimizer = torch.optim.AdamW(by_decay, betas=(0.9, 0.99), fused=True)
    clock = Clock(net, text, steps)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        tokens, labels = text.batch(random, batch)
        cross_entropy(net(tokens).flatten(0, 1), labels.flatten()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.after_step()
    return clock.points


def cosine(step: int, *, steps: int) -> float:
    """nanoGPT's schedule."""
    warm_up = min(WARM_UP, steps // 20)
    done = (step - warm_up) / (steps - warm_up)
    falling = LEAST_RATE + 0.5 * (RATE - LEAST_RATE) * (1 + math.cos(math.pi * done))
    return RATE * step / warm_up if step < warm_up else falling


def linear(step: int, *, steps: int) -> float:
    """The schedule of --recipe fast, with a rate that is good for AdamW."""
    return 3e-3 * min(50 * step, steps - step + 1) / steps


def in_transformers(text: Text, seed: int, *, steps: int) -> list[Point]:
    """A run of transformers.Trainer with nanoGPT's hyperparameters."""
    import transformers

    transformers.set_seed(seed)
    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_positions": BLOCK, "vocab_size": text.vocab}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes))
    clock, laps = Clock(lambda tokens: model(tokens).logits, text, steps), transformers.TrainerCallback()
    for event, called in (("on_train_begin", clock.start), ("on_step_end", clock.after_step)):
        setattr(laps, event, lambda *_, called=called, **__: called())
    tokens, _ = text.batch(np.random.default_rng(seed), steps * BATCH)
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as directory:
        arguments = transformers.TrainingArguments(
            output_dir=directory, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=RATE, seed=seed,
            lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": LEAST_RATE}, adam_beta2=0.99,
            warmup_steps=min(WARM_UP, steps // 20), weight_decay=0.1, max_grad_norm=1.0, use_cpu=True, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[laps]).train()
    return clock.points


def in_megacore(text: Text, seed: int, *, steps: int, flags: list[str]) -> list[Point]:
    """A run of megacore's trainer."""
    with tempfile.TemporaryDirectory() as directory:
        words = (
            f"--num-layers {LAYERS} --num-attention-heads {HEADS} --hidden-size {WIDTH} --seq-length {BLOCK} "
            f"--vocab-size {text.vocab} --position-embedding-type rope --disable-bias-linear --seed {seed} --mock-data "
            f"--micro-batch-size {OURS} --global-batch-size {OURS} --train-iters {steps} --device cpu "
            f"--recipe fast --output-dir {directory}"
        ).split()
        config = parse_config([*words, *flags], prog="learn", description="", kind=Config)
        pairs = zip(*text.batch(np.random.default_rng(seed), steps * OURS), strict=True)
        mask = np.ones(BLOCK, np.float32)
        data = [{"tokens": a.numpy(), "labels": b.numpy(), "loss_mask": mask} for a, b in pairs]
        trainer = megacore_trainer(config, Mesh(device=torch.device("cpu")), data=data)
        (stage,) = trainer.model.chunks

        layers = range(len(stage.layers))
        clock = Clock(lambda tokens: reduce(lambda x, index: stage.run_layer(index, x), layers, tokens), text, steps)
        for _ in range(steps):
            trainer.train_step(next(trainer.batches))
            clock.after_step()
    return clock.points


def rows(found: dict[str, list[list[Point]]]) -> Iterator[tuple[object, ...]]:
    """The table: medians over the seeds. A ratio is of the two runs of a seed; the lowest and the highest follow it."""
    for name, runs in found.items():
        ends = [run[-1] for run in found["nanogpt"]]
        reached = [[point for point in run if point[2] <= end[2]] for end, run in zip(ends, runs, strict=True)]
        pairs = [(end, points[0]) for end, points in zip(ends, reached, strict=True) if points]
        cells = ["not reached", "", ""]
        if len(pairs) == len(runs):
            cells[0] = f"{statistics.median(point[0] for _, point in pairs) / 60:.2f}"
            for clock in (0, 1):
                ratios = sorted(end[clock] / point[clock] for end, point in pairs)
                cells[1 + clock] = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        loss, wall = (statistics.median(run[-1][field] for run in runs) for field in (2, 0))
        yield name, f"{loss:.4f}", f"{wall / 60:.2f}", *cells


def main(argv: list[str] | None = None) -> int:
    """Run the tool; the exit status is 0 done, 2 refused."""
    parser = ToolParser(prog="learn.py", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.flag("--text FILE", f"the text. Default: the documents of {CORPUS}.", Path, CORPUS)
    parser.flag("--iters N", "steps of nanogpt", positive, 2000)
    parser.flag("--our-iters N", f"those of megacore and torch. Default: --iters / {PART}.", positive)
    parser.flag("--seeds N", "runs of each", positive, 3)
    parser.flag("--flags WORDS", "more flags of megacore, in quotes", str, "")
    parser.flag("--output FILE", "where the table goes too", Path)
    return run_tool(parser, argv, compare)


def compare(args: argparse.Namespace) -> None:
    """Run all in turn and print the table."""
    if not args.text.is_file():
        raise UserError(f"{args.text} not found: use --text FILE, or run python tools/quickstart.py corpus")
    lines = args.text.read_text(encoding="utf-8").splitlines()
    lines = [json.loads(line)["text"] for line in lines] if args.text.suffix == ".jsonl" else lines
    text, iters, steps = Text("\n".join(lines)), args.iters, args.our_iters or max(1, args.iters // PART)
    ways: dict[str, Callable[[int], list[Point]]] = {
        "nanogpt": lambda seed: in_torch(text, seed, steps=iters, batch=BATCH, rate=partial(cosine, steps=iters)),
        "transformers": lambda seed: in_transformers(text, seed, steps=iters),
        "torch": lambda seed: in_torch(text, seed, steps=steps, batch=OURS, rate=partial(linear, steps=steps)),
        "megacore": lambda seed: in_megacore(text, seed, steps=steps, flags=args.flags.split()),
    }
    if importlib.util.find_spec("accelerate") is None:
        del ways["transformers"]
        print("transformers is left out: transformers.Trainer needs accelerate (pip install accelerate)", flush=True)

    def run(name: str, seeds: Iterator[int]) -> list[Point]:
        seed = next(seeds)
        *_, (wall, cpu, loss) = points = ways[name](seed)
        print(f"seed {seed} {name:<13} loss {loss:.4f} in {wall:.0f} s, CPU {cpu:.0f} s", flush=True)
        return points

    found = take_turns({name: partial(run, name, iter(range(args.seeds))) for name in ways}, args.seeds, warm_up=0)
    head = ("", "nats per held-out character", "minutes", "minutes to nanogpt's loss", "times as fast", "by CPU time")
    print(made := table(head, rows(found)))
    if args.output is not None:
        args.output.write_text(made + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
