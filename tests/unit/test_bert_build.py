"""pretrain_bert.py's inputs: all that is wrong with them at once, and the datasets of a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.config import DataConfig, ModelConfig, TrainingConfig
from megacore.config.bert import BertConfig, BertSection, ResolvedBertConfig
from megacore.data.bert.build import build_bert_datasets, check_bert_inputs
from megacore.data.bert.dataset import BertDataset
from megacore.data.bert.mock import MOCK_TOKENS
from megacore.data.bert.text import BertText
from megacore.data.gpt.build import InputErrors, vocabulary_size
from megacore.data.indexed.preprocess import Job, preprocess
from megacore.data.tokenizers.tokenizer import load_tokenizer
from megacore.data.tokenizers.training import TokenizerKind, train_tokenizer

LINES = [
    f"The {thing} came first. It was {thing} number {number}! Was it? It {verb}."
    for number, (thing, verb) in enumerate([("dog", "ran"), ("cat", "sat"), ("bird", "sang"), ("fish", "swam")] * 10)
]


def write(folder: Path, kind: TokenizerKind, name: str, lines: list[str], **options: bool) -> str:
    """Tokenize lines, with a tokenizer of the kind; returns the prefix."""
    if not (folder / kind).exists():
        train_tokenizer(LINES, kind, 300).save(folder / kind)
    (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    options = {"split_sentences": True, **options}
    job = Job(inputs=(str(folder / f"{name}.txt"),), output_prefix=str(folder / name), **options)  # type: ignore[arg-type]
    preprocess(job, load_tokenizer(folder / kind))
    return job.outputs[0]


def config(
    folder: Path, *prefixes: str, kind: TokenizerKind = "wordpiece", data: dict[str, Any] | None = None, **bert: Any
) -> ResolvedBertConfig:
    """A configuration of 10 steps of 4 samples of 32 tokens."""
    given = {"data_path": prefixes, "tokenizer": str(folder / kind), "seq_length": 32, "split": "8,2"} | (data or {})
    made = BertConfig(
        data=DataConfig(**given),  # type: ignore[arg-type]
        training=TrainingConfig(train_iters=10, global_batch_size=4, eval_interval=5, eval_iters=2),
        bert=BertSection(**bert),
    )
    return made.resolve(1, vocab_size=vocabulary_size(made))


def refused(made: ResolvedBertConfig) -> tuple[str, ...]:
    """What is wrong with the inputs."""
    with pytest.raises(InputErrors) as caught:
        check_bert_inputs(made)
    return caught.value.problems


def test_the_style_and_the_task_decide_the_layout(tmp_path: Path) -> None:
    prefix = write(tmp_path, "wordpiece", "d", LINES)
    ways: list[tuple[dict[str, Any], str]] = [
        ({}, "nsp"),
        ({"sentence_task": "sop"}, "sop"),
        ({"sentence_task": "none"}, "none"),
        ({"bert_style": "modern", "whole_word_masking": True, "max_ngram": 3}, "packed"),
    ]
    for bert, kind in ways:
        made = config(tmp_path, prefix, **bert)
        check_bert_inputs(made)
        train, valid = build_bert_datasets(made)
        assert isinstance(train, BertDataset)
        assert isinstance(train.text, BertText)
        assert train.text.kind == kind
        assert valid is not None
        assert (len(train), len(valid)) == (40, 8)
        assert train.masking.prob == (0.3 if bert.get("bert_style") else 0.15)
        assert train[3]["tokens"].max() < load_tokenizer(tmp_path / "wordpiece").vocab_size


def test_everything_wrong_is_named_at_once(tmp_path: Path) -> None:
    whole = write(tmp_path, "bpe", "whole", LINES, split_sentences=False)
    problems = refused(config(tmp_path, whole, kind="bpe"))
    assert len(problems) == 2
    assert problems[0].startswith(f"--tokenizer {tmp_path}/bpe has no [CLS] and no [SEP] and no [MASK] and no [PAD]")
    assert "--model wordpiece" in problems[0]
    assert problems[1].startswith("--sentence-task nsp needs documents of several sentences, but no document of")
    assert "whole_text_document.idx" in problems[1]
    assert "--split-sentences, or use --sentence-task none" in problems[1]


@pytest.mark.parametrize("moved", [False, True], ids=["the ids of the data", "other ids"])
def test_a_tokenizer_without_mask_is_named_so(moved: bool, tmp_path: Path) -> None:
    prefix = write(tmp_path, "wordpiece", "d", LINES)
    path = tmp_path / "wordpiece" / "tokenizer.json"
    state = json.loads(path.read_text().replace('"[MASK]"', '"[OTHER]"'))
    if moved:
        *_, (one, first), (other, second) = sorted(state["model"]["vocab"].items(), key=lambda entry: entry[1])
        state["model"]["vocab"] |= {one: second, other: first}
    path.write_text(json.dumps(state))
    problems = refused(config(tmp_path, prefix))
    assert len(problems) == 1 + moved
    assert any("has no [MASK] token, which BERT needs" in problem for problem in problems)
    assert any("made with another tokenizer" in problem for problem in problems) == moved


def test_a_tokenizer_without_marks_has_no_whole_words(tmp_path: Path) -> None:
    marked = tmp_path / "marked"
    check_bert_inputs(config(marked, write(marked, "wordpiece", "d", LINES), whole_word_masking=True))
    prefix = write(tmp_path, "wordpiece", "d", LINES)
    path = tmp_path / "wordpiece" / "tokenizer.json"
    path.write_text(path.read_text().replace('"continuing_subword_prefix": "##"', '"continuing_subword_prefix": ""'))
    made = config(tmp_path, prefix, whole_word_masking=True)
    assert any("does not mark where words begin" in problem for problem in refused(made))


@pytest.mark.parametrize("bert", [{}, {"sentence_task": "none"}, {"bert_style": "modern"}])
def test_generated_samples_have_what_real_ones_have(bert: dict[str, Any]) -> None:
    made = BertConfig(
        model=ModelConfig(vocab_size=200),
        data=DataConfig(mock_data=True, seq_length=48),
        training=TrainingConfig(train_iters=50, global_batch_size=8, eval_interval=1, eval_iters=1),
        bert=BertSection(**bert),
    ).resolve(1)
    check_bert_inputs(made)
    train, valid = build_bert_datasets(made)
    assert valid is not None
    samples = [train[k] for k in range(400)]
    tokens = np.stack([sample["labels"] for sample in samples])
    assert (tokens.min(), tokens.max()) == (0 if bert.get("bert_style") is None else 1, 199)
    real = np.stack([sample["documents"] for sample in samples]) > 0
    assert (tokens[~real] == MOCK_TOKENS.pad).all()
    assert real.all() == (bert.get("bert_style") == "modern")
    labels = [int(sample["sentence_labels"]) for sample in samples]
    if made.bert.sentence_task == "none":
        assert set(labels) == {-1}
    else:
        assert abs(sum(labels) - 200) < 3 * 10
    predicted = np.stack([sample["loss_mask"] for sample in samples]) == 1
    text = real & (tokens >= 4)
    assert not (predicted & ~text).any()
    prob = made.bert.mask_prob
    assert abs(predicted.sum() - prob * text.sum()) < 3 * (prob * (1 - prob) * text.sum()) ** 0.5
    again = build_bert_datasets(made).train
    assert all(np.array_equal(samples[k][name], again[k][name]) for k in range(20) for name in samples[k])
    # Evaluation is another stream of the same language.
    assert not np.array_equal(valid[0]["labels"], samples[0]["labels"])
