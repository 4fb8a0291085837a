"""The planner counts the products of Muon's update as torch counts those of the rank that computes most."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megacore.config import ResolvedConfig
from megacore.models.outline import outline
from megacore.optim.whole_matrices import WholeMatrices
from megacore.parallel.mesh import build_mesh
from megacore.plan.stages import StagedModel
from megacore.plan.whole_matrices import Product, busiest_seconds
from tests.distributed import run_distributed
from tests.parity.runs import Layout, make_config, make_trainer

MUON: dict[str, Any] = {"optimizer": "muon", "hidden_size": 64, "num_layers": 4, "lr_warmup_iters": 0, "lr": 1e-3}
EXPERTS: dict[str, Any] = {"num_experts": 4, "activation": "swiglu", "disable_bias_linear": True}
HEADS: dict[str, Any] = {"num_query_groups": 2, "muon_split_qkv": "heads"}
Case = tuple[Layout, dict[str, Any]]


class Counted(NamedTuple):
    """FLOPs of a rank's products in an update: of the matrices that it has whole, and in each exchange with the ranks
    that hold slices of the same matrices, which wait for each other."""

    alone: int
    turns: list[int]


def flops_of_updates(rank: int, ranks: int, directory: str, *, cases: Sequence[Case]) -> list[Counted]:
    """Of each case, after a step."""
    return [flops_of_update(make_config(layout, directory, micro_batch_size=1, **changes)) for layout, changes in cases]


def flops_of_update(config: ResolvedConfig) -> Counted:
    trainer = make_trainer(config, build_mesh(config.parallel))
    trainer.train_steps.compute_gradients(next(trainer.batches))
    turns: list[int] = []
    exchange = WholeMatrices.exchanged

    def counted(*args: Any) -> dict[str, Tensor]:
        before = counter.get_total_flops()
        result = exchange(*args)
        turns.append(counter.get_total_flops() - before)
        return result

    with FlopCounterMode(display=False) as counter, pytest.MonkeyPatch.context() as patch:
        patch.setattr(WholeMatrices, "exchanged", counted)
        trainer.train_steps.update_weights()
    return Counted(counter.get_total_flops() - sum(turns), turns)


def flops(product: Product) -> float:
    """Of five Newton-Schulz steps, as Jordan et al. write them."""
    m, n = sorted((product.rows, product.columns))
    return 5.0 * product.number * (2 * m * n * m + 2 * m * m * m + 2 * m * m * n)


# By the number of ranks.
CASES: dict[int, list[Case]] = {
    1: [((1, 1, 1), HEADS), ((1, 1, 1), {**EXPERTS, "moe_shared_expert_size": 96, "moe_first_dense_layers": 1})],
    2: [((1, 1, 2), {"zero_stage": 3}), ((2, 1, 1), EXPERTS)],
}
MORE: dict[int, list[Case]] = {
    1: [((1, 1, 1), {}), ((1, 1, 1), {"muon_split_qkv": "none"})],
    2: [
        ((1, 1, 2), {"zero_stage": 0}),
        ((1, 1, 2), {**EXPERTS, "ep": 2}),
        ((2, 1, 1), {}),
        ((1, 2, 1), {"schedule": "interleaved", "virtual_stages": 2}),
    ],
    4: [
        ((2, 1, 2), {"zero_stage": 1}),
        ((2, 1, 2), {**EXPERTS, "ep": 2, "zero_stage": 1}),
        ((2, 1, 2), {**EXPERTS, "ep": 2, "etp": 1, "sequence_parallel": True}),
    ],
}


@pytest.mark.parametrize(
    ("ranks", "of_ranks"), [*CASES.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in MORE.items())]
)
def test_products_are_those_that_torch_counts(ranks: int, of_ranks: list[Case], tmp_path: Any) -> None:
    cases = [(layout, MUON | changes) for layout, changes in of_ranks]
    found = run_distributed(partial(flops_of_updates, cases=cases), ranks, str(tmp_path), stay=True)
    for (layout, changes), counts in zip(cases, zip(*found, strict=True), strict=True):
        config = make_config(layout, tmp_path, micro_batch_size=1, **changes)
        slowest = []  # of each layer group, whose ranks are neighbours
        for first in range(0, ranks, layout[0]):
            group = counts[first : first + layout[0]]
            turns = zip(*(counted.turns for counted in group), strict=True)
            slowest.append(max(counted.alone for counted in group) + sum(map(max, turns)))
        staged = StagedModel(config, outline(config))
        stages = [staged.on_rank(config, rank).chunks for rank in range(config.parallel.pp)]
        planned = max(busiest_seconds(config, chunks, flops, on_cpu=True) for chunks in stages)
        assert planned == max(slowest) > 0, (layout, changes)
