"""Every collective of the trainer, in two layers: in-place calls on tensors, and autograd pairs. The pairs are adjoint
linear maps (Shoeybi et al. 2019, arXiv 1909.08053, section 3): the backward of one is the forward of the other, so that
<A x, y> = <x, A^T y> over the group. A group of one rank communicates nothing. Nothing else in megacore calls
torch.distributed's collectives; point-to-point transfers live in `pipeline/transport.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from megacore.errors import PeerFailed
from megacore.ops.dispatch import Node
from megacore.parallel import direct
from megacore.parallel.heartbeat import UNMARKED, Phase, post
from megacore.parallel.mesh import Group, Holders, Mesh

Reduction = Literal["sum", "max"]
# torch 2.13 renamed these two; older releases know only the second name.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_compiled_ops: Any = torch.ops._c10d_functional  # that a graph of torch.compile may hold
_symmetric: Any = _symmetric_memory
# Sums of so few bytes over so few ranks are made of messages on a CPU.
_FEW_BYTES, _FEW_RANKS = 192, 16
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Pending:
    """A collective under way; `wait()` returns once the result may be read. Wait for it, or keep its tensors alive:
    with gloo, a message whose tensor is freed before it has arrived blocks all later messages between the two ranks.
    `works`: what torch says of it; empty where there is nothing to wait for. `then`: what is left to do afterwards.
    `watched`: marks the wait for the watchdog."""

    def __init__(
        self,
        works: Sequence[dist.Work] = (),
        then: Callable[[], None] | None = None,
        watched: AbstractContextManager[Any] = UNMARKED,
    ) -> None:
        self._works, self._then, self._watched = works, then, watched

    def wait(self) -> None:
        if self._works:
            with self._watched:
                for work in self._works:
                    work.wait()
        self._works = ()
        if self._then is not None:
            self._then()
            self._then = None


def all_reduce_(tensor: Tensor, group: Group, op: Reduction = "sum") -> Tensor:
    """Reduce a contiguous `tensor` in place over the group; every rank gets the same bits."""
    _check(tensor)
    if _is_small_sum(tensor, group, op):
        start_all_reduce_(tensor, group).wait()
    elif group.size > 1:
        with post(Phase.ALL_REDUCE, group.ranks, tensor.nbytes):
            dist.all_reduce(tensor, op=_OPS[op], group=group.handle)
    return tensor


def all_reduce_job_(tensor: Tensor, mesh: Mesh, op: Reduction = "sum") -> Tensor:
    """Reduce a contiguous `tensor` in place over all ranks of the job; every rank gets the same bits. The groups that
    divide the ranks reduce it one after the other: a ring over all n ranks takes 2 (n - 1) steps."""
    for group in mesh.sum_groups:
        all_reduce_(tensor, group, op)
    return tensor


def rows_of_ranks(row: Sequence[float], mesh: Mesh) -> Tensor:
    """Every rank's `row`, of one length: [ranks, len(row)] fp64 on the mesh's device, the same bits on every rank."""
    rows = torch.tensor([[mesh.world.rank, *row]], dtype=torch.float64, device=mesh.device)
    for group in mesh.sum_groups:  # those of a group's ranks, who then all take part in the next group's
        if _by_messages(rows, group) and group.size <= _FEW_RANKS:
            gathered = rows.new_empty(group.size, *rows.shape)
            start_all_gather(gathered.view(-1), rows.view(-1), group).wait()
        else:
            gathered = all_gather(rows, group)
        rows = gathered.flatten(0, 1)
    return rows[rows[:, 0].argsort(), 1:]


def all_reduce_tied_(tensor: Tensor, holders: Holders) -> Tensor:
    """Sum a contiguous `tensor` in place over the holders of a tied parameter; every holder gets the same bits."""
    if len(holders.positions) == holders.pipeline.size:
        return all_reduce_(tensor, holders.pipeline)
    _check(tensor)
    with post(Phase.TIED_SUM, holders.ranks, tensor.nbytes):
        direct.sum_among(tensor, holders.pipeline, holders.positions)
    return tensor


def start_all_reduce_(tensor: Tensor, group: Group, op: Reduction = "sum") -> Pending:
    """Begin `all_reduce_` and return at once, so that it overlaps with what is computed until `wait()`."""
    if group.size == 1:
        return Pending()
    _check(tensor)
    with post(Phase.ALL_REDUCE, group.ranks, tensor.nbytes) as watched:
        if _is_small_sum(tensor, group, op):
            return Pending(*direct.start_sum(tensor, group), watched)
        return Pending([dist.all_reduce(tensor, op=_OPS[op], group=group.handle, async_op=True)], watched=watched)


def _check(*tensors: Tensor) -> None:
    """What a collective reads and writes lies one after the other: gloo sums whatever lies in memory, NCCL refuses."""
    for tensor in tensors:
        assert tensor.is_contiguous(), f"shape {tuple(tensor.shape)}, strides {tensor.stride()}: it must be contiguous"


def _is_small_sum(tensor: Tensor, group: Group, op: Reduction) -> bool:
    """Whether messages between the ranks sum faster than gloo's ring: for a few numbers of more than two ranks."""
    few = 2 < group.size <= _FEW_RANKS and tensor.nbytes <= _FEW_BYTES
    return few and op == "sum" and _by_messages(tensor, group)


class Arriving:
    """A tensor that a collective fills, under way."""

    _result: Tensor
    _pending: Pending | None = None  # None: in a graph of torch.compile, which has its own wait

    def wait(self) -> Tensor:
        if self._pending is None:
            return _compiled_ops.wait_tensor(self._result)
        self._pending.wait()
        return self._result


class Sum(Arriving):
    """A tensor's sum over the group, of two ranks or more. `x`: its memory may be used for the sum."""

    def __init__(self, x: Tensor, group: Group) -> None:
        if torch.compiler.is_compiling():
            self._result = _compiled_ops.all_reduce(x, "sum", group.name)
        else:
            self._result = x.contiguous()
            self._pending = start_all_reduce_(self._result, group)


def all_reduced(x: Tensor, group: Group) -> Tensor:
    """The sum of x over the group, as a new tensor."""
    if not torch.compiler.is_compiling():
        # A plain clone keeps the strides, which may differ between ranks: NCCL refuses what is not contiguous, and gloo
        # adds elements up as they lie in memory.
        x = x.clone(memory_format=torch.contiguous_format)
    return Sum(x, group).wait()


class ShardsGathered(Arriving):
    """The ranks' tensors of equal shape, stacked along a new first dimension."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self._shape = (group.size, *x.shape)
        if torch.compiler.is_compiling():
            self._result = _compiled_ops.all_gather_into_tensor(x.contiguous(), group.size, group.name)
        else:
            self._result = x.new_empty(self._shape)
            self._pending = start_all_gather(self._result.view(-1), x.contiguous().view(-1), group)

    def wait(self) -> Tensor:
        """[group.size, *x.shape]"""
        return super().wait().view(self._shape)


class SumScattered(Arriving):
    """This rank's part of a sum over the group, of two ranks or more. `x`: [group.size, ...], contiguous, a part for
    each."""

    def __init__(self, x: Tensor, group: Group) -> None:
        if torch.compiler.is_compiling():
            self._result = _compiled_ops.reduce_scatter_tensor(x.flatten(0, 1), "sum", group.size, group.name)
        else:
            _check(x)
            self._parts = x  # until the sum is there
            self._result = x.new_empty(x.shape[1:])
            self._pending = start_reduce_scatter(self._result.view(-1), x.view(-1), group)


class EachExchanged:
    """Messages between all ranks of a group, each for itself; under way once it is sent. Every rank has to exchange as
    many, of one shape, in the same order. `like`: a message. `group`: of two ranks or more."""

    def __init__(self, like: Tensor, group: Group) -> None:
        self._group, self._received = group, like.new_empty(group.size, *like.shape)
        self._pending = dict[int, Pending]()
        self._sent = list[Tensor]()  # until all have arrived: see `Pending`

    def send(self, message: Tensor, distance: int) -> None:
        """To the rank that comes so many places later in group order, and receive from the one as many earlier."""
        _check(message)
        source = (self._group.rank - distance) % self._group.size
        with post(Phase.SHIFT, self._group.ranks, message.nbytes) as watched:
            works = direct.start_shift(message, self._received[source], self._group, distance)
        self._pending[source], self._sent = Pending(works, watched=watched), [*self._sent, message]

    def wait(self, source: int) -> Tensor:
        """What a rank, by its place in the group, has sent."""
        self._pending[source].wait()
        return self._received[source]


class PartsExchanged(Arriving):
    """A part of every rank's tensor for each rank, stacked along the first dimension; under way. `x`: [group.size,
    ...], contiguous, a part for each rank. `group`: of two ranks or more."""

    def __init__(self, x: Tensor, group: Group) -> None:
        _check(x)
        self._parts, self._result = x, torch.empty_like(x)
        with post(Phase.ALL_TO_ALL, group.ranks, x.nbytes) as watched:
            if _by_messages(x, group):
                self._pending = Pending(*direct.start_all_to_all(self._result, x, group), watched)
            else:
                work = dist.all_to_all_single(self._result, x, group=group.handle, async_op=True)
                self._pending = Pending([work], watched=watched)


class RowsExchanged(Arriving):
    """Rows of every rank's tensor for each rank, as many as there are; under way. `x`: [rows, ...], contiguous, those
    for the first rank first. `group`: of two ranks or more."""

    def __init__(self, x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> None:
        _check(x)
        self._sent, self._result = x, x.new_empty(sum(receive), *x.shape[1:])
        with post(Phase.ALL_TO_ALL, group.ranks, 0) as watched:  # ranks send different numbers of bytes
            work = dist.all_to_all_single(self._result, x, list(receive), list(send), group=group.handle, async_op=True)
            self._pending = Pending([work], watched=watched)


class Shift(Arriving):
    """A tensor of every rank on its way to the next one in group order, from the last to the first; under way. `x`:
    contiguous; of one shape on every rank. Nothing is written to it before `wait`. `group`: of two ranks or more."""

    def __init__(self, x: Tensor, group: Group) -> None:
        _check(x)
        self._sent: Tensor | None = x
        self._result = torch.empty_like(x)
        with post(Phase.SHIFT, group.ranks, x.nbytes) as watched:
            self._pending = Pending(direct.start_shift(x, self._result, group), watched=watched)

    def wait(self) -> Tensor:
        """What the rank before this one has sent. What this one sent is let go."""
        result, self._sent = super().wait(), None
        return result


def _by_messages(whole: Tensor, group: Group) -> bool:
    """Whether messages between the ranks are faster than the backend's collective: they are on gloo."""
    return whole.device.type == "cpu" and dist.get_backend(group.handle) != "fake"


def start_all_gather(whole: Tensor, shard: Tensor, group: Group) -> Pending:
    """Begin to fill the flat tensor `whole` with the ranks' flat shards, in group order; a shard may lie in `whole`."""
    if group.size == 1:
        if whole.data_ptr() != shard.data_ptr():
            whole.copy_(shard)
        return Pending()
    _check(whole, shard)
    with post(Phase.ALL_GATHER, group.ranks, whole.nbytes) as watched:
        if _by_messages(whole, group):
            return Pending(*direct.start_all_gather(whole, shard, group), watched)
        return Pending([all_gather_flat(whole, shard, group=group.handle, async_op=True)], watched=watched)


def start_reduce_scatter(shard: Tensor, whole: Tensor, group: Group) -> Pending:
    """Begin to sum the flat `whole` and keep this rank's part in `shard`, which may be that part of `whole`."""
    if group.size == 1:
        if shard.data_ptr() != whole.data_ptr():
            shard.copy_(whole)
        return Pending()
    _check(whole, shard)
    with post(Phase.REDUCE_SCATTER, group.ranks, whole.nbytes) as watched:
        if _by_messages(whole, group):
            return Pending(*direct.start_reduce_scatter(shard, whole, group), watched)
        work = reduce_scatter_flat(shard, whole, op=dist.ReduceOp.SUM, group=group.handle, async_op=True)
        return Pending([work], watched=watched)


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """Stack the ranks' tensors of equal shape along a new first dimension. Returns [group.size, *tensor.shape]."""
    if group.size == 1:
        return tensor.unsqueeze(0)
    if torch.compiler.is_compiling():
        return ShardsGathered(tensor, group).wait()
    gathered = tensor.new_empty((group.size, *tensor.shape))
    with post(Phase.ALL_GATHER, group.ranks, gathered.nbytes):
        all_gather_flat(gathered.view(-1), tensor.contiguous().view(-1), group=group.handle)
    return gathered


def all_gather_objects(value: Any, group: Group) -> list[Any]:
    """One small Python value from every rank, in group order; for launch time and saves, never for the step."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    with post(Phase.GATHER_OBJECTS, group.ranks, 0):
        backend = dist.get_backend(group.handle)
        if backend == "fake":  # of the other ranks nothing is known: they are like this one
            return [value] * group.size
        if backend == "gloo":
            gathered = [direct.gather_objects(value, group)]
            dist.broadcast_object_list(gathered, group.ranks[0], group=group.handle)
            return gathered[0]
        dist.all_gather_object(values, value, group=group.handle)
    return values


@contextlib.contextmanager
def all_or_none(group: Group, device: torch.device) -> Iterator[None]:
    """Fail on every rank of the group where the body fails on one, such as for want of memory. For what a rank prepares
    by itself before a collective, where the others would wait for it. The body communicates nothing. Waits for the
    device: for saves, never for the step. Raises Exception with what the body raised, on the rank where it did;
    PeerFailed on the ranks where the body succeeded, when it failed elsewhere."""
    failed = torch.zeros((), device=device)  # made before the body, which may leave no memory for it
    try:
        yield
    except Exception:
        all_reduce_(failed.fill_(1.0), group, "max")
        raise
    if all_reduce_(failed, group, "max").item():
        raise PeerFailed("another rank failed before a collective")


def why_no_shared_memory(group: Group) -> str:
    """Why the ranks of a group cannot read each other's memory, by what torch says; empty if they can. They call this
    together."""
    try:
        _symmetric.enable_symm_mem_for_group(group.name)
        _symmetric.get_symm_mem_workspace(group.name, min_size=1)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def barrier(group: Group) -> None:
    """Wait until every rank of the group is here."""
    if group.size > 1:
        with post(Phase.BARRIER, group.ranks, 0):
            dist.barrier(group=group.handle)


class _Copy(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, in_place: bool) -> Tensor:
        ctx.group, ctx.in_place = group, in_place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Sum(grad, ctx.group).wait() if ctx.in_place else all_reduced(grad, ctx.group), None, None


class _Reduce(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, in_place: bool) -> Tensor:
        if torch.compiler.is_compiling():  # the compiler finds out itself whether a copy is needed
            return all_reduced(x, group)
        if not in_place or x._is_view() or not x.is_contiguous():
            return all_reduced(x, group)
        ctx.mark_dirty(x)
        return all_reduce_(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def copy_to_group(x: Tensor, group: Group, *, in_place: bool = False) -> Tensor:
    """Enter a tensor-parallel region: identity forward, gradients summed over the group backward. `x`: the same on
    every rank. `in_place`: the gradient may be overwritten, which saves a copy: the operators that read the result make
    a new tensor for it, and give that to nobody else."""
    return x if group.size == 1 else _Copy.apply(x, group, in_place)


def reduce_from_group(x: Tensor, group: Group, *, in_place: bool = False) -> Tensor:
    """Leave a tensor-parallel region: partial results summed forward, identity backward. `in_place`: x may be
    overwritten, which saves a copy, if it is contiguous, no view, and read by nobody again."""
    return x if group.size == 1 else _Reduce.apply(x, group, in_place)
