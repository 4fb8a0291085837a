"""The section of low-rank adapters, LoRA (Hu et al. 2021, arXiv 2106.09685): which linear layers get them, and what
they do not go together with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from megacore.config.fields import Flag, Range, Section
from megacore.config.messages import did_you_mean, one_of
from megacore.config.problem import Change, Problem
from megacore.config.rules import Rule, Settings, rows


@dataclass(frozen=True)
class Target:
    """A linear layer of a block, as users of PEFT name it.

    Attributes:
        path: the end of its global name.
        part: which of the stacked projections of that layer it is; None: the whole layer.
    """

    path: str
    part: int | None = None


_QKV = "attention.qkv"
_ATTENTION = {"q_proj": Target(_QKV, 0), "k_proj": Target(_QKV, 1), "v_proj": Target(_QKV, 2)}
_LATENT = {
    "q_proj": Target("attention.query"),
    "q_a_proj": Target("attention.query_down"),
    "q_b_proj": Target("attention.query_up"),
    "kv_a_proj_with_mqa": Target("attention.key_value_down"),
    "kv_b_proj": Target("attention.key_value"),
}
_OUTPUT = {"o_proj": Target("attention.output")}
_MLP = {"gate_proj": Target("mlp.gate"), "up_proj": Target("mlp.up"), "down_proj": Target("mlp.down")}
FUSED_QKV = "qkv_proj"
"""The target that gives queries, keys and values one adapter together."""
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("query_key_value", "c_attn", "Wqkv", "linear_qkv"), FUSED_QKV),
        **dict.fromkeys(("out_proj", "linear_proj"), "o_proj"),
        **dict.fromkeys(("fc1", "c_fc", "dense_h_to_4h"), "up_proj"),
        **dict.fromkeys(("fc2", "dense_4h_to_h", "linear_fc2"), "down_proj"),
    }
)
"""Names of layers in some families of models, and in Megatron-LM."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """LoRA: training of low-rank adapters beside frozen weights."""

    lora_rank: Annotated[int | None, Range(1), Flag(example=16)] = None
    """Trains adapters of this rank beside the weights of --pretrained-checkpoint or --init-from-hf, which stay as they
    are (docs/guides/fine-tune.md). Checkpoints have the adapters only. Default: all weights are trained."""
    lora_alpha: Annotated[float | None, Range(above=0)] = None
    """Scale of the adapters: what they add is multiplied by this / rank. Default: the rank."""
    lora_dropout: Annotated[float, Range(0, below=1)] = 0.0
    """Share of the adapters' inputs that is set to zero in training."""
    lora_dora: bool = False
    """Learns lengths of rows too (DoRA)."""
    lora_targets: Annotated[str | None, Flag(metavar="NAME[,NAME]")] = None
    """Linear layers of blocks that get adapters, such as q_proj,v_proj. qkv_proj: one adapter for queries, keys and
    values. Default: all, but for experts."""

    @property
    def lora_scale(self) -> float:
        """What the adapters' outputs are multiplied by."""
        assert self.lora_rank is not None
        return 1.0 if self.lora_alpha is None else self.lora_alpha / self.lora_rank


def known_targets(model: Any, *, has_experts: bool) -> dict[str, Target]:
    """The targets that a model has.

    Args:
        model: has the fields of its section.
        has_experts: whether blocks have experts, which get no adapters.
    """
    targets = dict(_ATTENTION)
    if model.multi_latent_attention:
        absent = ("q_proj",) if model.q_lora_rank is not None else ("q_a_proj", "q_b_proj")
        targets = {name: target for name, target in _LATENT.items() if name not in absent}
    targets |= _OUTPUT
    if model.attention_output_gate:
        targets["g_proj"] = Target("attention.gate")
    if not has_experts:
        targets |= {name: target for name, target in _MLP.items() if name != "gate_proj" or model.gated}
    return targets if model.multi_latent_attention else {**targets, FUSED_QKV: Target(_QKV)}


def chosen_targets(text: str | None, known: Mapping[str, Target]) -> list[str]:
    """The targets of --lora-rank targets, or by default all.

    Args:
        text: its value.
        known: those that the model has.
    """
    if text is None:
        return [name for name in known if name != FUSED_QKV]
    return list(dict.fromkeys(ALIASES.get(word.strip(), word.strip()) for word in text.split(",")))


def adapted_parts(lora: LoraConfig, model: Any) -> dict[str, list[int]]:
    """The linear layers of a block that have adapters, by the end of their names; of those that stack several
    projections, the numbers of these that have one each.

    Args:
        lora: with a rank.
        model: resolved.
    """
    known, parts = known_targets(model, has_experts=model.experts is not None), dict[str, list[int]]()
    for target in (known[name] for name in chosen_targets(lora.lora_targets, known)):
        parts.setdefault(target.path, []).extend([] if target.part is None else [target.part])
    return {path: sorted(stacked) for path, stacked in parts.items()}


def adapter_parameters(lora: LoraConfig, model: Any, tp: int) -> int:
    """Parameters of a block's adapters that a rank of tensor parallelism holds; arguments as for `adapted_parts`."""
    h, heads, rank = model.hidden_size, model.num_attention_heads, lora.lora_rank or 0
    q, kv = model.q_lora_rank, model.kv_lora_rank
    sizes = {  # inputs, outputs, and by what the ranks divide each
        _QKV: (h, (heads + 2 * model.query_groups) * model.head_size, 1, tp),
        "attention.query": (h, heads * model.head_size, 1, tp),
        "attention.query_down": (h, q, 1, 1),
        "attention.query_up": (q, heads * model.head_size, 1, tp),
        "attention.key_value_down": (h, kv + model.qk_rope_head_dim, 1, 1),
        "attention.key_value": (kv, heads * (model.qk_nope_head_dim + model.v_head_dim), 1, tp),
        "attention.gate": (h, heads * model.head_size, 1, tp),
        "attention.output": (heads * model.value_size, h, tp, 1),
        **dict.fromkeys(("mlp.gate", "mlp.up"), (h, model.inner_size, 1, tp)),
        "mlp.down": (model.inner_size, h, tp, 1),
    }
    total = 0
    for path, parts in adapted_parts(lora, model).items():
        inputs, outputs, by_inputs, by_outputs = sizes[path]
        total += rank * (max(len(parts), 1) * inputs // by_inputs + outputs // by_outputs)
        total += lora.lora_dora * outputs // by_outputs
    return total


def _targets(c: Settings) -> Iterator[str]:
    if c.lora_rank is None:
        return
    known = known_targets(c, has_experts=c.num_experts is not None)
    chosen = chosen_targets(c.lora_targets, known)
    good = [name for name in chosen if name in known]
    fused = [name for name in chosen if name in _ATTENTION] if FUSED_QKV in chosen else []
    ways = [Change(f"use --lora-rank targets={','.join(good)}", {"lora_targets": ",".join(good)})] if good else []
    if unknown := [name for name in chosen if name not in known]:
        why = "experts have no adapters" if c.num_experts is not None and set(unknown) <= _MLP.keys() else (
            f"this model has {one_of(list(known))}{did_you_mean(unknown[0], list(known))}"
        )  # fmt: skip
        yield Problem(f"--lora-rank targets={','.join(unknown)}: {why}", *ways, c.out("lora_targets"))
    elif fused:
        rest = [name for name in chosen if name != FUSED_QKV]
        yield Problem(
            f"--lora-rank targets={FUSED_QKV} is one adapter for queries, keys and values, and {','.join(fused)} are "
            "others",
            Change(f"use --lora-rank targets={','.join(rest)}", {"lora_targets": ",".join(rest)}),
            c.out("lora_targets"),
        )


LORA_RULES: Sequence[Rule] = (*rows("lora"), _targets)
