"""The kernel launches that are compiled and examined: shapes of common models, in the dtypes of training.

A case calls a launcher of `megacore.kernels` with meta tensors. `narrow` says how many global accesses of less than 128
bits a kernel may have: those of numbers of which a row has one. `minimum` says how many bytes a kernel must move
between memory and the processors: each tensor of full size once for a read and once for a write.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# isort: off
from megacore.kernels import adamw, attention, cross_entropy, dropout, gelu, grouped, norm
from megacore.kernels import permute, recurrence, rotary, softmax, swiglu
# isort: on

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ROWS = 16384  # of two sequences of 8,192: what there is one of a program weighs little beside them
_NARROW_NORM = {
    "forward": 2, "forward_wide": 2, "backward": 4, "backward_chunked": 4, "backward_wide": 4, "backward_columns": 10,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One launch.

    Attributes:
        name: operator, shape and dtype.
        launch: calls the launcher with meta tensors.
        narrow: kernel -> global accesses of less than 128 bits that are as they should be.
        aligned: whether rows begin at multiples of 16 elements, and fill 128-bit accesses of a warp; no width of access
            is expected of others.
        minimum: kernel -> bytes that it reads and writes at least; empty: not stated.
    """

    name: str
    launch: Callable[[], object]
    narrow: Mapping[str, int] = field(default_factory=dict)
    aligned: bool = True
    minimum: Mapping[str, int] = field(default_factory=dict)


def cases(shapes: str = "common") -> list[Case]:
    """The launches of a table of kernel_cases.toml: `common` or `product`."""
    made = []
    for kind, rows in _TABLES[shapes].items():
        for row in rows:
            among = (value if isinstance(value, list) else [value] for value in row.values())
            made += [_KINDS[kind](**dict(zip(row, values, strict=True))) for values in itertools.product(*among)]
    return made


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _times(size: int, **times: int) -> dict[str, int]:
    """Kernel -> bytes: so many times a size."""
    return {kernel: number * size for kernel, number in times.items()}


# ---- norms


def _norm(width: int, name: str, rms: bool, *, residual: bool = False, aligned: bool = True) -> Case:
    x, weight = _meta(_ROWS, width, dtype=DTYPES[name]), _meta(width, dtype=DTYPES[name])
    other = x if residual else None

    def launch() -> None:
        _, _, mean, rstd = norm.forward(x, other, weight, None if rms else weight, epsilon=1e-5, rms=rms)
        norm.backward(x, other, x, weight, mean=mean, rstd=rstd, rms=rms, has_bias=not rms)

    # Rows too wide for the registers: the forward reads the sum back, and dweight and dbias take a second kernel, which
    # reads x and dy again. Narrow rows have many partial sums a byte: nothing is stated for them.
    times = {"forward": 4, "forward_wide": 5} if residual else {"forward": 2, "forward_wide": 2}
    times |= dict.fromkeys(("backward", "backward_chunked", "backward_wide"), 4 if residual else 3)
    label = f"{'add_' * residual}{'rms' if rms else 'layer'}_norm {width} {name}"
    narrow = _NARROW_NORM | ({"backward": 6} if width > 4096 else {})  # a row more is begun before the first
    minimum = _times(x.nbytes, **times, backward_columns=2) if width >= 2048 else {}
    return Case(name=label, launch=launch, narrow=narrow, aligned=aligned, minimum=minimum)


# ---- softmax and cross-entropy


def _softmax(sk: int, name: str, *, causal: bool, window: int | None = None) -> Case:
    x = _meta(1, 2, 64, sk, dtype=DTYPES[name])
    mask: dict[str, Any] = {"scale": 0.125, "causal": causal, "offset": sk - 64, "window": window}
    kind = f"causal, window {window}" if window else "causal" if causal else "plain"

    def launch() -> None:
        softmax.forward(x, **mask)
        softmax.backward(x, x, **mask)

    # Of a window, what is read depends on it.
    minimum = {} if window else _times(x.nbytes, forward=2, forward_long=2, backward=3, backward_long=3)
    return Case(name=f"fused_softmax {kind} {sk} {name}", launch=launch, aligned=sk % 16 == 0, minimum=minimum)


def _cross_entropy(width: int, name: str, *, smoothing: bool, columns: int | None = None) -> Case:
    columns = columns or width
    logits, targets = _meta(4096, width, dtype=DTYPES[name]), _meta(4096, dtype=torch.int64)
    token = _meta(4096, dtype=torch.float32)
    weights = (0.9, 1e-6) if smoothing else (1.0, 0.0)
    place: dict[str, Any] = {"start": 0, "columns": columns, "ignore_index": -100, "weights": weights}

    def launch() -> None:
        cross_entropy.statistics(logits, targets, **place)
        cross_entropy.gradient_(logits, targets, token, token, token, **place)

    label = f"cross_entropy {columns} of {width}{', smoothing' if smoothing else ''} {name}"
    narrow = {"forward": 5, "backward": 4}  # a token has one target, its logit, and three statistics
    minimum = _times(logits.nbytes, forward=1, backward=2)
    return Case(name=label, launch=launch, narrow=narrow, aligned=width % 16 == 0, minimum=minimum)


def _merged_statistics(ranks: int) -> Case:
    tokens, vocab_size = 4096, 50257
    parts, targets = _meta(ranks, 3, tokens, dtype=torch.float32), _meta(tokens, dtype=torch.int64)
    bounds = tuple(end for r in range(ranks) for end in (r * vocab_size // ranks, (r + 1) * vocab_size // ranks))

    def launch() -> None:
        cross_entropy.merged(parts, targets, bounds=bounds, weights=(0.9, 1e-6))
        cross_entropy.losses(parts[0], targets, vocab_size=vocab_size, ignore_index=-100, z_loss=1e-4)

    return Case(name=f"cross_entropy over {ranks} ranks", launch=launch, aligned=False)


# ---- elementwise


def _rotary(heads: int, size: int, name: str) -> Case:
    x, angles = _meta(2, 1024, heads, size, dtype=DTYPES[name]), _meta(1024, size // 2, dtype=torch.float32)
    launch = partial(rotary.rotate, x, angles, angles, backwards=False)
    narrow = {"rotate": 2}  # cosine and sine, where a thread holds one of them
    minimum = {"rotate": 2 * x.nbytes + 2 * angles.nbytes}
    return Case(name=f"rotary {heads} x {size} {name}", launch=launch, narrow=narrow, minimum=minimum)


def _split_rotary(heads: int, size: int, name: str) -> Case:
    groups = heads // 4
    packed, angles = _meta(2, 1024, 6 * groups, size, dtype=DTYPES[name]), _meta(1024, size // 2, dtype=torch.float32)

    def launch() -> None:
        rotary.join(*rotary.split(packed, angles, angles, groups=groups), angles, angles)

    narrow, minimum = {"split": 2, "join": 2}, _times(2 * packed.nbytes + 2 * angles.nbytes, split=1, join=1)
    return Case(name=f"split_rotary {heads} x {size} {name}", launch=launch, narrow=narrow, minimum=minimum)


def _gelu(width: int, name: str, *, biased: bool = True) -> Case:
    x, bias = (_meta(*shape, dtype=DTYPES[name]) for shape in ((4096, width), (width,)))

    def launch() -> None:
        gelu.forward(x, bias if biased else None)
        gelu.backward_biased(x, x, bias) if biased else gelu.backward(x, x)

    narrow = {"backward_biased": 2}  # the bias and the sum of its gradient, once a program
    minimum = _times(x.nbytes, forward=2, backward=3, backward_biased=3)
    return Case(name=f"{'bias_' * biased}gelu {width} {name}", launch=launch, narrow=narrow, minimum=minimum)


def _swiglu(width: int, name: str) -> Case:
    gate = _meta(4096, width, dtype=DTYPES[name])
    return Case(
        name=f"swiglu {width} {name}",
        launch=lambda: (swiglu.forward(gate, gate), swiglu.backward(gate, gate, gate)),
        minimum=_times(gate.nbytes, forward=3, backward=5),
    )


def _dropout(width: int, name: str) -> Case:
    x = _meta(4096, width, dtype=DTYPES[name])
    mask: dict[str, Any] = {"seed": 2**62, "threshold": 2**29, "scale": 1.125}
    return Case(
        name=f"dropout_add {width} {name}",
        launch=lambda: (dropout.forward(x, x, **mask), dropout.backward(x, **mask)),
        minimum=_times(x.nbytes, forward=3, backward=2),
    )


def _adamw(name: str, gradient: str, *, narrow: int) -> Case:
    flat, half, grad = (_meta(1 << 20, dtype=DTYPES[kind]) for kind in ("fp32", "bf16", gradient))
    decays, factor = _meta(1 << 15, dtype=torch.uint8), _meta(1, dtype=torch.float32)

    def launch() -> None:
        adamw.step_(
            flat, grad, flat, flat, copy=half, decays=decays, group=32, factor=factor,
            keep=0.9999, rate=1e-3, betas=(0.9, 0.999), epsilon=1e-8, root_correction2=0.5,
        )  # fmt: skip

    moved = 6 * flat.nbytes + grad.nbytes + half.nbytes + decays.nbytes + factor.nbytes  # weight and moments twice
    return Case(name=name, launch=launch, narrow={"step": narrow}, minimum={"step": moved})


# ---- attention and experts


def _attention(size: int, name: str, *, alibi: bool) -> Case:
    query, key = (_meta(1, 8192, heads, size, dtype=DTYPES[name]).transpose(1, 2) for heads in (32, 8))
    documents = None if alibi else _meta(1, 8192, dtype=torch.int64)
    slopes = _meta(32, dtype=torch.float32) if alibi else None
    masks: dict[str, Any] = {"causal": True, "reach": None if alibi else 4096, "offset": 0}

    def launch() -> None:
        out, logarithm = attention.forward(query, key, key, documents, slopes, **masks)
        attention.backward(out, query, key, key, logarithm, logarithm, documents, slopes, **masks)

    # A row of a head fills less than a warp's accesses, and strides may be anything: no width of access is expected.
    mask = "alibi" if alibi else "documents, window"
    return Case(name=f"attention {size} {mask} {name}", launch=launch, aligned=False)


def _grouped(experts: int, inputs: int, outputs: int, name: str, *, gradients: bool) -> Case:
    """Output and weight gradient; or input gradient, and the weight's added to a sum in fp32."""
    dtype = DTYPES[name]
    x, y = _meta(_ROWS, inputs, dtype=dtype), _meta(_ROWS, outputs, dtype=dtype)
    weight, bounds = _meta(experts, outputs, inputs, dtype=dtype), _meta(experts + 1, dtype=torch.int32)
    tiles = _meta(_ROWS // grouped.rows_of_tile(dtype) + experts, 3, dtype=torch.int32)

    def launch() -> None:
        grouped.products(y if gradients else x, weight, tiles, transposed=gradients)
        grouped.weight_gradients(y, x, weight.float() if gradients else weight, bounds, add=gradients)

    # How products read and write depends on the layout that the compiler finds for them.
    label = f"grouped_linear {experts} x {inputs} to {outputs} {name}{', into fp32' * gradients}"
    return Case(name=label, launch=launch, aligned=False)


def _permuted(width: int, chosen: int, name: str, *, weighted: bool) -> Case:
    """Forward and backward of rows with weights; or the sum of their gradients."""
    tokens, rows = (_meta(number, width, dtype=DTYPES[name]) for number in (4096, 4096 * chosen))
    order, weights = _meta(4096 * chosen, dtype=torch.int64), _meta(4096, chosen, dtype=torch.float32)

    def launch() -> None:
        permute.combine(rows, order, weights if weighted else None, chosen)
        if weighted:
            permute.gather(tokens, order, chosen)
            permute.spread(tokens, rows, order, weights)

    once, both = rows.nbytes + tokens.nbytes, 2 * rows.nbytes + tokens.nbytes
    label = f"rows of {chosen} experts {width} {name}{'' if weighted else ', sums'}"
    narrow = {"gather": 1, "combine": 2 * chosen, "spread": 3}  # where a row lies, and its weight
    return Case(name=label, launch=launch, narrow=narrow, minimum={"gather": once, "combine": once, "spread": both})


def _recurrence(size: int, *, matrices: bool, backwards: bool) -> Case:
    """With 32 heads of one sample."""
    passes, makes = (_meta(32, 64, size, width, dtype=torch.float32) for width in (size if matrices else 1, size))
    launch = partial(recurrence.states, passes, makes, makes[:, 0], backwards=backwards)
    label = f"states_between_chunks {size} by {'matrices' if matrices else 'numbers'}{', backwards' * backwards}"
    return Case(name=label, launch=launch, aligned=False)


_KINDS: dict[str, Callable[..., Case]] = {
    "norm": _norm, "softmax": _softmax, "cross_entropy": _cross_entropy, "merged_statistics": _merged_statistics,
    "gelu": _gelu, "rotary": _rotary, "split_rotary": _split_rotary, "swiglu": _swiglu, "dropout": _dropout,
    "adamw": _adamw, "attention": _attention, "grouped": _grouped, "permuted": _permuted,
    "recurrence": _recurrence,
}  # fmt: skip
