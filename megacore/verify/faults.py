"""How the self-test's defects are made, at four seams of the trainer: its collectives, its products, what travels
between ranks and stages, and its optimizer. A function takes the steps of a layout and a public function, and returns
what takes its place. Functions that take the steps alone change what has been loaded."""

from __future__ import annotations

import inspect
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megacore.config.activations import ACTIVATIONS
from megacore.config.dimensions import ranks_of_role
from megacore.config.model import padded_rows
from megacore.layers.attention import SelfAttention
from megacore.ops.block_attention import NOTHING
from megacore.parallel import context
from megacore.parallel.collectives import Pending, all_reduce_, start_all_reduce_
from megacore.parallel.context import SequenceShards
from megacore.parallel.experts import Assignment
from megacore.parallel.mesh import Group, Mesh
from megacore.parallel.random import RandomStreams
from megacore.train.step import TrainStep
from megacore.zero.data_parallel import DataParallel
from megacore.zero.local_segments import LocalSegment

Function = Callable[..., Any]


def changed_line(steps: TrainStep | None, function: Any, *, old: str, new: str) -> Any:
    """A part of the function's source is another text."""
    function = inspect.unwrap(getattr(function, "fget", function))
    source, names = textwrap.dedent(inspect.getsource(function)), dict[str, Any]()
    if source.count(old) != 1:
        raise ValueError(f"{function.__qualname__} has {old!r} {source.count(old)} times, not once: plant it anew")
    exec("from __future__ import annotations\n" + source.replace(old, new), {**function.__globals__}, names)
    return names[function.__name__]


# ---- collectives


class _OwnShift:
    """Takes the place of a `Shift`: what this rank sends is what it gets."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self._x = x

    def wait(self) -> Tensor:
        return self._x


def _own_sum(x: Tensor, *group: Any) -> Tensor:
    return x


def _own_part(result: Tensor, *operands: Any) -> Pending:
    """Takes the place of a sum in place that is begun, or of a reduce-scatter: of a shard, the whole and a group."""
    *whole, group = operands
    for terms in whole:
        result.copy_(terms.view(group.size, -1)[group.rank])
    return Pending()


def own_term(steps: TrainStep, collective: Function) -> Function:
    """No rank gets anything from another."""
    if collective.__name__ == "Shift":
        return _OwnShift
    return _own_part if collective.__name__.startswith("start_") else _own_sum


def own_term_in_one_bucket(steps: TrainStep, collective: Function) -> Function:
    """Of the first bucket that is reduced, recognised by its size, this rank reads what it had."""
    sizes = list[int]()

    def early(*operands: Any) -> Any:
        *_, whole, group = operands
        if group.size > 1:
            sizes.append(whole.numel())
        return (_own_part if whole.numel() in sizes[:1] else collective)(*operands)

    return early


def scaled_by_ranks(steps: TrainStep, collective: Function, *, power: int) -> Function:
    """Sums come out too large by this power of the number of ranks; as means with -1."""

    def scaled(result: Tensor, *operands: Any) -> Pending:
        pending, factor = collective(result, *operands), float(operands[-1].size) ** power

        def finish() -> None:
            pending.wait()
            result.copy_((result.double() * factor).to(result.dtype))

        return Pending(then=finish)

    return scaled


def sum_over_samples(steps: TrainStep, collective: Function) -> Function:
    """Gradients are summed over ranks with other samples only."""

    def summed(*operands: Any) -> Pending:
        *_, whole, _ = operands
        start_all_reduce_(whole, steps.mesh.batch).wait()
        return _own_part(*operands)

    return summed


def own_term_inside(steps: TrainStep, collective: Function, *, function: str, innermost: bool = False) -> Function:
    """Nothing is summed over tensor-parallel ranks inside a function, whose Class.function ends so. `innermost`: only
    where no other forward or backward runs inside it, such as a forward that a backward computes again."""
    own, ranks = own_term(steps, collective), steps.mesh.layer.ranks

    def unsummed(*operands: Any) -> Any:
        group = next(operand for operand in operands if isinstance(operand, Group))
        codes = (frame.f_code for frame, _ in traceback.walk_stack(inspect.currentframe()))
        around = [code.co_qualname for code in codes if code.co_name in ("forward", "backward")]
        is_inside = any(name.endswith(function) for name in (around[:1] if innermost else around))
        return (own if group.ranks == ranks and is_inside else collective)(*operands)

    return unsummed


def stale_parameters(steps: TrainStep, function: Function) -> Function:
    """What was gathered first stays: on stage 3 it is not let go, on the others nothing is gathered after an update."""
    if function.__name__ == "release":
        return lambda bucket: None
    return function if steps.config.parallel.zero_stage == 3 else lambda whole, shard, group: Pending()


def unsummed_router_weights(steps: TrainStep, copy_to_group: Function) -> Function:
    """The gradients of the weights of experts' outputs stay parts of a sum."""
    chosen = steps.config.experts.moe_router_topk

    def copied(x: Tensor, group: Group, **options: Any) -> Tensor:
        return x if x.shape[-1] == chosen else copy_to_group(x, group, **options)

    return copied


# ---- products: what layers compute of what they have


def qkv_order(steps: TrainStep, forward: Function) -> Function:
    """The fused projection is read as all queries, all keys, all values, instead of group by group."""
    modules = [module for chunk in steps.model.chunks for module in chunk.modules()]
    attention_of = {module.qkv: module for module in modules if isinstance(module, SelfAttention)}

    def reordered(linear: Any, x: Tensor, **options: Any) -> Tensor:
        projected = forward(linear, x, **options)
        if (attention := attention_of.get(linear)) is None:
            return projected
        heads = projected.unflatten(-1, (-1, attention.head_size))
        groups, queries = attention.groups // attention.layer_group.size, attention.shared_by
        if groups < 2:
            return heads.flip(-2).flatten(-2)
        order = list[int]()
        for group in range(groups):
            order += range(group * queries, (group + 1) * queries)
            order += [groups * queries + group, groups * (queries + 1) + group]
        return heads[..., order, :].flatten(-2)

    return reordered


def gate_up_order(steps: TrainStep, functions: Mapping[str, Function]) -> Mapping[str, Function]:
    """Gate and up are halves of one matrix that was cut across both."""

    def of_halves(activate: Function) -> Function:
        def activated(gate: Tensor, up: Tensor) -> Tensor:
            (gate_low, gate_high), (up_low, up_high) = gate.chunk(2, -1), up.chunk(2, -1)
            activation: Tensor = activate(torch.cat([gate_low, up_low], -1), torch.cat([gate_high, up_high], -1))
            return activation

        return activated

    return {name: of_halves(of) if ACTIVATIONS[name].gated else of for name, of in functions.items()}


def skipped_keys(steps: TrainStep, context_attention: Function) -> Function:
    """A ring computes nothing with the keys and values that it gets last."""
    attend, shift = context.attend, context.Shift

    def without_the_last(query: Tensor, key: Tensor, value: Tensor, shards: SequenceShards, **how: Any) -> Tensor:
        arrived = list[Tensor]()

        class Counted(shift):  # type: ignore[misc, valid-type]
            def wait(self) -> Tensor:
                arrived.append(super().wait())
                return arrived[-1]

        def attended(*operands: Tensor, **where: Any) -> tuple[Tensor, Tensor]:
            out, logarithm = attend(*operands, **where)
            if len(arrived) < shards.group.size - 1:
                return out, logarithm
            return torch.zeros_like(out), torch.full_like(logarithm, NOTHING)

        with patch.object(context, "Shift", Counted), patch.object(context, "attend", attended):
            mixed: Tensor = context_attention(query, key, value, shards, **how)
            return mixed

    return without_the_last


def leaked_keys(steps: TrainStep, context_attention: Function) -> Function:
    """Queries see the keys of all ranks."""

    def of_all(query: Tensor, key: Tensor, value: Tensor, shards: SequenceShards, *, view: Any, **how: Any) -> Any:
        gathered = replace(shards, comm="allgather")  # a ring knows no other than causal attention
        return context_attention(query, key, value, gathered, view=replace(view, causal=False), **how)

    return of_all


def padding_in_softmax(steps: TrainStep, columns: property) -> property:
    """The loss reads all rows that a rank holds."""
    model, tp = steps.config.model, steps.config.parallel.tp
    rows = padded_rows(model.vocab_size, tp, model.make_vocab_size_divisible_by)
    return property(lambda share: rows)


def loss_times_cp(steps: TrainStep, loss: Function) -> Function:
    """Each rank counts its part of the sequence as often as there are ranks."""
    return lambda task, output, microbatch: steps.mesh.sequence.size * loss(task, output, microbatch)


def router_losses_times_ranks(steps: TrainStep, with_loss: Function) -> Function:
    """The losses of the routers are those of each rank, added up over ranks."""
    ranks = ranks_of_role("loss", steps.config.parallel) * steps.config.parallel.tp
    return lambda x, loss, scale: with_loss(x, loss, scale * ranks)


def rows_out_of_order(steps: TrainStep, assign: Function) -> Function:
    """Results go back in the order in which experts have computed them."""

    def wrong(*arguments: Any, **options: Any) -> Assignment:
        found: Assignment = assign(*arguments, **options)
        return replace(found, grouped=found.arrival, arrival=found.grouped)

    return wrong


# ---- transport: what ranks and stages hand on


def rank_order(steps: TrainStep, put_together: Function) -> Function:
    """What ranks hold is put together in the order of the ranks."""
    return lambda shards, pieces, dim: torch.cat(list(pieces), dim)


def microbatch_order(steps: TrainStep, compute_gradients: Function) -> Function:
    """The last stage takes the last microbatch first."""

    def in_reverse(of: TrainStep, microbatches: Sequence[Any]) -> None:
        compute_gradients(of, microbatches[::-1] if steps.model.runtime.holds_loss else microbatches)

    return in_reverse


def wrong_labels(steps: TrainStep, method: Function, *, field: str) -> Function:
    """The loss is that of a microbatch without a `loss_mask`, or with `labels` one position further. `method`: of a
    task; its last argument is a microbatch."""

    def of_changed(task: Any, *arguments: Any) -> Any:
        *others, microbatch = arguments
        values = getattr(microbatch, field)
        changed = torch.ones_like(values) if field == "loss_mask" else values.roll(1, dims=-1)
        return method(task, *others, replace(microbatch, **{field: changed}))

    return of_changed


def shared_stream(steps: TrainStep, key: Function) -> Function:
    """All shards draw what the first does."""
    return lambda streams, site, shard: key(streams, site, 0)


def stream_of_rank(steps: TrainStep, key: Function) -> Function:
    """Each rank draws from streams of its own."""

    def of_rank(streams: RandomStreams, site: str, shard: int) -> Any:
        return key(streams, f"{site}@{steps.mesh.world.rank}", shard)

    return of_rank


# ---- the optimizer: gradients once they are summed, their norm, and the state


def replicated_gradients(steps: TrainStep, function: Function) -> Function:
    """Gradients of parameters that all tensor-parallel ranks hold: with sequence parallelism, where ranks see parts,
    they are not summed; without, where each sees everything, they are."""
    if function.__name__ != "finish":
        return _own_sum
    if steps.config.parallel.sequence_parallel:
        return function
    is_replicated = attrgetter("spec.is_replicated")
    return _finished_with(function, is_replicated, lambda gradient: all_reduce_(gradient, steps.mesh.layer))


def expert_gradients_times_ep(steps: TrainStep, finish: Function) -> Function:
    """Each expert's gradient counts as often as there are ranks with other experts."""
    return _finished_with(finish, _is_of_expert, lambda gradient: gradient.mul_(steps.config.parallel.ep))


def _is_of_expert(local: LocalSegment) -> bool:
    return local.spec.replica_role == "expert_replicas"


def _finished_with(
    finish: Function, is_changed: Callable[[LocalSegment], bool], change: Callable[[Tensor], Tensor]
) -> Function:
    """Some summed gradients are changed in place."""

    def finished(data_parallel: DataParallel) -> None:
        finish(data_parallel)
        for local in filter(is_changed, data_parallel.segments):
            if (gradient := local.gradient) is not None:
                local.write_gradient(change(gradient))

    return finished


def norm_of_rank(steps: TrainStep, clip_factor: Function) -> Function:
    """Gradients are clipped by the norm of those that this rank updates."""

    def of_rank(norm: Tensor, limit: float) -> Any:
        found = [local.gradient for local in steps.model.data_parallel.segments]
        squares = [gradient.double().square().sum() for gradient in found if gradient is not None]
        return clip_factor(torch.stack(squares).sum().sqrt().cpu() if squares else norm, limit)

    return of_rank


def norm_of_others(steps: TrainStep, totals: Function, *, counts: str) -> Function:
    """The gradient norm counts all but `no experts`; `all copies` of what several ranks hold; what tensor-parallel
    ranks divide on the `first rank` only."""

    def of_others(counted: Sequence[LocalSegment], mesh: Mesh, **sums: Any) -> Any:
        others = {
            "no experts": [local for local in counted if not _is_of_expert(local)],
            "all copies": steps.model.data_parallel.segments,
            "first rank": [local for local in counted if local.spec.is_replicated or mesh.layer.is_first],
        }
        return totals(others[counts], mesh, **sums)

    return of_others


def flipped_bit(steps: TrainStep) -> None:
    """The lowest bit of a weight is another, on the first rank that holds some."""
    for local in steps.model.data_parallel.segments[:1] if steps.mesh.world.is_first else ():
        local.master.view(torch.int32)[:1] ^= 1


def flipped_moment(steps: TrainStep) -> None:
    """A bit of a moment is another, on the first rank that holds some; an update would round the lowest away."""
    optimizer = steps.update.optimizer
    for local in steps.model.data_parallel.segments[:1] if steps.mesh.world.is_first else ():
        for state in [local.state(optimizer, kind.name) for kind in optimizer.kinds if kind.per == "element"][:1]:
            if state is not None:
                state.view(torch.int32)[:1] ^= 1 << 20


def swapped_state(steps: TrainStep) -> None:
    """The optimizer's tensors are loaded into each other's place; a single one is lost."""
    optimizer = steps.update.optimizer
    names = [kind.name for kind in optimizer.kinds if kind.per == "element"]
    for local in steps.model.data_parallel.segments:
        states = [state for name in names if (state := local.state(optimizer, name)) is not None]
        if len(states) < 2:
            for state in states:
                state.zero_()
            continue
        first, second = states[0].clone(), states[1].clone()
        states[0].copy_(second)
        states[1].copy_(first.abs())  # a variance is not negative


@torch.no_grad()
def experts_of_first_rank(steps: TrainStep) -> None:
    """A checkpoint gives back the experts of one rank only."""
    if steps.mesh.dispatch.rank:
        for local in filter(_is_of_expert, steps.model.data_parallel.segments):
            local.master.zero_()
    steps.model.data_parallel.publish()
