"""The device that is measured: opening it, timing on it, and what it reaches at best.

On CUDA times come from device events, as medians after a warm-up and with the cache emptied before each call. The
device is kept busy until the host has launched the call, so that a time is the device's alone. On any other device (a
CPU, the tests' pretend accelerator) they come from the host's clock and serve to try out the benchmarks themselves.
"""

from __future__ import annotations

import importlib
import statistics
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megacore.parallel.mesh import select_device
from megacore.train.metrics import synchronize

_HOST_CALLS = 3
# How many calls are timed: as many as fit into the time for them, between a least and a most number.
_SECONDS_OF_CALLS, _LEAST_CALLS, _MOST_CALLS = 0.1, 5, 50
_CACHE_BYTES = 256 << 20  # more than any cache holds
# What keeps the device busy while the host launches a call: for twice the time of one, and some more.
_LAUNCH_SLACK, _CYCLES_PER_SECOND = 50e-6, 2e9
# The tests' accelerator, which needs no hardware: what makes it known to torch, and what counts on it.
_REGISTER, _COUNT = "tests.accelerator.collectives", "tests.accelerator.device"


def open_device(name: str) -> torch.device:
    """The first device of a kind.

    Args:
        name: `auto`, `cpu`, `cuda`, or `pretend` for the accelerator of the tests.

    Raises:
        ConfigError: this machine has no such device.
    """
    if name == "pretend":
        importlib.import_module(_REGISTER).register()
    return select_device(name)


def version_of(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def median_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Median time of a call."""
    function()  # compiles its kernels
    if device.type != "cuda":
        return statistics.median(timed(function, device) for _ in range(_HOST_CALLS))
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    function()
    to_launch = time.perf_counter() - started
    torch.cuda.synchronize(device)
    calls = max(_LEAST_CALLS, min(_MOST_CALLS, int(_SECONDS_OF_CALLS / (time.perf_counter() - started))))
    cache = torch.empty(_CACHE_BYTES, dtype=torch.int8, device=device)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for start, end in pairs:
        cache.zero_()
        torch.cuda._sleep(int((2 * to_launch + _LAUNCH_SLACK) * _CYCLES_PER_SECOND))
        start.record()
        function()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Seconds on the host's clock until the device has done it, too."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def copy_rate(device: torch.device, *, small: bool = False) -> float:
    """Bytes per second of copying a tensor on the device, bytes read and bytes written both counted.

    Args:
        device: where.
        small: 1 MiB instead of 2 GiB, which is far more than any cache holds.
    """
    source = torch.ones(1 << (19 if small else 30), dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, *, small: bool = False) -> float:
    """Operations per second of a large bf16 matrix product, on random numbers: zeros take less power and run faster."""
    size = 64 if small else 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: a @ b, device)


def host_synchronisations(function: Callable[[], object], device: torch.device) -> int | None:
    """How often a call makes the host wait for the device; None on a CPU.

    On CUDA torch's own debug mode counts: a call that asks for a wait by name, such as `torch.cuda.synchronize`, is not
    among them.
    """
    if device.type == "pretend":
        with importlib.import_module(_COUNT).counting() as counters:
            function()
        return int(counters.host_syncs)
    if device.type == "cpu":
        function()
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def total_memory(device: torch.device) -> int | None:
    """Bytes of the device's memory; None on a CPU."""
    return None if device.type == "cpu" else int(torch.accelerator.get_memory_info(device)[1])


# ---- where a step's time goes

_HEAVIEST = 10


def heaviest(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """The ten operators and the ten kernels that take most time in one step.

    Args:
        step: what is profiled; warmed up.
        device: on CUDA the device's time counts, elsewhere the host's.

    Returns:
        `operators` and `kernels`, each a list of name, calls, milliseconds and share of the total; the totals
        `device_ms` and `launches`.
    """
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities, acc_events=True) as profiler:  # or torch 2.11 warns of a second start
        step()
        synchronize(device)

    def microseconds(event: Any) -> float:
        return float(event.self_device_time_total if on_cuda else event.self_cpu_time_total)

    found, total, launches = dict[str, Any](), 0.0, 0
    for kind, of in (("operators", DeviceType.CPU), ("kernels", DeviceType.CUDA)):  # the totals are of the kernels
        events = [event for event in profiler.key_averages() if event.device_type == of]
        total, launches = sum(map(microseconds, events)), sum(event.count for event in events)
        found[kind] = [
            {
                "name": event.key[:120], "calls": event.count, "ms": round(microseconds(event) / 1e3, 3),
                "share": round(microseconds(event) / (total or 1.0), 4),
            }
            for event in sorted(events, key=microseconds, reverse=True)[:_HEAVIEST]
        ]  # fmt: skip
    return found | {"device_ms": round(total / 1e3, 3), "launches": launches}
