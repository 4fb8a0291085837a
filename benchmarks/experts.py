"""A mixture of experts beside a dense model with as many active parameters, and beside transformers' implementation.

    python -m benchmarks.experts                           # both tables, about ten minutes on two cores
    python -m benchmarks.experts --text FILE --steps 1000

Learning: both models have the same layers, batches and steps; a token passes through feed-forward layers of the same
width. Tokens are bytes, by default of the reference that Python's help() shows, of which the last tenth is for
validation. The table has the loss on it. MaxVio is the largest load of an expert over the mean, less 1, as a mean over
layers and over the batches of the last tenth of the steps. A line below says what chance makes of it where tokens
choose evenly and independently.

Speed: forward, backward and AdamW of the same mixture on as many cores: two ranks with one thread each, with and
without expert parallelism, and transformers' Mixtral in one process with two threads. All take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.comparison.configuration import resolved_configuration
from benchmarks.in_turn import beside, take_turns
from benchmarks.workload import LLAMA, Bytes, add_sizes, megacore_step
from megacore.config import ResolvedConfig
from megacore.parallel.collectives import barrier
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.train.expert_balance import ExpertBalance
from megacore.train.gpt_task import GPTTask
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tools.generated_pages import table

NOTHING_BALANCES = "mixture, nothing balances"
_BYTES = 256
_SIZES = {"hidden": (96, 256), "seq": (128, 256), "width": (128, 512)}  # by default: of learning, of speed
_LAST = 0.1  # part of the steps and of the text
_DRAWS = 200


def read_text(path: Path | None) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The bytes to train on, and those for validation."""
    content = "\n".join(topics.values()).encode() if path is None else path.read_bytes()
    text = np.frombuffer(content, np.uint8)
    cut = round(len(text) * (1 - _LAST))
    return text[:cut], text[cut:]


def configuration(
    options: argparse.Namespace, directory: str, *, variant: str, ranks: int = 1, **changes: Any
) -> ResolvedConfig:
    """A small Llama, whose feed-forward layers are as wide as the experts of a token together."""
    return resolved_configuration(
        options,
        directory,
        micro_batch=options.batch // ranks,
        ranks=ranks,
        ffn_hidden_size=options.chosen * options.width,
        lr=2e-3,
        min_lr=2e-4,
        lr_decay_style="cosine",
        lr_warmup_iters=options.steps // 20,
        clip_grad=1.0,
        train_iters=options.steps,
        eval_iters=16,
        eval_interval=options.steps,
        device="cpu",
        **(LLAMA | variants(options)[variant] | changes),
    )


def variants(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The models of the table by name: fields of their configuration."""
    mixture = {
        "num_experts": options.experts,
        "moe_router_topk": options.chosen,
        "moe_ffn_hidden_size": options.width,
        "moe_router_score_function": "sigmoid",
    }
    biased = {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-3}
    return {
        "dense": {},
        NOTHING_BALANCES: mixture,
        "mixture, balance loss": mixture | {"moe_aux_loss_coeff": 0.01},
        "mixture, expert bias": mixture | biased,
    }


def learn(options: argparse.Namespace) -> None:
    """Train each model for as many steps on the same batches, and print the table."""
    train_text, valid_text = read_text(options.text)
    print(
        f"\n{options.steps} steps of {options.batch} x {options.seq} bytes, {options.layers} layers of "
        f"{options.hidden}; {options.experts} experts of {options.width}, of which a token uses {options.chosen}\n"
    )
    rows, last = [], max(1, round(options.steps * _LAST))
    for name, fields in variants(options).items():
        if options.variant is not None and options.variant not in name:
            continue
        losses, violations = list[float](), list[float]()
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(None):
            config = configuration(options, directory, variant=name, seed=0)
            mesh = Mesh(device=torch.device("cpu"))
            data = Bytes(train_text, options.seq, seed=0), Bytes(valid_text, options.seq, seed=0)
            trainer = Trainer(config, mesh, GPTTask(config, mesh), *data)
            for step in range(options.steps):
                result = trainer.train_step(next(trainer.batches))
                if step >= options.steps - last:
                    losses.append(float(result.loss))
                    if (balance := trainer.train_steps.hook(ExpertBalance)) is not None:
                        violations += (
                            float(load.max() / load.double().mean()) - 1.0 for load in balance.loads().values()
                        )
            validation = trainer.evaluate()
        total = sum(parameter.numel() for parameter in trainer.model.parameters.values())
        of_experts = sum(p.numel() for name, p in trainer.model.parameters.items() if ".experts." in name)
        active = total - round(of_experts * (1 - options.chosen / options.experts) if fields else 0)
        cells = (f"{statistics.fmean(losses):.4f}", f"{validation:.4f}", f"{statistics.fmean(violations or [0.0]):.2f}")
        rows.append((name, f"{total / 1e6:.2f}M", f"{active / 1e6:.2f}M", *cells))
    print(table(("", "parameters", "of which active", "loss at the end", "validation loss", "MaxVio of a batch"), rows))
    print(f"\nMaxVio of a batch whose tokens choose at random: {violation_of_chance(options):.2f}")


def violation_of_chance(options: argparse.Namespace) -> float:
    """The mean MaxVio of batches whose tokens choose experts evenly and independently, from many draws."""
    draw, found, tokens = np.random.default_rng(0), [], options.batch * options.seq
    for _ in range(_DRAWS):
        chosen = draw.random((tokens, options.experts)).argsort(axis=1)[:, : options.chosen]
        loads = np.bincount(chosen.ravel(), minlength=options.experts)
        found.append(loads.max() / loads.mean() - 1.0)
    return statistics.fmean(found)


# ---- speed


def train_in_turn(rank: int, world_size: int, options: argparse.Namespace, directory: str) -> dict[str, list[float]]:
    """Seconds of a step of each layout and, on the first rank while the other one waits, of transformers'."""
    torch.set_num_threads(1)
    mesh = None
    runs: dict[str, Callable[[], Any]] = {}
    for name, ep in (("megacore, --dp 2 --ep 2", 2), ("megacore, --dp 2", 1)):
        config = configuration(
            options, f"{directory}/{ep}", variant=NOTHING_BALANCES, ranks=world_size, dp=world_size, ep=ep
        )
        mesh = build_mesh(config.parallel)
        with contextlib.redirect_stdout(None):
            data = Bytes(read_text(options.text)[0], options.seq, seed=0)
            runs[name] = megacore_step(Trainer(config, mesh, GPTTask(config, mesh), data, None))
    assert mesh is not None
    theirs = _TheirMixture(options) if rank == 0 else None
    runs["transformers, one process"] = (lambda: None) if theirs is None else theirs.step
    return take_turns(runs, options.rounds, lambda: barrier(mesh.world))


class _TheirMixture:
    """transformers' Mixtral of the same sizes, with torch's AdamW."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            vocab_size=_BYTES,
            hidden_size=options.hidden,
            intermediate_size=options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.heads,
            num_local_experts=options.experts,
            num_experts_per_tok=options.chosen,
            max_position_embeddings=options.seq,
            experts_implementation="eager",
        )
        self._model, self._options = MixtralForCausalLM(config), options
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=2e-3, betas=(0.9, 0.95), fused=True)
        self._draw = torch.Generator().manual_seed(1)

    def step(self) -> None:
        """Forward, backward and update, with a thread for each of the ranks that wait."""
        torch.set_num_threads(2)
        tokens = torch.randint(_BYTES, (self._options.batch, self._options.seq), generator=self._draw)
        self._model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch.set_num_threads(1)


def main(argv: list[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, steps=400, rounds=7, layers=2, vocab=_BYTES, experts=8, chosen=2, width=0)
    parser.set_defaults(**dict.fromkeys(_SIZES))
    parser.add_argument("--text", type=Path, help="file to learn; default: the reference of Python's help()")
    parser.add_argument("--variant", help="only the models of the table whose names contain this, such as bias")
    parser.add_argument("--only", choices=("learning", "speed"), help="one of the two")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.only != "speed":
        learn(_with_sizes(options, 0))
    if options.only != "learning":
        options = _with_sizes(options, 1)
        with tempfile.TemporaryDirectory() as directory:
            seconds = run_distributed(train_in_turn, 2, options, directory, timeout=900)[0]
        print(f"\nA step of {options.batch} x {options.seq} tokens, median of {options.rounds} rounds, two cores\n")
        print(beside(seconds, "transformers, one process", options.batch * options.seq))
    return 0


def _with_sizes(options: argparse.Namespace, column: int) -> argparse.Namespace:
    """The options, with the default sizes of one of the two measurements."""
    defaults = {name: sizes[column] for name, sizes in _SIZES.items() if getattr(options, name) is None}
    return argparse.Namespace(**{**vars(options), **defaults})


if __name__ == "__main__":
    sys.exit(main())
