"""What every kernel needs to be started well: how many programs a device runs at once, and block sizes.

Loads of 16-bit numbers are widened to fp32 at once in every kernel (`.to(tl.float32)` on the load itself). That is what
the sums need, and Triton's interpreter computes on the bit pattern of a bf16 tensor otherwise, silently wrong.
"""

from __future__ import annotations

import torch
import triton

# What a device of the Hopper generation has; assumed where none can be asked, as when kernels are compiled only.
_HOPPER_PROCESSORS = 132
_INTERPRETED_PROCESSORS = 2


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: TRITON_INTERPRET=1 when Triton was imported."""
    return bool(triton.knobs.runtime.interpret)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; a persistent kernel starts a few programs on each."""
    if interpreting():
        return _INTERPRETED_PROCESSORS
    if device.type == "meta":
        return _HOPPER_PROCESSORS
    return int(torch.get_device_module(device).get_device_properties(device).multi_processor_count)


def block_of(width: int) -> int:
    """The smallest power of two that holds a row; at least 16, so that a thread's loads stay vectors."""
    return max(16, triton.next_power_of_2(width))


def warps_of(block: int, per_warp: int, most: int = 16) -> int:
    """Warps of a program so that each holds about `per_warp` elements of the block: a power of two, 1 to `most`."""
    return max(1, min(most, triton.next_power_of_2(max(block // per_warp, 1))))
