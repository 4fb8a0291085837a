"""Fill-in-the-middle against a plain reference, and what it must not change: tokens, other samples, evaluations."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from megacore.config import Config
from megacore.data.gpt.build import InputErrors, build_datasets, check_inputs, vocabulary_size
from megacore.data.gpt.dataset import GPTDataset
from megacore.data.gpt.fill_in_middle import KNOWN_SENTINELS, FillInTheMiddle, Sentinels, sentinels_of
from megacore.data.indexed.reader import IndexedDataset
from megacore.data.indexed.sidecar import loss_mask_prefix
from megacore.data.tokenizers.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from megacore.data.tokenizers.training import train_tokenizer
from tests.unit import data_bytes
from tests.unit.test_data_build import unresolved

PRE, MID, SUF, EOD = 1001, 1002, 1003, 1000
NAMES = KNOWN_SENTINELS[0]
TEXT = "def middle(first, second):\n    return 'naïve — 中間' + first * second\n"


def fill_in(rate: float = 1.0, spm_rate: float = 0.5, **values: Any) -> FillInTheMiddle:
    usual = {"sentinels": Sentinels(prefix=PRE, middle=MID, suffix=SUF), "eod": EOD, "seed": 7}
    return FillInTheMiddle(**{"rate": rate, "spm_rate": spm_rate, **usual, **values})


def restored(tokens: list[int], sentinels: tuple[int, int, int] = (PRE, MID, SUF)) -> tuple[list[int], str]:
    """The document that was permuted, whose numbers ascend, and the order of its parts."""
    prefix, middle, suffix = sentinels
    if tokens[0] != prefix:
        assert not set(tokens) & set(sentinels)
        return tokens, ""
    if tokens[1] == suffix:  # where an empty prefix of PSM looks the same, so does the document
        at = tokens.index(middle)
        return tokens[at + 1 :] + tokens[2:at], "spm"
    first, second = tokens.index(suffix), tokens.index(middle)
    return tokens[1:first] + tokens[second + 1 :] + tokens[first + 1 : second], "psm"


@pytest.mark.parametrize("ends", [(), (EOD,)])
@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_both_orders_give_the_document_back(spm_rate: float, ends: tuple[int, ...]) -> None:
    document = np.array([*range(1, 12), *ends])
    cuts: Counter[int] = Counter()
    for index in range(200):
        tokens, predicted = fill_in(spm_rate=spm_rate).document(index, document, None)
        assert predicted.tolist() == [1.0] * (len(document) + 3)
        body = tokens.tolist()[: len(tokens) - len(ends)]
        assert tuple(tokens.tolist()[len(body) :]) == ends
        assert Counter(body) == Counter([*range(1, 12), PRE, MID, SUF])
        assert restored(body)[0] == list(range(1, 12))
        assert body[:2] == [PRE, SUF] if spm_rate else body[0] == PRE
        cuts[body.index(MID) - body.index(SUF)] += 1
    assert set(cuts) == set(range(1, 13))  # a suffix of every length, none and all


def test_an_order_is_a_function_of_the_sample_and_rates_are_kept() -> None:
    document, made = np.arange(1, 40), fill_in(0.6, 0.25)
    orders: Counter[str] = Counter()
    for index in range(4000):
        tokens, _ = made.document(index, document, None)
        orders[restored(tokens.tolist())[1]] += 1
    assert abs(orders[""] / 4000 - 0.4) < 0.03
    assert abs(orders["spm"] / (4000 - orders[""]) - (0.25 + 0.75 / 40)) < 0.04  # and PSM without a prefix
    again, other = pickle.loads(pickle.dumps(made)), fill_in(0.6, 0.25, number=1)
    drawn = [[one.document(k, document, None)[0].tolist() for k in range(9)] for one in (made, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]


def corpus(path: Path, *, masked: bool = False) -> tuple[IndexedDataset, list[list[int]]]:
    """Documents of ascending numbers, most with an end."""
    documents = [[*range(20 * n + 1, 20 * n + 3 + n % 11), *([EOD] if n % 4 else [])] for n in range(30)]
    prefix = data_bytes.write(path / "d", [[each] for each in documents])
    if masked:
        data_bytes.write(Path(loss_mask_prefix(prefix)), [[[i % 2 for i in each]] for each in documents], code=1)
    return IndexedDataset(prefix), documents


def dataset(indexed: IndexedDataset, made: FillInTheMiddle | None, samples: int = 40, **options: Any) -> GPTDataset:
    options = {"num_samples": samples, "seq_length": 50, "seed": 3, "boundaries": True, "fill_in": made, **options}
    return GPTDataset(indexed, range(indexed.num_documents), **options)


@pytest.mark.parametrize("order", ["megacore", "megatron"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_window_holds_its_documents_permuted(order: Any, masked: bool, tmp_path: Path) -> None:
    indexed, _ = corpus(tmp_path, masked=masked)
    plain = dataset(indexed, None, order=order, eod=EOD)
    permuted = dataset(indexed, fill_in(), order=order, eod=EOD)
    marks = dict(zip(indexed.tokens(0, 500).tolist(), open_mask(indexed), strict=True)) if masked else {}
    for k in range(len(plain)):
        before, after = plain[k], permuted[k]
        window = [*before["tokens"].tolist(), int(before["labels"][-1])]
        changed = [*after["tokens"].tolist(), int(after["labels"][-1])]
        assert len(changed) == 51
        assert changed[1:] == after["labels"].tolist()
        # Document by document until the length is used up.
        owners, at = [*before["documents"].tolist(), before["documents"][-1]], 0
        for number in dict.fromkeys(owners[:-1]):
            document = [token for token, owner in zip(window, owners, strict=True) if owner == number]
            text = document[:-1] if document[-1] == EOD else document
            if at + len(document) + 3 > 50:
                break
            if not text:  # an end of a document that the window before it holds
                at += 1
                continue
            body = changed[at : at + len(text) + 3]
            assert restored(body)[0] == text
            assert set(after["documents"][at : at + len(document) + 3]) == {number}
            assert after["positions"][at] == 0
            assert after["loss_mask"][at + len(document) + 2] == 0  # no loss from a document to the next
            if masked:
                inner = changed[at + 1 : at + len(document) + 2]
                expected = [float(marks.get(token, 0)) * (token not in (PRE, MID, SUF)) for token in inner]
                assert after["loss_mask"][at : at + len(inner)].tolist() == expected or EOD in inner
            at += len(document) + 3
        assert at > 0


def open_mask(indexed: IndexedDataset) -> list[int]:
    return IndexedDataset(loss_mask_prefix(indexed.prefix)).tokens(0, 500).tolist()


@pytest.fixture(scope="module")
def coder() -> JsonTokenizer:
    """A byte-level BPE with merges and the tokens of StarCoder."""
    trained = train_tokenizer([TEXT * 3, "return first second"], "bpe", 290)
    assert isinstance(trained, JsonTokenizer)
    backend = tokenizers.Tokenizer.from_str(trained.to_json())
    backend.add_special_tokens(list(NAMES))
    return JsonTokenizer(backend)


def test_characters_are_cut_and_the_text_stays(coder: JsonTokenizer) -> None:
    sentinels = sentinels_of(coder)
    made = fill_in(sentinels=sentinels, tokenizer=coder, eod=coder.eod)
    ids = (sentinels.prefix, sentinels.middle, sentinels.suffix)
    document, inside = np.array([*coder.encode(TEXT), coder.eod]), 0
    for index in range(60):
        tokens, _ = made.document(index, document, None)
        body, _ = restored(tokens.tolist()[:-1], ids)
        assert tokens[-1] == coder.eod
        assert coder.decode(body) == TEXT
        inside += body != document.tolist()[:-1]
    assert inside > 20  # most cuts are within a token
    broken = document[:-1][: next(i for i, c in enumerate(TEXT.encode()) if c > 127)]  # ids of half a character
    for part in (np.array([*broken, coder.encode("—")[0]]), np.array([coder.eod, *document])):
        tokens, _ = made.document(3, part, None)
        assert sorted(tokens.tolist()) == sorted([*part.tolist(), *ids])


def config(path: Path, **data: Any) -> Config:
    usual = {"data_path": (str(path / "d"),), "tokenizer": str(path / "t")}
    return unresolved(vocab_size=None, **{**usual, **data})


@pytest.fixture
def files(tmp_path: Path, coder: Tokenizer) -> Path:
    coder.save(tmp_path / "t")
    data_bytes.write(tmp_path / "d", [[[*coder.encode(TEXT[n:]), coder.eod or 0]] for n in range(40)])
    return tmp_path


@pytest.mark.parametrize("packing", ["concat", "none"])
def test_training_samples_are_permuted_and_those_of_evaluations_are_not(packing: Any, files: Path) -> None:
    made = {}
    for rate in (0.0, 1.0):
        given = config(files, packing=packing, split="8,2", fim_rate=rate)
        made[rate] = build_datasets(given.resolve(1, vocab_size=vocabulary_size(given)))
    prefix = sentinels_of(load_tokenizer(files / "t")).prefix
    for k in range(4):
        first, second = (valid[k] for rate in (0.0, 1.0) if (valid := made[rate].valid) is not None)
        assert all(np.array_equal(first[name], second[name]) for name in first)
        assert prefix in made[1.0].train[k]["tokens"]
        assert prefix not in made[0.0].train[k]["tokens"]
        assert made[1.0].train[k]["loss_mask"].shape == (16,)


def test_a_vocabulary_without_the_tokens_is_refused(files: Path, coder: Tokenizer) -> None:
    for given, expected in (
        ({"fim_middle_token": "<mid>"}, "vocabulary of --tokenizer lacks <mid>: name"),
        ({"fim_middle_token": NAMES[0]}, "three different tokens"),
    ):
        with pytest.raises(InputErrors, match=expected):
            check_inputs(config(files, fim_rate=0.5, **given))
    assert check_inputs(config(files, fim_rate=0.5)) == coder.vocab_size
    train_tokenizer(["some text"], "bpe", 257).save(files / "plain")
    with pytest.raises(InputErrors, match="<fim_prefix>, <fim_middle>, <fim_suffix>, and those of other models"):
        check_inputs(config(files, fim_rate=0.5, tokenizer=str(files / "plain"), fim_cut="token"))
