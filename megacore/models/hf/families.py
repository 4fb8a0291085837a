"""All families of families.toml, and the choice of one: by a config.json's model_type, or as the first that can
represent a model."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megacore.config import ResolvedModel
from megacore.config.bert import ResolvedBert
from megacore.config.messages import one_of
from megacore.errors import CheckpointError
from megacore.models.hf import bert, decoders, experts, kinds_of_layers, rope, rows
from megacore.models.hf.config_reader import TABLES
from megacore.models.hf.family import Family, TensorRule
from megacore.models.hf.row_orders import LAYOUTS
from megacore.models.hf.rows import Part, Row

_NEAR = 0.65  # similarity of names
_TABLE = "all families: docs/guides/conversion.md"
_PARTS: Mapping[str, Callable[..., Part]] = {
    "attention_table": decoders.AttentionTable,
    "attention_types": kinds_of_layers.AttentionTypes,
    "biases": rows.Biases,
    "decoder_of_falcon": decoders.DecoderOfFalcon,
    "equal": rows.Equal,
    "expert_blocks": experts.ExpertBlocks,
    "exact_sums_of_bloom": decoders.ExactSumsOfBloom,
    "global_rotation": bert.GlobalRotation,
    "greedy_groups_of_experts": experts.GreedyGroupsOfExperts,
    "groups_of_experts": experts.GroupsOfExperts,
    "heads_as_wide_as_hidden_size": experts.HeadsAsWideAsHiddenSize,
    "qwen_windows": kinds_of_layers.QwenWindows,
    "linear_layers": kinds_of_layers.LinearLayers,
    "mamba_layers": kinds_of_layers.MambaLayers,
    "latent_attention": experts.LatentAttention,
    "layers_without_positions": kinds_of_layers.LayersWithoutPositions,
    "one_key_for_all_heads": decoders.OneKeyForAllHeads,
    "original_context": rope.OriginalContext,
    "positions_after_padding": bert.PositionsAfterPadding,
    "rope": rope.Rope,
    "rope_of_ministral3": rope.RopeOfMinistral3,
    "ropes_of_gemma3": rope.RopesOfGemma3,
    "ropes_of_olmo3": rope.RopesOfOlmo3,
    "rotated_dimensions": rope.RotatedDimensions,
    "scaled_embeddings": decoders.ScaledEmbeddings,
    "window_pattern": kinds_of_layers.WindowPattern,
    "written": rows.Written,
}
_BERT_PARTS: Mapping[str, Callable[[], bert.BertPart]] = {"token_types": bert.TokenTypes, "modern": bert.GlobalBlocks}
_CONDITIONS: Mapping[str, Callable[[ResolvedModel], bool]] = {
    "untied": lambda config: config.untie_embeddings_and_output_weights,
    "two_norms": lambda config: config.parallel_residual and not config.shared_parallel_norm,
}


# ---- from the table to families --------------------------------------------------------------------------------------


def _with_bases(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table with the rows of those that it is like, in their order; its own replace those of the same name."""
    like = table.get("like", [])
    whole: dict[str, Any] = {}
    for name in [like] if isinstance(like, str) else like:
        _add(whole, _with_bases(TABLES["bases"].get(name) or TABLES["families"][name]))
    _add(whole, table)
    return whole


def _add(whole: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if not isinstance(value, dict):
            whole[key] = value
            continue
        there = whole.setdefault(key, {})
        for name, row in value.items():
            # A value alone is another default of the field that was there.
            there[name] = [there[name][0], row] if key == "same" and not isinstance(row, list) else row


def _row(ours: str, value: list[Any]) -> Row:
    *conversion, names = value[0].split()
    return Row(ours, tuple(names.split("|")), value[1] if len(value) > 1 else None, "".join(conversion))


def _rules(ours: str, theirs: str | Mapping[str, str], prefix: str) -> Iterator[TensorRule]:
    """The rule of a row, or those of weight and bias. `theirs`: words of the order and the names, or two of these."""
    usual, *other = [("", theirs)] if isinstance(theirs, str) else theirs.items()
    words, _, names = usual[1].rpartition(": ")
    is_transposed = "transposed" in words.split()
    order = words.replace("transposed", "").strip()
    for kind in ("weight", "bias") if ours.endswith("*") else ("",):
        yield TensorRule(
            ours=ours.replace("*", kind),
            theirs=_names(prefix + names.replace("*", kind)),
            layout=LAYOUTS[order] if order else None,
            transposed=is_transposed and kind != "bias",
            instead=_names(prefix + other[0][1].replace("*", kind)) if other else None,
            when=_CONDITIONS[other[0][0]] if other else None,
        )


def _names(pattern: str) -> tuple[str, ...]:
    """A name, or several where it has {q,k,v}."""
    parts = re.fullmatch(r"(.*)\{([^{}]+,[^{}]+)\}(.*)", pattern)
    return (pattern,) if parts is None else tuple(f"{parts[1]}{one}{parts[3]}" for one in parts[2].split(","))


def _family(model_type: str) -> Family:
    table = _with_bases(TABLES["families"][model_type])
    constants, computed = table.get("constants", {}), table.get("computed", {})
    same = {ours: row for ours, row in table["same"].items() if ours not in constants and ours not in computed}
    tensors = [(ours, theirs, "") for ours, theirs in table["tensors"].items()]
    tensors += [(f"blocks.{{i}}.{ours}", theirs, table["block"]) for ours, theirs in table["blocks"].items()]
    section = table.get("bert_section")
    return Family(
        model_type=model_type,
        architecture=table["class"],
        prefix=table["prefix"],
        same=tuple(_row(ours, row) for ours, row in same.items()),
        only=table.get("only", {}),
        if_given=table.get("if_given", {}),
        constants=constants,
        ignored=frozenset(table.get("ignored", "").split()),
        computed=tuple(
            _row(ours, value) if isinstance(value, list) else _PARTS[ours](**value) for ours, value in computed.items()
        ),
        rules={rule.ours: rule for row in tensors for rule in _rules(*row)},
        aliases=table.get("aliases", {}),
        buffers=tuple(table.get("buffers", ())),
        unread=tuple(table.get("unread", ())),
        ties=table["ties"],
        unused=table.get("unused", {}),
        block=table["block"],
        shared_by_prediction=table.get("shared_by_prediction", {}),
        bert_style=table.get("bert_style"),
        bert_section=None if section is None else _BERT_PARTS[section](),
        without_sentences=table.get("without_sentences"),
        other_names=tuple(table.get("other_names", ())),
    )


# The order in which a family is looked for where a model has no config.json.
FAMILIES: dict[str, Family] = {model_type: _family(model_type) for model_type in TABLES["families"]}


def family_of(values: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json. Raises CheckpointError where its model_type or architecture is none of
    megacore's."""
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(f"{where}: model_type is {str(name)[:80]!r}, which megacore does not have; {_near(name)}")
    family = FAMILIES[name]
    architectures = values.get("architectures")
    if architectures not in (None, [], *([one] for one in family.architectures)):
        raise CheckpointError(
            f"{where}: architectures is {json.dumps(architectures)[:80]}: of model_type {name} megacore reads "
            f"{one_of([json.dumps([one]) for one in family.architectures])}"
        )
    return family


def describe_model(config: ResolvedModel, bert: ResolvedBert | None = None) -> tuple[Family, dict[str, Any]]:
    """A family that computes what a model does, and the model's config.json in it. Raises CheckpointError where no
    family represents the model exactly."""
    for family in FAMILIES.values():
        values = family.from_model(config, bert)
        if values is not None:
            return family, values
    raise CheckpointError(
        "no family of transformers' models that megacore has computes what this one does: it cannot be exported; "
        f"{_TABLE}"
    )


def _near(name: object) -> str:
    """The families whose names are nearest, which are other models, and where all are."""
    near = difflib.get_close_matches(str(name)[:80].lower(), FAMILIES, n=2, cutoff=_NEAR)
    return f"related ones that it has: {' and '.join(near)}; {_TABLE}" if near else _TABLE
