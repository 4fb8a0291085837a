"""Megatron-LM's torch_dist format, written by two ranks in the ways that Megatron core divides tensors."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megacore.config import ModelConfig, ResolvedModel
from megacore.convert.checkpoint_tensors import CheckpointTensors
from tests.distributed import run_distributed
from tests.e2e.launching import words
from tests.unit.test_megatron_files import ARGS, HEADS, HIDDEN, POSITIONS, VOCAB, padded, require_tensors, tensors_of
from tools.convert_checkpoint import main as convert

LLAMA = ModelConfig(
    num_layers=4,
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    num_query_groups=2,
    ffn_hidden_size=24,
    max_position_embeddings=POSITIONS,
    vocab_size=VOCAB,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    normalization="RMSNorm",
    activation="swiglu",
    position_embedding_type="rope",
    rotary_base=500_000.0,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
).resolve(seq_length=POSITIONS)
FLAGS = {
    "ffn_hidden_size": 24,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "rotary_base": 500_000,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": VOCAB,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
}


def core_tensors(values: dict[str, Tensor], *, stacked: bool) -> dict[str, Tensor]:
    """By the names of Megatron core; layers along the first dimension, or each with its number."""
    layers: dict[str, list[Tensor]] = {}
    for i in range(LLAMA.num_layers):
        block = f"blocks.{i}"
        named = {
            "self_attention.linear_qkv.layer_norm_weight": values[f"{block}.attention_norm.weight"],
            "self_attention.linear_qkv.weight": values[f"{block}.attention.qkv.weight"],
            "self_attention.linear_proj.weight": values[f"{block}.attention.output.weight"],
            "mlp.linear_fc1.layer_norm_weight": values[f"{block}.mlp_norm.weight"],
            "mlp.linear_fc1.weight": torch.cat([values[f"{block}.mlp.{one}.weight"] for one in ("gate", "up")]),
            "mlp.linear_fc2.weight": values[f"{block}.mlp.down.weight"],
        }
        for name, value in named.items():
            layers.setdefault(name, []).append(value)
    found = {
        "embedding.word_embeddings.weight": padded(values["embedding.tokens.weight"]),
        "output_layer.weight": padded(values["head.weight"]),
        "decoder.final_layernorm.weight": values["head.norm.weight"],
    }
    for name, each in layers.items():
        if stacked:
            found[f"decoder.layers.{name}"] = torch.stack(each)
        else:
            found |= {f"decoder.layers.{i}.{name}": value for i, value in enumerate(each)}
    return found


def save(rank: int, ranks: int, tensors: dict[str, Tensor], target: str) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    state: dict[str, Any] = {}
    for number, (name, value) in enumerate(tensors.items()):
        dimension = number % value.dim()
        place = Shard(dimension) if value.shape[dimension] % ranks == 0 else Replicate()
        state[name] = distribute_tensor(value.clone(), mesh, [place])
    state |= {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(3), "rng_state/shard_0": torch.zeros(2)}
    dcp.save(state, checkpoint_id=target)
    if rank == 0:
        args = argparse.Namespace(**ARGS, **{name: value for name, value in FLAGS.items() if name not in ARGS})
        args.ffn_hidden_size = 24
        torch.save({"args": args, "iteration": 7, "checkpoint_version": 3.0}, Path(target) / "common.pt")


@pytest.mark.parametrize("stacked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_llama_of_torch_dist_is_read_whatever_divided_it(stacked: bool, tmp_path: Path) -> None:
    config: ResolvedModel = LLAMA
    values = tensors_of(config)
    source = tmp_path / "megatron" / "iter_0000007"
    run_distributed(save, 2, core_tensors(values, stacked=stacked), str(source))
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("7")
    name = "torch_dist" if stacked else "megatron"
    flags = words(input=tmp_path / "megatron", output=tmp_path / "out")
    assert convert([*flags, "--from", name, "--to", "megacore"]) == 0
    require_tensors(tmp_path / "out", values)
    assert CheckpointTensors(tmp_path / "out").config == config


def test_without_flags_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "megatron", no_dist=True)
    flags = words(input=tmp_path / "megatron", output=tmp_path / "out")
    assert convert([*flags, "--from", "torch_dist", "--to", "megacore"]) == 2
    assert "common.pt is missing" in capsys.readouterr().err
