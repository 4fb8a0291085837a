"""What GPT pretraining is: the layers of models/gpt.py, and the cross-entropy of the next token. Shape legend: s
sequence, b micro-batch, V vocabulary, t tensor-parallel ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.data import Microbatch, PackedMicrobatch, PaddedMicrobatch
from megacore.layers.context import BuildContext
from megacore.models.flops import adapted_flops_per_sequence, flops_per_sequence
from megacore.models.gpt import gpt_layers
from megacore.models.initialize import InitialBuffers, InitialWeights, RandomWeights
from megacore.models.spec import DescribesLayers, with_adapters
from megacore.ops import CrossEntropyOptions, summed_cross_entropy
from megacore.parallel.experts import ExpertRanks
from megacore.parallel.mesh import Mesh
from megacore.parallel.products import TORCH, Products
from megacore.parallel.random import RandomStreams
from megacore.train.task import TransformerTask


class GPTTask(TransformerTask):
    """Predict the next token. The loss is a sum, not a mean: it is divided by the tokens of the whole global batch, so
    that microbatches and ranks with different token counts have the right weight. `weights`: where initial values come
    from; None: drawn from the run's seed. `products`: computes the matrix products of linear layers."""

    def __init__(
        self,
        config: ResolvedConfig,
        mesh: Mesh,
        *,
        weights: InitialWeights | None = None,
        products: Products = TORCH,
        layers: DescribesLayers = gpt_layers,
    ) -> None:
        streams = RandomStreams(config.training.seed, mesh.device)
        context = BuildContext.of(
            config, layer_group=mesh.layer, sequence_group=mesh.sequence, device=mesh.device, streams=streams
        )
        experts = ExpertRanks.of(mesh, sequences=config.training.global_batch_size, apart=config.training.reproducible)
        context = dataclasses.replace(context, products=products, experts=experts)
        drawn = RandomWeights(config.model, seed=config.training.seed, width_ratio=config.width_ratio)
        specs = with_adapters(layers(config.model, context), config.lora, config.model, context)
        super().__init__(config, context, specs, weights or drawn)
        self.side_inputs = config.beside_hidden_states
        if self.side_inputs:
            self.batch_type = PaddedMicrobatch if "padding" in self.side_inputs else PackedMicrobatch
        self.layers_from = "configuration" if layers is gpt_layers else "program"

    def initialize_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Give what belongs to a rank's layers and is no parameter its values, in place."""
        if isinstance(self.weights, InitialBuffers):
            self.weights.fill_buffers(buffers)

    def of_rank(self, microbatch: Microbatch) -> Microbatch:
        """This rank's positions, each with its label: the next token, even if another rank holds its position. If the
        loss is computed in canonical blocks, the labels are those of all positions."""
        if self.sequence.group.size == 1:
            return microbatch
        return dataclasses.replace(
            microbatch,
            tokens=self.sequence.take(microbatch.tokens, 1),
            labels=self.scored.take(microbatch.labels, 1),
            loss_mask=self.scored.take(microbatch.loss_mask, 1),
        )

    def first_input(self, microbatch: Microbatch) -> Tensor | tuple[Tensor, ...]:
        """The tokens [b, s]; of packed documents with what else the layers get, of whole sequences."""
        if not isinstance(microbatch, PackedMicrobatch):
            return microbatch.tokens
        known = {"documents": microbatch.documents, "positions": microbatch.positions}
        if isinstance(microbatch, PaddedMicrobatch):
            known["padding"] = microbatch.padding
        return (microbatch.tokens, *(known[name] for name in self.side_inputs))

    def loss(self, output: Tensor, microbatch: Microbatch) -> Tensor:
        """Logits [b, s, padded V/t], or the loss where the head has it -> summed cross-entropy, scalar fp32."""
        return self._cross_entropy(output, microbatch, self.options)

    def evaluation_loss(self, output: Tensor, microbatch: Microbatch) -> Tensor:
        """The negative log-likelihood, without label smoothing and z-loss."""
        return self._cross_entropy(output, microbatch, None)

    def counts(self, microbatch: Microbatch) -> Tensor:
        return self.counted_here(microbatch.loss_mask.sum(dtype=torch.float64))

    def flops_per_sequence(self) -> float:
        model, length, lora = self.config.model, self.config.data.seq_length, self.config.lora
        if lora.lora_rank is not None:
            return adapted_flops_per_sequence(model, length, lora)
        return flops_per_sequence(model, length)

    def _cross_entropy(self, output: Tensor, microbatch: Microbatch, options: CrossEntropyOptions | None) -> Tensor:
        if self.head_has_loss:
            return self.counted_here(output)
        labels, mask = microbatch.labels, microbatch.loss_mask
        if self.compiled_loss is not None:
            return self.compiled_loss(output, labels, mask, options=options, share=self.share)
        return summed_cross_entropy(output, labels, mask, options=options, share=self.share)
