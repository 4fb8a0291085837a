"""One rank of a job that does not run: its device, its memory and all other ranks are missing. Tensors are fake
(torch's FakeTensorMode): they have shapes, types and devices, and no values. Collectives return at once, and what they
receive has the right shape. The program itself is the real one."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

import megacore
from megacore import ops
from megacore.config import ParallelConfig
from megacore.errors import UserError
from megacore.layers import moe
from megacore.models.initialize import InitialWeights
from megacore.parallel.experts import Assignment
from megacore.parallel.mesh import Group, Mesh, fake_mesh, leave_fake_mesh
from megacore.parallel.sharding import ShardedParameter

CPU = torch.device("cpu")
HOST_READS: Mapping[str, Any] = {"_local_scalar_dense": 1.0, "item": 1.0, "is_nonzero": True}
"""What the host is told where it reads a fake tensor's value, by operator: the step continues as one whose gradients
are finite."""


@contextmanager
def fake_job(
    parallel: ParallelConfig, *, rank: int = 0, device: torch.device = CPU, kernels: ops.Choice
) -> Iterator[Mesh]:
    """The mesh of one rank; inside, all new tensors are fake. `device`: of its tensors: the CPU, or
    `absent_accelerator()`. `kernels`: whether operators run as Triton kernels."""
    mesh = fake_mesh(parallel, rank=rank, device=device)
    try:
        with ExitStack() as stack:
            # A backward in a thread of its own frees its last tensors while the next computation begins, or before.
            one_thread = torch.autograd.set_multithreading_enabled(False)
            for context in (_FakeTensors(), ops.kernels_chosen(kernels), one_thread):
                stack.enter_context(context)
            replaced = _REPLACED if device.type == "cpu" else _REPLACED | _ABSENT
            for (owner, name), substitute in replaced.items():
                stack.enter_context(mock.patch.object(owner, name, substitute))
            yield mesh
    finally:
        leave_fake_mesh(mesh)


@cache
def absent_accelerator() -> torch.device:
    """A device for any accelerator: only fake tensors can be on it. torch knows it until the process ends."""
    name = "gpu"
    backend_registration._setup_privateuseone_for_python_backend(name, backend_module=_AbsentModule())
    return torch.device(name, 0)


def in_words(error: Exception) -> str:
    """What went wrong in a step, and where in megacore."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, UserError):
        return text
    package = Path(megacore.__file__).parent
    files = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    where = [
        f"{file.relative_to(package)}:{line}"
        for file, line in files
        if file.is_relative_to(package) and file.parent != Path(__file__).parent
    ]
    return f"{type(error).__name__}: {text}" + (f" (megacore/{where[-1]})" if where else "")


class NoWeights(InitialWeights):
    """Leaves parameters as they are: they have no values."""

    def fill(self, parameters: Iterable[ShardedParameter]) -> None:
        """Leaves fake weights as they are."""


class _FakeTensors(FakeTensorMode):
    """Fake tensors on devices that are not there, whatever torch believes of them."""

    @property
    def avoid_device_init(self) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As for `Meter`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, {} if kwargs is None else kwargs)


class _AbsentModule(backend_registration._DummyBackendModule):
    """What torch and `seeded` ask of a device's module."""

    def get_rng_state(self) -> torch.Tensor:
        """No state."""
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Nothing to set."""

    def manual_seed(self, seed: int) -> None:
        """Nothing to seed."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """For `torch.utils.checkpoint`."""
        return [torch.float16, torch.bfloat16]


class _Idle:
    """An event or a stream of an absent device: whatever it waits for has happened."""

    def __init__(self, device: torch.device | None = None, **_: Any) -> None:
        self.device = device

    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *_: object) -> None: ...


def _host_generator(device: torch.device | None = None) -> torch.Generator:
    return torch.default_generator.clone_state()


def _with_dropout(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention on a CPU with dropout: torch has no fused operator, and takes its steps on no fake tensors."""

    def attend(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        if not settings.get("dropout_p"):
            return attention(query, key, value, **settings)
        if settings.get("enable_gqa"):
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = (query.float() * query.shape[-1] ** -0.5) @ key.float().transpose(-2, -1)
        weights = F.dropout(scores.softmax(-1), settings["dropout_p"])
        return (weights @ value.float()).to(query.dtype)

    return attend


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` by the fused operators of an accelerator, which write no weights. torch knows
    none for a device without them and takes steps that keep the weights, b x heads x s x s numbers, for backward."""
    if attn_mask is None:
        return _flash(query, key, value, dropout_p, is_causal)[0]
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if attn_mask.dtype == torch.bool:  # torch makes a bias of it
        attn_mask = attn_mask.new_empty(attn_mask.shape, dtype=query.dtype)
    return _efficient(query, key, value, attn_mask, True, dropout_p, is_causal)[0]


def _balanced(
    indices: Tensor,
    experts: int,
    group: Group,
    *,
    counts: Tensor | None = None,
    sends_all: bool = True,
    apart: bool = False,
) -> Assignment:
    """`experts.assign` with unknown experts: all have equally many rows, to one, and nothing is left out."""
    rows, held = indices.numel(), experts // group.size
    each = [rows * (number + 1) // experts - rows * number // experts for number in range(experts)]
    pairs = partial(
        Assignment,
        chosen=indices.shape[1],
        order=indices.new_empty(rows),
        positions=indices.new_empty(rows),
        sends_all=sends_all,
    )
    if group.size == 1:
        return pairs(counts=[each])
    send = [sum(each[rank * held : (rank + 1) * held]) for rank in range(group.size)]
    mine = each[group.rank * held : (group.rank + 1) * held]
    received = sum(mine) * group.size
    exchanged = partial(pairs, send=send, receive=[sum(mine)] * group.size)
    if apart:
        return exchanged(counts=[mine] * group.size)
    return exchanged(
        counts=[[count * group.size for count in mine]],
        grouped=indices.new_empty(received),
        arrival=indices.new_empty(received),
    )


def _zeros_of_counts(x: Tensor, *, minlength: int) -> Tensor:
    return x.new_zeros(minlength)


_flash = torch.ops.aten._scaled_dot_product_flash_attention
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention
# What is replaced for any device: sends are done at once, where torch's never are and their tensors would be kept.
# Which experts tokens use are values.
_REPLACED: dict[tuple[Any, str], Any] = {
    (FakeWork, "is_completed"): lambda _: True,
    (F, "scaled_dot_product_attention"): _with_dropout(F.scaled_dot_product_attention),
    (moe, "assign"): _balanced,
    (torch, "bincount"): _zeros_of_counts,
}
# What an absent accelerator has besides tensors.
_ABSENT: dict[tuple[Any, str], Any] = {
    (F, "scaled_dot_product_attention"): _fused,
    (torch, "Event"): _Idle,
    (torch, "Stream"): _Idle,
    (torch.accelerator, "current_stream"): _Idle,
    (torch, "Generator"): _host_generator,
}
