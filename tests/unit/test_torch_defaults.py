"""What a run tells torch before torch is loaded, and leaves to the user."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pretrain_gpt
from megacore.train.torch_defaults import DEFAULTS, set_torch_defaults


def test_what_the_user_has_set_stays() -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "TORCH_NCCL_HIGH_PRIORITY": "0"}
    before = dict(environment)
    set_torch_defaults(environment)
    assert environment == before


def test_a_run_sets_them_before_it_loads_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*DEFAULTS, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    found: dict[str, str] = {}

    class Launch(ModuleType):
        """Stands for the module that imports torch."""

        def __getattr__(self, name: str) -> Any:
            if name == "launch":
                found.update(os.environ)
                return lambda config, train: 0
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "megacore.train.launch", Launch("launch"))
    flags = "--mock-data --preset gpt2-tiny --train-iters 1 --hang-timeout-minutes 0 --device cpu --output-dir"
    assert pretrain_gpt.main([*flags.split(), str(tmp_path)]) == 0
    assert {name: found[name] for name in DEFAULTS} == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
    }
