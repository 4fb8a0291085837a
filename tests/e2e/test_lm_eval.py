"""tools/run_lm_eval.py on a tiny task from a file, whose answers the scorer itself gives too."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from megacore.inference.generate import Sampling
from megacore.inference.scoring import TextScorer
from tests.parity.conversions import to_megacore, tokenizer
from tests.parity.hf_models import make_model, save_model
from tools.run_lm_eval import main as run_lm_eval

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
    for words in ([run, "--program", "my.py"], ["--program=my.py", run, "--model_args", "seed=3"]):
        assert run_lm_eval([*words, "--tasks", "x"]) == 0
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
