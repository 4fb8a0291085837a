"""A short training run on any layout, for comparing layouts: losses, norms, and whole tensors gathered from their
slices."""

from __future__ import annotations

import dataclasses
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

from megacore.config import (
    SECTIONS,
    AdamWConfig,
    AverageConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    ExpertsConfig,
    LoggingConfig,
    ModelConfig,
    MupConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RampupConfig,
    ResolvedConfig,
    SpikeConfig,
    StartConfig,
    TrainingConfig,
    WatchConfig,
)
from megacore.config.optimizers import OPTIMIZERS
from megacore.parallel import direct
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Group, Mesh, build_mesh, compute_reproducibly
from megacore.parallel.products import TORCH, Products
from megacore.parallel.sharding import ShardSpec, Slices
from megacore.train.callbacks import Callback
from megacore.train.engine import PipelineEngine
from megacore.train.gpt_task import GPTTask
from megacore.train.trainer import Trainer
from megacore.zero.local_segments import LocalSegment

Layout = tuple[int, int, int]  # tp, pp, dp
VOCAB, SEQUENCE, BATCH = 131, 16, 8


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: one loss and one gradient norm per step, and on rank 0 the gradients of step 1, the weights
    before and after, and the optimizer's state after, by its kind.

    The gradients are read after the update, which clips them in place (and in SGD adds weight decay). With
    `offload_optimizer` it changes copies in host memory, and not these: see `offloaded`."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    initial: dict[str, Tensor]
    final: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]


Run = Callable[..., Outcome]
Size = Callable[[Layout], dict[str, Any]]


def offloaded(changes: dict[str, Any]) -> dict[str, Any]:
    """Changes of a configuration with the optimizer in host memory and an update that leaves gradients as they are."""
    undecayed = {"weight_decay": 0.0} if changes.get("optimizer") == "sgd" else {}
    return {**changes, "offload_optimizer": True, "clip_grad": 0.0, **undecayed}


def small(layout: Layout) -> dict[str, Any]:
    """Three steps, one more than the warmup, and one block more than stages: no pp above 1 divides them."""
    return {"num_layers": layout[1] + 1, "train_iters": 3, "lr_warmup_iters": 2}


def whole(layout: Layout) -> dict[str, Any]:
    """The twenty steps and five blocks of `make_config`."""
    return {}


# Of a test with a `size`: each case is small in `make test`, and whole in `make test-slow`.
in_both_sizes = pytest.mark.parametrize("size", [small, pytest.param(whole, marks=pytest.mark.slow)])


def agree(found: Outcome, expected: Outcome) -> None:
    assert found.initial.keys() == expected.initial.keys()
    for name, value in expected.initial.items():
        assert torch.equal(found.initial[name], value), f"initial {name}"
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms[0] == pytest.approx(expected.norms[0], rel=1e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    for name, gradient in expected.gradients.items():
        # Relative to the tensor's own size: an entry of it may be zero but for rounding (the key's bias is).
        # A router's is a sum of larger terms, which cancel where the loss asks for equal loads: their rounding stays.
        rounding = 1e-7 if name.endswith("router.weight") else 1e-8
        error = (found.gradients[name] - gradient).abs().max()
        assert error <= 1e-6 * gradient.abs().max() + rounding, f"gradient of {name}: {error}"


def bitwise(found: Outcome, expected: Outcome, kinds: Sequence[str] = ("gradients", "initial", "final")) -> None:
    """Equal to the bit: losses, norms, tensors of these kinds, and the optimizer's state where both have it."""
    assert found.losses == expected.losses
    assert list(map(repr, found.norms)) == list(map(repr, expected.norms))  # that of a skipped step is NaN
    compared = {kind: (getattr(found, kind), getattr(expected, kind)) for kind in kinds}
    if found.moments and expected.moments:
        assert found.moments.keys() == expected.moments.keys()
        compared |= {kind: (moments, expected.moments[kind]) for kind, moments in found.moments.items()}
    for kind, (one, other) in compared.items():
        assert one.keys() == other.keys()
        assert not [name for name, value in other.items() if not torch.equal(one[name], value)], kind


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


def make_config(layout: Layout, output_dir: Path | str, **changes: Any) -> ResolvedConfig:
    """A small model with five blocks (no pp divides them) and a vocabulary that no tp divides; `changes` by field
    name."""
    tp, pp, dp = layout
    sections: dict[str, Any] = {
        "model": ModelConfig(
            num_layers=5,
            hidden_size=32,
            num_attention_heads=4,
            vocab_size=VOCAB,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            init_method_std=0.1,
            make_vocab_size_divisible_by=8,
        ),
        "experts": ExpertsConfig(),
        "parallel": ParallelConfig(
            tp=tp,
            pp=pp,
            dp=dp,
            bucket_size_mb=0.02,
            device="cpu",
            schedule="1f1b",
            pipeline_balance="parameters",
        ),
        "precision": PrecisionConfig(precision="fp32"),
        "data": DataConfig(seq_length=SEQUENCE, mock_data=True),
        **{name: kind() for name, kind in OPTIMIZERS.items() if name in SECTIONS},
        "adamw": AdamWConfig(adam_beta2=0.999),
        "optimizer": OptimizerConfig(lr=1e-3, min_lr=0.0, lr_warmup_iters=4, clip_grad=0.5, weight_decay=0.1),
        "training": TrainingConfig(
            micro_batch_size=2 if dp < 4 else 1,
            global_batch_size=BATCH,
            train_iters=20,
            eval_interval=0,
            output_dir=str(output_dir),
        ),
        "mup": MupConfig(),
        "average": AverageConfig(),
        "rampup": RampupConfig(),
        "checkpoint": CheckpointConfig(),
        "start": StartConfig(),
        "logging": LoggingConfig(),
        "watch": WatchConfig(),
        "spikes": SpikeConfig(),
    }
    for field, value in changes.items():
        (name,) = (n for n, s in sections.items() if field in {f.name for f in dataclasses.fields(s)})
        sections[name] = dataclasses.replace(sections[name], **{field: value})
    return Config(**sections).resolve(tp * pp * dp * sections["parallel"].cp)


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
    data = data or RaggedData(
        samples, boundaries=bool({"documents", "positions"} & set(beside)), pads="padding" in beside, length=length
    )
    return Trainer(config, mesh, GPTTask(config, mesh, products=products), data, data, callbacks=callbacks)


def train(rank: int, world_size: int, layout: Layout, output_dir: str, changes: dict[str, Any]) -> Outcome | None:
    """Run on one rank; rank 0 returns what came out."""
    config = make_config(layout, output_dir, **changes)
    if config.training.reproducible:
        compute_reproducibly()
    mesh = build_mesh(config.parallel)
    outcome = train_on(mesh, config, moments=config.training.reproducible)
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
    """Run a trainer to its end, and gather what came out, the optimizer's state too if `moments`."""
    config, mesh = trainer.config, trainer.mesh
    losses, norms, gradients = [], [], {}
    initial = gather(trainer, mesh, lambda owned: owned.master)
    for step in range(config.training.train_iters):
        result = trainer.train_step(next(trainer.batches))
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
        if step == 0:
            gradients = gather(trainer, mesh, lambda owned: owned.gradient)
    final = gather(trainer, mesh, lambda owned: owned.master)
    trainer.model.data_parallel.ready()  # the next trainer has the same groups
    return Outcome(losses, norms, gradients, initial, final, moments_of(trainer) if moments else {})


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
