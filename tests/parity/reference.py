"""The same training with none of megacore's code on the other side: transformers' GPT-2 in one process, plain
torch.optim.AdamW over its parameters, torch's clipping, the whole global batch in one forward.

Only names and orders of elements are translated here, and the learning rate is written out once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from megacore.config import ResolvedConfig
from megacore.parallel.mesh import Mesh
from tests.parity.runs import SEQUENCE, VOCAB, Outcome, RaggedData, make_config, make_trainer


def by_head(qkv: Tensor, heads: int) -> Tensor:
    """[q, k, v][head][d] as GPT-2 has it -> [head][q, k, v][d] as megacore has it."""
    return qkv.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def by_kind(qkv: Tensor, heads: int) -> Tensor:
    """The inverse of `by_head`."""
    return qkv.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def gpt2_names(layers: int) -> dict[str, str]:
    """megacore's name -> GPT-2's."""
    names = {
        "embedding.tokens.weight": "wte.weight",
        "embedding.positions": "wpe.weight",
        "head.norm.weight": "ln_f.weight",
        "head.norm.bias": "ln_f.bias",
    }
    blocks = "attention_norm ln_1, mlp_norm ln_2, attention.qkv attn.c_attn, attention.output attn.c_proj"
    blocks += ", mlp.up mlp.c_fc, mlp.down mlp.c_proj"
    for i in range(layers):
        for ours, theirs in map(str.split, blocks.split(",")):
            names |= {f"blocks.{i}.{ours}.{kind}": f"h.{i}.{theirs}.{kind}" for kind in ("weight", "bias")}
    return names


def to_gpt2(name: str, value: Tensor, heads: int) -> Tensor:
    """A tensor of megacore's as GPT-2 stores it: Conv1D holds [in, out], a linear layer [out, in]."""
    value = by_kind(value, heads) if ".qkv." in name else value
    return value.t() if name.startswith("blocks.") and value.dim() == 2 else value


def from_gpt2(name: str, value: Tensor, heads: int) -> Tensor:
    """The inverse of `to_gpt2`; a copy."""
    value = value.t() if name.startswith("blocks.") and value.dim() == 2 else value
    return (by_head(value, heads) if ".qkv." in name else value).detach().clone(memory_format=torch.contiguous_format)


def plain_torch(
    directory: Path, *, dtype: torch.dtype = torch.float32, rounded_to: torch.dtype = torch.float32, **changes: object
) -> Outcome:
    """Train as tests.parity.runs.train does, from the same initial weights.

    Args:
        directory: for the configuration; nothing is written.
        dtype: in which everything is computed.
        rounded_to: dtype whose numbers the initial weights are.
        changes: by field name.
    """
    config = make_config((1, 1, 1), directory, **changes)
    trainer = make_trainer(config, Mesh(device=torch.device("cpu")))
    initial = {name: p.spec.unpadded(p).detach().clone() for name, p in trainer.parameters.items()}
    names, heads = gpt2_names(config.model.num_layers), config.model.num_attention_heads
    initial = {name: value.to(rounded_to).to(dtype) for name, value in initial.items()}
    twin = twin_of(config).to(dtype)
    named = {name.removeprefix("transformer."): p for name, p in twin.named_parameters()}
    assert initial.keys() == names.keys()
    with torch.no_grad():
        for ours, theirs in names.items():
            named[theirs].copy_(to_gpt2(ours, initial[ours], heads))

    def read(take: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
        found = {ours: take(named[theirs]) for ours, theirs in names.items()}
        return {ours: from_gpt2(ours, value, heads) for ours, value in found.items() if value is not None}

    o, data = config.optimizer, RaggedData(config.training.global_batch_size * config.training.train_iters)
    groups = [
        {"params": [p for p in twin.parameters() if p.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in twin.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups, lr=o.lr, betas=(config.adamw.adam_beta1, config.adamw.adam_beta2), eps=config.adamw.adam_eps
    )
    losses, norms, gradients = [], [], {}
    for step in range(config.training.train_iters):
        adamw.zero_grad()
        loss = loss_of(twin, data, step, config.training.global_batch_size)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(twin.parameters(), o.clip_grad)))
        if step == 0:
            gradients = read(lambda p: p.grad)
        for group in adamw.param_groups:
            group["lr"] = rate(config, step + 1)
        adamw.step()
        losses.append(float(loss.detach()))
    moments = {
        "exp_avg": read(lambda p: adamw.state[p]["exp_avg"]),
        "exp_avg_sq": read(lambda p: adamw.state[p]["exp_avg_sq"]),
    }
    return Outcome(losses, norms, gradients, initial, read(lambda p: p), moments)


def rate(config: ResolvedConfig, step: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    warmup, last = config.optimizer.lr_warmup_iters, config.optimizer.lr_decay_iters
    if step < warmup:
        return config.optimizer.lr * step / warmup
    return config.optimizer.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (last - warmup)))


def twin_of(config: ResolvedConfig) -> GPT2LMHeadModel:
    """A GPT-2 of the configuration's shape."""
    model, off = config.model, dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    shape = {"n_embd": model.hidden_size, "n_head": model.num_attention_heads, "n_layer": model.num_layers}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=SEQUENCE, **shape, **off))


def loss_of(twin: Callable[[Tensor], Any], data: RaggedData, step: int, batch: int) -> Tensor:
    """The mean loss of the counted tokens of a global batch."""
    samples = [data[step * batch + i] for i in range(batch)]
    tokens, labels, mask = (
        torch.stack([torch.as_tensor(sample[key]) for sample in samples]) for key in ("tokens", "labels", "loss_mask")
    )
    losses = F.cross_entropy(twin(tokens).logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()
