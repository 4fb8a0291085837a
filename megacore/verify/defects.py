"""Defects of parallel training, planted at run time, for the self-test: a comparison that finds none proves nothing.

Each one is a mistake that has been made in some trainer. It is planted in the layout's run only, after the model is
built and loaded, by replacing functions of the product on every rank. docs/guides/verify.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.config.activations import ACTIVATIONS
from megacore.config.dimensions import ranks_of_role
from megacore.config.model import padded_rows
from megacore.config.reproducible import canonical_blocks
from megacore.layers.activations import ACTIVATION_FUNCTIONS
from megacore.layers.attention import SelfAttention
from megacore.ops import VocabularyShare
from megacore.optim import update
from megacore.parallel import collectives, sequence, tensor
from megacore.parallel.collectives import Pending
from megacore.parallel.mesh import Group
from megacore.parallel.random import RandomStreams
from megacore.train import step
from megacore.train.step import TrainStep
from megacore.verify import context_defects
from megacore.verify.expert_defects import EXPERT_DEFECTS
from megacore.verify.masks import replaced
from megacore.verify.planting import Defect, defect
from megacore.zero import bucket as buckets
from megacore.zero.bucket import Bucket

# ---- sums of gradients over data-parallel ranks


def _scaled_reduction(factor: Callable[[Group], float], steps: TrainStep, stack: ExitStack) -> None:
    """Reduced gradients are multiplied by a factor."""
    all_reduce, reduce_scatter = buckets.start_all_reduce_, buckets.start_reduce_scatter

    def then(pending: Pending, result: Tensor, group: Group) -> Pending:
        def finish() -> None:
            pending.wait()
            result.copy_((result.double() * factor(group)).to(result.dtype))

        return Pending(then=finish)

    def all_reduced(gradients: Tensor, group: Group) -> Pending:
        return then(all_reduce(gradients, group), gradients, group)

    def scattered(shard: Tensor, whole: Tensor, group: Group) -> Pending:
        return then(reduce_scatter(shard, whole, group), shard, group)

    stack.enter_context(replaced(buckets, "start_all_reduce_", all_reduced))
    stack.enter_context(replaced(buckets, "start_reduce_scatter", scattered))


def _no_reduction(steps: TrainStep, stack: ExitStack) -> None:
    stack.enter_context(replaced(buckets, "start_all_reduce_", lambda gradients, group: Pending()))
    stack.enter_context(replaced(buckets, "start_reduce_scatter", _own_share))


def _early_read(steps: TrainStep, stack: ExitStack) -> None:
    """One bucket's gradients are read before their reduction has ended."""
    bucket = next(b for b in steps.model.data_parallel.buckets if b.group.size > 1)
    reduce, finish = bucket.reduce, bucket.finish_reduction
    early: list[Tensor] = []

    def begin() -> None:
        finish_early()
        early[:] = [] if bucket._gradients is None else [bucket._gradients.clone()]
        reduce()

    def finish_early() -> None:
        if bucket._reducing is not None and early:
            pending, shard, _ = bucket._reducing
            pending.wait()
            shard.copy_(early[0] if bucket.options.stage == 0 else early[0][bucket._shard])
        finish()

    stack.enter_context(replaced(bucket, "reduce", begin))
    stack.enter_context(replaced(bucket, "finish_reduction", finish_early))


def _local_counts(steps: TrainStep, stack: ExitStack) -> None:
    stack.enter_context(replaced(step, "start_all_reduce_", lambda counts, group: Pending()))


def _stale_parameters(steps: TrainStep, stack: ExitStack) -> None:
    """Updated parameters of other ranks' shards are not gathered."""

    def publish(self: Bucket, *, written: bool = False) -> None:
        if self.master is not self._shard_params:
            self._shard_params.copy_(self.master)

    def release(self: Bucket) -> None:
        """Stage 3: parameters stay as they were first gathered."""

    name, stale = ("release", release) if steps.config.parallel.zero_stage == 3 else ("publish", publish)
    stack.enter_context(replaced(Bucket, name, stale))


# ---- tensor parallelism


class _Unsummed:
    """Takes the place of a sum over ranks, and is this rank's term."""

    def __init__(self, x: Tensor, group: Group, *, scattered: bool = False) -> None:
        self._term = x.chunk(group.size, 1)[group.rank].contiguous() if scattered else x.contiguous()

    def wait(self) -> Tensor:
        return self._term


def _own_share(shard: Tensor, whole: Tensor, group: Group) -> Pending:
    """Takes the place of a reduce-scatter."""
    shard.copy_(whole.view(group.size, -1)[group.rank])
    return Pending()


@contextmanager
def _without_tp_sums() -> Iterator[None]:
    with (
        replaced(tensor, "Sum", _Unsummed),
        replaced(sequence, "_WholeScatter", partial(_Unsummed, scattered=True)),
        replaced(sequence, "start_reduce_scatter", _own_share),
        replaced(tensor, "reduce_from_group", lambda x, group, in_place=False: x),
    ):
        yield


def _without_sums_in(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in which tensor-parallel ranks sum nothing."""

    def unsummed(*arguments: Any) -> Any:
        with _without_tp_sums():
            return function(*arguments)

    return unsummed


def _no_forward_sum(steps: TrainStep, stack: ExitStack) -> None:
    layer = tensor.RowParallelLinear
    stack.enter_context(replaced(layer, "forward", _without_sums_in(layer.forward)))


def _no_backward_sum(steps: TrainStep, stack: ExitStack) -> None:
    for operator in (tensor._Linears, tensor._LinearOfGatheredInput, sequence._Gather):
        backward = staticmethod(_without_sums_in(operator.backward))
        stack.enter_context(replaced(operator, "backward", backward))
    stack.enter_context(replaced(collectives._Copy, "backward", staticmethod(lambda ctx, grad: (grad, None, None))))


def _replicated_gradients(steps: TrainStep, stack: ExitStack) -> None:
    """Of parameters that all tensor-parallel ranks hold: not summed where ranks see parts, or summed where each sees
    everything."""
    if steps.config.parallel.sequence_parallel:
        stack.enter_context(replaced(steps.update, "_all_reduce_replicated_grads", lambda: None))
    else:
        stack.enter_context(replaced(steps.update, "_sequence_parallel", True))


def _tied_gradients(steps: TrainStep, stack: ExitStack) -> None:
    stack.enter_context(replaced(steps.update, "_all_reduce_tied_grads", lambda name, holders: None))


def _qkv_order(steps: TrainStep, stack: ExitStack) -> None:
    """The fused projection is read as all queries, all keys, all values, instead of group by group."""

    def reorder(module: SelfAttention, projected: Tensor) -> Tensor:
        heads = projected.unflatten(-1, (-1, module.head_size))
        groups, queries = module.groups // module.layer_group.size, module.shared_by
        if groups < 2:
            return heads.flip(-2).flatten(-2)
        order = [
            head
            for group in range(groups)
            for head in (
                *range(group * queries, (group + 1) * queries),
                groups * queries + group,
                groups * (queries + 1) + group,
            )
        ]
        return heads[..., order, :].flatten(-2)

    for chunk in steps.model.chunks:
        for module in chunk.modules():
            if isinstance(module, SelfAttention):
                hook = partial(reorder, module)
                handle = module.qkv.register_forward_hook(lambda _, inputs, output, hook=hook: hook(output))
                stack.callback(handle.remove)


def _gate_order(steps: TrainStep, stack: ExitStack) -> None:
    """Gate and up are halves of one matrix that was cut across both."""

    def of_halves(activate: Callable[..., Tensor], gate: Tensor, up: Tensor) -> Tensor:
        (gate_low, gate_high), (up_low, up_high) = gate.chunk(2, -1), up.chunk(2, -1)
        return activate(torch.cat([gate_low, up_low], -1), torch.cat([gate_high, up_high], -1))

    for name in [name for name, kind in ACTIVATIONS.items() if kind.gated]:
        activate = ACTIVATION_FUNCTIONS[name]
        ACTIVATION_FUNCTIONS[name] = partial(of_halves, activate)
        stack.callback(ACTIVATION_FUNCTIONS.__setitem__, name, activate)


# ---- pipeline parallelism


def _microbatch_order(steps: TrainStep, stack: ExitStack) -> None:
    compute = steps.compute_gradients

    def in_reverse(microbatches: Sequence[Any]) -> None:
        compute(list(reversed(microbatches)) if steps.mesh.pipeline.is_last else microbatches)

    stack.enter_context(replaced(steps, "compute_gradients", in_reverse))


# ---- the loss


def _changed_loss(change: Callable[[Any], Any], steps: TrainStep, stack: ExitStack) -> None:
    """The loss is that of a changed microbatch."""
    task = steps.task
    loss, last_inputs = task.loss, task.last_inputs
    stack.enter_context(replaced(task, "loss", lambda output, microbatch: loss(output, change(microbatch))))
    stack.enter_context(replaced(task, "last_inputs", lambda microbatch: last_inputs(change(microbatch))))


def _all_counted(microbatch: Any) -> Any:
    return replace(microbatch, loss_mask=torch.ones_like(microbatch.loss_mask))


def _shifted(microbatch: Any) -> Any:
    return replace(microbatch, labels=microbatch.labels.roll(1, dims=1))


def _vocabulary_padding(steps: TrainStep, stack: ExitStack) -> None:
    rows = _padded(steps.config) // steps.config.parallel.tp
    stack.enter_context(replaced(VocabularyShare, "columns", property(lambda share: rows)))


def _padded(config: ResolvedConfig) -> int:
    model, tp = config.model, config.parallel.tp
    return tp * padded_rows(model.vocab_size, tp, model.make_vocab_size_divisible_by)


# ---- random streams


def _shared_stream(steps: TrainStep, stack: ExitStack) -> None:
    key = RandomStreams.key
    stack.enter_context(replaced(RandomStreams, "key", lambda self, site, shard: key(self, site, 0)))


def _rank_streams(steps: TrainStep, stack: ExitStack) -> None:
    key, rank = RandomStreams.key, steps.mesh.world.rank
    stack.enter_context(replaced(RandomStreams, "key", lambda self, site, shard: key(self, f"{site}@{rank}", shard)))


# ---- the update


def _local_clipping(steps: TrainStep, stack: ExitStack) -> None:
    factor = update.clip_factor

    def of_rank(norm: Tensor, limit: float) -> Tensor:
        squares = [
            gradient.double().square().sum()
            for local in steps.model.data_parallel.segments
            if (gradient := local.gradient) is not None
        ]
        return factor(torch.stack(squares).sum().sqrt().cpu() if squares else norm, limit)

    stack.enter_context(replaced(update, "clip_factor", of_rank))


def _swapped_state(steps: TrainStep, stack: ExitStack) -> None:
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


# ---- the list


def _dp(config: ResolvedConfig) -> bool:
    return ranks_of_role("replicas", config.parallel) > 1


def _tp(config: ResolvedConfig) -> bool:
    return config.parallel.tp > 1


def _pp(config: ResolvedConfig) -> bool:
    return config.parallel.pp > 1


def _any(config: ResolvedConfig) -> bool:
    return True


def _cp(config: ResolvedConfig) -> bool:
    return config.parallel.cp > 1


def _has_ring(config: ResolvedConfig) -> bool:
    return _cp(config) and config.context_comm == "ring"


def _has_order(config: ResolvedConfig) -> bool:
    return _cp(config) and config.context_comm != "ring"


def _has_later_keys(config: ResolvedConfig) -> bool:
    """Whether causality, and nothing else, hides keys of other ranks."""
    hides_more = config.model.window_size is not None or "documents" in config.beside_hidden_states
    return _cp(config) and config.context_comm != "ulysses" and config.is_causal and not hides_more


def _has_stale(config: ResolvedConfig) -> bool:
    return _dp(config) and config.parallel.zero_stage > 0


def _drops(config: ResolvedConfig) -> bool:
    return max(config.model.hidden_dropout, config.model.attention_dropout) > 0 and not config.training.compile


def _has_shared_stream(config: ResolvedConfig) -> bool:
    by_rank = config.model.attention_dropout or (config.parallel.sequence_parallel and config.model.hidden_dropout)
    return _tp(config) and _drops(config) and bool(by_rank) and canonical_blocks(config) == 1


def _has_local_norm(config: ResolvedConfig) -> bool:
    return config.optimizer.clip_grad > 0 and (_tp(config) or _pp(config) or _has_stale(config))


def _has_tied(config: ResolvedConfig) -> bool:
    bert = getattr(config, "bert", None)
    return _pp(config) and (bert is not None or not config.model.untie_embeddings_and_output_weights)


def _has_padding(config: ResolvedConfig) -> bool:
    return _padded(config) > config.model.vocab_size and (config.training.loss_chunks or 1) == 1


def _has_gated(config: ResolvedConfig) -> bool:
    experts = config.model.experts
    blocks = range(config.model.num_layers)
    has_mlp = experts is None or experts.moe_shared_expert_size is not None or not all(map(experts.holds, blocks))
    return config.model.gated and has_mlp


def _has_state(config: ResolvedConfig) -> bool:
    return any(kind.per == "element" for kind in config.optimizer_settings.state)


_TP, _PP, _CP = "--tp 2 or more", "--pp 2 or more", "--cp 2 or more"
_DP = "--dp times --cp of 2 or more"

DEFECTS: tuple[Defect, ...] = (
    defect(
        "missing-dp-sum", "gradients are not summed over replicas", _no_reduction, "gradient", needs=_DP, possible=_dp
    ),
    defect(
        "doubled-dp-sum",
        "gradients are summed over replicas twice",
        partial(_scaled_reduction, lambda group: float(group.size)),
        "gradient",
        needs=_DP,
        possible=_dp,
    ),
    defect(
        "averaged-gradients",
        "gradients are averaged over replicas, although the loss is divided by the global count",
        partial(_scaled_reduction, lambda group: 1.0 / group.size),
        "gradient",
        needs=_DP,
        possible=_dp,
    ),
    defect(
        "local-token-counts",
        "each replica divides its loss by its token count",
        _local_counts,
        "token count",
        needs=_DP,
        possible=_dp,
    ),
    defect(
        "early-gradient-read",
        "one bucket's gradients are read before their overlapped reduction ends",
        _early_read,
        "gradient",
        needs=_DP,
        possible=_dp,
    ),
    defect(
        "missing-cp-sum",
        "gradients are summed over the ranks with other samples, and not over those with other positions",
        context_defects.gradients_without_sequence_sum,
        "gradient",
        needs=_CP,
        possible=_cp,
    ),
    defect(
        "loss-times-cp",
        "each rank multiplies its loss by the number of ranks that divide a sequence",
        context_defects.loss_times_ranks,
        "loss",
        needs=_CP,
        possible=_cp,
    ),
    defect(
        "rank-order",
        "positions of other ranks are put together in the order of the ranks",
        context_defects.rank_order,
        "output",
        needs=f"{_CP} and --cp-comm allgather or ulysses",
        possible=_has_order,
    ),
    defect(
        "first-keys-again",
        "each step of a ring computes with the keys and values of the first",
        context_defects.first_keys_again,
        "output",
        needs=f"{_CP} and --cp-comm ring",
        possible=_has_ring,
    ),
    defect(
        "skipped-keys",
        "a ring leaves out the keys and values that it gets last",
        context_defects.skipped_keys,
        "output",
        needs=f"{_CP} and --cp-comm ring",
        possible=_has_ring,
    ),
    defect(
        "leaked-keys",
        "queries see keys of other ranks that come later",
        context_defects.leaked_keys,
        "output",
        needs=f"{_CP} with --cp-comm ring or allgather, causal attention without windows and documents",
        possible=_has_later_keys,
    ),
    defect(
        "stale-parameters",
        "parameters updated by other ranks are not gathered again",
        _stale_parameters,
        "output",
        needs=f"--zero-stage 1 or more and {_DP}",
        possible=_has_stale,
    ),
    defect(
        "missing-tp-forward-sum",
        "row-parallel layers do not sum their outputs",
        _no_forward_sum,
        "output",
        needs=_TP,
        possible=_tp,
    ),
    defect(
        "missing-tp-backward-sum",
        "column-parallel layers do not sum the gradient of their input",
        _no_backward_sum,
        "gradient",
        needs=_TP,
        possible=_tp,
    ),
    defect(
        "replicated-gradients",
        "gradients of norms are not summed with sequence parallelism, or are summed without it",
        _replicated_gradients,
        "gradient",
        needs=_TP,
        possible=_tp,
    ),
    defect(
        "missing-tied-sum",
        "gradients of tied embeddings are not summed over the first and last stage",
        _tied_gradients,
        "gradient",
        needs=f"{_PP} and tied embeddings",
        possible=_has_tied,
    ),
    defect("qkv-order", "queries, keys and values are cut apart in the wrong order", _qkv_order, "output"),
    defect(
        "gate-up-order",
        "gate and up projections are cut apart in the wrong order",
        _gate_order,
        "output",
        needs="a gated activation outside experts",
        possible=_has_gated,
    ),
    defect(
        "microbatch-order",
        "the last stage takes the microbatches in the wrong order",
        _microbatch_order,
        "output",
        "loss",
        needs=_PP,
        possible=_pp,
    ),
    defect(
        "vocabulary-padding-in-loss",
        "padding rows of the vocabulary enter the softmax",
        _vocabulary_padding,
        "loss",
        needs="a padded vocabulary and --loss-chunks 1",
        possible=_has_padding,
    ),
    defect(
        "masked-tokens-in-loss",
        "tokens that the loss mask excludes are counted",
        partial(_changed_loss, _all_counted),
        "loss",
    ),
    defect("label-shift", "labels are shifted by one position", partial(_changed_loss, _shifted), "loss"),
    defect(
        "shared-dropout-stream",
        "tensor-parallel ranks that need different dropout masks draw the same",
        _shared_stream,
        "dropout mask",
        needs=f"{_TP} and dropout that the ranks split",
        possible=_has_shared_stream,
    ),
    defect(
        "rank-dropout-stream",
        "ranks that need the same dropout mask draw different ones",
        _rank_streams,
        "dropout mask",
        needs="two ranks or more and dropout",
        possible=lambda config: config.parallel.ranks > 1 and _drops(config),
    ),
    defect(
        "per-rank-clipping",
        "each rank clips by the norm of its gradients",
        _local_clipping,
        "moment",
        "weight change",
        needs=f"--clip-grad and {_TP}, {_PP} or ZeRO",
        possible=_has_local_norm,
    ),
    defect(
        "swapped-optimizer-state",
        "tensors of the optimizer are loaded in each other's place",
        _swapped_state,
        "loaded moment",
        needs="an optimizer with state",
        possible=_has_state,
    ),
    *EXPERT_DEFECTS,
)
BY_NAME = {each.name: each for each in DEFECTS}
