"""From a configuration to datasets: all inputs checked at once, splits that share nothing, blends by weight or size."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from megacore.config import Config, DataConfig, ModelConfig, ResolvedConfig, TrainingConfig
from megacore.data.gpt.blend import BlendedDataset, NamedSets
from megacore.data.gpt.build import InputErrors, build_datasets, check_inputs, split_documents, vocabulary_size
from megacore.data.gpt.dataset import GPTDataset
from megacore.data.gpt.fill_in_middle import KNOWN_SENTINELS, FillInTheMiddle, Sentinels, sentinels_of
from megacore.data.gpt.packing import Packing, mixed_packing
from megacore.data.indexed.preprocess import Job, preprocess
from megacore.data.indexed.reader import IndexedDataset
from megacore.data.indexed.sidecar import loss_mask_prefix
from megacore.data.tokenizers.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from megacore.data.tokenizers.training import train_tokenizer
from megacore.errors import DataError
from tests.unit import data_bytes


def unresolved(*, vocab_size: int | None = 100, eval_interval: int = 5, **data: Any) -> Config:
    """A configuration of 20 steps of 8 samples of 16 tokens."""
    return Config(
        model=ModelConfig(vocab_size=vocab_size),
        data=DataConfig(seq_length=16, **data),
        training=TrainingConfig(
            train_iters=20, global_batch_size=8, micro_batch_size=2, eval_interval=eval_interval, eval_iters=3
        ),
    )


def config(**values: Any) -> ResolvedConfig:
    """The same, resolved as at the start of a run."""
    made = unresolved(**values)
    return made.resolve(1, vocab_size=vocabulary_size(made))


def documents(count: int, length: int, first: int = 0) -> data_bytes.Documents:
    """Documents that are full of their own number."""
    return [[[first + number] * length] for number in range(count)]


def seen(dataset: Any) -> set[int]:
    """All tokens of a dataset."""
    return set(itertools.chain.from_iterable(dataset[k]["tokens"].tolist() for k in range(len(dataset))))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level BPE without merges: 257 tokens."""
    return train_tokenizer(["some text"], "bpe", 257)


# ---- splits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 99, 1001])
@pytest.mark.parametrize("split", ["949,50,1", "990,9,1", "1", "0.95,0.05", "1,1,1", "98,2,0", "1,0,1"])
def test_splits_are_disjoint_and_cover_everything(count: int, split: str, tmp_path: Path) -> None:
    indexed = IndexedDataset(data_bytes.write(tmp_path / "d", documents(count, 2)))
    shares = DataConfig(split=split).split_shares()
    if round(count * shares[0]) == 0:
        with pytest.raises(DataError, match="--split leaves no tokens to train on"):
            split_documents(indexed, shares)
        return
    parts = split_documents(indexed, shares)
    assert list(itertools.chain(*parts)) == list(range(count))
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(part) - count * share) <= 1
        assert share or not part


def test_training_and_validation_share_no_document_and_leave_the_test_documents_alone(tmp_path: Path) -> None:
    data_bytes.write(tmp_path / "d", documents(90, 30))
    splits = build_datasets(config(data_path=(str(tmp_path / "d"),), split="8,1,1"))
    train, valid = (seen(dataset) for dataset in splits)
    assert train == set(range(72))
    assert valid == set(range(72, 81))  # 81 to 89 are the test split's
    assert [len(dataset) for dataset in splits if dataset] == [20 * 8, 3 * 8]
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) == 2


@pytest.mark.parametrize("packing", ["none", "best-fit"])
def test_documents_are_packed_within_their_split_and_blend(packing: Any, tmp_path: Path) -> None:
    prefixes = [str(data_bytes.write(tmp_path / f"d{first}", documents(20, 5, first))) for first in (0, 20)]
    made = build_datasets(config(data_path=tuple(prefixes), split="80,20,0", packing=packing))
    assert isinstance(made.train, BlendedDataset) and made.valid is not None
    assert seen(made.train) == {*range(16), *range(20, 36)} and seen(made.valid) - {0} == {
        *range(16, 20),
        *range(36, 40),
    }
    assert made.train.packing is not None and made.train.packing.documents == 32
    assert ("documents" in made.train[0]) == (packing == "best-fit")


def test_a_blend_packs_as_well_as_what_is_drawn_of_its_datasets() -> None:
    one, other = (
        Packing(documents=5, samples=n, padding=share, longer=1, cut=share / 2) for n, share in ((4, 0.1), (9, 0.5))
    )
    both = mixed_packing([(one, 3), (other, 1)])
    assert (both.documents, both.samples, both.longer) == (10, 13, 2)
    assert (both.padding, both.cut) == pytest.approx((0.2, 0.1))


@pytest.mark.parametrize("packing", ["none", "best-fit"])
def test_a_validation_split_with_nothing_to_predict_is_none(packing: Any, tmp_path: Path) -> None:
    """Documents of one token have no next one: a run without validation, and not no run at all."""
    prefixes = []
    for first, length in ((0, 1), (20, 5)):
        texts = [*documents(16, 5, first), *documents(4, length, first + 16)]
        prefixes.append(str(data_bytes.write(tmp_path / f"d{first}", texts)))
    given: dict[str, Any] = {"split": "80,20,0", "packing": packing}
    assert build_datasets(config(data_path=(prefixes[0],), **given)).valid is None
    both = build_datasets(config(data_path=tuple(prefixes), **given)).valid
    assert both is not None and seen(both) - {0} == set(range(36, 40))
    with pytest.raises(DataError, match="none of the 3 documents of this split has two tokens"):
        build_datasets(config(data_path=(str(data_bytes.write(tmp_path / "e", documents(4, 1))),), **given))


def test_named_validation_sets_are_whole_and_follow_the_split(tmp_path: Path) -> None:
    a, b, c = (str(data_bytes.write(tmp_path / f"d{first}", documents(20, 10, first))) for first in (0, 20, 40))
    given: dict[str, Any] = {"valid_sets": (f"one={b}", f"two={c}")}
    made = config(data_path=(a,), split="8,2,0", **given)
    valid = build_datasets(made).valid
    assert isinstance(valid, NamedSets) and valid.names == ("", "one", "two")
    assert list(map(seen, valid.datasets)) == [set(range(16, 20)), set(range(20, 40)), set(range(40, 60))]
    assert [len(dataset) for dataset in valid.datasets] == [3 * 8] * 3 and seen(valid) == set(range(16, 60))
    alone = build_datasets(config(train_data_path=(a,), **given)).valid
    assert isinstance(alone, NamedSets) and alone.names == ("one", "two")
    assert (alone[0]["tokens"] == valid[24]["tokens"]).all()
    with pytest.raises(IndexError):
        valid[72]
    empty = str(data_bytes.write(tmp_path / "e", documents(4, 0)))
    with pytest.raises(DataError, match=r"--valid-sets none=.*e has no document with a token to predict"):
        build_datasets(config(data_path=(a,), valid_sets=(f"none={empty}",)))
    large = str(data_bytes.write(tmp_path / "f", documents(4, 5, 98)))
    with pytest.raises(DataError, match=r"f\.bin.*token"):
        check_inputs(unresolved(data_path=(a,), valid_sets=(f"large={large}",)))


# ---- blends ----------------------------------------------------------------------------------------------------------


def origins(dataset: Any) -> Counter[int]:
    """How many samples begin with a token of dataset 0 (below 50) and of dataset 1."""
    return Counter(int(dataset[k]["tokens"][0]) // 50 for k in range(len(dataset)))


def test_datasets_are_mixed_by_weight_or_by_size(tmp_path: Path) -> None:
    a = str(data_bytes.write(tmp_path / "a", documents(30, 60)))
    b = str(data_bytes.write(tmp_path / "b", documents(30, 20, first=50)))
    weighted = build_datasets(config(data_path=("1", a, "3", b), split="1"))
    assert isinstance(weighted.train, BlendedDataset)
    assert origins(weighted.train) == {0: 40, 1: 120}
    assert origins(build_datasets(config(data_path=(a, b), split="1")).train) == {0: 120, 1: 40}
    assert isinstance(build_datasets(config(data_path=("0.5", a), split="1")).train, GPTDataset)
    splits = build_datasets(config(data_path=("1", a, "1", b), split="8,1,1"))
    assert seen(splits.train).isdisjoint(seen(splits.valid))
    assert splits.valid is not None
    assert origins(splits.valid) == {0: 12, 1: 12}


# ---- checking --------------------------------------------------------------------------------------------------------


def test_everything_wrong_is_reported_at_once(tmp_path: Path) -> None:
    good = str(data_bytes.write(tmp_path / "good", documents(20, 3)))
    high = str(data_bytes.write(tmp_path / "high", [[[1, 2], [3, 4000]]]))
    (tmp_path / "empty.idx").touch()
    (tmp_path / "empty.bin").touch()
    short = data_bytes.write(tmp_path / "short", documents(3, 5))
    Path(f"{short}.bin").write_bytes(b"12")
    (tmp_path / "tokenizer.json").write_text("{}")
    paths = (good, high, str(tmp_path / "empty"), str(short), str(tmp_path / "missing"))
    with pytest.raises(DataError) as caught:
        check_inputs(unresolved(data_path=paths, vocab_size=1000))
    problems = caught.value.problems
    for problem, expected in zip(
        problems, ("sequence 1 holds the token id 4000", "0 bytes", "shorter", "No such"), strict=True
    ):
        assert expected in problem
    with pytest.raises(DataError) as caught:
        check_inputs(unresolved(data_path=paths, tokenizer=str(tmp_path / "tokenizer.json"), vocab_size=None))
    assert len(caught.value.problems) == 4
    (problem,) = [one for one in caught.value.problems if "JSON file" in one]
    assert problem.startswith(f"--tokenizer {tmp_path}/tokenizer.json: not a `tokenizers` JSON file (")
    assert problem.endswith("): give a tokenizer.json, a *.model or a directory that holds one")


def test_the_vocabulary_is_the_tokenizer_s_unless_given(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    path = str(tmp_path)
    assert check_inputs(unresolved(mock_data=True, tokenizer=path, vocab_size=None)) == 257
    assert vocabulary_size(unresolved(mock_data=True, tokenizer=path, vocab_size=300)) == 300
    assert check_inputs(unresolved(mock_data=True)) == 100
    with pytest.raises(DataError, match=r"--vocab-size 256 is smaller than the vocabulary of the tokenizer .* use 257"):
        check_inputs(unresolved(mock_data=True, tokenizer=path, vocab_size=256))
    with pytest.raises(DataError, match="give --tokenizer PATH or --vocab-size N"):
        check_inputs(unresolved(mock_data=True, vocab_size=None))


def test_a_dataset_of_another_tokenizer_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line\n" * 30)
    preprocess(Job(inputs=(str(tmp_path / "a.txt"),), output_prefix=str(tmp_path / "a")), tokenizer)
    tokenizer.save(tmp_path / "same")
    train_tokenizer(["aaaa bbbb aaaa bbbb"], "bpe", 259).save(tmp_path / "other")
    data: dict[str, Any] = {"data_path": (str(tmp_path / "a_text_document"),), "vocab_size": None}
    assert check_inputs(unresolved(tokenizer=str(tmp_path / "same"), **data)) == 257
    described = json.loads((tmp_path / "same" / "tokenizer.json").read_text())
    kind = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    described["post_processor"] = kind
    (tmp_path / "again.json").write_text(json.dumps(described))  # another file with the same ids
    again = load_tokenizer(tmp_path / "again.json")
    assert again.fingerprint != tokenizer.fingerprint
    assert check_inputs(unresolved(tokenizer=str(tmp_path / "again.json"), **data)) == 257
    with pytest.raises(DataError, match=r"a_text_document\.bin: made with another tokenizer .*, whose ids differ"):
        check_inputs(unresolved(tokenizer=str(tmp_path / "other"), **data))
    (tmp_path / "a_text_document.json").unlink()  # nothing knows any more
    assert check_inputs(unresolved(tokenizer=str(tmp_path / "other"), **data)) == 259


def test_a_loss_mask_needs_an_end_of_document(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data_bytes.write(tmp_path / "d", [[[5, 6, 7, 0]]] * 10)
    tokenizer.save(tmp_path / "t")
    data: dict[str, Any] = {"data_path": (str(tmp_path / "d"),), "eod_mask_loss": True}
    train = build_datasets(config(tokenizer=str(tmp_path / "t"), vocab_size=None, **data)).train
    assert train[0]["loss_mask"].tolist() == [float(token != 0) for token in train[0]["tokens"].tolist()]
    text = (tmp_path / "t" / "tokenizer.json").read_text().replace("<|endoftext|>", "<|nothing|>")
    (tmp_path / "without.json").write_text(text)
    with pytest.raises(DataError, match="--eod-mask-loss needs an end-of-document token"):
        check_inputs(unresolved(tokenizer=str(tmp_path / "without.json"), vocab_size=None, **data))


def test_multimodal_datasets_are_refused(tmp_path: Path) -> None:
    prefix = data_bytes.write(tmp_path / "d", documents(3, 5))
    with open(f"{prefix}.idx", "ab") as file:
        file.write(bytes(3))
    with pytest.raises(DataError, match="a multimodal dataset"):
        check_inputs(unresolved(data_path=(str(prefix),)))


# ---- fill-in-the-middle ----------------------------------------------------------------------------------------------

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


def fim_config(path: Path, **data: Any) -> Config:
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
        given = fim_config(files, packing=packing, split="8,2", fim_rate=rate)
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
            check_inputs(fim_config(files, fim_rate=0.5, **given))
    assert check_inputs(fim_config(files, fim_rate=0.5)) == coder.vocab_size
    train_tokenizer(["some text"], "bpe", 257).save(files / "plain")
    with pytest.raises(InputErrors, match="<fim_prefix>, <fim_middle>, <fim_suffix>, and those of other models"):
        check_inputs(fim_config(files, fim_rate=0.5, tokenizer=str(files / "plain"), fim_cut="token"))
