"""What a transformer block keeps for backward: counted from the storages that autograd saves, and by formula.

docs/guides/memory.md derives the formula, term by term.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megacore.config import ResolvedConfig
from megacore.parallel.mesh import build_mesh
from megacore.parallel.recompute import Recomputed
from megacore.parallel.sharding import sharded_parameters
from megacore.pipeline.stage import LayerRunner, Stage
from megacore.plan.activations import Operator, kept_by_operator, shared_bytes
from megacore.train.step_trace import fake_step
from tests.parity.runs import Layout, make_config, make_trainer

SEQUENCE, HIDDEN, HEADS, MICRO_BATCH = 64, 128, 8, 2
# The layers that count; the first block's input is the embedding's output, the last one's output the head's input.
BLOCKS = 3


class Kept:
    """Bytes that autograd saves inside the blocks, each storage once, parameters left out; by the operator that saves
    it first."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._ours = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._held: dict[int, tuple[Operator, Tensor]] = {}  # alive, so that no storage is used twice
        self._names: dict[int, str] = {}

    def enter(self, block: nn.Module) -> None:
        """What is saved from now on belongs to a block."""
        self._names = {id(module): name for name, module in block.named_modules()}

    def pack(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage()._cdata
        if tensor.untyped_storage().nbytes() and address not in self._ours and address not in self._held:
            self._held[address] = self._operator(), tensor
        return tensor

    def _operator(self) -> Operator:
        """Which one saves: by the module whose method runs."""
        frame: FrameType | None = sys._getframe(2)
        by_products = False
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            by_products |= file.parent.name == "parallel" and file.stem != "recompute"
            name = self._names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return _OPERATORS.get(name) or ("products of norms" if by_products else "activation")
            frame = frame.f_back
        return "block"

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
    def bytes(self) -> dict[Operator, int]:
        found: Counter[Operator] = Counter()
        for operator, tensor in self._held.values():
            found[operator] += tensor.untyped_storage().nbytes()
        return dict(found)


# By the name of a module in its block. The MLP itself calls the products of its input, and the activation.
_OPERATORS: dict[str, Operator] = {
    "attention_norm": "norms",
    "mlp_norm": "norms",
    "attention.qkv": "products of norms",
    "attention": "attention",
    "attention.query_norm": "attention",
    "attention.key_norm": "attention",
    "attention.output": "attention",
    "mlp.gate": "products of norms",
    "mlp.up": "products of norms",
    "mlp.down": "product of the activation",
    "attention_dropout": "dropout",
    "mlp_dropout": "dropout",
    "": "block",
}


def activation_config(layout: Layout, directory: str, **changes: Any) -> ResolvedConfig:
    plain: dict[str, Any] = {"num_layers": BLOCKS, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    plain |= {"seq_length": SEQUENCE, "micro_batch_size": MICRO_BATCH, "hidden_dropout": 0.1}
    return make_config(layout, directory, **(plain | changes))


def kept_per_block(
    rank: int, world_size: int, layout: Layout, directory: str, changes: dict[str, Any]
) -> dict[Operator, float]:
    """Bytes that one microbatch's forward keeps in a block on this rank, by operator."""
    config = activation_config(layout, directory, **changes)
    mesh = build_mesh(config.parallel)
    return kept_by_a_stage(make_trainer(config, mesh).model.chunks[0], config)


def kept_on_a_device(layout: Layout, directory: str, changes: dict[str, Any]) -> dict[Operator, float]:
    """The same with the operators of a GPU, on fake tensors: no other rank exists."""
    config = activation_config(layout, directory, **changes)
    with fake_step(config) as step:
        return kept_by_a_stage(step.model.chunks[0], config)


def kept_by_a_stage(stage: Stage, config: ResolvedConfig) -> dict[Operator, float]:
    """Bytes that a forward of the first stage keeps in a block, by operator."""
    stage.train()
    kept = Kept(list(sharded_parameters(stage)))
    assert stage.runner is not None
    runner: LayerRunner = stage.runner

    class Counting:
        def run_layer(self, chunk: int, index: int, layer: nn.Module, x: Tensor) -> Tensor:
            block = layer.layer if isinstance(layer, Recomputed) else layer
            if not hasattr(block, "attention"):
                return runner.run_layer(chunk, index, layer, x)
            kept.enter(block)
            with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor), kept.inner_hooks():
                return runner.run_layer(chunk, index, layer, x)

    stage.runner = Counting()
    shape = MICRO_BATCH, config.data.seq_length
    tokens = torch.arange(MICRO_BATCH * config.data.seq_length).view(shape) % config.model.vocab_size
    stage(tokens)
    return {operator: size / BLOCKS for operator, size in kept.bytes.items()}


def by_formula(config: ResolvedConfig, *, on_cpu: bool = True) -> dict[Operator, float]:
    """Bytes that a block keeps for backward on a rank, by operator, as the planner counts them."""
    kept = kept_by_operator(config, config.model, on_cpu=on_cpu, recompute=config.training.recompute)
    if config.training.recompute != "full":
        kept["attention"] += shared_bytes(config) / BLOCKS
    return {operator: size for operator, size in kept.items() if size}


def kept_by_the_paper(config: ResolvedConfig) -> float:
    """The same at 16 bits with materialised attention (Korthikanti et al. 2022, arXiv 2205.05198, table 2)."""
    parallel, recompute = config.parallel, config.training.recompute
    h, t = config.model.hidden_size, parallel.tp
    unit = config.training.micro_batch_size * config.data.seq_length * h
    if recompute == "full":
        return 2 * unit / (t if parallel.sequence_parallel else 1)
    core = 0.0 if recompute == "selective" else 5 * config.model.num_attention_heads * config.data.seq_length / h
    return unit * ((34 + core) / t if parallel.sequence_parallel else 10 + (24 + core) / t)
