"""`--compile` changes no number beyond rounding, captures blocks without graph breaks, and compiles them once."""

from __future__ import annotations

from typing import Any

import pytest
import torch._dynamo

from tests.distributed import run_distributed
from tests.parity.runs import Layout, Outcome, Run, agree, train

LLAMA = {
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "num_query_groups": 2,
}
DROPOUT = {"hidden_dropout": 0.2, "micro_batch_size": 1}
CAPTURED = {"compile": True, "compile_backend": "aot-eager", "train_iters": 3}


@pytest.mark.parametrize(
    "layout, changes",
    [
        ((1, 1, 1), DROPOUT),
        ((2, 1, 2), {**LLAMA, **DROPOUT, "sequence_parallel": True, "zero_stage": 3, "recompute": "full"}),
        ((2, 2, 1), {**DROPOUT, "schedule": "zero-bubble", "recompute": "selective"}),
        ((1, 2, 2), {"attention_dropout": 0.2, "micro_batch_size": 1, "zero_stage": 2, "precision": "bf16"}),
    ],
    ids=str,
)
def test_captured_graphs_change_no_number(layout: Layout, changes: dict[str, Any], run: Run) -> None:
    agree(run(layout, **changes, **CAPTURED), run(layout, **changes, train_iters=3))


@pytest.mark.parametrize("changes", [DROPOUT, LLAMA], ids=str)
def test_generated_kernels_change_no_number(changes: dict[str, Any], run: Run) -> None:
    agree(run((1, 1, 1), **changes, compile=True, train_iters=3), run((1, 1, 1), **changes, train_iters=3))


def _count(rank: int, world_size: int, layout: Layout, output_dir: str, changes: dict[str, Any]) -> dict[str, int]:
    torch._dynamo.utils.counters.clear()
    outcome = train(rank, world_size, layout, output_dir, changes)
    assert rank > 0 or isinstance(outcome, Outcome)
    counters = torch._dynamo.utils.counters
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


@pytest.mark.parametrize(
    "layout, changes",
    [
        ((1, 1, 1), {**DROPOUT, "recompute": "selective"}),
        ((2, 1, 1), {**LLAMA, "sequence_parallel": True}),
        ((2, 1, 1), {}),
    ],
    ids=str,
)
def test_all_blocks_are_one_graph(layout: Layout, changes: dict[str, Any], tmp_path: Any) -> None:
    """Five blocks, three steps of several microbatches: one graph, captured once."""
    size = layout[0] * layout[1] * layout[2]
    for counted in run_distributed(_count, size, layout, str(tmp_path), {**changes, **CAPTURED}, timeout=180):
        assert counted == {"graphs": 1, "breaks": 0}
