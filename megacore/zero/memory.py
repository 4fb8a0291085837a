"""How much memory the state of training takes on a rank: counted from the storages that exist, and predicted.

The prediction is ZeRO's (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1) for AdamW, in bytes per parameter of
the stage's slice, with gradients in the format in which they are reduced.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megacore.zero.bucket import ZeroOptions
from megacore.zero.data_parallel import DataParallel

KINDS = ("params", "grads", "optimizer", "buffers")


def measured_bytes(data_parallel: DataParallel, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Bytes this rank holds now, by kind; every storage counts once, under the first kind that has it.

    Gradients are those of the last step, so that this is what a step keeps until its end. `buffers` are reductions
    under way; what a layer gathers for its own computation on stage 3 is not held now.
    """
    tensors: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for bucket in data_parallel.buckets:
        for kind, held in bucket.storages().items():
            tensors[kind] += held
    if optimizer is not None:
        states = (state.values() for state in optimizer.state.values())
        tensors["optimizer"] += [value for values in states for value in values if isinstance(value, Tensor)]
    seen: set[int] = set()
    return {kind: _new_bytes(held, seen) for kind, held in tensors.items()}


def predicted_bytes(parameters: int, options: ZeroOptions, ranks: int, *, moments: int = 2) -> dict[str, float]:
    """Bytes by formula.

    Args:
        parameters: of this rank's slice of its pipeline stages.
        options: ZeRO stage, formats, and whether the optimizer's share lies in host memory.
        ranks: of the data-parallel group.
        moments: fp32 numbers that the optimizer keeps for each parameter besides its weight.
    """
    compute, reduce = options.compute_dtype.itemsize, options.sum_dtype.itemsize
    master = 4 if options.offload or options.compute_dtype != torch.float32 else 0
    stage = options.stage
    own = parameters / (ranks if stage >= 1 else 1)
    return {
        "params": parameters * compute / (ranks if stage >= 3 else 1),
        "grads": parameters * reduce / (ranks if stage >= 2 else 1),
        "optimizer": own * (4 * moments + master),
        "buffers": own * 4 if options.offload else 0.0,
    }


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
