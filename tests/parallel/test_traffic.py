"""The planned transfers against what gloo ranks send: every collective and message is counted where it is called.

Sums of a few numbers (norms, token counts, statistics of the loss) are smaller than `FEW` bytes and are left out on
both sides. All sizes are multiples of what ZeRO's buckets are padded to.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from megacore.parallel import collectives, direct
from megacore.parallel.mesh import Group
from megacore.plan.outline import outline
from megacore.plan.traffic import rank_traffic
from tests.distributed import run_distributed
from tests.parity.runs import make_config, train

FEW = 200
SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256, "num_layers": 4}
Counts = Counter[int]  # bytes sent by the distance of a group's ranks


class Counting:
    """Counts what this rank sends. A sum to all is counted as a ring's, twice (n - 1) / n of the tensor."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sent: Counts = Counter()
        reduce, exchange, batch = dist.all_reduce, direct._exchange, dist.batch_isend_irecv

        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            ranks = dist.get_process_group_ranks(group)
            self._add(ranks[1] - ranks[0], 2 * (len(ranks) - 1) * _bytes(tensor) // len(ranks), _bytes(tensor))
            return reduce(tensor, op=op, group=group, async_op=async_op)

        def exchanged(outgoing: list[Tensor], incoming: list[Tensor], group: Group) -> Any:
            others = [tensor for rank, tensor in enumerate(outgoing) if rank != group.rank]
            self._add(group.ranks[1] - group.ranks[0], sum(map(_bytes, others)), sum(map(_bytes, others)))
            return exchange(outgoing, incoming, group)

        def batched(operations: list[Any]) -> Any:
            for operation in operations:
                if operation.op is dist.isend:
                    ranks = dist.get_process_group_ranks(operation.group)
                    self._add(ranks[1] - ranks[0], _bytes(operation.tensor), _bytes(operation.tensor))
            return batch(operations)

        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(direct, "_exchange", exchanged)
        patch.setattr(dist, "batch_isend_irecv", batched)

    def _add(self, distance: int, sent: int, size: int) -> None:
        if size >= FEW:
            self.sent[distance] += sent


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def sent_per_step(rank: int, world_size: int, layout: tuple[int, int, int], directory: str, changes: Any) -> Counts:
    """Of a step in the middle of a run: four steps less three."""
    found = []
    for steps in (3, 4):
        with pytest.MonkeyPatch.context() as patch:
            counting = Counting(patch)
            train(rank, world_size, layout, f"{directory}/{steps}", {**SIZES, **changes, "train_iters": steps})
            found.append(counting.sent)
    assert collectives._by_messages is not None
    return Counter({key: found[1][key] - found[0][key] for key in found[1] if found[1][key] != found[0][key]})


CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "tp 2": ((2, 1, 1), {}),
    "tp 2, recomputed": ((2, 1, 1), {"recompute": "full"}),
    "tp 2, sequence parallel": ((2, 1, 1), {"sequence_parallel": True}),
    "pp 2": ((1, 2, 1), {}),
    "pp 2, zero-bubble": ((1, 2, 1), {"schedule": "zero-bubble"}),
    "pp 2, interleaved": ((1, 2, 1), {"schedule": "interleaved", "virtual_stages": 2}),
    "pp 2, untied": ((1, 2, 1), {"untie_embeddings_and_output_weights": True}),
    "dp 2": ((1, 1, 2), {}),
    "dp 2, ZeRO 1": ((1, 1, 2), {"zero_stage": 1}),
    "dp 2, ZeRO 2": ((1, 1, 2), {"zero_stage": 2}),
    "dp 2, ZeRO 3": ((1, 1, 2), {"zero_stage": 3}),
    "tp 2, pp 2": ((2, 2, 1), {}),
    "pp 2, dp 2, ZeRO 1": ((1, 2, 2), {"zero_stage": 1}),
    "tp 2, dp 2, ZeRO 3": ((2, 1, 2), {"zero_stage": 3}),
    "tp 2, sequence parallel, recomputed, dp 2": ((2, 1, 2), {"sequence_parallel": True, "recompute": "full"}),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_sent(case: str, tmp_path: Any) -> None:
    layout, changes = CASES[case]
    tp, pp, dp = layout
    counted = run_distributed(sent_per_step, tp * pp * dp, layout, str(tmp_path), changes, timeout=120)
    config = make_config(layout, tmp_path, **SIZES, **changes)
    layers = outline(config)
    for rank, found in enumerate(counted):
        planned: Counts = Counter()
        for sent in rank_traffic(config, layers, rank // (tp * dp)):
            size = round(sent.sent_bytes)
            distance = tp * dp if sent.role == "pipeline" else sent.stride
            planned[distance] += size if sent.bytes >= FEW else 0
        assert found == Counter({key: size for key, size in planned.items() if size}), f"rank {rank}"
