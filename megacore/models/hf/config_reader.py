"""Reads a config.json field by field, so that every field of it is accounted for.

A field is copied, or must have one of a few values, or is known to change nothing. Any other is unknown: it may change
the model, and who reads the file decides what to do (`Family.describe`). All problems are collected: a user sees them
at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megacore.config import ExpertsConfig, ModelConfig
from megacore.config.fields import field_infos
from megacore.config.messages import one_of

_MISSING = object()

# Fields that any family's file may have and that do not change what the model computes.
_WITHOUT_EFFECT = """
    _name_or_path architectures model_type transformers_version dtype torch_dtype use_cache _attn_implementation
    _attn_implementation_autoset _commit_hash name_or_path attn_implementation bos_token_id eos_token_id
    pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id id2label label2id
    num_labels _num_labels problem_type finetuning_task task_specific_params prefix language output_attentions
    output_hidden_states
    return_dict return_dict_in_generate output_scores torchscript use_bfloat16 chunk_size_feed_forward
    tokenizer_class classifier_dropout gradient_checkpointing pretraining_tp forced_bos_token_id forced_eos_token_id
    suppress_tokens begin_suppress_tokens bad_words_ids temperature top_k top_p typical_p num_beams num_beam_groups
    num_return_sequences diversity_penalty max_length min_length do_sample early_stopping repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size exponential_decay_length_penalty
    remove_invalid_values max_sequence_length is_llama_config transformers.js_config initializer_factor
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
# Names of fields that concern training alone (dropout), or another program that wrote the file.
_WITHOUT_EFFECT_PATTERN = re.compile(r"unsloth_.*|(.*_)?(dropout|pdrop|dropout_prob|dropout_p)")
# Fields that change nothing with these values; with another one they are unknown.
_OFF: Mapping[str, tuple[Any, ...]] = {"use_mrope": (False, None), "rope_interleaved": (False, None)}
# Fields that any family's file may have, with the only values that mean what megacore computes.
PLAIN_ONLY: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "auto_map": (None, {}),  # code of its own
}
_WAYS_OUT: Mapping[str, str] = {
    "auto_map": "; if transformers has the model without this code, use --ignore-config-field auto_map",
}


class ConfigReader:
    """One config.json, and what is wrong with it.

    Args:
        values: the parsed file.
        where: its path, for messages.

    Attributes:
        problems: what megacore cannot represent.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.problems: list[str] = []
        self._values = values
        self._seen: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A field as it stands, the default where it is missing; the caller judges it."""
        self._seen.add(name)
        return self._values.get(name, default)

    def has(self, name: str) -> bool:
        """Whether the file has the field."""
        return name in self._values

    def copied(self, ours: str, names: Sequence[str], default: Any) -> Any:
        """The value of a field that ModelConfig or ExpertsConfig has too, which must be of its type.

        Args:
            ours: that field.
            names: what the file may call it; where it has several, they must agree.
            default: what transformers takes where the file has none.
        """
        info = (field_infos(ModelConfig) | field_infos(ExpertsConfig))[ours]
        given = [(name, self._values[name]) for name in names if name in self._values]
        self._seen.update(names)
        if not given:
            return default
        name, value = given[0]
        if any(other != value for _, other in given[1:]):
            self.problem(name, f"is {value!r}, but {given[1][0]} is {given[1][1]!r}")
        if value is None and info.optional:
            return None
        kinds = (int, float) if info.kind is float else (info.kind,)
        if type(value) not in kinds:
            self.problem(name, f"is {_shown(value)}, not {_KINDS[info.kind]}")
            return default
        return info.kind(value)

    def only(self, name: str, allowed: Sequence[Any], default: Any = _MISSING, *, way_out: str = "") -> None:
        """Refuse a field whose value is not among those that mean what megacore computes.

        Args:
            name: the field.
            allowed: the values; equal of value and type.
            default: what transformers takes where the file has none; without one a missing field is fine.
            way_out: the end of the message: what the user can do.
        """
        value = self.get(name, default)
        if value is not _MISSING and not any(type(value) is type(one) and value == one for one in allowed):
            known = one_of([_shown(one) for one in allowed])
            self.problem(name, f"is {_shown(value)}, but megacore has only {known}{way_out}")

    def problem(self, name: str, text: str) -> None:
        """Note what is wrong with a field."""
        self.problems.append(f"{self.where}: {name} {text}")

    def activation(self, name: str, known: Mapping[str, str], default: str) -> str:
        """Megacore's name of an activation.

        Args:
            name: the field.
            known: transformers' names -> megacore's.
            default: what transformers takes where the file has none.
        """
        value = self.get(name, default)
        if not isinstance(value, str) or value not in known:
            self.problem(name, f"is {_shown(value)}, but megacore has only {one_of([_shown(one) for one in known])}")
            value = default
        return known[value]

    def finish(self, ignored: frozenset[str]) -> tuple[str, ...]:
        """Account for every field that nobody has asked for, and return those that nothing is known of.

        Args:
            ignored: fields of the family that do not change what the model computes.
        """
        for name, allowed in PLAIN_ONLY.items():
            if name in self._values and name not in self._seen:
                self.only(name, allowed, way_out=_WAYS_OUT.get(name, ""))
        left = self._values.keys() - self._seen - WITHOUT_EFFECT - ignored - self._off()
        return tuple(sorted(name for name in left if not _WITHOUT_EFFECT_PATTERN.fullmatch(name)))

    def _off(self) -> set[str]:
        return {name for name, off in _OFF.items() if self._values.get(name) in off}


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
