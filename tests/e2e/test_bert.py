"""pretrain_bert.py from text to a filled mask: it learns both of its tasks, and refuses what it cannot use."""

from __future__ import annotations

import json
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megacore.data.tokenizers.tokenizer import load_tokenizer
from tests.e2e.launching import BERT_PROGRAM, ROOT, alone, only_starts, records_of, small_run, words
from tests.e2e.test_pretrain import entropy
from tools.fill_mask import main as fill_mask
from tools.preprocess_data import main as preprocess
from tools.quickstart import write_sources
from tools.train_tokenizer import main as train_tokenizer

TOPICS, NOUNS, VERBS = 6, 4, 3
MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "init_method_std": 0.1}


@dataclass(frozen=True)
class Corpus:
    """What the tools made of a text: a tokenizer and pairs of sentences."""

    tokenizer: Path
    sentences: Path


def sentence(draw: random.Random, topic: int) -> str:
    """The words of a sentence are of one topic: a masked one is best told from the others."""
    nouns = [f"noun{chr(97 + topic)}{chr(97 + i)}" for i in range(NOUNS)]
    verb = f"verb{chr(97 + topic)}{chr(97 + draw.randrange(VERBS))}"
    first, second, third = draw.choices(nouns, k=3)
    return f"The {first} {verb} the {second} with the {third}."


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Documents of one topic each, through the tools: also without sentences, and with a tokenizer without [MASK]."""
    folder, draw = tmp_path_factory.mktemp("bert"), random.Random(0)
    text = folder / "text.jsonl"
    documents = (" ".join(sentence(draw, number % TOPICS) for _ in range(8)) for number in range(600))
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    for model, size in (("wordpiece", 400), ("bpe", 400)):
        assert train_tokenizer(words(input=text, model=model, vocab_size=size, output=folder / model)) == 0
        for prefix, flags in (("split", {"split_sentences": True}), ("whole", {})):
            output = folder / f"{model}-{prefix}"
            assert preprocess(words(input=text, tokenizer=folder / model, output_prefix=output, **flags)) == 0
    return Corpus(folder / "wordpiece", folder / "wordpiece-split_text_sentence")


def run(corpus: Corpus, output_dir: Path, **changes: object) -> list[str]:
    """The flags of a run on the corpus, with changes."""
    plain = {**MODEL, "data_path": corpus.sentences, "tokenizer": corpus.tokenizer, "split": "90,10,0"}
    return words(**{**plain, "train_iters": 4, "eval_interval": 0, "output_dir": output_dir, **changes})


@pytest.fixture(scope="module")
def untrained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of one step, whose vocabulary is larger than its tokenizer's."""
    output = tmp_path_factory.mktemp("untrained")
    flags = run(corpus, output, train_iters=1, eval_interval=1, eval_iters=1, vocab_size=500)
    done = alone(*flags, program=BERT_PROGRAM, timeout=120)
    assert done.returncode == 0, done.stderr
    return output


def test_the_loss_is_the_sum_of_its_tasks(untrained: Path) -> None:
    for record, when in zip(records_of(untrained), ("train", "eval"), strict=True):
        assert record[f"{when}/loss"] == pytest.approx(
            record[f"{when}/mlm_loss"] + record[f"{when}/sentence_loss"], rel=1e-12
        )


@pytest.mark.slow
def test_it_learns_to_fill_masks_and_to_tell_neighbours_from_strangers(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"micro_batch_size": 32, "global_batch_size": 32, "train_iters": 400, "lr": 2e-3, "lr_warmup_iters": 40}
    quiet = {"hidden_dropout": 0, "attention_dropout": 0, "eval_interval": 400, "eval_iters": 8, "seed": 1234}
    done = alone(*run(corpus, tmp_path, **flags, **quiet), program=BERT_PROGRAM, timeout=200)
    assert done.returncode == 0, done.stderr
    last = next(record for record in records_of(tmp_path) if "eval/loss" in record)
    assert last["eval/mlm_loss"] < 0.5 * entropy(corpus.sentences), last
    assert last["eval/mlm_accuracy"] > 0.5
    assert last["eval/sentence_accuracy"] > 0.7
    assert fill_mask([*words(checkpoint=tmp_path, top_k=3), "The nounaa verbab [MASK] nounac with the [MASK] ."]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[4]] == ["[MASK] 1 of 2", "[MASK] 2 of 2"]
    assert lines[1].split()[1] == "the"
    probabilities = [float(line.split()[0]) for line in lines if not line.startswith("[")]
    assert len(probabilities) == 6
    assert probabilities[:3] == sorted(probabilities[:3], reverse=True)


@pytest.mark.slow  # a quarter of an hour on a quiet core
def test_the_recipe_learns_both_tasks_from_the_standard_library(tmp_path: Path) -> None:
    """examples/bert_tiny.toml on text that every machine has, as docs/guides/bert.md says."""
    text, tokenizer, output = tmp_path / "corpus.jsonl", tmp_path / "tokenizer", tmp_path / "run"
    write_sources(Path(sysconfig.get_paths()["stdlib"]), text)
    assert train_tokenizer(words(input=text, model="wordpiece", vocab_size=2048, output=tokenizer)) == 0
    made = words(input=text, tokenizer=tokenizer, output_prefix=tmp_path / "pairs", split_sentences=True)
    assert preprocess(made) == 0
    prefix, recipe = tmp_path / "pairs_text_sentence", ROOT / "examples" / "bert_tiny.toml"
    flags = words(config=recipe, data_path=prefix, tokenizer=tokenizer, micro_batch_size=32, output_dir=output)
    done = alone(*flags, program=BERT_PROGRAM, timeout=3 * 3600)
    assert done.returncode == 0, done.stderr
    last = [record for record in records_of(output) if "eval/loss" in record][-1]
    assert last["eval/mlm_loss"] < 0.7 * entropy(prefix), last
    assert last["eval/sentence_accuracy"] > 0.6, last  # 9 sigma above chance: 2,048 pairs


def test_every_token_of_the_tokenizer_is_shown_and_no_other(
    corpus: Corpus, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fill_mask([*words(checkpoint=untrained, top_k=5_000_000), "a [MASK]"]) == 0
    shown = [line[8:] for line in capsys.readouterr().out.splitlines()]
    vocabulary = load_tokenizer(corpus.tokenizer)
    assert vocabulary.vocab_size < 500
    assert sorted(shown) == sorted(vocabulary.piece(token) for token in range(vocabulary.vocab_size))
    assert {"[MASK]", "[CLS]", "the"} <= set(shown)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no mask", "the text has no [MASK]"),
        ("[MASK] " * 40, "the text has 42 tokens with its ends, but the model 32 positions: shorten it"),
    ],
)
def test_a_text_that_cannot_be_filled_is_refused(
    untrained: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert fill_mask([*words(checkpoint=untrained), text]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fill_mask.py: error: {message}")
    assert said.count("\n") == 1


@pytest.mark.skipif(torch.accelerator.is_available(), reason="asks for a device that is not there")
def test_a_missing_device_is_named(untrained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fill_mask([*words(checkpoint=untrained, device="cuda"), "a [MASK]"]) == 2
    assert "\n  - --device cuda: torch finds no such device" in capsys.readouterr().err


def test_a_gpt_is_no_bert_and_the_other_way_round(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt = small_run(tmp_path / "gpt", train_iters=1, vocab_size=400)
    assert alone(*gpt, timeout=120).returncode == 0
    assert fill_mask([*words(checkpoint=tmp_path / "gpt"), "a [MASK]"]) == 2
    assert "holds a GPT, which only predicts the next token: use tools/generate.py" in capsys.readouterr().err
    loading = run(corpus, tmp_path / "run", load=tmp_path / "gpt")
    refused = alone(*loading, program=BERT_PROGRAM)
    assert refused.returncode == 2
    assert "is of another model: a GPT there, a BERT here" in refused.stderr


@pytest.mark.parametrize(
    ("inputs", "changes", "message"),
    [
        ({}, {"hidden_size": 1 << 17, "device": "cpu"}, "the model needs at least "),
        ({"tokenizer": "bpe", "data_path": "bpe-split_text_sentence"}, {}, "[MASK]"),
        ({"data_path": "wordpiece-whole_text_document"}, {}, "--split-sentences"),
    ],
)
def test_what_bert_cannot_use_is_refused(
    corpus: Corpus, tmp_path: Path, inputs: dict[str, str], changes: dict[str, object], message: str
) -> None:
    places = {name: corpus.tokenizer.parent / place for name, place in inputs.items()}
    refused = alone(*run(corpus, tmp_path, **changes, **places), program=BERT_PROGRAM)
    assert refused.returncode == 2, refused.stderr
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert only_starts(refused.stdout)
