"""HFU with --recompute-num-layers: the trainer recomputes the first blocks of every stage, virtual ones included."""

from __future__ import annotations

import pytest

from megacore.models.flops import block_flops, head_flops, without_experts
from megacore.plan.planner import step_flops
from tests.unit.planning import planned, resolved

SMALL = "--hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 8192 --micro-batch-size 1"
SMALL += " --global-batch-size 8 --mock-data --train-iters 1 --recompute full"


@pytest.mark.parametrize(
    ("flags", "repeated"),
    [
        ("--pp 2 --pipeline-layout E,t|6*t,H --recompute-num-layers 2", 1 + 2),
        ("--pp 2 --pipeline-layout E,3*t|4*t,H --recompute-num-layers 2", 2 + 2),
        (
            "--pp 2 --schedule interleaved --virtual-stages 2 --pipeline-layout E,t|t|3*t|2*t,H "
            "--recompute-num-layers 2",
            1 + 1 + 2 + 2,
        ),
        ("--pp 2 --recompute-num-layers 7", 7),
        ("--pp 2", 7),
        ("--recompute-num-layers 3", 3),
    ],
)
def test_the_first_blocks_of_every_stage_are_computed_again(flags: str, repeated: int) -> None:
    config = resolved(f"--num-layers 7 {SMALL} {flags}")
    one, head = (256 * part for part in (block_flops(config.model, 256), head_flops(config.model)))
    again = step_flops(config, attention="full", hardware=True) - step_flops(config, attention="full", hardware=False)
    assert again == pytest.approx(8 * repeated * one)
    assert step_flops(config, attention="full", hardware=False) == pytest.approx(8 * 3 * (7 * one + head))


def test_dense_blocks_before_experts_are_counted_as_such() -> None:
    experts = (
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-first-dense-layers 2 --disable-bias-linear"
    )
    config = resolved(f"--num-layers 6 {SMALL} {experts} --pp 2 --pipeline-layout E,3*t|3*t,H --recompute-num-layers 1")
    again = step_flops(config, attention="full", hardware=True) - step_flops(config, attention="full", hardware=False)
    dense, mixture = block_flops(without_experts(config.model), 256), block_flops(config.model, 256)
    assert dense != mixture
    assert again == pytest.approx(8 * 256 * (dense + mixture))


def test_virtual_stages_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 3 8B on 16 stages of about two blocks each: nearly all of them are recomputed."""
    flags = "pretrain_gpt.py --preset llama-3-8b --pp 4 --dp 2 --global-batch-size 16 --schedule interleaved "
    flags += "--virtual-stages 4 --pipeline-balance parameters --cluster h100 --recompute full"
    whole, two = planned(capsys, flags), planned(capsys, f"{flags} --recompute-num-layers 2")
    rate = "TFLOP/s per GPU, {} FLOPs, full attention"
    rates = [
        [plan["throughput"][rate.format(kind)]["value"] for kind in ("hardware", "model")] for plan in (whole, two)
    ]
    all_blocks, counted = (hardware / model for hardware, model in rates)
    assert 1.29 < counted < all_blocks < 1.32  # some stages have a third block; 1.08 with a stage per rank
