"""The planned transfers against what gloo ranks send: every collective and message is counted where it is called.

Sums of a few numbers (norms, token counts, statistics of the loss) are smaller than `FEW` bytes and are left out on
both sides. All sizes are multiples of what ZeRO's buckets are padded to.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
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
from tests.matrix.runner import changes_of
from tests.parity.runs import make_config, make_trainer

FEW = 200
SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256, "num_layers": 2}
Counts = Counter[int]  # bytes sent by the distance of a group's ranks


class Counting:
    """Counts what this rank sends. A sum to all is counted as a ring's, twice (n - 1) / n of the tensor."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sent: Counts = Counter()
        reduce, exchange, batch = dist.all_reduce, direct.exchange, dist.batch_isend_irecv
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
        patch.setattr(direct, "exchange", exchanged)
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


def config_of(words: str, directory: Any) -> ResolvedConfig:
    changes = changes_of(words)
    tp, pp, dp = (changes.pop(name, 1) for name in ("tp", "pp", "dp"))
    return make_config((tp, pp, dp), directory, **(SIZES | changes), train_iters=2)


def sent_per_step(rank: int, world_size: int, cases: list[str], directory: str) -> list[tuple[int, Counts]]:
    """The rank's parameters, and what it sends in the second step, by case."""
    found = []
    for case in cases:
        config = config_of(case, directory)
        trainer = make_trainer(config, build_mesh(config.parallel))
        held = sum(parameter.numel() for parameter in trainer.model.data_parallel.parameters)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe, "choose", evenly)
            trainer.train_step(next(trainer.batches))
            counting = Counting(patch)
            trainer.train_step(next(trainer.batches))
            found.append((held, counting.sent))
    return found


TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("traffic.toml").read_text(encoding="utf-8"))
CASES = {name: [words.format(**TABLE["parts"]) for words in cases] for name, cases in TABLE["cases"].items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "usual")) for name in CASES])
def test_bytes_sent(name: str, tmp_path: Any) -> None:
    ranks, cases = 4 if name == "four ranks" else 2, CASES[name]
    counted = run_distributed(sent_per_step, ranks, cases, str(tmp_path), timeout=240)
    for number, case in enumerate(cases):
        config = config_of(case, tmp_path)
        layers, of_stage = outline(config), ranks // config.parallel.pp
        memory = plan_memory(config, layers, on_cpu=True)
        for rank, found in enumerate(counted):
            planned: Counts = Counter()
            for sent in rank_traffic(config, layers, rank // of_stage):
                distance = of_stage if sent.role == "pipeline" else sent.stride
                planned[distance] += round(sent.sent_bytes) if sent.bytes >= FEW else 0
            expected = Counter({key: size for key, size in planned.items() if size})
            assert _mean_of_shards(config, counted, number, rank) == expected, f"{case}, rank {rank}"
            assert found[number][0] == memory[rank // of_stage].parameters, f"{case}, rank {rank}"


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


COMPRESSED = {  # and by what factor fewer bytes are sent
    "dp2 optimizer=onebitadam onebit_freeze_step=1": 4 * 2048 / 260,
    "dp2 grad_reduce_compression=int8": 4 * 256 / 260,
    "dp2 z1 grad_reduce_compression=bf16": 2.0,
}


def test_compressed_sums_send_the_bytes_that_are_planned(tmp_path: Any) -> None:
    """But for the padding of vectors to blocks."""
    counted = run_distributed(sent_per_step, 2, list(COMPRESSED), str(tmp_path))[0]
    for (case, ratio), (parameters, found) in zip(COMPRESSED.items(), counted, strict=True):
        config = config_of(case, tmp_path)
        (planned,) = [s.sent_bytes for s in rank_traffic(config, outline(config), 0) if s.what == "gradients"]
        is_sharded = bool(config.parallel.zero_stage)
        gathered = 4 * parameters / 2 if is_sharded else 0
        full = 4 * parameters / 2 * (1 if is_sharded else 2)
        assert planned == pytest.approx(full / ratio, rel=1e-6), case
        assert planned <= found[1] - gathered <= 1.12 * planned, case
