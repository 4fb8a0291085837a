"""How long an optimizer such as Muon computes to make the directions of matrices orthogonal (optim/newton_schulz.py).

A Newton-Schulz step of an m x n matrix X, m <= n, has three products: X X^T, its square, and their polynomial times X,
together 4 m^2 n + 2 m^3 FLOPs. The rank that computes most decides, as replicas wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from megacore.config import ResolvedConfig
from megacore.models.outline import ModelLayer
from megacore.plan.cluster import Cluster
from megacore.plan.devices import Case
from megacore.plan.once import once_per_state
from megacore.plan.stage_time import Speed
from megacore.plan.whole_matrices import Product, busiest_seconds

# Around the iteration each element is written in fp32 as a direction, read, and written in the format of the products;
# there it is read for the norm, read and written by the division, and read by the update.
_FP32_PASSES, _NARROW_PASSES = 2, 5


def orthogonal_seconds(config: ResolvedConfig, chunks: Sequence[Sequence[ModelLayer]], speed: Speed) -> float:
    """Seconds of the products of a step's update on the busiest rank; 0 with an optimizer that has none.

    Args:
        config: a resolved configuration.
        chunks: the layers of each stage of a pipeline rank.
        speed: of the device, in the format of the model.
    """
    if not config.optimizer_settings.newton_schulz_steps:
        return 0.0
    element = config.optimizer_settings.direction_bytes(config.precision.precision)
    peak = speed.peak
    if (form := "fp32" if element == 4 else "bf16") != config.precision.precision:
        peak = speed.cluster.peak(form) or peak
    return _on_busiest(config, chunks, speed.cluster, case=speed.case, peak=peak, element=element)


@once_per_state
def _on_busiest(
    config: ResolvedConfig,
    chunks: Sequence[Sequence[ModelLayer]],
    cluster: Cluster,
    *,
    case: Case,
    peak: float,
    element: int,
) -> float:
    steps, speed = config.optimizer_settings.newton_schulz_steps, Speed(cluster, case, peak, element)

    @functools.cache
    def seconds(product: Product) -> float:
        return _seconds(product, steps, speed)

    return busiest_seconds(config, chunks, seconds, on_cpu=cluster.on_cpu)


def _seconds(product: Product, steps: int, speed: Speed) -> float:
    """Of the directions of matrices of one shape, computed together."""
    m, n = sorted((product.rows, product.columns))
    products = (speed.product(m, n, m), speed.product(m, m, m), speed.product(m, m, n))
    added = speed.memory(speed.element * (m * m + m * n))  # what the second and the third product are added to
    step = sum(products) + added - 3 * speed.launch
    around = speed.memory((4 * _FP32_PASSES + speed.element * _NARROW_PASSES) * m * n)
    return product.number * (steps * step + around) + 3 * steps * speed.launch
