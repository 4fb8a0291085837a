"""What a transformer block keeps for backward: counted from the storages that autograd saves, and by formula.

docs/memory.md derives the formula, term by term.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megacore.config import ResolvedConfig
from megacore.parallel.mesh import build_mesh
from megacore.parallel.recompute import Recomputed
from megacore.parallel.sharding import sharded_parameters
from megacore.pipeline.stage import LayerRunner
from megacore.plan.activations import block_bytes, shared_bytes
from tests.parity.runs import Layout, make_config, make_trainer

SEQUENCE, HIDDEN, HEADS, MICRO_BATCH = 64, 128, 8, 2
# The layers that count; the first block's input is the embedding's output, the last one's output the head's input.
BLOCKS = 3


class Kept:
    """Bytes that autograd saves inside the blocks, each storage once, parameters left out."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._ours = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._held: dict[int, Tensor] = {}  # alive, so that no address is used twice

    def pack(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if tensor.untyped_storage().nbytes() and address not in self._ours:
            self._held.setdefault(address, tensor)
        return tensor

    def inner_hooks(self) -> AbstractContextManager[Any]:
        """Count also what hooks inside leave, as autograd calls the innermost alone."""
        counts = self.pack

        class Hooks(torch.autograd.graph.saved_tensors_hooks):
            def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
                def noted(tensor: Tensor) -> Any:
                    packed = pack(tensor)
                    return counts(packed) if isinstance(packed, Tensor) else packed

                super().__init__(noted, unpack)

        return mock.patch("torch.autograd.graph.saved_tensors_hooks", Hooks)

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._held.values())


def activation_config(layout: Layout, directory: str, **changes: Any) -> ResolvedConfig:
    plain: dict[str, Any] = {"num_layers": BLOCKS, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    plain |= {"seq_length": SEQUENCE, "micro_batch_size": MICRO_BATCH, "hidden_dropout": 0.1}
    return make_config(layout, directory, **(plain | changes))


def kept_per_block(rank: int, world_size: int, layout: Layout, directory: str, changes: dict[str, Any]) -> float:
    """Bytes that one microbatch's forward keeps in a block on this rank."""
    config = activation_config(layout, directory, **changes)
    mesh = build_mesh(config.parallel)
    stage = make_trainer(config, mesh).model.chunks[0].train()
    kept = Kept(list(sharded_parameters(stage)))
    assert stage.runner is not None
    runner: LayerRunner = stage.runner

    class Counting:
        def run_layer(self, chunk: int, index: int, layer: nn.Module, x: Tensor) -> Tensor:
            block = layer.layer if isinstance(layer, Recomputed) else layer
            if not hasattr(block, "attention"):
                return runner.run_layer(chunk, index, layer, x)
            with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor), kept.inner_hooks():
                return runner.run_layer(chunk, index, layer, x)

    stage.runner = Counting()
    shape = MICRO_BATCH, config.data.seq_length
    tokens = torch.arange(MICRO_BATCH * config.data.seq_length).view(shape) % config.model.vocab_size
    stage(tokens)
    return kept.bytes / BLOCKS


def kept_by_formula(config: ResolvedConfig) -> float:
    """Bytes that a block keeps for backward on a rank, as the planner counts them; on a CPU."""
    own = block_bytes(config, config.model, on_cpu=True, recompute=config.training.recompute)
    return own + shared_bytes(config) / BLOCKS


def kept_by_the_paper(config: ResolvedConfig) -> float:
    """The same at 16 bits with materialised attention (Korthikanti et al. 2022, arXiv 2205.05198, table 2)."""
    parallel, recompute = config.parallel, config.training.recompute
    h, t = config.model.hidden_size, parallel.tp
    unit = config.training.micro_batch_size * config.data.seq_length * h
    if recompute == "full":
        return 2 * unit / (t if parallel.sequence_parallel else 1)
    core = 0.0 if recompute == "selective" else 5 * config.model.num_attention_heads * config.data.seq_length / h
    return unit * ((34 + core) / t if parallel.sequence_parallel else 10 + (24 + core) / t)
