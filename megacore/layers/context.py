"""What a layer is built with besides its sizes: its groups, device, and how it computes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypedDict

import torch

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.config.logits import loss_chunks
from megacore.config.reproducible import canonical_blocks
from megacore.ops import Attention, CrossEntropyOptions
from megacore.parallel.canonical import ONE_BLOCK, Blocks
from megacore.parallel.context import WHOLE, SequenceShards
from megacore.parallel.experts import ExpertRanks
from megacore.parallel.loss import ChunkedLoss
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.products import TORCH, Products
from megacore.parallel.random import Dropout, RandomStreams


class ParallelArguments(TypedDict):
    """Keyword arguments of every parallel layer."""

    group: Group
    sequence_parallel: bool
    device: torch.device


class LinearArguments(ParallelArguments):
    """Those of every parallel linear layer."""

    products: Products
    split_backward: bool


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """Handed down from the entry point to every layer."""

    layer_group: Group = ALONE  # ranks that split the same matrices
    sequence: SequenceShards = WHOLE  # which positions of each sequence this rank holds
    device: torch.device  # where parameters live
    streams: RandomStreams  # where dropout masks come from
    sequence_parallel: bool = False  # between the tensor-parallel layers, activations are split along the sequence
    # Attention keeps only queries, keys and values, and is computed again in backward.
    recompute_attention: bool = False
    recompute_light: bool = False  # the outputs of norms and activations are computed again in backward, and not kept
    recompute_full: bool = False  # blocks keep only their input, and are computed again in backward
    # Input and weight gradients are computed separately, as some schedules and --reproducible need.
    split_backward: bool = False
    # Names of what follows the hidden states in the input of a block, in order.
    side_inputs: tuple[str, ...] = ("documents", "positions")
    padded_documents: bool = True  # whether document numbers may be 0, which is padding
    attention: Attention = "auto"  # which implementation computes attention
    products: Products = TORCH  # computes the matrix products of every linear layer, the output layer's included
    blocks: Blocks = ONE_BLOCK  # where sums over features, heads and positions are cut, for --reproducible
    loss_chunks: int = 1  # of the tokens, for which the output layer computes logits and loss; 1: it gives the logits
    # Label smoothing and z-loss of training, for an output layer that computes the loss.
    loss_options: CrossEntropyOptions = field(default_factory=partial(CrossEntropyOptions, in_place=True))
    experts: ExpertRanks = field(default_factory=ExpertRanks)  # ranks that divide experts

    @classmethod
    def of(
        cls,
        config: ResolvedConfig,
        *,
        layer_group: Group,
        sequence_group: Group = ALONE,
        device: torch.device,
        streams: RandomStreams,
    ) -> BuildContext:
        return cls(
            layer_group=layer_group,
            sequence=SequenceShards(sequence_group, config.context_comm),
            device=device,
            streams=streams,
            sequence_parallel=bool(config.parallel.sequence_parallel),
            recompute_attention=config.training.recompute == "selective",
            recompute_light=config.training.recompute == "light",
            recompute_full=config.training.recompute == "full",
            split_backward=config.training.reproducible or config.parallel.may_split_backward,
            side_inputs=config.beside_hidden_states,
            padded_documents=config.padded_documents,
            attention=config.training.attention,
            blocks=Blocks(
                canonical_blocks(config),
                layer_group,
                bool(config.parallel.sequence_parallel),
                SequenceShards(sequence_group, config.context_comm),
            ),
            loss_chunks=loss_chunks(config),
            loss_options=CrossEntropyOptions(
                label_smoothing=config.training.label_smoothing, z_loss=config.training.z_loss, in_place=True
            ),
        )

    @property
    def attended(self) -> SequenceShards:
        """Which positions attention and the loss get: all, where canonical blocks gather them."""
        return WHOLE if self.blocks.divide else self.sequence

    @property
    def expert_blocks(self) -> Blocks:
        """Where sums over the features of experts are cut; every rank that splits an expert has all its rows."""
        return replace(self.blocks, group=self.experts.layer, sequence_parallel=False, everywhere=True)

    @property
    def parallel_arguments(self) -> ParallelArguments:
        return {"group": self.layer_group, "sequence_parallel": self.sequence_parallel, "device": self.device}

    @property
    def linear_arguments(self) -> LinearArguments:
        return {**self.parallel_arguments, "products": self.products, "split_backward": self.split_backward}

    def chunked_loss(self, vocab_size: int, soft_cap: float | None = None) -> ChunkedLoss:
        """How the output layer computes its loss with the logits. `soft_cap`: of the logits; None: they have none."""
        return ChunkedLoss(
            vocab_size=vocab_size,
            chunks=self.loss_chunks,
            group=self.layer_group,
            sequence_parallel=self.sequence_parallel,
            products=self.products,
            blocks=self.blocks,
            soft_cap=soft_cap,
        )

    def hidden_dropout(self, config: ResolvedModel, site: str) -> Dropout | None:
        """Dropout of what is written to the residual stream; None if the configuration has none. `config`: its
        probability. `site`: global name of the position in the model."""
        if not config.hidden_dropout:
            return None
        # The slice of the residual stream that this rank holds; where all ranks hold all of it, they draw one mask.
        part, parts = (self.layer_group.rank, self.layer_group.size) if self.sequence_parallel else (0, 1)
        shard = self.sequence.group.rank * parts + part
        return Dropout(config.hidden_dropout, self.streams, site, shard=shard)
