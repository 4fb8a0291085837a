"""Counts the bytes of fake tensors: those that exist at one time, and the most of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megacore.ops.block_attention import tiles_of
from megacore.tracer.fake_job import HOST_READS

_DEVICE_OF = torch.ops.prim.device.default


class Meter(TorchDispatchMode):
    """Counts each storage once while it exists. The host reads the values of fake tensors as `HOST_READS` says. `peak`:
    most bytes on the device since the last `restart`. `on_host`: bytes in host memory now; those of `device` where that
    is the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.held = self.peak = self.on_host = 0  # bytes; `held` on the device now
        self._kind = device.type
        self._sizes = dict[int, tuple[bool, int]]()  # by storage: whether it is on the device, and bytes
        self._within: dict[Hashable, int] = {}
        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", self._resize_and_count())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Of torch, for `__torch_dispatch__`: to skip its compiler it would load it, which takes seconds."""
        return False

    def restart(self) -> int:
        """Returns what is held now."""
        self.peak = self.held
        return self.held

    def __enter__(self) -> Meter:
        self._resizing.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizing.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:  # of most calls; the mode below takes longer to say the same
            return args[0].fake_device
        name = func._schema.name.split("::")[1]
        if name in HOST_READS:
            return HOST_READS[name]
        if (tiles := tiles_of(func, args)) is not None:
            self._count_within(tiles, (func, *map(_kind_of, args)), args)
        out = func(*args, **(kwargs or {}))
        for value in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(value, FakeTensor):
                self._count(value)
        return out

    def _count_within(self, code: Callable[..., Any], alike: Hashable, args: Any) -> None:
        """Count what exists while `code` runs; of calls that are alike the first runs it."""
        if alike not in self._within:
            before, most = self.held, self.peak
            self.peak = before
            super().__enter__()
            try:
                code(*args)
            finally:
                super().__exit__(None, None, None)
            self._within[alike], self.peak = self.peak - before, most
        self.peak = max(self.peak, self.held + self._within[alike])

    def _count(self, tensor: FakeTensor) -> None:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._sizes:
            weakref.finalize(storage, self._set, key, None)
            self._sizes[key] = tensor.fake_device.type == self._kind, 0
            self._set(key, storage.nbytes())

    def _set(self, key: int, size: int | None) -> None:
        """A storage has this size from now on; None: it is freed."""
        is_here, before = self._sizes.pop(key)
        more = (size or 0) - before
        if size is not None:
            self._sizes[key] = is_here, size
        if not is_here:
            self.on_host += more
            return
        self.held += more
        self.peak = max(self.peak, self.held)

    def _resize_and_count(self) -> Callable[..., Any]:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, size)
            return result

        return resized


def _kind_of(operand: Any) -> Hashable:
    """What decides the sizes that an operator makes of this operand."""
    return (operand.shape, operand.stride(), operand.dtype) if isinstance(operand, Tensor) else operand
