"""Which kernel computes attention on a CPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from megacore.ops.attention import AttentionShape, attention_backend

attention = import_module("megacore.ops.attention")  # the package exports the function of this name
PLAIN: dict[str, Any] = {"heads": 4, "groups": 2, "head_size": 64, "seq_length": 128, "dtype": torch.bfloat16}


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
