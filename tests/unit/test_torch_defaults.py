"""What a run tells torch before torch is loaded, and leaves to the user."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacore.errors import ConfigError
from megacore.train import launch
from megacore.train.launch import Job
from megacore.train.starting import DEFAULTS, set_torch_defaults
from tests.unit.packaging_builds import ROOT


def test_what_the_user_has_set_stays() -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "TORCH_NCCL_HIGH_PRIORITY": "0"}
    before = dict(environment)
    set_torch_defaults(environment)
    assert environment == before


def run(script: str, output: Path) -> int:
    """The exit status of a small run in this process."""
    flags = "--mock-data --vocab-size 64 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --train-iters 1"
    flags += f" --hang-timeout-minutes 0 --device cpu --output-dir {output}"
    status: int = runpy.run_path(str(ROOT / script))["main"](flags.split())
    return status


@pytest.mark.parametrize("script", ["pretrain_gpt.py", "pretrain_bert.py"])
def test_a_run_sets_them_before_it_loads_torch(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert run(script, tmp_path) == 0
    set_here = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_HIGH_PRIORITY": "1"}
    assert {name: found[name] for name in DEFAULTS} == set_here


def test_a_deterministic_run_asks_torch_for_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    config: Any = SimpleNamespace(training=SimpleNamespace(reproducible=False, deterministic=True))
    begins = mock.patch("megacore.watch.start.begin_watch", side_effect=InterruptedError)  # what follows
    with begins, pytest.raises(InterruptedError):
        Job().run(config, lambda config, mesh: None)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


# ---- freed memory ----------------------------------------------------------------------------------------------------

PROGRAM = """
import resource
import sys
from megacore.train import freed_memory

getattr(freed_memory, sys.argv[1])()
kept = []
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (48, 3, 48, 12, 3):
        kept.append(b"1" * (size << 20))
    kept.clear()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_of_second_step(call: str, **environment: str) -> int:
    command = [sys.executable, "-c", PROGRAM, call]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc is not glibc's")
def test_a_step_finds_the_memory_of_the_step_before() -> None:
    pages = (48 + 3 + 48 + 12 + 3) << 20 >> 12
    assert pages_of_second_step("give_back_what_is_freed") >= pages
    assert pages_of_second_step("keep_what_is_freed") < pages / 100
    assert pages_of_second_step("keep_what_is_freed", MALLOC_MMAP_THRESHOLD_="1048576") >= pages


def test_a_run_on_a_cpu_keeps_what_is_freed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []

    def refuse(*_: object) -> None:
        calls.append("run")
        raise ConfigError(["enough"])

    monkeypatch.setattr(launch, "keep_what_is_freed", lambda: calls.append("keep"))
    monkeypatch.setattr(launch, "output_directory", refuse)
    assert run("pretrain_gpt.py", tmp_path) == 2
    assert calls == ["keep", "run"]
