"""From a configuration to its datasets, and the check of all input files before anything expensive happens.

`check_inputs` reports everything that is wrong with the tokenizer and the datasets at once. `build_datasets` makes the
training and validation datasets. Each document belongs to one split; those of the test split are kept out of both, and
nothing of them is read or built.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from megacore.config import Config
from megacore.data.blend import BlendedDataset, SampleDataset, blend_index
from megacore.data.gpt import GPTDataset
from megacore.data.indexed import IndexedDataset, check_token_ids
from megacore.data.mock import MockDataset
from megacore.data.sidecar import read_sidecar
from megacore.data.tokenizer import Tokenizer, load_tokenizer
from megacore.errors import DataError

# Tokens are compared with the vocabulary at the start up to this many bytes; the rest as it is read.
_SCAN_BYTES = 1 << 30

C = TypeVar("C", bound=Config)


class InputErrors(DataError):
    """Everything that is wrong with a run's inputs, a line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


class Datasets(NamedTuple):
    """The datasets of a run; a validation split without documents, or that nothing asks for, is None."""

    train: SampleDataset
    valid: SampleDataset | None


def check_inputs(config: Config) -> int:
    """Check the tokenizer and every dataset of a configuration.

    Returns:
        The size of the vocabulary to use: `--vocab-size`, or the tokenizer's.

    Raises:
        InputErrors: Everything that is wrong.
    """
    problems: list[str] = []
    tokenizer: Tokenizer | None = None
    try:
        tokenizer = _tokenizer(config)
        vocab_size: int | None = _vocab_size(config, tokenizer)
    except DataError as error:
        problems.append(str(error))
        vocab_size = None
    budget = _SCAN_BYTES
    for prefix in config.data.blend()[0]:
        try:
            indexed = IndexedDataset(prefix)
            split_documents(indexed, config.data.split_shares())
            budget -= _check_tokens(indexed, tokenizer, vocab_size, budget)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise InputErrors(problems)
    assert vocab_size is not None
    return vocab_size


def vocabulary_size(config: Config) -> int:
    """The size of the vocabulary to use: `--vocab-size`, or the tokenizer's.

    Raises:
        DataError: There is no tokenizer where one is needed, or `--vocab-size` is smaller than its vocabulary.
    """
    return _vocab_size(config, _tokenizer(config))


def complete_config(config: C) -> C:
    """The configuration with the vocabulary's size, which only the tokenizer knows.

    Raises:
        DataError: As for `vocabulary_size`.
    """
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocabulary_size(config)))


def build_datasets(config: Config, *, train_samples: int | None = None) -> Datasets:
    """Make the datasets of a resolved configuration.

    The validation set holds `eval_iters` global batches: every evaluation reads the same ones. With
    `--eval-interval 0` there is only the training set.

    Args:
        config: A resolved configuration.
        train_samples: Size of the training set; a run that resumes with another batch size reads others than
            `train_iters` global batches, which is the default.

    Raises:
        DataError: An input is unusable.
    """
    training = config.training
    assert training.global_batch_size is not None
    batch = training.global_batch_size
    evaluated = training.eval_iters * batch if training.eval_interval else 0
    counts = [train_samples or training.train_iters * batch, evaluated]
    vocab_size = config.model.vocab_size or vocabulary_size(config)
    if config.data.mock_data:
        made = [_mock(config, vocab_size, stream, count) for stream, count in enumerate(counts)]
    else:
        opened = [IndexedDataset(prefix) for prefix in config.data.blend()[0]]
        splits = [split_documents(indexed, config.data.split_shares()) for indexed in opened]
        eod = _masked_eod(config)
        _loaded.cache_clear()  # the run itself does without it
        made = [
            _blended(config, opened, [split[number] for split in splits], count, vocab_size=vocab_size, eod=eod)
            for number, count in enumerate(counts)
        ]
    train, valid = made
    assert train is not None
    return Datasets(train=train, valid=valid)


def split_documents(indexed: IndexedDataset, shares: tuple[float, float, float]) -> tuple[range, range, range]:
    """Divide the documents into training, validation and test: disjoint, in order, and none left over.

    Raises:
        DataError: There would be no document to train on.
    """
    count = indexed.num_documents
    bounds = [0, round(count * shares[0]), round(count * (shares[0] + shares[1])), count]
    if shares[2] == 0:
        bounds[2] = count  # 0.95 + 0.05 is not quite 1
    train, valid, test = (range(*pair) for pair in pairwise(bounds))
    if not train or indexed.document_start(train.stop) == 0:
        raise DataError(
            f"--split leaves no tokens to train on in the {count} documents of {indexed.idx_path}: "
            "make its first number larger, or add documents"
        )
    return train, valid, test


def _mock(config: Config, vocab_size: int, stream: int, count: int) -> SampleDataset | None:
    if not count:
        return None
    return MockDataset(vocab_size, config.data.seq_length, count, config.training.seed, stream=stream)


def _blended(
    config: Config,
    opened: list[IndexedDataset],
    documents: list[range],
    count: int,
    *,
    vocab_size: int,
    eod: int | None,
) -> SampleDataset | None:
    """One split of all datasets, mixed by --data-path's weights or else by their tokens."""
    given = config.data.blend()[1]
    parts = []
    for number, (indexed, part) in enumerate(zip(opened, documents, strict=True)):
        tokens = indexed.document_start(part.stop) - indexed.document_start(part.start)
        if tokens:
            parts.append((indexed, part, given[number] if given else float(tokens)))
    if not count or not parts:
        return None

    def dataset(indexed: IndexedDataset, part: range, num_samples: int) -> GPTDataset:
        return GPTDataset(
            indexed,
            part,
            num_samples=num_samples,
            seq_length=config.data.seq_length,
            seed=config.training.seed,
            cache_dir=_cache_dir(config, indexed),
            eod=eod,
            vocab_size=vocab_size,
        )

    if len(parts) == 1:
        return dataset(parts[0][0], parts[0][1], count)
    index = blend_index([weight for _, _, weight in parts], count, _cache_dir(config, parts[0][0]))
    supplied = np.bincount(index["dataset"], minlength=len(parts)).tolist()
    return BlendedDataset([dataset(*part[:2], n) for part, n in zip(parts, supplied, strict=True)], index)


def _masked_eod(config: Config) -> int | None:
    """Id of the token that --eod-mask-loss leaves out of the loss."""
    tokenizer = _tokenizer(config) if config.data.eod_mask_loss else None
    return tokenizer.eod if tokenizer is not None else None


def _cache_dir(config: Config, indexed: IndexedDataset) -> Path:
    if config.data.data_cache_path is not None:
        return Path(config.data.data_cache_path)
    return indexed.idx_path.parent / "cache"


@functools.lru_cache(maxsize=1)
def _loaded(path: str) -> Tokenizer:
    """The tokenizer of a path, which the start of a run asks for several times and which may take a second to load."""
    return load_tokenizer(path)


def _tokenizer(config: Config) -> Tokenizer | None:
    path = config.data.tokenizer
    if path is None:
        return None
    tokenizer = _loaded(path)
    if config.data.eod_mask_loss and tokenizer.eod is None:
        raise DataError(f"--eod-mask-loss needs an end-of-document token, which the tokenizer {path} does not have")
    return tokenizer


def _vocab_size(config: Config, tokenizer: Tokenizer | None) -> int:
    given = config.model.vocab_size
    if tokenizer is None:
        if given is None:
            raise DataError("the size of the vocabulary is not known: give --tokenizer PATH or --vocab-size N")
        return given
    if given is not None and given < tokenizer.vocab_size:
        raise DataError(
            f"--vocab-size {given} is smaller than the vocabulary of the tokenizer {config.data.tokenizer}: "
            f"use {tokenizer.vocab_size} or more, or leave --vocab-size out"
        )
    return given if given is not None else tokenizer.vocab_size


def _check_tokens(indexed: IndexedDataset, tokenizer: Tokenizer | None, vocab_size: int | None, budget: int) -> int:
    """Check the token ids of a dataset as far as a budget of bytes goes; returns the bytes that were read."""
    if indexed.sequence_modes is not None:
        raise DataError(f"{indexed.idx_path}: a multimodal dataset; only text can be trained on")
    sidecar = read_sidecar(indexed)
    if sidecar is not None and tokenizer is not None and sidecar.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{indexed.bin_path}: made with another tokenizer (fingerprint {sidecar.tokenizer_fingerprint[:12]}) than "
            f"--tokenizer (fingerprint {tokenizer.fingerprint[:12]}): give the one it was preprocessed with"
        )
    if vocab_size is None or (sidecar is not None and sidecar.max_token_id < vocab_size):
        return 0
    tokens = min(indexed.num_tokens, max(budget, 0) // indexed.dtype.itemsize)
    check_token_ids(indexed, vocab_size, stop=tokens)
    return tokens * indexed.dtype.itemsize
