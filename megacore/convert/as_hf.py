"""Weights of other trainers as a directory of transformers, from where conversion goes on, with its proof by logits.
`--like DIR` names one that describes the model. Names are transformers' or those of torchtitan's Llama, whose rotary
embedding turns neighbouring pairs of rows, where transformers' turns the halves of a head."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint.tensor_file import NAMES, read_tensor
from megacore.checkpoint.tensor_header import read_header
from megacore.convert.checkpoint_tensors import write_shards
from megacore.convert.dcp_files import open_dcp, write_dcp
from megacore.convert.hf_directory import CONFIG, GENERATION_CONFIG, TOKENIZER_FILES, inside, read_config
from megacore.convert.hf_experts import Read, Source, experts_apart, experts_stacked
from megacore.errors import CheckpointError

_WEIGHTS = "model.safetensors"
_MOST = 1 << 62

# torchtitan's Llama -> transformers'.
_TITAN = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_TITAN_BLOCK = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_NOT_WEIGHTS = ("optimizer.", "optim.", "lr_scheduler", "train_state", "dataloader")
_CONSTANTS = ("freqs_cis", "rotary_emb.inv_freq")


def write_hf(target: Path, tensors: Source, like: Path, where: str) -> None:
    """Write a directory of transformers, which does not exist yet, from `tensors` by the names of transformers or of
    torchtitan's Llama, with or without a prefix. `like`: has the model's config.json and tokenizer. Raises
    CheckpointError where it has no config.json, or the names fit no model."""
    config = read_config(like)
    target.mkdir()
    for name in (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES):
        if (like / name).is_file():
            shutil.copyfile(inside(like, name), target / name)
    named = _named_as_hf(tensors, config, where)
    types = {name: (dtype, shape) for name, (dtype, shape, _) in named.items()}
    if strange := [name for name, (dtype, _) in types.items() if dtype not in NAMES]:
        raise CheckpointError(
            f"{where}: {strange[0][:120]} is of {types[strange[0]][0]}, which megacore does not read: "
            "save the weights in bf16, fp16 or fp32"
        )
    write_shards(target, "model", types, ((name, read()) for name, (_, _, read) in named.items()), most_bytes=_MOST)


def read_dcp(path: Path) -> Source:
    """The weights of a checkpoint of torch.distributed.checkpoint; what else it holds is left out."""
    return {
        name: (stored.dtype, stored.shape, stored.read)
        for name, stored in open_dcp(path).items()
        if not name.startswith(_NOT_WEIGHTS)
    }


def _named_as_hf(tensors: Source, config: Mapping[str, Any], where: str) -> Source:
    kept = {name: value for name, value in tensors.items() if not name.endswith(_CONSTANTS)}
    prefix = next((p for p in ("", "model.", "module.") if f"{p}tok_embeddings.weight" in kept), None)
    if prefix is None:
        return experts_apart(_without_prefix(kept), str(config.get("model_type")))
    named = {}
    for name, (dtype, shape, read) in kept.items():
        ours = _of_titan(name.removeprefix(prefix))
        if ours is None:
            raise CheckpointError(f"{where} has {name[:120]}, which torchtitan's Llama has not")
        if heads := _heads(ours, config):
            if type(heads) is not int or len(shape) != 2 or heads < 1 or shape[0] % (2 * heads):
                raise CheckpointError(
                    f"{where}: {name[:120]} of shape {list(shape)} does not divide into the {str(heads)[:20]} heads of "
                    f"{CONFIG} (num_attention_heads, num_key_value_heads)"
                )
            read = partial(_read_turned, read, heads)
        named[ours] = (dtype, shape, read)
    return named


def _without_prefix(tensors: Source) -> Source:
    """Names as transformers has them: without what wraps the model, such as `model.` twice."""
    for prefix in ("model.", "module.", "_forward_module.", "app.model."):
        rest = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        whole = len(rest) == len(tensors)
        if whole and any(name.startswith(("model.", "transformer.", "gpt_neox.", "bert.")) for name in rest):
            return rest
    return tensors


def _of_titan(name: str) -> str | None:
    if match := _LAYER.fullmatch(name):
        inner = _TITAN_BLOCK.get(match[2])
        return None if inner is None else f"model.layers.{match[1]}.{inner}"
    return _TITAN.get(name)


def _heads(name: str, config: Mapping[str, Any]) -> int | None:
    """Heads of a projection that the rotary embedding turns; None: it turns none of it."""
    heads = config.get("num_attention_heads")
    if name.endswith("q_proj.weight"):
        return heads
    return config.get("num_key_value_heads", heads) if name.endswith("k_proj.weight") else None


def _turned(value: Tensor, heads: int, *, to_halves: bool) -> Tensor:
    """A projection with the rows of each head in the other order: pairs (0, 1), (2, 3), ... or halves."""
    rows, width = value.shape
    pairs = rows // heads // 2
    inner = (pairs, 2) if to_halves else (2, pairs)
    return value.view(heads, *inner, width).transpose(1, 2).reshape(rows, width)


def _read_turned(read: Read, heads: int) -> Tensor:
    return _turned(read(), heads, to_halves=True)


def export_dcp(source: Path, target: Path, names: str) -> None:
    """Write the weights of a directory of transformers, in one file, as a checkpoint of torch.distributed.checkpoint.
    `names`: torchtitan, for a Llama, else CheckpointError; or hf, transformers' own."""
    config = read_config(source)
    if names == "torchtitan":
        _require_titan(config)
        tensors = dict(_titan_tensors(source, config))
    else:
        tensors = dict(experts_stacked(dict(_hf_tensors(source)), str(config.get("model_type"))))
    write_dcp(target, tensors)


def _require_titan(config: Mapping[str, Any]) -> None:
    """The files have no configuration, so that torchtitan would compute its Llama from any weights of these shapes.
    Raises CheckpointError where it would be another model than this one."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default")
    other = None if config.get("model_type") == "llama" else f"model_type {config.get('model_type')}"
    if other is None and kind not in ("default", "llama3"):
        other = f"rope_type {kind}"
    if other is not None:
        raise CheckpointError(
            f"torchtitan's Llama computes another model than this one, of {other}: use --dcp-names hf, which keeps "
            "the names of transformers"
        )


def _hf_tensors(source: Path) -> Iterator[tuple[str, Tensor]]:
    for name, stored in read_header(source / _WEIGHTS).items():
        yield name, read_tensor(stored)


def _titan_tensors(source: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    names = {theirs: name for name, theirs in {**_TITAN, **_TITAN_BLOCK}.items()}
    values = dict(_hf_tensors(source))
    if "lm_head.weight" not in values:  # tied
        values["lm_head.weight"] = values.get("model.embed_tokens.weight", torch.empty(0))
    for name, value in values.items():
        match = _LAYER.fullmatch(name.removeprefix("model."))
        titan = names.get(name if match is None else match[2])
        if titan is None:
            raise CheckpointError(
                f"torchtitan's Llama has no {name}: use --dcp-names hf, which keeps the names of transformers"
            )
        heads = _heads(name, config)
        turned = value if heads is None else _turned(value, heads, to_halves=False)
        yield (titan if match is None else f"layers.{match[1]}.{titan}"), turned
