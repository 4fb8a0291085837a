"""Tiny models of transformers with random weights, one or more a family: what conversion is tested with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

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
_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "initializer_range": 0.2, **_ENDS}
_GPT2 = {**_COMMON, "n_positions": POSITIONS, "n_embd": 32, "n_head": 4}
_SHAPE = {**_COMMON, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SHAPE |= {"max_position_embeddings": POSITIONS}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2, "intermediate_size": 48}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_LLAMA = {**_GROUPED, "rope_parameters": _ROPE}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 4.0, "low_freq_factor": 1.0}
_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.25, 1.5], "long_factor": [1.1, 2.5, 8.0]}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 10}
_NEOX = {**_SHAPE, "intermediate_size": 64, "rotary_pct": 0.25}
_FALCON = {**_SHAPE, "ffn_hidden_size": 96}
_EXPERTS = {**_GROUPED, "num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
_DEEPSEEK: dict[str, Any] = {
    **_SHAPE, "num_hidden_layers": 3, "intermediate_size": 48, "kv_lora_rank": 14, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "n_routed_experts": 8, "moe_intermediate_size": 24, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
}  # fmt: skip
_MPT = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": POSITIONS, "attn_config": {"clip_qkv": 0.5}}
_NEO: dict[str, Any] = {"num_layers": 3, "num_heads": 4, "hidden_size": 32, "max_position_embeddings": POSITIONS}


def _of(kind: str, base: Mapping[str, Any] = _GROUPED, **changes: Any) -> Callable[[], PreTrainedConfig]:
    """Makes the configuration of a family."""

    def make() -> PreTrainedConfig:
        config: PreTrainedConfig = getattr(transformers, f"{kind}Config")(**deepcopy({**base, **changes}))
        return config

    return make


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": _of("GPT2", _GPT2, n_layer=3),
    "gpt2-untied": _of(
        "GPT2", _GPT2, n_layer=3, tie_word_embeddings=False, n_inner=48, layer_norm_epsilon=1e-6,
        activation_function="relu",
    ),
    "llama2": _of("Llama", _LLAMA, num_key_value_heads=4),
    "llama3": _of("Llama", _LLAMA, rope_parameters=_LLAMA3, tie_word_embeddings=True),
    "llama-biases": _of("Llama", _LLAMA, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5),
    "llama-linear": _of(
        "Llama", _LLAMA, rope_parameters={**_ROPE, "rope_type": "linear", "factor": 3.0}, head_dim=16
    ),
    "llama-dynamic": _of(
        "Llama", _LLAMA, rope_parameters={**_ROPE, "rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=24
    ),
    "llama-yarn": _of(
        "Llama", _LLAMA, rope_parameters={**_YARN, "beta_fast": 4, "attention_factor": 1.5, "truncate": False}
    ),
    "mistral": _of("Mistral", sliding_window=7, head_dim=16),
    "mistral-without-window": _of("Mistral", sliding_window=None),
    "qwen2": _of("Qwen2", tie_word_embeddings=True),
    "qwen2-window": _of("Qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=0),
    "qwen3": _of("Qwen3", head_dim=16),
    "mixtral": _of("Mixtral", num_local_experts=4, sliding_window=7),
    "qwen2-moe": _of("Qwen2Moe", _EXPERTS, shared_expert_intermediate_size=40),
    "qwen2-moe-windows": _of("Qwen2Moe", _EXPERTS, use_sliding_window=True, sliding_window=7, max_window_layers=2),
    "qwen3-moe": _of("Qwen3Moe", _EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen3-moe-window": _of("Qwen3Moe", _EXPERTS, head_dim=16, use_sliding_window=True, sliding_window=7),
    "olmoe": _of("Olmoe", num_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-5, clip_qkv=0.5),
    "deepseek-v2": _of(
        "DeepseekV2", _DEEPSEEK, q_lora_rank=None, v_head_dim=12, topk_method="group_limited_greedy",
        routed_scaling_factor=2.0,
    ),
    "deepseek-v3": _of(
        "DeepseekV3", _DEEPSEEK, q_lora_rank=20, v_head_dim=24, num_key_value_heads=4,
        rope_parameters={**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    "pythia": _of("GPTNeoX", _NEOX),
    "neox-sequential": _of("GPTNeoX", _NEOX, use_parallel_residual=False, hidden_act="gelu_new", rotary_pct=0.5),
    "bloom": _of("Bloom", _COMMON, hidden_size=32, n_layer=2, n_head=4, seq_length=POSITIONS),
    "llama-attention-biases": _of("Llama", _LLAMA, attention_bias=True),
    "qwen2-mixed-windows": _of("Qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "granite": _of(
        "Granite", embedding_multiplier=6.0, residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=3.0
    ),
    "smollm3": _of("SmolLM3", num_hidden_layers=3, no_rope_layers=[1, 0, 1], tie_word_embeddings=True),
    "olmo": _of("Olmo", clip_qkv=0.5, tie_word_embeddings=True),
    "olmo-untied": _of("Olmo", _SHAPE, intermediate_size=48),
    "olmo2": _of("Olmo2"),
    "phi3": _of("Phi3", sliding_window=9),
    "phi3-partial": _of("Phi3", rope_parameters={**_ROPE, "partial_rotary_factor": 0.5}, tie_word_embeddings=True),
    # 40 positions, twice the original context: the long factors count. With 16 positions the short ones do.
    "phi3-longrope": _of(
        "Phi3", rope_scaling=_LONGROPE, original_max_position_embeddings=20, partial_rotary_factor=0.75
    ),
    "phi3-short-context": _of(
        "Phi3", rope_scaling=_LONGROPE, original_max_position_embeddings=POSITIONS, partial_rotary_factor=0.75
    ),
    "stablelm": _of("StableLm", use_qkv_bias=True),
    "stablelm-parallel": _of("StableLm", use_parallel_residual=True),
    "stablelm-12b": _of("StableLm", use_parallel_residual=True, qk_layernorm=True),
    "opt": _of(
        "OPT", {name: value for name, value in _SHAPE.items() if name != "initializer_range"},
        ffn_dim=48, init_std=0.2, dropout=0.0,
    ),
    "falcon-7b": _of("Falcon", _FALCON, multi_query=True),
    "falcon-sequential": _of(
        "Falcon", _FALCON, multi_query=False, parallel_attn=False, bias=True, tie_word_embeddings=False
    ),
    "falcon-40b": _of("Falcon", _FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-11b": _of("Falcon", _FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "gptj": _of("GPTJ", _GPT2, n_layer=2, rotary_dim=4),
    "starcoder2": _of("Starcoder2", sliding_window=7),
    "gpt-bigcode": _of("GPTBigCode", _GPT2, n_layer=2),
    "mpt": _of("Mpt", _COMMON, **_MPT),
    "gemma": _of("Gemma", initializer_range=0.1, head_dim=16),
    "gemma2": _of(
        "Gemma2", num_hidden_layers=3, initializer_range=0.3, head_dim=16, sliding_window=7, query_pre_attn_scalar=24,
        attn_logit_softcapping=1.5, final_logit_softcapping=2.5,
    ),
    "gemma3": _of(
        "Gemma3Text", num_hidden_layers=3, head_dim=16, sliding_window=7, query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "phi": _of("Phi", partial_rotary_factor=0.5),
    "phi-normed": _of("Phi", qk_layernorm=True, tie_word_embeddings=True),
    "gpt-neo": _of(
        "GPTNeo", _COMMON, **_NEO, attention_types=[[["global", "local"], 1], [["local"], 1]], window_size=7
    ),
    "olmo3": _of("Olmo3", num_hidden_layers=3, sliding_window=7),
    "olmo3-yarn": _of(
        "Olmo3", sliding_window=7, layer_types=["sliding_attention", "full_attention"],
        rope_scaling={**_YARN, "attention_factor": 1.2}, rope_theta=20_000.0,
    ),
    "exaone4": _of("Exaone4", num_hidden_layers=3, sliding_window=7, sliding_window_pattern=2),
    "exaone4-without-window": _of(
        "Exaone4", sliding_window=None, layer_types=["full_attention"] * 2, rope_parameters=_LLAMA3
    ),
    "cohere": _of("Cohere", logit_scale=0.3),
    "cohere-biases": _of("Cohere", _SHAPE, attention_bias=True, tie_word_embeddings=False),
    "cohere2": _of("Cohere2", num_hidden_layers=3, sliding_window=7, sliding_window_pattern=2, logit_scale=0.25),
    "glm": _of("Glm", head_dim=16),
    "glm4": _of("Glm4", head_dim=8, partial_rotary_factor=0.75, attention_bias=False, tie_word_embeddings=True),
    "nemotron": _of("Nemotron"),
    "nemotron-biases": _of(
        "Nemotron", attention_bias=True, mlp_bias=True, head_dim=16, partial_rotary_factor=0.25
    ),
    "seed-oss": _of("SeedOss", head_dim=16),
    "seed-oss-biases": _of(
        "SeedOss", attention_bias=False, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "ernie": _of("Ernie4_5", head_dim=16),
    "ernie-biases": _of("Ernie4_5", use_bias=True, tie_word_embeddings=False),
    "helium": _of("Helium", head_dim=8),
    "helium-biases": _of("Helium", head_dim=8, attention_bias=True, mlp_bias=True),
    "ministral3": _of(
        "Ministral3", num_hidden_layers=3, head_dim=16, sliding_window=7,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.0},
    ),
    "ministral3-short": _of(
        "Ministral3", head_dim=8,
        rope_parameters={**_YARN, "original_max_position_embeddings": POSITIONS, "llama_4_scaling_beta": 0.1},
    ),
    "arcee": _of("Arcee", rope_parameters=_YARN),
    "arcee-biases": _of("Arcee", attention_bias=True, mlp_bias=True, head_dim=16),
}  # fmt: skip
# One of each family; the others are variations of them.
PLAIN = ["gpt2", "llama3", "mistral", "qwen2", "qwen3", "pythia", "bloom"]
# Those whose tensors are laid out or computed in another way each; the others are for `make test-slow`.
USUAL = {"gpt2", "llama3", "qwen3", "mixtral", "deepseek-v3", "pythia", "bloom", "olmo2"}
USUAL |= {"phi3", "stablelm-12b", "gptj", "gpt-bigcode", "gemma3", "exaone4", "cohere2", "glm4"}


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
