"""Copies that differ: a flipped bit is found, named and never saved; equal copies raise no alarm."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.config import WatchConfig
from megacore.errors import SilentCorruption
from megacore.models.plain import Layer
from megacore.parallel.bit_hash import bit_hash
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import build_mesh
from megacore.train.callbacks import Callback, Run
from megacore.train.step import StepResult
from megacore.train.trainer import Trainer
from megacore.zero.local_segments import LocalSegment
from tests.distributed import run_distributed
from tests.parallel.test_engine import engine_of
from tests.parity.runs import Layout, make_config, make_trainer

# ---- the hash


def test_every_single_bit_and_every_swap_changes_the_hash() -> None:
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(1))
    expected, bits = bit_hash(values).item(), values.view(torch.int32)
    draw = random.Random(1)
    for bit in range(32):
        at = draw.randrange(len(values))
        bits[at] ^= -(1 << 31) if bit == 31 else 1 << bit
        assert bit_hash(values).item() != expected, bit
        bits[at] ^= -(1 << 31) if bit == 31 else 1 << bit
    for _ in range(50):
        one, other = draw.sample(range(len(values)), 2)
        values[[one, other]] = values[[other, one]]
        assert bit_hash(values).item() != expected
        values[[one, other]] = values[[other, one]]
    assert bit_hash(values).item() == expected


# ---- flipped bits

STEPS, INTERVAL = 7, 3
Case = tuple[Layout, dict[str, Any]]
CASES: list[Case] = [
    ((1, 1, 4), {}),
    ((2, 1, 2), {}),
    ((2, 1, 2), {"zero_stage": 1, "sequence_parallel": True}),
    ((1, 2, 2), {"schedule": "zero-bubble"}),
    ((1, 4, 1), {}),
    ((2, 2, 1), {"precision": "bf16"}),
    ((2, 1, 2), {"zero_stage": 3, "precision": "bf16"}),
    ((1, 1, 4), {"precision": "fp16", "offload_optimizer": True}),
    ((2, 2, 1), {"schedule": "interleaved", "virtual_stages": 2, "sequence_parallel": True}),
    ((1, 2, 2), {"zero_stage": 2, "precision": "bf16"}),
]


def has_copies(trainer: Trainer, local: LocalSegment) -> bool:
    """Whether another rank holds the same part of the same parameter and its state."""
    mesh, spec = trainer.mesh, local.spec
    by_tp = spec.is_replicated and mesh.layer.size > 1
    return by_tp or spec.name in trainer.model.shared or (local.bucket.options.stage == 0 and mesh.replicas.size > 1)


def state_of(trainer: Trainer, kind: str, local: LocalSegment) -> Tensor:
    tensor = local.master if kind == "master" else local.state(trainer.update.optimizer, kind)
    assert tensor is not None
    return tensor


class Flip(Callback):
    """Flips one bit on one rank after a step; the seed decides which.

    A low bit of a moment may be rounded away by the next update, so that nothing is left to find; not in these trials.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.step = self._draw.randint(1, INTERVAL)
        self.rank, self.name = -1, ""

    def on_step_begin(self, run: Run, step: int) -> None:
        assert isinstance(run, Trainer)
        if self.rank < 0:
            copied = any(has_copies(run, local) for local in run.model.data_parallel.segments)
            holders = all_gather_objects(copied, run.mesh.world)
            self.rank = self._draw.choice([rank for rank, holds in enumerate(holders) if holds])

    def on_step_end(self, run: Run, result: StepResult) -> None:
        assert isinstance(run, Trainer)
        if result.step == self.step and run.mesh.world.rank == self.rank:
            choice = [local for local in run.model.data_parallel.segments if has_copies(run, local)]
            local = self._draw.choice(choice)
            kind = self._draw.choice(["master", "exp_avg", "exp_avg_sq"])
            tensor = state_of(run, kind, local)
            at, bit = self._draw.randrange(tensor.numel()), self._draw.randrange(32)
            tensor.view(torch.int32)[at] ^= -(1 << 31) if bit == 31 else 1 << bit
            self.name = f"{local.spec.name} {kind} bit {bit}"


def saves(seed: int) -> bool:
    """Whether the trial saves each step; if not, it is the interval that finds the bit."""
    return seed % 2 == 0


def flipped(rank: int, world_size: int, directory: str, trials: Sequence[int]) -> list[Any]:
    """Of each trial: what was flipped, what was said, where, after which step, and what was saved."""
    found = []
    for seed in trials:
        layout, changes = CASES[seed % len(CASES)]
        run = Path(directory) / str(seed)
        changes = {"num_layers": 4, "train_iters": STEPS, "save_interval": 1 if saves(seed) else None, **changes}
        config = make_config(layout, run, check_replicas_interval=INTERVAL, **changes)
        mesh, flip, said = build_mesh(config.parallel), Flip(seed), ""
        trainer = make_trainer(config, mesh, callbacks=[flip])
        try:
            trainer.run()
        except SilentCorruption as error:
            said = str(error)
        names = all_gather_objects(flip.name, mesh.world)
        saved = sorted(path.name for path in run.glob("step_*"))
        found.append((names[flip.rank], said, flip.rank, flip.step, saved))
    return found


@pytest.mark.parametrize("trials", [[1, 6], pytest.param(range(100, 112), marks=pytest.mark.slow)], ids=str)
def test_flipped_bits_are_found_and_named(trials: Sequence[int], tmp_path: Path) -> None:
    ranks = run_distributed(flipped, 4, str(tmp_path), trials, timeout=120)
    for seed, results in zip(trials, zip(*ranks, strict=True), strict=True):
        name, said, rank, step, saved = results[0]
        where = f"trial {seed}: {name} on rank {rank} after step {step}: {said}"
        assert all(other[1] == said for other in results), f"the same on every rank: {where}"
        due = step if saves(seed) else (step // INTERVAL + 1) * INTERVAL  # the bit flips after its step's check
        assert said.startswith(f"replicas differ after step {due}: "), where
        assert len(saved) == (step - 1 if saves(seed) else 0), where
        assert (f"the last good one is {tmp_path}/{seed}/{saved[-1]}" if saved else "none to go back to") in said
        assert re.search(rf"\n  ranks? (\d, )*{rank}\b|\n  ranks 0 to 3 ", said), where
        assert name.split()[0] in said, where


# ---- no other alarm, and the engine. That checks change no bit is in test_replay.py.


def checked(rank: int, world_size: int, directory: str) -> None:
    layout, changes = CASES[2]
    config = make_config(layout, directory, check_replicas_interval=1, train_iters=3, log_interval=2, **changes)
    make_trainer(config, build_mesh(config.parallel)).run()


def test_the_last_checked_step_is_in_the_metrics(tmp_path: Path) -> None:
    run_distributed(checked, 4, str(tmp_path), stay=True)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["watch/replicas_checked_step"] for record in records] == [2, 3]


def engine_with_a_flipped_bit(rank: int, world_size: int, directory: str) -> list[str]:
    layers = [Layer("a", torch.nn.Linear, 6, 6), Layer("norm", torch.nn.BatchNorm1d, 6)]
    engine = engine_of(layers, dp=3, watch=WatchConfig(check_replicas_interval=2))
    said = []
    for step in range(4):
        x, y = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(step))
        try:
            engine.train_batch(engine.split(x, y))
        except SilentCorruption as error:
            said.append(str(error))
        if step == 0:
            engine.save(directory)
        if step == 2 and rank == 1:
            engine.model.parameters["norm.bias"].data.view(torch.int32)[3] ^= 1
    with pytest.raises(SilentCorruption):
        engine.save(directory)
    return said


def test_an_engine_names_the_replica_that_is_in_the_minority(tmp_path: Path) -> None:
    ranks = run_distributed(engine_with_a_flipped_bit, 3, str(tmp_path))
    assert ranks[0] == ranks[1] == ranks[2]
    (said,) = ranks[0]
    first, odd, last = said.splitlines()
    assert first == "replicas differ after step 4: ranks that must hold the same bits do not"
    assert re.fullmatch(r"  rank 1 \(pp 0, dp 1, tp 0, on \S+\) differs from ranks 0, 2 in norm.bias \(weight\)", odd)
    assert f"the last good one is {tmp_path}/step_00000001. " in last
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000001"]
