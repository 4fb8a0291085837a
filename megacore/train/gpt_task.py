"""What GPT pretraining is: the layers of models/gpt.py, and the cross-entropy of the next token. Shape legend: s
sequence, b micro-batch, V vocabulary, t tensor-parallel ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.data import Microbatch, PackedMicrobatch, PaddedMicrobatch
from megacore.errors import ConfigError
from megacore.layers.context import BuildContext
from megacore.models.flops import adapted_flops_per_sequence, flops_per_sequence
from megacore.models.gpt import gpt_layers
from megacore.models.initialize import InitialBuffers, InitialWeights, RandomWeights
from megacore.models.spec import DescribesLayers, LayerSpec, with_adapters
from megacore.ops import CrossEntropyOptions, summed_cross_entropy
from megacore.parallel.compiled import alias, compile_function
from megacore.parallel.experts import ExpertRanks
from megacore.parallel.loss import Scored, vocabulary_share
from megacore.parallel.mesh import Mesh
from megacore.parallel.products import TORCH, Products
from megacore.parallel.random import RandomStreams
from megacore.parallel.sharding import ShardedParameter
from megacore.parallel.turns import Turns
from megacore.pipeline.runtime import LossWeight
from megacore.pipeline.stage import TensorSpec
from megacore.train.task import DTYPES, Task


class TransformerTask(Task):
    """What GPT and BERT share: a configured model on tokens, whose loss is a cross-entropy. `context`: with which the
    layers were described. `layers`: specs of the whole model. `loss_names`: as for `Task`."""

    def __init__(
        self,
        config: ResolvedConfig,
        context: BuildContext,
        layers: Sequence[LayerSpec],
        weights: InitialWeights,
        *,
        loss_names: tuple[str, ...] = (),
        evaluation_names: tuple[str, ...] = (),
    ) -> None:
        super().__init__(layers, context.streams, loss_names=loss_names, evaluation_names=evaluation_names)
        self.config, self.group, self.sequence = config, context.layer_group, context.sequence
        self.scored, self.blocks, self.weights = context.attended, context.blocks, weights
        self.share = vocabulary_share(config.model.vocab_size, context.layer_group)
        self.options = context.loss_options
        self.head_has_loss = context.chunked_loss(config.model.vocab_size).in_parts
        self.compiled_loss: Callable[..., Tensor] | None = None  # not needed where the head has the loss
        if config.training.compile:
            split = config.training.reproducible or config.parallel.may_split_backward
            backend = config.training.compile_backend
            compiled = compile_function(summed_cross_entropy, backend=backend, split_backward=split)
            self.compiled_loss = lambda logits, *others, **choices: compiled(alias(logits), *others, **choices)

    def initialize(self, parameters: Iterable[ShardedParameter]) -> None:
        self.weights.fill(parameters)

    def stage_input_specs(self, microbatch: Any, stage: int) -> tuple[TensorSpec, ...]:
        """Between any two stages: the hidden states [b, s, h] of this rank's positions, or [b, s/t, h] if the ranks of
        the layer group split them, and what travels with them, such as document numbers, [b, s] each."""
        config = self.config
        samples, positions = config.training.micro_batch_size, config.rank_positions
        split = self.group.size if config.parallel.sequence_parallel else 1
        hidden = TensorSpec((samples, positions // split, config.model.hidden_size), DTYPES[config.precision.precision])
        beside = TensorSpec((samples, config.data.seq_length), torch.int64)
        return hidden, *(beside for _ in config.beside_hidden_states)

    def counted_here(self, x: Tensor) -> Tensor:
        """x, a sum over whole sequences, for a total over all ranks. Of ranks that divide sequences in canonical blocks
        only the first counts it: on the others it is 0, with the gradient of x, as each computes some blocks of the
        vocabulary."""
        return x if not self.blocks.divide or self.blocks.sequence.group.is_first else x - x.detach()

    def last_inputs(self, weight: LossWeight | None, microbatch: Any) -> tuple[Tensor, ...]:
        """Those of `Scored`, where the head computes the loss, or blocks before it predict later tokens."""
        if not self.head_has_loss and self.main_losses is None:
            return ()
        labels = microbatch.labels
        factor = torch.ones(self.loss_shape, device=labels.device) if weight is None else weight.value()
        return Scored(labels, microbatch.loss_mask, factor)


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
        self.turns = Turns(streams) if mesh.dispatch.size > 1 else None
        experts = ExpertRanks.of(
            mesh,
            sequences=config.training.global_batch_size,
            apart=config.training.reproducible,
            turns=self.turns,
        )
        context = dataclasses.replace(context, products=products, experts=experts)
        drawn = RandomWeights(config.model, seed=config.training.seed, width_ratio=config.width_ratio)
        specs = with_adapters(layers(config.model, context), config.lora, config.model, context)
        self.depths = config.model.mtp_num_layers
        names = ("loss", *(f"mtp_{depth + 1}_loss" for depth in range(self.depths))) if self.depths else ()
        super().__init__(config, context, specs, weights or drawn, loss_names=names, evaluation_names=names)
        if self.depths:
            if not any(spec.with_head for spec in specs):
                raise ConfigError([f"--mtp-num-layers {self.depths} is not for a program's own layers: leave it out"])
            weight = config.model.mtp_loss_scaling_factor / self.depths
            self.loss_factors = torch.tensor([1.0, *[weight] * self.depths], dtype=torch.float64, device=mesh.device)
            self.main_losses = 1
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
        if self.depths:
            microbatch = self._with_later_tokens(microbatch)
        if self.sequence.group.size == 1:
            return microbatch
        return dataclasses.replace(
            microbatch,
            tokens=self.sequence.take(microbatch.tokens, 1),
            labels=self.scored.take(microbatch.labels, microbatch.labels.ndim - 1),
            loss_mask=self.scored.take(microbatch.loss_mask, microbatch.labels.ndim - 1),
        )

    def _with_later_tokens(self, microbatch: Microbatch) -> Microbatch:
        """With labels and loss mask [1 + depths, b, s]: at depth k, position i predicts what the model predicts at
        position i + k, unless that lies beyond the text, or in another document."""
        labels, masks = [microbatch.labels], [microbatch.loss_mask]
        for depth in range(1, self.depths + 1):
            mask = _shifted(microbatch.loss_mask, depth)
            if isinstance(microbatch, PackedMicrobatch):
                mask = mask * (_shifted(microbatch.documents, depth) == microbatch.documents)
            labels.append(_shifted(microbatch.labels, depth))
            masks.append(mask)
        return dataclasses.replace(microbatch, labels=torch.stack(labels), loss_mask=torch.stack(masks))

    def first_input(self, microbatch: Microbatch) -> Tensor | tuple[Tensor, ...]:
        """The tokens [b, s]; of packed documents with what else the layers get, of whole sequences."""
        if not isinstance(microbatch, PackedMicrobatch):
            return microbatch.tokens
        known = {"documents": microbatch.documents, "positions": microbatch.positions}
        if isinstance(microbatch, PaddedMicrobatch):
            known["padding"] = microbatch.padding
        return (microbatch.tokens, *(known[name] for name in self.side_inputs))

    def loss(self, output: Any, microbatch: Microbatch) -> Tensor:
        """Logits [b, s, padded V/t], or the loss where the head has it -> summed cross-entropy, scalar fp32. With
        multi-token prediction: what the head returns -> that of each depth."""
        return self._cross_entropy(output, microbatch, self.options)

    def evaluation_loss(self, output: Any, microbatch: Microbatch) -> Tensor:
        """The negative log-likelihood, without label smoothing and z-loss."""
        return self._cross_entropy(output, microbatch, None)

    def counts(self, microbatch: Microbatch) -> Tensor:
        return self.counted_here(microbatch.loss_mask.sum((-2, -1), dtype=torch.float64))

    def flops_per_sequence(self) -> float:
        model, length, lora = self.config.model, self.config.data.seq_length, self.config.lora
        if lora.lora_rank is not None:
            return adapted_flops_per_sequence(model, length, lora)
        return flops_per_sequence(model, length)

    def _cross_entropy(self, output: Any, microbatch: Microbatch, options: CrossEntropyOptions | None) -> Tensor:
        if isinstance(output, tuple):
            of_depth = zip(output, microbatch.labels, microbatch.loss_mask, strict=True)
            return torch.stack([self._summed(*each, options) for each in of_depth])
        if self.head_has_loss:
            return self.counted_here(output)
        return self._summed(output, microbatch.labels, microbatch.loss_mask, options)

    def _summed(self, logits: Tensor, labels: Tensor, mask: Tensor, options: CrossEntropyOptions | None) -> Tensor:
        loss = self.compiled_loss or summed_cross_entropy
        return loss(logits, labels, mask, options=options, share=self.share)


def _shifted(x: Tensor, by: int) -> Tensor:
    """[b, s] -> each position has what is `by` positions further on, the last ones 0."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1)
