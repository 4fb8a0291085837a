"""Gradients and momenta that are sent in fewer bits: a step that overflows leaves no trace, and 1-bit Adam and 1-bit
LAMB are the papers' formulas, in fp64 with every worker simulated in one process. How training follows the run that
sends all bits, layouts and warm-up are rows of tests/matrix."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.config import AdamWConfig, OneBitAdamConfig, OneBitLambConfig, ResolvedConfig
from megacore.data.gpt.mock import MockDataset
from megacore.optim.optimizers import OPTIMIZER_CLASSES
from megacore.optim.update import counted_segments, totals
from megacore.parallel.collectives import all_reduced
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.parallel.sharding import ShardedParameter, ShardSpec
from megacore.zero.data_parallel import DataParallel
from megacore.zero.options import ZeroOptions
from tests.distributed import run_distributed
from tests.parity.runs import BATCH, SEQUENCE, VOCAB, Layout, make_config, make_trainer, trainer_of

RUN: dict[str, Any] = {"num_layers": 2, "lr_warmup_iters": 1, "micro_batch_size": 1}


def skipped(rank: int, ranks: int, directory: str) -> tuple[list[bool], bool, list[float]]:
    """Which steps an fp16 run skips whose loss scale is too large at first; whether its errors are finite; losses."""
    changes = {"precision": "fp16", "initial_loss_scale": 2.0**24, "hysteresis": 1, "lr": 1e-2, "train_iters": STEPS}
    config = make_config((1, 1, 2), directory, grad_reduce_compression="int8", **RUN | changes)
    data = MockDataset(VOCAB, SEQUENCE, STEPS * BATCH, seed=3)  # which can be learned
    trainer = make_trainer(config, build_mesh(config.parallel), data)
    results = [trainer.train_step(next(trainer.batches)) for _ in range(STEPS)]
    errors = [bucket.compressed for bucket in trainer.model.data_parallel.buckets]
    finite = all(error is not None and bool(error.worker_error.isfinite().all()) for error in errors)
    return [result.skipped is not None for result in results], finite, [float(result.loss) for result in results]


def test_a_step_that_overflows_is_skipped_and_leaves_no_trace_that_is_not_finite(tmp_path: Path) -> None:
    was_skipped, finite, found = run_distributed(skipped, 2, str(tmp_path))[0]
    assert was_skipped[0] and not was_skipped[-1] and finite
    assert max(found[-5:]) < 0.8 * found[0]


# ---- 1-bit Adam and 1-bit LAMB

STEPS, FREEZE, LR, DECAY, BLOCK = 20, 8, 1e-2, 0.1, 2048
SHAPES = {"blocks.0.up.weight": (60, 50), "blocks.0.up.bias": (60,), "blocks.0.down.weight": (30, 6)}
UNUSED = 20  # first elements of the first matrix, whose gradient is 0 in the warm-up
SETTINGS = {"onebitadam": OneBitAdamConfig(), "onebitlamb": OneBitLambConfig()}
Weights = dict[str, Tensor]


def drawn(step: int, worker: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    tensors = {name: torch.randn(shape, generator=generator).double() for name, shape in SHAPES.items()}
    if 0 < step <= FREEZE:
        tensors["blocks.0.up.weight"].view(-1)[:UNUSED] = 0
    return tensors


class Parameters(torch.nn.Module):
    """A layer with the parameters of SHAPES."""

    def __init__(self) -> None:
        super().__init__()
        for number, (name, value) in enumerate(drawn(0).items()):
            spec = ShardSpec(name=name, shape=tuple(value.shape))
            self.register_parameter(f"p{number}", ShardedParameter(value.float(), spec))


def made(name: str, ranks: int) -> tuple[DataParallel, Mesh, ResolvedConfig]:
    """The layer on each rank of a data-parallel group."""
    config = make_config((1, 1, ranks), "output", optimizer=name, onebit_freeze_step=FREEZE, micro_batch_size=1)
    mesh, options = build_mesh(config.parallel), ZeroOptions(optimizer=SETTINGS[name])
    return DataParallel([[Parameters()]], mesh, options=options, bucket_bytes=1 << 20), mesh, config


def backward(data_parallel: DataParallel, step: int, rank: int, ranks: int, *, sums_gradients: bool) -> None:
    """The gradient of the whole batch is the mean over the workers."""
    data_parallel.begin_step(1.0, sums_gradients=sums_gradients)
    data_parallel.begin_backward(0, last=True, all_weights=True)
    gradients = drawn(step, rank + 1)
    products = [(p * (gradients[p.spec.name] / ranks).float()).sum() for p in data_parallel.parameters]
    torch.stack(products).sum().backward()
    data_parallel.end_backward(0)
    data_parallel.finish()


def norm(rank: int, ranks: int, sums_gradients: bool) -> float:
    data_parallel, mesh, _ = made("onebitadam", ranks)
    backward(data_parallel, 1, rank, ranks, sums_gradients=sums_gradients)
    return float(totals(counted_segments(data_parallel.segments, mesh), mesh).norm)


@pytest.mark.parametrize(("sums_gradients", "workers"), [(True, 2), (False, 2), (False, 1)])
def test_the_norm_is_that_of_the_sum_or_of_each_workers_own_gradient(sums_gradients: bool, workers: int) -> None:
    """Where nothing sums them: the root of the mean of their squares, each as if the worker's samples were all."""
    each = [torch.cat([tensor.view(-1) for tensor in drawn(1, worker + 1).values()]) for worker in range(workers)]
    stacked = torch.stack(each)
    expected = stacked.mean(0).norm() if sums_gradients else stacked.square().sum(1).mean().sqrt()
    found = run_distributed(norm, workers, sums_gradients)
    assert found == pytest.approx([float(expected)] * workers, rel=1e-6)


def updated(rank: int, ranks: int, name: str) -> Weights:
    """The weights after megacore's updates."""
    data_parallel, mesh, config = made(name, ranks)
    adam = AdamWConfig(adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6)
    optimizer = OPTIMIZER_CLASSES[type(SETTINGS[name])](
        data_parallel.runs, SETTINGS[name], weight_decay=DECAY, adam=adam
    )
    optimizer.attach(data_parallel.segments, mesh, config)
    for step in range(1, STEPS + 1):
        backward(data_parallel, step, rank, ranks, sums_gradients=optimizer.begin_step(step - 1))
        with torch.no_grad():
            for bucket in data_parallel.in_order_of_use():
                runs = bucket.runs
                optimizer.step(runs, [run.gradient for run in runs], lr=LR, factor=torch.ones(()))
            optimizer.finish()
    return {local.spec.name: local.master.view(local.spec.shape).clone() for local in data_parallel.segments}


def signs(x: Tensor, mask: Tensor) -> Tensor:
    """Sign and scale of each block."""
    parts = []
    for block, counted in zip(x.split(BLOCK), mask.split(BLOCK), strict=True):
        scale = block.norm() / math.sqrt(max(int(counted.sum()), 1))
        parts.append(torch.where(block >= 0, scale, -scale) * counted)
    return torch.cat(parts)


def mean_momentum(momenta: list[Tensor], errors: list[Tensor], of_sum: Tensor, mask: Tensor) -> Tensor:
    """Tang et al. 2021, algorithm 1, lines 6 to 11; one worker by itself compresses nothing."""
    if len(momenta) == 1:
        return momenta[0] * mask
    sent = []
    for momentum, error in zip(momenta, errors, strict=True):
        x = (momentum + error) * mask
        sent.append(signs(x, mask))
        error.copy_(x - sent[-1])
    x = (sum(sent) / len(sent) + of_sum) * mask
    result = signs(x, mask)
    of_sum.copy_(x - result)
    return result


def reference(name: str, workers: int) -> Weights:
    """Both papers' algorithms, with the bias corrections of AdamW and LAMB."""
    weights, is_lamb = drawn(0), name == "onebitlamb"
    for key, weight in weights.items():
        flat, is_matrix = weight.view(-1), weight.dim() > 1
        mean, square, fresh = torch.zeros_like(flat), torch.zeros_like(flat), torch.zeros_like(flat)
        errors, of_sum = [torch.zeros_like(flat) for _ in range(workers)], torch.zeros_like(flat)
        decay, ratios, weight_of_ratios, factor = DECAY if is_matrix else 0.0, 0.0, 0.0, 1.0
        for step in range(1, STEPS + 1):
            # As the fp32 gradients of the ranks are.
            own = [(drawn(step, w + 1)[key] / workers).float().double().view(-1) * workers for w in range(workers)]
            if step <= FREEZE:
                gradient = sum(own) / workers
                mean = 0.8 * mean + 0.2 * gradient
                square = 0.95 * square + 0.05 * gradient**2
                root = (square / (1 - 0.95**step)).sqrt() + 1e-6
            else:
                if step == FREEZE + 1:
                    fresh = square.clone()
                before = mean
                mask = square > 0
                mean = mean_momentum([0.8 * mean + 0.2 * g for g in own], errors, of_sum, mask)
                fresh = 0.95 * fresh + 0.05 * ((mean - 0.8 * before) / 0.2) ** 2
                root = (square / (1 - 0.95**FREEZE)).sqrt() + 1e-6
            plain = mean / (1 - 0.8**step) / root
            update, ratio = plain + decay * flat, 1.0
            if is_lamb and is_matrix and step <= FREEZE:
                ratio = float(flat.norm() / update.norm())
                ratios, weight_of_ratios = 0.9 * ratios + 0.1 * ratio, 0.9 * weight_of_ratios + 0.1
            elif is_lamb and is_matrix:
                wanted = float((root / ((fresh / (1 - 0.95**step)).sqrt() + 1e-6)).max())
                share = min(float(plain.norm() / update.norm()), 1.0)
                wanted = min(max(wanted * share + 1 - share, 0.5), 4.0)
                factor = min(max(wanted, 0.9 * factor), 1.1 * factor)
                ratio = ratios / weight_of_ratios * factor
            flat -= LR * ratio * update
    return weights


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SETTINGS)
def test_twenty_steps_are_those_of_the_papers(name: str, workers: int) -> None:
    compare(name, run_distributed(updated, workers, name), workers)


@pytest.mark.parametrize("name", SETTINGS)
def test_one_worker_freezes_the_variance_and_compresses_nothing(name: str) -> None:
    compare(name, [updated(0, 1, name)], 1)


def compare(name: str, found: list[Weights], workers: int) -> None:
    with torch.no_grad():
        expected, first = reference(name, workers), drawn(0)
    for key, value in expected.items():
        for of_rank in found:
            assert not torch.equal(value, first[key]), key
            error = (of_rank[key].double() - value).abs().max() / value.abs().max()
            assert error <= 1e-6, f"{key}: {error}"


ONE_BIT: dict[str, Any] = RUN | {"train_iters": 6, "onebit_freeze_step": 2}
RATES = {"onebitadam": {"lr": 1e-3}, "onebitlamb": {"lr": 1e-2}}
HALF = 4  # steps before the checkpoint: two with compression


def begun(
    rank: int, ranks: int, directory: str, layout: Layout, changes: dict[str, Any]
) -> tuple[list[float], Weights]:
    """The losses after a checkpoint in the middle, and the sum of the errors of each parameter in it."""
    trainer = trainer_of(layout, directory, **ONE_BIT | changes)
    for _ in range(HALF):
        trainer.train_step(next(trainer.batches))
    trainer.save()
    trainer.saving.finish()
    return rest_of(trainer), {}


def resumed(
    rank: int, ranks: int, directory: str, layout: Layout, changes: dict[str, Any]
) -> tuple[list[float], Weights]:
    trainer = trainer_of(layout, directory, **ONE_BIT | changes, load=directory)
    errors: Weights = {}
    for bucket in trainer.model.data_parallel.buckets:
        assert bucket.compressed is not None
        total = all_reduced(bucket.compressed.worker_error.view(-1)[: bucket.layout.size], bucket.group)
        errors |= {name: total[bucket.layout.slice_of(name)] for name in bucket.layout.offsets}
    return rest_of(trainer), errors


def rest_of(trainer: Any) -> list[float]:
    return [float(trainer.train_step(next(trainer.batches)).loss) for _ in range(ONE_BIT["train_iters"] - HALF)]


@pytest.mark.parametrize("name", ["onebitlamb", pytest.param("onebitadam", marks=pytest.mark.slow)])
def test_a_run_resumes_bit_for_bit_and_keeps_the_sum_of_errors_on_other_replicas(name: str, tmp_path: Path) -> None:
    changes = {"optimizer": name, **RATES[name], "micro_batch_size": 1}
    expected, _ = run_distributed(begun, 2, str(tmp_path), (1, 1, 2), changes)[0]
    found, errors = run_distributed(resumed, 2, str(tmp_path), (1, 1, 2), changes)[0]
    assert found == expected
    _, others = run_distributed(resumed, 4, str(tmp_path), (1, 1, 4), changes)[0]
    assert errors.keys() == others.keys() and any(error.any() for error in errors.values())
    for key, error in errors.items():
        assert torch.allclose(others[key], error, rtol=1e-6, atol=1e-8 + 1e-6 * float(error.abs().max())), key
