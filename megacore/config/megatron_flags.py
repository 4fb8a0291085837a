"""Every flag of Megatron-LM that is not megacore's: translated, ignored, or refused with what to use instead.

docs/guides/coming-from-megatron.md lists them. Megatron-LM flags with the same meaning are names and aliases of fields,
and not listed here. megatron_model.py and megatron_training.py have the translations, megatron_idle.py those that
change nothing, megatron_refused.py those that are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from megacore.config.megatron_idle import IDLE_LISTS, IDLE_SWITCHES, IDLE_VALUES
from megacore.config.megatron_model import MODEL
from megacore.config.megatron_refused import NOT_YET, REPLACED
from megacore.config.megatron_training import TRAINING
from megacore.config.megatron_values import ForeignFlag, idle

__all__ = ["FOREIGN", "NOT_YET", "REPLACED", "advice"]

FOREIGN: Mapping[str, ForeignFlag] = {
    **MODEL,
    **TRAINING,
    **{flag: idle(why, is_switch=True) for flag, why in IDLE_SWITCHES.items()},
    **{flag: idle(why) for flag, why in IDLE_VALUES.items()},
    **{flag: idle(why, is_list=True) for flag, why in IDLE_LISTS.items()},
}
"""The flags that are accepted and translated."""


def advice(flag: str) -> str | None:
    """What a refused flag of Megatron-LM is, and what to use instead; None for any other flag."""
    if flag in REPLACED:
        return f"a Megatron-LM flag: {REPLACED[flag]}"
    if flag in NOT_YET:
        return f"a Megatron-LM flag that megacore does not support: {NOT_YET[flag]}"
    return None
