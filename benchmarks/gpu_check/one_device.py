"""Process groups of ranks that share one device: each collective goes through host memory, over gloo.

NCCL refuses a device twice, and gloo takes device tensors in some collectives only. Here a call copies what it reads to
the host, and returns; `wait()` puts the result into the device's tensors. For checks, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

_ProcessGroup: Any = dist.ProcessGroup  # torch's own annotations leave out half of what it calls
# What torch calls, by torch's version -> what gloo has. The first argument is what is written, but of `send`.
_CALLS = {
    **{name: name for name in ("allreduce", "broadcast", "reduce", "allgather", "send", "recv")},
    **dict.fromkeys(("_allgather_base", "all_gather_single"), "_allgather_base"),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), "_reduce_scatter_base"),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), "alltoall_base"),
}


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those of an argument."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _tensors(each)


class Work:
    """A call under way. `results`: the device's tensors and their host copies."""

    def __init__(self, work: Any, results: list[tuple[Tensor, Tensor]], kept: object = None) -> None:
        self._work, self._results, self._kept = work, results, kept

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        for device, host in self._results:
            device.copy_(host)
        self._results = []
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    is_success = is_completed

    def exception(self) -> None:
        return None


class GlooGroup(_ProcessGroup):
    """What torch asks of a process group, on gloo; a subclass says what a call does.

    Attributes:
        backend: The name under which torch knows it.
        kind: The type of its devices.
    """

    supports_splitting = supports_coalescing = False
    backend: str
    kind: str

    def __init__(self, options: Any, _: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._name = self._description = options.group_id
        self._gloo: Any = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._description)
    _device_types = property(lambda self: [torch.device(self.kind)])

    def _get_backend(self, device: torch.device) -> GlooGroup:
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def eager_connect_single_device(self, device: torch.device) -> None:
        pass

    def getBackendName(self) -> str:  # noqa: N802 (torch calls it)
        return self.backend

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        self.shutdown()


class OneDevice(GlooGroup):
    """A process group of ranks that have the same device."""

    backend, kind = "one-device", "cuda"

    def barrier(self, opts: Any) -> Work:
        return Work(self._gloo.barrier(dist.BarrierOptions()), [])

    def _through_host(self, *arguments: Any, call: str) -> Work:
        hosts: dict[int, Tensor] = {}  # by the tensor's number: one that is read and written is copied once

        def host(value: Any) -> Any:
            if isinstance(value, Tensor):
                return hosts.setdefault(id(value), value.detach().cpu())  # waits for the device
            return [host(each) for each in value] if isinstance(value, list) else value

        work = getattr(self._gloo, call)(*[host(value) for value in arguments if value is not None])
        written = [] if call == "send" else [*_tensors(arguments[0])]
        return Work(work, [(tensor, hosts[id(tensor)]) for tensor in written], hosts)


for _name, _call in _CALLS.items():
    setattr(OneDevice, _name, partialmethod(OneDevice._through_host, call=_call))


def share_one_device(kind: str) -> Callable[[], None]:
    """Let the ranks of this job, of which this process is one, have the same device. Returns what ends it."""
    OneDevice.kind = kind
    if not hasattr(dist.Backend, "ONE-DEVICE"):
        dist.Backend.register_backend(OneDevice.backend, OneDevice, extended_api=True, devices=[kind])
    dist.Backend.default_device_backend_map[kind] = OneDevice.backend
    sharing = patch("megacore.parallel.mesh.identity_of", lambda device: None)  # else such ranks are refused
    sharing.start()
    return sharing.stop
