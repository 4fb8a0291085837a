"""Attention in blocks: memory grows with the sequence length, not with its square, forward and backward.

Queries are taken a block at a time, with the keys that the block may see; masks and biases exist for one block. The
logarithm of each softmax's sum is kept, and backward computes the scores again from it (Rabe and Staats 2021, arXiv
2112.05682; Dao et al. 2022, arXiv 2205.14135, algorithm 4). On the CPU torch's fused operator computes a block. Where
there is none, with dropout or a soft cap and on other devices, keys are taken a block at a time too: a tile of scores
is computed in fp32, and the results over the tiles of a row are merged by their logarithms, as those of other ranks'
keys can be.

Shape legend: b micro-batch, n heads, g key and value heads, q queries, k keys, d head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacore.ops.causal_attention import (
    attend_causally,
    attend_causally_backward,
    fused,
    fused_backward,
    like_projection,
)
from megacore.ops.dispatch import Node, custom_op, has_whole_heads, runs_triton
from megacore.ops.soft_cap import soft_cap_, soft_cap_slope
from megacore.ops.visibility import Visibility, distances

BLOCK = 512
"""Queries, and keys, of a block."""
NOTHING = torch.finfo(torch.float32).min
"""The logarithm of a sum over no keys: lower than every other, and finite, so that differences of two are numbers."""
_ALIBI_BLOCK = 128  # queries of a block of the fused operator where the bias differs between heads


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What decides the weights besides queries and keys."""

    view: Visibility  # who sees whom
    slopes: Tensor | None = None  # [n] fp32, of ALiBi; None: scores do not fall with distance
    # [n], of each head: what joins the sum of each softmax as exp(sink), beside the keys; None: nothing does.
    sinks: Tensor | None = None
    soft_cap: float | None = None  # of the scores, before anything is added to them; None: there is none
    dropout: float = 0.0  # probability on the weights
    # [blocks of queries, blocks of keys] int64 on the CPU: of each tile's dropout mask; None without dropout.
    seeds: Tensor | None = None
    block: int = BLOCK  # queries, and keys, of a tile

    @property
    def flat(self) -> tuple[Tensor | float | None, ...]:
        view = self.view
        tensors = view.documents, self.slopes, self.sinks, self.seeds
        return *tensors, view.causal, view.window, self.soft_cap, self.dropout, self.block

    @classmethod
    def of_flat(
        cls, documents: Any, slopes: Any, sinks: Any, seeds: Any, causal: Any, window: Any, *numbers: Any
    ) -> Scene:
        view, (soft_cap, dropout, block) = Visibility(causal=causal, window=window, documents=documents), numbers
        tensors = {"slopes": slopes, "sinks": sinks, "seeds": seeds}
        return cls(view=view, **tensors, soft_cap=soft_cap, dropout=dropout, block=block)

    def bias(self, queries: range, keys: range, device: torch.device) -> Tensor | None:
        """What is added to scores, [1 or b, 1 or n, q, k] fp32: ALiBi's term, -inf where a key is not seen; None:
        nothing."""
        seen = self.view.mask(queries, keys, device)
        if self.slopes is None:
            if seen is None:
                return None
            return torch.zeros(seen.shape, device=device).masked_fill_(~seen, -math.inf)
        distance = distances(queries, keys, device).abs().float()
        bias = -self.slopes.to(device)[:, None, None] * distance
        return bias[None] if seen is None else bias.masked_fill(~seen, -math.inf)

    def kept(self, queries: range, keys: range, like: Tensor) -> Tensor | None:
        """What dropout leaves of a tile's weights: [b, n, q, k], 0 or 1 / (1 - p); None: everything."""
        if self.seeds is None:
            return None
        seed = int(self.seeds[queries.start // self.block, keys.start // self.block])
        drawn = torch.empty_like(like).bernoulli_(
            1.0 - self.dropout, generator=torch.Generator(like.device).manual_seed(seed)
        )
        return drawn.mul_(1.0 / (1.0 - self.dropout))


@dataclass(frozen=True)
class Partial:
    """Attention of queries over some of the keys that they see: a softmax that is not divided by its sum yet. What an
    operator returns that divides is one too: its result, the logarithm of its sum, and a sum of 1."""

    out: Tensor  # [b, n, q, d]: the sum of the values times exp(score - highest), over these keys
    # [b, n, q] fp32: what was taken from the scores; the lowest finite number where a query sees no key.
    highest: Tensor
    total: Tensor  # [b, n, q] fp32: the sum of exp(score - highest); 0 where it sees none

    def merged(self, other: Partial) -> Partial:
        highest = torch.maximum(self.highest, other.highest)
        mine, others = ((x.highest - highest).exp() for x in (self, other))
        out = self.out * mine[..., None] + other.out * others[..., None]
        return Partial(out, highest, self.total * mine + other.total * others)

    def finished(self) -> tuple[Tensor, Tensor]:
        """The softmax's mean of the values, and the logarithm of its sum; where a query sees no key, 0 and
        `NOTHING`."""
        divisor = self.total.masked_fill(self.total == 0.0, 1.0)
        logarithm = (self.highest + self.total.log()).clamp_min_(NOTHING)
        return self.out / divisor[..., None], logarithm


def attend_tile(query: Tensor, key: Tensor, value: Tensor, queries: range, keys: range, scene: Scene) -> Partial:
    """Attention of query [b, n, q, d] over key and value [b, g, k, d] of a tile, in fp32. `queries`, `keys`: their
    positions in the sequence."""
    scores = _biased_(_products(query, key, scene), queries, keys, scene)
    highest = scores.amax(-1).clamp_min_(torch.finfo(scores.dtype).min)
    weights = scores.sub_(highest[..., None]).exp_()
    total = weights.sum(-1)
    if (kept := scene.kept(queries, keys, weights)) is not None:
        weights *= kept
    return Partial((_rows(weights, key) @ value.float()).view(query.shape), highest, total)


def attend_tile_backward(
    d_out: Tensor, delta: Tensor, logarithm: Tensor, operands: tuple[Tensor, Tensor, Tensor],
    queries: range, keys: range, scene: Scene,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values of one tile, in fp32. `d_out`: [b, n, q, d]; `delta`: [b, n, q] fp32,
    the sum of d_out times the result; `logarithm`: [b, n, q] fp32, of the sums: all three of the result over all keys.
    `operands`: as for `attend_tile`."""
    query, key, value = operands
    scores = _products(query, key, scene)
    slope = None if scene.soft_cap is None else soft_cap_slope(scores, scene.soft_cap)
    weights = _biased_(scores, queries, keys, scene).sub_(logarithm[..., None]).exp_()
    d_out = _rows(d_out.float(), key)
    d_weights = (d_out @ value.float().transpose(-1, -2)).view(weights.shape)
    left = weights
    if (kept := scene.kept(queries, keys, weights)) is not None:
        left, d_weights = weights * kept, d_weights.mul_(kept)
    d_value = _rows(left, key).transpose(-1, -2) @ d_out
    d_scores = d_weights.sub_(delta[..., None]).mul_(weights)
    d_scores = _rows(d_scores if slope is None else d_scores.mul_(slope), key)
    scale = 1.0 / math.sqrt(query.shape[-1])
    d_query = (d_scores @ key.float()).mul_(scale).view(query.shape)
    d_key = (d_scores.transpose(-1, -2) @ _rows(query.float(), key)).mul_(scale)
    return d_query, d_key, d_value


def _products(query: Tensor, key: Tensor, scene: Scene) -> Tensor:
    scaled = _rows(query.float() * (1.0 / math.sqrt(query.shape[-1])), key)
    scores = (scaled @ key.float().transpose(-1, -2)).view(*query.shape[:-1], key.shape[2])
    return scores if scene.soft_cap is None else soft_cap_(scores, scene.soft_cap)


def _biased_(scores: Tensor, queries: range, keys: range, scene: Scene) -> Tensor:
    """With ALiBi's term added in place, and -inf where a key is not seen."""
    bias = scene.bias(queries, keys, scores.device)
    return scores if bias is None else scores.add_(bias)


def _rows(x: Tensor, key: Tensor) -> Tensor:
    """[b, n, q, ...] -> [b, g, n/g q, ...]: the queries that share a key are rows of one product."""
    return x.reshape(x.shape[0], key.shape[1], -1, x.shape[-1])


def blocks(of: range, size: int) -> Iterator[range]:
    """Positions cut at multiples of `size`, as tiles are."""
    start = of.start
    while start < of.stop:
        stop = min(start - start % size + size, of.stop)
        yield range(start, stop)
        start = stop


def _uses_kernel(query: Tensor, scene: Scene) -> bool:
    """Whether the Triton kernel runs, which draws no dropout, caps no scores, and holds a head's row in registers."""
    if scene.dropout > 0.0 or scene.soft_cap is not None or not runs_triton(query, "query"):
        return False
    import megacore.kernels.attention as kernel

    return query.shape[-1] <= kernel.largest_head(query.dtype)


def _uses_fused(query: Tensor, scene: Scene) -> bool:
    return query.device.type == "cpu" and scene.dropout == 0.0 and scene.soft_cap is None


def _block_size(query: Tensor, scene: Scene) -> int:
    return min(scene.block, _ALIBI_BLOCK) if scene.slopes is not None and _uses_fused(query, scene) else scene.block


def _part(x: Tensor, of: range, offset: int = 0) -> Tensor:
    """Positions of [b, heads, s, d] or [b, heads, s]; x's first one is at `offset`."""
    return x[:, :, of.start - offset : of.stop - offset]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scene: Scene, offset: int, *, in_fp32: bool = False
) -> tuple[Tensor, Tensor]:
    """Over all keys: the result, and the logarithms of the sums; `offset` is the position of the first query."""
    if _is_plain(query, scene):
        out, logarithm = attend_causally((query, key, value), offset)
        return out if in_fp32 else out.to(query.dtype), logarithm
    out = like_projection(query, torch.float32 if in_fp32 else None)
    logarithm = query.new_empty(query.shape[:-1], dtype=torch.float32)
    for queries in blocks(range(offset, offset + query.shape[2]), _block_size(query, scene)):
        keys = scene.view.keys(queries, key.shape[2])
        block = _part(query, queries, offset)
        if not keys:
            _part(out, queries, offset).zero_()
            _part(logarithm, queries, offset).fill_(NOTHING)
            continue
        if _uses_fused(query, scene):
            bias = scene.bias(queries, keys, query.device)
            operands = block, _part(key, keys), _part(value, keys)
            attended = fused(*(x.float() for x in operands) if in_fp32 else operands, attn_mask=bias)
            if queries.start >= key.shape[2] and bias is not None:  # the operator returns 0 where a query sees no key
                attended = attended[0], attended[1].masked_fill(bias.amax(-1) == -math.inf, NOTHING)
        else:
            tiles = (
                attend_tile(block, _part(key, tile), _part(value, tile), queries, tile, scene)
                for tile in blocks(keys, scene.block)
            )
            attended = functools.reduce(Partial.merged, tiles).finished()
        _part(out, queries, offset).copy_(attended[0])
        _part(logarithm, queries, offset).copy_(attended[1])
    return out, logarithm


def _attend_backward(
    d_out: Tensor, operands: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor], scene: Scene, offset: int,
    *, in_fp32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values; the other arguments as those and the result of `_attend`."""
    query, key, value = operands
    if _is_plain(query, scene):
        d_query, d_key, d_value = attend_causally_backward(d_out, operands, *result, offset)
        if in_fp32:
            return d_query, d_key, d_value
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype)
    d_query = like_projection(query, torch.float32 if in_fp32 else None)
    d_key, d_value = (like_projection(x, torch.float32).zero_() for x in (key, value))
    for queries in blocks(range(offset, offset + query.shape[2]), _block_size(query, scene)):
        keys = scene.view.keys(queries, key.shape[2])
        if not keys:
            _part(d_query, queries, offset).zero_()
            continue
        block, d_block, out, logarithm = (_part(x, queries, offset) for x in (query, d_out, *result))
        if _uses_fused(query, scene):
            # In fp32: the operator would round each block's part of the gradients of keys and values to 16 bits.
            wide = [x.float() for x in (d_block, block, _part(key, keys), _part(value, keys), out)]
            bias = scene.bias(queries, keys, query.device)
            gradients = fused_backward(*wide, logarithm, 0.0, False, attn_mask=bias)
            _part(d_query, queries, offset).copy_(gradients[0])
            _part(d_key, keys).add_(gradients[1])
            _part(d_value, keys).add_(gradients[2])
            continue
        delta = (d_block.float() * out.float()).sum(-1)
        summed = torch.zeros_like(block, dtype=torch.float32)
        for tile in blocks(keys, scene.block):
            part = block, _part(key, tile), _part(value, tile)
            gradients = attend_tile_backward(d_block, delta, logarithm, part, queries, tile, scene)
            summed += gradients[0]
            _part(d_key, tile).add_(gradients[1])
            _part(d_value, tile).add_(gradients[2])
            del gradients  # the next tile's need their memory
        _part(d_query, queries, offset).copy_(summed)
    return (d_query, d_key, d_value) if in_fp32 else (d_query, d_key.to(key.dtype), d_value.to(value.dtype))


def _is_plain(query: Tensor, scene: Scene) -> bool:
    view = scene.view
    hides_more = view.reach is not None or view.documents is not None or scene.slopes is not None
    return _uses_fused(query, scene) and view.causal and not hides_more


# A scene and what belongs to it as torch's operators take it, which know flat lists only; in the order of `Scene.flat`.
_SCENE = (
    "Tensor? documents, Tensor? slopes, Tensor? sinks, Tensor? seeds, bool causal, SymInt? window, float? soft_cap, "
    "float dropout, SymInt block, SymInt offset, bool in_fp32"
)


@custom_op(
    "megacore::block_attention",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_SCENE}) -> (Tensor, Tensor)",
)
def _block_attention(query: Tensor, key: Tensor, value: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    scene, (offset, in_fp32) = Scene.of_flat(*flat[:-2]), flat[-2:]
    wide = in_fp32 or scene.sinks is not None
    if _uses_kernel(query, scene):
        import megacore.kernels.attention as kernel

        out, logarithm = kernel.forward(query, key, value, **_masks(scene), offset=offset, in_fp32=wide)
    else:
        out, logarithm = _attend(query, key, value, scene, offset, in_fp32=wide)
    if scene.sinks is not None:
        take_sinks_(out, logarithm, scene.sinks)
    return out if in_fp32 else out.to(query.dtype), logarithm


@_block_attention.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return like_projection(query, torch.float32 if others[-1] else None), query.new_empty(
        query.shape[:-1], dtype=torch.float32
    )


@custom_op(
    "megacore::block_attention_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logarithm, {_SCENE}) "
    "-> (Tensor, Tensor, Tensor)",
)
def _block_attention_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logarithm: Tensor, *flat: Any
) -> tuple[Tensor, Tensor, Tensor]:
    scene, (offset, in_fp32) = Scene.of_flat(*flat[:-2]), flat[-2:]
    if _uses_kernel(query, scene):
        import megacore.kernels.attention as kernel

        delta = (d_out.float() * out.float()).sum(-1).contiguous()
        d_out = d_out if has_whole_heads(d_out) else d_out.contiguous()
        # Of a part of the queries the logarithms are a part of those of all.
        statistics = logarithm.contiguous(), delta
        return kernel.backward(d_out, query, key, value, *statistics, **_masks(scene), offset=offset, in_fp32=in_fp32)
    return _attend_backward(d_out, (query, key, value), (out, logarithm), scene, offset, in_fp32=in_fp32)


@_block_attention_backward.register_fake
def _(d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    kind = torch.float32 if others[-1] else None
    return like_projection(query, kind), like_projection(key, kind), like_projection(value, kind)


def _masks(scene: Scene) -> dict[str, Any]:
    documents, slopes = (None if x is None else x.contiguous() for x in (scene.view.documents, scene.slopes))
    return {"documents": documents, "slopes": slopes, "causal": scene.view.causal, "reach": scene.view.reach}


def tiles_of(operator: torch._ops.OpOverload, operands: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The torch code by which a call of an operator of this file computes a soft cap's tiles; None: it is another call.
    On fake tensors the operators only give their results. A count of memory runs this code in their place."""
    name = operator._schema.name.removeprefix("megacore::")
    definition = {"block_attention": _block_attention, "block_attention_backward": _block_attention_backward}.get(name)
    if definition is None:
        return None
    names = [argument.name for argument in operator._schema.arguments]
    settings = dict(zip(names, operands, strict=True))
    return definition._init_fn if settings["soft_cap"] is not None and not settings["dropout"] else None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, documents, slopes, sinks, seeds, *ctx.options, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, documents, slopes, sinks, seeds)


def _differentiate(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_block_attention_backward(d_out, *ctx.saved_tensors, *ctx.options, False), *(None,) * 11


_block_attention.register_autograd(_differentiate, setup_context=_keep)


# ---- sinks


def take_sinks_(out: Tensor, logarithm: Tensor, sinks: Tensor) -> None:
    """Let a learned number of each head join the sums of its softmax, in place (Agarwal et al. 2025, arXiv 2508.10925,
    section 2.2). What backward computes from the result and the new sums are then the gradients of queries, keys and
    values with sinks.

    Args:
        out: [b, n, q, d] fp32, attention without sinks.
        logarithm: [b, n, q] fp32, of its sums.
        sinks: [n].
    """
    sinks = sinks.float()[:, None]
    out.mul_(torch.sigmoid(logarithm - sinks)[..., None])
    logarithm.copy_(torch.logaddexp(logarithm, sinks))


class _SinkGradient(Node):
    """Attention as it is; backward gives the gradient of the sinks, whose value is 0: each takes weight from what is
    seen."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, logarithm: Tensor, sinks: Tensor) -> Tensor:
        ctx.save_for_backward(out, logarithm, sinks)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, Tensor]:
        out, logarithm, sinks = ctx.saved_tensors
        weights = (sinks.float()[:, None] - logarithm).exp_()
        terms = weights.mul_((d_out.float() * out.float()).sum(-1))
        return d_out, None, terms.sum((0, 2)).neg_().to(sinks.dtype)


def with_sinks(out: Tensor, logarithm: Tensor, sinks: Tensor | None) -> Tensor:
    """A result of `attend` or `block_attention` with sinks, through which they get their gradient. `logarithm`: of its
    sums. `sinks`: [n], those that it was computed with; None: there are none."""
    if sinks is None or not sinks.requires_grad:
        return out
    joined: Tensor = _SinkGradient.apply(out, logarithm, sinks)
    return joined


# ---- attention of whole sequences, and of parts


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, *, view: Visibility, slopes: Tensor | None = None,
    sinks: Tensor | None = None, soft_cap: float | None = None, dropout: float = 0.0, block: int = BLOCK,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of queries over the keys that they see, and the logarithms of its softmax's sums. Returns [b, n, q, d],
    laid out as [b, q, n, d], and [b, n, q] fp32, which has no gradient.

    Args:
        query: [b, n, q, d]; any strides, the last dimension contiguous.
        key: [b, g, k, d], of the whole sequence.
        view: who sees whom; its documents are those of the whole sequence.
        slopes: [n] fp32, of ALiBi.
        sinks: [n], of each head: what joins the sum of each softmax as exp(sink).
        soft_cap: of the scores, before anything is added to them.
        dropout: probability on the weights. A seed for each tile is drawn from the CPU's default generator.
        block: queries, and keys, of a tile.
        offset: position of the first query.
    """
    seeds = None
    if dropout:
        tiles = -(-(offset + query.shape[2]) // block), -(-key.shape[2] // block)
        seeds = torch.randint(2**63 - 1, tiles, device="cpu")
    fixed = None if sinks is None else sinks.detach()
    scene = Scene(view=view, slopes=slopes, sinks=fixed, soft_cap=soft_cap, dropout=dropout, seeds=seeds, block=block)
    out, logarithm = _block_attention(query, key, value, *scene.flat, offset, False)
    return with_sinks(out, logarithm, sinks), logarithm


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, view: Visibility, slopes: Tensor | None = None,
    sinks: Tensor | None = None, soft_cap: float | None = None, offset: int = 0, in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `block_attention` returns, for operators that compute their gradients by `attend_backward`. The keys may be
    a part of the sequence: positions then count from the first of them, also those of the documents, which reach to the
    last query. Where a query sees none of the keys, the result is 0, and its logarithm `NOTHING`. `query`: as for
    `block_attention`, as all that follow. `in_fp32`: whether the result is not rounded to query's type."""
    scene = Scene(view=view, slopes=slopes, sinks=sinks, soft_cap=soft_cap)
    out, logarithm = _block_attention(query, key, value, *scene.flat, offset, in_fp32)
    return out, logarithm


def attend_backward(
    d_out: Tensor, out: Tensor, logarithm: Tensor, operands: tuple[Tensor, Tensor, Tensor],
    *, view: Visibility, slopes: Tensor | None = None, soft_cap: float | None = None, offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values in fp32, to which more keys and more queries add. What is not named
    here is as for `attend`.

    Args:
        d_out: [b, n, q, d], gradient of the result over all keys.
        out: [b, n, q, d], the result over all keys, of which `operands` may have a part.
        logarithm: [b, n, q] fp32, of the sums over all keys.
        operands: queries, keys and values.
    """
    scene = Scene(view=view, slopes=slopes, soft_cap=soft_cap)
    tensors = d_out, *operands, out, logarithm
    d_query, d_key, d_value = _block_attention_backward(*tensors, *scene.flat, offset, True)
    return d_query, d_key, d_value
