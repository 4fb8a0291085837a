"""The kernel launches that are compiled and examined: shapes of common models, in the dtypes of training.

A case calls a launcher of `megacore.kernels` with meta tensors. `narrow` says how many global accesses of less than 128
bits a kernel may have: those of numbers of which a row has one. `minimum` says how many bytes a kernel must move
between memory and the processors: each tensor of full size once for a read and once for a write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
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
    widths = (2048, 4096, 5120, 8192, 12288, 16384)
    norms = [
        _norm_case(width, name, rms, residual=residual)
        for width in widths
        for name in ("bf16", "fp16")
        for rms in (False, True)
        for residual in (False, True)
    ]
    softmaxes = [_softmax_case(sk, "bf16", causal=causal) for sk in (2048, 8192, 32768) for causal in (True, False)]
    shards = [16384, 32768, 65536, 131072]
    losses = [_cross_entropy_case(v, v, "bf16", smoothing=smoothing) for v in shards for smoothing in (False, True)]
    activations = [
        case
        for width in widths
        for case in (
            _gelu_case(width, "bf16", biased=True),
            _gelu_case(width, "bf16", biased=False),
            _swiglu_case(width, "bf16"),
            _dropout_case(width, "bf16"),
        )
    ]
    return [*norms, *softmaxes, *losses, *activations]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _norms() -> Iterator[Case]:
    for width in (768, 1024, 1280, 1600, 2048, 4096, 8192, 12288, 14336, 16384, 65536):
        for name in _dtypes(width):
            for rms in (False, True) if width in (768, 1024, 2048, 4096, 8192, 12288, 14336) else (False,):
                yield _norm_case(width, name, rms, residual=False)
    for rms in (False, True):
        yield _norm_case(8192, "bf16", rms, residual=True)
    for name in DTYPES:  # of a head's queries and keys: 128 numbers of 16 bits are half a warp's 128-bit accesses
        yield _norm_case(128, name, True, residual=False, aligned=False)
    # Either side of where a row is no longer kept in registers, backward and forward; 16 columns more are aligned too.
    for width, names in ((4096, ("fp32",)), (8192, ("bf16",)), (16384, ("bf16", "fp32"))):
        for size, name in ((size, name) for size in (width, width + 16) for name in names):
            if (size, name) != (8192, "bf16"):
                yield _norm_case(size, name, False, residual=True)
    for width, name in ((width, name) for width in (1023, 1025, 2047, 2049, 8191, 8193) for name in ("bf16", "fp32")):
        if width > 2000 or name == "fp32":
            yield _norm_case(width, name, False, residual=True, aligned=False)
    for width, name in ((8208, "fp32"), (1001, "bf16"), (2047, "fp32"), (65535, "fp32")):
        yield _norm_case(width, name, False, residual=False, aligned=width % 16 == 0)


def _norm_case(width: int, name: str, rms: bool, *, residual: bool, aligned: bool = True) -> Case:
    row = _ROWS * width * DTYPES[name].itemsize
    forward, backward = 4 if residual else 2, 4 if residual else 3
    return Case(
        name=f"{'add_' * residual}{'rms' if rms else 'layer'}_norm {width} {name}",
        launch=partial(_norm, width, DTYPES[name], rms, residual=residual),
        narrow=_NARROW_NORM,
        aligned=aligned,
        # Rows too wide for the registers: dweight and dbias take a second kernel, which reads x and dy again. Narrow
        # rows have many partial sums a byte: nothing is stated for them.
        minimum={
            "forward": forward * row,
            "forward_wide": (5 if residual else 2) * row,  # it reads the sum back
            "backward": backward * row,
            "backward_chunked": backward * row,
            "backward_wide": backward * row,
            "backward_columns": 2 * row,
        }
        if width >= 2048
        else {},
    )


def _dtypes(width: int) -> tuple[str, ...]:
    """All three at the presets' sizes, the two most used beyond."""
    return tuple(DTYPES) if width <= 1600 else ("bf16", "fp32")


def _norm(width: int, dtype: torch.dtype, rms: bool, *, residual: bool) -> None:
    x, weight = _meta(_ROWS, width, dtype=dtype), _meta(width, dtype=dtype)
    other = x if residual else None
    _, _, mean, rstd = norm.forward(x, other, weight, None if rms else weight, epsilon=1e-5, rms=rms)
    norm.backward(x, other, x, weight, mean=mean, rstd=rstd, rms=rms, has_bias=not rms)


def _softmaxes() -> Iterator[Case]:
    for sk in (1024, 2048, 4096, 16384, 131072):
        for name in DTYPES if sk == 1024 else ("bf16", "fp32") if sk == 4096 else ("bf16",):
            for causal in (True, False) if sk == 4096 else (True,):
                yield _softmax_case(sk, name, causal=causal)
    for sk, name in ((4096, "bf16"), (4096, "fp32"), (16384, "fp32"), (131072, "fp32")):
        yield Case(
            name=f"fused_softmax causal, window 1024 {sk} {name}",
            launch=partial(_softmax, sk, DTYPES[name], causal=True, window=1024),
        )
    # Either side of where a row is no longer kept in registers.
    for sk, name in ((sk, name) for sk in (16384, 16400, 8191, 8193) for name in ("bf16", "fp32")):
        if (sk, name) != (16384, "bf16"):
            yield _softmax_case(sk, name, causal=True)


def _softmax_case(sk: int, name: str, *, causal: bool) -> Case:
    scores = 2 * 64 * sk * DTYPES[name].itemsize
    return Case(
        name=f"fused_softmax {'causal' if causal else 'plain'} {sk} {name}",
        launch=partial(_softmax, sk, DTYPES[name], causal=causal, window=None),
        aligned=sk % 16 == 0,
        minimum={
            "forward": 2 * scores, "forward_long": 2 * scores, "backward": 3 * scores, "backward_long": 3 * scores
        },
    )  # fmt: skip


def _softmax(sk: int, dtype: torch.dtype, *, causal: bool, window: int | None) -> None:
    x = _meta(1, 2, 64, sk, dtype=dtype)
    mask: dict[str, Any] = {"scale": 0.125, "causal": causal, "offset": sk - 64, "window": window}
    softmax.forward(x, **mask)
    softmax.backward(x, x, **mask)


def _cross_entropies() -> Iterator[Case]:
    # A token has one target, its logit, and three statistics.
    for width, columns, name in (
        (50304, 50257, "bf16"), (50304, 50257, "fp16"), (50304, 50257, "fp32"),
        (128256, 128256, "bf16"), (16384, 16032, "bf16"), (30592, 30522, "bf16"), (30592, 30522, "fp16"),
        (32000, 32000, "bf16"), (50368, 50257, "bf16"), (151936, 151936, "bf16"), (250880, 250880, "bf16"),
        (50257, 50257, "bf16"),
    ):  # fmt: skip
        for smoothing in (False, True) if columns == 50257 else (False,):
            yield _cross_entropy_case(width, columns, name, smoothing=smoothing)
    for ranks in (2, 8):
        launch = partial(_merged_statistics, ranks)
        yield Case(name=f"cross_entropy over {ranks} ranks", launch=launch, aligned=False)


def _cross_entropy_case(width: int, columns: int, name: str, *, smoothing: bool) -> Case:
    logits = 4096 * width * DTYPES[name].itemsize
    return Case(
        name=f"cross_entropy {columns} of {width}{', smoothing' if smoothing else ''} {name}",
        launch=partial(_cross_entropy, width, columns, DTYPES[name], smoothing=smoothing),
        narrow={"forward": 5, "backward": 4},
        aligned=width % 16 == 0,
        minimum={"forward": logits, "backward": 2 * logits},
    )


def _merged_statistics(ranks: int) -> None:
    tokens, vocab_size = 4096, 50257
    parts, targets = _meta(ranks, 3, tokens, dtype=torch.float32), _meta(tokens, dtype=torch.int64)
    bounds = tuple(end for r in range(ranks) for end in (r * vocab_size // ranks, (r + 1) * vocab_size // ranks))
    cross_entropy.merged(parts, targets, bounds=bounds, weights=(0.9, 1e-6))
    cross_entropy.losses(parts[0], targets, vocab_size=vocab_size, ignore_index=-100, z_loss=1e-4)


def _cross_entropy(width: int, columns: int, dtype: torch.dtype, *, smoothing: bool) -> None:
    logits, targets = _meta(4096, width, dtype=dtype), _meta(4096, dtype=torch.int64)
    token = _meta(4096, dtype=torch.float32)
    weights = (0.9, 1e-6) if smoothing else (1.0, 0.0)
    place: dict[str, Any] = {"start": 0, "columns": columns, "ignore_index": -100, "weights": weights}
    cross_entropy.statistics(logits, targets, **place)
    cross_entropy.gradient_(logits, targets, token, token, token, **place)


def _elementwise() -> Iterator[Case]:
    for name, dtype in DTYPES.items():
        for width in (3072, 4096, 5120, 6400) if name == "fp16" else (3072, 4096, 5120, 6400, 14336):
            yield _gelu_case(width, name, biased=True)
        for width in (3072, 4096):
            yield _gelu_case(width, name, biased=False)
        for heads, size in ((12, 64), (32, 64), (8, 128), (32, 128)):
            yield Case(
                name=f"rotary {heads} x {size} {name}",
                launch=partial(_rotary, heads, size, dtype),
                narrow={"rotate": 2},  # cosine and sine, where a thread holds one of them
                minimum={"rotate": 2048 * heads * size * 2 * dtype.itemsize + 1024 * size * 4},
            )
            yield Case(
                name=f"split_rotary {heads} x {size} {name}",
                launch=partial(_split_rotary, heads, size, dtype),
                narrow={"split": 2, "join": 2},
                minimum=dict.fromkeys(
                    ("split", "join"), 2048 * (heads // 4 * 6) * size * 2 * dtype.itemsize + 1024 * size * 4
                ),
            )
        for width in (3072, 8192, 14336):
            yield _swiglu_case(width, name)
        yield _dropout_case(4096, name)
    # A thread has four elements: 64 bits of each 16-bit tensor, of which a warp's lie side by side.
    for name, dtype, narrow in (("", torch.float32, 3), (" and gradient", torch.bfloat16, 4)):
        moved = (
            (1 << 20) * (3 * 8 + dtype.itemsize + 2) + (1 << 15) + 4
        )  # weight, moments, gradient, copy; decay, factor
        yield Case(
            name=f"adamw, bf16 copy{name}",
            launch=partial(_adamw, dtype),
            narrow={"step": narrow},
            minimum={"step": moved},
        )


def _gelu_case(width: int, name: str, *, biased: bool) -> Case:
    row = 4096 * width * DTYPES[name].itemsize
    return Case(
        name=f"{'bias_' * biased}gelu {width} {name}",
        launch=partial(_gelu, width, DTYPES[name], biased=biased),
        narrow={"backward_biased": 2},  # the bias and the sum of its gradient, once a program
        minimum={"forward": 2 * row, "backward": 3 * row, "backward_biased": 3 * row},
    )


def _swiglu_case(width: int, name: str) -> Case:
    row = 4096 * width * DTYPES[name].itemsize
    return Case(
        name=f"swiglu {width} {name}",
        launch=partial(_swiglu, width, DTYPES[name]),
        minimum={"forward": 3 * row, "backward": 5 * row},
    )


def _dropout_case(width: int, name: str) -> Case:
    row = 4096 * width * DTYPES[name].itemsize
    return Case(
        name=f"dropout_add {width} {name}",
        launch=partial(_dropout, width, DTYPES[name]),
        minimum={"forward": 3 * row, "backward": 2 * row},
    )


def _rotary(heads: int, size: int, dtype: torch.dtype) -> None:
    x, angles = _meta(2, 1024, heads, size, dtype=dtype), _meta(1024, size // 2, dtype=torch.float32)
    rotary.rotate(x, angles, angles, backwards=False)


def _split_rotary(heads: int, size: int, dtype: torch.dtype) -> None:
    groups = heads // 4
    packed, angles = _meta(2, 1024, 6 * groups, size, dtype=dtype), _meta(1024, size // 2, dtype=torch.float32)
    rotary.join(*rotary.split(packed, angles, angles, groups=groups), angles, angles)


def _swiglu(width: int, dtype: torch.dtype) -> None:
    gate = _meta(4096, width, dtype=dtype)
    swiglu.forward(gate, gate)
    swiglu.backward(gate, gate, gate)


def _gelu(width: int, dtype: torch.dtype, *, biased: bool) -> None:
    x, bias = _meta(4096, width, dtype=dtype), _meta(width, dtype=dtype) if biased else None
    gelu.forward(x, bias)
    gelu.backward(x, x) if bias is None else gelu.backward_biased(x, x, bias)


def _dropout(width: int, dtype: torch.dtype) -> None:
    x = _meta(4096, width, dtype=dtype)
    mask: dict[str, Any] = {"seed": 2**62, "threshold": 2**29, "scale": 1.125}
    dropout.forward(x, x, **mask)
    dropout.backward(x, **mask)


def _adamw(gradient: torch.dtype) -> None:
    flat, half = _meta(1 << 20, dtype=torch.float32), _meta(1 << 20, dtype=torch.bfloat16)
    adamw.step_(
        flat, _meta(1 << 20, dtype=gradient), flat, flat, copy=half, decays=_meta(1 << 15, dtype=torch.uint8), group=32,
        factor=_meta(1, dtype=torch.float32),
        keep=0.9999, rate=1e-3, betas=(0.9, 0.999), epsilon=1e-8, root_correction2=0.5,
    )  # fmt: skip


def _attentions() -> Iterator[Case]:
    # A row of a head fills less than a warp's accesses, and strides may be anything: no width of access is expected.
    for size, name, mask in (
        (64, "bf16", "alibi"), (128, "bf16", "alibi"), (128, "fp16", "alibi"), (64, "fp32", "alibi"),
        (128, "bf16", "documents, window"),
    ):  # fmt: skip
        yield Case(
            name=f"attention {size} {mask} {name}",
            launch=partial(_attention, size, DTYPES[name], alibi=mask == "alibi"),
            aligned=False,
        )


def _attention(size: int, dtype: torch.dtype, *, alibi: bool) -> None:
    query, key = (_meta(1, 8192, heads, size, dtype=dtype).transpose(1, 2) for heads in (32, 8))
    documents = None if alibi else _meta(1, 8192, dtype=torch.int64)
    slopes = _meta(32, dtype=torch.float32) if alibi else None
    masks: dict[str, Any] = {"causal": True, "reach": None if alibi else 4096, "offset": 0}
    out, logarithm = attention.forward(query, key, key, documents, slopes, **masks)
    attention.backward(out, query, key, key, logarithm, logarithm, documents, slopes, **masks)


def _experts() -> Iterator[Case]:
    # How products read and write depends on the layout that the compiler finds for them.
    for experts, inputs, outputs, name in (
        (8, 4096, 14336, "bf16"), (128, 2048, 768, "bf16"), (128, 2048, 768, "fp16"), (8, 1024, 1024, "fp32"),
    ):  # fmt: skip
        for what, transposed in (("", False), (", into fp32", True)):
            yield Case(
                name=f"grouped_linear {experts} x {inputs} to {outputs} {name}{what}",
                launch=partial(_grouped, experts, inputs, outputs, DTYPES[name], gradients=transposed),
                aligned=False,
            )
    for width, chosen, name in ((2048, 8, "bf16"), (4096, 2, "bf16"), (4096, 2, "fp16"), (4096, 2, "fp32")):
        tokens = 4096 * width * DTYPES[name].itemsize
        rows = chosen * tokens
        for what, weighted in (("", True), (", sums", False)):
            yield Case(
                name=f"rows of {chosen} experts {width} {name}{what}",
                launch=partial(_permuted, width, chosen, DTYPES[name], weighted=weighted),
                narrow={"gather": 1, "combine": 2 * chosen, "spread": 3},  # where a row lies, and its weight
                minimum={"gather": rows + tokens, "combine": rows + tokens, "spread": 2 * rows + tokens},
            )


def _grouped(experts: int, inputs: int, outputs: int, dtype: torch.dtype, *, gradients: bool) -> None:
    """Output and weight gradient; or input gradient, and the weight's added to a sum in fp32."""
    x, y = _meta(_ROWS, inputs, dtype=dtype), _meta(_ROWS, outputs, dtype=dtype)
    weight, bounds = _meta(experts, outputs, inputs, dtype=dtype), _meta(experts + 1, dtype=torch.int32)
    tiles = _meta(_ROWS // grouped.rows_of_tile(dtype) + experts, 3, dtype=torch.int32)
    grouped.products(y if gradients else x, weight, tiles, transposed=gradients)
    grouped.weight_gradients(y, x, weight.float() if gradients else weight, bounds, add=gradients)


def _permuted(width: int, chosen: int, dtype: torch.dtype, *, weighted: bool) -> None:
    """Forward and backward of rows with weights; or the sum of their gradients."""
    tokens, order = _meta(4096, width, dtype=dtype), _meta(4096 * chosen, dtype=torch.int64)
    rows, weights = _meta(4096 * chosen, width, dtype=dtype), _meta(4096, chosen, dtype=torch.float32)
    permute.combine(rows, order, weights if weighted else None, chosen)
    if weighted:
        permute.gather(tokens, order, chosen)
        permute.spread(tokens, rows, order, weights)
