"""What every kernel needs to be started well: its device, how many programs that runs at once, and block sizes.

Loads of 16-bit numbers are widened to fp32 at once in every kernel (`.to(tl.float32)` on the load itself). That is what
the sums need, and Triton's interpreter computes on the bit pattern of a bf16 tensor otherwise, silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor

# What a device of the Hopper generation has; assumed where none can be asked, as when kernels are compiled only.
_HOPPER_PROCESSORS = 132
_INTERPRETED_PROCESSORS = 2
_HOSTS = ("cpu", "meta")  # where kernels are interpreted or compiled only
P = ParamSpec("P")
R = TypeVar("R")


@cache
def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: TRITON_INTERPRET=1 when Triton was imported."""
    return bool(triton.knobs.runtime.interpret)


def on_its_device(launcher: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Make the device of a launcher's first tensor the current one while it launches: Triton takes the current one of
    the process, whose kernels would be handed the memory of another."""

    @wraps(launcher)
    def launched(tensor: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        device = tensor.device
        if device.type in _HOSTS:
            return launcher(tensor, *args, **kwargs)
        module = torch.get_device_module(device)
        if device.index == module.current_device():  # entering a context takes longer than the launch
            return launcher(tensor, *args, **kwargs)
        with module.device(device):
            return launcher(tensor, *args, **kwargs)

    return launched


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; a persistent kernel starts a few programs on each."""
    if interpreting():
        return _INTERPRETED_PROCESSORS
    if device.type in _HOSTS:
        return _HOPPER_PROCESSORS
    return int(torch.get_device_module(device).get_device_properties(device).multi_processor_count)


def rows_and_width(x: Tensor) -> tuple[int, int]:
    """Of [..., width]: the number of rows, and their length."""
    width = x.shape[-1]
    return x.numel() // width, width


def aligned(width: int) -> bool:
    """Whether every row of a contiguous tensor begins at a multiple of 16 elements, which makes its loads vectors."""
    return width % 16 == 0


def blocks_of(count: int, size: int) -> int:
    """Blocks of a size that hold so many elements; `triton.cdiv` takes the host longer than a kernel's launch."""
    return -(-count // size)


@cache
def block_of(width: int) -> int:
    """The smallest power of two that holds a row; at least 16, so that a thread's loads stay vectors."""
    return max(16, triton.next_power_of_2(width))


@cache
def warps_of(block: int, per_warp: int, most: int = 16) -> int:
    """Warps of a program so that each holds about `per_warp` elements of the block: a power of two, 1 to `most`."""
    return max(1, min(most, triton.next_power_of_2(max(block // per_warp, 1))))
