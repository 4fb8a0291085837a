"""Initial values of every parameter, in one module, as functions of the seed and the global name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from megacore.config import ResolvedModel
from megacore.config.parameter_groups import is_hidden_matrix
from megacore.layers.lora import IN, is_adapter
from megacore.parallel.random import normal_slice, uniform_slice
from megacore.parallel.sharding import ShardedParameter

_RESIDUAL_OUTPUTS = ("attention.output.weight", "attention.out.weight", "mlp.down.weight", "experts.down.weight")


class InitialWeights(Protocol):
    """Where a new model's parameters get their values from."""

    def fill(self, parameters: Iterable[ShardedParameter]) -> None:
        """Give a rank's named parameters their values, in place."""


@runtime_checkable
class InitialBuffers(Protocol):
    """Initial weights that also have values of what is no parameter, such as the biases of routers."""

    def fill_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Give what is no parameter, by global name, its values in place, where they are not those of a new layer."""


class RandomWeights:
    """Initial values drawn from a seed (see `initialize`)."""

    def __init__(self, config: ResolvedModel, *, seed: int, width_ratio: float = 1.0) -> None:
        self._config, self._seed, self._width_ratio = config, seed, width_ratio

    def fill(self, parameters: Iterable[ShardedParameter]) -> None:
        initialize(parameters, self._config, seed=self._seed, width_ratio=self._width_ratio)


class BesideAdapters:
    """Initial weights of a model with adapters: these are drawn, and all else is what the run starts from.

    Args:
        base: where the frozen weights come from.
        drawn: where those of adapters do.
    """

    def __init__(self, base: InitialWeights, drawn: InitialWeights) -> None:
        self._base, self._drawn = base, drawn

    def fill(self, parameters: Iterable[ShardedParameter]) -> None:
        """Give a rank's named parameters their values, in place."""
        parameters = list(parameters)
        self._base.fill(one for one in parameters if not is_adapter(one.spec.name))
        self._drawn.fill(one for one in parameters if is_adapter(one.spec.name))

    def fill_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Give what is no parameter its values, in place, where what the run starts from has them."""
        if isinstance(self._base, InitialBuffers):
            self._base.fill_buffers(buffers)


@torch.no_grad()
def initialize(
    parameters: Iterable[ShardedParameter], config: ResolvedModel, *, seed: int, width_ratio: float = 1.0
) -> None:
    """Fill parameters in place; the same global tensor comes out on every layout, bit for bit.

    | parameter | value | why |
    |---|---|---|
    | biases | 0 | |
    | norm weights | 1, or 0 with `layernorm_1p` | the norm starts as plain standardisation |
    | attention.output, mlp.down weights | N(0, std / sqrt(2 layers)) | keeps the residual's variance (GPT-2, 2.3) |
    | every other matrix, both embeddings, sinks | N(0, std) | `--init-method-std`, 0.02 in GPT-2 |
    | vocabulary padding | 0 | it never takes part in a result |
    | linear attention: convolution, its bias | even within 1 / sqrt(positions) | as torch does |
    | linear attention: decay | log of 1 to 16, even | as in Mamba-2 (arXiv 2405.21060) |
    | linear attention: the skip of values | 1 | as in Mamba-2 |
    | linear attention: bias of decay | steps of 0.001 to 0.1, even in their log, before softplus | as in Mamba-2 |
    | A of adapters | even within 1 / sqrt(inputs) | as PEFT does; B is 0, so that they add nothing at first |
    | with muP, matrices of blocks | the above / sqrt(width ratio) | outputs as large as at the base width |
    """
    for parameter in parameters:
        name = parameter.spec.name
        parameter.zero_()
        if is_adapter(name):
            if f".{IN}." in name:
                bound = 1 / math.sqrt(parameter.spec.shape[1])
                uniform_slice(parameter.spec, seed=seed, bound=bound, out=parameter.spec.unpadded(parameter))
        elif name.endswith("norm.weight"):
            parameter.fill_(0.0 if config.layernorm_1p and not name.endswith("value_norm.weight") else 1.0)
        elif name.endswith((".conv", ".conv_bias")):
            bound = 1 / math.sqrt(config.linear_conv_kernel_dim)
            uniform_slice(parameter.spec, seed=seed, bound=bound, out=parameter)
        elif name.endswith(".skip"):
            parameter.fill_(1.0)
        elif name.endswith(("log_decay", "decay_bias")):
            _initialize_decay(parameter, seed=seed)
        elif not name.endswith("bias"):
            scale = 1 / math.sqrt(2 * config.num_layers) if name.endswith(_RESIDUAL_OUTPUTS) else 1.0
            if is_hidden_matrix(name):
                scale /= math.sqrt(width_ratio)
            values = parameter.spec.unpadded(parameter)
            normal_slice(parameter.spec, seed=seed, std=config.init_method_std * scale, out=values)


def _initialize_decay(parameter: ShardedParameter, *, seed: int) -> None:
    uniform_slice(parameter.spec, seed=seed, bound=1.0, out=parameter)
    if parameter.spec.name.endswith("log_decay"):
        parameter.mul_(7.5).add_(8.5).log_()
        return
    low, high = math.log(1e-3), math.log(1e-1)
    steps = parameter.mul_((high - low) / 2).add_((high + low) / 2).exp()
    parameter.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus gives the steps
