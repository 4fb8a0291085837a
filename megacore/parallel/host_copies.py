"""Copies of parameters, gradients and activations between a device and host memory: the seam where `--trace` sees them.
All of `--offload-params`, `--offload-optimizer` and `--offload-activations` go through here."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megacore.parallel.heartbeat import Current

Content = Literal["parameters", "gradients", "activations"]


def to_host_(target: Tensor, source: Tensor, content: Content) -> None:
    """Begin a copy in the current stream. `target`: in host memory, pinned unless the device is a CPU."""
    _copy_(target, source, f"{content} to host")


def to_device_(target: Tensor, source: Tensor, content: Content) -> None:
    """Begin to copy to the device, in the current stream; arguments as for `to_host_`, the other way."""
    _copy_(target, source, f"{content} to device")


def on_device(source: Tensor, device: torch.device, content: Content) -> Tensor:
    """A copy on the device of what lies in host memory; as `to_device_`."""
    target = torch.empty_like(source, device=device)
    to_device_(target, source, content)
    return target


def _copy_(target: Tensor, source: Tensor, name: str) -> None:
    if Current.listener is None:
        target.copy_(source, non_blocking=True)
        return
    with Current.listener.copying(name, target.nbytes):
        target.copy_(source, non_blocking=True)
