"""Bytes per second of every kernel on this GPU, beside torch eager, torch.compile and, where installed, Liger-Kernel.

    python benchmarks/kernels.py --output benchmarks/results
    python benchmarks/kernels.py --only rms_norm --no-compile

A rate counts the bytes that the operator cannot avoid (inputs once, outputs once), and the share is of what copying a
tensor reaches on the same device: 100% is a copy. Times are medians of `triton.testing.do_bench`, which empties the
cache between runs. Backward is timed alone, on a graph that is kept, except where the gradient overwrites the input.
One table is written as Markdown and as CSV, with the machine's name.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from megacore import ops

Function = Callable[..., Tensor]
DEVICE, DTYPE = "cuda", torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One operator at one shape.

    Attributes:
        name: operator and shape.
        inputs: makes them; those that require gradients are differentiated.
        ours: the operator.
        plain: the same in plain torch.
        forward_bytes: what forward must move.
        backward_bytes: what backward must move.
        liger: makes Liger-Kernel's function, where it has one; raises ImportError where it is not installed.
        in_one: backward destroys what forward was given, so that the two are timed together.
    """

    name: str
    inputs: Callable[[], tuple[Tensor, ...]]
    ours: Function
    plain: Function
    forward_bytes: int
    backward_bytes: int
    liger: Callable[[], Function] | None = None
    in_one: bool = False


def workloads() -> Iterator[Workload]:
    """The shapes of common models, in bf16."""
    for width in (4096, 8192, 16384):
        yield from _norms(8192, width)
    for length in (2048, 4096, 16384):
        yield _softmax(max(1, 32 * 4096**2 // length**2), length)
    for vocabulary in (50304, 128256):
        yield _cross_entropy(8192, vocabulary)
    yield _swiglu(8192, 14336)
    yield _gelu(8192, 16384)


def _norms(rows: int, width: int) -> Iterator[Workload]:
    tensor = rows * width * 2

    def rms_inputs() -> tuple[Tensor, ...]:
        return _random(rows, width), _random(width)

    def liger_rms_norm() -> Function:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return lambda x, weight: LigerRMSNormFunction.apply(x, weight, 1e-5)

    yield Workload(
        name=f"rms_norm {rows} x {width}",
        inputs=rms_inputs,
        ours=ops.rms_norm,
        plain=lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5),
        forward_bytes=2 * tensor,
        backward_bytes=3 * tensor,
        liger=liger_rms_norm,
    )
    yield Workload(
        name=f"layer_norm {rows} x {width}",
        inputs=lambda: (*rms_inputs(), _random(width)),
        ours=ops.layer_norm,
        plain=lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias),
        forward_bytes=2 * tensor,
        backward_bytes=3 * tensor,
    )


def _softmax(heads: int, length: int) -> Workload:
    later = torch.ones(length, length, dtype=torch.bool, device=DEVICE).triu(1)
    weights = heads * length * length * 2
    # Scores are read up to the diagonal; weights and the scores' gradient are written whole.
    return Workload(
        name=f"causal softmax {heads} x {length} x {length}",
        inputs=lambda: (_random(1, heads, length, length),),
        ours=lambda x: ops.fused_softmax(x, scale=0.125, causal=True),
        plain=lambda x: torch.softmax((x * 0.125).masked_fill(later, -math.inf), -1),
        forward_bytes=weights + weights // 2,
        backward_bytes=weights + weights,
    )


def _cross_entropy(tokens: int, vocabulary: int) -> Workload:
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
    logits = tokens * vocabulary * 2

    def liger() -> Function:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        return lambda x: LigerCrossEntropyFunction.apply(x, targets, None, -100)[0]

    return Workload(
        name=f"cross_entropy {tokens} x {vocabulary}",
        inputs=lambda: (_random(tokens, vocabulary),),
        ours=lambda x: ops.cross_entropy(x, targets, options=ops.CrossEntropyOptions(in_place=not x.is_leaf)),
        plain=lambda x: F.cross_entropy(x.float(), targets, reduction="none"),
        forward_bytes=logits,
        backward_bytes=2 * logits,
        liger=liger,
        in_one=True,
    )


def _swiglu(rows: int, width: int) -> Workload:
    tensor = rows * width * 2
    return Workload(
        name=f"swiglu {rows} x {width}",
        inputs=lambda: (_random(rows, width), _random(rows, width)),
        ours=ops.swiglu,
        plain=lambda gate, up: F.silu(gate) * up,
        forward_bytes=3 * tensor,
        backward_bytes=5 * tensor,
    )


def _gelu(rows: int, width: int) -> Workload:
    tensor = rows * width * 2
    return Workload(
        name=f"bias_gelu {rows} x {width}",
        inputs=lambda: (_random(rows, width), _random(width)),
        ours=ops.bias_gelu,
        plain=lambda x, bias: F.gelu(x + bias, approximate="tanh"),
        forward_bytes=2 * tensor,
        backward_bytes=3 * tensor,
    )


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE).requires_grad_()


def copy_rate() -> float:
    """Bytes per second of copying 2 GiB, read and written."""
    source = torch.empty(1 << 30, dtype=DTYPE, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def _seconds(function: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(function, warmup=50, rep=200, return_mode="median")) / 1e3


def measure(workload: Workload, *, compile_too: bool) -> Iterator[tuple[str, str, float, int]]:
    """(direction, implementation, seconds, bytes) of everything that can run."""
    functions: dict[str, Function] = {"megacore": workload.ours, "torch": workload.plain}
    if compile_too:
        functions["torch.compile"] = torch.compile(workload.plain, dynamic=False)
    if workload.liger is not None:
        with suppress(ImportError):
            functions["liger"] = workload.liger()
    for name, function in functions.items():
        inputs = workload.inputs()
        yield "forward", name, _seconds(partial(function, *inputs)), workload.forward_bytes
        if workload.in_one:
            both = workload.forward_bytes + workload.backward_bytes
            yield "forward + backward", name, _seconds(partial(_step, function, inputs)), both
        else:
            result = function(*inputs)
            step = partial(torch.autograd.grad, result, inputs, torch.randn_like(result), retain_graph=True)
            yield "backward", name, _seconds(step), workload.backward_bytes


def _step(function: Function, inputs: tuple[Tensor, ...]) -> None:
    """Forward and backward; the inputs are no leaves, so that a gradient may be written over them."""
    views = [x.detach().requires_grad_().view_as(x) for x in inputs]
    result = function(*views)
    torch.autograd.grad(result, views, torch.ones_like(result))


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write kernels.md and kernels.csv here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU: kernels are timed on one, and nothing else gives numbers worth having", file=sys.stderr)
        return 2
    copy = copy_rate()
    machine = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"copy {copy / 1e12:.2f} TB/s"
    )
    print(machine)
    rows = []
    for workload in workloads():
        if options.only not in workload.name:
            continue
        for direction, name, seconds, moved in measure(workload, compile_too=not options.no_compile):
            rate = moved / seconds
            rows.append(
                (workload.name, direction, name, f"{seconds * 1e6:.1f}", f"{rate / 1e9:.0f}", f"{rate / copy:.0%}")
            )
            print(*rows[-1], sep=" | ", flush=True)
        torch.cuda.empty_cache()
    if options.output is not None:
        _write(options.output, machine, rows)
    return 0


def _write(directory: Path, machine: str, rows: list[tuple[str, ...]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    head = ("operator", "direction", "implementation", "us", "GB/s", "of copy")
    with (directory / "kernels.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows])
    lines = [
        machine,
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    (directory / "kernels.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
