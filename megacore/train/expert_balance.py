"""How evenly the tokens of a step use the experts, and the bias that evens it out.

Routers count what they choose in the forwards of training, and not in a second pass or an evaluation. After the last
backward the counts are summed over the ranks that have other tokens, as integers. With a bias, an expert that too few
tokens have chosen is then raised by a fixed amount, and one with too many lowered (Wang et al. 2024, arXiv 2408.15664,
algorithm 1): no loss is added. A step that leaves the weights as they are leaves the biases too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.layers.moe import MoE
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.mesh import Mesh
from megacore.pipeline.stage import Stage


class ExpertBalance:
    """The routers of this rank's stages.

    Args:
        chunks: this rank's stages.
        config: resolved.
        mesh: this rank's groups.
    """

    def __init__(self, chunks: Sequence[Stage], config: ResolvedConfig, mesh: Mesh) -> None:
        self._mesh, self._rate = mesh, config.experts.moe_router_bias_update_rate
        # Ranks with other tokens: with sequence parallelism those of the layer group too.
        self._groups = (mesh.loss, *([mesh.layer] if config.parallel.sequence_parallel else []))
        self._layers: dict[str, MoE] = {}  # by global name
        for chunk in chunks:
            for layer, name in zip(chunk.layers, chunk.names, strict=True):
                for module in layer.modules():
                    if isinstance(module, MoE):
                        self._layers[f"{name}.mlp"] = module
        self._counts = torch.zeros(len(self._layers), config.experts.num_experts or 0, dtype=torch.int64)

    def begin_step(self, loss_scale: float) -> None:
        """The forwards of a step follow.

        Args:
            loss_scale: a factor of its loss, and of those of the routers.
        """
        for layer in self._layers.values():
            layer.ranks.loss_scale.value = loss_scale
            layer.router.counts.zero_()

    @torch.no_grad()
    def end_step(self, *, updated: bool) -> None:
        """Sum the counts of the step over ranks, and move the biases.

        Args:
            updated: whether the step has updated the weights.
        """
        if not self._layers:
            return
        self._counts = torch.stack([layer.router.counts for layer in self._layers.values()])  # [layers, E]
        for group in self._groups:
            all_reduce_(self._counts, group)
        if not updated:
            return
        # In integers: above or below the mean does not depend on rounding.
        below = (self._counts.sum(1, keepdim=True) - self._counts.shape[1] * self._counts).sign()
        for layer, direction in zip(self._layers.values(), below, strict=True):
            if layer.router.bias is not None:
                layer.router.bias.add_(direction, alpha=self._rate)

    def buffers(self) -> dict[str, Tensor]:
        """The biases by global name, for a checkpoint."""
        return {
            f"{name}.router.bias": layer.router.bias
            for name, layer in self._layers.items()
            if layer.router.bias is not None
        }

    def figures(self) -> dict[str, float]:
        """The balance of the last step by the keys of metrics.jsonl, equal on every rank; all ranks call this together.

        The violation of a layer is the largest load of an expert over the mean, less 1 (arXiv 2408.15664, section 4.1).
        """
        counts = self._counts.double()
        violations = counts.amax(1) / counts.mean(1) - 1.0 if len(counts) else counts.new_zeros(0)
        device = self._mesh.device
        idle = (counts == 0).sum().double()
        sums = torch.stack([violations.sum(), counts.new_full((), len(counts)), idle]).to(device)
        worst = torch.cat([violations, violations.new_zeros(1)]).max().to(device)
        total, layers, unused = all_reduce_(sums, self._mesh.pipeline).tolist()
        return {
            "moe/max_violation": float(all_reduce_(worst, self._mesh.pipeline, "max")),
            "moe/mean_violation": total / max(layers, 1.0),
            "moe/idle_experts": unused,
        }
