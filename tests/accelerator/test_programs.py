"""The programs on the pretend accelerator: train, save, continue on another layout, generate text, fill masks.

What they log is what the same program logs on the CPU, in one process.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.e2e.launching import BERT_PROGRAM, PROGRAM, ROOT, small_run, under_torchrun, words
from tools.fill_mask import main as fill_mask
from tools.generate import main as generate
from tools.train_tokenizer import main as train_tokenizer

pytestmark = needs_pretend

Figures = dict[tuple[int, str], float]
OPTIONS: dict[str, Any] = {"global_batch_size": 4, "save_interval": 2, "eval_interval": 2, "eval_iters": 1, "lr": 1e-3}
OPTIONS |= {"hidden_dropout": 0, "attention_dropout": 0}  # masks differ between degrees of tp
SOURCE: dict[str, Any] = {"dp": 2, "zero_stage": 2, "offload_optimizer": True, "async_save": True}
TARGETS: list[Any] = [
    {"tp": 2},
    pytest.param({"tp": 2, "dp": 2, "zero_stage": 3}, marks=pytest.mark.slow),
    pytest.param({"pp": 2, "schedule": "zero-bubble", "async_save": True}, marks=pytest.mark.slow),
]


def train(rank: int, world_size: int, flags: list[str], program: str) -> int:
    status: int = runpy.run_path(str({"gpt": PROGRAM, "bert": BERT_PROGRAM}[program]))["main"](flags)
    return status


def run(directory: Path, device: str, *, program: str = "gpt", **changes: Any) -> Figures:
    """Train, and return the losses and gradient norms that were logged."""
    ranks = changes.get("tp", 1) * changes.get("pp", 1) * changes.get("dp", 1)
    preset = {"gpt": "gpt2-tiny", "bert": "bert-tiny"}[program]
    flags = small_run(directory, device=device, **{**OPTIONS, "preset": preset, **changes})
    backend = "pretend" if device == "pretend" else "gloo"
    statuses = run_distributed(train, ranks, flags, program, backend=backend, init=False, timeout=120)
    assert statuses == [0] * ranks
    keys, found = ("train/loss", "train/grad_norm", "eval/loss"), Figures()
    for record in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()):
        found |= {(record["step"], key): record[key] for key in keys if key in record}
    return found


def later(figures: Figures) -> Figures:
    """Those of the steps after the checkpoint."""
    return {place: value for place, value in figures.items() if place[0] > 2}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("tokenizer"), random.Random(0)
    text = folder / "text.jsonl"
    lines = (" ".join(f"word{draw.randrange(40)}" for _ in range(12)) for _ in range(200))
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    assert train_tokenizer(words(input=text, model="wordpiece", vocab_size=120, output=folder / "words")) == 0
    return folder / "words"


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> tuple[Path, Figures]:
    directory = tmp_path_factory.mktemp("cpu")
    return directory, run(directory, "cpu", tokenizer=tokenizer, vocab_size=None)


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> tuple[Path, Figures]:
    directory = tmp_path_factory.mktemp("device")
    return directory, run(directory, "pretend", tokenizer=tokenizer, vocab_size=None, **SOURCE)


def test_a_run_logs_what_it_logs_on_the_cpu(on_cpu: tuple[Path, Figures], on_device: tuple[Path, Figures]) -> None:
    assert {key for _, key in on_cpu[1]} == {"train/loss", "train/grad_norm", "eval/loss"}
    assert on_device[1] == pytest.approx(on_cpu[1], rel=1e-6)


@pytest.mark.parametrize("changes", TARGETS, ids=str)
def test_it_continues_from_a_checkpoint_of_another_layout(
    on_cpu: tuple[Path, Figures], on_device: tuple[Path, Figures], tmp_path: Path, tokenizer: Path, changes: Any
) -> None:
    options: dict[str, Any] = {"load": on_device[0] / "step_00000002", "tokenizer": tokenizer, "vocab_size": None}
    assert run(tmp_path, "pretend", **options, **changes) == pytest.approx(later(on_cpu[1]), rel=1e-6)
    # Without tensor parallelism nothing is split, and another layout decides anew.
    written = re.findall(r"^sequence_parallel = (\w+)$", (tmp_path / "config.toml").read_text(), re.MULTILINE)
    assert written == (["true"] if changes.get("tp", 1) > 1 else [])


def test_checkpoints_travel_between_the_device_and_the_cpu(
    on_cpu: tuple[Path, Figures], on_device: tuple[Path, Figures], tmp_path: Path, tokenizer: Path
) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "vocab_size": None}
    for number, (source, device) in enumerate(((on_device, "cpu"), (on_cpu, "pretend"))):
        found = run(tmp_path / str(number), device, load=source[0] / "step_00000002", **options)
        assert found == pytest.approx(later(on_cpu[1]), rel=1e-6)


def say(rank: int, world_size: int, tool: Any, flags: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert tool(flags) == 0
    return said.getvalue()


def test_generate_says_the_same(on_cpu: tuple[Path, Figures]) -> None:
    ask = partial(words, checkpoint=on_cpu[0], prompt="word3 word5", max_new_tokens=6)
    found = run_distributed(say, 1, generate, ask(device="pretend"), backend="pretend", init=False)
    assert found == [say(0, 1, generate, ask(device="cpu"))]


@pytest.mark.slow
def test_bert_trains_and_fill_mask_says_the_same(tmp_path: Path, tokenizer: Path) -> None:
    options: dict[str, Any] = {"program": "bert", "tokenizer": tokenizer, "vocab_size": None}
    expected = run(tmp_path / "cpu", "cpu", **options)
    found = run(tmp_path / "device", "pretend", dp=2, zero_stage=1, **options)
    assert found == pytest.approx(expected, rel=1e-6)
    ask = [*words(checkpoint=tmp_path / "device", top_k=3), "word3 [MASK] word5 [MASK]"]
    said = run_distributed(say, 1, fill_mask, [*ask, "--device", "pretend"], backend="pretend", init=False)
    assert said == [say(0, 1, fill_mask, [*ask, "--device", "cpu"])]


@pytest.mark.slow
def test_torchrun_starts_a_script_on_it(tmp_path: Path) -> None:
    runner = ROOT / "tests" / "accelerator" / "run.py"
    flags = small_run(tmp_path / "out", device="pretend", dp=2, train_iters=2)
    with under_torchrun(tmp_path / "logs", 2, runner, PROGRAM, *flags) as job:
        status, text = job.ends(within=120)
    assert (status, job.said()) == (0, ""), text
    assert "device    pretend, pretend" in job.said("stdout")
    assert "saved" in job.said("stdout")
