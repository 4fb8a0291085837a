"""Kernels are launched on the device that their tensors are on, whichever is the current one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

KERNELS = ("adamw", "cross_entropy", "dropout", "gelu", "norm", "rotary", "softmax", "swiglu")


@pytest.mark.parametrize("name", KERNELS)
def test_every_launcher_goes_to_its_tensors_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tensor of a second device, of a machine that has one: the launcher is run inside that device's guard,
    which takes time and is left out where the device is the current one."""
    module = importlib.import_module(f"megacore.kernels.{name}")
    inside: list[Any] = []
    current = 0

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        inside.append(wanted)
        yield
        inside.append("left")

    monkeypatch.setattr(
        torch, "get_device_module", lambda _: SimpleNamespace(device=device, current_device=lambda: current)
    )
    second = torch.device("xpu", 1)
    launchers = [
        function
        for key, function in vars(module).items()
        if inspect.isfunction(function) and not key.startswith("_") and function.__module__ == module.__name__
    ]
    assert launchers
    for launcher in launchers:
        inside.clear()
        with pytest.raises((AttributeError, TypeError, ValueError)):  # nothing but the device is there to be launched
            launcher(SimpleNamespace(device=second))
        assert inside[:1] == [second], launcher.__name__
        inside.clear()
        current = 1
        with pytest.raises((AttributeError, TypeError, ValueError)):
            launcher(SimpleNamespace(device=second))
        assert not inside, launcher.__name__
        current = 0
