"""Defects of mixtures of experts, which other trainers have had, planted like those of defects.py."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.config.dimensions import ranks_of_role
from megacore.config.reproducible import canonical_blocks
from megacore.layers import moe
from megacore.parallel.experts import Assignment
from megacore.parallel.mesh import Group
from megacore.train import expert_balance
from megacore.train.step import TrainStep
from megacore.verify.masks import replaced
from megacore.verify.planting import Defect, defect

_OF_EXPERTS = "expert_replicas"


def _losses_per_rank(steps: TrainStep, stack: ExitStack) -> None:
    """The losses of the routers are those of each rank, added up over ranks."""
    with_loss, ranks = moe.with_loss, _stage_ranks(steps.config)
    stack.enter_context(replaced(moe, "with_loss", lambda x, loss, scale: with_loss(x, loss, scale * ranks)))


def _gradients_times_ep(steps: TrainStep, stack: ExitStack) -> None:
    ep = steps.config.parallel.ep
    for parameter in steps.model.parameters.values():
        if parameter.spec.replica_role == _OF_EXPERTS:
            stack.callback(parameter.register_hook(lambda gradient: gradient * ep).remove)


def _norm_without_experts(steps: TrainStep, stack: ExitStack) -> None:
    counted = [local for local in steps.update._counted if local.spec.replica_role != _OF_EXPERTS]
    stack.enter_context(replaced(steps.update, "_counted", counted))


def _local_loads(steps: TrainStep, stack: ExitStack) -> None:
    def alone(counts: Tensor, group: Group, op: str = "sum") -> Tensor:
        return counts

    stack.enter_context(replaced(expert_balance, "all_reduce_", alone))


def _unsummed_weights(steps: TrainStep, stack: ExitStack) -> None:
    """The gradients of the weights of experts' outputs stay parts of a sum."""
    copy, chosen = moe.copy_to_group, steps.config.experts.moe_router_topk

    def unsummed(x: Tensor, group: Group, **options: Any) -> Tensor:
        return x if x.shape[-1] == chosen else copy(x, group, **options)

    stack.enter_context(replaced(moe, "copy_to_group", unsummed))


def _rows_out_of_order(steps: TrainStep, stack: ExitStack) -> None:
    """Results go back in the order in which experts have computed them."""
    assign = moe.assign

    def wrong(*arguments: Any, **options: Any) -> Assignment:
        found = assign(*arguments, **options)
        return dataclasses.replace(found, grouped=found.arrival, arrival=found.grouped)

    stack.enter_context(replaced(moe, "assign", wrong))


@torch.no_grad()
def _experts_of_first_rank(steps: TrainStep, stack: ExitStack) -> None:
    """A checkpoint gives back the experts of one rank only."""
    if steps.mesh.dispatch.rank:
        for local in steps.model.data_parallel.segments:
            if local.spec.replica_role == _OF_EXPERTS:
                local.master.zero_()
    steps.model.data_parallel.publish()


def _stage_ranks(config: ResolvedConfig) -> int:
    return ranks_of_role("loss", config.parallel) * config.parallel.tp


def _has_losses(config: ResolvedConfig) -> bool:
    experts = config.model.experts
    trained = experts is not None and (experts.moe_aux_loss_coeff or experts.moe_z_loss_coeff)
    return bool(trained) and _stage_ranks(config) > 1


def _has_ep(config: ResolvedConfig) -> bool:
    return config.model.experts is not None and config.parallel.ep > 1


def _has_order(config: ResolvedConfig) -> bool:
    return _has_ep(config) and not config.training.reproducible  # which keeps the rows as they arrive


def _has_norm(config: ResolvedConfig) -> bool:
    return config.model.experts is not None


def _has_loads(config: ResolvedConfig) -> bool:
    return config.model.experts is not None and ranks_of_role("loss", config.parallel) > 1


def _has_parts(config: ResolvedConfig) -> bool:
    split = config.parallel.expert_split > 1 and not config.parallel.sequence_parallel
    split = split and canonical_blocks(config) == 1  # which gives every rank the whole gradient
    return config.model.experts is not None and split


_EP = "--num-experts and --ep 2 or more"

EXPERT_DEFECTS: tuple[Defect, ...] = (
    defect(
        "router-losses-per-rank",
        "the losses of routers are multiplied by the number of ranks",
        _losses_per_rank,
        "gradient",
        needs="--moe-aux-loss-coeff or --moe-z-loss-coeff, and --dp, --cp or --tp 2 or more",
        possible=_has_losses,
    ),
    defect(
        "expert-gradients-times-ep",
        "gradients of experts are multiplied by --ep",
        _gradients_times_ep,
        "gradient",
        needs=_EP,
        possible=_has_ep,
    ),
    defect(
        "norm-without-experts",
        "the gradient norm leaves experts out",
        _norm_without_experts,
        "gradient norm",
        needs="--num-experts",
        possible=_has_norm,
    ),
    defect(
        "local-expert-loads",
        "each rank balances the experts by the tokens that it has",
        _local_loads,
        "expert load",
        needs="--num-experts and --dp or --cp 2 or more",
        possible=_has_loads,
    ),
    defect(
        "missing-router-sum",
        "the gradient that routers get through split experts is not summed over tensor-parallel ranks",
        _unsummed_weights,
        "gradient",
        needs="--num-experts and --tp 2 or more, without --sequence-parallel and --reproducible",
        possible=_has_parts,
    ),
    defect(
        "expert-row-order",
        "the results of experts return to other tokens",
        _rows_out_of_order,
        "output",
        needs=f"{_EP}, without --reproducible",
        possible=_has_order,
    ),
    defect(
        "experts-of-first-rank",
        "only the experts of the first rank are loaded from a checkpoint",
        _experts_of_first_rank,
        "loaded weight",
        needs=_EP,
        possible=_has_ep,
    ),
)
