"""What to change of a search of which no layout fits, tried before it is offered: more ranks, a smaller batch or, where
host memory is too small, no offloading."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from megacore.config import ResolvedConfig
from megacore.plan.cluster import Cluster
from megacore.plan.search import Found, search
from megacore.plan.search_space import Constraints, with_batch

_MOST_RANKS = 4096
_MOST_TRIED = 2000  # valid layouts of all searches for one way out, about a second
_NUMBERS = 3  # of ranks that are tried


def ways_of_search(
    config: ResolvedConfig, cluster: Cluster, constraints: Constraints, found: Found, *, batch_of_ranks: bool
) -> Iterator[str]:
    """Values of --world-size and --global-batch-size of which a layout fits, or flags to leave out; a search that would
    take long tries none.

    Args:
        config: of the search.
        cluster: that computes.
        constraints: what a layout may be.
        found: by the search: no layout that fits, and what the smallest needs.
        batch_of_ranks: the batch is as many times the number of ranks, whatever that is.
    """
    world, batch = constraints.world_size, config.training.global_batch_size
    left = _MOST_TRIED
    for ranks in _more_ranks(found.times_too_large * world, cluster, world):
        if left < ranks // world * found.tried:
            break
        sized = with_batch(config, batch * ranks // world) if batch_of_ranks else config
        wider = search(sized, cluster, dataclasses.replace(constraints, world_size=ranks))
        if wider.layouts:
            yield f"--world-size {ranks}"
            break
        left -= wider.tried
    left, smaller = _MOST_TRIED, batch
    while smaller > 1 and left >= found.tried:
        smaller //= 2
        of_smaller = search(with_batch(config, smaller), cluster, constraints)
        if of_smaller.layouts:
            yield f"--global-batch-size {smaller}"
            break
        left -= of_smaller.tried
    is_host_short = found.least_on_host is not None and found.tried <= _MOST_TRIED
    if is_host_short and search(_without_offloading(config), cluster, constraints).layouts:
        yield " ".join(flag.replace("--", "--no-", 1) for flag in config.offload_flags)


def _without_offloading(config: ResolvedConfig) -> ResolvedConfig:
    """The configuration with nothing in host memory."""
    parallel = dataclasses.replace(config.parallel, offload_optimizer=False, offload_params=False)
    training = dataclasses.replace(config.training, offload_activations=False)
    return dataclasses.replace(config, parallel=parallel, training=training)


def _more_ranks(at_least: float, cluster: Cluster, world: int) -> Iterator[int]:
    """Whole nodes, or a part of one that leaves all its ranks as much: the fewest that may be enough, as all ranks
    together need no less memory, and then powers of two."""
    node = cluster.device.node_ranks if world % cluster.device.node_ranks == 0 else world
    nodes = max(math.ceil(at_least / node), world // node + 1)
    powers = [1 << n for n in range((nodes - 1).bit_length(), (nodes - 1).bit_length() + _NUMBERS)]
    for count in sorted({nodes, *powers})[:_NUMBERS]:
        if count * node <= min(_MOST_RANKS, cluster.devices):
            yield count * node
