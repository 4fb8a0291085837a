"""Tiny models of transformers with random weights, one or more a family: what conversion is tested with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megacore.config import ResolvedModel
from megacore.convert.plan import Step, make_plan
from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.models.hf.families import family_of
from megacore.parallel.random import RandomStreams
from megacore.pipeline.stage import Stage

Model = TypeVar("Model", bound=nn.Module)
VOCAB, POSITIONS = 101, 40
_ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}


def _gpt2(**changes: Any) -> PreTrainedConfig:
    plain = {"n_positions": POSITIONS, "n_embd": 32, "n_head": 4, "n_layer": 3}
    return GPT2Config(vocab_size=VOCAB, initializer_range=0.2, **plain, **_ENDS, **changes)


_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    **_ENDS,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2, "intermediate_size": 48}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.25, 1.5], "long_factor": [1.1, 2.5, 8.0]}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 10}


def _llama(rope: dict[str, Any] | None = None, **changes: Any) -> PreTrainedConfig:
    parameters = {"rope_type": "default", "rope_theta": 10_000.0} if rope is None else rope
    return LlamaConfig(**{**_GROUPED, "rope_parameters": parameters, **changes})


def _neox(**changes: Any) -> PreTrainedConfig:
    return GPTNeoXConfig(**{**_SHAPE, "intermediate_size": 64, "rotary_pct": 0.25, **changes})


def _falcon(**changes: Any) -> PreTrainedConfig:
    return transformers.FalconConfig(**{**_SHAPE, "ffn_hidden_size": 96, **changes})


_EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
_DEEPSEEK: dict[str, Any] = {
    **_SHAPE, "num_hidden_layers": 3, "intermediate_size": 48, "kv_lora_rank": 14, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "n_routed_experts": 8, "moe_intermediate_size": 24, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
}  # fmt: skip

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": _gpt2,
    "gpt2-untied": lambda: _gpt2(
        tie_word_embeddings=False, n_inner=48, layer_norm_epsilon=1e-6, activation_function="relu"
    ),
    "llama2": lambda: _llama(num_key_value_heads=4),
    "llama3": lambda: _llama(_LLAMA3, tie_word_embeddings=True),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5),
    "llama-linear": lambda: _llama({"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}, head_dim=16),
    "llama-dynamic": lambda: _llama(
        {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}, max_position_embeddings=24
    ),
    "llama-yarn": lambda: _llama({**_YARN, "beta_fast": 4, "attention_factor": 1.5, "truncate": False}),
    "mistral": lambda: MistralConfig(**_GROUPED, sliding_window=7, head_dim=16),
    "mistral-without-window": lambda: MistralConfig(**_GROUPED, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_GROUPED, tie_word_embeddings=True),
    "qwen2-window": lambda: Qwen2Config(**_GROUPED, use_sliding_window=True, sliding_window=7, max_window_layers=0),
    "qwen3": lambda: Qwen3Config(**_GROUPED, head_dim=16),
    "mixtral": lambda: MixtralConfig(**_GROUPED, num_local_experts=4, sliding_window=7),
    "qwen2-moe": lambda: Qwen2MoeConfig(**_GROUPED, **_EXPERTS, shared_expert_intermediate_size=40),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_GROUPED, **_EXPERTS, head_dim=16, norm_topk_prob=True),
    "olmoe": lambda: OlmoeConfig(**_GROUPED, num_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-5, clip_qkv=0.5),
    "deepseek-v2": lambda: DeepseekV2Config(
        **_DEEPSEEK, q_lora_rank=None, v_head_dim=12, topk_method="group_limited_greedy", routed_scaling_factor=2.0
    ),
    "deepseek-v3": lambda: DeepseekV3Config(
        **_DEEPSEEK,
        q_lora_rank=20,
        v_head_dim=24,
        num_key_value_heads=4,
        rope_parameters={**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    "pythia": _neox,
    "neox-sequential": lambda: _neox(use_parallel_residual=False, hidden_act="gelu_new", rotary_pct=0.5),
    "bloom": lambda: BloomConfig(
        vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2, seq_length=POSITIONS, **_ENDS
    ),
}
CONFIGS |= {
    "llama-attention-biases": lambda: _llama(attention_bias=True),
    "qwen2-mixed-windows": lambda: transformers.Qwen2Config(
        **_GROUPED, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "granite": lambda: transformers.GraniteConfig(
        **_GROUPED, embedding_multiplier=6.0, residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=3.0
    ),
    "smollm3": lambda: transformers.SmolLM3Config(
        **{**_GROUPED, "num_hidden_layers": 3}, no_rope_layers=[1, 0, 1], tie_word_embeddings=True
    ),
    "olmo": lambda: transformers.OlmoConfig(**_GROUPED, clip_qkv=0.5, tie_word_embeddings=True),
    "olmo-untied": lambda: transformers.OlmoConfig(**_SHAPE, intermediate_size=48),
    "olmo2": lambda: transformers.Olmo2Config(**_GROUPED),
    "phi3": lambda: transformers.Phi3Config(**_GROUPED, sliding_window=9),
    "phi3-partial": lambda: transformers.Phi3Config(
        **_GROUPED,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        tie_word_embeddings=True,
    ),
    # 40 positions, twice the original context: the long factors count. With 16 positions the short ones do.
    "phi3-longrope": lambda: transformers.Phi3Config(
        **_GROUPED, rope_scaling=_LONGROPE, original_max_position_embeddings=20, partial_rotary_factor=0.75
    ),
    "phi3-short-context": lambda: transformers.Phi3Config(
        **_GROUPED, rope_scaling=_LONGROPE, original_max_position_embeddings=POSITIONS, partial_rotary_factor=0.75
    ),
    "stablelm": lambda: transformers.StableLmConfig(**_GROUPED, use_qkv_bias=True),
    "stablelm-parallel": lambda: transformers.StableLmConfig(**_GROUPED, use_parallel_residual=True),
    "stablelm-12b": lambda: transformers.StableLmConfig(**_GROUPED, use_parallel_residual=True, qk_layernorm=True),
    "opt": lambda: transformers.OPTConfig(
        **{name: value for name, value in _SHAPE.items() if name != "initializer_range"},
        ffn_dim=48,
        init_std=0.2,
        dropout=0.0,
    ),
    "falcon-7b": lambda: _falcon(multi_query=True),
    "falcon-sequential": lambda: _falcon(multi_query=False, parallel_attn=False, bias=True, tie_word_embeddings=False),
    "falcon-40b": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-11b": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=VOCAB,
        n_positions=POSITIONS,
        n_embd=32,
        n_head=4,
        n_layer=2,
        rotary_dim=4,
        initializer_range=0.2,
        **_ENDS,
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**_GROUPED, sliding_window=7),
    "gpt-bigcode": lambda: transformers.GPTBigCodeConfig(
        vocab_size=VOCAB, n_positions=POSITIONS, n_embd=32, n_head=4, n_layer=2, initializer_range=0.2, **_ENDS
    ),
    "mpt": lambda: transformers.MptConfig(
        vocab_size=VOCAB,
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=POSITIONS,
        initializer_range=0.2,
        attn_config={"clip_qkv": 0.5},
        **_ENDS,
    ),
    "gemma": lambda: transformers.GemmaConfig(**{**_GROUPED, "initializer_range": 0.1}, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(
        **{**_GROUPED, "num_hidden_layers": 3, "initializer_range": 0.3},
        head_dim=16,
        sliding_window=7,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.5,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**_GROUPED, "num_hidden_layers": 3},
        head_dim=16,
        sliding_window=7,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
}
CONFIGS |= {
    "phi": lambda: transformers.PhiConfig(**_GROUPED, partial_rotary_factor=0.5),
    "phi-normed": lambda: transformers.PhiConfig(**_GROUPED, qk_layernorm=True, tie_word_embeddings=True),
    "gpt-neo": lambda: transformers.GPTNeoConfig(
        **{"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "initializer_range": 0.2, **_ENDS},
        max_position_embeddings=POSITIONS,
        attention_types=[[["global", "local"], 1], [["local"], 1]],
        window_size=7,
    ),
    "olmo3": lambda: transformers.Olmo3Config(**{**_GROUPED, "num_hidden_layers": 3}, sliding_window=7),
    "olmo3-yarn": lambda: transformers.Olmo3Config(
        **_GROUPED,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
        rope_scaling={**_YARN, "attention_factor": 1.2},
        rope_theta=20_000.0,
    ),
    "exaone4": lambda: transformers.Exaone4Config(
        **{**_GROUPED, "num_hidden_layers": 3}, sliding_window=7, sliding_window_pattern=2
    ),
    "exaone4-without-window": lambda: transformers.Exaone4Config(
        **_GROUPED, sliding_window=None, layer_types=["full_attention"] * 2, rope_parameters=_LLAMA3
    ),
    "cohere": lambda: transformers.CohereConfig(**_GROUPED, logit_scale=0.3),
    "cohere-biases": lambda: transformers.CohereConfig(**_SHAPE, attention_bias=True, tie_word_embeddings=False),
    "cohere2": lambda: transformers.Cohere2Config(
        **{**_GROUPED, "num_hidden_layers": 3}, sliding_window=7, sliding_window_pattern=2, logit_scale=0.25
    ),
    "glm": lambda: transformers.GlmConfig(**_GROUPED, head_dim=16),
    "glm4": lambda: transformers.Glm4Config(
        **_GROUPED, head_dim=8, partial_rotary_factor=0.75, attention_bias=False, tie_word_embeddings=True
    ),
    "nemotron": lambda: transformers.NemotronConfig(**_GROUPED),
    "nemotron-biases": lambda: transformers.NemotronConfig(
        **_GROUPED, attention_bias=True, mlp_bias=True, head_dim=16, partial_rotary_factor=0.25
    ),
    "seed-oss": lambda: transformers.SeedOssConfig(**_GROUPED, head_dim=16),
    "seed-oss-biases": lambda: transformers.SeedOssConfig(
        **_GROUPED, attention_bias=False, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "ernie": lambda: transformers.Ernie4_5Config(**_GROUPED, head_dim=16),
    "ernie-biases": lambda: transformers.Ernie4_5Config(**_GROUPED, use_bias=True, tie_word_embeddings=False),
    "helium": lambda: transformers.HeliumConfig(**_GROUPED, head_dim=8),
    "helium-biases": lambda: transformers.HeliumConfig(**_GROUPED, head_dim=8, attention_bias=True, mlp_bias=True),
    "ministral3": lambda: transformers.Ministral3Config(
        **{**_GROUPED, "num_hidden_layers": 3},
        head_dim=16,
        sliding_window=7,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.0},
    ),
    "ministral3-short": lambda: transformers.Ministral3Config(
        **_GROUPED,
        head_dim=8,
        rope_parameters={**_YARN, "original_max_position_embeddings": POSITIONS, "llama_4_scaling_beta": 0.1},
    ),
    "arcee": lambda: transformers.ArceeConfig(**_GROUPED, rope_parameters=_YARN),
    "arcee-biases": lambda: transformers.ArceeConfig(**_GROUPED, attention_bias=True, mlp_bias=True, head_dim=16),
}
# One of each family; the others are variations of them.
PLAIN = ["gpt2", "llama3", "mistral", "qwen2", "qwen3", "pythia", "bloom"]
# In `make test-slow` only.
SLOW = {"llama-yarn", "phi3-longrope", "phi3-short-context", "stablelm-parallel", "opt"}
SLOW |= {"falcon-7b", "falcon-sequential", "falcon-40b", "falcon-11b"}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with large random weights, biases and norms too: a wrong layout cannot hide."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return disturbed(model).eval().to(dtype)


@torch.no_grad()
def disturbed(model: Model) -> Model:
    """With biases that are not zero and norm weights that are not one."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(0.1 * torch.randn_like(buffer))
    return model


def as_stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of a model in memory -> by those of its files, where each expert has matrices of its own."""
    stored = {}
    for name, tensor in tensors.items():
        block, is_expert, kind = name.partition(".experts.")
        if not is_expert:
            stored[name] = tensor
            stored[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = tensor
            continue
        for expert, matrices in enumerate(tensor):
            parts = zip(("gate", "up"), ("w1", "w3"), matrices.chunk(2), strict=True)
            for ours, mixtrals, matrix in parts if kind == "gate_up_proj" else (("down", "w2", matrices),):
                stored[f"{block}.experts.{expert}.{ours}_proj.weight"] = matrix
                stored[f"{block.replace('.mlp', '.block_sparse_moe')}.experts.{expert}.{mixtrals}.weight"] = matrix
    return stored


def config_of(model: nn.Module) -> ResolvedModel:
    """The same model here."""
    values = json.loads(model.config.to_json_string())  # type: ignore[union-attr,operator]
    return family_of(values, "config.json").to_model(values, "config.json")


def plan_of(model: nn.Module) -> list[Step]:
    """What conversion makes each tensor of."""
    values = json.loads(model.config.to_json_string())  # type: ignore[union-attr,operator]
    family, paired = family_of(values, "config.json"), any("seq_relationship" in name for name in model.state_dict())
    described = family.describe(values, "config.json").model
    return make_plan(family, described, family.to_bert(values, "config.json", paired=paired))


def twin_of(model: nn.Module, **options: Any) -> Stage:
    """Megacore's model with a model's weights on one process, its vocabulary padded."""
    device = torch.device("cpu")
    context = BuildContext(device=device, streams=RandomStreams(0, device), **options)
    stage = Stage(gpt_layers(config_of(model), context)).eval()
    give(stage, model)
    return stage


@torch.no_grad()
def give(stage: Stage, model: nn.Module) -> None:
    """Set every parameter and every buffer that is stored."""
    parameters, layers = stage.by_name(), dict(zip(stage.names, stage.layers, strict=True))
    values = assembled(plan_of(model), as_stored(model.state_dict()))
    assert parameters.keys() <= values.keys()
    for name, value in values.items():
        if name in parameters:
            parameters[name].zero_()
            parameters[name].spec.unpadded(parameters[name]).copy_(value)
        else:
            layer = next(layer for layer in layers if name.startswith(f"{layer}."))
            layers[layer].get_buffer(name.removeprefix(f"{layer}.")).copy_(value)


def assembled(plan: Sequence[Step], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights or gradients of transformers by our names."""
    return {step.ours: step.assemble(lambda number, step=step: theirs[step.theirs[number]]) for step in plan}  # type: ignore[misc]


def require_same_gradients(stage: Stage, model: nn.Module) -> None:
    """Of every parameter, to fp32 rounding."""
    theirs = as_stored({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    parameters, wanted = stage.by_name(), assembled([s for s in plan_of(model) if not s.is_buffer], theirs)
    assert parameters.keys() == wanted.keys()
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        # Relative to the tensor's own size: an entry of it may be zero but for rounding (the key's bias is).
        error = (parameter.spec.unpadded(parameter.grad) - wanted[name]).abs().max()
        assert error <= 1e-5 * wanted[name].abs().max() + 1e-7, f"gradient of {name}: {error}"


def save_model(model: nn.Module, directory: Path, **changes: Any) -> Path:
    """Save as transformers does."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory, **changes)  # type: ignore[operator]
    return directory


def tokens(seed: int = 1) -> Tensor:
    """[3, s] random tokens."""
    return torch.randint(0, VOCAB, (3, POSITIONS), generator=torch.Generator().manual_seed(seed))
