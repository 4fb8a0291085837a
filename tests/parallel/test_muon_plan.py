"""The planner counts the products of Muon's update as torch counts those of the rank that computes most, and what the
optimizers that take matrices whole keep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megacore.config import Config, ResolvedConfig
from megacore.config.cli import parse_config
from megacore.models.outline import outline
from megacore.optim.whole_matrices import WholeMatrices
from megacore.parallel.mesh import build_mesh
from megacore.plan.cluster import CLUSTERS
from megacore.plan.cut import Cut
from megacore.plan.step_time import step_time
from megacore.plan.whole_matrices import Product, busiest_seconds
from megacore.tracer.dry_run import run_rank
from megacore.tracer.fake_job import absent_accelerator
from tests.distributed import run_distributed
from tests.parity.runs import Layout, make_config, make_trainer

MUON: dict[str, Any] = {"optimizer": "muon", "hidden_size": 64, "num_layers": 4, "lr_warmup_iters": 0, "lr": 1e-3}
EXPERTS: dict[str, Any] = {"num_experts": 4, "activation": "swiglu", "disable_bias_linear": True}
ADAFACTOR: dict[str, Any] = {"optimizer": "adafactor"}
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
    exchange = WholeMatrices._exchanged

    def counted(*args: Any) -> dict[str, Tensor]:
        before = counter.get_total_flops()
        result = exchange(*args)
        turns.append(counter.get_total_flops() - before)
        return result

    with FlopCounterMode(display=False) as counter, pytest.MonkeyPatch.context() as patch:
        patch.setattr(WholeMatrices, "_exchanged", counted)
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
        cut = Cut(config, outline(config))
        stages = [cut.on_rank(config, rank).chunks for rank in range(config.parallel.pp)]
        planned = max(busiest_seconds(config, chunks, flops, on_cpu=True) for chunks in stages)
        assert planned == max(slowest) > 0, (layout, changes)


def states_of(rank: int, ranks: int, directory: str, *, cases: Sequence[Case]) -> None:
    absent_accelerator()
    for layout, changes in cases:
        config = make_config(layout, directory, micro_batch_size=1, **(MUON | {"num_attention_heads": 4} | changes))
        config = config.for_device(on_cpu=False)
        for number in range(config.parallel.ranks):
            report = run_rank(config, number, on_cpu=False)
            assert report.problem is None
            for kind, held in report.state.items():
                assert held == pytest.approx(report.planned_state[kind], rel=1e-3), (layout, changes, number, kind)
            if number == 0 and config.parallel.zero_stage == 3:
                assert report.planned.expected_tensors == pytest.approx(report.peak, rel=0.02), (layout, changes)


@pytest.mark.slow
def test_every_rank_holds_the_state_that_is_planned_for_it(tmp_path: Any) -> None:
    """Whichever matrices it updates, with the padding of its buckets."""
    sizes: dict[str, Any] = {"hidden_size": 256, "vocab_size": 512, "num_layers": 3}
    cases: list[Case] = [
        ((1, 1, 4), sizes | {"zero_stage": 3, "precision": "bf16"}),
        ((2, 1, 2), sizes | {"zero_stage": 3}),
        ((1, 1, 3), sizes | {"zero_stage": 1}),
        ((1, 1, 1), sizes | ADAFACTOR),
        ((1, 1, 2), sizes | ADAFACTOR | {"zero_stage": 3}),
        ((1, 1, 4), sizes | ADAFACTOR | EXPERTS | {"ep": 2, "zero_stage": 1}),
    ]
    run_distributed(partial(states_of, cases=cases), 1, str(tmp_path), init=False)


def test_the_update_of_a_step_takes_its_products() -> None:
    """Llama 3.2 1B on an H100, whose products reach their usual share of the peak."""

    def update(optimizer: str) -> float:
        words = f"--preset llama-3.2-1b --precision bf16 --optimizer {optimizer} --mock-data --train-iters 1"
        config = parse_config(words.split(), prog="", description="", kind=Config, planned=True)
        return step_time(config, outline(config), CLUSTERS["h100"]).optimizer

    h, f, kv = 2048, 8192, 512
    matrices = 2 * [(h, h)] + 2 * [(kv, h)] + 3 * [(h, f)]
    total = 16 * sum(flops(Product(1, rows, columns)) for rows, columns in matrices)
    device = CLUSTERS["h100"].device
    least = total / (CLUSTERS["h100"].peak("bf16") or 0.0) / device.product_efficiency.of("expected")
    assert 0.055 < least < update("muon") - update("adamw") < 1.7 * least
