"""All families, and the choice of one: by a config.json's model_type, or as the first that can represent a model."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from megacore.config import ResolvedModel
from megacore.config.bert import ResolvedBert
from megacore.config.messages import one_of
from megacore.errors import CheckpointError
from megacore.models.hf.bert import BERT, CAMEMBERT, ROBERTA, XLM_ROBERTA
from megacore.models.hf.bloom import BLOOM
from megacore.models.hf.cohere import COHERE, COHERE2
from megacore.models.hf.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megacore.models.hf.exaone import EXAONE4
from megacore.models.hf.falcon import FALCON
from megacore.models.hf.family import Family
from megacore.models.hf.gemma import GEMMA, GEMMA2, GEMMA3
from megacore.models.hf.glm import GLM, GLM4
from megacore.models.hf.gpt2 import GPT2, GPT_BIGCODE
from megacore.models.hf.gpt_neo import GPT_NEO
from megacore.models.hf.gptj import GPTJ
from megacore.models.hf.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from megacore.models.hf.llama_relatives import ARCEE, ERNIE, HELIUM, MINISTRAL3, NEMOTRON, SEED_OSS
from megacore.models.hf.llama_variants import GRANITE, OLMO, OLMO2, PHI3, SMOLLM3, STABLELM, STARCODER2
from megacore.models.hf.mixture import MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from megacore.models.hf.modernbert import MODERNBERT
from megacore.models.hf.mpt import MPT
from megacore.models.hf.neox import NEOX
from megacore.models.hf.olmo3 import OLMO3
from megacore.models.hf.opt import OPT
from megacore.models.hf.phi import PHI

_NEAR = 0.65  # similarity of names
_TABLE = "all families: docs/guides/conversion.md"
# The order in which a family is looked for where a model has no config.json.
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, NEOX, BLOOM, BERT, MODERNBERT),
        *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK_V2, DEEPSEEK_V3),
        *(GRANITE, SMOLLM3, OLMO, OLMO2, PHI3, STABLELM, STARCODER2, GPT_BIGCODE, MPT, GEMMA, GEMMA2, GEMMA3),
        *(OPT, FALCON, GPTJ, ROBERTA),
        *(PHI, GPT_NEO, OLMO3, EXAONE4, COHERE, COHERE2, GLM, GLM4),
        *(NEMOTRON, SEED_OSS, ERNIE, HELIUM, ARCEE, MINISTRAL3),
        *(XLM_ROBERTA, CAMEMBERT),
    )
}


def family_of(values: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json.

    Args:
        values: the parsed file.
        where: its path, for messages.

    Raises:
        CheckpointError: its model_type or architecture is none of megacore's.
    """
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
    """A family that computes what a model does, and the model's config.json in it.

    Raises:
        CheckpointError: no family represents the model exactly.
    """
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
