"""A mixture of experts from a checkpoint of a dense model (Komatsuzaki et al. 2022, arXiv 2212.05055): every expert
begins as the feed-forward layer, and routers are drawn. A token's weights of its experts add up to 1, and its experts
are equal: the mixture computes what the dense model does, to rounding, until training makes the experts different."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megacore.checkpoint.files import TOKENIZER_DIRECTORY, verify
from megacore.config import ExpertsConfig, ResolvedModel
from megacore.convert.checkpoint_tensors import CheckpointTensors, write_weights
from megacore.convert.hf_directory import carry
from megacore.convert.plan import model_shapes, whole_config
from megacore.errors import CheckpointError
from megacore.parallel.random import normal_slice
from megacore.parallel.sharding import ShardSpec

_EXPERT = re.compile(r"\.mlp\.experts\.(gate|up|down)\.weight$")
_ROUTER = ".mlp.router.weight"
SEED = 1234
"""What routers are drawn from."""


def upcycled(config: ResolvedModel, where: Path, *, experts: int, chosen: int) -> ResolvedModel:
    """The mixture that a dense model becomes. `chosen`: experts that a token uses. Raises CheckpointError where every
    reason why it cannot become one."""
    section = ExpertsConfig(num_experts=experts, moe_router_topk=chosen)
    problems = section.problems()
    if config.experts is not None:
        problems.append(f"{where} has {config.experts.num_experts} experts already: --upcycle needs a dense model")
    model = dataclasses.replace(config, experts=section.resolve(config.ffn_hidden_size))
    if not config.disable_bias_linear:
        problems.append(
            f"{where} has biases in its linear layers (--no-disable-bias-linear), and its experts get none: --upcycle "
            "needs a model without, such as Llama, Mistral or Qwen"
        )
    if problems:
        raise CheckpointError("; ".join(problems))
    return model


def write_upcycled(tensors: CheckpointTensors, model: ResolvedModel, target: Path, *, most_bytes: int) -> None:
    """Write the checkpoint of a mixture, at step 0, with the tokenizer of the dense one."""
    shapes = model_shapes(model)
    types_of = {name: (tensors.dtype(_source(name)), shape) for name, shape in shapes.items()}
    made = _made(tensors, model, shapes)
    kept = [name for name in tensors.manifest.files if name.startswith(f"{TOKENIZER_DIRECTORY}/")]
    for name in kept:
        verify(tensors.directory / name, tensors.manifest.files[name])
    if kept:
        carry([tensors.directory / name for name in kept], target / TOKENIZER_DIRECTORY)
    tokenizer = tensors.manifest.tokenizer if kept else None
    config = whole_config(model, None)
    write_weights(target, config, types_of, made, most_bytes=most_bytes, others=kept, tokenizer=tokenizer)


def _source(name: str) -> str:
    """The dense model's tensor that one of the mixture is made of, or has the dtype of."""
    return _EXPERT.sub(r".mlp.\1.weight", name).replace(_ROUTER, ".mlp.up.weight")


def _made(
    tensors: CheckpointTensors, model: ResolvedModel, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    for name, shape in shapes.items():
        if name.endswith(_ROUTER):
            spec = ShardSpec(name=name, shape=shape)
            values = normal_slice(spec, seed=SEED, std=model.init_method_std)
            yield name, values.to(tensors.dtype(_source(name)))
        else:
            tensor = tensors.read(_source(name))
            yield name, tensor.expand(shape).contiguous() if _EXPERT.search(name) else tensor
