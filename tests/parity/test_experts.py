"""Mixtures of experts: every layout computes what one process computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megacore.layers import moe
from megacore.parallel.mesh import Mesh, build_mesh
from tests.parity.runs import Layout, Outcome, make_config, train_on

EXPERTS: dict[str, Any] = {
    "num_layers": 3,
    "train_iters": 3,
    "lr_warmup_iters": 2,
    "activation": "swiglu",
    "disable_bias_linear": True,
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_first_dense_layers": 1,
}
Case = tuple[Layout, dict[str, Any]]


@contextmanager
def smallest_gap() -> Iterator[list[float]]:
    """How far the last score that is chosen is above the first that is not, at least. Where this is within rounding,
    layouts may choose different experts, and numbers cannot be compared."""
    gaps, choose = [1.0], moe.choose

    def watched(logits: torch.Tensor, experts: Any) -> moe.Choice:
        if experts.moe_router_topk < experts.num_experts:
            scores, chosen = logits.detach().sort(-1, descending=True).values, experts.moe_router_topk
            gaps[0] = min(gaps[0], float((scores[..., chosen - 1] - scores[..., chosen]).min()))
        return choose(logits, experts)

    with mock.patch.object(moe, "choose", watched):
        yield gaps


def one_process(**changes: Any) -> Outcome:
    config = make_config((1, 1, 1), "", **{**EXPERTS, **changes})
    with smallest_gap() as gaps:
        outcome = train_on(Mesh(device=torch.device("cpu")), config)
    assert gaps[0] > 1e-5, "choose another seed"
    return outcome


def train_cases(rank: int, world_size: int, cases: Sequence[Case], directory: str) -> list[Outcome] | None:
    outcomes = []
    for layout, changes in cases:
        config = make_config(layout, directory, **{**EXPERTS, **changes})
        outcomes.append(train_on(build_mesh(config.parallel), config))
    return outcomes if rank == 0 else None
