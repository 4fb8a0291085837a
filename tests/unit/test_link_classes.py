"""Which transfers go between nodes, by the planner and by listing every group of every role, as the mesh makes them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from megacore.config import ResolvedConfig
from megacore.config.dimensions import DIMENSIONS
from megacore.models.outline import outline
from megacore.parallel.mesh import groups_of_experts, groups_of_role
from megacore.plan.devices import Device, Link, Range
from megacore.plan.roofline import Crossing, Pattern, Transfer, crossing, groups_between_nodes, transfer_seconds
from megacore.plan.traffic import Sent, rank_traffic, stage_message, tied_gradients
from tests.parity.runs import make_config

Groups = Iterable[tuple[int, ...]]
NODES = range(1, 17)
SIZES: dict[str, Any] = {"num_attention_heads": 60, "hidden_size": 240, "num_layers": 10, "seq_length": 7200}


def random_layout(seed: int) -> ResolvedConfig:
    """Any degrees from 1 to 5, sometimes with experts, several stages per rank, or shards that are replicated."""
    at = random.Random(seed)
    tp, cp, dp, pp = (at.randint(1, 5) for _ in range(4))
    changes: dict[str, Any] = {"cp": cp, "zero_stage": at.randint(0, 3), "sequence_parallel": tp > 1}
    changes |= {"global_batch_size": 4 * dp, "micro_batch_size": 1}
    if pp > 1 and at.random() < 0.3:
        changes |= {"schedule": "interleaved", "virtual_stages": 2, "global_batch_size": pp * dp}
    if at.random() < 0.4:
        split = at.choice([tp, 1])
        ep = at.choice([n for n in range(1, 61) if dp * cp * tp // split % n == 0 and 60 % n == 0])
        changes |= {"num_experts": 60, "ep": ep, "etp": split, "activation": "swiglu", "disable_bias_linear": True}
    elif changes["zero_stage"]:
        changes["zero_shard_size"] = at.choice([n for n in range(2, 26) if dp * cp % n == 0] or [None])
    return make_config((tp, pp, dp), "output", **SIZES, **changes)


def families(config: ResolvedConfig) -> dict[str, list[Groups]]:
    """The groups that transfers of a role may run in."""
    parallel = config.parallel
    of = {role: groups_of_role(role, DIMENSIONS, parallel.degrees) for role in ("layer", "sequence", "replicas")}
    split = parallel.ep, parallel.expert_split
    roles = ("expert_layer", "dispatch", "expert_replicas")
    experts = {role: groups_of_experts(role, DIMENSIONS, parallel.degrees, split) for role in roles}
    n = parallel.zero_shard_size or len(of["replicas"][0])
    shards = [ranks[i : i + n] for ranks in of["replicas"] for i in range(0, len(ranks), n)]
    across = [ranks[i::n] for ranks in of["replicas"] for i in range(n)]
    return {
        "layer": [of["layer"], experts["expert_layer"]],
        "sequence": [of["sequence"]],
        "experts": [experts["dispatch"]],
        "replicas": [shards, across, of["replicas"], experts["expert_replicas"]],
    }


def groups_of(sent: Sent, config: ResolvedConfig) -> Groups:
    """Of the groups of its role those with its ranks, by the number and distance of ranks in the first one."""
    for groups in families(config)[sent.role]:
        first = next(iter(groups))
        if len(first) == sent.ranks and first[1] - first[0] == sent.stride:
            return groups
    raise AssertionError(f"no group of {sent}")


def across(groups: Groups, node: int) -> Crossing:
    """Of the groups that have ranks in several nodes: how many of them, and of their ranks, the node with the most has;
    and the fewest ranks of one in a node."""
    found, together, least = Counter[int](), Counter[int](), list[int]()
    for ranks in groups:
        inside = Counter(rank // node for rank in ranks)
        if len(inside) > 1:
            found.update(inside.keys())
            together.update(inside)
            least += inside.values()
    return Crossing(max(found.values(), default=0), max(together.values(), default=0), min(least, default=0))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 10))])
def test_a_transfer_is_between_nodes_where_one_of_its_groups_is(seed: int) -> None:
    config = random_layout(seed)
    layers, pp, world = outline(config), config.parallel.pp, config.parallel.ranks
    for rank in range(pp):
        for sent in (one for one in rank_traffic(config, layers, rank) if one.role != "pipeline"):
            groups = list(groups_of(sent, config))
            assert sorted(sum(groups, ())) == list(range(world))
            for node in NODES:
                found = across(groups, node)
                assert crossing(sent.ranks, sent.stride, sent.among, node) == found, (sent, node)
                assert sent.link(node) == ("network" if found.groups else "node"), (sent, node)
    if pp == 1:
        return
    pipelines = list(groups_of_role("pipeline", DIMENSIONS, config.parallel.degrees))
    message, tied = stage_message(config), tied_gradients(config)
    assert tied is not None
    for node in NODES:
        assert (
            groups_between_nodes(message.ranks, message.stride, message.among, node) == across(pipelines, node).groups
        )
        ends = [(ranks[0], ranks[-1]) for ranks in pipelines]
        assert groups_between_nodes(tied.ranks, tied.stride, tied.among, node) == across(ends, node).groups


SURE = Range(1.0, 1.0, 1.0)
# Nodes of 8 ranks; links of 100 GB/s, and a network card of 2 GB/s for each rank.
DEVICE = Device(
    name="ideal", reported_as="ideal", memory_bytes=1e9, memory_bandwidth=1e12, link_efficiency=SURE,
    node_link=Link(bandwidth=1e11, latency=0.0), network=Link(bandwidth=2e9, latency=0.0), network_efficiency=SURE,
)  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "ranks", "stride", "world", "seconds"),
    [
        ("all-gather", 3, 1, 6, 2 / 3 * 0.1 / 100),  # one node
        # 6 7 8 and 15 16 17: 8 and 15 are alone in the second node, each with its card.
        ("all-gather", 3, 1, 24, 2 / 3 * 0.1 / 2),
        ("all-gather", 6, 1, 12, 5 / 6 * 0.1 / 4),  # 6 to 11: 6 and 7 are in the first node
        ("all-gather", 2, 3, 12, 1 / 2 * 0.1 / 2),  # 6 9 and 7 10, but not 8 11: two of the eight cards
        ("all-gather", 4, 4, 64, 3 / 4 * 0.1 / 4),  # two ranks of each of four groups in a node
        ("all-gather", 16, 1, 64, 15 / 16 * 0.1 / 16),  # one ring has all eight cards
        # In an all-to-all each rank sends over its own card.
        ("all-to-all", 8, 1, 64, 7 / 8 * 0.1 / 100),  # one node
        ("all-to-all", 64, 1, 64, 56 / 64 * 0.1 / 2),  # 8 ranks a node: 56 of 64 parts leave it
        ("all-to-all", 16, 2, 64, 12 / 16 * 0.1 / 2),  # 4 of each of two groups in a node
        ("all-to-all", 6, 1, 12, 4 / 6 * 0.1 / 2),  # 6 and 7 of 6 to 11 send four parts
        # A message goes over one.
        ("message", 8, 1, 64, 0.1 / 100),
        ("message", 16, 4, 64, 0.1 / 2),  # four rings that cross at once
        ("message", 4, 4, 16, 0.1 / 2),  # pipelines of stages of four ranks
    ],
)
def test_a_transfer_has_the_network_cards_of_its_ranks(
    pattern: Pattern, ranks: int, stride: int, world: int, seconds: float
) -> None:
    transfer = Transfer(
        name="t", phase="forward", number=1, role="layer", pattern=pattern, bytes=1e8, ranks=ranks, stride=stride,
        among=range(world),
    )  # fmt: skip
    assert transfer_seconds(transfer, DEVICE) == pytest.approx(seconds, rel=1e-9)
