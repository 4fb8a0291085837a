"""Which groups of ranks reach from one node to another: the rule by which transfers are timed and bytes are counted.

Nodes hold consecutive ranks. The groups of one kind, such as all data-parallel groups, lie in blocks of consecutive
ranks: with 2 ranks and a stride of 3 the groups 0 3, 1 4, 2 5 are a block, and 6 9, 7 10, 8 11 the next one. Where a
node begins inside a block, a group of the block is in both nodes. All of them communicate at the same time, and a step
waits for the slowest. So it is not enough that a group would fit into a node: `--tp 3` on nodes of 8 ranks has the
group 6 7 8.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple


class Crossing(NamedTuple):
    """The groups that have ranks in one node and others in another.

    Attributes:
        groups: how many of them share the network cards of a node, on the node with the most. 0: every group lies in a
            node.
        ranks: how many ranks they have in a node together, on the node with the most.
        least: the fewest ranks that one of them has in one of its nodes.
    """

    groups: int
    ranks: int
    least: int


def groups_between_nodes(ranks: int, stride: int, among: range, node_ranks: int) -> int:
    """How many of the groups that reach from a node to another share its network cards; arguments of `crossing`."""
    return crossing(ranks, stride, among, node_ranks).groups


@functools.lru_cache(maxsize=65536)
def crossing(ranks: int, stride: int, among: range, node_ranks: int) -> Crossing:
    """Which of the groups reach from one node to another.

    Args:
        ranks: of a group.
        stride: distance of its ranks' numbers.
        among: the ranks that form the groups, block after block. Where they are fewer than `ranks * stride`, they are
            one block, in which only so many groups fit: first and last pipeline stage are such pairs.
        node_ranks: of a node.
    """
    if ranks == 1:
        return Crossing(0, 0, 0)
    block = min(ranks * stride, len(among))
    side_by_side = block - (ranks - 1) * stride  # groups of a block
    most, together, least = 0, 0, ranks
    # Nodes divide blocks alike again after as many ranks as both divide.
    nodes = range(among.start // node_ranks, -(-among.stop // node_ranks))[: block // math.gcd(block, node_ranks) + 1]
    for node in nodes:
        low, high = max(node * node_ranks, among.start), min((node + 1) * node_ranks, among.stop)
        groups = in_node = 0
        for number in {(low - among.start) // block, (high - 1 - among.start) // block}:  # others lie in the node
            begin = among.start + number * block
            inside = min(high, begin + block) - max(low, begin)
            if across := min(side_by_side, inside, block - inside):
                groups += across
                in_node += inside - (min(side_by_side, inside) - across) * ranks  # without groups that are all here
                least = min(least, max(inside // side_by_side, 1))
        most, together = max(most, groups), max(together, in_node)
    return Crossing(most, together, least if most else 0)
