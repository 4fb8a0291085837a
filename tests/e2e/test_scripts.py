"""Launch scripts of Megatron-LM and its descendants, unedited: parsed and planned here; two steps in the slow set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megacore.commands.plan import dry_run
from megacore.config import Config, ResolvedConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from megacore.data.tokenizers.training import train_tokenizer
from tests.e2e import rehearsal
from tests.unit import data_bytes

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in rehearsal.SCRIPTS.glob("*.sh"))
Start = Callable[[str], rehearsal.Launch]


DEGREES = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Data and vocabularies, by what the scripts call them."""
    folder = tmp_path_factory.mktemp("scripts")
    bpe = train_tokenizer(["some words to learn a few merges from, some words to merge " * 20], "bpe", 300)
    bpe.save(folder / "tokenizer")
    model = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]
    (folder / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    (folder / "gpt2-merges.txt").write_text("\n".join(["#version: 0.2", *pairs]) + "\n")
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = [*letters, *(f"##{letter}" for letter in letters)]
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    (folder / "bert-vocab.txt").write_text("\n".join((*special, *pieces)) + "\n")
    document = [[index % 200 + 10 for index in range(50)]]
    data_bytes.write(folder / "text_document", [document] * 200)
    data_bytes.write(folder / "text_sentence", [[[7, 8, 9, 10, 11, 12]] * 4] * 200)
    names = ("text_document", "text_sentence", "tokenizer", "gpt2-vocab.json", "gpt2-merges.txt", "bert-vocab.txt")
    return {name: str(folder / name) for name in names}


@pytest.fixture
def start(files: dict[str, str], tmp_path: Path) -> Start:
    """Runs a script with small data."""

    def run(script: str) -> rehearsal.Launch:
        words = [str(tmp_path / "checkpoints"), str(tmp_path / "tensorboard"), files["gpt2-vocab.json"]]
        words += [files["gpt2-merges.txt"], files["text_document"], files["tokenizer"]]
        words += [files["bert-vocab.txt"], files["text_sentence"]]
        return rehearsal.run(script, words, tmp_path / "rehearsal")

    return run


def parsed(launch: rehearsal.Launch, flags: Sequence[str]) -> ResolvedConfig:
    """The configuration that a script's program gets, on the script's number of processes."""
    kind: Any = BertConfig if launch.program == "pretrain_bert.py" else Config
    return parse_config(
        flags,
        prog=launch.program,
        description="",
        kind=kind,
        planned=True,
        world_size=launch.processes,
        vocabulary=lambda _: 512,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_accepted_with_its_own_sizes(script: str, start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    launch = start(script)
    config = parsed(launch, launch.flags)
    given = dict(zip(launch.flags, launch.flags[1:], strict=False))
    assert config.model.num_layers == int(given["--num-layers"])
    assert config.training.global_batch_size == int(given["--global-batch-size"])
    assert config.precision.precision == ("bf16" if "--bf16" in given else "fp16")
    assert "translated from Megatron-LM: " in capfd.readouterr().err


@pytest.mark.parametrize("script", [name for name in SCRIPTS if "mixtral" not in name])  # experts have no plan
def test_a_small_script_has_a_plan(script: str, start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    launch = start(script)
    flags = launch.shrunk({})
    parsed(launch, flags)
    assert dry_run([*flags, "--dry-run", "--world-size", str(launch.processes)], launch.program) == 0
    assert "parameters" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_small_script_trains(script: str, start: Start, tmp_path: Path) -> None:
    """Two steps on CPUs, with each degree 2 where the script's is larger, and one block a stage."""
    launch = start(script)
    given = dict(pairwise(launch.flags))
    degrees = {flag: "2" for flag in DEGREES if int(given.get(flag, "1")) > 1}
    processes = 2 ** len(degrees)
    if any(flag.replace("_", "-") == "--deepspeed-config" for flag in launch.flags):
        processes = launch.processes  # the file's batch size holds for these
    batch = 2 * int(given["--global-batch-size"])
    samples = {"--train-samples": str(batch), "--lr-decay-samples": str(batch), "--lr-warmup-samples": str(batch // 2)}
    few = {"--num-layers": "4", "--eval-iters": "1", "--log-interval": "1"}
    if "--rampup-batch-size" in given:
        samples["--train-samples"] = str(2 * int(given["--rampup-batch-size"].replace("_", "")))
    flags = launch.shrunk({**degrees, **few, **samples})
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={max(processes, 2)}", launch.program, *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
