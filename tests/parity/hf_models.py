"""Tiny models of transformers with random weights, one or more a family: what conversion is tested with."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.qwen3_next import modeling_qwen3_next

from megacore.config import ResolvedModel
from megacore.convert.plan import Step, make_plan
from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.models.hf.families import family_of
from megacore.parallel.random import RandomStreams
from megacore.pipeline.stage import Stage

# In fp32 its chunks subtract sums of decays, which loses digits; its other form goes position by position.
modeling_qwen3_next.torch_chunk_gated_delta_rule = modeling_qwen3_next.torch_recurrent_gated_delta_rule
Model = TypeVar("Model", bound=nn.Module)
VOCAB, POSITIONS = 101, 40
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _filled(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of hf_models.toml on its base."""
    base = _filled(_TABLE["bases"][table["base"]]) if "base" in table else {}
    own = {
        name: _filled(value) if isinstance(value, dict) else value for name, value in table.items() if name != "base"
    }
    return deepcopy(base | {name: None if value == "none" else value for name, value in own.items()})


def _config(kind: str, **given: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = getattr(transformers, f"{kind}Config")(**_filled({"base": "grouped", **given}))
    return config


CONFIGS = {name: partial(_config, **row) for name, row in _TABLE["models"].items()}
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
        stored[name] = tensor  # as GPT-OSS has its experts too
        if not is_expert:
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
