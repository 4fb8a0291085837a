"""What cannot work is refused as the user sees it: exit status 2, one clear message, no traceback, within seconds.

The real program runs in a process of its own, started warm (tests/warm.py), for some wrong configurations; every broken
input is read as the program reads it. Nearly all are refused before torch is loaded; what only the ranks can find out
is reported by one of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from megacore.checkpoint.files import describe
from megacore.checkpoint.manifest import sealed
from megacore.commands.pretrain_gpt import read_config
from megacore.data.tokenizers.tokenizer import JsonTokenizer
from megacore.errors import ConfigError
from tests.e2e.launching import PROGRAM, alone, needs_proc, only_starts, run_cold, small_run, under_torchrun
from tests.unit import data_bytes

# Runs a program with the flags that follow, and fails where it imports torch.
WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LIMIT = 10.0  # seconds from the start to the end of a refusal


def check_message(text: str, expected: str) -> None:
    """One refusal that says what is expected, and no traceback."""
    assert "Traceback" not in text
    assert text.startswith("megacore: refused")
    assert text.count("megacore:") == 1
    assert expected in text


def test_a_model_beyond_the_memory_is_refused(tmp_path: Path) -> None:
    """Refusals that no machine decides are rows of tests/argv.toml and tests/golden."""
    changes = {"preset": "bloom-176b", "vocab_size": None, "device": "cpu"}
    done = alone(*small_run(tmp_path / "out", **changes), timeout=LIMIT)
    check_message(done.stderr, "--preset bloom-176b needs at least ")
    assert done.returncode == 2 and only_starts(done.stdout)
    assert not (tmp_path / "out").exists()


# ---- broken inputs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs that work: the dataset `data`, the tokenizer `tokenizer`, and the output directory of a run, `trained`."""
    folder = tmp_path_factory.mktemp("good")
    data_bytes.write(folder / "data", [[[k % 50 for k in range(40)]] for _ in range(60)])
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"word{k}": k for k in range(60)}, "word0"))
    JsonTokenizer(backend).save(folder / "tokenizer")
    done = alone(*small_run(folder / "trained"), timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def inputs(good: Path, tmp_path: Path) -> Path:
    """A copy of the inputs that work, to be broken."""
    shutil.copytree(good, tmp_path / "inputs")
    return tmp_path / "inputs"


Break = Callable[[Path], Any]  # the flags that it changes, if any


def empty_tokenizer_directory(inputs: Path) -> dict[str, object]:
    """A directory without any tokenizer."""
    (inputs / "empty").mkdir()
    return {"tokenizer": inputs / "empty"}


def another_tokenizer(inputs: Path) -> dict[str, object]:
    """Continue from a run with a tokenizer of the same size as its own, and of other words."""
    path = shard(inputs).with_name("manifest.json")
    for folder, stem in ((path.with_name("tokenizer"), "word"), (inputs / "other", "other")):
        model = tokenizers.models.WordLevel({f"{stem}{k}": k for k in range(64)}, f"{stem}0")
        JsonTokenizer(tokenizers.Tokenizer(model)).save(folder)
    raw = json.loads(path.read_text())
    raw["files"] |= {f"tokenizer/{file.name}": asdict(describe(file)) for file in path.parent.glob("tokenizer/*")}
    path.write_text(sealed(raw))
    return {"load": inputs / "trained", "tokenizer": inputs / "other", "train_iters": 6}


def of_another_trainer(name: str) -> Break:
    """Continue from where the run saves, which holds another trainer's checkpoint."""

    def apply(inputs: Path) -> dict[str, object]:
        (inputs / "D" / name).mkdir(parents=True)
        if name.startswith("iter_"):
            (inputs / "D/latest_checkpointed_iteration.txt").write_text("1000")
        return {"output_dir": inputs / "D", "load": "auto"}

    return apply


def manifest_without_optimizer(manifest: Path) -> None:
    """A manifest that lost a section of its configuration."""
    raw = json.loads(manifest.read_text())
    del raw["config"]["optimizer"]
    manifest.write_text(sealed(raw))


def shard(inputs: Path) -> Path:
    """The file with the trained run's weights."""
    (path,) = inputs.glob("trained/step_*/model-*.safetensors")
    return path


def damaged(change: Callable[[Path], object], name: str | None = None) -> Break:
    """Continue from the trained run after a change of a file of its checkpoint, which is that of the weights."""

    def apply(inputs: Path) -> dict[str, object]:
        file = shard(inputs)
        change(file.with_name(name or file.name))
        return {"load": file.parent}

    return apply


def flipped_bit(file: Path) -> None:
    """One wrong bit, in a file of the right size."""
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))


# One of each way on which an input is read. What else is wrong with a file is told from it in the tests of its reader.
BROKEN_INPUTS: dict[str, tuple[Break, str]] = {
    "wrong magic": (lambda i: (i / "data.idx").write_bytes(b"GARBAGE" * 5), "data.idx: wrong magic"),
    "directory without a tokenizer": (empty_tokenizer_directory, "no tokenizer in this directory"),
    "no checkpoint": (lambda inputs: {"load": inputs / "tokenizer"}, "run's output directory, or --load auto"),
    "checkpoint of Megatron-LM where the run saves": (of_another_trainer("iter_0001000"), "Megatron-LM: use python"),
    "checkpoint of DeepSpeed where the run saves": (of_another_trainer("global_step9"), "DIR, and then --pretrained-"),
    "model of Hugging Face's where the run saves": (of_another_trainer("model.safetensors"), "--from hf --to megacore"),
    "damaged manifest": (
        damaged(lambda file: os.truncate(file, 99), "manifest.json"), "manifest.json cannot be read as a manifest",
    ),
    "manifest of no optimizer": (
        damaged(manifest_without_optimizer, "manifest.json"), "does not say which model and optimizer it is of",
    ),
    "another tokenizer": (another_tokenizer, "is not the one that"),
    "lost shard": (damaged(Path.unlink), "the checkpoint is incomplete"),
    "flipped bit": (damaged(flipped_bit), "does not have the XXH3 of its manifest"),
    "other shape": (
        lambda inputs: {"load": inputs / "trained", "hidden_size": 128, "ffn_hidden_size": 256},
        "--hidden-size 64 there, 128 here",
    ),
}  # fmt: skip


def run_with(inputs: Path, breaking: Break) -> list[str]:
    """Break the inputs; the flags of a run that uses them."""
    changes = changed if isinstance(changed := breaking(inputs), dict) else {}
    flags = {"mock_data": None, "data_path": inputs / "data", "output_dir": inputs / "out", **changes}
    return small_run(**flags)


LATE = "damaged manifest"  # which a rank finds when it loads


@pytest.mark.parametrize("name", [name for name in BROKEN_INPUTS if name != LATE])
def test_a_broken_input_is_refused(inputs: Path, name: str) -> None:
    breaking, expected = BROKEN_INPUTS[name]
    with pytest.raises(ConfigError) as error:
        read_config(run_with(inputs, breaking), prog="pretrain_gpt.py", exits=False)
    assert expected in str(error.value)


def test_a_broken_checkpoint_is_refused_where_it_is_loaded(inputs: Path) -> None:
    breaking, expected = BROKEN_INPUTS[LATE]
    check_message((done := alone(*run_with(inputs, breaking), timeout=LIMIT)).stderr, expected)
    assert done.returncode == 2 and only_starts(done.stdout)


COLD: dict[str, tuple[Break, str]] = {
    "configuration": (lambda inputs: {"tp": 3}, "--tp 3 must divide --num-attention-heads"),
    "input": BROKEN_INPUTS["wrong magic"],
}


@pytest.mark.parametrize(("breaking", "expected"), COLD.values(), ids=COLD)
def test_a_new_interpreter_refuses_before_it_loads_torch(inputs: Path, breaking: Break, expected: str) -> None:
    done = run_cold(sys.executable, "-c", WITHOUT_TORCH, PROGRAM, *run_with(inputs, breaking), timeout=LIMIT)
    check_message(done.stderr, expected)
    assert done.returncode == 2 and only_starts(done.stdout)


HF = "convert_checkpoint absent --from megacore --to hf --output x"


@pytest.mark.parametrize("run", ["fill_mask absent x", "inspect_checkpoint absent", "perplexity absent --input x", HF])
def test_a_tool_refuses_a_run_that_is_not_there_before_it_loads_torch(run: str) -> None:
    done = run_cold(sys.executable, "-c", WITHOUT_TORCH, *f"tools/{run}".replace(" ", ".py ", 1).split())
    assert done.returncode == 2 and "absent holds no checkpoint" in done.stderr


def test_all_that_is_wrong_is_told_together(inputs: Path) -> None:
    def spoil(inputs: Path) -> dict[str, object]:
        os.truncate(inputs / "data.idx", 0)
        return {**empty_tokenizer_directory(inputs), "load": inputs / "tokenizer"}

    with pytest.raises(ConfigError) as error:
        read_config(run_with(inputs, spoil), prog="pretrain_gpt.py", exits=False)
    assert len(error.value.problems) == 3


# ---- several ranks ---------------------------------------------------------------------------------------------------

UNDER_TORCHRUN: dict[str, tuple[Break, str]] = {
    "configuration": COLD["configuration"],
    "other shape": BROKEN_INPUTS["other shape"],
    "device": (lambda inputs: {"device": "cuda"}, "--device cuda: torch finds no such device here"),
    "kernels": (
        lambda inputs: {"device": "cpu", "kernels": "triton"},
        "--kernels triton runs on a GPU, and this run computes on the CPU",
    ),
}
MARKS = {
    "device": pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there"),
    "kernels": pytest.mark.slow,
}


@needs_proc
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in UNDER_TORCHRUN])
def test_one_rank_speaks_for_all(inputs: Path, tmp_path: Path, name: str) -> None:
    breaking, expected = UNDER_TORCHRUN[name]
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *run_with(inputs, breaking)) as job:
        status, launcher = job.ends(30.0)  # mostly of torchrun itself
    check_message(job.said(), expected)
    assert only_starts(job.said("stdout"))
    assert status == 1
    assert launcher.count(expected) == len(re.findall("megacore: refused", launcher)) == 1
