"""ZeRO stages 0 to 3 change no number: the one-process run on every layout, stage and precision of communication."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.runs import Layout, Run, agree, bitwise

# Plain AdamW moves an entry whose gradient is zero but for rounding (the key's bias) by the sign of the rounding;
# with an epsilon above it every weight is a smooth function of the gradients, and weights can be compared as tightly
# as losses.
SMOOTH = {"adam_eps": 1e-4}
LAYOUTS: list[Layout] = [(1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 2)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_stage_is_plain_adamw(layout: Layout, stage: int, run: Run) -> None:
    one = run((1, 1, 1), **SMOOTH)
    found = run(layout, zero_stage=stage, **SMOOTH)
    agree(found, one)
    for name, value in one.final.items():
        torch.testing.assert_close(found.final[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 3, 1)], ids=str)
def test_a_stage_without_data_parallelism_is_the_plain_run(layout: Layout, stage: int, run: Run) -> None:
    assert run(layout, zero_stage=stage).losses == run(layout).losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overlap_changes_no_bit(stage: int, run: Run) -> None:
    changes: dict[str, Any] = {"zero_stage": stage, "train_iters": 5, **SMOOTH}
    overlapped = run((1, 2, 2), **changes)
    waiting = run((1, 2, 2), overlap_grad_reduce=False, overlap_param_gather=False, **changes)
    assert overlapped.losses == waiting.losses
    assert all(torch.equal(overlapped.final[name], value) for name, value in waiting.final.items())


@pytest.mark.parametrize("bucket_size_mb", [1e-6, 100.0])
@pytest.mark.parametrize("stage", [1, 2])
def test_one_bucket_and_one_a_parameter_agree(stage: int, bucket_size_mb: float, run: Run) -> None:
    changes: dict[str, Any] = {"train_iters": 5, **SMOOTH}
    agree(run((1, 1, 2), zero_stage=stage, bucket_size_mb=bucket_size_mb, **changes), run((1, 1, 1), **changes))


@pytest.mark.parametrize("stage", [2, 3])
def test_untied_sgd(stage: int, run: Run) -> None:
    changes = {
        "optimizer": "sgd",
        "sgd_momentum": 0.9,
        "lr": 0.05,
        "clip_grad": 0.0,
        "untie_embeddings_and_output_weights": True,
    }
    agree(run((1, 2, 2), zero_stage=stage, **changes), run((1, 1, 1), **changes))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sixteen_bits_stay_near_fp32(precision: str, stage: int, run: Run) -> None:
    """Same losses to 16-bit rounding; master weights keep what 16 bits lose."""
    found, one = run((1, 1, 2), zero_stage=stage, precision=precision), run((1, 1, 1))
    assert found.losses == pytest.approx(one.losses, rel=2e-3)
    assert found.norms == pytest.approx(one.norms, rel=3e-2)
    assert all(torch.equal(found.initial[name], value) for name, value in one.initial.items())


@pytest.mark.parametrize(
    "layout, changes",
    [
        ((1, 1, 1), {}),
        ((1, 1, 2), {"zero_stage": 1}),
        ((1, 2, 2), {"zero_stage": 2, "precision": "bf16"}),
        ((2, 1, 2), {"zero_stage": 3}),
        ((1, 1, 2), {"zero_stage": 3, "precision": "fp16", "optimizer": "sgd"}),
        ((1, 2, 2), {"zero_stage": 1, "reproducible": True}),
    ],
    ids=str,
)
def test_the_step_on_the_host_changes_no_bit(layout: Layout, changes: dict[str, Any], run: Run) -> None:
    changes = {"train_iters": 5, **changes}
    bitwise(run(layout, offload_optimizer=True, **changes), run(layout, **changes))
