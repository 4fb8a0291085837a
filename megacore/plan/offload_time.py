"""What offloading takes of a step: copies between a device and the host's memory, and the update of the weights there.

Copies to the device and from it pass the host's link at the same time. Those of a microbatch go beside its computation,
which hides them as far as it is as long (Ren et al. 2021, arXiv 2101.06840, section 4; Rajbhandari et al. 2021, arXiv
2104.07857, section 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megacore.config import ResolvedConfig
from megacore.config.precision import ELEMENT_BYTES
from megacore.models.outline import ModelLayer
from megacore.plan.activations import layer_bytes, product_input_bytes
from megacore.plan.devices import Case, Device
from megacore.plan.state import term_bytes
from megacore.plan.traffic import recomputed_whole


class OffloadTime(NamedTuple):
    """Seconds of a step.

    Attributes:
        update: of weights and optimizer state in host memory, with the copies that it waits for.
        exposed: copies of parameters, gradients and activations that computing does not hide.
        hidden: those that it hides.
    """

    update: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0


def offload_time(
    config: ResolvedConfig,
    chunks: Sequence[Sequence[ModelLayer]],
    device: Device,
    case: Case,
    *,
    shard: float,
    moved: float,
    computing: float,
) -> OffloadTime:
    """What offloading takes of a step of one rank of devices with a memory of their own.

    Args:
        config: a resolved configuration.
        chunks: the layers of each of the rank's stages.
        device: that computes.
        case: which of its assumed values.
        shard: parameters that the rank updates.
        moved: bytes that their update reads and writes.
        computing: seconds of the computations of one microbatch.
    """
    if not config.offloads:
        return OffloadTime()
    link = device.host_link * device.link_efficiency.of(case)
    gradients, parameters = term_bytes(config) * shard, ELEMENT_BYTES[config.precision.precision] * shard
    m, to_device, to_host, alone, after, update = config.microbatches, 0.0, 0.0, 0.0, 0.0, 0.0
    if config.parallel.offload_optimizer:
        update = moved / (device.host_bandwidth * device.memory_efficiency.of(case))
    if config.parallel.offload_params:
        # Parameters before forward and before backward; the sum so far, of all microbatches but the first.
        to_device += 2 * parameters + gradients * (m - 1) / m
        to_host += gradients
        after = gradients / link  # they are fetched once more for their norm
    elif config.parallel.offload_optimizer:  # bucket by bucket, beside the update
        update = max(update, gradients / link, parameters / link)
    if config.training.offload_activations:
        kept = sum(
            layer_bytes(config, layer, on_cpu=False, again=again)
            for chunk in chunks
            for layer, again in zip(chunk, recomputed_whole(config, chunk), strict=True)
            if layer.block is not None
        )
        to_device, to_host = to_device + kept, to_host + kept
        if config.parallel.may_split_backward:  # the inputs of products come once more, each while its product waits
            blocks = (layer.block for chunk in chunks for layer in chunk if layer.block is not None)
            alone = sum(product_input_bytes(config, block) for block in blocks)
    copies = max(to_device, to_host) / link
    exposed = max(copies - computing, 0.0) + alone / link
    copies += alone / link
    return OffloadTime(update=update, exposed=m * exposed + after, hidden=m * (copies - exposed))
