"""A pretend accelerator: torch device type `pretend`, for tests of what happens on a GPU on a machine without one.

In a test, ranks get it by name, and count what they do on it:

    from tests.accelerator.device import counting, needs_pretend
    from tests.distributed import run_distributed

    def check(rank: int, world_size: int) -> int:            # torch.device("pretend", rank) is the current device
        trainer = ...                                         # ParallelConfig(device="pretend", ...)
        with counting() as c:
            trainer.train_step(batch)
        return c.host_syncs                                   # also: operators, bytes_to_device, bytes_to_host;
                                                              # c.sync_causes says what synchronised, and where
    @needs_pretend
    def test_it() -> None:
        assert run_distributed(check, 2, backend="pretend") == [1, 1]

    limit_memory(1 << 30)                                     # then torch.OutOfMemoryError, as on a device of 1 GiB

A script runs on it, alone or under torchrun, with `tests/accelerator/run.py SCRIPT --device pretend ...`.

What it does as a GPU does: host and device tensors do not mix, nor do tensors of two devices; `.numpy()` is refused;
fresh memory reads as NaN; torch.accelerator's memory statistics count every tensor; pinned memory is told from other.
Operators run at once, but streams, events and collectives order them: touching what an asynchronous collective, or an
operator on another stream, still writes is a RuntimeError that names both, and so is freeing memory that another stream
than the one it was allocated on may still use (`record_stream` allows it); a non-blocking copy to pinned memory leaves
NaN there until the host waits for it, and one from pinned memory reads the host's memory only when its result is used.
Collectives and point-to-point transfers (`collectives.py`) refuse host tensors and strides, and ranks that call them in
different orders fail at once.

A host synchronisation is what `torch.cuda.set_sync_debug_mode` knows as one, and waiting for a device, stream or event:
`.item()`, a blocking copy in either direction, `nonzero` and other operators whose result's size depends on values,
indexing with a mask or with an index in host memory, a barrier.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accelerator import build

needs_pretend = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
_SYNC_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_KERNELS = torch.library.Library("aten", "IMPL")


@dataclass
class Counters:
    """What a rank did on the device.

    Attributes:
        host_syncs: how often the host waited for the device.
        operators: operators launched; views are none.
        bytes_to_device: copied from host memory.
        bytes_to_host: copied to host memory.
        sync_causes: for each synchronisation, what it was and the innermost line of Python outside torch that did it.
    """

    host_syncs: int = 0
    operators: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    sync_causes: list[str] = field(default_factory=list)


@cache
def library() -> ctypes.CDLL:
    """The device's C interface, loaded and registered with torch in this process on the first call.

    Raises:
        RuntimeError: it cannot be built here, or torch has been told of another PrivateUse1 device.
    """
    path = str(build.library())
    torch.ops.load_library(path)
    torch.utils.rename_privateuse1_backend("pretend")
    torch._register_device_module("pretend", _DEVICE_MODULE)
    torch.utils.generate_methods_for_privateuse1_backend()
    found = ctypes.CDLL(path)
    _KERNELS.impl("addmm.dtype_out", _addmm_to_fp32, "PrivateUse1")
    for name in ("host_syncs", "operators", "bytes_to_device", "bytes_to_host", "new_timeline"):
        getattr(found, f"pretend_{name}").restype = ctypes.c_int64
    found.pretend_limit_memory.argtypes = [ctypes.c_int64]
    found.pretend_stream_waits.argtypes = found.pretend_host_waits.argtypes = [ctypes.c_int64, ctypes.c_int64]
    return found


@contextlib.contextmanager
def counting() -> Iterator[Counters]:
    """Count what this rank does on the device inside; the figures are there when the block ends."""
    found, counters = library(), Counters()
    before = _figures(found)
    note = _SYNC_CALLBACK(lambda cause: counters.sync_causes.append(f"{cause.decode()} at {caller()}"))
    found.pretend_on_sync(note)
    try:
        yield counters
    finally:
        found.pretend_on_sync(None)
        for name, figure in _figures(found).items():
            setattr(counters, name, figure - before[name])


@contextlib.contextmanager
def slow() -> Iterator[None]:
    """Inside, an event that is asked about is not done unless the host has waited for it; else it is done at once."""
    library().pretend_be_slow(True)
    try:
        yield
    finally:
        library().pretend_be_slow(False)


def limit_memory(size: int) -> None:
    """Give every device this many bytes; an allocation beyond them raises torch.OutOfMemoryError."""
    library().pretend_limit_memory(size)


def caller() -> str:
    """`file:line in function` of the innermost frame that belongs neither to torch nor to the device."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = Path(frame.f_code.co_filename)
        ours = file.parent == Path(__file__).parent and not file.name.startswith("test_")
        if not ours and not {"torch", "contextlib.py"}.intersection(file.parts):
            return f"{file}:{line} in {frame.f_code.co_name}"
    return "no Python of ours"


def _addmm_to_fp32(
    total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor, beta: float = 1, **alpha: float
) -> Tensor:
    """A GPU's kernel that CPUs lack: a product of 16-bit matrices, added to an fp32 sum without rounding."""
    assert left.dtype == right.dtype != out_dtype == total.dtype == out.dtype == torch.float32
    return torch.addmm(total, left.float(), right.float(), beta=beta, **alpha, out=out)


def _figures(found: ctypes.CDLL) -> dict[str, int]:
    names = ("host_syncs", "operators", "bytes_to_device", "bytes_to_host")
    return {name: getattr(found, f"pretend_{name}")() for name in names}


# What torch looks for in `torch.pretend`.
_DEVICE_MODULE: Any = SimpleNamespace(
    is_initialized=lambda: True,
    is_available=lambda: True,
    _lazy_init=lambda: None,  # without it torch 2.11 takes the device to be unused, and never synchronises
    _is_in_bad_fork=lambda: False,
    device_count=lambda: int(library().pretend_device_count()),
    current_device=lambda: int(library().pretend_current_device()),
    set_device=lambda device: torch.accelerator.set_device_index(getattr(device, "index", device)),
    synchronize=lambda device=None: torch.accelerator.synchronize(device),
    get_device_name=lambda device=None: "Pretend accelerator",
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    manual_seed=lambda seed: torch.default_generator.manual_seed(seed),
    manual_seed_all=lambda seed: torch.default_generator.manual_seed(seed),
    get_rng_state=lambda device=None: torch.get_rng_state(),
    set_rng_state=lambda state, device=None: torch.set_rng_state(state),
)
