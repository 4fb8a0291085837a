"""Scaled dot-product attention (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1), in two implementations.

`sdpa` is torch's fused operator, which never writes the scores out; what that cannot do with memory that grows with
the sequence length, block_attention.py does. `fused-softmax` computes scores, their softmax and the mix as three steps
one can read; it keeps the weights, b x heads x s x s numbers. Both know every restriction on who sees whom: causal, a
window, documents packed into one sequence, padding. Queries may share key and value heads (Ainslie et al. 2023, arXiv
2305.13245), scores may have a soft cap (soft_cap.py), and may fall with distance (ALiBi; Press et al. 2022, arXiv
2108.12409).

Shape legend: b micro-batch, n heads, g key and value heads, s positions, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from megacore.ops.block_attention import BLOCK, block_attention
from megacore.ops.dispatch import (
    FLOATS,
    has_whole_heads,
    require,
    require_floats,
    require_integers,
    require_same_device,
    require_shape,
    require_whole,
)
from megacore.ops.soft_cap import soft_capped
from megacore.ops.softmax import fused_softmax
from megacore.ops.varlen_attention import can_attend, fits, varlen_attention
from megacore.ops.visibility import Visibility, distances

WHOLE = 1024
"""The longest sequence for which masks, biases and, with dropout on a CPU, weights are made whole."""

Attention = Literal["auto", "sdpa", "fused-softmax"]
_NAMES = get_args(Attention)


def resolved(implementation: Attention) -> Attention:
    """The implementation of `auto`: sdpa, which is the faster one for every mask that the models have."""
    return "sdpa" if implementation == "auto" else implementation


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What decides which of its kernels torch's fused operator runs: one layer's sizes on this rank, and its type."""

    heads: int
    groups: int  # key and value heads
    head_size: int  # dimensions of a head
    seq_length: int
    dtype: torch.dtype
    causal: bool = True  # whether no position sees a later one
    masked: bool = False  # whether documents, a window or ALiBi restrict it
    alibi: bool = False  # whether it is ALiBi
    dropout: float = 0.0  # probability on the weights
    capped: bool = False  # whether scores have a soft cap, or softmax sinks


def attention_backend(device: torch.device, shape: AttentionShape) -> str:
    """What computes `sdpa` on a device: `blocks`, `varlen flash`, or torch's choice of `cudnn`, `flash`, `efficient` or
    `math`."""
    query, key = (
        torch.empty(1, heads, shape.seq_length, shape.head_size, dtype=shape.dtype, device=device)
        for heads in (shape.heads, shape.groups)
    )
    if takes_blocks(
        shape.seq_length,
        masked=shape.masked,
        dropout=shape.dropout,
        capped=shape.capped,
        on_cpu=device.type == "cpu",
    ):
        takes_flash = can_attend(query, alibi=shape.alibi, dropout=shape.dropout) and not shape.capped
        return "varlen flash" if takes_flash else "blocks"
    mask = None
    if shape.masked:
        mask = torch.zeros(1, 1, shape.seq_length, shape.seq_length, dtype=shape.dtype, device=device)
    grouped = shape.heads != shape.groups
    if grouped and _repeats_groups(query, mask):
        key, grouped = query, False
    chosen = torch._fused_sdp_choice(
        query, key, key, mask, shape.dropout, shape.causal and mask is None, enable_gqa=grouped
    )
    return SDPBackend(chosen).name.removesuffix("_ATTENTION").lower()


def on_cuda(device: torch.device) -> bool:
    """Whether tensors of a device are those of CUDA, whatever it calls itself."""
    return torch.empty(0, device=device).is_cuda


def slower_attention(device: torch.device, shape: AttentionShape) -> str | None:
    """A sentence for a run on CUDA that gets a slower kernel than the device has; None where it gets the best."""
    if not on_cuda(device) or (backend := attention_backend(device, shape)) in ("varlen flash", "blocks"):
        return None
    if not fits(shape.dtype, shape.head_size):
        return None  # no fast kernel takes it: that is what was asked for
    hopper = torch.get_device_module(device).get_device_capability(device) >= (9, 0)
    has_cudnn = hopper and not torch.are_deterministic_algorithms_enabled()  # torch then rules out cudnn's
    best = "efficient" if shape.masked else "cudnn" if has_cudnn else "flash"
    if backend == best or (best == "flash" and backend == "cudnn") or (best == "efficient" and backend == "cudnn"):
        return None
    switch = "mem_efficient" if best == "efficient" else best
    return (
        f"torch computes attention with its {backend} kernel on this device, where {best} is expected, which is "
        f"faster: {shape.heads} heads of {shape.head_size} over {shape.groups} of keys, {shape.seq_length} positions "
        f"in {str(shape.dtype).removeprefix('torch.')}. Check torch.backends.cuda.{switch}_sdp_enabled() and, for "
        f"cudnn, the version of the installed cuDNN"
    )


class _Cache:
    """The latest tensor of each kind of layer: the layers of a kind share it.

    A tensor of another shape replaces the one of its kind, and a further kind the oldest one, so that few outlive their
    forward pass. Fake tensors are kept only where the cache is made among them, as the rest of their model; those of a
    torch.compile trace are not kept. Neither are tensors of inference mode, which autograd could not save later: that
    mode is left while a tensor is made.

    `kinds`: the number of tensors to keep.
    """

    def __init__(self, kinds: int = 1) -> None:
        self._kinds, self._type = kinds, type(torch.empty(0))
        self._kept: dict[Hashable, tuple[Hashable, Tensor]] = {}  # kind -> shape, and the tensor; the oldest first

    def get(self, kind: Hashable, shape: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The tensor of a kind, to be read only. `shape`: what else it depends on, such as length, dtype and device."""
        if torch.compiler.is_compiling() or type(torch.empty(0)) is not self._type:
            return make()
        if kind not in self._kept or self._kept[kind][0] != shape:
            self._kept.pop(kind, None)  # the new one may use its memory
            if len(self._kept) == self._kinds:
                del self._kept[next(iter(self._kept))]
            with torch.inference_mode(False), torch.no_grad():
                self._kept[kind] = shape, make()
        return self._kept[kind][1]


class Alibi:
    """The term that ALiBi adds to scores: minus the distance, times the slope of the head. Keeps the causal bias of the
    last sequence length, n x s x s numbers, for all layers. `slopes`: [n] fp32, of the heads computed here."""

    def __init__(self, slopes: Tensor) -> None:
        self.slopes = slopes
        self._causal = _Cache()

    def bias(self, like: Tensor, seen: Tensor | None, *, causal: bool) -> Tensor:
        """[1 or b, n, s, s] in `like`'s dtype, -inf where a key is not seen. `seen`: from `visible`."""
        length = like.shape[-2]
        if seen is not None or not causal:
            bias = self._distances(length, like)
            return bias if seen is None else bias.masked_fill(~seen, -math.inf)

        def causally() -> Tensor:
            later = torch.ones(length, length, dtype=torch.bool, device=like.device).triu(1)
            return self._distances(length, like).masked_fill_(later, -math.inf)

        return self._causal.get(None, (length, like.dtype, like.device), causally)

    def _distances(self, length: int, like: Tensor) -> Tensor:
        distance = distances(range(length), range(length), like.device).abs()
        return (-self.slopes.to(like.device)[:, None, None] * distance).to(like.dtype).unsqueeze(0)


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of all heads of a layer: a geometric series from 2^(-8/p) to 2^-8 for p heads, p a power of two. Of
    the heads beyond the largest power of two, each takes every second slope of the series for twice as many."""
    power = 1 << (heads.bit_length() - 1)

    def series(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    return series(power) + series(2 * power)[::2][: heads - power]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    view: Visibility,
    alibi: Alibi | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    implementation: Attention = "auto",
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over what each position sees. Returns [b, n, s, d]. Raises ValueError where an
    argument's device, dtype, shape or strides do not fit.

    Args:
        query: [b, n, s, d]; any strides, the last dimension contiguous.
        key: [b, g, s, d]; query head i reads key and value head i g / n.
        value: [b, g, s, d].
        view: who sees whom; its documents are int64 or int32. No position sees padding, whose result is 0.
        alibi: bias by distance.
        sinks: [n], of each head: what joins the sum of each softmax as exp(sink); `sdpa` then computes attention in
            blocks, as it does with a soft cap.
        soft_cap: of the scores q k^T / sqrt(d), above 0.
        dropout: probability on the attention weights, in [0, 1); drawn from the default generator of query's
            device, or from the CPU's where attention is computed in blocks.
        implementation: which one.
    """
    if implementation not in _NAMES:
        raise ValueError(f"implementation is {implementation!r}: it must be one of {', '.join(_NAMES)}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}: it must be in [0, 1)")
    causal, window, documents = view.causal, view.window, view.documents
    if not _fit(query, key, value, window, documents):
        _check(query, key, value, window, documents)
    b, _, s, d = query.shape
    masked = alibi is not None or ((window is not None or documents is not None) and view.restricts(s))
    fused = implementation != "fused-softmax"
    if sinks is not None:
        require_shape((query.shape[1],), "[n] of query's heads", sinks=sinks)
        require_same_device(query=query, sinks=sinks)
    capped, on_cpu = soft_cap is not None or sinks is not None, query.device.type == "cpu"
    blocks = fused and (masked or capped or dropout > 0.0)
    blocks = blocks and takes_blocks(s, masked=masked, dropout=dropout, capped=capped, on_cpu=on_cpu)
    if fused and not masked and not blocks:
        return _sdpa(query, key, value, None, causal=causal, dropout=dropout)
    seen = None if blocks else visible(view, s, query.device)
    if blocks:
        mixed = _mixed_in_blocks(query, key, value, view, alibi=alibi, sinks=sinks, soft_cap=soft_cap, dropout=dropout)
    elif fused:
        mask = seen
        if alibi is not None:
            mask = alibi.bias(query, seen, causal=causal)
        elif seen is not None and documents is None:
            mask = _as_bias(seen, query.dtype, (view.reach, causal))
        mixed = _sdpa(query, key, value, mask, causal=causal and mask is None, dropout=dropout)
    else:
        # 1 / sqrt(d) as a factor of the query, a power of two, which loses no bits, and a divisor of the fp32 scores,
        # the rest. Products of unscaled queries would leave fp16's range, 65,504, sqrt(d) times earlier than scores do.
        shrink = 2.0 ** -math.ceil(math.log2(d) / 2)
        divisor = math.sqrt(d) * shrink
        scores = (query * shrink) @ _repeated(key, query).transpose(-1, -2)
        if soft_cap is not None:
            scores, divisor = soft_capped(scores.float() / divisor, soft_cap).to(scores.dtype), 1.0
        if sinks is not None and causal and seen is None:
            seen = _near(view, s, query.device)
        if alibi is None and sinks is None and documents is None and (causal or seen is None):
            weights = fused_softmax(scores, scale=1.0 / divisor, causal=causal, window=window if causal else None)
        else:
            bias = None if alibi is None else alibi.bias(query, seen, causal=causal)
            weights = _masked_softmax(scores, divisor, seen, bias, sinks)
        mixed = _dropped_mix(weights, _repeated(value, query), dropout)
    return mixed if documents is None or not view.padded else mixed.masked_fill((documents == 0).view(b, 1, s, 1), 0.0)


def takes_blocks(length: int, *, masked: bool, dropout: float, on_cpu: bool, capped: bool = False) -> bool:
    """Whether `sdpa` computes attention a block at a time: where scores have a soft cap or softmax sinks, which torch's
    operator does not know; or where it would need masks, which causality is not, or has no fused form, and the sequence
    is long."""
    return capped or (length > WHOLE and (masked or (dropout > 0.0 and on_cpu)))


def _mixed_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    view: Visibility,
    *,
    alibi: Alibi | None,
    sinks: Tensor | None,
    soft_cap: float | None,
    dropout: float,
) -> Tensor:
    mixed = None
    if soft_cap is None and sinks is None and can_attend(query, alibi=alibi is not None, dropout=dropout):
        mixed = varlen_attention(query, key, value, view)
    if mixed is None:
        slopes = None if alibi is None else alibi.slopes
        mixed, _ = block_attention(
            query, key, value, view=view, slopes=slopes, sinks=sinks, soft_cap=soft_cap, dropout=dropout, block=BLOCK
        )
    return mixed


def visible(view: Visibility, length: int, device: torch.device) -> Tensor | None:
    """Which keys a query sees, [1 or b, 1, s, s] bool; None where only causality decides, or nothing. Padding sees
    padding here, so that every query sees some key: the result of padding is set to 0 afterwards."""
    documents, near = view.documents, Visibility(causal=view.causal, window=view.window)
    if not view.restricts(length):
        return None
    seen = _masks.get((view.reach, view.causal), (length, device), lambda: _near(near, length, device))
    return seen if documents is None else seen & (documents[:, None, :, None] == documents[:, None, None, :])


# Of the model that runs. A model has at most two kinds of masks: of its global and of its local layers.
_masks, _mask_biases = _Cache(2), _Cache(2)


def _near(view: Visibility, length: int, device: torch.device) -> Tensor:
    """[1, 1, s, s] bool: which keys are nearer than the view's reach and, if causal, not later."""
    seen = view.mask(range(length), range(length), device)
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device) if seen is None else seen


def _as_bias(seen: Tensor, dtype: torch.dtype, kind: Hashable) -> Tensor:
    """A mask as 0 and -inf: torch makes a tensor of these from a boolean mask in every call, and keeps each."""

    def made() -> Tensor:
        return torch.zeros(seen.shape, device=seen.device, dtype=dtype).masked_fill_(~seen, -math.inf)

    return _mask_biases.get(kind, (seen.shape, dtype, seen.device), made)


def _repeats_groups(query: Tensor, mask: Tensor | None) -> bool:
    """Whether keys and values are repeated for each query head: on CUDA only the flash kernel knows groups, and it
    takes neither masks nor fp32; for these torch would fall back to a form that writes all weights."""
    return query.is_cuda and (mask is not None or query.dtype == torch.float32)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, dropout: float) -> Tensor:
    grouped = key.shape[1] != query.shape[1]
    if grouped and _repeats_groups(query, mask):
        key, value, grouped = _repeated(key, query), _repeated(value, query), False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=grouped
    )


def _dropped_mix(weights: Tensor, value: Tensor, dropout: float) -> Tensor:
    """dropout(weights) @ value, [b, n, s, d]. In 16 bits the result is divided by 1 - dropout, not the weights: a
    weight of 1, as the first position has, would be rounded to 1.109 in bf16 every time. fp32 rounds without a bias
    that matters."""
    if dropout == 0.0:
        return weights @ value
    if weights.dtype == torch.float32:
        return F.dropout(weights, dropout) @ value
    kept = torch.empty_like(weights, dtype=torch.bool).bernoulli_(1.0 - dropout)
    return (weights * kept) @ value * (1.0 / (1.0 - dropout))


def _masked_softmax(
    scores: Tensor, divisor: float, seen: Tensor | None, bias: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """[b, n, s, s]: softmax of scores / divisor plus the bias, over what is seen and the sinks; summed in fp32."""
    wide = scores.float() / divisor
    if bias is not None:  # -inf where a key is not seen
        wide = wide + bias.float()
    elif seen is not None:
        wide = wide.masked_fill(~seen, -math.inf)
    if sinks is None:
        return torch.softmax(wide, -1).to(scores.dtype)
    column = sinks.float()[:, None, None].expand(*wide.shape[:-1], 1)
    return torch.softmax(torch.cat([wide, column], -1), -1)[..., :-1].to(scores.dtype)


def _repeated(heads: Tensor, query: Tensor) -> Tensor:
    """[b, g, s, d] -> [b, n, s, d]"""
    times = query.shape[1] // heads.shape[1]
    return heads if times == 1 else heads.repeat_interleave(times, 1)


def _fit(query: Tensor, key: Tensor, value: Tensor, window: int | None, documents: Tensor | None) -> bool:
    """Whether arguments pass `_check`, as nearly all do: without documents, and without building messages."""
    if documents is not None or query.dim() != 4 or key.dim() != 4 or query.dtype not in FLOATS:
        return False
    b, n, s, d = query.shape
    groups = key.shape[1]
    if groups == 0 or n % groups or key.shape != (b, groups, s, d) or value.shape != key.shape:
        return False
    if window is not None and (not isinstance(window, int) or window <= 0):
        return False
    if key.dtype != query.dtype or value.dtype != query.dtype or not (key.device == value.device == query.device):
        return False
    return query.stride(3) == key.stride(3) == value.stride(3) == 1 or has_whole_heads(query, key, value)


def _check(query: Tensor, key: Tensor, value: Tensor, window: int | None, documents: Tensor | None) -> None:
    require(query.dim() == 4, f"query has shape {tuple(query.shape)}: it must be [b, heads, s, d]")
    b, n, s, d = query.shape
    require(
        key.dim() == 4 and key.shape[1] > 0 and n % key.shape[1] == 0,
        f"key has shape {tuple(key.shape)}: it must be [b, groups, s, d], groups dividing query's {n} heads",
    )
    require_shape((b, key.shape[1], s, d), "like query except in its number of heads", key=key)
    require_shape(key.shape, "like key", value=value)
    require_same_device(query=query, key=key, value=value)
    require_floats(query=query, key=key, value=value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        require(
            has_whole_heads(x),
            f"{name} has shape {tuple(x.shape)} and strides {x.stride()}: its last dimension must be contiguous; call "
            f"{name}.contiguous()",
        )
    require_whole(window=window)
    require(window is None or window > 0, f"window is {window}: it must be positive, or None for no limit")
    if documents is not None:
        require_same_device(query=query, documents=documents)
        require_integers(documents=documents)
        require_shape((b, s), "[b, s] of query", documents=documents)
