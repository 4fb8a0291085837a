"""What freed memory costs: pages that a training step asks the system for again."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.errors import ConfigError
from megacore.train import launch
from tests.unit.packaging_builds import ROOT

PROGRAM = """
import resource
import sys
from megacore import freed_memory

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
    flags = "--mock-data --vocab-size 64 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --train-iters 1"
    flags += f" --hang-timeout-minutes 0 --device cpu --output-dir {tmp_path}"
    assert runpy.run_path(str(ROOT / "pretrain_gpt.py"))["main"](flags.split()) == 2
    assert calls == ["keep", "run"]
