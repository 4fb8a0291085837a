"""The kernel launches that are compiled and examined: shapes of common models, in the dtypes of training.

A case calls a launcher of `megacore.kernels` with meta tensors. `narrow` says how many global accesses of less than 128
bits a kernel may have: those of numbers of which a row has one. `minimum` says how many bytes a kernel must move
between memory and the processors: each tensor of full size once for a read and once for a write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megacore.kernels import (
    adamw,
    attention,
    cross_entropy,
    dropout,
    gelu,
    grouped,
    norm,
    permute,
    rotary,
    softmax,
    swiglu,
)

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


def cases() -> list[Case]:
    """The shapes of common models."""
    return [*_norms(), *_softmaxes(), *_cross_entropies(), *_elementwise(), *_attentions(), *_experts()]


def product() -> list[Case]:
    """Every row kernel at widths 2,048 to 16,384, sequences of 2k to 32k and shards of 16k to 128k ids, in 16 bits."""
    widths, both = (2048, 4096, 5120, 8192, 12288, 16384), (False, True)
    norms = [
        _norm(width, name, rms, residual=residual)
        for width in widths for name in ("bf16", "fp16") for rms in both for residual in both
    ]  # fmt: skip
    softmaxes = [_softmax(sk, "bf16", causal=causal) for sk in (2048, 8192, 32768) for causal in (True, False)]
    shards = [16384, 32768, 65536, 131072]
    losses = [_cross_entropy(v, v, "bf16", smoothing=smoothing) for v in shards for smoothing in both]
    activations = [
        case
        for w in widths
        for case in (_gelu(w, "bf16"), _gelu(w, "bf16", biased=False), _swiglu(w, "bf16"), _dropout(w, "bf16"))
    ]
    return [*norms, *softmaxes, *losses, *activations]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _times(size: int, **times: int) -> dict[str, int]:
    """Kernel -> bytes: so many times a size."""
    return {kernel: number * size for kernel, number in times.items()}


# ---- norms


def _norms() -> Iterator[Case]:
    for width in (768, 1024, 1280, 1600, 2048, 4096, 8192, 12288, 14336, 16384, 65536):
        for name in DTYPES if width <= 1600 else ("bf16", "fp32"):  # all three at the presets' sizes
            for rms in (False, True) if width in (768, 1024, 2048, 4096, 8192, 12288, 14336) else (False,):
                yield _norm(width, name, rms)
    for rms in (False, True):
        yield _norm(8192, "bf16", rms, residual=True)
    for name in DTYPES:  # of a head's queries and keys: 128 numbers of 16 bits are half a warp's 128-bit accesses
        yield _norm(128, name, True, aligned=False)
    # Either side of where a row is no longer kept in registers, backward and forward; 16 columns more are aligned too.
    for width, names in ((4096, ("fp32",)), (8192, ("bf16",)), (16384, ("bf16", "fp32"))):
        for size, name in ((size, name) for size in (width, width + 16) for name in names):
            if (size, name) != (8192, "bf16"):
                yield _norm(size, name, False, residual=True)
    for width, name in ((width, name) for width in (1023, 1025, 2047, 2049, 8191, 8193) for name in ("bf16", "fp32")):
        if width > 2000 or name == "fp32":
            yield _norm(width, name, False, residual=True, aligned=False)
    for width, name in ((8208, "fp32"), (1001, "bf16"), (2047, "fp32"), (65535, "fp32")):
        yield _norm(width, name, False, aligned=width % 16 == 0)


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
    return Case(
        name=f"{'add_' * residual}{'rms' if rms else 'layer'}_norm {width} {name}",
        launch=launch,
        narrow=_NARROW_NORM | ({"backward": 6} if width > 4096 else {}),  # a row more is begun before the first
        aligned=aligned,
        minimum=_times(x.nbytes, **times, backward_columns=2) if width >= 2048 else {},
    )


# ---- softmax and cross-entropy


def _softmaxes() -> Iterator[Case]:
    for sk in (1024, 2048, 4096, 16384, 131072):
        for name in DTYPES if sk == 1024 else ("bf16", "fp32") if sk == 4096 else ("bf16",):
            for causal in (True, False) if sk == 4096 else (True,):
                yield _softmax(sk, name, causal=causal)
    for sk, name in ((4096, "bf16"), (4096, "fp32"), (16384, "fp32"), (131072, "fp32")):
        yield _softmax(sk, name, causal=True, window=1024)
    # Either side of where a row is no longer kept in registers.
    for sk, name in ((sk, name) for sk in (16384, 16400, 8191, 8193) for name in ("bf16", "fp32")):
        if (sk, name) != (16384, "bf16"):
            yield _softmax(sk, name, causal=True)


def _softmax(sk: int, name: str, *, causal: bool, window: int | None = None) -> Case:
    x = _meta(1, 2, 64, sk, dtype=DTYPES[name])
    mask: dict[str, Any] = {"scale": 0.125, "causal": causal, "offset": sk - 64, "window": window}
    kind = f"causal, window {window}" if window else "causal" if causal else "plain"
    return Case(
        name=f"fused_softmax {kind} {sk} {name}",
        launch=lambda: (softmax.forward(x, **mask), softmax.backward(x, x, **mask)),
        aligned=sk % 16 == 0,
        # Of a window, what is read depends on it.
        minimum={} if window else _times(x.nbytes, forward=2, forward_long=2, backward=3, backward_long=3),
    )


def _cross_entropies() -> Iterator[Case]:
    for width, columns, name in (
        (50304, 50257, "bf16"), (50304, 50257, "fp16"), (50304, 50257, "fp32"),
        (128256, 128256, "bf16"), (16384, 16032, "bf16"), (30592, 30522, "bf16"), (30592, 30522, "fp16"),
        (32000, 32000, "bf16"), (50368, 50257, "bf16"), (151936, 151936, "bf16"), (250880, 250880, "bf16"),
        (50257, 50257, "bf16"),
    ):  # fmt: skip
        for smoothing in (False, True) if columns == 50257 else (False,):
            yield _cross_entropy(width, columns, name, smoothing=smoothing)
    yield from map(_merged_statistics, (2, 8))


def _cross_entropy(width: int, columns: int, name: str, *, smoothing: bool) -> Case:
    logits, targets = _meta(4096, width, dtype=DTYPES[name]), _meta(4096, dtype=torch.int64)
    token = _meta(4096, dtype=torch.float32)
    weights = (0.9, 1e-6) if smoothing else (1.0, 0.0)
    place: dict[str, Any] = {"start": 0, "columns": columns, "ignore_index": -100, "weights": weights}

    def launch() -> None:
        cross_entropy.statistics(logits, targets, **place)
        cross_entropy.gradient_(logits, targets, token, token, token, **place)

    return Case(
        name=f"cross_entropy {columns} of {width}{', smoothing' if smoothing else ''} {name}",
        launch=launch,
        narrow={"forward": 5, "backward": 4},  # a token has one target, its logit, and three statistics
        aligned=width % 16 == 0,
        minimum=_times(logits.nbytes, forward=1, backward=2),
    )


def _merged_statistics(ranks: int) -> Case:
    tokens, vocab_size = 4096, 50257
    parts, targets = _meta(ranks, 3, tokens, dtype=torch.float32), _meta(tokens, dtype=torch.int64)
    bounds = tuple(end for r in range(ranks) for end in (r * vocab_size // ranks, (r + 1) * vocab_size // ranks))

    def launch() -> None:
        cross_entropy.merged(parts, targets, bounds=bounds, weights=(0.9, 1e-6))
        cross_entropy.losses(parts[0], targets, vocab_size=vocab_size, ignore_index=-100, z_loss=1e-4)

    return Case(name=f"cross_entropy over {ranks} ranks", launch=launch, aligned=False)


# ---- elementwise


def _elementwise() -> Iterator[Case]:
    for name in DTYPES:
        for width in (3072, 4096, 5120, 6400) if name == "fp16" else (3072, 4096, 5120, 6400, 14336):
            yield _gelu(width, name)
        for width in (3072, 4096):
            yield _gelu(width, name, biased=False)
        for heads, size in ((12, 64), (32, 64), (8, 128), (32, 128)):
            yield from _rotary(heads, size, name)
        for width in (3072, 8192, 14336):
            yield _swiglu(width, name)
        yield _dropout(4096, name)
    # A thread has four elements: 64 bits of each 16-bit tensor, of which a warp's lie side by side.
    yield _adamw("adamw, bf16 copy", torch.float32, narrow=3)
    yield _adamw("adamw, bf16 copy and gradient", torch.bfloat16, narrow=4)


def _rotary(heads: int, size: int, name: str) -> Iterator[Case]:
    groups = heads // 4
    x, packed = (_meta(2, 1024, n, size, dtype=DTYPES[name]) for n in (heads, 6 * groups))
    angles = _meta(1024, size // 2, dtype=torch.float32)
    yield Case(
        name=f"rotary {heads} x {size} {name}",
        launch=lambda: rotary.rotate(x, angles, angles, backwards=False),
        narrow={"rotate": 2},  # cosine and sine, where a thread holds one of them
        minimum={"rotate": 2 * x.nbytes + 2 * angles.nbytes},
    )
    yield Case(
        name=f"split_rotary {heads} x {size} {name}",
        launch=lambda: rotary.join(*rotary.split(packed, angles, angles, groups=groups), angles, angles),
        narrow={"split": 2, "join": 2},
        minimum=_times(2 * packed.nbytes + 2 * angles.nbytes, split=1, join=1),
    )


def _gelu(width: int, name: str, *, biased: bool = True) -> Case:
    x, bias = (_meta(*shape, dtype=DTYPES[name]) for shape in ((4096, width), (width,)))

    def launch() -> None:
        gelu.forward(x, bias if biased else None)
        gelu.backward_biased(x, x, bias) if biased else gelu.backward(x, x)

    return Case(
        name=f"{'bias_' * biased}gelu {width} {name}",
        launch=launch,
        narrow={"backward_biased": 2},  # the bias and the sum of its gradient, once a program
        minimum=_times(x.nbytes, forward=2, backward=3, backward_biased=3),
    )


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


def _adamw(name: str, dtype: torch.dtype, *, narrow: int) -> Case:
    flat, half, gradient = (_meta(1 << 20, dtype=kind) for kind in (torch.float32, torch.bfloat16, dtype))
    decays, factor = _meta(1 << 15, dtype=torch.uint8), _meta(1, dtype=torch.float32)

    def launch() -> None:
        adamw.step_(
            flat, gradient, flat, flat, copy=half, decays=decays, group=32, factor=factor,
            keep=0.9999, rate=1e-3, betas=(0.9, 0.999), epsilon=1e-8, root_correction2=0.5,
        )  # fmt: skip

    moved = 6 * flat.nbytes + gradient.nbytes + half.nbytes + decays.nbytes + factor.nbytes  # weight and moments twice
    return Case(name=name, launch=launch, narrow={"step": narrow}, minimum={"step": moved})


# ---- attention and experts


def _attentions() -> Iterator[Case]:
    for size, name in ((64, "bf16"), (128, "bf16"), (128, "fp16"), (64, "fp32")):
        yield _attention(size, name, alibi=True)
    yield _attention(128, "bf16", alibi=False)


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


def _experts() -> Iterator[Case]:
    for experts, inputs, outputs, name in (
        (8, 4096, 14336, "bf16"), (128, 2048, 768, "bf16"), (128, 2048, 768, "fp16"), (8, 1024, 1024, "fp32"),
    ):  # fmt: skip
        for gradients in (False, True):
            yield _grouped(experts, inputs, outputs, name, gradients=gradients)
    for width, chosen, name in ((2048, 8, "bf16"), (4096, 2, "bf16"), (4096, 2, "fp16"), (4096, 2, "fp32")):
        for weighted in (True, False):
            yield _permuted(width, chosen, name, weighted=weighted)


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
    return Case(
        name=f"rows of {chosen} experts {width} {name}{'' if weighted else ', sums'}",
        launch=launch,
        narrow={"gather": 1, "combine": 2 * chosen, "spread": 3},  # where a row lies, and its weight
        minimum={"gather": once, "combine": once, "spread": both},
    )
