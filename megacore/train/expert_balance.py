"""How evenly the tokens of a step use the experts, and the bias that evens it out.

Routers count what they choose in the forwards of training, and not in a second pass or an evaluation. After the last
backward the counts are summed over the ranks that have other tokens, as integers. With a bias, an expert that too few
tokens have chosen is then raised by a fixed amount, and one with too many lowered (Wang et al. 2024, arXiv 2408.15664,
algorithm 1): no loss is added. A step that leaves the weights as they are leaves the biases too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.layers.moe import MoE
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.mesh import Mesh
from megacore.pipeline.stage import Stage
from megacore.train.step_hooks import StepHook

if TYPE_CHECKING:
    from megacore.optim.update import Outcome
    from megacore.train.step import TrainStep


class ExpertBalance(StepHook):
    """The routers of this rank's stages."""

    def __init__(self, chunks: Sequence[Stage], config: ResolvedConfig, mesh: Mesh) -> None:
        self._mesh, self._rate = mesh, config.experts.moe_router_bias_update_rate
        self._sizes = config.batch_sizes
        self._drops = config.experts.moe_expert_capacity_factor is not None
        self._blocks = config.model.mixtures
        # Ranks with other tokens: with sequence parallelism those of the layer group too.
        self._groups = (mesh.loss, *([mesh.layer] if config.parallel.sequence_parallel else []))
        self._layers: dict[str, MoE] = {}  # by global name
        for chunk in chunks:
            for layer, name in zip(chunk.layers, chunk.names, strict=True):
                for module in layer.modules():
                    if isinstance(module, MoE):
                        self._layers[f"{name}.mlp"] = module
        size = (len(self._layers), (config.experts.num_experts or 0) + 2)
        self._counts = torch.zeros(size, dtype=torch.int64, device=mesh.device)

    def begin_step(self, step: int, loss_scale: float) -> None:
        """Count from 0. The losses of routers are multiplied by the loss scale too, and divided by the sequences of a
        batch of full size, whatever those of this step are."""
        loss_scale *= self._sizes.full / self._sizes.of_step(step)
        for layer in self._layers.values():
            layer.ranks.loss_scale.value = loss_scale
            layer.router.counts.zero_()
            layer.router.gap.fill_(torch.inf)

    @torch.no_grad()
    def after_update(self, steps: TrainStep, outcome: Outcome) -> None:
        """Sum the counts of the step over ranks, and move the biases if it has updated the weights."""
        if not self._layers:
            return
        self._counts = torch.stack([layer.router.counts for layer in self._layers.values()])  # [layers, E + 2]
        for group in self._groups:
            all_reduce_(self._counts, group)
        if outcome.skipped is not None:
            return
        loads = self._counts[:, :-2]
        # In integers: above or below the mean does not depend on rounding.
        below = (loads.sum(1, keepdim=True) - loads.shape[1] * loads).sign()
        for layer, load, direction in zip(self._layers.values(), loads, below, strict=True):
            if layer.router.bias is not None and layer.router.weight.requires_grad:
                layer.router.bias.add_(direction, alpha=self._rate)
            if layer.router.loads is not None:
                layer.router.loads.copy_(load)

    def buffers(self) -> dict[str, Tensor]:
        """The biases, and the counts of the last step that a loss goes by, by global name, for a checkpoint."""
        return {
            f"{name}.router.{kind}": buffer
            for name, layer in self._layers.items()
            for kind, buffer in (("bias", layer.router.bias), ("loads", layer.router.loads))
            if buffer is not None
        }

    def loads(self) -> dict[str, Tensor]:
        """How many tokens of the last global batch chose each expert, [E] int64, by the name of the layer."""
        return dict(zip(self._layers, self._counts[:, :-2], strict=True))

    def figures(self) -> dict[str, float]:
        """The balance of the last step by the keys of metrics.jsonl, equal on every rank; all ranks call this
        together. The violation of a layer is the largest load of an expert over the mean, less 1 (arXiv 2408.15664,
        section 4.1)."""
        rows = all_reduce_(self._table(), self._mesh.pipeline).tolist()  # each layer is on one stage
        layers = {block: dict(zip(_COLUMNS, row, strict=True)) for block, row in zip(self._blocks, rows, strict=True)}
        violations = [layer["max_violation"] for layer in layers.values()]
        figures = {
            "moe/max_violation": max(violations),
            "moe/mean_violation": sum(violations) / len(violations),
            "moe/idle_experts": sum(layer.pop("idle") for layer in layers.values()),
            "moe/smallest_gap": min(layer["smallest_gap"] for layer in layers.values()),
        }
        if self._drops:
            figures["moe/dropped"] = sum(layer["dropped"] for layer in layers.values()) / len(layers)
        for block, layer in layers.items():
            if not self._drops:
                del layer["dropped"]
            figures |= {f"moe/block_{block}/{name}": value for name, value in layer.items()}
        return figures

    def _table(self) -> Tensor:
        """[layers of the model, columns] fp64, with zeros for the layers of other stages."""
        table = torch.zeros(len(self._blocks), len(_COLUMNS), dtype=torch.float64, device=self._mesh.device)
        if not self._layers:
            return table
        gaps = torch.stack([layer.router.gap for layer in self._layers.values()]).neg_()
        for group in self._groups:
            all_reduce_(gaps, group, "max")
        loads, dropped = self._counts[:, :-2].double(), self._counts[:, -1].double()
        mean, total = loads.mean(1), loads.sum(1)
        columns = (
            loads.amax(1) / mean - 1.0,
            loads.amin(1) / mean,
            dropped / total,
            (loads == 0).sum(1).double(),
            -gaps.double(),
        )
        here = [number for number, block in enumerate(self._blocks) if f"blocks.{block}.mlp" in self._layers]
        table[here] = torch.stack(columns, dim=1)
        return table


_COLUMNS = ("max_violation", "min_load", "dropped", "idle", "smallest_gap")
