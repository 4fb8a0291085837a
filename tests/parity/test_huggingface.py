"""The one-process GPT against transformers' GPT2LMHeadModel with the same weights, and its training against plain
torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from megacore.config import ModelConfig
from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.parallel.cross_entropy import vocab_parallel_cross_entropy
from megacore.parallel.mesh import Mesh
from megacore.parallel.random import RandomStreams
from megacore.pipeline.stage import Stage
from tests.parity.runs import BATCH, RaggedData, make_config, make_trainer

VOCAB, POSITIONS, HIDDEN, HEADS, LAYERS = 101, 40, 32, 4, 3


def reference() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=POSITIONS,
        n_embd=HIDDEN,
        n_head=HEADS,
        n_layer=LAYERS,
        initializer_range=0.2,  # large weights, so that a wrong layout cannot hide
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def by_head(qkv: Tensor) -> Tensor:
    """[q, k, v][head][d] as GPT-2 has it -> [head][q, k, v][d] as megacore has it."""
    d = HIDDEN // HEADS
    return qkv.unflatten(0, (3, HEADS, d)).transpose(0, 1).flatten(0, 2)


def by_kind(qkv: Tensor) -> Tensor:
    """The inverse of `by_head`."""
    d = HIDDEN // HEADS
    return qkv.unflatten(0, (HEADS, 3, d)).transpose(0, 1).flatten(0, 2)


def same(tensor: Tensor) -> Tensor:
    return tensor


def gpt2_names(layers: int) -> dict[str, tuple[str, Callable[[Tensor], Tensor]]]:
    """megacore's name -> (GPT-2's name, our tensor as GPT-2 stores it); Conv1D stores [in, out], a linear layer
    [out, in]."""
    names: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
        "embedding.tokens.weight": ("wte.weight", same),
        "embedding.positions": ("wpe.weight", same),
        "head.norm.weight": ("ln_f.weight", same),
        "head.norm.bias": ("ln_f.bias", same),
    }
    for i in range(layers):
        there, here = f"h.{i}.", f"blocks.{i}."
        for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            names |= {f"{here}{ours}.{kind}": (f"{there}{theirs}.{kind}", same) for kind in ("weight", "bias")}
        names[f"{here}attention.qkv.weight"] = (f"{there}attn.c_attn.weight", lambda w: by_kind(w).t())
        names[f"{here}attention.qkv.bias"] = (f"{there}attn.c_attn.bias", by_kind)
        for ours, theirs in (("attention.output", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
            names[f"{here}{ours}.weight"] = (f"{there}{theirs}.weight", Tensor.t)
            names[f"{here}{ours}.bias"] = (f"{there}{theirs}.bias", same)
    return names


def from_gpt2(model: GPT2LMHeadModel) -> dict[str, Tensor]:
    """GPT-2's tensors under megacore's names, in megacore's layout."""
    theirs = {name.removeprefix("transformer."): p.detach() for name, p in model.named_parameters()}
    values = {}
    for name, (their_name, _) in gpt2_names(LAYERS).items():
        value = theirs[their_name]
        value = value.t() if value.dim() == 2 and their_name.startswith("h.") else value
        values[name] = by_head(value) if "qkv" in name else value
    return values


@pytest.mark.parametrize("multiple", [1, 128])
def test_gpt_is_gpt2(multiple: int) -> None:
    model = reference()
    config = ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=4 * HIDDEN,
        vocab_size=VOCAB,
        max_position_embeddings=POSITIONS,
        make_vocab_size_divisible_by=multiple,
    )
    device = torch.device("cpu")
    stage = Stage(gpt_layers(config, BuildContext(device=device, streams=RandomStreams(0, device)))).eval()
    parameters, values = stage.by_name(), from_gpt2(model)
    assert parameters.keys() == values.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.zero_()
            parameter.spec.own(parameter).copy_(values[name])

    tokens = torch.randint(0, VOCAB, (3, POSITIONS), generator=torch.Generator().manual_seed(1))
    expected = model(tokens, labels=tokens)
    logits = stage(tokens)[..., :VOCAB]
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-5)
    loss = vocab_parallel_cross_entropy(logits[:, :-1], tokens[:, 1:], vocab_size=VOCAB).mean()
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-6)

    loss.backward()
    expected.loss.backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    for name, twin in (("embedding.tokens.weight", "wte.weight"), ("embedding.positions", "wpe.weight")):
        gradient, wanted = parameters[name].grad, theirs[f"transformer.{twin}"]
        assert gradient is not None
        assert wanted is not None
        torch.testing.assert_close(parameters[name].spec.own(gradient), wanted, rtol=1e-5, atol=1e-6)


def test_twenty_steps_are_those_of_plain_torch(tmp_path: Path) -> None:
    """Loss, norm, clipping, AdamW, decay groups and schedule, step by step, with none of megacore's code on the
    other side."""
    config = make_config((1, 1, 1), tmp_path)
    trainer = make_trainer(config, Mesh(device=torch.device("cpu")))
    twin = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=131,
            n_positions=16,
            n_embd=HIDDEN,
            n_head=HEADS,
            n_layer=5,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
    )
    named = dict(twin.named_parameters())
    with torch.no_grad():
        for name, (theirs, to_gpt2) in gpt2_names(5).items():
            ours = trainer.parameters[name]
            named[f"transformer.{theirs}"].copy_(to_gpt2(ours.spec.own(ours)))
    decayed = [p for p in twin.parameters() if p.dim() >= 2]
    others = [p for p in twin.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.999), eps=1e-8,
    )  # fmt: skip
    data = RaggedData(20 * BATCH)
    for step in range(20):
        samples = [data[step * BATCH + i] for i in range(BATCH)]
        tokens, labels, mask = (
            torch.stack([torch.as_tensor(sample[key]) for sample in samples])
            for key in ("tokens", "labels", "loss_mask")
        )
        logits = twin(tokens).logits
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        expected = (losses * mask.flatten()).sum() / mask.sum()
        adamw.zero_grad()
        expected.backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        k = step + 1
        rate = 1e-3 * (k / 4 if k < 4 else 0.5 * (1 + math.cos(math.pi * (k - 4) / 16)))
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()

        loss, norm, used_rate = trainer.train_step(next(trainer.batches))
        assert used_rate == pytest.approx(rate, rel=1e-12, abs=1e-18)
        assert float(loss) == pytest.approx(expected.item(), rel=1e-6 if step == 0 else 1e-5)
        assert float(norm) == pytest.approx(float(expected_norm), rel=1e-5)
