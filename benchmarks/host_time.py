"""What the host does for one operator, forward and backward, in microseconds; without a GPU.

    python benchmarks/host_time.py

Launches of Triton kernels are replaced by allocations of their results on the CPU: checks, autograd and torch's
dispatch remain: what a step of small kernels waits for. `custom_op` is the operator as fake tensors and torch.compile
see it, `eager` as training without --compile calls it. The two alternate within one run; the figures are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megacore import kernels, ops
from megacore.ops.dispatch import Operator

ROWS, WIDTH = 4, 64


def _norm_forward(x: Tensor, residual: Tensor | None, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    numbers = x.new_empty(len(x))
    return torch.empty_like(x), torch.empty_like(x), numbers, torch.empty_like(numbers)


def _norm_backward(dy: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dy), dy.new_empty(1, dy.shape[1])


def _split(packed: Tensor, *_: Any, groups: int) -> tuple[Tensor, ...]:
    b, s, heads, d = packed.shape
    key = packed.new_empty(b, s, groups, d)
    return packed.new_empty(b, s, heads - 2 * groups, d), key, torch.empty_like(key)


def _join(query: Tensor, key: Tensor, *_: Any) -> Tensor:
    b, s, heads, d = query.shape
    return query.new_empty(b, s, heads + 2 * key.shape[2], d)


def _like_first(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


def _like_second(_: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


LAUNCHERS = {
    "norm": SimpleNamespace(forward=_norm_forward, backward=_norm_backward),
    "swiglu": SimpleNamespace(forward=_like_first, backward_of_halves=_like_second),
    "gelu": SimpleNamespace(forward=_like_first, backward=_like_first),
    "rotary": SimpleNamespace(split=_split, join=_join),
    "dropout": SimpleNamespace(forward=_like_first, backward=_like_first),
}


def operators() -> Iterator[tuple[str, Callable[[Tensor], Any], Tensor]]:
    """The operators of a block, by name, with what each reads."""
    x, weight = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, requires_grad=True)
    angles = torch.ones(ROWS, 8)
    yield "rms_norm", partial(ops.rms_norm, weight=weight), x
    yield "add_rms_norm", partial(ops.add_rms_norm, residual=torch.ones_like(x), weight=weight), x
    yield "rms_norm_with_input", partial(ops.rms_norm_with_input, weight=weight), x
    yield "split_rotary", partial(ops.split_rotary, cos=angles, sin=angles, groups=1), torch.ones(1, ROWS, 4, 16)
    yield "swiglu_of_halves", ops.swiglu_of_halves, x
    yield "gelu", ops.gelu, x
    dropout = partial(ops.bias_dropout_add, bias=None, residual=torch.ones_like(x), probability=0.1, seed=1)
    yield "bias_dropout_add", dropout, x


def microseconds(call: Callable[[Tensor], Any], x: Tensor, times: int) -> float:
    """Of a forward and a backward."""
    x = x.clone().requires_grad_()
    y = call(x)
    grads = [torch.ones_like(part) for part in (y if isinstance(y, tuple) else (y,))]
    started = time.process_time()
    for _ in range(times):
        y = call(x)
        torch.autograd.backward(y, grads if isinstance(y, tuple) else grads[0], inputs=[x])
    return (time.process_time() - started) / times * 1e6


@contextmanager
def as_custom_op() -> Iterator[None]:
    """Inside, every operator is called as torch.compile sees it."""
    with mock.patch.object(Operator, "__call__", lambda self, *arguments: self.custom_op(*arguments)):
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="how often both sides are timed")
    parser.add_argument("--times", type=int, default=300, help="calls of a round")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ["TRITON_INTERPRET"] = "1"  # or the kernels are refused on a CPU
    print("| operator | custom_op | eager |\n|---|---|---|")
    with mock.patch.dict(vars(kernels), LAUNCHERS), ops.kernels_chosen("triton"):
        for name, call, x in operators():
            before, now = [], []
            for _ in range(arguments.rounds):
                with as_custom_op():
                    before.append(microseconds(call, x, arguments.times))
                now.append(microseconds(call, x, arguments.times))
            print(f"| {name} | {statistics.median(before):.0f} | {statistics.median(now):.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
