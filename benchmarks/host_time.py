"""What the host does for a block, forward and backward, in microseconds; without a GPU.

    python benchmarks/host_time.py

On a GPU small operators take less time than the host needs to launch them. That time is measured here: checks of
arguments, autograd, torch's dispatch and Triton's launcher up to the driver, which is replaced, so that no kernel is
compiled or runs. Torch's own operators compute on the CPU, with tensors so small that computing hardly counts.

Blocks are timed as a GPU runs them, weight gradients added to their sums. `bare` launches the same operators
from straight code: the kernels and products themselves, each in the simplest autograd function, without modules,
checks or a choice of layouts. No framework in Python that launches them in eager mode takes less. The third side is the
same block in plain torch.nn, which has separate operators for what a kernel of megacore does in one launch. The times
are those of one of four blocks, divided by the number of operators launched. `calls` counts the functions that Python
calls.

The sides alternate within one run. The figures are the lowest of the rounds, in process time: other work on the
machine can only add to it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn
from triton.runtime.jit import JITFunction

from benchmarks.operators import SHAPES, Launches, model_of
from megacore import ops
from megacore.config import ResolvedModel
from megacore.kernels import dropout, gelu, norm, rotary, swiglu
from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.ops import dispatch
from megacore.ops.dispatch import Node
from megacore.parallel.products import TorchProducts
from megacore.parallel.random import RandomStreams
from megacore.parallel.sharding import ShardedParameter
from tools.generated_pages import table
from tools.kernel_report import Target

ROWS, WIDTH, BLOCKS = 4, 64, 4
GROUPS = {"Llama": {"num_query_groups": 2}}
CPU = torch.device("cpu")
HEAD = (
    *("block", "launched", "calls", "us", "us each", "bare: calls", "us", "us each", "ratio"),
    *("torch.nn: launched", "calls", "us", "us each", "ratio"),
)

# ---- without a GPU

_ARCHITECTURE = 99  # also the number of a device: one for which no other code of the process keeps kernels


class _Compiled(SimpleNamespace):
    """A kernel that is compiled and loaded, as far as its launcher knows."""

    function, packed_metadata, metadata = 0, (), SimpleNamespace(target=Target(_ARCHITECTURE).get_current_target())

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        """Where the driver would take over."""


def _nothing(*_: Any) -> None:
    """Speaks against Triton on a CPU."""


def _compiled(kernel: Any, key: str, signature: Any, device: int, *_: Any) -> _Compiled:
    return kernel.device_caches[device][0].setdefault(key, _Compiled())


@contextmanager
def without_driver() -> Iterator[None]:
    """Inside, operators on CPU tensors launch Triton kernels that do nothing."""
    with (
        mock.patch.object(triton.runtime.driver, "_active", Target(_ARCHITECTURE)),
        mock.patch.object(JITFunction, "_do_compile", _compiled),
        mock.patch.object(dispatch, "why_not", _nothing),
        ops.kernels_chosen("triton"),
    ):
        yield


# ---- blocks


class PlainBlock(nn.Module):
    """A block in torch.nn, of the shape of `config`."""

    def __init__(self, config: ResolvedModel) -> None:
        super().__init__()
        h, d, bias = config.hidden_size, config.head_size, not config.disable_bias_linear
        norm = partial(nn.RMSNorm, h) if config.normalization == "RMSNorm" else partial(nn.LayerNorm, h)
        self.sizes = [config.num_attention_heads * d, config.query_groups * d, config.query_groups * d]
        self.head_size, self.gated, self.rope = d, config.gated, config.position_embedding_type == "rope"
        self.dropout = config.hidden_dropout
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.qkv, self.output = nn.Linear(h, sum(self.sizes), bias=bias), nn.Linear(h, h, bias=bias)
        self.up = nn.Linear(h, config.inner_size, bias=bias)
        self.gate = nn.Linear(h, config.inner_size, bias=bias) if self.gated else None
        self.down = nn.Linear(config.inner_size, h, bias=bias)
        self.angles = torch.ones(2, ROWS, 1, d // 2)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]"""
        heads = (
            part.unflatten(2, (-1, self.head_size)) for part in self.qkv(self.attention_norm(x)).split(self.sizes, 2)
        )
        query, key, value = heads
        if self.rope:
            query, key = self._turned(query), self._turned(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        x = x + self._dropped(self.output(mixed.transpose(1, 2).flatten(2)))
        normed = self.mlp_norm(x)
        up = self.up(normed)
        inner = F.gelu(up, approximate="tanh") if self.gate is None else F.silu(self.gate(normed)) * up
        return x + self._dropped(self.down(inner))

    def _turned(self, x: Tensor) -> Tensor:
        cos, sin = self.angles
        first, second = x.chunk(2, 3)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], 3)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class _Norm(Node):
    """A norm, of a sum or not, and what was normalised."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        y, summed, mean, rstd = norm.forward(x, residual, weight, bias, epsilon=1e-5, rms=bias is None)
        total = x if residual is None else summed
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.has_residual, ctx.has_bias = residual is not None, bias is not None
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dsum: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dx, parameters = norm.backward(
            dy, dsum, x, weight, mean=mean, rstd=rstd, rms=not ctx.has_bias, has_bias=ctx.has_bias
        )
        return dx, dx if ctx.has_residual else None, parameters[0], parameters[1] if ctx.has_bias else None


class _Linear(Node):
    """A linear layer that adds the weight's gradient to a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total, ctx.has_bias = total, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, rows = dy @ weight, dy.view(-1, dy.shape[-1])
        torch.addmm(ctx.total, rows.t(), x.view(-1, x.shape[-1]), out=ctx.total)
        return dx, None, rows.sum(0) if ctx.has_bias else None, None


class _Split(Node):
    """Queries and keys, turned, and values."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, angles: Tensor, groups: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(angles)
        return rotary.split(packed, angles, angles, groups=groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (angles,) = ctx.saved_tensors
        query, key, value = (grad.contiguous() for grad in grads)
        return rotary.join(query, key, value, angles, angles), None, None


class _Swiglu(Node):
    """SwiGLU of two halves."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        up, gate = both.chunk(2, -1)
        return swiglu.forward(gate, up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return swiglu.backward_of_halves(dy, *ctx.saved_tensors)


class _BiasGelu(Node):
    """GELU of a sum with a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return gelu.forward(x, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return gelu.backward_biased(dy, *ctx.saved_tensors)


class _DropoutAdd(Node):
    """residual + dropout(x)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor) -> Tensor:
        return dropout.forward(x, residual, seed=1, threshold=1 << 28, scale=1.1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dropout.backward(dy, seed=1, threshold=1 << 28, scale=1.1), dy


class BareBlock(nn.Module):
    """megacore's operators of a block of the shape of `config`, launched by as little code as they need."""

    def __init__(self, config: ResolvedModel) -> None:
        super().__init__()
        h, self.d, self.groups = config.hidden_size, config.head_size, config.query_groups
        self.rope, self.drops = config.position_embedding_type == "rope", config.hidden_dropout > 0.0
        sizes = [(h + 2 * self.groups * self.d, h), (h, h), (config.inner_size * (1 + config.gated), h)]
        matrices = [nn.Parameter(torch.zeros(size)) for size in (*sizes, (h, config.inner_size))]
        vectors = [nn.Parameter(torch.zeros(size)) for size in (h, h, *(len(weight) for weight in matrices))]
        biased = not config.disable_bias_linear
        self.everything = nn.ParameterList([*matrices, *vectors])
        self.norms = [(weight, nn.Parameter(torch.zeros(h)) if biased else None) for weight in vectors[:2]]
        biases = vectors[2:] if biased else [None] * 4
        sums = [torch.zeros_like(weight) for weight in matrices]
        self.linears = list(zip(matrices, biases, sums, strict=True))
        self.angles = torch.ones(ROWS, self.d // 2)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]"""
        (qkv, output, up, down), (first, second) = self.linears, self.norms
        y, x = _Norm.apply(x, None, *first)
        packed = _Linear.apply(y, *qkv).unflatten(2, (-1, self.d))
        if self.rope:
            query, key, value = _Split.apply(packed, self.angles, self.groups)
        else:
            parts = packed.unflatten(2, (self.groups, -1)).split([1, 1, 1], 3)
            query, key, value = (part.flatten(2, 3) for part in parts)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        mixed = _Linear.apply(mixed.transpose(1, 2).flatten(2), *output)
        if self.drops:
            y, x = _Norm.apply(_DropoutAdd.apply(mixed, x), None, *second)
        else:
            y, x = _Norm.apply(mixed, x, *second)
        if up[1] is None:
            inner = _Swiglu.apply(_Linear.apply(y, *up))
        else:
            inner = _BiasGelu.apply(_Linear.apply(y, up[0], None, up[2]), up[1])
        y = _Linear.apply(inner, *down)
        return _DropoutAdd.apply(y, x) if self.drops else x + y


class _Sum:
    """The sum of a weight's gradients, which has terms."""

    def __init__(self, total: Tensor) -> None:
        self._total = total

    def buffer(self) -> tuple[Tensor, bool]:
        return self._total, True

    def added(self) -> None:
        """Nobody waits for it."""


class _Adding(TorchProducts):
    """Adds products to sums by one operator, as a GPU does where weights are in 16 bits."""

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, *, has_terms: bool) -> None:
        torch.addmm(total, grad.t(), x, beta=int(has_terms), out=total)


def our_block(config: ResolvedModel) -> nn.Module:
    """megacore's block, its parameters in one buffer and the sums of its matrices' gradients in another."""
    context = BuildContext(device=CPU, streams=RandomStreams(0, CPU), products=_Adding())
    layer = gpt_layers(config, context)[1].build()
    parameters = list(layer.parameters())[::-1]
    sizes = [p.numel() for p in parameters]
    values, sums = (torch.zeros(sum(sizes)).split(sizes) for _ in range(2))
    for parameter, value, total in zip(parameters, values, sums, strict=True):
        parameter.data = value.view(parameter.shape)
        if parameter.dim() > 1:
            cast(ShardedParameter, parameter).gradient_sum = _Sum(total.view(parameter.shape))
    return layer


def launches(blocks: nn.Sequential, x: Tensor) -> int:
    """Operators of a forward and a backward of one of several blocks."""
    y = blocks(x)
    with Launches() as counted:
        y = blocks(x)
        y.backward(torch.ones_like(y))
    return (counted.names.total() - counted.names["aten::ones_like"]) // len(blocks)


def block_microseconds(blocks: nn.Sequential, x: Tensor, times: int) -> float:
    """Of a forward and a backward of one of several blocks, which share the call of autograd's engine."""
    grad, parameters = torch.ones_like(x), list(blocks.parameters())
    elapsed = 0.0
    for _ in range(times):
        for parameter in parameters:
            parameter.grad = None
        started = time.process_time()
        blocks(x).backward(grad)
        elapsed += time.process_time() - started
    return elapsed / times / len(blocks) * 1e6


def calls(blocks: nn.Sequential, x: Tensor) -> int:
    """Functions of Python and C called in a forward and a backward of a block: other work does not change that."""
    number = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    blocks(x).backward(torch.ones_like(x))
    y, grad = blocks(x), torch.ones_like(x)
    sys.setprofile(count)
    try:
        y = blocks(x)
        y.backward(grad)
    finally:
        sys.setprofile(None)
    return number // len(blocks)


def row(shape: str, arguments: argparse.Namespace) -> tuple[object, ...]:
    """The figures of a block, below HEAD."""
    config = model_of(shape, 1, hidden_size=WIDTH, num_attention_heads=4, **GROUPS.get(shape, {}))
    x = torch.zeros(1, ROWS, config.hidden_size, requires_grad=True)
    sides = [nn.Sequential(*(kind(config) for _ in range(BLOCKS))) for kind in (our_block, BareBlock, PlainBlock)]
    launched, plain = launches(sides[0], x), launches(sides[2], x)
    rounds = ([block_microseconds(side, x, arguments.times) for side in sides] for _ in range(arguments.rounds))
    ours, bare, torchs = map(min, zip(*rounds, strict=True))
    called = [calls(side, x) for side in sides]
    return (
        *(shape, launched, called[0], f"{ours:.0f}", f"{ours / launched:.1f}"),
        *(called[1], f"{bare:.0f}", f"{bare / launched:.1f}", f"{ours / bare:.2f}"),
        *(plain, called[2], f"{torchs:.0f}", f"{torchs / plain:.1f}", f"{ours / torchs:.2f}"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="how often every side is timed")
    parser.add_argument("--times", type=int, default=25, help="steps of a round")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # nothing is computed with what unwritten memory holds

    with without_driver():
        print(table(HEAD, (row(shape, arguments) for shape in SHAPES)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
