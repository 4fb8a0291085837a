"""What one rank's training step launches and sends, recorded without a device: operators, bytes and FLOPs in order.

The real step runs on fake tensors, which have shapes and no values, and in a job of which no other rank exists: model,
loss, accumulation of gradients, reductions, clipping and optimizer are what a run executes, with the operators that it
uses on a GPU. Each operator's bytes are those of the tensors that it reads and writes, each counted once; views and
allocations are not operators. An operator may launch more than one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.config import ResolvedConfig
from megacore.parallel.mesh import Mesh
from megacore.plan.roofline import Event, Launch, Pattern, Phase, StepEvents, Transfer
from megacore.tracer.fake_job import HOST_READS, NoWeights, fake_job
from megacore.tracer.operator_costs import operator_cost
from megacore.tracer.profile import fake_microbatch
from megacore.train.gpt_task import GPTTask
from megacore.train.peaks import Format
from megacore.train.step import TrainStep

# Operators that launch nothing: they look at memory in another way, or allocate it.
FREE = frozenset({
    "alias", "as_strided", "chunk", "detach", "device", "empty", "empty_like", "empty_strided", "expand", "lift_fresh",
    "narrow", "new_empty", "new_empty_strided", "permute", "reshape", "_reshape_alias", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "_unsafe_view", "view", "view_as",
})  # fmt: skip
_FORMATS: Mapping[torch.dtype, Format] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Arguments that are written without being read, by operator; all others that are written are read too.
_WRITE_ONLY = {
    "copy_": {"self"}, "fill_": {"self"}, "zero_": {"self"}, "bernoulli_": {"self"}, "adamw_": {"copy"},
}  # fmt: skip
# Arguments that are declared as written and are only read: gradients, which are written back where a scale is given.
_READ_ONLY = {"_fused_adamw_": {"grads"}}
# Operators that read only the rows that they pick.
_PICKS = frozenset({"embedding", "gather", "gather_rows", "index", "index_select"})
_PATTERNS: Mapping[str, Pattern] = {
    "allreduce_": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "send": "message",
    "recv_": "message",
    "broadcast_": "message",
}


def record_step(config: ResolvedConfig) -> StepEvents:
    """The events of rank 0. `config`: of a run without pipeline parallelism."""
    with fake_step(config) as step:
        recorder = Recorder(step.mesh)
        before, one, two = (_recorded(step, recorder, config, microbatches) for microbatches in (1, 1, 2))
        return StepEvents(before=before, one=one, two=two)


@contextmanager
def fake_step(config: ResolvedConfig) -> Iterator[TrainStep]:
    """Rank 0's model and optimizer on fake tensors, with a GPU's operators and defaults; new tensors are fake too."""
    config = config.for_device(on_cpu=False)
    with fake_job(config.parallel, kernels="torch" if config.training.kernels == "torch" else "triton") as mesh:
        yield TrainStep(GPTTask(config, mesh, weights=NoWeights()), config, mesh)


def _recorded(step: TrainStep, recorder: Recorder, config: ResolvedConfig, microbatches: int) -> list[Event]:
    batch = [fake_microbatch(step.task.batch_type, config, step.mesh, index) for index in range(microbatches)]
    with recorder:
        recorder.phase = "forward"
        step.compute_gradients(batch)
        recorder.phase = "update"
        step.update_weights()
    return recorder.taken()


class Recorder(TorchDispatchMode):
    """Notes what a rank's operators launch and send. `mesh`: the rank's groups, whose roles name transfers."""

    def __init__(self, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.phase: Phase = "forward"  # of the operators outside a backward pass
        self._events: list[Event] = []
        # Storage -> transfers under way, each with the part of the storage that it reads or fills.
        self._under_way: dict[int, list[tuple[int, Tensor]]] = {}
        self._count = 0
        self._groups = {} if mesh is None else _groups(mesh)
        self._ranks = 1 if mesh is None else mesh.world.size

    def taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        if name in HOST_READS:
            return HOST_READS[name]
        out = func(*args, **kwargs)
        if namespace == "c10d" or namespace == "_c10d_functional":
            if name in _PATTERNS:
                self._events.append(self._transfer(func, name, args, kwargs))
        elif name not in FREE:
            self._events.append(self._launch(func, name, args, kwargs, out))
        return out

    def _phase(self) -> Phase:
        return self.phase if torch._C._current_graph_task_id() == -1 else "backward"

    def _launch(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Launch:
        named = list(_named_tensors(func, args, kwargs))
        waits = tuple(sorted({number for _, tensor, _ in named for number in self._awaited(tensor)}))
        launch = Launch(name=name, phase=self._phase(), bytes=moved_bytes(func, name, args, kwargs, out), waits=waits)
        if (cost := operator_cost(func, _values(func, args, kwargs))) is None:
            return launch
        form: Format = next((_FORMATS[t.dtype] for _, t, _ in named if t.dtype in _FORMATS), "bf16")
        name = cost.name or name
        return replace(launch, name=name, kind=cost.kind, flops=cost.flops, work=cost.work, form=form)

    def _awaited(self, tensor: Tensor) -> Iterator[int]:
        """Transfers that are under way in a tensor's memory, and are then awaited: of several in one storage, such as
        those of single samples, only these."""
        if (under_way := self._under_way.pop(_storage(tensor), None)) is None:
            return
        start, stop = _extent(tensor)
        others = []
        for number, part in under_way:
            first, end = _extent(part)
            if first < stop and start < end:
                yield number
            else:
                others.append((number, part))
        if others:
            self._under_way[_storage(tensor)] = others

    def _transfer(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Transfer:
        self._count += 1
        tensors = [tensor for _, tensor, _ in _named_tensors(func, args, kwargs)]
        for tensor in tensors:
            self._under_way.setdefault(_storage(tensor), []).append((self._count, tensor))
        role, ranks = self._group_of(args)
        return Transfer(
            name=name.strip("_").removesuffix("_base"),
            phase=self._phase(),
            number=self._count,
            role=role,
            pattern=_PATTERNS[name],
            bytes=float(max(map(_bytes, tensors), default=0)),
            ranks=len(ranks),
            stride=ranks[1] - ranks[0] if len(ranks) > 1 else 1,
            among=range(self._ranks),
        )

    def _group_of(self, args: Sequence[Any]) -> tuple[str, tuple[int, ...]]:
        """The role and the ranks of the group that a collective is called on."""
        (group,) = (a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
        return self._groups[torch.distributed.ProcessGroup.unbox(group).group_name]


def _groups(mesh: Mesh) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Role and ranks of the groups by torch's name of them; of a group with several roles the first."""
    roles = (
        "layer", "sequence", "replicas", "shards", "across", "pipeline", "batch", "loss", "copies", "dispatch",
        "expert_layer", "expert_replicas", "world",
    )  # fmt: skip
    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    for role in roles:
        group = getattr(mesh, role)
        groups.setdefault(group.name, (role, group.ranks))
    return groups


def moved_bytes(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    """Bytes that an operator reads and writes, each tensor once."""
    written = list(_tensors(out))
    if name in _PICKS:
        indices = [t for _, t, _ in _named_tensors(func, args, kwargs) if not t.dtype.is_floating_point]
        return float(sum(map(_bytes, indices)) + 2 * sum(map(_bytes, written)))
    total, seen = 0, set()
    write_only, read_only = _WRITE_ONLY.get(name, set()), _READ_ONLY.get(name, set())
    for argument, tensor, is_written in _named_tensors(func, args, kwargs):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        times = (is_written and argument not in read_only) + (not is_written or argument not in write_only)
        total += times * _bytes(tensor)
    inputs = {_storage(t) for _, t, _ in _named_tensors(func, args, kwargs)}
    return float(total + sum(_bytes(t) for t in written if _storage(t) not in inputs))


def _values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    arguments = func._schema.arguments
    return {a.name: v for a, v in zip(arguments, args, strict=False)} | dict(kwargs)


def _named_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, bool]]:
    """The tensors among the arguments of a call, by the argument's name, and whether the operator writes to them."""
    values = _values(func, args, kwargs)
    for argument in func._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(values.get(argument.name)):
            yield argument.name, tensor, is_written


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _tensors(element)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor lies."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def _bytes(tensor: Tensor) -> int:
    """Of what an operator touches: an element that is repeated by a stride of 0 lies in memory once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return tensor.element_size() * math.prod(sizes)
