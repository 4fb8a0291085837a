"""Keys and values of the tokens that a model has read, and states of linear attention: each further token costs one
position instead of all of them. Only megacore's own layers are known to look at other positions in their attention
alone, which `KeyValues.of` checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config import ResolvedModel
from megacore.layers.attention import Attention, SelfAttention
from megacore.layers.block import MLP, GatedMLP, TransformerBlock
from megacore.layers.latent_attention import LatentAttention
from megacore.layers.linear_attention import GatedDeltaNet, LinearAttention, Mamba2, Past
from megacore.layers.lora import is_adapter
from megacore.layers.moe import MoE
from megacore.models.gpt import GPTEmbedding, GPTHead, next_token_logits
from megacore.ops.block_attention import Scene, attend
from megacore.pipeline.stage import Stage

_ATTENTIONS, _MLPS = (SelfAttention, LatentAttention, GatedDeltaNet, Mamba2), (MLP, GatedMLP, MoE)
_BY_LENGTH = ("dynamic", "longrope")  # kinds of --rope-scaling that turn earlier positions otherwise in a longer text


class KeyValues:
    """Reads a text piece by piece with a whole model on one rank; at most `capacity` tokens."""

    def __init__(self, stage: Stage, config: ResolvedModel, capacity: int) -> None:
        assert capacity <= config.max_position_embeddings
        self._stage, self._config, self._capacity, self.length = stage, config, capacity, 0
        self._kept: dict[Attention, tuple[Tensor, Tensor]] = {}
        self._mixes: dict[nn.Module, partial[Tensor]] = {}  # what attentions call in place of their `mix`
        for module in stage.modules():
            if isinstance(module, LinearAttention):
                self._mixes[module] = partial(_continued, module, Past())
            elif isinstance(module, Attention):
                self._mixes[module] = partial(self._mix, module)
                if module.rotary is not None:
                    # Tables of the full length at once: they are made anew whenever a longer text comes.
                    module.rotary.tables(capacity, next(stage.parameters()).device)

    @classmethod
    def of(cls, stage: Stage, config: ResolvedModel, capacity: int) -> KeyValues | None:
        """None for a model in which a token changes what earlier ones have left: one with layers of a program's own,
        rotations that depend on the length, or experts with a capacity. Arguments as for this class."""
        kinds = [type(layer) for layer in stage.layers]
        own = kinds[:1] == [GPTEmbedding] and kinds[-1:] == [GPTHead] and all(map(_is_own, stage.layers[1:-1]))
        drops = config.experts is not None and config.experts.moe_expert_capacity_factor is not None
        if not own or drops or config.rope_scaling in _BY_LENGTH:
            return None
        return cls(stage, config, capacity)

    @torch.inference_mode()
    def next_logits(self, tokens: list[int]) -> Tensor:
        """Logits [V] of the token after these, which follow those that have been read."""
        device = next(self._stage.parameters()).device
        text = torch.tensor([tokens], device=device)
        positions = torch.arange(self.length, self.length + len(tokens), device=device)[None]
        with self._remembering():
            logits = self._stage((text, torch.ones_like(text), positions))
        self.length += len(tokens)
        return next_token_logits(logits, self._config.vocab_size)[0]

    @contextmanager
    def laid_out(self) -> Iterator[None]:
        """Meanwhile, weights with more rows than columns have other strides, and the same values. On a CPU one row
        times them then reads memory about twice as fast: MKL adds up long columns, instead of many short rows one by
        one. There are no copies, which would need the memory once more."""
        turned = [weight for weight in self._wide() if weight.is_contiguous()]
        try:
            for weight in turned:
                weight.data = weight.data.t().contiguous().t()
            yield
        finally:
            for weight in turned:
                weight.data = weight.data.contiguous()

    def _wide(self) -> Iterator[Tensor]:
        """Large weights of products. One that is part of a larger piece of memory, as in training, stays there."""
        layers = self._stage.layers[1:]  # without tables, of which rows are looked up, unless the head has them too
        for name, one in layers.named_parameters():
            is_apart = one.untyped_storage().nbytes() == one.numel() * one.element_size()
            is_wide = one.dim() == 2 and one.shape[0] > one.shape[1] and not is_adapter(name)
            if is_wide and is_apart and one.device.type == "cpu" and one.dtype == torch.float32:
                yield one

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        # For the time of a call only, so that the model is at any time what it was before; and not by `setattr`, which
        # in a module takes longer than everything else here.
        for module, mix in self._mixes.items():
            vars(module)["mix"] = mix
        try:
            yield
        finally:
            for module in self._mixes:
                del vars(module)["mix"]

    def _mix(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        """In place of `Attention.mix`: over the keys and values of all tokens so far."""
        if attention not in self._kept:
            room = (*key.shape[:2], self._capacity, key.shape[3])
            self._kept[attention] = key.new_empty(room), value.new_empty(room)
        stop = self.length + key.shape[2]
        for kept, new in zip(self._kept[attention], (key, value), strict=True):
            kept[:, :, self.length : stop] = new
        keys, values = (kept[:, :, :stop] for kept in self._kept[attention])
        if self.length == 0:
            return type(attention).mix(attention, query, key, value, None)
        view = attention.view
        slopes = None if attention.alibi is None else attention.alibi.slopes
        cap, sinks = attention.soft_cap, attention.sinks
        if cap is not None or sinks is not None:  # which torch's operator does not know
            return attend(query, keys, values, view=view, slopes=slopes, sinks=sinks, soft_cap=cap, offset=self.length)[
                0
            ]
        seen = Scene(view=view, slopes=slopes).bias(range(self.length, stop), range(stop), query.device)
        bias = None if seen is None else seen.to(query.dtype)
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, enable_gqa=is_grouped)


def _continued(attention: LinearAttention, past: Past, projected: Tensor, rates: Tensor, **where: Tensor) -> Tensor:
    """In place of `LinearAttention.mix`: all tokens are of one document."""
    return attention.after(past, projected, rates)


def _is_own(block: nn.Module) -> bool:
    """Whether all that a block consists of is megacore's: no subclass, which may look elsewhere."""
    return type(block) is TransformerBlock and type(block.attention) in _ATTENTIONS and type(block.mlp) in _MLPS
