"""Which kernel computes attention on a CPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megacore.ops.attention import AttentionShape, attention_backend, slower_attention

attention = import_module("megacore.ops.attention")  # the package exports the function of this name
PLAIN: dict[str, Any] = {"heads": 4, "groups": 2, "head_size": 64, "seq_length": 128, "dtype": torch.bfloat16}


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "flash"),
        ({"dropout": 0.1}, "math"),
        ({"masked": True}, "flash"),
        ({"seq_length": 2048}, "flash"),
        ({"seq_length": 2048, "masked": True}, "blocks"),
        ({"seq_length": 2048, "dropout": 0.1}, "blocks"),
    ],
    ids=str,
)
def test_on_the_cpu_torch_is_asked(changes: dict[str, Any], expected: str) -> None:
    assert attention_backend(torch.device("cpu"), AttentionShape(**PLAIN | changes)) == expected


@pytest.mark.parametrize(
    ("capability", "chosen", "changes", "expected"),
    [
        ((9, 0), SDPBackend.CUDNN_ATTENTION, {}, None),
        ((9, 0), SDPBackend.FLASH_ATTENTION, {}, "flash kernel on this device, where cudnn"),
        ((8, 0), SDPBackend.MATH, {}, "math kernel on this device, where flash"),
        ((9, 0), SDPBackend.MATH, {"dtype": torch.float32}, None),
        ((9, 0), SDPBackend.EFFICIENT_ATTENTION, {"masked": True}, None),
        ((9, 0), SDPBackend.MATH, {"masked": True}, "torch.backends.cuda.mem_efficient_sdp_enabled()"),
    ],
    ids=str,
)
def test_a_slower_kernel_than_the_device_has_is_warned_of(
    capability: tuple[int, int],
    chosen: SDPBackend,
    changes: dict[str, Any],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = torch.empty
    asked: list[tuple[Tensor, ...]] = []

    def choice(*operands: Any, **_: Any) -> int:
        asked.append(operands)
        return int(chosen.value)

    monkeypatch.setattr(attention.torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
    monkeypatch.setattr(attention.torch, "zeros", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
    monkeypatch.setattr(attention.torch, "_fused_sdp_choice", choice)
    monkeypatch.setattr(attention, "_is_cuda", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    warning = slower_attention(CUDA, AttentionShape(**PLAIN | changes))
    assert len(asked) == 1 and asked[0][0].shape == (1, 4, 128, 64)
    if expected is None:
        assert warning is None
    else:
        assert warning is not None and expected in warning
        assert "4 heads of 64 over 2 of keys, 128 positions" in warning
