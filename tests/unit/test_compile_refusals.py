"""--compile is refused where it cannot work, with the way out; checkpoints do not know of it."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from megacore.parallel.compiled import compile_layer, why_not_compile

CPU = torch.device("cpu")


def test_a_missing_compiler_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert shutil.which("no-such-compiler") is None
    reason = why_not_compile("inductor", CPU)
    assert reason is not None and "no-such-compiler is not installed" in reason and "aot-eager" in reason
    assert why_not_compile("aot-eager", CPU) is None
    assert why_not_compile("inductor", torch.device("cuda")) is None


def test_names_and_class_of_a_layer_stay() -> None:
    layer = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    names = list(layer.state_dict())
    compile_layer(layer, backend="aot-eager")
    assert list(layer.state_dict()) == names and type(layer) is nn.Sequential
