"""A model as the sizes of its layers, without torch: what is known of each layer before anything is built. The models'
lists of layers (gpt.py, bert.py) take names, parameters and operations from here, so that what is planned before torch
is loaded and what is built later are the same stages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.config.bert import ResolvedBertConfig
from megacore.config.dimensions import ranks_of_role
from megacore.models.flops import (
    block_flops,
    block_of_kind,
    head_flops,
    join_flops,
    without_experts,
    without_window,
)
from megacore.models.size import (
    bert_embedding_parameters,
    bert_head_parameters,
    block_parameters,
    embedding_parameters,
    head_parameters,
    norm_parameters,
    prediction_parameters,
    vocabulary_rows,
)


class ModelLayer(Protocol):
    """What partitioning and planning ask of a layer: a `LayerSpec`, or a `LayerOutline` before torch is loaded."""

    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> int: ...
    @property
    def held(self) -> int | None: ...
    @property
    def flops(self) -> float: ...
    @property
    def is_block(self) -> bool: ...
    @property
    def with_head(self) -> bool: ...
    @property
    def tied(self) -> Mapping[str, str]: ...
    @property
    def shared(self) -> int: ...
    @property
    def block(self) -> ResolvedModel | None: ...


@dataclass(frozen=True, kw_only=True)
class LayerOutline:
    """One layer."""

    name: str  # global name, the prefix of its parameters' names
    parameters: int  # of the whole layer, without padding
    held: int  # parameters that one tensor-parallel rank holds, padding included
    flops: float  # operations of its forward for one token
    is_block: bool = False  # one of the repeated layers
    with_head: bool = False  # lies on the stage of the head, and is given what the head is given
    # Parameters' local names -> global names of the earlier layer's parameters that they are
    tied: Mapping[str, str] = field(default_factory=dict)
    shared: int = 0  # how many of `held` are these, and are held once where both layers lie on one rank
    # The configuration of this block, as windows may differ; None for the embedding and the head.
    block: ResolvedModel | None = None


def outline(config: ResolvedConfig) -> list[LayerOutline]:
    """The layers of a GPT's or a BERT's resolved configuration, from the embedding to the head."""
    if isinstance(config, ResolvedBertConfig):
        return bert_outline(config)
    parallel = config.parallel
    expert_ranks = parallel.ep * parallel.expert_split
    return gpt_outline(config.model, ranks_of_role("layer", parallel), expert_ranks=expert_ranks)


@functools.lru_cache(maxsize=16)  # ways out and a search ask for the same model in many layouts
def gpt_outline(config: ResolvedModel, tp: int, *, expert_ranks: int = 1) -> list[LayerOutline]:
    """The layers of a causal language model. `expert_ranks`: ranks that divide the weights of experts."""

    def outlined(block: ResolvedModel) -> LayerOutline:
        return LayerOutline(
            name="",
            parameters=block_parameters(block),
            held=block_parameters(block, tp, expert_ranks=expert_ranks),
            flops=block_flops(block, block.max_position_embeddings),
            is_block=True,
            block=block,
        )

    kinds: dict[tuple[bool, str], LayerOutline] = {}  # by whether the block has the experts, and its attention
    blocks = []
    for i, letter in enumerate(config.attention_kinds):
        kind = (config.experts is None or config.experts.holds(i), letter)
        if kind not in kinds:
            kinds[kind] = outlined(block_of_kind(config if kind[0] else without_experts(config), letter))
        blocks.append(dataclasses.replace(kinds[kind], name=f"blocks.{i}"))
    blocks += [_predicting(config, tp, kinds[kind], depth) for depth in range(config.mtp_num_layers)]
    return _between_embedding_and_head(
        blocks,
        config,
        tp,
        embedding=_Parameters(embedding_parameters(config), embedding_parameters(config, tp)),
        head=_Parameters(head_parameters(config), head_parameters(config, tp)),
        head_flops=head_flops(config),
    )


def _predicting(config: ResolvedModel, tp: int, block: LayerOutline, depth: int) -> LayerOutline:
    """A block of multi-token prediction, which is of the kind of the last block."""
    return dataclasses.replace(
        block,
        name=f"blocks.{config.num_layers + depth}",
        parameters=block.parameters + prediction_parameters(config, depth),
        held=block.held + prediction_parameters(config, depth, tp),
        flops=block.flops + join_flops(config),
        with_head=True,
        tied={"tokens.weight": "embedding.tokens.weight"},
        shared=vocabulary_rows(config, tp) * config.hidden_size,
    )


def bert_outline(config: ResolvedBertConfig) -> list[LayerOutline]:
    """The layers of a BERT."""
    model, tp = config.model, ranks_of_role("layer", config.parallel)
    blocks = []
    for i in range(model.num_layers):
        block = bert_block(config, i)
        # ModernBERT's first block reads the output of the embedding's norm, and has none before its attention.
        missing = norm_parameters(model) if config.bert.packed and i == 0 else 0
        blocks.append(
            LayerOutline(
                name=f"blocks.{i}",
                parameters=block_parameters(block) - missing,
                held=block_parameters(block, tp) - missing,
                flops=block_flops(block, model.max_position_embeddings),
                is_block=True,
                block=block,
            )
        )
    return _between_embedding_and_head(
        blocks,
        model,
        tp,
        embedding=_Parameters(bert_embedding_parameters(config), bert_embedding_parameters(config, tp)),
        head=_Parameters(bert_head_parameters(config), bert_head_parameters(config, tp)),
        head_flops=head_flops(model) + 2.0 * model.hidden_size**2,
    )


class _Parameters(NamedTuple):
    """The parameters of a layer, and those that a tensor-parallel rank holds."""

    whole: int
    held: int


def _between_embedding_and_head(
    blocks: Iterable[LayerOutline],
    model: ResolvedModel,
    tp: int,
    *,
    embedding: _Parameters,
    head: _Parameters,
    head_flops: float,
) -> list[LayerOutline]:
    is_tied = not model.untie_embeddings_and_output_weights
    return [
        LayerOutline(name="embedding", parameters=embedding.whole, held=embedding.held, flops=2.0 * model.hidden_size),
        *blocks,
        LayerOutline(
            name="head",
            parameters=head.whole,
            held=head.held,
            flops=head_flops,
            tied={"weight": "embedding.tokens.weight"} if is_tied else {},
            shared=vocabulary_rows(model, tp) * model.hidden_size if is_tied else 0,
        ),
    ]


def bert_block(config: ResolvedBertConfig, number: int) -> ResolvedModel:
    """The configuration with the window of a block: None where it sees the whole document."""
    is_local = config.bert.packed and number % config.bert.global_attention_interval > 0
    return config.model if is_local or config.model.window_size is None else without_window(config.model)
