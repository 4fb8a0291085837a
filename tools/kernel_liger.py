"""Liger-Kernel's kernels beside ours: the same work at the same shapes, for `tools/kernel_report.py --liger`.

Its launchers choose block sizes and warps, as ours do. They take meta tensors, except the cross-entropy, which looks at
the targets: its tensors are on the CPU, and nobody reads or writes the logits.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tools.kernel_cases import Case, cases, product

_ROWS = {"layer_norm": 16384, "rms_norm": 16384, "swiglu": 4096, "fused_softmax": 128, "cross_entropy": 4096}
WIDTHS = (2048, 4096, 5120, 8192, 12288, 16384)


def is_installed() -> bool:
    """Whether Liger-Kernel can be imported."""
    return importlib.util.find_spec("liger_kernel") is not None


def liger_cases() -> list[Case]:
    """Two cases for each operator and shape in bf16: `ours: NAME` and `Liger: NAME`."""
    named = {case.name: case for case in (*cases(), *product())}
    pairs: list[tuple[str, Callable[[], object]]] = [
        *((f"layer_norm {width} bf16", partial(_layer_norm, width)) for width in WIDTHS),
        *((f"rms_norm {width} bf16", partial(_rms_norm, width)) for width in WIDTHS),
        *((f"fused_softmax plain {keys} bf16", partial(_softmax, keys)) for keys in (4096, 32768)),
        *((f"cross_entropy {size} of {size} bf16", partial(_cross_entropy, size)) for size in (32000, 128256)),
        *((f"swiglu {width} bf16", partial(_swiglu, width)) for width in (8192, 14336)),
    ]
    return [
        case
        for name, launch in pairs
        for case in (
            replace(named[name], name=f"ours: {name}"),
            Case(name=f"Liger: {name}", launch=launch, aligned=False),
        )
    ]


def _operators(module: str) -> Any:
    return importlib.import_module(f"liger_kernel.ops.{module}")


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _layer_norm(width: int) -> None:
    x, weight, row = _meta(_ROWS["layer_norm"], width), _meta(width), _meta(_ROWS["layer_norm"], dtype=torch.float32)
    _operators("layer_norm").layer_norm_forward(x, weight, weight, 1e-5)
    _operators("layer_norm").layer_norm_backward(x, x, weight, weight, row, row)


def _rms_norm(width: int) -> None:
    x, weight = _meta(_ROWS["rms_norm"], width), _meta(width)
    _, _, rstd, block, warps, mode = _operators("rms_norm").rms_norm_forward(x, weight, 1e-5, 0.0, "llama", None)
    _operators("rms_norm").rms_norm_backward(x, x, weight, rstd, 0.0, mode, block, warps, True, None)


def _softmax(keys: int) -> None:
    x = _meta(_ROWS["fused_softmax"], keys)
    y, *settings = _operators("softmax")._softmax_forward(x)
    _operators("softmax")._softmax_backward(x, y, *settings)


def _cross_entropy(size: int) -> None:
    tokens = _ROWS["cross_entropy"]
    logits, targets = torch.empty(tokens, size, dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.int64)
    _operators("cross_entropy").cross_entropy_forward(logits, targets, None, -100, 0.0, 0.0, "mean", None, False)


def _swiglu(width: int) -> None:
    gate = _meta(_ROWS["swiglu"], width)
    _operators("swiglu").swiglu_forward(gate, gate)
    _operators("swiglu").swiglu_backward(gate, gate, gate)
