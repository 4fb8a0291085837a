"""The planned transfers against what gloo ranks send: every collective and message is counted where it is called.

Sums of a few numbers (norms, token counts, statistics of the loss) are smaller than `FEW` bytes and are left out on
both sides. All sizes are multiples of what ZeRO's buckets are padded to.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megacore.config import ResolvedConfig, ResolvedExperts
from megacore.layers import moe
from megacore.models.outline import outline
from megacore.parallel import direct
from megacore.parallel.mesh import Group, build_mesh
from megacore.plan.memory import plan_memory
from megacore.plan.traffic import rank_traffic
from tests.distributed import run_distributed
from tests.parity.runs import make_config, make_trainer

FEW = 200
SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256, "num_layers": 2}
INTERLEAVED: dict[str, Any] = {"schedule": "interleaved", "virtual_stages": 2, "num_layers": 4}
EXPERTS: dict[str, Any] = {"num_experts": 8, "activation": "swiglu", "disable_bias_linear": True}
PARALLEL: dict[str, Any] = {"parallel_residual": True, "shared_parallel_norm": True}
FOUR_NORMS: dict[str, Any] = {"norm_placement": "both", "normalization": "RMSNorm", "activation": "geglu"}
Counts = Counter[int]  # bytes sent by the distance of a group's ranks


class Counting:
    """Counts what this rank sends. A sum to all is counted as a ring's, twice (n - 1) / n of the tensor."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sent: Counts = Counter()
        reduce, exchange, batch = dist.all_reduce, direct._exchange, dist.batch_isend_irecv
        exchange_rows = dist.all_to_all_single
        start_sum, sums = direct.start_sum, list[Tensor]()  # those of a few numbers that are begun

        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            ranks = dist.get_process_group_ranks(group)
            self._add(ranks[1] - ranks[0], 2 * (len(ranks) - 1) * _bytes(tensor) // len(ranks), _bytes(tensor))
            return reduce(tensor, op=op, group=group, async_op=async_op)

        def exchanged(outgoing: list[Tensor], incoming: list[Tensor], group: Group) -> Any:
            others = [tensor for rank, tensor in enumerate(outgoing) if rank != group.rank and not sums]
            self._add(group.ranks[1] - group.ranks[0], sum(map(_bytes, others)), sum(map(_bytes, others)))
            return exchange(outgoing, incoming, group)

        def summed(tensor: Tensor, group: Group) -> Any:
            assert _bytes(tensor) < FEW
            sums.append(tensor)
            try:
                return start_sum(tensor, group)
            finally:
                sums.clear()

        def batched(operations: list[Any]) -> Any:
            for operation in operations:
                if operation.op is dist.isend:
                    ranks = dist.get_process_group_ranks(operation.group)
                    self._add(ranks[1] - ranks[0], _bytes(operation.tensor), _bytes(operation.tensor))
            return batch(operations)

        def rows_exchanged(
            received: Tensor, rows: Tensor, receive: list[int], send: list[int], group: Any, async_op: bool
        ) -> Any:
            ranks = dist.get_process_group_ranks(group)
            others = sum(send) - send[ranks.index(dist.get_rank())]
            self._add(ranks[1] - ranks[0], others * _bytes(rows) // max(len(rows), 1), _bytes(rows))
            return exchange_rows(received, rows, receive, send, group=group, async_op=async_op)

        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "all_to_all_single", rows_exchanged)
        patch.setattr(direct, "_exchange", exchanged)
        patch.setattr(direct, "start_sum", summed)
        patch.setattr(dist, "batch_isend_irecv", batched)

    def _add(self, distance: int, sent: int, size: int) -> None:
        if size >= FEW:
            self.sent[distance] += sent


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def evenly(logits: Tensor, experts: ResolvedExperts, bias: Tensor | None = None, *_: Any) -> moe.Choice:
    """Chooses each expert equally often, as is planned."""
    b, s, number = logits.shape
    chosen = experts.moe_router_topk
    indices = ((torch.arange(b * s).view(b, s, 1) * chosen + torch.arange(chosen)) % number).sort(-1).values
    scores = logits.softmax(-1)
    return moe.Choice(indices, scores.gather(-1, indices), scores)


def sent_per_step(rank: int, world_size: int, cases: list[str], directory: str) -> list[tuple[int, Counts]]:
    """The rank's parameters, and what it sends in the second step, by case."""
    found = []
    for case in cases:
        layout, changes = (CASES | MUON | MORE)[case]
        config = make_config(layout, directory, **(SIZES | changes), train_iters=2)
        trainer = make_trainer(config, build_mesh(config.parallel))
        held = sum(parameter.numel() for parameter in trainer.model.data_parallel.parameters)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe, "choose", evenly)
            trainer.train_step(next(trainer.batches))
            counting = Counting(patch)
            trainer.train_step(next(trainer.batches))
            found.append((held, counting.sent))
    return found


CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "tp 2": ((2, 1, 1), {}),
    "tp 2, recomputed": ((2, 1, 1), {"recompute": "full"}),
    "tp 2, sequence parallel": ((2, 1, 1), {"sequence_parallel": True}),
    "tp 2, canonical blocks": ((2, 1, 1), {"reproducible": True}),
    "tp 2, canonical blocks, bf16": ((2, 1, 1), {"reproducible": True, "precision": "bf16"}),
    "cp 2, canonical blocks": ((1, 1, 1), {"cp": 2, "reproducible": True, "micro_batch_size": 4}),
    "tp 2, cp 2, canonical blocks, bf16": (
        (2, 1, 1),
        {"cp": 2, "reproducible": True, "precision": "bf16", "micro_batch_size": 4},
    ),
    "pp 2": ((1, 2, 1), {}),
    "pp 2, zero-bubble": ((1, 2, 1), {"schedule": "zero-bubble"}),
    "pp 2, interleaved": ((1, 2, 1), INTERLEAVED),
    "pp 2, packed": ((1, 2, 1), {"reset_attention_mask": True, "reset_position_ids": True}),
    "pp 2, untied": ((1, 2, 1), {"untie_embeddings_and_output_weights": True}),
    "dp 2": ((1, 1, 2), {}),
    "dp 2, ZeRO 1": ((1, 1, 2), {"zero_stage": 1}),
    "dp 2, ZeRO 2": ((1, 1, 2), {"zero_stage": 2}),
    "dp 2, ZeRO 3": ((1, 1, 2), {"zero_stage": 3}),
    "tp 2, pp 2": ((2, 2, 1), {}),
    "pp 2, dp 2, ZeRO 1": ((1, 2, 2), {"zero_stage": 1}),
    "tp 2, dp 2, ZeRO 3": ((2, 1, 2), {"zero_stage": 3}),
    "tp 2, sequence parallel, recomputed, dp 2": ((2, 1, 2), {"sequence_parallel": True, "recompute": "full"}),
    "pp 2, GPipe": ((1, 2, 1), {"schedule": "gpipe"}),
    "dp 4, ZeRO 2": ((1, 1, 4), {"zero_stage": 2, "micro_batch_size": 1}),
    "tp 4": ((4, 1, 1), {}),
    "tp 2, pp 2, sequence parallel, interleaved": ((2, 2, 1), INTERLEAVED | {"sequence_parallel": True}),
    "pp 2, dp 2, ZeRO 3, zero-bubble": ((1, 2, 2), {"zero_stage": 3, "schedule": "zero-bubble"}),
    "cp 2, tp 2, sequence parallel, selective": (
        (2, 1, 1),
        {
            "num_layers": 4,
            "cp": 2,
            "cp_comm": "allgather",
            "sequence_parallel": True,
            "recompute": "selective",
            "num_query_groups": 2,
        },
    ),
    "dp 2, ep 2": ((1, 1, 2), EXPERTS | {"ep": 2}),
    "dp 2, ep 2, recomputed, balanced, ZeRO 3": (
        (1, 1, 2),
        EXPERTS | {"ep": 2, "zero_stage": 3, "recompute": "full", "moe_aux_loss_coeff": 0.01, "num_experts": 64},
    ),
    "tp 2, shared expert, dense first block": (
        (2, 1, 1),
        EXPERTS | {"moe_shared_expert_size": 64, "moe_shared_expert_gate": True, "moe_first_dense_layers": 1},
    ),
    "tp 2, sequence parallel, ep 2, whole experts": (
        (2, 1, 1),
        EXPERTS | {"sequence_parallel": True, "ep": 2, "etp": 1, "recompute": "full"},
    ),
    "dp 4, ep 2, ZeRO 1": ((1, 1, 4), EXPERTS | {"ep": 2, "zero_stage": 1, "micro_batch_size": 1}),
    "dp 4, ep 2, ZeRO 3": ((1, 1, 4), EXPERTS | {"ep": 2, "zero_stage": 3, "micro_batch_size": 1}),
    # With four experts per token their weights are more than a few numbers.
    "tp 2, dp 2, sequence parallel, ep 2, shared expert": (
        (2, 1, 2),
        EXPERTS | {"sequence_parallel": True, "ep": 2, "moe_router_topk": 4, "moe_shared_expert_size": 64},
    ),
    "tp 2, dp 2, sequence parallel, whole experts, recomputed": (
        (2, 1, 2),
        EXPERTS | {"sequence_parallel": True, "ep": 2, "etp": 1, "recompute": "full"},
    ),
    "dp 4, ZeRO 1, shards of 2": ((1, 1, 4), {"zero_stage": 1, "zero_shard_size": 2}),
    "dp 4, ZeRO 3, shards of 2": ((1, 1, 4), {"zero_stage": 3, "zero_shard_size": 2}),
    "tp 2, dp 2, sequence parallel, ZeRO 1": ((2, 1, 2), {"sequence_parallel": True, "zero_stage": 1}),
    "tp 2, dp 2, sequence parallel, ZeRO 3, ep 2": (
        (2, 1, 2),
        EXPERTS | {"sequence_parallel": True, "zero_stage": 3, "ep": 2, "moe_router_topk": 4},
    ),
    "pp 2, dp 2, ep 2, zero-bubble": ((1, 2, 2), EXPERTS | {"ep": 2, "schedule": "zero-bubble"}),
    "cp 4, ring": ((1, 1, 1), {"num_layers": 4, "cp": 4, "cp_comm": "ring", "num_query_groups": 2}),
    "tp 2, parallel blocks": ((2, 1, 1), {"parallel_residual": True}),
    "tp 2, canonical blocks, experts": ((2, 1, 1), EXPERTS | {"reproducible": True}),
    "cp 2, tp 2, ulysses, copied keys": (
        (2, 1, 1),
        {"num_layers": 4, "cp": 2, "cp_comm": "ulysses", "num_query_groups": 2, "precision": "bf16"},
    ),
}

# Each with a number of matrices that the ranks share evenly.
MUON: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "dp 2, Muon": ((1, 1, 2), {"optimizer": "muon"}),
    "dp 2, Muon in bf16": ((1, 1, 2), {"optimizer": "muon", "precision": "bf16"}),
    "dp 2, Muon, ZeRO 1": ((1, 1, 2), {"optimizer": "muon", "zero_stage": 1}),
    "dp 2, Muon, experts": ((1, 1, 2), EXPERTS | {"optimizer": "muon"}),
    "dp 2, Muon, ep 2": ((1, 1, 2), EXPERTS | {"optimizer": "muon", "ep": 2}),
    "tp 2, Muon": ((2, 1, 1), {"optimizer": "muon"}),
    "tp 2, dp 2, Muon": ((2, 1, 2), {"optimizer": "muon"}),
    "dp 4, Muon, ep 2": ((1, 1, 4), EXPERTS | {"optimizer": "muon", "ep": 2, "micro_batch_size": 1}),
}

# Run by `make test-slow`.
MORE: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "tp 2, sequence parallel, parallel blocks, recomputed": (
        (2, 1, 1),
        {"parallel_residual": True, "sequence_parallel": True, "recompute": "full"},
    ),
    "tp 2, parallel blocks of one norm, zero-bubble": (
        (2, 2, 1),
        PARALLEL | {"schedule": "zero-bubble", "sequence_parallel": True},
    ),
    "tp 2, parallel blocks of one norm, canonical blocks": ((2, 1, 1), PARALLEL | {"reproducible": True}),
    "cp 2, parallel blocks of one norm, canonical blocks": (
        (1, 1, 1),
        PARALLEL | {"cp": 2, "reproducible": True, "micro_batch_size": 4, "recompute": "full"},
    ),
    "tp 2, sequence parallel, four norms": ((2, 1, 1), FOUR_NORMS | {"sequence_parallel": True}),
    "dp 2, canonical blocks, ep 2": ((1, 1, 2), EXPERTS | {"reproducible": True, "ep": 2}),
    "cp 2, canonical blocks, experts, recomputed": (
        (1, 1, 1),
        EXPERTS | {"cp": 2, "reproducible": True, "micro_batch_size": 4, "recompute": "full"},
    ),
    "tp 2, dp 2, canonical blocks, ep 2, sequence parallel, shared expert, recomputed": (
        (2, 1, 2),
        EXPERTS
        | {
            "reproducible": True,
            "ep": 2,
            "sequence_parallel": True,
            "recompute": "full",
            "moe_shared_expert_size": 64,
            "moe_router_topk": 4,
        },
    ),
    "cp 2, experts": ((1, 1, 1), EXPERTS | {"cp": 2, "micro_batch_size": 4}),
    "cp 2, ep 2, balanced, ring": (
        (1, 1, 1),
        EXPERTS | {"cp": 2, "cp_comm": "ring", "ep": 2, "moe_aux_loss_coeff": 0.01, "num_experts": 64},
    ),
    "dp 2, ZeRO 2, average, moments in 16 bits": (
        (1, 1, 2),
        {"zero_stage": 2, "ema_decay": 0.9, "moments_dtype": "bf16"},
    ),
    "pp 2, canonical blocks, tied": ((1, 2, 1), {"reproducible": True}),
    "tp 2, sequence parallel, canonical blocks, bf16, recomputed": (
        (2, 1, 1),
        {"reproducible": True, "sequence_parallel": True, "precision": "bf16", "recompute": "full"},
    ),
    "dp 2, ZeRO 1, sums in bf16": (
        (1, 1, 2),
        {"zero_stage": 1, "precision": "bf16", "grad_reduce_dtype": "bf16"},
    ),
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "known", [CASES, MUON, pytest.param(MORE, marks=pytest.mark.slow)], ids=["usual", "Muon", "more"]
)
def test_bytes_sent(ranks: int, known: dict[str, Any], tmp_path: Any) -> None:
    cases = [name for name, ((tp, pp, dp), changes) in known.items() if tp * pp * dp * changes.get("cp", 1) == ranks]
    counted = run_distributed(sent_per_step, ranks, cases, str(tmp_path), timeout=240)
    for number, case in enumerate(cases):
        (tp, pp, dp), changes = known[case]
        config = make_config((tp, pp, dp), tmp_path, **(SIZES | changes))
        layers = outline(config)
        memory = plan_memory(config, layers, on_cpu=True)
        for rank, found in enumerate(counted):
            planned: Counts = Counter()
            for sent in rank_traffic(config, layers, rank // (ranks // pp)):
                distance = ranks // pp if sent.role == "pipeline" else sent.stride
                planned[distance] += round(sent.sent_bytes) if sent.bytes >= FEW else 0
            expected = Counter({key: size for key, size in planned.items() if size})
            assert _mean_of_shards(config, counted, number, rank) == expected, f"{case}, rank {rank}"
            assert found[number][0] == memory[rank // (ranks // pp)].parameters, f"{case}, rank {rank}"


def _mean_of_shards(config: ResolvedConfig, counted: list[list[tuple[int, Counts]]], case: int, rank: int) -> Counts:
    """What a rank has sent. With ZeRO and sequence parallelism the mean over its replicas: of the parameters that a
    layer group holds whole, a shard may have all or none."""
    parallel = config.parallel
    if not (parallel.zero_stage and parallel.sequence_parallel):
        return counted[rank][case][1]
    replicas = range(rank % parallel.tp, len(counted), parallel.tp)
    assert parallel.pp == 1 == parallel.cp
    total = sum((counted[replica][case][1] for replica in replicas), Counter())
    return Counter({distance: size // len(replicas) for distance, size in total.items()})


COMPRESSED: dict[str, tuple[dict[str, Any], float]] = {
    "onebitadam": ({"optimizer": "onebitadam", "onebit_freeze_step": 1}, 4 * 2048 / 260),
    "int8": ({"grad_reduce_compression": "int8"}, 4 * 256 / 260),
    "bf16": ({"grad_reduce_compression": "bf16", "zero_stage": 1}, 2.0),
}


def test_compressed_sums_send_the_bytes_that_are_planned(tmp_path: Any) -> None:
    """But for the padding of vectors to blocks."""
    cases = {name: ((1, 1, 2), changes) for name, (changes, _) in COMPRESSED.items()}
    counted = run_distributed(sent_by_replicas, 2, cases, str(tmp_path))[0]
    for (name, (changes, ratio)), (parameters, found) in zip(COMPRESSED.items(), counted, strict=True):
        config = make_config((1, 1, 2), tmp_path, **(SIZES | changes), train_iters=2)
        (planned,) = [s.sent_bytes for s in rank_traffic(config, outline(config), 0) if s.what == "gradients"]
        gathered = 4 * parameters / 2 if changes.get("zero_stage") else 0
        full = 4 * parameters / 2 * (1 if changes.get("zero_stage") else 2)
        assert planned == pytest.approx(full / ratio, rel=1e-6), name
        assert planned <= found[1] - gathered <= 1.12 * planned, name


def sent_by_replicas(
    rank: int, world_size: int, cases: dict[str, tuple[tuple[int, int, int], dict[str, Any]]], directory: str
) -> list[tuple[int, Counts]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "CASES", cases)
        return sent_per_step(rank, world_size, list(cases), directory)
