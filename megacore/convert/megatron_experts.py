"""Mixtures of experts in Megatron core's checkpoints. A rank's experts are stored one by one
(`local_experts.0.linear_fc1.weight`, or `linear_fc1.weight0`), or as two matrices of all of them (`weight1`,
`weight2`); in the torch_dist format those of all ranks are one tensor (`experts.linear_fc1.weight`).

Legend: E experts of a rank, h hidden size, f inner width of an expert on a rank, g 2 for a gated activation, else 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from megacore.config import ExpertsConfig
from megacore.convert.megatron_rows import read_fields

_EXPERTS = r"(?P<before>.*\.mlp\.)experts\."
_ONE = re.compile(_EXPERTS + r"(?:local_experts\.(?P<n>\d+)\.linear_fc(?P<fc>[12])\.weight)")
_NUMBERED = re.compile(_EXPERTS + r"linear_fc(?P<fc>[12])\.weight(?P<n>\d+)")
_STACKED = re.compile(_EXPERTS + r"experts\.linear_fc(?P<fc>[12])\.weight")
_JOINED = re.compile(_EXPERTS + r"weight(?P<fc>[12])")
_OF_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


# ---- tensors ---------------------------------------------------------------------------------------------------------


def expert_matrices(chunk: Mapping[str, Tensor], first: int, held: int, hidden: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a rank's stage, every matrix of an expert apart as `...mlp.experts.N.linear_fcK.weight`, N counted
    from `first`. Raises ValueError where a tensor of several experts has a size that is no multiple of their number."""
    for name, tensor in chunk.items():
        if match := _ONE.fullmatch(name) or _NUMBERED.fullmatch(name):
            yield _name(match, first + int(match["n"])), tensor
        elif match := _STACKED.fullmatch(name):
            for number, matrix in enumerate(tensor.unbind()):
                yield _name(match, first + number), matrix
        elif match := _JOINED.fullmatch(name):
            if tensor.dim() != 2 or held < 1 or tensor.numel() % (held * hidden):
                raise ValueError(f"{name[:120]} is {tuple(tensor.shape)}, which {held} experts do not divide")
            # [h, E g f] holds what [E, h, g f] does, and [E f, h] what [E, f, h] does: both are transposed.
            shape = (held, hidden, -1) if match["fc"] == "1" else (held, -1, hidden)
            for number, matrix in enumerate(tensor.contiguous().view(shape)):
                yield _name(match, first + number), matrix.t()
        else:
            yield name, tensor


def _name(match: re.Match[str], number: int) -> str:
    return f"{match['before']}experts.{number}.linear_fc{match['fc']}.weight"


def is_of_expert(ours: str) -> bool:
    """Whether a tensor belongs to one expert, by the name that megatron.toml gives it."""
    return _OF_EXPERT.search(ours) is not None


def stacked_names(name: str, shape: tuple[int, ...]) -> list[str]:
    """The names in megatron.toml of the matrices that one of megacore's tensors stacks; of others its own name."""
    if ".mlp.experts." not in name:
        return [name]
    return [name.replace(".mlp.experts.", f".mlp.experts.{number}.") for number in range(shape[0])]


# ---- flags -----------------------------------------------------------------------------------------------------------


def experts_of(args: Mapping[str, Any], layers: Any, problems: list[str]) -> ExpertsConfig | None:
    """The experts of a checkpoint; None: it has none, or they cannot be represented. `problems`: what megacore cannot
    represent exactly is added here, by flag."""
    number = args.get("num_experts") or args.get("num_moe_experts")
    if not number or number == [1]:  # which Megatron-DeepSpeed writes for a dense model
        return None
    before = len(problems)
    balancing = args.get("moe_router_load_balancing_type")
    if "sinkhorn" in (balancing if isinstance(balancing, (list, tuple)) else [balancing]):
        problems.append("moe_router_load_balancing_type is 'sinkhorn', which megacore does not have")
    if args.get("add_bias_linear", True):
        problems.append("add_bias_linear is True, but experts have no biases in megacore")
    fields = _first_and_frequency(args, layers, problems)
    fields |= read_fields({**args, "num_experts": number}, ExpertsConfig, problems)
    if fields.get("moe_router_score_function") != "softmax":
        fields["moe_router_pre_softmax"] = False  # which has no effect then
    if len(problems) > before:
        return None
    experts = ExpertsConfig(**fields)
    problems += experts.problems()
    if len(problems) == before and experts.moe_router_num_groups is not None:
        chosen, groups = experts.moe_router_topk, experts.moe_router_group_topk or 1
        by_logits = experts.moe_router_score_function == "softmax" and not experts.moe_router_pre_softmax
        if by_logits and chosen // groups > 1:
            problems.append(
                f"moe_router_group_topk is {groups} of moe_router_topk {chosen} without moe_router_pre_softmax: groups "
                "are compared by sums of logits, and in megacore by sums of scores"
            )
    return experts if len(problems) == before else None


def _first_and_frequency(args: Mapping[str, Any], layers: Any, problems: list[str]) -> dict[str, Any]:
    """Which blocks have experts: every Nth, or those of a list."""
    pattern = args.get("moe_layer_freq", 1)
    if type(pattern) is int and pattern > 0:
        return {"moe_layer_freq": pattern}
    if isinstance(pattern, (list, tuple)) and len(pattern) == layers and all(type(one) is int for one in pattern):
        with_experts = [number for number, one in enumerate(pattern) if one]
        first, *others = with_experts or [0]
        frequency = others[0] - first if others else max(layers - first, 1)
        if with_experts == list(range(first, layers, frequency)):
            return {"moe_first_dense_layers": first, "moe_layer_freq": frequency}
    problems.append(
        f"moe_layer_freq is {str(pattern)[:40]!r}: megacore has experts in every Nth block from the first that has some"
    )
    return {}
