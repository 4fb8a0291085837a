"""What a checkpoint says of texts, against transformers on the same weights: perplexity, and benchmarks' questions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megacore.inference.generate import Sampling
from megacore.inference.scoring import TextScorer, windows
from tests.e2e.launching import words
from tests.parity.conversions import to_megacore, tokenizer
from tests.parity.hf_models import POSITIONS, make_model, save_model
from tools.perplexity import main as perplexity

ENDS = {"bos": "<begin>", "eos": "<end>"}
TOKENIZER = tokenizer(ENDS)
BEGIN = TOKENIZER.encode(ENDS["bos"])[0]
LENGTHS = (28 + 3 * 6, 20, 2)  # tokens of the documents


@pytest.fixture(scope="module", params=["gpt2", "llama3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A model of transformers in fp64, and its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param)
    directory = save_model(model, folder / "hf")
    TOKENIZER.save(directory)
    to_megacore(directory, folder / "megacore")
    return model.double().eval(), folder / "megacore"


def texts() -> list[str]:
    random = np.random.default_rng(3)
    return [" ".join(f"w{n}" for n in random.integers(0, 30, length)) for length in LENGTHS]


def log_likelihood(model: nn.Module, tokens: list[int], predicted: int) -> float:
    """log P of the last tokens, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
    return float(-F.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")[-predicted:].sum())


def strided(model: nn.Module, tokens: list[int], length: int, stride: int) -> tuple[float, int]:
    """Nats and tokens as the documentation of transformers computes them: windows of `length` tokens, of which those
    that an earlier one has are context."""
    nats, count, last = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + length, len(tokens))
        predicted = min(end - last, end - begin - 1)
        nats -= log_likelihood(model, tokens[begin:end], predicted)
        count, last = count + predicted, end
        if end == len(tokens):
            break
    return nats, count


def measured(capsys: pytest.CaptureFixture[str], checkpoint: Path, **flags: Any) -> dict[str, Any]:
    capsys.readouterr()
    given = [*words(checkpoint=checkpoint, device="cpu", **flags), "--json"]
    assert perplexity(given) == 0, capsys.readouterr().err
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def test_perplexity_is_that_of_transformers(
    pair: tuple[nn.Module, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, checkpoint = pair
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    flags = {"input": tmp_path / "t.jsonl", "prefix": "none", "context": 27, "stride": 6, "batch_size": 2}
    found = measured(capsys, checkpoint, **flags, per_document=tmp_path / "each.jsonl")
    expected = [strided(model, TOKENIZER.encode(text), 28, 6) for text in texts()]
    nats, count = (sum(column) for column in zip(*expected, strict=True))
    size = sum(len(text) for text in texts())
    assert (found["tokens"], found["bytes"], found["documents"]) == (count, size, 3)
    assert found["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    records = [json.loads(line) for line in (tmp_path / "each.jsonl").read_text().splitlines()]
    assert [record["nats"] for record in records] == pytest.approx([one for one, _ in expected], rel=1e-5)
    begun = measured(capsys, checkpoint, input=tmp_path / "t.jsonl")  # auto: <begin>, and the model's positions
    assert (begun["tokens"], begun["context"], begun["stride"]) == (count + 3, POSITIONS, POSITIONS // 2)
    (tmp_path / "t.txt").write_text(texts()[1])
    assert TOKENIZER.bos == BEGIN
    begun = measured(capsys, checkpoint, input=tmp_path / "t.txt")
    tokens = [BEGIN, *TOKENIZER.encode(texts()[1])]
    assert begun["nats"] == pytest.approx(-log_likelihood(model, tokens, len(tokens) - 1), rel=1e-5)


def test_windows_predict_every_token_once() -> None:
    for count, first, length, stride in ((50, 1, 10, 3), (50, 20, 10, 10), (5, 1, 10, 5), (12, 4, 10, 1), (1, 1, 4, 2)):
        made = list(windows(range(count), first, length=length, stride=stride))
        predicted = [token for window in made for token in window.tokens[-window.predicted :]]
        assert predicted == list(range(first, count))
        assert all(window.predicted < len(window.tokens) <= length + 1 for window in made)
        assert all(len(window.tokens) - window.predicted > length - stride for window in made[1:])


def scorer_of(checkpoint: Path, **changes: Any) -> TextScorer:
    return TextScorer.of_checkpoint(checkpoint, device="cpu", **changes)


def test_continuations_are_as_likely_as_in_transformers(pair: tuple[nn.Module, Path]) -> None:
    model, checkpoint = pair
    scorer = scorer_of(checkpoint, batch_size=3)
    pairs = [("w1 w2", " w3 w4"), ("w1 w2 ", "w3"), ("", "w5 w6"), (texts()[0], " w7 w8"), ("w9", " " + texts()[1])]
    for (context, continuation), (found, greedy) in zip(pairs, scorer.log_likelihoods(pairs), strict=True):
        before = TOKENIZER.encode(context) or [BEGIN]
        after = TOKENIZER.encode(continuation)
        tokens = [*before, *after][-POSITIONS - 1 :]
        assert found == pytest.approx(log_likelihood(model, tokens, len(after)), rel=1e-5)
        with torch.no_grad():
            likeliest = model(torch.tensor([tokens[:-1]])).logits[0, -len(after) :].argmax(-1).tolist()
        assert greedy == (likeliest == after)
    (rolling,) = scorer.rolling([texts()[0]])
    tokens = [BEGIN, *TOKENIZER.encode(texts()[0])]  # 46 of them are predicted, 40 at first
    rest = log_likelihood(model, tokens[-POSITIONS - 1 :], len(tokens) - 1 - POSITIONS)
    assert rolling == pytest.approx(log_likelihood(model, tokens[: POSITIONS + 1], POSITIONS) + rest, rel=1e-5)


@pytest.mark.parametrize("penalty", [1.0, 1.7, 0.6])
def test_generation_is_that_of_transformers_and_stops(pair: tuple[nn.Module, Path], penalty: float) -> None:
    model, checkpoint = pair
    scorer = scorer_of(checkpoint)
    prompt = TOKENIZER.encode("w1 w2 w3")
    with torch.no_grad():
        out = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, repetition_penalty=penalty
        )[0].tolist()
    expected = TOKENIZER.decode(out)[len("w1 w2 w3") :].partition(ENDS["eos"])[0]
    greedy = Sampling(temperature=0.0, repetition_penalty=penalty)
    assert scorer.continuation("w1 w2 w3", until=[], most=6, sampling=greedy) == expected
    if words_of := expected.split():
        ended = scorer.continuation("w1 w2 w3", until=[words_of[-1]], most=6, sampling=greedy)
        assert ended == expected[: expected.index(words_of[-1])]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"context": 41}, "a context of 41 tokens is more than the model's 40 positions: use 40 or less"),
        ({"context": 10, "stride": 11}, "--stride 11 is more than the context of 10 tokens: use 10 or less"),
        ({"data_path": "nowhere"}, "give texts with --input FILE..., or a dataset with --data-path PREFIX"),
        ({"input": "nowhere.txt"}, "--input nowhere.txt cannot be read"),
        ({"per_document": "nowhere/each"}, "--per-document nowhere/each cannot be written: name a file in a directory"),
    ],
    ids=str,
)
def test_refusals(
    pair: tuple[nn.Module, Path], flags: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text("w1 w2")
    assert perplexity(words(**{"checkpoint": pair[1], "input": tmp_path / "t.txt", **flags})) == 2
    assert said in capsys.readouterr().err


def test_results_replace_no_input_and_are_whole_or_absent(
    pair: tuple[nn.Module, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, each = tmp_path / "t.txt", tmp_path / "each.jsonl"
    text.write_text("w1 w2")
    assert perplexity(words(checkpoint=pair[1], input=text, per_document=text)) == 2
    assert "would overwrite one of the inputs" in capsys.readouterr().err
    assert text.read_text() == "w1 w2"
    (tmp_path / "bad.jsonl").write_text('{"text": "w1 w2"}\n{"text": 5}\n')
    assert perplexity(words(checkpoint=pair[1], input=tmp_path / "bad.jsonl", per_document=each)) == 2
    assert not each.exists()
