"""Kernels are launched on the device that their tensors are on, and the compiled code that is kept for later launches
is the one that Triton would choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from megacore.kernels.launch import Kernel
from tools.kernel_cases import cases

STREAMS = {0: 70, 1: 71}


class Driver:
    """Two devices, of which the first is the current one."""

    def __init__(self) -> None:
        self.current = 0
        self.utils = self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return STREAMS[device]


class OnDevice(torch.Tensor):
    """A tensor on the CPU that says it is on a numbered device."""

    number = 1

    def get_device(self) -> int:
        return self.number


@triton.jit(do_not_specialize=["seed"])
def _kernel(x_ptr, y_ptr, width, seed, scale, FLAG: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


class Launch(NamedTuple):
    """What the driver was handed: which code, as device and Triton's key, and the arguments of `CompiledKernel.run`."""

    code: str
    arguments: tuple[Any, ...]


class Launches:
    """A kernel, its launches by Triton, and those of code that was kept."""

    def __init__(self) -> None:
        self.kernel = Kernel(JITFunction(_kernel.fn, do_not_specialize=["seed"]))
        self.direct, self.by_triton = list[Launch](), list[Launch]()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", made)
    return made


@pytest.fixture
def launches(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Triton's own code, up to the compiler and the driver: it binds, examines and hashes arguments as always."""
    found = Launches()

    def compiled(jit: Any, key: str, signature: Any, device: int, *_: Any) -> Any:
        def run(*arguments: Any) -> None:
            assert arguments[3] == STREAMS[device]
            by_triton = arguments[7] is not None  # the hooks
            (found.by_triton if by_triton else found.direct).append(Launch(f"{device}: {key}", arguments))

        made = SimpleNamespace(
            run=run, function=1, packed_metadata=2, launch_metadata=lambda *_: 3,
            metadata=SimpleNamespace(target=GPUTarget("cuda", 90, 32)),
        )  # fmt: skip
        jit.device_caches[device][0][key] = made
        return made

    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    return found


def memory(offset: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Eight numbers that begin so many bytes after a multiple of 16."""
    whole = torch.zeros(256, dtype=torch.uint8)
    start = -whole.data_ptr() % 16 + offset
    return whole[start : start + 8 * dtype.itemsize].view(dtype)


def calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Arguments that Triton tells apart, by what differs."""
    x, y = memory(), memory()
    constants: dict[str, Any] = {"FLAG": True, "BLOCK": 64, "num_warps": 4}
    usual: dict[str, Any] = {"x": x, "y": y, "width": 64, "seed": 7, "scale": 1.0}
    changes: dict[str, dict[str, Any]] = {
        "usual": {}, "unaligned x": {"x": memory(4)}, "unaligned y": {"y": memory(8)},
        "dtype": {"x": memory(dtype=torch.bfloat16)}, "dtype of y": {"y": memory(dtype=torch.float16)},
        "no y": {"y": None}, "no multiple of 16": {"width": 65}, "width 1": {"width": 1}, "64 bits": {"width": 2**31},
        "long seed": {"seed": 2**31}, "negative seed": {"seed": -(2**31)}, "longest seed": {"seed": 2**63},
        "whole scale": {"scale": 2},
    }  # fmt: skip
    for name, change in changes.items():
        yield name, tuple((usual | change).values()), constants
    others: Any = {
        "flag": {"FLAG": False},
        "block": {"BLOCK": 128},
        "warps": {"num_warps": 8},
        "stages": {"num_stages": 2},
    }
    for name, other in others.items():
        yield name, tuple(usual.values()), constants | other


def test_what_is_kept_is_what_triton_would_launch(launches: Launches) -> None:
    """Three rounds of all calls, the second the other way round: what runs is what Triton chooses for the arguments."""
    chosen = {}
    for name, arguments, constants in calls():
        launches.kernel.jit[(1,)](*arguments, **constants)
        chosen[name] = launches.by_triton[-1].code
    assert len(set(chosen.values())) == len(chosen) - 1, "a negative seed of 32 bits is no other type"
    for again in range(3):
        for name, arguments, constants in list(calls())[:: -1 if again == 1 else 1]:
            launches.by_triton.clear()
            launches.direct.clear()
            launches.kernel[(3, 2)](*arguments, **constants)
            (launch,) = launches.direct or launches.by_triton
            assert launch.code == chosen[name], name
            assert launch.arguments[:3] == (3, 2, 1) and launch.arguments[4:6] == (1, 2)
            assert bool(launches.direct) is (again > 0 or name == "negative seed"), name


def test_launches_go_to_the_device_of_their_first_tensor(
    launches: Launches, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside that device's guard, which takes time and is left out where the device is the current one."""
    inside: list[int] = []

    @contextmanager
    def device(wanted: int) -> Iterator[None]:
        inside.append(wanted)
        before, driver.current = driver.current, wanted
        yield
        driver.current = before

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device=device))
    x = memory().as_subclass(OnDevice)
    for _ in range(2):
        launches.kernel[(1,)](x, x, 64, 1, 0.5, FLAG=True, BLOCK=64)
    assert inside == [1, 1] and driver.current == 0
    driver.current = 1
    launches.kernel[(1,)](x, x, 64, 1, 0.5, FLAG=True, BLOCK=64)
    assert inside == [1, 1]
    assert [code[0] for code, _ in launches.by_triton + launches.direct] == ["1"] * 3


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook", "pre_run"])
def test_hooks_see_every_launch(hook: str, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = memory(), memory()

    def launch() -> None:
        launches.kernel[(1,)](x, y, 64, 1, 0.5, FLAG=True, BLOCK=64)

    launch()
    launch()
    assert len(launches.by_triton) == 1
    hooks = launches.kernel.jit.pre_run_hooks if hook == "pre_run" else getattr(triton.knobs.runtime, hook).calls
    hooks.append(lambda *_, **__: None)
    try:
        launch()
        launch()
    finally:
        hooks.clear()
    assert len(launches.by_triton) == 3
    launch()
    assert len(launches.by_triton) == 3


@pytest.mark.parametrize("change", ["another backend", "only compiled", "another Triton"])
def test_triton_launches_what_cannot_be_kept(change: str, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    made = JITFunction._do_compile

    def compiled(*arguments: Any) -> Any:
        kernel = made(*arguments)
        if change == "another backend":
            kernel.metadata.target = GPUTarget("hip", "gfx942", 64)
        elif change == "only compiled":
            kernel.function = None
        else:
            del kernel.metadata
        return kernel

    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    x, y = memory(), memory()
    for _ in range(3):
        launches.kernel[(1,)](x, y, 64, 1, 0.5, FLAG=True, BLOCK=64)
    assert len(launches.by_triton) == 3 and not launches.direct


def test_every_kernel_is_launched_that_way(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """All launchers, with the shapes for which kernels are compiled."""
    launched: list[str] = []
    whole = Kernel.launch

    def launch(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.jit.fn.__name__)
        whole(kernel, grid, *arguments, **constants)

    def run(jit: Any, *_: Any, **__: Any) -> None:
        assert launched.pop() == jit.fn.__name__
        seen.add((jit.fn.__module__, jit.fn.__name__))

    seen: set[tuple[str, str]] = set()
    monkeypatch.setattr(Kernel, "launch", launch)
    monkeypatch.setattr(JITFunction, "run", run)
    for case in cases():
        case.launch()
    assert len(seen) > 20 and not launched
