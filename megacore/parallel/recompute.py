"""Activation recomputation: keep a function's input instead of what it computes, and compute that again in backward.

(Chen et al. 2016, arXiv 1604.06174; selective: Korthikanti et al. 2022, arXiv 2205.05198, section 5.) Dropout masks are
functions of the microbatch's index, so that stating the index again is all it takes for the second pass to be bit
for bit the first; no generator state is saved. What a layer decides by comparing numbers, such as the experts of each
token, it decides once (`RandomStreams.decided`): otherwise another rounding in the second pass could change sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from megacore.parallel.random import RandomStreams

T = TypeVar("T")


def recompute(function: Callable[..., T], *inputs: Tensor, streams: RandomStreams) -> T:
    """function(*inputs), without keeping what it computes on the way. `function`: deterministic but for masks drawn
    from `streams`. `streams`: the source of the function's dropout masks."""
    if torch.compiler.is_compiling():  # compiled code takes the seeds of its masks as tensors
        compiled: T = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return compiled
    microbatch, decided = streams.microbatch, dict[nn.Module, Any]()

    def again(*tensors: Tensor) -> T:
        streams.microbatch = microbatch
        around, streams.decided = streams.decided, decided
        try:
            return function(*tensors)
        finally:
            streams.decided = around

    output: T = checkpoint(again, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output


def computed_again(value: Tensor, again: Callable[[], Tensor]) -> AbstractContextManager[None]:
    """Operators inside the context do not keep `value` for backward, which calls `again` instead. Meant for the output
    of a cheap operator whose input is kept anyway, such as a norm before a linear layer. Compiled code ignores it, and
    decides by itself what it keeps. `value`: its memory is freed when nothing else holds it. `again`: computes the same
    bits from tensors that are kept anyway."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return nullcontext()
    return _not_kept(value, again)


@contextmanager
def _not_kept(value: Tensor, again: Callable[[], Tensor]) -> Iterator[None]:
    memory = value.untyped_storage()._cdata
    kept = value.shape, value.dtype

    def pack(tensor: Tensor) -> Tensor | tuple[Any, ...]:
        if tensor.untyped_storage()._cdata != memory:
            return tensor.detach()  # an operator that keeps its output would else keep itself
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(packed: Tensor | tuple[Any, ...]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            made = again()
        assert (made.shape, made.dtype) == kept and made.is_contiguous()
        return made.as_strided(*packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class Recomputed(nn.Module):
    """A layer that keeps only its input until backward. What the layer writes into its buffers, such as BatchNorm's
    running averages, it writes once: the second pass works on copies."""

    def __init__(self, layer: nn.Module, streams: RandomStreams) -> None:
        super().__init__()
        self.layer, self.streams = layer, streams

    def forward(self, x: Any) -> Any:
        inputs = x if isinstance(x, tuple) else (x,)
        return recompute(_Call(self.layer, is_tuple=isinstance(x, tuple)), *inputs, streams=self.streams)


class _Call:
    def __init__(self, layer: nn.Module, *, is_tuple: bool) -> None:
        self._layer, self._is_tuple, self._is_first = layer, is_tuple, True

    def __call__(self, *inputs: Tensor) -> Any:
        x = inputs if self._is_tuple else inputs[0]
        buffers = {} if self._is_first else {name: value.clone() for name, value in self._layer.named_buffers()}
        self._is_first = False
        return functional_call(self._layer, buffers, (x,)) if buffers else self._layer(x)
