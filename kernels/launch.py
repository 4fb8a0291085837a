"""What starts kernels: the launch itself, how many programs a device runs at once, and block sizes. Loads of 16-bit
numbers are widened to fp32 at once in every kernel (`.to(tl.float32)` on the load itself). That is what the sums need,
and Triton's interpreter computes on the bit pattern of a bf16 tensor otherwise, silently wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import BaseBackend
from triton.compiler import make_backend

# What a device of the Hopper generation has; assumed where none can be asked, as when kernels are compiled only.
_HOPPER, _HOPPER_PROCESSORS = 90, 132
_INTERPRETED_PROCESSORS = 2
_HOSTS = ("cpu", "meta")  # where kernels are interpreted or compiled only
_ON_HOST = -1  # the number of a device where there is one of its kind
_ALIGNMENT = 16  # bytes; for pointers that are no multiples of it Triton compiles narrower accesses
_REDUCTIONS = 16_384  # bytes of shared memory for sums over the threads of a program, at most
_MOST_LOADED = 1024  # keys of a kernel: sizes that change in every call must not fill the memory


@cache
def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: TRITON_INTERPRET=1 when Triton was imported."""
    return bool(triton.knobs.runtime.interpret)


class Kernel:
    """A kernel that is launched on the device of its first argument, and from its second launch on with little work.

    To find the compiled code Triton binds, examines and hashes all arguments in every launch, which takes the host
    longer than the launch itself. A `Kernel` keeps the code under a key that takes less time: the device, dtypes,
    whether tensors begin at multiples of 16 bytes, whole numbers and constants. What Triton compiles depends on nothing
    else of the arguments, unless its backend for a device also looks at the size of tensors.

    Triton itself launches the others: the first of a key, those that hooks watch, such as a profiler's, and all of such
    backends. Values of `triton.knobs` are read when a key is first launched.

    A call passes tensors, None, ints and floats in the order of the parameters; then the constants by name, each always
    of one type, and options: `kernel[grid](x, y, width, BLOCK=block, num_warps=4)`. `jit`: what `triton.jit` makes of a
    function.
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._unspecialized = [number for number, p in enumerate(jit.params) if p.do_not_specialize]
        self._loaded: dict[tuple[Any, ...], _Loaded] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        driver = triton.runtime.driver.active
        device, own = driver.get_current_device(), args[0].get_device()
        if own != device and own != _ON_HOST:
            with torch.get_device_module(args[0].device).device(own):
                self.launch(grid, *args, **constants)
            return
        kinds: list[Any] = [
            x if (kind := type(x)) is int
            else kind if kind is float or x is None
            else (x.dtype, x.data_ptr() % _ALIGNMENT == 0)
            for x in args
        ]  # fmt: skip
        for number in self._unspecialized:
            kinds[number] = _integer_type(args[number])
        key = (device, *kinds, *constants.items())
        loaded = self._loaded.get(key)
        if loaded is None or self._is_watched():
            self._keep(key, self.jit[grid](*args, **constants), constants)
            return
        _, run, function, metadata, values = loaded
        x, y = grid if len(grid) == 2 else (grid[0], 1)
        run(x, y, 1, driver.get_current_stream(device), function, metadata, None, None, None, *args, *values)

    def _keep(self, key: tuple[Any, ...], compiled: Any, constants: dict[str, Any]) -> None:
        """Remember a kernel that is on its device; one that was only compiled is not."""
        try:
            backend = type(make_backend(compiled.metadata.target))
            examines_more = backend.get_tensor_specialization is not BaseBackend.get_tensor_specialization
            if examines_more or compiled.function is None:
                return
            values = [constants[name] for name in self.jit.arg_names if name in constants]
            loaded = _Loaded(compiled, compiled.run, compiled.function, compiled.packed_metadata, values)
        except AttributeError:  # another Triton than those we know: it launches by itself
            return
        if len(self._loaded) >= _MOST_LOADED:
            self._loaded.clear()
        self._loaded[key] = loaded

    def _is_watched(self) -> bool:
        runtime = triton.knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        try:  # a chain of hooks each
            hooks = enter.calls or leave.calls
        except AttributeError:  # or one, or None
            hooks = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
        return bool(hooks or self.jit.pre_run_hooks)


class _Loaded(NamedTuple):
    """A kernel on its device, what its launcher is called with, and its constants in the order of the parameters."""

    compiled: Any  # unloads the code when it is deleted
    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: Sequence[Any]


def launchable(jit: Any) -> Any:
    """A kernel that the host launches: a `Kernel`, except in Triton's interpreter."""
    return jit if interpreting() else Kernel(jit)


def _integer_type(number: int) -> str:
    """The type that Triton gives a whole number on whose value the code does not depend."""
    if -(2**31) <= number < 2**31:
        return "i32"
    return "i64" if number < 2**63 else "u64"


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; a persistent kernel starts a few programs on each."""
    if interpreting():
        return _INTERPRETED_PROCESSORS
    if device.type in _HOSTS:
        return _HOPPER_PROCESSORS
    return int(torch.get_device_module(device).get_device_properties(device).multi_processor_count)


@cache  # a launch takes the host as long as a few calls
def stages_of(row_bytes: int, device: int, most: int, most_on_hopper: int | None = None) -> int:
    """How many rows are read at once: beyond the first, each has a place in shared memory. `device`: its number.
    NVIDIA's Hopper generation and later ones have a faster memory, which more reads in flight keep busy."""
    if interpreting():
        return 1
    driver = triton.runtime.driver.active
    target, number = driver.get_current_target(), driver.get_current_device() if device == _ON_HOST else device
    if most_on_hopper is not None and target.backend == "cuda" and target.arch >= _HOPPER:
        most = most_on_hopper
    shared = int(driver.utils.get_device_properties(number)["max_shared_mem"])  # of a program
    return max(1, min(most, 1 + (shared - _REDUCTIONS) // row_bytes))


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
def power_of_two(count: int) -> int:
    """The smallest power of two that is not below a count; Triton's own function takes the host longer."""
    return int(triton.next_power_of_2(count))


@cache
def block_of(width: int) -> int:
    """The smallest power of two that holds a row; at least 16, so that a thread's loads stay vectors."""
    return max(16, power_of_two(width))


@cache
def warps_of(block: int, per_warp: int, most: int = 16) -> int:
    """Warps of a program so that each holds about `per_warp` elements of the block: a power of two, 1 to `most`."""
    return max(1, min(most, power_of_two(max(block // per_warp, 1))))
