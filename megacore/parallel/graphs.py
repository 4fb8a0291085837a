"""--cuda-graphs: forward and backward of a block are captured once and launched as one, where the host is slower than
the device (after torch.cuda.make_graphed_callables).

A graph reads and writes memory at fixed addresses. Activations live from a microbatch's forward to its backward, so
that every microbatch in flight needs graphs of its own, a slot: a forward takes one that is free, or captures another;
the backward gives it back. A schedule thereby gets as many as it has microbatches in flight.

What the host does for a gradient stays outside: gradients leave a graph as autograd gets them from any operator, and
of sums to which products add, the addresses are in the graph, and `added` is called after it. `parallelize()` puts
`Graphed` around a block; evaluation runs the block as it is.

`DeviceGraph` is the device's own. On a device without them `Recorded` runs the same operators one by one, into the same
memory, and refuses what no graph can hold: so a CPU shows whether a model can be captured, and that its bits stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from megacore.errors import UserError
from megacore.ops.dispatch import Node
from megacore.parallel.sharding import GradientAccumulator, ShardedParameter, sharded_parameters

T = TypeVar("T")


class Graph(Protocol):
    """Operators that are launched together."""

    def capture(self, compute: Callable[[], T]) -> T:
        """What `compute` returns: tensors that hold nothing before `replay`. Nothing is computed yet."""

    def replay(self) -> None:
        """Compute all of it, in the same memory."""


class DeviceGraph:
    """A graph of the device. `pool`: the memory of all graphs of a rank, which are captured in `stream`."""

    def __init__(self, stream: torch.Stream, pool: Any) -> None:
        self._stream, self._pool = stream, pool
        self._graph = torch.get_device_module(stream.device).CUDAGraph()

    def capture(self, compute: Callable[[], T]) -> T:
        current = torch.accelerator.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with self._stream:
            # Other threads, such as NCCL's, go on meanwhile.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = compute()
            finally:
                self._graph.capture_end()
        current.wait_stream(self._stream)
        return result

    def replay(self) -> None:
        self._graph.replay()


class Recorded(TorchDispatchMode):
    """The same by operators that run one after the other, on any device. Raises UserError where an operator needs the
    host, or draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[bool, Callable[[], list[Any]]]] = []  # whether it is a message; what it starts
        self._made: dict[int, Tensor] = {}  # by memory, what operators have made
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # other memory that they write to, and what it held

    def capture(self, compute: Callable[[], T]) -> T:
        with self:
            result = compute()
        # A device computes nothing while it captures.
        for memory, held in self._before.values():
            memory.copy_(held)
        for tensor in self._made.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        self._before = {}
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `.data` has a version of its own: a replay is no change to what autograd has saved.
        held, named = tree_map_only(Tensor, lambda tensor: tensor.data, (args, kwargs or {}))
        given = [one for one in tree_leaves((held, named)) if isinstance(one, Tensor)]
        _refuse_host(func, given, named)
        is_message = func.namespace == "c10d"
        writes = is_message or func._schema.is_mutable
        if writes:
            self._keep(given)
        results, places = func(*args, **(kwargs or {})), set(map(_memory, given))
        leaves = enumerate(tree_leaves(results))
        made = {n: one.data for n, one in leaves if isinstance(one, Tensor) and _memory(one) not in places}
        self._made |= {_memory(tensor): tensor for tensor in made.values()}
        if writes or (made and "empty" not in func.__name__):  # not of views and new memory, which are there
            self._calls.append((is_message, partial(_run, func, held, named, made)))
        return results

    def message(self, start: Callable[[], T], writes: Sequence[Tensor]) -> T:
        """Start a message that torch does not dispatch, and record it. `start`: returns what to wait for."""
        self._keep(writes)
        self._calls.append((True, lambda: [start()]))
        with _disable_current_modes():
            return start()

    def replay(self) -> None:
        messages: list[Any] = []  # under way: ranks may wait for some only when they have sent all
        for is_message, call in self._calls:
            while messages and not is_message:
                messages.pop(0).wait()
            messages += call()
        for message in messages:
            message.wait()

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            memory = _memory(tensor)
            if memory not in self._made and memory not in self._before:
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                whole = tensor.as_strided((size,), (1,), 0)
                self._before[memory] = whole, whole.clone()


def _refuse_host(func: Any, tensors: Sequence[Tensor], kwargs: Mapping[str, Any]) -> None:
    copies = torch.device(kwargs.get("device") or "meta").type == "cpu" and any(t.device.type != "cpu" for t in tensors)
    if copies or {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
        raise UserError(f"--cuda-graphs is not possible with {func}, for which the host waits: leave it out")
    if any(argument.name == "generator" for argument in func._schema.arguments):
        raise UserError(f"--cuda-graphs is not possible with {func}, which draws numbers: leave it out")


def _run(func: Any, args: Any, kwargs: Any, made: Mapping[int, Tensor]) -> list[Any]:
    """Compute into the memory of the first time. Returns what to wait for."""
    results = tree_leaves(func(*args, **kwargs))
    for number, tensor in made.items():
        tensor.copy_(results[number])
    return [one for one in results if isinstance(one, torch.ScriptObject)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def graphs_of(device: torch.device) -> Callable[[], Graph]:
    """What makes the graphs of a rank."""
    if not has_graphs(device):
        return Recorded
    return partial(DeviceGraph, torch.Stream(device), torch.get_device_module(device).graph_pool_handle())


def has_graphs(device: torch.device) -> bool:
    """Whether the device has graphs of its own."""
    return hasattr(torch.get_device_module(device), "CUDAGraph")


# ---- a block's graphs


class _Sum:
    """Takes the place of a sum of gradients while a product is captured that adds to it."""

    discards = False

    def __init__(self, own: GradientAccumulator) -> None:
        self.own, self.is_used = own, False

    def buffer(self) -> tuple[Tensor, bool]:
        self.is_used = True
        return self.own.buffer()[0], True

    def added(self) -> None:
        """The host says so after each replay."""

    def add_rows(self, rows: Tensor, terms: Tensor) -> None:
        raise AssertionError("a block looks up no rows")


class _Slot:
    """The graphs of one microbatch in flight. `parameters`: of the layer. `like`: its input."""

    def __init__(
        self, layer: nn.Module, parameters: Sequence[ShardedParameter], graph: Callable[[], Graph], like: Tensor
    ) -> None:
        self._forward, self._backward = graph(), graph()
        self._sums = {p: _Sum(p.accumulator) for p in parameters if p.accumulator is not None}
        x = torch.empty_like(like).requires_grad_(like.requires_grad)
        with self._sums_taken():
            y = self._forward.capture(partial(layer, x))
        # `.data`: what autograd has saved has not changed for it.
        self._x, self._y, self._inputs = x.data, y, [x, *parameters]
        self._grad = torch.empty_like(y)
        self._grads: Sequence[Tensor | None] | None = None  # of the input and the parameters

    def forward(self, x: Tensor) -> Tensor:
        self._x.copy_(x)
        self._forward.replay()
        return self._y.detach()

    def backward(self, grad: Tensor) -> Sequence[Tensor | None]:
        if self._grads is None:
            with self._sums_taken():
                self._grads = self._backward.capture(self._gradients)
        self._grad.copy_(grad)
        sums = [one.own for one in self._sums.values() if one.is_used]
        # The graph adds to all sums: to zeros what is the first term.
        if new := [total for total, has_terms in (one.buffer() for one in sums) if not has_terms]:
            torch._foreach_zero_(new)
        self._backward.replay()
        for one in sums:
            one.added()
        return self._grads

    def _gradients(self) -> list[Tensor | None]:
        """They keep autograd's graph, whose saved tensors are the memory between the two graphs."""
        learn = [one for one in self._inputs if one.requires_grad]
        found = torch.autograd.grad(self._y, learn, self._grad, retain_graph=True, allow_unused=True)
        grads = iter(found)
        return [next(grads) if one.requires_grad else None for one in self._inputs]

    @contextmanager
    def _sums_taken(self) -> Iterator[None]:
        for parameter, one in self._sums.items():
            parameter.accumulator = one
        try:
            yield
        finally:
            for parameter, one in self._sums.items():
                parameter.accumulator = one.own


class _Replay(Node):
    """A microbatch's pass through the graphs of a slot, which is free again after its backward."""

    @staticmethod
    def forward(ctx: Any, slot: _Slot, free: list[_Slot], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.slot, ctx.free = slot, free
        return slot.forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.slot.backward(grad)
        ctx.free.append(ctx.slot)
        return None, None, *grads


class Graphed(nn.Module):
    """A block that trains by graphs; `graph` makes one. It runs as it is in evaluation, where operators are traced,
    where gradients are dropped, and for a first microbatch, which compiles kernels and makes tables."""

    def __init__(self, layer: nn.Module, graph: Callable[[], Graph]) -> None:
        super().__init__()
        self.layer, self._graph = layer, graph
        self._held, self._free = sharded_parameters(layer), list[_Slot]()
        self._places: list[int] = []  # of the parameters in memory, once there are graphs
        self._is_warm = False

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]"""
        sums = (parameter.accumulator for parameter in self._held)
        runs = self.training and torch.is_grad_enabled() and not is_in_torch_dispatch_mode()
        if not runs or not self._is_warm or any(one is not None and one.discards for one in sums):
            y: Tensor = self.layer(x)
            if y.requires_grad and not self._is_warm:
                y.register_hook(self._warmed)
            return y
        places = [parameter.data_ptr() for parameter in self._held]
        self._places = self._places or places
        assert places == self._places, "a parameter has moved, and graphs read where it was"
        slot = self._free.pop() if self._free else _Slot(self.layer, self._held, self._graph, x)
        result: Tensor = _Replay.apply(slot, self._free, x, *self._held)
        return result

    def _warmed(self, _: Tensor) -> None:
        self._is_warm = True
