"""Real text, end to end, through the command line: tokenizer, dataset, training alone and on two ranks, text again.

The text is a part of the standard library's sources, as in the quick start, and smaller. What the runs report is held
to what is found here without megacore: the entropy of the tokens, the places of the log, one run beside another.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.data.tokenizers.tokenizer import load_tokenizer
from tests.e2e.launching import PROGRAM, alone, needs_proc, under_torchrun, words
from tools.generate import main as generate
from tools.preprocess_data import main as preprocess_data
from tools.train_tokenizer import main as train_tokenizer

pytestmark = needs_proc
Record = dict[str, Any]

PATIENCE = 300.0  # seconds that a run may take on a busy machine
PACKAGES = ("asyncio", "concurrent", "email", "html", "http", "importlib", "json", "logging", "unittest", "xml")
VOCABULARY = 1024
POSITION = {"step", "consumed_samples", "consumed_tokens"}
TRAIN_KEYS = POSITION | {"train/loss", "train/grad_norm", "train/lr"}
TRAIN_KEYS |= {"perf/step_time_s", "perf/tokens_per_sec", "perf/tflops_per_rank", "mem/peak_gib"}
TRAIN_KEYS |= {"perf/bubble_predicted", "perf/bubble_measured", "train/skipped_steps", "perf/data_wait_fraction"}
TRAIN_KEYS |= {"train/spikes"}
KINDS = ("params", "grads", "optimizer", "buffers")  # docs/guides/memory.md
STATE_KEYS = {f"mem/{kind}_bytes{what}" for kind in KINDS for what in ("", "_predicted")}
EVAL_KEYS = POSITION | {"eval/loss"}
# What may be zero: the bubble in one process, steps that were skipped, spikes, the wait for data.
EXEMPT = STATE_KEYS | {"perf/bubble_predicted", "train/skipped_steps", "train/spikes", "perf/data_wait_fraction"}

MODEL: dict[str, object] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
NO_DROPOUT: dict[str, object] = {"hidden_dropout": 0, "attention_dropout": 0}
SHORT: dict[str, object] = {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 6, "save_interval": 3}
SHORT |= {"log_interval": 1, "eval_interval": 3, "eval_iters": 1, "split": "90,10,0"}
SHORT |= {"lr": 1e-3, "lr_decay_style": "constant"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The flags that name a tokenizer and a dataset, made by the tools from sources of the standard library."""
    folder = tmp_path_factory.mktemp("data")
    library = Path(json.__file__).parent.parent
    paths = [path for package in PACKAGES for path in (library / package).rglob("*.py") if "test" not in path.parts]
    order = np.random.default_rng(0).permutation(len(paths))  # the split is by position
    texts = [sorted(paths)[i].read_text(encoding="utf-8") for i in order]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text))
    common = {"input": folder / "corpus.jsonl"}
    assert train_tokenizer(words(**common, model="bpe", vocab_size=VOCABULARY, output=folder / "tokenizer")) == 0
    made = {"tokenizer": folder / "tokenizer", "output_prefix": folder / "text", "append_eod": True}
    assert preprocess_data(words(**common, **made)) == 0
    return {"tokenizer": folder / "tokenizer", "data_path": folder / "text_text_document"}


@pytest.fixture(scope="module")
def short(data: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """The output directory of a short run without dropout in one process, and its flags."""
    flags = {**data, **MODEL, **NO_DROPOUT, **SHORT}
    return run(tmp_path_factory.mktemp("short") / "run", **flags), flags


@pytest.fixture(scope="module")
def short_on_two(short: tuple[Path, dict[str, object]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of the same run on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    run_on_two(folder / "logs", output_dir=folder / "run", **short[1])
    return folder / "run"


def run(output_dir: Path, **flags: object) -> Path:
    """Train in one process; returns the output directory."""
    done = alone(*words(**flags, output_dir=output_dir), timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return output_dir


def run_on_two(logs: Path, warning: str = "", /, **flags: object) -> None:
    """Train on two ranks; all that they say of errors is one line that contains the warning, if there is one."""
    with under_torchrun(logs, 2, PROGRAM, *words(**flags)) as job:
        assert job.ends(PATIENCE)[0] == 0, job.said()
        assert len(job.said().splitlines()) == bool(warning)
        assert warning in job.said()


def metrics(output_dir: Path, name: str = "metrics.jsonl") -> list[Record]:
    """The records of a run."""
    return [json.loads(line) for line in (output_dir / name).read_text(encoding="utf-8").splitlines()]


def results(records: list[Record]) -> list[Record]:
    """What must repeat: all but time, memory, and checks that one process has no need of."""
    others = ("perf/", "mem/", "watch/")
    return [{key: value for key, value in record.items() if not key.startswith(others)} for record in records]


def entropy(data_path: object) -> float:
    """Nats per token of a coder that knows how often each token occurs, and nothing of its neighbours."""
    counts = np.bincount(np.fromfile(f"{data_path}.bin", dtype="<u2"))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def test_every_logged_step_and_evaluation_is_one_complete_record(short: tuple[Path, dict[str, object]]) -> None:
    records = metrics(short[0])
    training = [record for record in records if "train/loss" in record]
    evaluations = [record for record in records if "eval/loss" in record]
    assert len(training) + len(evaluations) == len(records)
    assert [record["step"] for record in training] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in evaluations] == [3, 6]
    assert {frozenset(record) for record in training} == {frozenset(TRAIN_KEYS | STATE_KEYS)}
    assert {frozenset(record) for record in evaluations} == {frozenset(EVAL_KEYS)}
    for record in records:
        assert record["consumed_samples"] == 8 * record["step"]
        assert record["consumed_tokens"] == 64 * record["consumed_samples"]
        assert all(math.isfinite(value) and value > 0 for key, value in record.items() if key not in EXEMPT)
    for record in training:
        assert record["perf/tokens_per_sec"] * record["perf/step_time_s"] == pytest.approx(8 * 64)
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        values = [record[key] for record in records if key in record]
        # Written in full: a float32 has no short decimal form, except once in tens of thousands.
        assert [value for value in values if value == round(value, 6)] == []


@pytest.mark.slow
def test_it_learns_more_than_how_often_each_token_occurs(
    data: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {**data, **MODEL, **NO_DROPOUT, "hidden_size": 128, "init_method_std": 0.06, "split": "90,10,0"}
    flags |= {"micro_batch_size": 16, "train_iters": 125, "lr": 5e-3, "min_lr": 2e-4, "lr_warmup_iters": 10}
    flags |= {"adam_beta2": 0.95, "weight_decay": 0.1, "log_interval": 10, "eval_interval": 50, "eval_iters": 4}
    records, unigram = metrics(run(tmp_path / "run", **flags)), entropy(data["data_path"])
    training = [record["train/loss"] for record in records if "train/loss" in record]
    evaluations = [record["eval/loss"] for record in records if "eval/loss" in record]
    assert max(training[-3:]) < min(unigram, training[0]) - 0.8
    assert evaluations[-1] < unigram - 0.8  # on files that it has not seen
    assert evaluations == sorted(evaluations, reverse=True)
    assert len(load_tokenizer(str(data["tokenizer"])).encode(sample(tmp_path / "run", capsys))) > 20


def test_one_process_and_two_agree(short: tuple[Path, dict[str, object]], short_on_two: Path) -> None:
    one, two = results(metrics(short[0])), results(metrics(short_on_two))
    assert len(one) == 8  # six steps, two evaluations
    # Sums are made in another order, no more.
    assert two == [pytest.approx(record, rel=1e-5) for record in one]


def test_the_written_configuration_repeats_the_run_and_keeps_its_metrics(short_on_two: Path, tmp_path: Path) -> None:
    first, configuration = metrics(short_on_two), (short_on_two / "config.toml").read_bytes()
    warning = f"{short_on_two} holds checkpoints of an earlier run"
    run_on_two(tmp_path / "logs", warning, config=short_on_two / "config.toml")
    assert results(metrics(short_on_two)) == results(first)
    assert metrics(short_on_two, "metrics.jsonl.1") == first
    assert (short_on_two / "config.toml").read_bytes() == configuration


def test_a_seed_gives_the_same_bits_under_megatrons_names_too(data: dict[str, object], tmp_path: Path) -> None:
    flags = {**data, **MODEL, **SHORT, "train_iters": 3, "eval_interval": 0, "bucket_size_mb": 1}  # dropout is on
    first = run(tmp_path / "a", **flags)
    ones = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "layernorm_epsilon": 1e-5}
    renamed = {"tokenizer_model" if name == "tokenizer" else name: value for name, value in flags.items()} | ones
    done = alone(*words(**renamed, save=tmp_path / "b"), timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert results(metrics(tmp_path / "b")) == results(metrics(first))


def sample(checkpoint: Path, capsys: pytest.CaptureFixture[str], **changes: object) -> str:
    """What generate.py prints."""
    assert (
        generate(words(**{"checkpoint": checkpoint, "prompt": "def ", "max_new_tokens": 40, "seed": 7, **changes})) == 0
    )
    output, errors = capsys.readouterr()
    assert errors == ""
    return output


def test_the_checkpoint_writes_text(short: tuple[Path, dict[str, object]], capsys: pytest.CaptureFixture[str]) -> None:
    text = sample(short[0], capsys)
    assert text.startswith("def ")
    assert text == sample(short[0], capsys)
    assert text != sample(short[0], capsys, seed=8) and text != "def \n"
    assert sample(short[0], capsys, temperature=0) == sample(short[0], capsys, temperature=0, seed=8)
