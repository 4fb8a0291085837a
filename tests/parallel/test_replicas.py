"""Copies that differ: a flipped bit is found, named and never saved; equal copies raise no alarm."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config import AdamWConfig, OptimizerConfig, ParallelConfig, PrecisionConfig, ResolvedConfig, WatchConfig
from megacore.errors import EXIT_CORRUPT, ConfigError, SilentCorruption, TrainingStopped
from megacore.layers.block import TransformerBlock
from megacore.models.plain import Layer
from megacore.observe.bit_hash import bit_hash, odd_numbers
from megacore.observe.replay import Replay
from megacore.ops.fp8 import Quantised, quantise
from megacore.parallel import fp8
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.heartbeat import Channel, Current
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.pipeline.schedule_file import load_schedule
from megacore.pipeline.transport import Send, Transport
from megacore.train.callbacks import Callback, Run
from megacore.train.engine import PipelineEngine
from megacore.train.launch import launch
from megacore.train.same_run import refuse_different_ranks
from megacore.train.step import StepResult
from megacore.train.trainer import Trainer
from megacore.watch.ledger import Ledger
from megacore.watch.same_operations import Difference, first_difference, odd_ones
from megacore.zero.local_segments import LocalSegment
from tests.distributed import run_distributed
from tests.parallel.test_engine import engine_of
from tests.parity.runs import Layout, bitwise, make_config, make_trainer, train_on
from tests.unit.watch_records import identity

# ---- the hash


def test_every_single_bit_and_every_swap_changes_the_hash() -> None:
    weights = odd_numbers(0, 1 << 14, torch.device("cpu"))
    assert (weights % 2 == 1).all() and len(
        (weights & (2**33 - 1)).unique()
    ) == 1 << 14  # what the promise of swaps needs
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


# ---- no other alarm, and the engine


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


# ---- replays ---------------------------------------------------------------------------------------------------------

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
# Each with another way for gradients to arrive and to be added up.
KINDS: list[tuple[Layout, dict[str, Any]]] = [
    ((1, 1, 4), {}),
    ((2, 1, 2), {"sequence_parallel": True, "zero_stage": 1, **DROPOUT}),
    ((1, 2, 2), {"schedule": "zero-bubble", "zero_stage": 3, **DROPOUT}),
    ((2, 2, 1), {"schedule": "interleaved", "virtual_stages": 2, "precision": "bf16"}),
    ((1, 1, 4), {"zero_stage": 2, "precision": "bf16", "recompute": "full", **DROPOUT}),
    ((1, 4, 1), {"schedule": "gpipe"}),
    ((1, 2, 2), {"schedule": "zero-bubble", "reproducible": True, **DROPOUT}),
    ((1, 1, 4), {"precision": "fp16", "offload_optimizer": True, "zero_stage": 1}),
    ((2, 1, 2), {"precision": "bf16", "zero_stage": 3}),
    ((2, 2, 1), {"schedule": "interleaved", "virtual_stages": 2, "sequence_parallel": True, **DROPOUT}),
    ((1, 2, 2), {"schedule": "zb-v", "virtual_stages": 2, "zero_stage": 2}),
]


def with_and_without(rank: int, world_size: int, directory: str, kinds: list[tuple[Layout, dict[str, Any]]]) -> None:
    for number, (layout, changes) in enumerate(kinds):
        usual = {"num_layers": 4, "train_iters": 3, "log_interval": 2, "recompute": "none", **changes}
        plain, watched = (
            make_config(layout, f"{directory}/{number}", replay_interval=n, check_replicas_interval=n, **usual)
            for n in (0, 1)
        )
        mesh = build_mesh(plain.parallel)
        bitwise(train_on(mesh, watched), train_on(mesh, plain))


@pytest.mark.parametrize("kinds", [KINDS[1:3], pytest.param([KINDS[0], *KINDS[3:]], marks=pytest.mark.slow)])
def test_replays_and_checks_of_copies_change_no_bit_and_raise_no_alarm(
    kinds: list[tuple[Layout, dict[str, Any]]], tmp_path: Path
) -> None:
    run_distributed(with_and_without, 4, str(tmp_path), kinds, timeout=120, stay=True)


class Fault:
    """A module of one rank computes once with a flipped bit: its output, or the gradient of its output.

    Args:
        trainer: of this rank.
        draw: decides the module and the bit; the same on every rank.
        rank: that has the fault.
        replay: whether in the second of both computations.
        backward: whether in backward.
    """

    def __init__(self, trainer: Trainer, draw: random.Random, *, rank: int, replay: bool, backward: bool) -> None:
        self._calls, self._at, self._backward, self._draw = 0, 0, backward, draw
        if trainer.mesh.world.rank != rank:
            return
        layers = [layer for chunk in trainer.model.chunks for layer in chunk.layers]
        module = draw.choice([layer for layer in layers if isinstance(layer, TransformerBlock)])
        training = trainer.config.training
        microbatches = training.global_batch_size // training.micro_batch_size // trainer.mesh.batch.size
        # Two steps, of which the second is replayed; the first microbatch's backward is the first.
        self._at = microbatches + (microbatches if replay else 0)
        module.register_forward_hook(self.after)

    def after(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if self._calls == self._at:
            if self._backward:
                output.register_hook(self.flipped)
            else:
                output.data.copy_(self.flipped(output))
        self._calls += 1

    def flipped(self, values: Tensor) -> Tensor:
        changed = values.detach().clone()
        token = values.shape[-1]  # of the first: all others may be masked in the loss
        changed.view(-1).view(torch.int32)[self._draw.randrange(token)] ^= 1 << 21
        return changed


def faulty(rank: int, world_size: int, directory: str, trials: Sequence[int]) -> list[tuple[int, str]]:
    found = []
    for seed in trials:
        draw = random.Random(seed)
        layout = draw.choice([(1, 1, 4), (1, 2, 2), (2, 1, 2)])
        config = make_config(layout, f"{directory}/{seed}", num_layers=4, train_iters=2, replay_interval=2)
        odd, said = draw.randrange(world_size), ""
        trainer = make_trainer(config, build_mesh(config.parallel))
        Fault(trainer, draw, rank=odd, replay=seed % 2 == 1, backward=seed % 4 > 1)
        try:
            trainer.run()
        except SilentCorruption as error:
            said = str(error)
        found.append((odd, f"{layout} {said}"))
    return found


@pytest.mark.parametrize("trials", [[2], pytest.param(range(100, 108), marks=pytest.mark.slow)], ids=str)
def test_a_rank_that_computes_otherwise_once_is_named(trials: Sequence[int], tmp_path: Path) -> None:
    ranks = run_distributed(faulty, 4, str(tmp_path), trials, timeout=120)
    for seed, results in zip(trials, zip(*ranks, strict=True), strict=True):
        odd, said = results[0]
        assert all(other == results[0] for other in results), "the same on every rank"
        assert "step 2: a microbatch that was computed again gave other numbers" in said, (seed, odd, said)
        named = rf"\n  rank {odd} \(pp \d, dp \d, tp \d, on \S+\), microbatch \d+: .*in forward order (first )?\w"
        assert re.search(named, said), (seed, odd, said)
        if said.startswith("(1, 1, 4)"):  # other replicas have computed their own microbatches
            assert said.count("\n  rank ") == 1, said


def test_a_weight_that_was_quantised_wrongly_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step keeps of it is no witness."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 64}
    given: dict[str, Any] = {"precision": "bf16", "fp8": "tensorwise", "replay_interval": 1, "train_iters": 1, **sizes}
    trainer = make_trainer(make_config((1, 1, 1), tmp_path, **given), Mesh(device=torch.device("cpu")))
    weights = {parameter.data_ptr() for parameter in trainer.model.chunks[0].parameters()}

    def once_wrong(x: Tensor, *form: Any) -> Quantised:
        made = quantise(x, *form)
        if x.data_ptr() in weights:
            weights.clear()
            made.scales.mul_(2.0)
        return made

    monkeypatch.setattr(fp8, "quantise", once_wrong)
    with pytest.raises(SilentCorruption, match="a microbatch that was computed again gave other numbers"):
        trainer.train_step(next(trainer.batches))
    assert not weights


def launched(rank: int, world_size: int, directory: str) -> int:
    config = make_config(
        (1, 1, 1), directory, train_iters=2, lr_warmup_iters=1, replay_interval=2, hang_timeout_minutes=0.0
    )

    def body(config: ResolvedConfig, mesh: Mesh) -> None:
        trainer = make_trainer(config, mesh)
        Fault(trainer, random.Random(1), rank=0, replay=True, backward=False)
        trainer.run()

    return launch(config, body)


def test_the_process_ends_with_status_3_and_saves_nothing(tmp_path: Path) -> None:
    assert run_distributed(launched, 1, str(tmp_path), init=False) == [EXIT_CORRUPT] == [3]
    assert not list(tmp_path.glob("step_*"))


LAYERS = [
    Layer("a", nn.Linear, 6, 6),
    Layer("norm", nn.BatchNorm1d, 6),
    Layer("drop", nn.Dropout, 0.3),
    Layer("b", nn.Linear, 6, 6).tied({"weight": "a.weight"}),
]


def engines(rank: int, world_size: int) -> None:
    states = []
    for interval in (0, 1):
        watch = WatchConfig(replay_interval=interval, check_replicas_interval=1)
        engine = engine_of(LAYERS, 2, 2, parallel={"pipeline_balance": "uniform"}, watch=watch)
        draw = torch.Generator().manual_seed(1)
        for _ in range(3):
            x, y = torch.randn(2, 12, 6, generator=draw)
            engine.train_batch(engine.split(x, y))
        states.append(engine.state_dict())
    assert "norm.running_mean" in states[0]
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


def test_an_engine_with_replays_keeps_every_bit_of_weights_and_buffers() -> None:
    run_distributed(engines, 4)


def test_what_cannot_be_replayed_is_refused_by_name(tmp_path: Path) -> None:
    config = make_config((1, 1, 1), tmp_path, replay_interval=5)
    model: Any = None
    with pytest.raises(ConfigError, match="--replay-interval 5 compares bits, but operators of cuda may"):
        Replay(model, config, Mesh(device=torch.device("cuda")))
    file = tmp_path / "own.csv"
    file.write_text(",".join(f"0F{i},0I{i}" for i in range(4)) + ",0W1,0W0,0W2,0W3\n")
    own = make_config((1, 1, 1), tmp_path / "out", replay_interval=5, schedule_csv=str(file))
    make_trainer(own, build_mesh(own.parallel))  # one stage: any microbatch may be the first
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1I0,1I1,1W1,1W0\n")  # the last stage begins with another one
    model = SimpleNamespace(runtime=SimpleNamespace(schedule=lambda *_, **__: load_schedule(file)))
    with pytest.raises(ConfigError, match="needs one microbatch that comes first in the backward of every stage"):
        Replay(model, own, build_mesh(own.parallel))


# ---- one rank differs ------------------------------------------------------------------------------------------------

SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("optimizer", {"lr": 2e-3}, "--lr 0.002, {others}: 0.001"),
    ("training", {"seed": 7}, "--seed 7, {others}: 1234"),
    ("training", {"global_batch_size": 16}, "--global-batch-size 16, {others}: 8"),
    ("parallel", {"tp": 2}, "--tp 2, {others}: 1"),
    ("data", {"split": "1,0,0"}, "--split 1,0,0, {others}: 949,50,1"),
]


def in_environment(**variables: str) -> Callable[[], Any]:
    return lambda: mock.patch.dict(os.environ, variables)


@contextlib.contextmanager
def in_tf32() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def without_flash() -> Iterator[None]:
    torch.backends.cuda.enable_flash_sdp(False)
    yield
    torch.backends.cuda.enable_flash_sdp(True)


SURROUNDINGS: list[tuple[Callable[[], Any], str]] = [
    (lambda: mock.patch.object(torch, "__version__", "2.0.0"), "version of torch 2.0.0, {others}: "),
    (in_environment(NCCL_ALGO="Tree"), "environment variable NCCL_ALGO Tree, {others}: not set"),
    (in_tf32, "torch.backends.cuda.matmul.fp32_precision tf32, {others}: ieee"),
    (without_flash, "torch.backends.cuda.flash_sdp_enabled False, {others}: True"),
]


def refused(config: ResolvedConfig, rank: int) -> str:
    mesh_world = build_mesh(ParallelConfig(dp=4, device="cpu")).world
    with pytest.raises(ConfigError) as error:
        refuse_different_ranks(config, mesh_world)
    return str(error.value)


def started_differently(rank: int, world_size: int, base: ResolvedConfig) -> list[tuple[int, str, str]]:
    """Which rank differed, what must be said of it, and what was said on this rank; for each way to differ."""
    ways: list[tuple[str, dict[str, Any], Callable[[], Any], str]] = [
        *((section, values, contextlib.nullcontext, text) for section, values, text in SETTINGS),
        *(("data", {}, surroundings, text) for surroundings, text in SURROUNDINGS),
    ]
    found = []
    for number, (section, values, surroundings, text) in enumerate(ways):
        odd = number % world_size
        config = base
        around: Callable[[], Any] = contextlib.nullcontext
        if rank == odd:
            config = dataclasses.replace(base, **{section: dataclasses.replace(getattr(base, section), **values)})
            around = surroundings
        with around():
            found.append((odd, text, refused(config, rank)))
    refuse_different_ranks(base, build_mesh(base.parallel).world)  # equal ranks are accepted
    return found


def test_every_key_that_differs_on_one_rank_is_named_at_launch(tmp_path: Path) -> None:
    base = make_config((1, 1, 4), tmp_path / "out")
    base = dataclasses.replace(base, training=dataclasses.replace(base.training, micro_batch_size=2))
    ranks = run_distributed(started_differently, 4, base)
    assert len(ranks[0]) == len(SETTINGS) + len(SURROUNDINGS)
    for number, (odd, text, said) in enumerate(ranks[0]):
        assert all(other[number][2] == said for other in ranks), "the same on every rank"
        others = [rank for rank in range(4) if rank != odd]
        named = f"ranks {others[0]} to {others[-1]}" if odd in (0, 3) else f"ranks {', '.join(map(str, others))}"
        (line,) = (line for line in said.splitlines() if text.format(others=named) in line)
        assert line.startswith(f"  - rank {odd} (pp 0, dp {odd}, tp 0): "), line
        assert len(said.splitlines()) <= 3, said


ENGINE: dict[str, Any] = {"layers": [Layer("a", nn.Linear, 6, 6), Layer("drop", nn.Dropout, 0.1)], "loss": F.mse_loss}
ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": OptimizerConfig(lr=2e-3, min_lr=1e-4)}, "--lr 0.002, {others}: 0.001"),
    ({"optimizer_settings": AdamWConfig(adam_eps=1e-6)}, "--optimizer eps=1e-06, {others}: 1e-08"),
    ({"precision": PrecisionConfig(precision="bf16")}, "--precision bf16, {others}: fp32"),
    ({"seed": 5}, "--seed 5, {others}: 1234"),
    ({"parallel": ParallelConfig(dp=3, zero_stage=2, device="cpu")}, "--zero-stage 2, {others}: 0"),
    ({"num_microbatches": 2}, "--global-batch-size 6, {others}: 3"),
    ({"reduction": "sum"}, "reduction sum, {others}: mean"),
    ({"loss": F.l1_loss}, "loss l1_loss, {others}: mse_loss"),
    ({"count": len}, "count len, {others}: NoneType"),
    (
        {"layers": [ENGINE["layers"][0], Layer("drop", nn.Dropout, 0.2)]},
        "module of layer 'drop' Dropout(0.2), {others}: Dropout(0.1)",
    ),
]


def engines_made_differently(rank: int, world_size: int) -> list[str]:
    usual = ENGINE | {"train_iters": 4, "optimizer": OptimizerConfig(lr=1e-3, min_lr=1e-4)}
    usual["parallel"] = ParallelConfig(dp=3, device="cpu")
    said = []
    for number, (changes, _) in enumerate(ENGINES):
        with pytest.raises(ConfigError) as error:
            PipelineEngine(**usual | (changes if rank == number % world_size else {}))
        said.append(str(error.value))
    PipelineEngine(**usual)
    return said


def test_an_engine_that_is_made_differently_on_one_rank_is_refused() -> None:
    ranks = run_distributed(engines_made_differently, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    for number, ((_, text), said) in enumerate(zip(ENGINES, ranks[0], strict=True)):
        odd = number % 3
        one, other = (rank for rank in range(3) if rank != odd)
        assert said.startswith(
            f"  - rank {odd} (pp 0, dp {odd}, tp 0): {text.format(others=f'ranks {one}, {other}')}\n"
        )
        assert len(said.splitlines()) == 2, said


# ---- operations of other sizes ---------------------------------------------------------------------------------------

GROUP, PAIR = Channel((0, 1, 2)), Channel((1, 0), is_message=True)


class Shortened(Transport):
    """Sends half of each tensor in one call."""

    calls = 0

    def post(self, transfers: Sequence[Any]) -> Any:
        sends = any(isinstance(transfer, Send) for transfer in transfers)
        self.calls += sends
        if sends and self.calls == 14:
            transfers = [
                dataclasses.replace(one, tensors=tuple(t.flatten()[: t.numel() // 2] for t in one.tensors))
                if isinstance(one, Send)
                else one
                for one in transfers
            ]
        return super().post(transfers)


def train(rank: int, world_size: int, output_dir: str, at: int) -> str:
    config = make_config((1, 2, 1), output_dir, num_layers=2, train_iters=6)
    degrees = {"pp": 2, "dp": 1, "tp": 1}
    Current.heartbeat = Ledger(Path(output_dir), identity(rank, world_size, pid=os.getpid(), degrees=degrees))
    trainer = make_trainer(config, build_mesh(config.parallel))
    if rank == at:
        trainer.model.runtime.transport.__class__ = Shortened
    with pytest.raises(TrainingStopped) as raised:
        trainer.run()
    return str(raised.value)


@pytest.mark.parametrize("at", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_short_message_is_noticed_in_its_step_and_its_sender_named(at: int, tmp_path: Path) -> None:
    said = run_distributed(train, 2, str(tmp_path), at)
    assert said[0] == said[1]
    assert said[0].startswith(f"ranks communicate with different sizes in step 4: operation 14 from rank {at} to rank ")
    assert f"; rank {at} (pp {at}, dp 0, tp 0) left what it does in every step" in said[0]
    assert not list(tmp_path.glob("step_*"))


def test_who_differs_is_the_one_that_changed_or_a_minority() -> None:
    same, other = [(1, "all-reduce", 8), (2, "all-reduce", 16)], [(1, "all-reduce", 8), (2, "all-reduce", 24)]
    found = first_difference([{GROUP: same}, {GROUP: other}, {GROUP: same}])
    assert found == Difference(
        GROUP, 2, {0: "all-reduce of 16 bytes", 1: "all-reduce of 24 bytes", 2: "all-reduce of 16 bytes"}
    )
    assert found.in_words() == (
        "operation 2 of ranks 0 to 2 (ranks 0, 2: all-reduce of 16 bytes, rank 1: all-reduce of 24 bytes)"
    )
    assert odd_ones(found.posted, []) == ([1], "differs from the others")
    assert odd_ones(found.posted, [0])[0] == [0]
    assert odd_ones({0: "a", 1: "b"}, [])[0] == odd_ones({0: "a", 1: "b"}, [0, 1])[0] == []
    assert first_difference([{GROUP: same}, {GROUP: same[1:]}, {GROUP: same}]) is None  # older ones are forgotten
    missing = first_difference([{PAIR: [(1, "message", 4)]}, {PAIR: [(1, "message", 4), (2, "message", 4)]}])
    assert missing == Difference(PAIR, 2, {1: "message of 4 bytes", 0: "none"})
