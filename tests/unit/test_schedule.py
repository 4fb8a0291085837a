"""The 1F1B lists and the partition: every statement a pipeline must satisfy, by brute force over small cases."""

from __future__ import annotations

import itertools

import pytest

from megacore.models.spec import LayerSpec
from megacore.pipeline.partition import partition
from megacore.pipeline.schedule import Action, Op, bubble_share, forward_only, one_forward_one_backward

CASES = [(p, m) for p in range(1, 9) for m in (1, 2, 3, 4, 7, 8, 16, 32)]


def layer(parameters: int, *, is_block: bool) -> LayerSpec:
    return LayerSpec(name="x", build=lambda: None, parameters=parameters, is_block=is_block)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("stages, microbatches", CASES)
def test_every_microbatch_once_each_way_and_in_order(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        actions = one_forward_one_backward(stage, stages, microbatches)
        for op in (Op.FORWARD, Op.BACKWARD):
            assert [a.microbatch for a in actions if a.op is op] == list(range(microbatches))
        in_flight = peak = 0
        for action in actions:
            in_flight += {Op.FORWARD: 1, Op.BACKWARD: -1}.get(action.op, 0)
            assert in_flight >= 0
            peak = max(peak, in_flight)
        assert peak == min(stages - stage, microbatches)


@pytest.mark.parametrize("stages, microbatches", CASES)
def test_idle_time_is_the_closed_form(stages: int, microbatches: int) -> None:
    """Forward and backward of one unit each, free transfers: idle (p - 1) / (m + p - 1) of the time on every rank."""
    lists = [one_forward_one_backward(s, stages, microbatches) for s in range(stages)]
    end = simulate(lists)
    total = 2 * (microbatches + stages - 1)
    assert end == total
    assert (total - 2 * microbatches) / total == pytest.approx(bubble_share(stages, microbatches), abs=1e-9)


@pytest.mark.parametrize("stages, microbatches", CASES)
@pytest.mark.parametrize("training", [True, False])
def test_blocking_transfers_cannot_deadlock(stages: int, microbatches: int, training: bool) -> None:
    """Even if a rank waits for all of a batch, sends too, and messages meet in posting order (NCCL's rule)."""
    schedule = one_forward_one_backward if training else forward_only
    run_blocking([batches(schedule(stage, stages, microbatches)) for stage in range(stages)])


def test_forward_only_has_no_backward() -> None:
    assert {a.op for a in forward_only(1, 3, 4)} == {Op.RECV_INPUT, Op.FORWARD, Op.SEND_OUTPUT}


def test_bloom_stages_and_bubble() -> None:
    """70 blocks on 12 stages with a 250,880-word table at both ends: 5, ten times 6, 5; bubble 7.914%."""
    h, table = 14336, 250_880 * 14336
    layers = [
        layer(table, is_block=False),
        *(layer(12 * h * h, is_block=True) for _ in range(70)),
        layer(table, is_block=False),
    ]
    blocks = [sum(layers[i].is_block for i in stage) for stage in partition(layers, 12)]
    assert blocks == [5, *[6] * 10, 5]
    assert bubble_share(12, 128) == pytest.approx(0.07914, abs=1e-5)


def test_partition_is_the_best_of_all() -> None:
    for costs in ([5, 1, 1, 1, 1, 5], [9, 3, 3, 3, 3, 3, 2], [1, 2, 2, 2, 2, 2, 2, 8]):
        layers = [layer(c, is_block=0 < i < len(costs) - 1) for i, c in enumerate(costs)]
        for stages in range(1, len(costs) - 1):
            found = partition(layers, stages)
            assert [i for stage in found for i in stage] == list(range(len(costs)))
            assert max(sum(costs[i] for i in stage) for stage in found) == best_largest_cost(layers, stages)
            assert all(any(layers[i].is_block for i in stage) for stage in found)


def test_more_stages_than_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="--pp 3: more stages than the model's 2 blocks"):
        partition([layer(1, is_block=False), *[layer(1, is_block=True)] * 2], 3)


def best_largest_cost(layers: list[LayerSpec], stages: int) -> int:
    best = 10**9
    for cuts in itertools.combinations(range(1, len(layers)), stages - 1):
        edges = [0, *cuts, len(layers)]
        parts = [layers[a:b] for a, b in itertools.pairwise(edges)]
        if all(any(x.is_block for x in part) for part in parts):
            best = min(best, max(sum(x.parameters for x in part) for part in parts))
    return best


def batches(actions: list[Action]) -> list[list[Action]]:
    """The transfers of a list, those that are posted together in one batch."""
    return [list(run) for is_transfer, run in itertools.groupby(actions, lambda a: a.op.is_transfer) if is_transfer]


def run_blocking(ranks: list[list[list[Action]]]) -> None:
    """Let every rank post its batches in order, the next only when all of the last have met their other side."""
    posted: dict[tuple[str, int, int], list[int]] = {}  # (side, from, to) -> microbatches in posting order
    position = [0] * len(ranks)
    mirror = {"send": "receive", "receive": "send"}

    def channel(rank: int, op: Op) -> tuple[str, int, int]:
        below, above = (rank - 1, rank), (rank, rank + 1)
        side = "send" if op in (Op.SEND_OUTPUT, Op.SEND_GRAD) else "receive"
        pair = {Op.RECV_INPUT: below, Op.SEND_GRAD: below[::-1], Op.SEND_OUTPUT: above, Op.RECV_GRAD: above[::-1]}[op]
        return side, *pair

    waiting: list[list[tuple[tuple[str, int, int], int]]] = [[] for _ in ranks]
    while True:
        moved = False
        for rank, rank_batches in enumerate(ranks):
            met = all(len(posted.get((mirror[side], a, b), [])) > index for (side, a, b), index in waiting[rank])
            if met and position[rank] < len(rank_batches):
                waiting[rank] = []
                for action in rank_batches[position[rank]]:
                    queue = posted.setdefault(channel(rank, action.op), [])
                    waiting[rank].append((channel(rank, action.op), len(queue)))
                    queue.append(action.microbatch)
                position[rank] += 1
                moved = True
        if not moved:
            break
    assert all(p == len(b) for p, b in zip(position, ranks, strict=True)), "deadlock"
    for (side, a, b), microbatches in posted.items():
        assert posted[mirror[side], a, b] == microbatches  # what one side sends, the other receives, in that order


def simulate(lists: list[list[Action]]) -> int:
    """Run the lists with unit compute and free transfers; a list that cannot go on fails the test."""
    clock, position = [0] * len(lists), [0] * len(lists)
    sent: dict[tuple[Op, int, int], int] = {}
    while any(p < len(a) for p, a in zip(position, lists, strict=True)):
        moved = False
        for rank, actions in enumerate(lists):
            while position[rank] < len(actions):
                a = actions[position[rank]]
                if a.op in (Op.RECV_INPUT, Op.RECV_GRAD):
                    source = (Op.SEND_OUTPUT, rank - 1) if a.op is Op.RECV_INPUT else (Op.SEND_GRAD, rank + 1)
                    key = (source[0], source[1], a.microbatch)
                    if key not in sent:
                        break
                    clock[rank] = max(clock[rank], sent[key])
                elif a.op.is_transfer:
                    sent[a.op, rank, a.microbatch] = clock[rank]
                else:
                    clock[rank] += 1
                position[rank] += 1
                moved = True
        assert moved, "deadlock"
    return max(clock)
