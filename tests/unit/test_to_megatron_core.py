"""What --to megatron and --to torch_dist write is loaded by megatron-core and computes the same logits there. Needs
megatron-core (benchmarks/peers.txt)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megacore.convert.check import _our_logits
from megacore.convert.checkpoint_tensors import CheckpointTensors
from tests.unit.megatron_files import GPT, VOCAB
from tests.unit.test_megatron_files import LLAMA, checkpoint_of, to_megatron

ROOT = Path(__file__).resolve().parents[2]
CORE = """
import argparse, dataclasses, os, sys
from functools import partial
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from benchmarks.comparison.sides.megatron_core import _OnCPU, _without_cuda

source, kind, tokens, target = sys.argv[1:]
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
_without_cuda()
parallel_state.initialize_model_parallel(1, 1)
torch.serialization.add_safe_globals([argparse.Namespace])
file = "mp_rank_00/model_optim_rng.pt" if kind == "megatron" else "common.pt"
state = torch.load(os.path.join(source, "release", file), weights_only=True)
args = state["args"]
rope = args.position_embedding_type == "rope"
config = TransformerConfig(
    num_layers=args.num_layers, hidden_size=args.hidden_size, ffn_hidden_size=args.ffn_hidden_size,
    num_attention_heads=args.num_attention_heads, num_query_groups=args.num_query_groups,
    kv_channels=args.kv_channels, add_bias_linear=args.add_bias_linear, add_qkv_bias=args.add_qkv_bias,
    gated_linear_unit=args.swiglu, activation_func=F.silu if args.swiglu else partial(F.gelu, approximate="tanh"),
    normalization=args.normalization, layernorm_epsilon=args.norm_epsilon, qk_layernorm=args.qk_layernorm,
    hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=False, bias_dropout_fusion=False,
    masked_softmax_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False,
    use_cpu_initialization=True, perform_initialization=False, persist_layer_norm=False,
)
model = GPTModel(
    config=config,
    transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization),
    vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings,
    position_embedding_type=args.position_embedding_type, rotary_percent=args.rotary_percent,
    rotary_base=args.rotary_base, rope_scaling=args.use_rope_scaling, rope_scaling_factor=args.rope_scaling_factor,
    share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
)
if kind == "megatron":
    model.load_state_dict(state["model"], strict=True)
else:
    wanted = model.sharded_state_dict()
    loaded = dist_checkpointing.load(wanted, os.path.join(source, "release"), strict="log_all")
    loaded = {name: value for name, value in loaded.items() if name not in state}  # the flags come along
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert not unexpected and all(name.endswith("_extra_state") for name in missing), (missing, unexpected)
ids = torch.load(tokens)
mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
with torch.no_grad(), _OnCPU():
    logits = model.eval()(ids, torch.arange(ids.shape[1]).expand_as(ids), mask)
torch.save(logits, target)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["megatron", "torch_dist"])
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["GPT-2", "Llama"])
def test_megatron_core_computes_the_same(config: object, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install megatron-core")
    checkpoint_of(config, tmp_path / "ours")  # type: ignore[arg-type]
    flags = {"megatron_norms": "apart"} if kind == "megatron" else {}
    assert to_megatron(tmp_path / "ours", tmp_path / "theirs", kind, **flags) == 0
    tokens = torch.randint(VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    torch.save(tokens, tmp_path / "tokens.pt")
    words = [str(tmp_path / "theirs"), kind, str(tmp_path / "tokens.pt"), str(tmp_path / "logits.pt")]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CORE, *words], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (ours,) = _our_logits(CheckpointTensors(tmp_path / "ours"), tokens, None)
    theirs = torch.load(tmp_path / "logits.pt")[..., :VOCAB]
    torch.testing.assert_close(ours.view_as(theirs), theirs, rtol=1e-4, atol=1e-4)
