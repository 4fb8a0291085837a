"""Bytes per second of every kernel on this GPU, beside torch eager, torch.compile and, where installed, Liger-Kernel.

    python benchmarks/kernels.py > kernels.md
    python benchmarks/kernels.py --only rms_norm --no-compile

A rate counts the bytes that the operator cannot avoid (inputs once, outputs once), and the share is of what copying a
tensor reaches on the same device: 100% is a copy. Times are medians between device events, with the cache emptied
before each call; the host has launched a call before the device begins with it. Backward is timed alone, on a graph
that is kept, except where the gradient overwrites the input. Prints a table in Markdown, a row at once. A figure that
cannot be taken is reported with its error, and the others are taken all the same; the exit status is then 1.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_check.device import copy_rate, median_seconds, open_device, version_of
from benchmarks.gpu_check.records import Record, Records, one_line, part_parser
from megacore import ops
from megacore.train.metrics import device_name
from tools.generated_pages import table

Function = Callable[..., Tensor | tuple[Tensor, ...] | None]
DTYPE = torch.bfloat16
HEAD = ("operator", "direction", "implementation", "us", "GB/s", "of copy")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One operator at one shape.

    Attributes:
        name: operator and shape.
        inputs: makes them; those that require gradients are differentiated.
        ours: the operator.
        plain: the same in plain torch.
        forward_bytes: what forward must move.
        backward_bytes: what backward must move; None: there is none.
        liger: makes Liger-Kernel's function, where it has one; raises ImportError where it is not installed.
        in_one: backward destroys what forward was given, so that the two are timed together.
        compiles: whether torch.compile may make something else of `plain`.
    """

    name: str
    inputs: Callable[[], tuple[Tensor, ...]]
    ours: Function
    plain: Function
    forward_bytes: int
    backward_bytes: int | None
    liger: Callable[[], Function] | None = None
    in_one: bool = False
    compiles: bool = True


@dataclass(frozen=True, kw_only=True)
class Workloads:
    """The operators in bf16 at the shapes of common models, or, small, at shapes that any machine can run.

    Attributes:
        device: where the inputs lie.
        small: for trying out the benchmark itself.
    """

    device: torch.device
    small: bool = False

    def __iter__(self) -> Iterator[Workload]:
        rows = 16 if self.small else 8192
        for width in (64,) if self.small else (4096, 8192, 16384):
            yield from self._norms(rows, width)
        for width in (64,) if self.small else (4096, 8192):
            yield from self._residual_norms(rows, width)
        for length in (32,) if self.small else (2048, 4096, 16384):
            yield self._softmax(2 if self.small else max(1, 32 * 4096**2 // length**2), length)
        for vocabulary in (96,) if self.small else (50304, 128256):
            yield self._cross_entropy(rows, vocabulary)
        yield from self._elementwise(rows, *((64, 64, 64) if self.small else (14336, 16384, 8192)))
        yield self._rotary(*((2, 8, 2, 16) if self.small else (2, 8192, 32, 128)))
        yield self._adamw(1 << 10 if self.small else 1 << 28)

    def _workload(
        self, operator: str, shapes: Sequence[tuple[int, ...]], ours: Function, plain: Function,
        moved: tuple[float, float], liger: Callable[[], Function] | None = None, *, in_one: bool = False,
    ) -> Workload:  # fmt: skip
        """An operator on tensors of these shapes, of which the first has the full size. Forward and backward move so
        many of that size."""
        size = math.prod(shapes[0]) * DTYPE.itemsize
        name = f"{operator} {' x '.join(map(str, shapes[0]))}"
        drawn = partial(torch.randn, device=self.device, dtype=DTYPE)
        return Workload(
            name=name, inputs=lambda: tuple(drawn(*shape).requires_grad_() for shape in shapes), ours=ours, plain=plain,
            forward_bytes=round(moved[0] * size), backward_bytes=round(moved[1] * size), liger=liger, in_one=in_one,
        )  # fmt: skip

    def _norms(self, rows: int, width: int) -> Iterator[Workload]:
        shapes = [(rows, width), (width,), (width,)]
        liger = _liger("rms_norm", "LigerRMSNormFunction", lambda f: lambda x, w: f(x, w, 1e-5))
        yield self._workload("rms_norm", shapes[:2], ops.rms_norm, _rms, (2, 3), liger)
        liger = _liger("layer_norm", "LigerLayerNormFunction", lambda f: lambda x, w, b: f(x, w, b, 1e-5))
        yield self._workload("layer_norm", shapes, ops.layer_norm, _layer, (2, 3), liger)

    def _residual_norms(self, rows: int, width: int) -> Iterator[Workload]:
        shapes = [(rows, width), (rows, width), (width,), (width,)]

        def added(norm: Callable[..., Tensor], x: Tensor, residual: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            total = x + residual
            return norm(total, *weights), total

        # Two tensors read, two written; backward reads two gradients and the sum, and writes one gradient for both.
        liger = _liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", lambda f: lambda x, r, w: f(x, r, w, 1e-5))
        yield self._workload("add_rms_norm", shapes[:3], ops.add_rms_norm, partial(added, _rms), (4, 4), liger)
        yield self._workload("add_layer_norm", shapes, ops.add_layer_norm, partial(added, _layer), (4, 4))

    def _softmax(self, heads: int, length: int) -> Workload:
        later = torch.ones(length, length, dtype=torch.bool, device=self.device).triu(1)

        def ours(x: Tensor) -> Tensor:
            return ops.fused_softmax(x[None], scale=0.125, causal=True)

        def plain(x: Tensor) -> Tensor:
            return torch.softmax((x * 0.125).masked_fill(later, -math.inf), -1)

        # Scores are read up to the diagonal; weights and the scores' gradient are written whole.
        return self._workload("causal softmax", [(heads, length, length)], ours, plain, (1.5, 2))

    def _cross_entropy(self, tokens: int, vocabulary: int) -> Workload:
        targets = torch.randint(vocabulary, (tokens,), device=self.device)

        def ours(x: Tensor) -> Tensor:
            return ops.cross_entropy(x, targets, options=ops.CrossEntropyOptions(in_place=not x.is_leaf))

        def plain(x: Tensor) -> Tensor:
            return F.cross_entropy(x.float(), targets, reduction="none")

        liger = _liger("cross_entropy", "LigerCrossEntropyFunction", lambda f: lambda x: f(x, targets, None, -100)[0])
        return self._workload("cross_entropy", [(tokens, vocabulary)], ours, plain, (1, 2), liger, in_one=True)

    def _elementwise(self, rows: int, gated: int, biased: int, dropped: int) -> Iterator[Workload]:
        """With the width of each operator's tensors."""
        liger = _liger("swiglu", "LigerSiLUMulFunction", lambda f: f)
        shapes: list[tuple[int, ...]] = [(rows, gated), (rows, gated)]
        yield self._workload("swiglu", shapes, ops.swiglu, lambda gate, up: F.silu(gate) * up, (3, 5), liger)
        shapes = [(rows, biased), (biased,)]
        plain = partial(F.gelu, approximate="tanh")
        yield self._workload("bias_gelu", shapes, ops.bias_gelu, lambda x, bias: plain(x + bias), (2, 3))
        shapes = [(rows, dropped), (rows, dropped)]
        ours = partial(ops.dropout_add, probability=0.1, seed=1)
        yield self._workload("dropout_add", shapes, ours, lambda x, r: r + F.dropout(x, 0.1), (3, 2))

    def _rotary(self, batch: int, positions: int, heads: int, size: int) -> Workload:
        rates = 10_000.0 ** (-torch.arange(size // 2) / (size // 2))
        angles = (torch.arange(positions)[:, None] * rates).to(self.device)
        cos, sin = angles.cos(), angles.sin()  # [s, d/2] fp32

        def plain(x: Tensor) -> Tensor:
            first, second = x.float().chunk(2, dim=-1)
            c, s = cos[:, None], sin[:, None]
            return torch.cat((first * c - second * s, second * c + first * s), -1).to(x.dtype)

        ours = partial(ops.rotary, cos=cos, sin=sin)
        return self._workload("rotary", [(batch, positions, heads, size)], ours, plain, (2, 2))

    def _adamw(self, count: int) -> Workload:
        factor, step = torch.ones((), device=self.device), torch.ones((), device=self.device)

        def inputs() -> tuple[Tensor, ...]:
            parameter, gradient, mean, square = (torch.rand(count, device=self.device) for _ in range(4))
            return parameter, gradient, mean, square, torch.empty_like(parameter, dtype=DTYPE)

        def ours(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, copy: Tensor) -> None:
            numbers = ops.AdamWStep(step=1, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
            ops.adamw_(parameter, gradient, mean, square, update=numbers, factor=factor, copy=copy)

        def plain(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, copy: Tensor) -> None:
            torch._fused_adamw_(
                [parameter], [gradient], [mean], [square], [], [step], lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1,
                eps=1e-8, amsgrad=False, maximize=False, grad_scale=factor,
            )  # fmt: skip
            copy.copy_(parameter)

        # Four fp32 numbers are read, three written, and one of 16 bits. torch's is one kernel already.
        figures: dict[str, Any] = {"forward_bytes": 30 * count, "backward_bytes": None, "compiles": False}
        name = f"adamw {count >> 20} Mi" if count >> 20 else f"adamw {count}"
        return Workload(name=name, inputs=inputs, ours=ours, plain=plain, **figures)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def _liger(module: str, function: str, adapt: Callable[[Any], Function]) -> Callable[[], Function]:
    """Makes one of Liger-Kernel's autograd functions, adapted to the arguments of ours."""
    return lambda: adapt(getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply)


def measure_all(
    workloads: Sequence[Workload], device: torch.device, *, copy: float, compile_too: bool
) -> Iterator[Record]:
    """Take every figure that can be taken: records with its seconds, the bytes that it cannot avoid moving and their
    rate over that of a copy, or with the error. Compiled functions come last, as they take longest.

    Args:
        workloads: what to measure.
        device: where they compute.
        copy: bytes per second of a copy on the device.
        compile_too: whether torch.compile takes part.
    """
    tasks: list[tuple[Workload, str, Callable[[], Function]]] = []
    for one in workloads:
        plain = {"megacore": one.ours, "torch": one.plain}
        tasks += [(one, name, partial(lambda function: function, function)) for name, function in plain.items()]
        if one.liger is not None and device.type == "cuda":
            tasks.append((one, "liger", one.liger))
    if compile_too:
        compiled = ((one, partial(torch.compile, one.plain, dynamic=False)) for one in workloads if one.compiles)
        tasks += [(one, "torch.compile", make) for one, make in compiled]
    for workload, name, make in tasks:
        names = {"operator": workload.name, "implementation": name}
        try:
            for direction, seconds, moved in _measure(workload, make(), device):
                figures = {"seconds": seconds, "bytes": moved, "share_of_copy": moved / seconds / copy}
                yield {**names, "direction": direction, **figures, "error": None}
        except Exception as error:
            if name != "liger" or not isinstance(error, ImportError):  # where it is not installed, nothing is lacking
                yield {**names, "direction": "all", "seconds": None, "error": one_line(error)}
        if device.type != "cpu":
            torch.accelerator.empty_cache()


def _measure(workload: Workload, function: Function, device: torch.device) -> Iterator[tuple[str, float, int]]:
    """(direction, seconds, bytes) of one implementation."""
    inputs = workload.inputs()
    forward, backward = workload.forward_bytes, workload.backward_bytes
    yield "forward", median_seconds(partial(function, *inputs), device), forward
    if backward is None:
        return
    if workload.in_one:
        step = partial(_step, function, inputs)
        yield "forward + backward", median_seconds(step, device), forward + backward
        return
    results = _as_tuple(function(*inputs))
    gradients = [torch.randn_like(result) for result in results]
    differentiate = partial(torch.autograd.grad, results, inputs, gradients, retain_graph=True)
    yield "backward", median_seconds(differentiate, device), backward


def _step(function: Function, inputs: tuple[Tensor, ...]) -> None:
    """Forward and backward; the inputs are no leaves, so that a gradient may be written over them."""
    views = [x.detach().requires_grad_().view_as(x) for x in inputs]
    results = _as_tuple(function(*views))
    torch.autograd.grad(results, views, [torch.ones_like(result) for result in results])


def _as_tuple(results: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    assert results is not None
    return (results,) if isinstance(results, Tensor) else results


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write the table; 1 if a figure could not be taken, 2 where there is nothing to measure on."""
    parser = part_parser(__doc__, device="cuda")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: kernels are timed on one, and nothing else gives numbers worth having", file=sys.stderr)
        return 2
    device = open_device(options.device)
    copy = copy_rate(device, small=options.small)
    versions = f"torch {torch.__version__}, triton {version_of('triton')}"
    print(f"{device_name(device)}, {versions}, copy {copy / 1e12:.2f} TB/s\n\n{table(HEAD, [])}", flush=True)
    chosen = [workload for workload in Workloads(device=device, small=options.small) if options.only in workload.name]
    records, failed = Records(options.records), 0
    for figure in measure_all(chosen, device, copy=copy, compile_too=not options.no_compile):
        records.add("kernel", **figure)
        names, taken = (figure["operator"], figure["direction"], figure["implementation"]), figure["seconds"]
        if taken is None:
            failed, row = 1, (*names, figure["error"], "", "")
        else:
            share = f"{figure['share_of_copy']:.0%}"
            row = (*names, f"{taken * 1e6:.1f}", f"{figure['bytes'] / taken / 1e9:.0f}", share)
        print(table(HEAD, [row]).splitlines()[-1], flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
