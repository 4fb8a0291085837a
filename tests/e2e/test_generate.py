"""tools/generate.py with what it cannot use: one line, exit status 2, no traceback."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from megacore.checkpoint.files import describe
from megacore.checkpoint.manifest import sealed
from megacore.data.tokenizers.tokenizer import JsonTokenizer
from megacore.data.tokenizers.training import train_tokenizer
from megacore.inference.generate import Sampling, choose
from megacore.inference.scoring import TextScorer
from tests.e2e.launching import alone, small_run, words
from tests.parity.conversions import to_megacore, tokenizer
from tests.parity.hf_models import make_model, save_model
from tools.generate import main as generate
from tools.run_lm_eval import main as run_lm_eval


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a short run, with its tokenizer."""
    folder = tmp_path_factory.mktemp("generate")
    save_tokenizer(folder / "tokenizer", "word", 60)
    done = alone(*small_run(folder / "run", tokenizer=folder / "tokenizer", train_iters=1), timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / "run" / "step_00000001"


def refusal(capsys: pytest.CaptureFixture[str], **flags: object) -> str:
    """The one line of a refusal."""
    assert generate(words(**{"prompt": "word3", "max_new_tokens": 5, **flags})) == 2
    said = capsys.readouterr().err
    assert said.startswith("generate.py: error: ")
    assert said.count("\n") == 1
    return said


def test_a_wrong_flag_is_one_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--prompt has no tokens" in refusal(capsys, checkpoint=checkpoint, prompt="")
    assert "nowhere: no such tokenizer" in refusal(capsys, checkpoint=checkpoint, tokenizer="nowhere")


@pytest.mark.parametrize("size", [60, 600])
def test_another_tokenizer_is_told(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    save_tokenizer(tmp_path / "other", "other", size)
    said = refusal(capsys, checkpoint=checkpoint, tokenizer=tmp_path / "other", prompt="other3")
    assert "is not the one that" in said
    save_tokenizer(tmp_path / "same", "word", 60)
    assert generate(words(checkpoint=checkpoint, tokenizer=tmp_path / "same", prompt="word3", max_new_tokens=2)) == 0


def test_a_tokenizer_larger_than_the_model_is_told(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = changed(checkpoint, tmp_path, lambda shard: None)
    shutil.rmtree(bare / "tokenizer")
    manifest = json.loads((bare / "manifest.json").read_text())
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if "/" not in name}
    manifest["tokenizer"] = None
    (bare / "manifest.json").write_text(sealed(manifest))
    save_tokenizer(tmp_path / "large", "word", 600)
    said = refusal(capsys, checkpoint=bare, tokenizer=tmp_path / "large", prompt="word599")
    assert "has a vocabulary of 600, but the model of" in said


def test_a_damaged_tokenizer_is_told(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bit makes another word of `word3`, which the tokenizers library does not mind."""
    broken = changed(checkpoint, tmp_path, lambda shard: None)
    file = broken / "tokenizer" / "tokenizer.json"
    good = file.read_bytes()
    file.write_bytes(good.replace(b'"word3"', b'"word;"'))
    for flags in ({}, {"tokenizer": checkpoint / "tokenizer"}):
        assert f"{file} does not have the XXH3 of its manifest" in refusal(capsys, checkpoint=broken, **flags)
    file.write_bytes(good)
    other = broken / "tokenizer" / "vocab.json"
    other.write_text("{}")
    assert f"{other} is not among the files of the manifest" in refusal(capsys, checkpoint=broken)
    shutil.rmtree(file.parent)
    assert f"{file}: No such file or directory" in refusal(capsys, checkpoint=broken)


def save_tokenizer(folder: Path, stem: str, size: int) -> None:
    """A tokenizer with the given number of words."""
    vocabulary = {f"{stem}{k}": k for k in range(size)}
    JsonTokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, f"{stem}0"))).save(folder)


def test_a_tiny_temperature_takes_the_likeliest_token() -> None:
    logits = torch.tensor([1.0, 3.0, 2.999999, -1e30])
    for temperature in (1e-300, 5e-324, 1e-40):
        assert choose(logits, Sampling(temperature=temperature, top_p=0.9), torch.Generator()) == 1


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_weights_that_are_not_numbers_are_told(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], temperature: float
) -> None:
    def spoil(shard: Path) -> None:
        weights = load_file(shard)
        weights["blocks.1.mlp.up.weight"][3, 3] = torch.nan
        save_file(weights, shard)

    broken = changed(checkpoint, tmp_path, spoil)
    assert "output is not finite" in refusal(capsys, checkpoint=broken, temperature=temperature)


def test_a_model_of_the_wrong_kind_is_told(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = changed(checkpoint, tmp_path, lambda shard: None)
    manifest = json.loads((broken / "manifest.json").read_text())
    for wrong in ("64", -1, None):
        manifest["config"]["model"]["hidden_size"] = wrong
        (broken / "manifest.json").write_text(sealed(manifest))
        assert "does not describe a model" in refusal(capsys, checkpoint=broken)


def changed(checkpoint: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    """A copy of a checkpoint whose weights are changed, with a manifest that agrees."""
    copy = folder / checkpoint.name
    copy.mkdir()
    for path in checkpoint.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    shutil.copytree(checkpoint / "tokenizer", copy / "tokenizer")
    (shard,) = copy.glob("model-*.safetensors")
    change(shard)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"][shard.name] = asdict(describe(shard))
    (copy / "manifest.json").write_text(sealed(manifest))
    return copy


def test_half_a_character_at_the_end_is_printed(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer(["a rope and a ship, a rope and the sea. " * 20], "bpe", 300)
    new = tokenizer.encode(" a \N{SNOWMAN}")[:-1]
    monkeypatch.setattr("megacore.inference.trained.tokenizer_of", lambda *_: tokenizer)
    monkeypatch.setattr("megacore.inference.generate.generate", lambda *_, **__: iter(new))
    assert generate(words(checkpoint=checkpoint, prompt="ship", max_new_tokens=9)) == 0
    assert capsys.readouterr() == ("ship a \N{REPLACEMENT CHARACTER}\n", "")
    monkeypatch.setattr("megacore.inference.generate.generate", lambda *_, **__: iter([tokenizer.eod]))
    assert generate(words(checkpoint=checkpoint, prompt="ship", max_new_tokens=9)) == 0
    assert capsys.readouterr().err == "the model ended the document at once: try another --seed, or train longer\n"


# ---- lm-eval ---------------------------------------------------------------------------------------------------------

CHOICES = (["w3", "w4 w5"], ["w6", "w7"], ["w8 w9", "w2"])


def test_without_the_harness_it_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_lm_eval(["--tasks", "x"]) == 2
    assert "needs the package lm_eval, which is not installed: pip install lm_eval" in capsys.readouterr().err


def test_a_run_and_its_program_are_arguments_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the harness is: its package need not be installed."""
    got: list[list[str]] = []
    for name in ("lm_eval", "lm_eval.__main__", "megacore.inference.lm_eval_model"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.cli_evaluate = lambda: got.append(sys.argv[1:])  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    run, last = str(tmp_path), ["--tasks", "x", "--model", "megacore"]
    for typed in ([run, "--program", "my.py"], ["--program=my.py", run, "--model_args", "seed=3"]):
        assert run_lm_eval([*typed, "--tasks", "x"]) == 0
    given = f"checkpoint={run},program=my.py"
    assert got == [["--model_args", given, *last], ["--model_args", f"{given},seed=3", *last]]


ASKED = {"doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}
UNTIL = {"until": ["w9"], "max_gen_toks": 4, "do_sample": False}
# Tasks of the harness: what a model is asked for, its figure, and the fields of each.
TASKS: dict[str, tuple[str, str, dict[str, object]]] = {
    "tiny_choice": ("multiple_choice", "acc", {**ASKED, "doc_to_choice": "{{choices}}"}),
    "tiny_rolling": ("loglikelihood_rolling", "bits_per_byte", {"doc_to_text": "", "doc_to_target": "{{question}}"}),
    "tiny_generation": ("generate_until", "exact_match", {**ASKED, "generation_kwargs": UNTIL}),
}


def write_tasks(folder: Path) -> None:
    """On the documents of folder/documents.jsonl."""
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}}}
    for name, (kind, metric, fields) in TASKS.items():
        made = {"task": name, **data, "test_split": "test", "output_type": kind, "metric_list": [{"metric": metric}]}
        (folder / f"{name}.yaml").write_text(json.dumps(made | fields))  # JSON is YAML


def test_the_harness_gets_the_answers_of_the_scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    directory, spoken = save_model(make_model("gpt2"), tmp_path / "hf"), tokenizer({"bos": "<begin>", "eos": "<end>"})
    spoken.save(directory)
    to_megacore(directory, tmp_path / "megacore")
    rows = [{"question": f"w{n} w{n + 1}", "choices": choices, "answer": 0} for n, choices in enumerate(CHOICES)]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tasks(tmp_path)
    flags = f"--model_args checkpoint={tmp_path}/megacore --include_path {tmp_path} --output_path {tmp_path}/out"
    flags += f" --tasks {','.join(TASKS)} --device cpu --batch_size 2 --log_samples"
    assert run_lm_eval(flags.split()) == 0
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    scorer = TextScorer.of_checkpoint(tmp_path / "megacore", device="cpu")
    questions = [str(row["question"]) for row in rows]
    likely = [
        [scorer.log_likelihoods([(question, f" {choice}")])[0][0] for choice in choices]
        for question, choices in zip(questions, CHOICES, strict=True)
    ]
    assert found["tiny_choice"]["acc,none"] == pytest.approx(sum(row[0] == max(row) for row in likely) / 3)
    bits = -sum(scorer.rolling(questions)) / math.log(2) / sum(map(len, questions))
    assert found["tiny_rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-6)
    (samples,) = (tmp_path / "out").rglob("samples_tiny_generation_*.jsonl")
    answers = {record["doc"]["question"]: record["resps"][0][0] for record in map(json.loads, samples.open())}
    for question in questions:
        expected = scorer.continuation(question, until=["w9"], most=4, sampling=Sampling(temperature=0.0))
        assert answers[question] == expected
