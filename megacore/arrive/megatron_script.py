"""What holds for a command line as a whole that is a script of Megatron-LM: defaults, and values that others change. A
script is told by the flags that Megatron-LM does not start without, and by one of its names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megacore.arrive.deepspeed import DEEPSPEED_FLAGS, LAUNCHER
from megacore.arrive.megatron import FOREIGN, TABLES
from megacore.config.bert import BertConfig
from megacore.config.checkpoint import AUTO
from megacore.config.experts import ExpertsConfig
from megacore.config.fields import field_infos
from megacore.config.given import Given
from megacore.config.schema import Config
from megacore.config.spelling import flag, flag_and_value
from megacore.remote import is_url

_SCRIPT = TABLES["script"]
NAMES = frozenset(_SCRIPT["names"].split())
"""Aliases that are Megatron-LM's names."""
REQUIRED = frozenset(_SCRIPT["required"].split())
"""Fields that Megatron-LM does not start without. With one of its names they make a command line a script of its."""
DEFAULTS: Mapping[str, Any] = _SCRIPT["defaults"]
"""What Megatron-LM does where a script leaves these out, by megacore's field; megacore's own defaults differ."""
_FIRST_LOSS_SCALE = 2.0**32
_UNREAD_BESIDE = frozenset({
    "rotary_base", "rotary_percent",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
})  # fmt: skip
"""Fields that Megatron-LM passes over where the model does not use them."""
_NULL_TOKENIZER = "--tokenizer-type NullTokenizer"
_BALANCE, _COEFFICIENT = "moe_router_load_balancing_type", "moe_aux_loss_coeff"


def is_script(flags: Given) -> bool:
    """Whether a command line is a script of Megatron-LM."""
    return flags.values.keys() >= REQUIRED and bool(names_of(flags))


def names_of(flags: Given) -> list[str]:
    """The flags of a command line that are Megatron-LM's."""
    theirs = NAMES | FOREIGN.keys() | DEEPSPEED_FLAGS.keys()
    return [name for name in flags.names if name in theirs and name not in LAUNCHER]


def defaults(flags: Given, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The defaults of Megatron-LM, where the command line is one of its scripts."""
    if not is_script(flags) or given.keys() & {"preset", "init_from_hf", "bert_style"}:
        return {}
    more: dict[str, Any] = {}
    if given.get("disable_bias_linear"):  # its fused GELU, which is the tanh form, adds a bias
        more["activation"] = "gelu-exact"
    if "--fp16" in flags.names and "loss_scale" not in given:
        more["initial_loss_scale"] = _FIRST_LOSS_SCALE
    return {**DEFAULTS, **more}


def adjust(flags: Given) -> list[str]:
    """Changes the values that mean something else beside others in Megatron-LM; returns notes. `flags`: the command
    line, before flags are translated. It receives what is wrong with it."""
    if names_of(flags):
        _leave_out_idle(flags)
    notes = [*_load(flags), *_optimizer(flags), *_balance(flags), *_vocabulary(flags)]
    if is_script(flags):
        flags.problems.extend(_contradictions(flags))
    return notes


def _leave_out_idle(flags: Given) -> None:
    """Leaves out values that Megatron-LM does not read beside others."""
    values, scaling = flags.values, ("rope_mscale", "rope_mscale_all_dim")
    scales = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    is_unscaled = "--rotary-scaling-factor" not in flags.names and "rope_scaling" not in values
    idle: Sequence[tuple[object, Iterable[str], str]] = (
        (values.get("num_experts") in (0, 1), field_infos(ExpertsConfig), "a model without experts"),
        (values.get("multi_latent_attention"), ["kv_channels"], "with --multi-latent-attention"),
        (
            values.get("moe_router_score_function") == "sigmoid",
            ["moe_router_pre_softmax"],
            "with --moe-router-score-function sigmoid",
        ),
        (values.get("rope_mscale_all_dim") == 0, ["rope_mscale_all_dim"], "as without it"),
        ("--fp16" not in flags.names and "precision" not in values, scales, "without --fp16"),
        (is_unscaled, scaling, "without --rotary-scaling-factor"),
    )
    for is_idle, names, why in idle:
        _leave_out(flags, names if is_idle else (), why)


def leave_out_unread(flags: Given, config: Config) -> None:
    """Leaves out values of a command line with Megatron-LM's names, once translated, that the model and the schedule do
    not use."""
    if not names_of(flags):
        return
    for name, cause in config.model.idle_fields.items():
        if name in _UNREAD_BESIDE:
            state = getattr(config.model, cause)
            _leave_out(flags, [name], f"with {flag_and_value(cause, state)}" if state else f"without {flag(cause)}")
    if config.experts.num_experts is None:
        _leave_out(flags, ("etp", *field_infos(ExpertsConfig)), "a model without experts")
    if config.optimizer.lr_warmup_iters == 0 and config.optimizer.lr_decay_style != "1cycle":
        _leave_out(flags, ["lr_warmup_init"], "without a warm-up")


def note_order(flags: Given, config: Config) -> None:
    """Adds a note to a script whose samples come in another order than in Megatron-LM."""
    data = config.data
    if not is_script(flags) or data.mock_data or isinstance(config, BertConfig) or "sample_order" in flags.values:
        return
    if (data.sample_order, data.packing) == ("megacore", "concat"):
        flags.notes.append("samples come in megacore's order: add --sample-order megatron for that of Megatron-LM")


def _leave_out(flags: Given, names: Iterable[str], why: str) -> None:
    for name in names:
        if name in flags.values:
            source = flag_and_value(name, flags.values.pop(name))
            flags.idle.setdefault("Megatron-LM", []).append(f"{source} ({why})")


def _contradictions(flags: Given) -> list[str]:
    """What a script relies on that megacore does otherwise."""
    values, found = flags.values, list[str]()
    groups, heads = values.get("num_query_groups"), values.get("num_attention_heads")
    if groups not in (None, heads) and "--group-query-attention" not in flags.names:
        found.append(
            f"--num-query-groups {groups} has no effect in Megatron-LM without --group-query-attention: add that for "
            f"{groups} key and value heads, or leave --num-query-groups out"
        )
    if values.get(_COEFFICIENT) and _BALANCE not in values and (values.get("micro_batch_size") or 1) > 1:
        found.append(_of_microbatches(f"--moe-aux-loss-coeff {values[_COEFFICIENT]:g}", values))
    if values.get("optimizer") == "muon" and values.get("tp", 1) != 1 and "--muon-tp-mode" not in flags.names:
        found.append(
            "--optimizer muon of a Megatron-LM script orthogonalizes the part of each --tp rank (--muon-tp-mode "
            "blockwise), and here whole matrices: use --muon-tp-mode distributed if that is meant"
        )
    return found


def _of_microbatches(given: str, values: Mapping[str, Any]) -> str:
    return (
        f"{given} balances experts within each microbatch in Megatron-LM, and --micro-batch-size "
        f"{values.get('micro_batch_size', 1)} is several sequences: use --micro-batch-size 1, or "
        "--moe-router-load-balancing-type seq_aux_loss or global_aux_loss"
    )


def _balance(flags: Given) -> list[str]:
    """Takes Megatron-LM's loss that balances experts within each microbatch for that of each sequence, where a
    microbatch is one sequence; returns a note."""
    values, kind = flags.values, flags.values.get(_BALANCE)
    if kind == "none" or (kind == "aux_loss" and not values.get(_COEFFICIENT)):
        why = "no such loss" if kind == "none" else "without --moe-aux-loss-coeff"
        _leave_out(flags, (_BALANCE, _COEFFICIENT), why)
        return []
    if kind != "aux_loss":
        return []
    if values.get("micro_batch_size", 1) != 1:
        flags.problems.append(_of_microbatches(f"--{_BALANCE.replace('_', '-')} aux_loss", values))
        flags.unread.add(_BALANCE)
        return []
    values[_BALANCE] = "seq_aux_loss"
    return [
        "--moe-router-load-balancing-type aux_loss is seq_aux_loss with --micro-batch-size 1, as a microbatch is one "
        "sequence"
    ]


def _optimizer(flags: Given) -> list[str]:
    """Megatron-LM's Adam decouples the weight decay, as AdamW does here; returns a note."""
    if flags.values.get("optimizer") != "adam" or not is_script(flags):
        return []
    flags.values["optimizer"] = "adamw"
    return ["--optimizer adam of a Megatron-LM script decouples the weight decay: --optimizer adamw here"]


def _vocabulary(flags: Given) -> list[str]:
    """Adds the token that ends a document to the vocabulary of a NullTokenizer, as Megatron-LM does, but for versions
    with a flag for its id; returns a note."""
    size = flags.values.get("vocab_size")
    others = [setting for setting in flags.foreign if setting.source != _NULL_TOKENIZER]
    if len(others) == len(flags.foreign) or "--null-tokenizer-eod-id" in flags.names or not isinstance(size, int):
        return []
    flags.foreign, flags.values["vocab_size"] = others, size + 1
    return [
        f"{_NULL_TOKENIZER} adds a token that ends a document, {size}, to --vocab-size {size}: --vocab-size {size + 1} "
        "here"
    ]


def _load(flags: Given) -> list[str]:
    """Lets a script of Megatron-LM that loads from where it saves start without a checkpoint; returns a note."""
    load, save = flags.values.get("load"), flags.values.get("save") or flags.values.get("output_dir")
    if not (load and save and "--save" in flags.names and _is_same_place(load, save)):
        return []
    if "--exit-on-missing-checkpoint" in flags.names:
        return []
    flags.values["load"] = AUTO
    return [
        f"--load {load} is the directory of --save, so that the run starts from its newest checkpoint, and from the "
        f"beginning if there is none (--load {AUTO})"
    ]


def _is_same_place(one: str, other: str) -> bool:
    if is_url(one) or is_url(other):
        return one.rstrip("/") == other.rstrip("/")
    return os.path.abspath(one) == os.path.abspath(other)
