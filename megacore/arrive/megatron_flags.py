"""Every flag of Megatron-LM that is not megacore's: translated, ignored, or refused with what to use instead.

megatron.toml lists them, and docs/guides/coming-from-megatron.md shows its tables. Megatron-LM flags with the same
meaning are names and aliases of fields, and not listed there. megatron_model.py and megatron_training.py have the
functions that rows name.
"""

from __future__ import annotations

from collections.abc import Mapping

from megacore.arrive.megatron_model import MODEL
from megacore.arrive.megatron_training import TRAINING
from megacore.arrive.tables import accepted_flags, computed_flags, read_tables, refused_flags
from megacore.arrive.translation import ForeignFlag

TABLES = read_tables("megatron.toml")
"""The file itself."""
FOREIGN: Mapping[str, ForeignFlag] = accepted_flags(TABLES, {**MODEL, **TRAINING})
"""The flags that are accepted and translated."""
LISTS: Mapping[str, ForeignFlag] = computed_flags(TABLES["computed_lists"], MODEL)
"""Flags of megacore that Megatron-LM also gives a list in brackets, which is translated."""
REPLACED: Mapping[str, str] = refused_flags(TABLES["replaced"])
"""Flags that have another name here, or that megacore does not need."""
NOT_YET: Mapping[str, str] = refused_flags(TABLES["not_yet"])
"""Flags of features that megacore does not have, and what leaving them out changes or what comes nearest."""
SYNONYMS: Mapping[str, Mapping[str, str]] = TABLES["synonyms"]
"""Names of values in Megatron-LM and Megatron-DeepSpeed, by field."""
ELSEWHERE: Mapping[str, Mapping[str, str]] = TABLES["elsewhere"]
"""Values in Megatron-LM that have no counterpart, by field, and the reason or what comes nearest."""


def advice(flag: str) -> str | None:
    """What a refused flag of Megatron-LM is, and what to use instead; None for any other flag."""
    if flag in REPLACED:
        return f"a Megatron-LM flag: {REPLACED[flag]}"
    if flag in NOT_YET:
        return f"a Megatron-LM flag that megacore does not support: {NOT_YET[flag]}"
    return None
