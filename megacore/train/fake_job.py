"""One rank of a job that does not run: its device, its memory and all other ranks are missing.

Tensors are fake (torch's FakeTensorMode): they have shapes, types and devices, and no values. Collectives return at
once, and what they receive has the right shape. The program itself is the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from megacore import ops
from megacore.config import ParallelConfig
from megacore.models.initialize import InitialWeights
from megacore.parallel.mesh import Mesh, fake_mesh, leave_fake_mesh
from megacore.parallel.sharding import ShardedParameter

CPU = torch.device("cpu")
HOST_READS: Mapping[str, Any] = {"_local_scalar_dense": 1.0, "item": 1.0, "is_nonzero": True}
"""What the host is told where it reads a fake tensor's value, by operator: the step continues as one whose gradients
are finite."""


@contextmanager
def fake_job(
    parallel: ParallelConfig, *, rank: int = 0, device: torch.device = CPU, kernels: ops.Choice
) -> Iterator[Mesh]:
    """The mesh of one rank; inside, all new tensors are fake.

    Args:
        parallel: the degrees.
        rank: which rank.
        device: of its tensors: the CPU, or `absent_accelerator()`.
        kernels: whether operators run as Triton kernels.
    """
    mesh = fake_mesh(parallel, rank=rank, device=device)
    try:
        with ExitStack() as stack:
            for context in (_FakeTensors(), ops.kernels_chosen(kernels)):
                stack.enter_context(context)
            replaced = _ATTENTION if device.type == "cpu" else _ATTENTION | _ABSENT
            for (owner, name), substitute in replaced.items():
                stack.enter_context(mock.patch.object(owner, name, substitute))
            yield mesh
    finally:
        leave_fake_mesh(mesh)


@cache
def absent_accelerator() -> torch.device:
    """A device that stands for any accelerator: only fake tensors can be on it, and those of the host do not mix with
    them. torch knows it until the process ends."""
    name = "gpu"
    backend_registration._setup_privateuseone_for_python_backend(name, backend_module=_AbsentModule())
    return torch.device(name, 0)


class NoWeights(InitialWeights):
    """Leaves parameters as they are: they have no values."""

    def fill(self, parameters: Iterable[ShardedParameter]) -> None:
        """Do nothing."""


class _FakeTensors(FakeTensorMode):
    """Fake tensors on devices that are not there, whatever torch believes of them."""

    @property
    def avoid_device_init(self) -> bool:
        return True


class _AbsentModule(backend_registration._DummyBackendModule):
    """What torch and `seeded` ask of a device's module."""

    def get_rng_state(self) -> torch.Tensor:
        """No state."""
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Do nothing."""

    def manual_seed(self, seed: int) -> None:
        """Do nothing."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """For `torch.utils.checkpoint`."""
        return [torch.float16, torch.bfloat16]


class _Idle:
    """An event or a stream of an absent device: whatever it waits for has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = None

    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *_: object) -> None: ...


def _host_generator(device: torch.device | None = None) -> torch.Generator:
    return torch.default_generator.clone_state()


# What a device has besides tensors -> what stands for it.
_ABSENT = {
    (torch, "Event"): _Idle,
    (torch, "Stream"): _Idle,
    (torch.accelerator, "current_stream"): _Idle,
    (torch, "Generator"): _host_generator,
}


def _without_dropout(attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def attend(*tensors: torch.Tensor, **settings: Any) -> torch.Tensor:
        return attention(*tensors, **{**settings, "dropout_p": 0.0})

    return attend


# Attention with dropout is one operator on a GPU; torch has it on fake tensors only without dropout.
_ATTENTION = {(F, "scaled_dot_product_attention"): _without_dropout(F.scaled_dot_product_attention)}
