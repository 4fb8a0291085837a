"""The options of ZeRO: how parameters, gradients and the optimizer's state are sharded, and in which formats. They hold
for a rank; a bucket has those of its replica group (`ZeroOptions.for_group`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from megacore.config.optimizers import AdamWConfig, OptimizerSettings
from megacore.config.parameter_groups import ParameterGroups
from megacore.parallel.mesh import Group
from megacore.zero.compressed import CODES, Code
from megacore.zero.exact_sums import LARGEST_SUM, UNIT


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """How state is sharded over the ranks of a replica group."""

    stage: int = 0  # ZeRO stage, 0 to 3
    compute_dtype: torch.dtype = torch.float32  # of parameters and activations
    reduce_dtype: torch.dtype = torch.float32  # in which gradients are accumulated and reduced
    overlap_grad_reduce: bool = True  # reduce gradients while backward runs; otherwise wait at once
    overlap_param_gather: bool = True  # gather updated parameters while the next forward runs; otherwise wait at once
    # Largest number of gradients of one parameter that a step adds up, over microbatches and ranks. If positive, they
    # are added exactly (zero/exact_sums.py); 0: they are added in `reduce_dtype`.
    exact_terms: int = 0
    # Linear layers add the gradients of their weights to the sums themselves. This applies where the sums are fp32 and
    # the parameters are not (see `products.adds_in_fp32`).
    products_add: bool = False
    offload: bool = False  # keep master weights, and what the optimizer needs beside them, in host memory
    # Stage 3 keeps the shards of parameters and gradients there too, and so do groups of one rank.
    offload_params: bool = False
    # The optimizer updates the shard of a bucket as one flat tensor, so its gradients are one flat tensor too.
    one_pass: bool = False
    optimizer: OptimizerSettings = field(default_factory=AdamWConfig)  # says which parameters no shard may split
    groups: ParameterGroups = field(default_factory=ParameterGroups)  # says which parameters have other rates
    # The format in which gradients are sent to be reduced; "none": `reduce_dtype`.
    compression: Literal["none", "bf16", "int8"] = "none"

    @property
    def code(self) -> Code | None:
        """In which the ranks of a replica group send gradients, or the momentum; None: gradients, as they are."""
        name = self.optimizer.momentum_format or self.compression
        return None if name == "none" else CODES[name]

    def for_group(self, group: Group) -> ZeroOptions:
        """As they are for a replica group. One of a single rank has nothing to shard, and stage 0; but the parameters
        that are in host memory are there whatever the group."""
        return self if group.size > 1 or self.offload_params else replace(self, stage=0)

    @property
    def summed(self) -> str:
        """What is summed in a compressed format."""
        return "gradient" if self.optimizer.momentum_format is None else "momentum"

    @property
    def shard_unit(self) -> int:
        """Elements at whose multiples parameters and shards begin in a bucket."""
        return math.lcm(self.optimizer.shard_unit, 1 if self.code is None else self.code.format.block)

    @property
    def largest_exact(self) -> float:
        """Largest entry of a microbatch's gradient, without the loss scale, that exact sums take."""
        return UNIT * LARGEST_SUM / max(self.exact_terms, 1)

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.int64 if self.exact_terms else self.reduce_dtype

    @property
    def summed_dtype(self) -> torch.dtype:
        return torch.float32 if self.exact_terms else self.reduce_dtype
