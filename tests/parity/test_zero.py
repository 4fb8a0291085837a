"""ZeRO stages 0 to 3 change no number: torch.optim.AdamW's own run in one process is the measure of every layout and
stage; the one-process run that of overlap, bucket sizes, SGD and 16 bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from megacore.optim import update
from megacore.parallel.mesh import build_mesh
from tests.distributed import run_distributed
from tests.parity.reference import plain_torch
from tests.parity.runs import (
    BATCH,
    Layout,
    Outcome,
    Run,
    Size,
    agree,
    bitwise,
    in_both_sizes,
    make_config,
    make_trainer,
    small,
    train_on,
    whole,
)

# Plain AdamW moves an entry whose gradient is zero but for rounding (the key's bias) by the sign of the rounding;
# with an epsilon above it every weight is a smooth function of the gradients, and weights can be compared as tightly
# as losses.
SMOOTH = {"adam_eps": 1e-4}
STAGES = (0, 1, 2, 3)
# In `make test` every stage runs by itself and beside a pipeline; in `make test-slow` on every layout.
LAYOUTS: dict[Layout, tuple[int, ...]] = {(1, 1, 2): STAGES, (1, 1, 4): (2, 3), (1, 2, 2): (1, 3), (2, 2, 2): (2,)}
MORE_LAYOUTS: list[Layout] = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (2, 1, 4), (1, 4, 2)]


def batches(layout: Layout) -> dict[str, Any]:
    """Four microbatches a step on every layout."""
    dp = layout[2]
    return {"micro_batch_size": 2 if dp == 1 else 1, "global_batch_size": 16 if dp == 4 else BATCH}


def all_stages(
    rank: int, world_size: int, layout: Layout, directory: str, stages: tuple[int, ...], changes: dict[str, Any]
) -> list[Outcome] | None:
    """One run a stage, one after the other on the same ranks."""
    configs = [make_config(layout, directory, zero_stage=stage, **changes) for stage in stages]
    mesh = build_mesh(configs[0].parallel)
    outcomes = [train_on(mesh, config, moments=True) for config in configs]
    return outcomes if rank == 0 else None


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """torch.optim.AdamW's run in one process, by the size of the global batch and of the model."""

    @cache
    def run_of(**changes: Any) -> Outcome:
        return plain_torch(tmp_path_factory.mktemp("plain"), **{**changes, "micro_batch_size": 1})

    return run_of


@pytest.mark.parametrize(
    ("layout", "stages", "size"),
    [
        *((layout, stages, small) for layout, stages in LAYOUTS.items()),
        *(pytest.param(layout, STAGES, whole, marks=pytest.mark.slow) for layout in [*LAYOUTS, *MORE_LAYOUTS]),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_every_stage_is_torchs_adamw(
    layout: Layout,
    stages: tuple[int, ...],
    size: Size,
    plain: Callable[..., Outcome],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Clipped steps of four microbatches: losses, norms, gradients, weights and moments."""
    tp, pp, dp = layout
    changes = {**SMOOTH, **batches(layout), **size(layout)}
    expected = plain(**changes)
    assert min(expected.norms) > 0.5, "clipping is meant to be active"
    directory = str(tmp_path_factory.mktemp("run"))
    outcomes = run_distributed(all_stages, tp * pp * dp, layout, directory, stages, changes, timeout=300)[0]
    for stage, found in zip(stages, outcomes, strict=True):
        print("stage", stage)  # shown where it fails
        agree(found, expected)
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)
        assert found.norms == pytest.approx(expected.norms, rel=1e-6)
        for name, value in expected.final.items():
            torch.testing.assert_close(found.final[name], value, rtol=0, atol=1e-6, msg=name)
        for kind in ("exp_avg", "exp_avg_sq"):
            for name, value in expected.moments[kind].items():
                # Of the tensor's own size, since second moments are at most 1e-5: tighter than 1e-6 for every tensor.
                error = (found.moments[kind][name] - value).abs().max()
                assert error <= 1e-5 * value.abs().max(), f"{kind} of {name}: {error}"


@in_both_sizes
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 3, 1)], ids=str)
def test_a_stage_without_data_parallelism_is_the_plain_run(layout: Layout, stage: int, size: Size, run: Run) -> None:
    assert run(layout, zero_stage=stage, **size(layout)).losses == run(layout, **size(layout)).losses


# Each stage on one of the two layouts, in turn; in `make test-slow` on the other one too.
@pytest.mark.parametrize(
    "stage, layout",
    [
        pytest.param(stage, layout, marks=[pytest.mark.slow] if (stage + turn) % 2 else [])
        for stage in STAGES
        for turn, layout in enumerate([(1, 1, 2), (1, 2, 2)])
    ],
    ids=str,
)
def test_overlap_changes_no_bit(stage: int, layout: Layout, run: Run) -> None:
    changes: dict[str, Any] = {"zero_stage": stage, "num_layers": 3, "train_iters": 3, **SMOOTH}
    overlapped = run(layout, **changes)
    waiting = run(layout, overlap_grad_reduce=False, overlap_param_gather=False, **changes)
    assert overlapped.losses == waiting.losses
    assert all(torch.equal(overlapped.final[name], value) for name, value in waiting.final.items())


@pytest.mark.parametrize("bucket_size_mb", [1e-6, 100.0])
@pytest.mark.parametrize("stage", [1, 2])
def test_one_bucket_and_one_a_parameter_agree(stage: int, bucket_size_mb: float, run: Run) -> None:
    changes: dict[str, Any] = {"num_layers": 2, "train_iters": 3, **SMOOTH}
    agree(run((1, 1, 2), zero_stage=stage, bucket_size_mb=bucket_size_mb, **changes), run((1, 1, 1), **changes))


@in_both_sizes
@pytest.mark.parametrize("stage", [2, 3])
def test_untied_sgd(stage: int, size: Size, run: Run) -> None:
    changes = {
        **size((1, 2, 2)),
        "optimizer": "sgd",
        "sgd_momentum": 0.9,
        "lr": 0.05,
        "clip_grad": 0.0,
        "untie_embeddings_and_output_weights": True,
    }
    agree(run((1, 2, 2), zero_stage=stage, **changes), run((1, 1, 1), **changes))


@in_both_sizes
@pytest.mark.parametrize(
    "stage, precision",
    [
        pytest.param(stage, precision, marks=[pytest.mark.slow] if (stage + turn) % 2 else [])
        for stage in STAGES
        for turn, precision in enumerate(["bf16", "fp16"])
    ],
)
def test_sixteen_bits_stay_near_fp32(precision: str, stage: int, size: Size, run: Run) -> None:
    """Same losses to 16-bit rounding; master weights keep what 16 bits lose."""
    changes = size((1, 1, 2))
    found, one = run((1, 1, 2), zero_stage=stage, precision=precision, **changes), run((1, 1, 1), **changes)
    assert found.losses == pytest.approx(one.losses, rel=2e-3)
    assert found.norms == pytest.approx(one.norms, rel=3e-2)
    assert all(torch.equal(found.initial[name], value) for name, value in one.initial.items())


@pytest.mark.parametrize(
    "layout, changes",
    [
        ((1, 1, 1), {}),
        ((1, 1, 2), {"zero_stage": 1}),
        ((1, 1, 2), {"zero_stage": 2, "precision": "bf16"}),
        pytest.param((1, 2, 2), {"zero_stage": 2, "precision": "bf16"}, marks=pytest.mark.slow),
        ((2, 1, 2), {"zero_stage": 3}),
        ((1, 1, 2), {"zero_stage": 3, "precision": "fp16", "optimizer": "sgd"}),
        ((1, 2, 2), {"zero_stage": 1, "reproducible": True}),
    ],
    ids=str,
)
def test_the_step_on_the_host_changes_no_bit(layout: Layout, changes: dict[str, Any], run: Run) -> None:
    """Gradients are clipped in host memory then, and stay as they were on the device."""
    changes = {"num_layers": 3, "train_iters": 3, **changes}
    bitwise(run(layout, offload_optimizer=True, **changes), run(layout, **changes), kinds=("initial", "final"))


def entries_read_for_norms(rank: int, world_size: int, directory: str, stage: int) -> float:
    """How often a step in 16 bits reads a gradient entry for its norm, over all that this rank computes."""
    config = make_config((1, 1, world_size), directory, zero_stage=stage, precision="bf16", micro_batch_size=1)
    trainer = make_trainer(config, build_mesh(config.parallel))
    counted: list[int] = []
    foreach_norm, square_sum = torch._foreach_norm, update.square_sum

    def counting_norms(tensors: list[torch.Tensor], *options: Any) -> Any:
        if not options:  # with a dtype it is the check of weights
            counted.extend(tensor.numel() for tensor in tensors)
        return foreach_norm(tensors, *options)

    def counting_squares(tensor: torch.Tensor) -> torch.Tensor:
        counted.append(tensor.numel())
        return square_sum(tensor)

    torch._foreach_norm = counting_norms  # type: ignore[assignment]
    update.square_sum = counting_squares
    trainer.train_step(next(trainer.batches))
    return sum(counted) / sum(parameter.numel() for parameter in trainer.parameters.values())


def test_norms_read_no_gradient_that_no_sum_changes_twice(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One replica: each once, for the global norm. Stage 1: a rank's shard before the sum, which overwrites it, and the
    shard of the sum."""
    directory = str(tmp_path_factory.mktemp("run"))
    for world_size, stage, expected in ((1, 0, 1.0), (2, 1, 1 / 2 + 1 / 2)):
        found = run_distributed(entries_read_for_norms, world_size, directory, stage)
        assert found == pytest.approx([expected] * world_size, rel=0.05)


def how_the_host_updates(
    rank: int, world_size: int, directory: str, bound: bool
) -> tuple[list[int], set[int], int, int, int]:
    """Of one step with offload: tensors in each call of AdamW, threads meanwhile and afterwards, and what a rank owns:
    runs and segments.

    Args:
        bound: whether each rank has eight cores of its own; otherwise both may use the same eight.
    """
    os.sched_getaffinity = lambda process: set(range(8 * rank, 8 * rank + 8) if bound else range(8))
    config = make_config((1, 1, world_size), directory, zero_stage=1, offload_optimizer=True, num_layers=2)
    trainer = make_trainer(config, build_mesh(config.parallel))
    tensors, threads, adamw = list[int](), set[int](), torch._fused_adamw_

    def watched(parameters: list[torch.Tensor], *arguments: Any, **options: Any) -> None:
        tensors.append(len(parameters))
        threads.add(torch.get_num_threads())
        adamw(parameters, *arguments, **options)

    torch._fused_adamw_ = watched  # type: ignore[assignment]
    trainer.train_step(next(trainer.batches))
    data_parallel = trainer.model.data_parallel
    return tensors, threads, torch.get_num_threads(), len(data_parallel.runs), len(data_parallel.segments)


@pytest.mark.parametrize(("bound", "share"), [(False, 4), (True, 8)])
def test_the_host_updates_in_one_pass_on_all_threads_of_the_rank(
    bound: bool, share: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for tensors, threads, after, runs, segments in run_distributed(
        how_the_host_updates, 2, str(tmp_path_factory.mktemp("run")), bound
    ):
        assert (threads, after) == ({share}, 1)
        assert sum(tensors) == runs < segments
