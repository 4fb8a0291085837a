"""Where a step's time goes, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megacore.train.metrics import synchronize

_ROWS = 10


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
    events = profiler.key_averages()
    operators = [event for event in events if event.device_type == DeviceType.CPU]
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]

    def microseconds(event: Any) -> float:
        return float(event.self_device_time_total if on_cuda else event.self_cpu_time_total)

    return {
        "operators": _table(operators, microseconds),
        "kernels": _table(kernels, microseconds),
        "device_ms": round(sum(map(microseconds, kernels)) / 1e3, 3),
        "launches": sum(event.count for event in kernels),
    }


def _table(events: list[Any], microseconds: Callable[[Any], float]) -> list[dict[str, Any]]:
    total = sum(map(microseconds, events)) or 1.0
    return [
        {
            "name": event.key[:120],
            "calls": event.count,
            "ms": round(microseconds(event) / 1e3, 3),
            "share": round(microseconds(event) / total, 4),
        }
        for event in sorted(events, key=microseconds, reverse=True)[:_ROWS]
    ]
