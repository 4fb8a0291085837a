"""Windows and packed documents by torch's flash kernel for sequences of different lengths (torch 2.11 and later). It
takes the documents of all sequences one after the other, and a window; it writes neither scores nor masks, and computes
nothing between documents. It knows neither dropout nor ALiBi, runs on CUDA in 16 bits only, and reads where documents
begin from an int32 tensor whose length is their number: the host has to wait for the documents once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megacore.ops.visibility import Visibility


@cache
def varlen_attn() -> Callable[..., Any] | None:
    """torch's kernel; None where there is none. Loading it takes longer than all of megacore."""
    try:
        kernel: Callable[..., Any] = import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:  # torch before 2.10
        return None
    return usable(kernel)


def usable(kernel: Callable[..., Any]) -> Callable[..., Any] | None:
    """The kernel for key heads that several query heads share; None where it has no windows."""
    options = inspect.signature(kernel).parameters
    if "window_size" not in options:
        return None
    # torch 2.11 has no such option: there heads are shared unasked, as the flash kernel does, forward and backward.
    return partial(kernel, enable_gqa=True) if "enable_gqa" in options else kernel


_LARGEST_HEAD = 256


@dataclass(frozen=True)
class _Runs:
    """Where the runs of equal document numbers begin and end, all sequences one after the other."""

    bounds: Tensor  # [runs + 1] int32, on the device
    longest: int  # length of the longest run


# None: some document is not one run. All layers of a microbatch ask with the same tensor.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def can_attend(query: Tensor, *, alibi: bool, dropout: float) -> bool:
    """Whether the kernel computes attention of such queries, whatever they see. `query`: [b, n, s, d]. `alibi`: whether
    scores fall with distance. `dropout`: probability on the weights."""
    return not alibi and dropout == 0.0 and fits(query.dtype, query.shape[-1]) and runs_here(query)


def fits(dtype: torch.dtype, head_size: int) -> bool:
    """Whether numbers of this type in heads of this size are flash attention's."""
    return dtype in (torch.float16, torch.bfloat16) and head_size <= _LARGEST_HEAD and head_size % 8 == 0


def runs_here(query: Tensor) -> bool:
    """Whether torch has the kernel, and the device runs it."""
    if not query.is_cuda or varlen_attn() is None:
        return False
    return bool(torch.get_device_module(query.device).get_device_capability(query.device) >= (8, 0))


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, view: Visibility) -> Tensor | None:
    """Attention within documents and windows, of query [b, n, s, d], key and value [b, g, s, d]. Returns [b, n, s, d],
    laid out as [b, s, n, d]; None where a document is not one run of positions, which the kernel cannot know, or where
    documents would have to be read from tensors without numbers (fake tensors, torch.compile)."""
    b, _, s, _ = query.shape
    if view.documents is not None:
        runs = _runs_of(view.documents)
    else:
        runs = _Runs(torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=query.device), s)
    if runs is None:
        return None
    reach = -1 if view.reach is None else view.reach - 1
    kernel = varlen_attn()
    assert kernel is not None, "`can_attend` says so"
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [b s, heads, d]
    mixed: Tensor = kernel(
        *packed,
        runs.bounds,
        runs.bounds,
        runs.longest,
        runs.longest,
        window_size=(reach, 0 if view.causal else reach),
    )
    return mixed.unflatten(0, (b, s)).transpose(1, 2)


def _runs_of(documents: Tensor) -> _Runs | None:
    if torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor:
        return None
    if documents not in _known:
        _known[documents] = find_runs(documents)
    runs: _Runs | None = _known[documents]
    return runs


def find_runs(documents: Tensor) -> _Runs | None:
    """Padding between documents is a run as well: its result means nothing."""
    on_host = documents.cpu()
    b, s = on_host.shape
    begins = torch.ones(b, s, dtype=torch.bool)
    begins[:, 1:] = on_host[:, 1:] != on_host[:, :-1]
    firsts = on_host[begins]
    of_sequence = torch.arange(b).repeat_interleave(begins.sum(1))
    named = torch.stack([of_sequence, firsts.long()], 1)[firsts != 0]
    if len(torch.unique(named, dim=0)) < len(named):
        return None
    bounds = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([b * s])])
    longest = int(bounds.diff().max())
    pinned = bounds.int().pin_memory() if documents.is_cuda else bounds.int()
    return _Runs(pinned.to(documents.device, non_blocking=True), longest)
