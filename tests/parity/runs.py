"""A short training run on any layout, for comparing layouts: losses, norms, and whole tensors gathered from their
slices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megacore.audit.recorder import Record, StepRecords
from megacore.config import SECTIONS, Config, ResolvedConfig
from megacore.config.schema import section_of
from megacore.parallel import direct
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Group, Mesh, build_mesh, compute_reproducibly
from megacore.parallel.products import TORCH, Products
from megacore.parallel.sharding import ShardSpec, Slices
from megacore.train.callbacks import Callback, Event, Run
from megacore.train.engine import PipelineEngine
from megacore.train.gpt_task import GPTTask
from megacore.train.trainer import Trainer
from megacore.zero.local_segments import LocalSegment

Layout = tuple[int, int, int]  # tp, pp, dp
VOCAB, SEQUENCE, BATCH = 131, 16, 8


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: one loss and one gradient norm per step, and on rank 0 the gradients of step 1, the weights
    before and after, and the optimizer's state after, by its kind; of a reproducible run what a ledger says of each
    step's samples, and of the last state.

    The gradients are read after the update, which clips them in place (and in SGD adds weight decay). With
    `offload_optimizer` it changes copies in host memory, and not these: they are alike with neither."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    initial: dict[str, Tensor]
    final: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    ledger: Sequence[Record] = ()


def near(what: str, found: Sequence[float], expected: Sequence[float], rel: float) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one == pytest.approx(other, rel=rel), f"{what} of step {number}: {one}, not {other} within {rel}"


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """Which tensors are not equal to the bit, and by how much the first of them."""
    assert found.keys() == expected.keys()
    unequal = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    largest = [float((found[name] - expected[name]).abs().max()) for name in unequal[:1]]
    return f"{unequal[0]} by {largest[0]:.3g}, and {len(unequal) - 1} of {len(found)} others" if unequal else ""


def agree(found: Outcome, expected: Outcome) -> None:
    """To the rounding of fp32: losses, norms and gradients; the weights at the start to the bit."""
    assert not (differ := differences(found.initial, expected.initial)), f"initial {differ}"
    for what in ("losses", "norms"):
        near(what, getattr(found, what)[:1], getattr(expected, what)[:1], 1e-6)
        near(what, getattr(found, what), getattr(expected, what), 1e-5)
    for name, gradient in expected.gradients.items():
        # Relative to the tensor's own size: an entry of it may be zero but for rounding (the key's bias is).
        # A router's is a sum of larger terms, which cancel where the loss asks for equal loads: their rounding stays.
        rounding = 1e-7 if name.endswith("router.weight") else 1e-8
        error = (found.gradients[name] - gradient).abs().max()
        assert error <= 1e-6 * gradient.abs().max() + rounding, f"gradient of {name}: {error}"


def bitwise(found: Outcome, expected: Outcome, kinds: Sequence[str] = ("gradients", "initial", "final")) -> None:
    """Equal to the bit: losses, norms, tensors of these kinds, and the optimizer's state where both have it."""
    differ = []
    for what in ("losses", "norms"):
        one, other = (list(map(repr, getattr(outcome, what))) for outcome in (found, expected))  # NaN of a skipped step
        differ += [] if one == other else [f"{what} {one}, not {other}"]
    compared = {kind: (getattr(found, kind), getattr(expected, kind)) for kind in kinds}
    if found.moments and expected.moments:
        assert found.moments.keys() == expected.moments.keys()
        compared |= {kind: (moments, expected.moments[kind]) for kind, moments in found.moments.items()}
    differ += [f"{kind} {which}" for kind, pair in compared.items() if (which := differences(*pair))]
    if "final" in kinds and found.ledger and expected.ledger and found.ledger != expected.ledger:
        differ.append(f"ledger {found.ledger}, not {expected.ledger}")
    assert not differ, "; ".join(differ)


class RaggedData:
    """Random samples of which each has another number of tokens that count: a wrong weighting cannot hide. With
    `boundaries` they tell documents of other lengths in each: of one token, of odd lengths, and one that ends in the
    middle of the sequence, where shards do. With `pads` some positions at the end are padding."""

    def __init__(self, samples: int, *, boundaries: bool = False, pads: bool = False, length: int = SEQUENCE) -> None:
        self._samples, self._boundaries, self._pads, self._length = samples, boundaries, pads, length

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        random, length = np.random.default_rng(index), self._length
        window = random.integers(0, VOCAB, length + 1)
        counted = random.integers(1, length + 1)
        mask = (np.arange(length) < counted).astype(np.float32)
        sample = {"tokens": window[:-1].astype(np.int64), "labels": window[1:].astype(np.int64), "loss_mask": mask}
        if self._boundaries:
            begins = np.isin(np.arange(length), [0, length // 2, *random.integers(0, length, 3)])
            firsts = np.maximum.accumulate(np.where(begins, np.arange(length), 0))
            sample |= {"documents": begins.cumsum(), "positions": np.arange(length) - firsts}
        if self._pads:
            padding = np.arange(length) >= random.integers(1, length + 1)
            sample |= {"padding": padding.astype(np.int64), "loss_mask": mask * ~padding}
        return sample


USUAL: dict[str, Any] = {
    "num_layers": 5, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCAB, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "init_method_std": 0.1, "make_vocab_size_divisible_by": 8, "bucket_size_mb": 0.02,
    "device": "cpu", "schedule": "1f1b", "pipeline_balance": "parameters", "precision": "fp32", "seq_length": SEQUENCE,
    "mock_data": True, "adam_beta2": 0.999, "lr": 1e-3, "min_lr": 0.0, "lr_warmup_iters": 4, "clip_grad": 0.5,
    "weight_decay": 0.1, "global_batch_size": BATCH, "train_iters": 20, "eval_interval": 0,
}  # fmt: skip


def make_config(layout: Layout, output_dir: Path | str, **changes: Any) -> ResolvedConfig:
    """A small model with five blocks (no pp divides them) and a vocabulary that no tp divides; `changes` by field
    name."""
    degrees = dict(zip(("tp", "pp", "dp"), layout, strict=True))
    own = {"micro_batch_size": 2 if degrees["dp"] < 4 else 1, "output_dir": str(output_dir)}
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for field, value in (USUAL | degrees | own | changes).items():
        values[section_of(Config, field)][field] = value
    sections: Any = {name: SECTIONS[name](**given) for name, given in values.items()}
    config = Config(**sections)
    return config.resolve(math.prod(layout) * config.parallel.cp)


def make_trainer(
    config: ResolvedConfig,
    mesh: Mesh,
    data: Any = None,
    *,
    callbacks: Sequence[Callback] = (),
    products: Products = TORCH,
) -> Trainer:
    """A trainer on `data`, by default as many random samples as the run takes, whose linear layers use `products`."""
    samples = config.training.global_batch_size * config.training.train_iters
    beside, length = config.beside_hidden_states, config.data.seq_length
    data = data or RaggedData(samples, boundaries=bool(beside), pads="padding" in beside, length=length)
    return Trainer(config, mesh, GPTTask(config, mesh, products=products), data, data, callbacks=callbacks)


class Heard(Callback):
    """Keeps what a run says on this rank."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def on_event(self, run: Run, event: Event) -> None:
        if event.kind == "message":
            self.said.append(event.values["text"])


def trainer_of(layout: Layout, output_dir: Path | str, **changes: Any) -> Trainer:
    """The trainer of a layout on this rank."""
    config = make_config(layout, output_dir, **changes)
    if config.training.reproducible:
        compute_reproducibly()
    return make_trainer(config, build_mesh(config.parallel))


def train(rank: int, world_size: int, layout: Layout, output_dir: str, changes: dict[str, Any]) -> Outcome | None:
    """Run on one rank; rank 0 returns what came out."""
    trainer = trainer_of(layout, output_dir, **changes)
    outcome = outcome_of(trainer, moments=trainer.config.training.reproducible)
    return outcome if rank == 0 else None


def losses_around_a_skip(config: ResolvedConfig) -> list[float]:
    """Of four fp16 steps, the second of which overflows and is skipped."""
    trainer, losses = make_trainer(config, build_mesh(config.parallel)), []
    for step in range(4):
        trainer.update.scaler.scale = 2.0**120 if step == 1 else 1024.0
        losses.append(float(trainer.train_step(next(trainer.batches)).loss))
    assert trainer.update.skipped_steps == 1
    trainer.model.data_parallel.ready()
    return losses


def train_on(mesh: Mesh, config: ResolvedConfig, *, moments: bool = False) -> Outcome:
    """Run on this rank of a mesh; see `outcome_of`."""
    return outcome_of(make_trainer(config, mesh), moments=moments)


def outcome_of(trainer: Trainer, *, moments: bool = False) -> Outcome:
    """Run a trainer to its end from where it is, and gather what came out, the optimizer's state too if `moments`."""
    config, mesh = trainer.config, trainer.mesh
    losses, norms, gradients, ledger = [], [], {}, []
    # Each hash of the small models of tests takes a third of a step, and only these are the same on every layout.
    records = StepRecords(trainer) if config.training.reproducible else None
    initial = gather(trainer, mesh, lambda owned: owned.master)
    while trainer.step < config.training.train_iters:
        result = trainer.train_step(next(trainer.batches))
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
        if records is not None:
            is_last = trainer.step == config.training.train_iters
            line = records.completed(*records.of(result, with_state=is_last))
            ledger.append({name: line.get(name) for name in ("samples", "data", "state")})
        if len(losses) == 1:
            gradients = gather(trainer, mesh, lambda owned: owned.gradient)
    final = gather(trainer, mesh, lambda owned: owned.master)
    trainer.model.data_parallel.ready()  # the next trainer has the same groups
    return Outcome(losses, norms, gradients, initial, final, moments_of(trainer) if moments else {}, ledger)


def moments_of(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state, where it keeps any."""
    optimizer = trainer.update.optimizer

    def take(kind: str, owned: LocalSegment) -> Tensor | None:
        value = optimizer.values(owned, kind)
        assert value is not None or owned.run.scale.frozen
        return value

    return {kind.name: gather(trainer, trainer.mesh, partial(take, kind.name)) for kind in optimizer.kinds}


def gather(
    trainer: Trainer | PipelineEngine,
    mesh: Mesh,
    take: Callable[[LocalSegment], Tensor | None],
    *,
    everywhere: bool = False,
) -> dict[str, Tensor]:
    """Whole tensors from what every rank owns, on the first rank; where several ranks own the same, they must agree bit
    for bit. The other ranks get them only `everywhere`, which takes as long on each of them."""
    shapes = {name: tuple(parameter.shape) for name, parameter in trainer.model.parameters.items()}
    mine = [
        (owned.spec, shapes[owned.spec.name], owned.segment.start, owned.segment.stop, array_of(value))
        for owned in trainer.model.data_parallel.segments
        if (value := take(owned)) is not None
    ]
    local: dict[tuple[str, Slices], tuple[ShardSpec, Tensor]] = {}
    for pieces in all_gather_objects(mine, mesh.world) if everywhere else _on_first_rank(mine, mesh.world):
        for spec, shape, start, stop, piece in pieces:
            _, tensor = local.setdefault((spec.name, spec.slices), (spec, torch.full(shape, torch.nan)))
            _agree(tensor.view(-1)[start:stop], torch.from_numpy(piece), spec.name)
    whole: dict[str, Tensor] = {}
    for spec, tensor in local.values():
        full = whole.setdefault(spec.name, torch.full(spec.shape, torch.nan))
        _agree(spec.take(full), spec.unpadded(tensor), spec.name)
    assert not any(torch.isnan(full).any() for full in whole.values()), "a slice is missing"
    return whole


def _on_first_rank(value: Any, group: Group) -> list[Any]:
    """The value of every rank on the first one, and nothing on the others."""
    if group.size > 1 and dist.get_backend(group.handle) == "gloo":
        values = direct.gather_objects(value, group)
    else:
        values = all_gather_objects(value, group)
    return values if group.is_first else []


def array_of(tensor: Tensor) -> NDArray[np.float32]:
    """A tensor in at most 32 bits as ranks send it to each other: pickle is several times as fast with an array."""
    array: NDArray[np.float32] = tensor.detach().float().numpy(force=True)
    return array


def _agree(held: Tensor, piece: Tensor, name: str) -> None:
    assert torch.all(torch.isnan(held) | (held == piece)), f"copies of {name} differ"
    held.copy_(piece)
