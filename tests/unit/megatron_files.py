"""Checkpoints of known tensors as Megatron-LM and Megatron core write them, and what tests ask of their conversion.

The layouts are written out here from the descriptions of the formats, apart from what megacore reads and writes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megacore.config import ModelConfig, ResolvedModel
from megacore.convert.checkpoint_tensors import CheckpointTensors
from megacore.convert.plan import buffer_shapes, model_shapes
from tests.e2e.launching import words
from tools.convert_checkpoint import main as convert

VOCAB, PADDED, HIDDEN, HEADS, LAYERS, POSITIONS = 21, 24, 16, 4, 4, 12
ARGS = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": 4 * HIDDEN,
    "kv_channels": HIDDEN // HEADS, "max_position_embeddings": POSITIONS, "layernorm_epsilon": 1e-5,
    "padded_vocab_size": PADDED,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "max_position_embeddings": POSITIONS,
    "vocab_size": VOCAB, "hidden_dropout": 0.1, "attention_dropout": 0.1,  # Megatron-LM's defaults
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "ffn_hidden_size": 24, "normalization": "RMSNorm", "activation": "swiglu", "position_embedding_type": "rope",
    "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
GPT = ModelConfig(**SIZES).resolve(seq_length=POSITIONS)


def llama(**fields: Any) -> ModelConfig:
    """A small Llama, with further fields or others."""
    return ModelConfig(**{**SIZES, **LLAMA, **fields})


LLAMA_ARGS = {
    "ffn_hidden_size": 24, "swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False,
    "position_embedding_type": "rope", "rotary_base": 10_000, "untie_embeddings_and_output_weights": True,
    "vocab_size": VOCAB,
}  # fmt: skip
"""What Megatron-LM's args say of `llama()`, beside `ARGS`."""
GROUPED: dict[str, Any] = {"num_query_groups": 2, "rotary_base": 500_000.0}
"""Fields of `llama` with grouped queries and Llama 3's base."""
GROUPED_ARGS = {**LLAMA_ARGS, "group_query_attention": True, "num_query_groups": 2, "rotary_base": 500_000}


def tensors_of(config: ResolvedModel) -> dict[str, Tensor]:
    """Known tensors of a model, buffers included."""
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in (model_shapes(config) | buffer_shapes(config)).items()}


# ---- writing as Megatron-LM does -------------------------------------------------------------------------------------


def rows(value: Tensor, tp: int, rank: int) -> Tensor:
    size = value.shape[0] // tp
    return value[rank * size : (rank + 1) * size].clone()


def columns(value: Tensor, tp: int, rank: int) -> Tensor:
    size = value.shape[1] // tp
    return value[:, rank * size : (rank + 1) * size].clone()


def old_order(value: Tensor, version: float, heads: int) -> Tensor:
    """[head][q, k, v][d] as it stood in earlier versions, written out one row at a time."""
    d = value.shape[0] // heads // 3
    result = torch.empty_like(value)
    for head in range(heads):
        for kind in range(3):
            for i in range(d):
                there = (kind * heads + head) * d + i if version == 0 else (head * d + i) * 3 + kind
                result[there] = value[(head * 3 + kind) * d + i]
    return result


def padded(value: Tensor) -> Tensor:
    return torch.cat([value, torch.full((PADDED - VOCAB, HIDDEN), 7.0)])


def gated(values: dict[str, Tensor], mlp: str, tp: int, rank: int, kind: str = "weight") -> Tensor:
    """A rank's rows of both halves of a gated MLP, the gate's first."""
    return torch.cat([rows(values[f"{mlp}.{one}.{kind}"], tp, rank) for one in ("gate", "up")])


def save(
    path: Path, rank: int, stage: int | None, state: dict[str, Any] | object, *, expert_rank: int | None = None
) -> None:
    """The file of a rank; without a number of the stage or of the expert-parallel rank its name has none."""
    numbers = [f"{number:03d}" for number in (stage, expert_rank) if number is not None]
    folder = path / "_".join([f"mp_rank_{rank:02d}", *numbers])
    folder.mkdir(parents=True)
    torch.save(state, folder / "model_optim_rng.pt")


def save_common(path: Path, **args: Any) -> None:
    """What the torch_dist format has beside the tensors."""
    made = {"args": argparse.Namespace(**ARGS | args), "iteration": 7, "checkpoint_version": 3.0}
    torch.save(made, path / "common.pt")


def state(model: dict[str, Any], version: float | None, **args: Any) -> dict[str, Any]:
    everything = {**ARGS, **args}
    made = {"args": argparse.Namespace(**everything), "iteration": 7, "optimizer": {"state": {0: torch.ones(2)}}}
    made["rng_state"] = [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.zeros(8, dtype=torch.uint8)}]
    return made | ({} if version is None else {"checkpoint_version": version}) | model


# Our name in a block -> Megatron-LM's, and which part of its weight and bias a tensor-parallel rank has.
LEGACY = {
    "attention_norm": ("input_layernorm", "whole"),
    "mlp_norm": ("post_attention_layernorm", "whole"),
    "attention.output": ("self_attention.dense", "columns"),
    "mlp.down": ("mlp.dense_4h_to_h", "columns"),
    "attention.qkv": ("self_attention.query_key_value", "rows"),
    "mlp.up": ("mlp.dense_h_to_4h", "rows"),
}


def legacy_blocks(values: dict[str, Tensor], numbers: range, tp: int, rank: int, version: float) -> dict[str, Tensor]:
    found = {}
    for local, i in enumerate(numbers):
        for (ours, (theirs, part)), kind in itertools.product(LEGACY.items(), ("weight", "bias")):
            value = values[f"blocks.{i}.{ours}.{kind}"]
            value = rows(value, tp, rank) if part == "rows" else value
            value = columns(value, tp, rank) if part == "columns" and kind == "weight" else value
            if ours == "attention.qkv" and version < 2:
                value = old_order(value, version, HEADS // tp)
            found[f"layers.{local}.{theirs}.{kind}"] = value
    return found


def write_legacy(
    path: Path, values: dict[str, Tensor], *, tp: int = 1, pp: int = 1, version: float = 3.0, chunks: int = 1
) -> Path:
    """The nested tables of Megatron-LM's own GPT, with any number of virtual stages."""
    each = LAYERS // (pp * chunks)
    for stage in range(pp):
        for rank in range(tp):
            models = []
            for chunk in range(chunks):
                first = (chunk * pp + stage) * each
                encoder = legacy_blocks(values, range(first, first + each), tp, rank, version)
                model: dict[str, Any] = {"language_model": {"encoder": encoder}}
                embedding = rows(padded(values["embedding.tokens.weight"]), tp, rank)
                if stage == 0 and chunk == 0:
                    model["language_model"]["embedding"] = {
                        "word_embeddings": {"weight": embedding},
                        "position_embeddings": {"weight": values["embedding.positions"]},
                    }
                if stage == pp - 1 and chunk == chunks - 1:
                    encoder["final_layernorm.weight"] = values["head.norm.weight"]
                    encoder["final_layernorm.bias"] = values["head.norm.bias"]
                    if pp > 1:
                        model["word_embeddings_for_head"] = {"weight": embedding}
                models.append(model)
            table = {"model": models[0]} if chunks == 1 else {f"model{i}": model for i, model in enumerate(models)}
            sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
            save(path, rank, stage if pp > 1 else None, state(table, None if version == 0 else version, **sizes))
    return path


def core_attention(values: dict[str, Tensor], i: int, tp: int, rank: int) -> dict[str, Tensor]:
    """The attention of a block in Megatron core's names, with the norm that is fused into its first projection."""
    ours = f"blocks.{i}"
    made = {
        "self_attention.linear_qkv.layer_norm_weight": values[f"{ours}.attention_norm.weight"],
        "self_attention.linear_qkv.weight": rows(values[f"{ours}.attention.qkv.weight"], tp, rank),
        "self_attention.linear_proj.weight": columns(values[f"{ours}.attention.output.weight"], tp, rank),
    }
    if f"{ours}.attention.qkv.bias" in values:
        made["self_attention.linear_qkv.bias"] = rows(values[f"{ours}.attention.qkv.bias"], tp, rank)
        made["self_attention.linear_proj.bias"] = values[f"{ours}.attention.output.bias"]
    return made


def core_mlp(values: dict[str, Tensor], i: int, tp: int, rank: int) -> dict[str, Tensor]:
    """The gated MLP of a block in Megatron core's names; every rank stacks its rows of the two halves."""
    ours = f"blocks.{i}"
    made = {
        "mlp.linear_fc1.layer_norm_weight": values[f"{ours}.mlp_norm.weight"],
        "mlp.linear_fc1.weight": gated(values, f"{ours}.mlp", tp, rank),
        "mlp.linear_fc2.weight": columns(values[f"{ours}.mlp.down.weight"], tp, rank),
    }
    if f"{ours}.mlp.up.bias" in values:
        made["mlp.linear_fc1.bias"] = gated(values, f"{ours}.mlp", tp, rank, "bias")
        made["mlp.linear_fc2.bias"] = values[f"{ours}.mlp.down.bias"]
    return made


def core_embedding(values: dict[str, Tensor], tp: int = 1, rank: int = 0) -> dict[str, Tensor]:
    """What the first stage has besides blocks."""
    return {"embedding.word_embeddings.weight": rows(padded(values["embedding.tokens.weight"]), tp, rank)}


def core_head(values: dict[str, Tensor], tp: int = 1, rank: int = 0) -> dict[str, Tensor]:
    """What the last stage has besides blocks."""
    return {
        "output_layer.weight": rows(padded(values["head.weight"]), tp, rank),
        "decoder.final_layernorm.weight": values["head.norm.weight"],
    }


def core_layers(blocks: Sequence[Mapping[str, Tensor]], *, stacked: bool = False) -> dict[str, Tensor]:
    """The blocks' tensors, each under its number; `stacked` makes one tensor of those of all blocks."""
    if stacked:
        return {f"decoder.layers.{name}": torch.stack([block[name] for block in blocks]) for name in blocks[0]}
    return {f"decoder.layers.{i}.{name}": value for i, block in enumerate(blocks) for name, value in block.items()}


# ---- converting ------------------------------------------------------------------------------------------------------


def changed(source: Path, change: Callable[[dict[str, Any]], object], folder: str = "mp_rank_00") -> Path:
    """The checkpoint, of which the file of a rank has been changed."""
    path = source / folder / "model_optim_rng.pt"
    made = torch.load(path, weights_only=False)
    change(made)
    torch.save(made, path)
    return source


def convert_megatron(source: Path, target: Path, kind: str = "megatron", **flags: Any) -> int:
    return convert([*words(input=source, output=target, **flags), "--from", kind, "--to", "megacore"])


def require_tensors(path: Path, expected: dict[str, Tensor]) -> None:
    """A checkpoint of megacore has these tensors, bit for bit, and no others."""
    found = CheckpointTensors(path)
    assert found.shapes.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found.read(name), value)] == []


def refused(source: Path, target: Path, capsys: pytest.CaptureFixture[str], **flags: Any) -> str:
    """The message with which a conversion is refused."""
    assert convert_megatron(source, target, **flags) == 2
    assert not target.exists()
    said = capsys.readouterr().err
    assert said.startswith("convert_checkpoint.py: error: ")
    assert "Traceback" not in said
    return said
