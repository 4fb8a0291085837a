"""Launch scripts of Megatron-LM and its descendants, unedited: parsed, planned and rehearsed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.commands.dry_run import dry_run
from megacore.config import Config
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from megacore.data.tokenizers.training import train_tokenizer
from megacore.train.starting import REHEARSAL
from megacore.verify.rehearse import cut, rehearse
from tests.e2e import rehearsal
from tests.e2e.launching import PROGRAM, ROOT, run_cold, run_warm
from tests.unit import data_bytes

SCRIPTS = sorted(path.name for path in rehearsal.SCRIPTS.glob("*.sh"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Vocabularies and data, in the order in which the scripts are given them."""
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
    gpt = ("gpt2-vocab.json", "gpt2-merges.txt", "text_document", "tokenizer")
    return [str(folder / name) for name in (*gpt, "bert-vocab.txt", "text_sentence")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_accepted_planned_and_cut(
    script: str, files: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted with its own sizes, planned with small ones, and cut for a rehearsal that keeps its features."""
    arguments = [str(tmp_path / "checkpoints"), str(tmp_path / "tensorboard"), *files]
    launch = rehearsal.run(script, arguments, tmp_path / "rehearsal")
    config = parse_config(
        launch.flags,
        prog=launch.program,
        description="",
        kind=BertConfig if launch.program == "pretrain_bert.py" else Config,
        planned=True,
        world_size=launch.processes,
        vocabulary=lambda _: 512,
    )
    given = dict(zip(launch.flags, launch.flags[1:], strict=False))
    assert config.model.num_layers == int(given["--num-layers"])
    assert config.training.global_batch_size == int(given["--global-batch-size"])
    assert config.precision.precision == ("bf16" if "--bf16" in given else "fp16")
    assert "translated from Megatron-LM: " in capfd.readouterr().err

    if "mixtral" not in script:  # experts have no plan
        words = [*launch.shrunk(), "--dry-run", "--estimate", "--world-size", str(launch.processes)]
        assert dry_run(words, launch.program) == 0
        assert "parameters" in capfd.readouterr().out

    monkeypatch.setenv("WORLD_SIZE", str(launch.processes))
    after = cut(launch.flags, launch.program, 8).cut
    assert after.parallel.ranks <= 8 and after.training.train_iters <= 4
    assert after.model.hidden_size <= 64 and after.model.num_layers <= 8
    for name in ("schedule", "zero_stage", "optimizer", "precision", "recompute", "activation", "moe_router_topk"):
        assert after.value(name) == config.value(name), name
    for name in ("tp", "pp", "ep"):
        assert (after.value(name) > 1) == (config.value(name) > 1), name


@pytest.mark.parametrize(
    ("script", "processes"),
    [("gpt_interleaved.sh", "1"), *(pytest.param(name, "4", marks=pytest.mark.slow) for name in SCRIPTS)],
)
def test_a_script_of_many_nodes_is_rehearsed_unedited_without_its_files(
    script: str, processes: str, tmp_path: Path
) -> None:
    absent = [f"/nowhere/{name}" for name in ("board", "vocab.json", "merges", "data", "tokenizer", "v", "d")]
    # Beside the first argument some write the file for DeepSpeed.
    started = ["bash", str(rehearsal.SCRIPTS / script), str(tmp_path / "save"), *absent]
    command = (sys.executable, "tools/rehearse.py", "--processes", processes, *started)
    done = run_cold(*command, directory=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "not on this machine: " in done.stdout and "step 4/4" in done.stdout
    assert re.search(r"rehearsed: pretrain_\w+\.py accepts the whole command line on \d+ process", done.stdout)


@pytest.mark.slow
def test_the_variable_alone_rehearses_what_a_launcher_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--mock-data --vocab-size 64 --tensor-model-parallel-size 2 --num-layers 2 --hidden-size 64"
    words += " --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1"
    for name, value in {REHEARSAL: "1", "RANK": "0", "WORLD_SIZE": "64"}.items():
        monkeypatch.setenv(name, value)
    done = run_warm(PROGRAM, *words.split(), "--train-iters", 500_000, directory=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("starting a rehearsal: reading flags and files\n") and "step 4/4" in done.stdout
    assert "rehearsed: pretrain_gpt.py accepts the whole command line on 64 processes" in done.stdout
    assert "--rehearse" in (ROOT / "docs/guides/coming-from-megatron.md").read_text(encoding="utf-8")[:2500]


@pytest.mark.parametrize(
    ("most", "kept", "unchecked"),
    [
        (1, "--recompute none", "--schedule interleaved, --sequence-parallel, --zero-stage 1"),
        (2, "--zero-stage 1", "--schedule interleaved, --sequence-parallel"),
        (4, "--schedule interleaved --zero-stage 1", "--sequence-parallel"),
    ],
)
def test_a_rehearsal_names_what_its_degrees_switch_off(
    most: int, kept: str, unchecked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda words, **options: subprocess.CompletedProcess(words, 0))
    shape = "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data --fp8"
    degrees = "--pp 2 --tp 2 --dp 2 --schedule interleaved --virtual-stages 2 --sequence-parallel --zero-stage 1"
    tracker = "--wandb-project p --wandb-exp-name 8b --wandb-mode offline"
    words = f"{shape} {degrees} {tracker} --global-batch-size 8 --train-iters 9 --rehearse={most}"
    assert rehearse(words.split(), "pretrain_gpt.py") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"kept: {kept} " in said and said.endswith(f" {unchecked}, --wandb-project p, --fp8 blockwise")
