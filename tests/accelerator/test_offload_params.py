"""Parameters and gradients in host memory: the bits of ZeRO-3 on every layout, and what is left on the device."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megacore.parallel.mesh import build_mesh, compute_reproducibly
from tests.accelerator.device import needs_pretend
from tests.accelerator.largest_model import HOST as HOST_FLAGS
from tests.accelerator.largest_model import PLAIN, largest
from tests.distributed import run_distributed
from tests.parity.runs import Layout, Outcome, bitwise, make_config, train_on

pytestmark = needs_pretend
Changes = dict[str, Any]
HOST: Changes = {"offload_params": True, "offload_optimizer": True}
BF16: Changes = {"precision": "bf16"}
FULL: Changes = {"recompute": "full"}
ONE: Changes = {"micro_batch_size": 1}
GATED: Changes = {"activation": "swiglu", "disable_bias_linear": True, "normalization": "RMSNorm"}
NO_CLIP: Changes = {"clip_grad": 0.0}
EXPERTS: Changes = {
    **{"num_experts": 4, "moe_ffn_hidden_size": 16, "moe_aux_loss_coeff": 0.1, "ep": 2},
    **{"activation": "swiglu", "disable_bias_linear": True},
}
INTERLEAVED: Changes = {"schedule": "interleaved", "virtual_stages": 2, "num_layers": 4}
MUON: Changes = {"optimizer": "muon", "lr": 1e-3, "precision": "fp16", "initial_loss_scale": 1024.0}
Case = tuple[Layout, Changes]
# By the number of ranks. A step has four microbatches or more. Without replicas stage 3 is stage 0, with other buckets:
# the squares of the norm are added in another order, and clipping by it would show.
CASES: dict[int, list[Case]] = {
    1: [
        ((1, 1, 1), NO_CLIP | BF16 | FULL),
        ((1, 1, 1), NO_CLIP | {"untie_embeddings_and_output_weights": True, "ema_decay": 0.9}),
        ((1, 1, 1), {"reproducible": True}),
    ],
    2: [
        ((1, 1, 2), BF16),
        ((1, 1, 2), {"overlap_grad_reduce": False, "offload_activations": True} | GATED),
        ((1, 2, 1), NO_CLIP | BF16 | ONE),
    ],
    4: [
        ((2, 1, 2), {"sequence_parallel": True} | BF16 | GATED),
        ((1, 2, 2), ONE | BF16 | FULL),
    ],
}
MORE: dict[int, list[Case]] = {
    1: [
        ((1, 1, 1), NO_CLIP),
        ((1, 1, 1), NO_CLIP | MUON),
        ((1, 1, 1), NO_CLIP | BF16 | {"grad_reduce_dtype": "bf16"}),
        ((1, 1, 1), NO_CLIP | {"param_group": ("blocks.0.*:freeze",)}),
    ],
    2: [
        ((1, 1, 2), {}),
        ((1, 1, 2), MUON),
        ((1, 1, 2), BF16 | {"grad_reduce_compression": "int8"}),
        ((1, 1, 2), NO_CLIP | EXPERTS | BF16),
        ((1, 2, 1), NO_CLIP | ONE | INTERLEAVED),
        ((1, 2, 1), NO_CLIP | ONE | {"schedule": "zero-bubble"}),
        ((2, 1, 1), NO_CLIP | {"sequence_parallel": True}),
        ((1, 1, 1), {"cp": 2, "cp_comm": "ring"} | BF16),
    ],
    4: [
        ((1, 2, 2), ONE | INTERLEAVED),
        ((1, 2, 2), ONE | {"schedule": "zero-bubble"}),
        ((1, 1, 4), {"zero_shard_size": 2} | BF16),
        ((1, 1, 4), {"reproducible": True}),  # last: it cannot be undone in a process
    ],
}


def both(
    rank: int, world_size: int, cases: list[Case], device: str, directory: str
) -> list[tuple[Outcome, Outcome]] | None:
    """Each case on ZeRO-3, with its state on the device and in host memory."""
    found = []
    for number, (layout, changes) in enumerate(cases):
        outcomes = []
        for where in ({}, HOST):
            common = {"zero_stage": 3, "train_iters": 2, "num_layers": 3, "device": device}
            config = make_config(layout, f"{directory}/{number}{len(where)}", **(common | changes | where))
            if config.training.reproducible:
                compute_reproducibly()
            outcomes.append(train_on(build_mesh(config.parallel), config, moments=changes.get("optimizer") != "muon"))
        found.append((outcomes[0], outcomes[1]))
    return found if rank == 0 else None


def compare(cases: list[Case], directory: str) -> None:
    (tp, pp, dp), changes = cases[0]
    ranks = tp * pp * dp * changes.get("cp", 1)
    found = run_distributed(
        both, ranks, cases, "pretend", directory, backend="pretend", init=ranks > 1, timeout=60 * len(cases)
    )[0]
    for (plain, on_host), (_, changes) in zip(found, cases, strict=True):
        if "clip_grad" in changes:
            assert on_host.norms == pytest.approx(plain.norms, rel=1e-7)
            on_host = dataclasses.replace(on_host, norms=plain.norms)
        bitwise(on_host, plain)


@pytest.mark.parametrize("ranks", CASES)
def test_no_bit_differs_from_stage_3_on_the_device(ranks: int, tmp_path: Path) -> None:
    compare(CASES[ranks], str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MORE)
def test_no_bit_differs_on_further_layouts(ranks: int, tmp_path: Path) -> None:
    compare(MORE[ranks], str(tmp_path))


def test_thirteen_times_the_model_fits_on_a_device(tmp_path: Path) -> None:
    """ZeRO-Offload's figure (arXiv 2101.06840, section 6.2.1): blocks of a model that completes a step on one device,
    with mixed precision and AdamW, and blocks of one with its state in host memory. Both recompute."""
    common = {"limit": 8 << 20, "shape": {"hidden_size": 64, "recompute": "full"}}
    plain, on_host = (
        run_distributed(
            partial(largest, most=most, flags=flags, **common), 1, str(tmp_path), backend="pretend", init=False
        )[0]
        for flags, most in ((PLAIN, 40), (HOST_FLAGS, 130))
    )
    assert plain.is_limit
    assert 5 < plain.blocks <= (8 << 20) / (18 * 12 * 64**2)
    assert on_host.blocks >= 13 * plain.blocks
    assert on_host.on_host >= 17 * on_host.parameters
