"""The memory of training's state on a rank, counted from the storages that exist; `megacore.plan.memory` has the
formulas."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megacore.zero.data_parallel import DataParallel
from megacore.zero.local_segments import HasState

KINDS = ("params", "grads", "optimizer", "buffers")


def measured_bytes(
    data_parallel: DataParallel, optimizer: HasState, *, device: torch.device | None = None
) -> dict[str, int]:
    """Bytes this rank holds now, by kind; every storage counts once, under the first kind that has it. Gradients are
    those of the last step, so that this is what a step keeps until its end. `buffers` are reductions under way; what a
    layer gathers for its computation on stage 3 is not held now. `data_parallel`: the rank's parameters and gradients.
    `device`: whose storages count; None: all."""
    tensors: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for bucket in (*data_parallel.buckets, *data_parallel.frozen_buckets):
        for kind, held in bucket.storages().items():
            tensors[kind] += held
    tensors["optimizer"] += [tensor for state in optimizer.state.values() for tensor in state.values()]
    seen: set[int] = set()
    return {
        kind: _new_bytes((one for one in held if device is None or one.device.type == device.type), seen)
        for kind, held in tensors.items()
    }


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:  # fake tensors have no address
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total
