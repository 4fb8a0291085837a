"""From a configuration to its datasets, and the check of all input files before anything expensive happens. Each
document belongs to one split; nothing of the test split is read or built."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megacore.config import Config, ResolvedConfig
from megacore.config.data import SplitShares
from megacore.data.gpt import megatron_order
from megacore.data.gpt.blend import BlendedDataset, NamedSets, SampleDataset, blend_index
from megacore.data.gpt.dataset import GPTDataset
from megacore.data.gpt.fill_in_middle import FillInTheMiddle, sentinels_of
from megacore.data.gpt.index_cache import Arrays
from megacore.data.gpt.mock import MockDataset
from megacore.data.gpt.packing import PackedDataset
from megacore.data.indexed.fetching import local_prefix
from megacore.data.indexed.reader import IndexedDataset, check_token_ids
from megacore.data.indexed.sidecar import open_loss_mask, read_sidecar
from megacore.data.tokenizers.same_ids import ids_fingerprint
from megacore.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megacore.errors import Collected, DataError
from megacore.parallel.heartbeat import Phase, section
from megacore.progress import Progress

# Tokens are compared with the vocabulary at the start up to this many bytes; the rest as it is read.
_SCAN_BYTES = 1 << 30


class InputErrors(DataError):
    """Everything that is wrong with a run's inputs, a line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class Datasets(NamedTuple):
    """The datasets of a run; a validation split without documents, or that nothing asks for, is None. With
    --valid-sets, `valid` is `NamedSets`."""

    train: SampleDataset
    valid: SampleDataset | None


def check_inputs(config: Config) -> int:
    """Check the tokenizer and every dataset of a configuration. Returns the size of the vocabulary to use:
    `--vocab-size`, or the tokenizer's. Raises InputErrors with everything that is wrong."""
    problems: list[str] = []
    tokenizer: Tokenizer | None = None
    vocab_size: int | None = None
    with Collected(problems):
        tokenizer = tokenizer_of(config)
        vocab_size = _vocab_size(config, tokenizer)
        if tokenizer is not None and config.data.fim_rate:
            sentinels_of(tokenizer, _sentinel_names(config))
    budget, trained = _SCAN_BYTES, config.data.prefixes(named=False)
    for prefix in config.data.prefixes():
        with Collected(problems):
            indexed = IndexedDataset(local_prefix(prefix, config.data.data_cache_path))
            if prefix in trained and not config.data.is_split:
                split_documents(indexed, config.data.split_shares())
            open_loss_mask(indexed)
            budget -= _check_tokens(indexed, tokenizer, vocab_size, budget)
    if problems:
        raise InputErrors(problems)
    assert vocab_size is not None
    return vocab_size


def vocabulary_size(config: Config) -> int:
    """The size of the vocabulary to use: `--vocab-size`, or the tokenizer's. Raises DataError where there is no
    tokenizer where one is needed, or `--vocab-size` is smaller than its vocabulary."""
    return _vocab_size(config, tokenizer_of(config))


@section(Phase.INDEX)
def build_datasets(config: ResolvedConfig, *, train_samples: int | None = None) -> Datasets:
    """The datasets of a resolved configuration; without evaluation only the training set. Every evaluation reads the
    same `eval_iters` global batches. `train_samples`: None: those of `train_iters` steps; a run that resumes with
    another batch size reads others. Raises DataError where an input is unusable."""
    vocab_size = config.model.vocab_size
    # The token that --eod-mask-loss leaves out of the loss.
    tokenizer = tokenizer_of(config) if config.data.eod_mask_loss and not config.data.mock_data else None
    eod = None if tokenizer is None else tokenizer.eod
    tells_padding = "padding" in config.beside_hidden_states
    fill_in = _fill_in(config)

    def mock(stream: int, num_samples: int) -> SampleDataset:
        return MockDataset(
            vocab_size,
            config.data.seq_length,
            num_samples,
            config.training.seed,
            stream=stream,
            boundaries=bool(config.beside_hidden_states),
            tells_padding=tells_padding,
        )

    def dataset(part: Part, num_samples: int) -> SampleDataset:
        packing, order = config.data.packing, config.data.sample_order
        kind: Callable[..., SampleDataset] = functools.partial(GPTDataset, order=order)
        if packing != "concat":
            kind = functools.partial(PackedDataset, mode=packing, tells_padding=tells_padding)
        return kind(
            part.indexed,
            part.documents,
            num_samples=num_samples,
            seq_length=config.data.seq_length,
            seed=config.training.seed,
            cache_dir=cache_dir(config, part.indexed),
            eod=eod,
            vocab_size=vocab_size,
            boundaries=bool(config.beside_hidden_states),
            fill_in=None if fill_in is None or part.stream else dataclasses.replace(fill_in, number=part.number),
        )

    return datasets_of(config, train_samples, mock, dataset)


class Part(NamedTuple):
    """A dataset's documents that belong to a split."""

    indexed: IndexedDataset
    documents: range  # those of the split
    number: int  # the dataset's position in --data-path
    stream: int  # 0 for training, 1 for validation


def datasets_of(
    config: ResolvedConfig,
    train_samples: int | None,
    mock: Callable[[int, int], SampleDataset],
    dataset: Callable[[Part, int], SampleDataset],
) -> Datasets:
    """The datasets of a run, of whatever kind of samples. `train_samples`: as for `build_datasets`. `mock`: makes
    generated data of a stream (0 training, 1 validation) and a number of samples. `dataset`: makes a dataset of a part
    and a number of samples."""
    training = config.training
    _loaded.cache_clear()  # the run itself does without the tokenizer
    batch = training.global_batch_size
    evaluated = training.eval_iters * batch if training.eval_interval else 0
    counts = [train_samples or config.batch_sizes.samples(training.train_iters), evaluated]
    if config.data.mock_data:
        made = [mock(stream, count) if count else None for stream, count in enumerate(counts)]
    else:
        cache = config.data.data_cache_path
        opened = {prefix: IndexedDataset(local_prefix(prefix, cache)) for prefix in config.data.prefixes()}
        made = []
        for stream, count in enumerate(counts):
            of_stream = [opened[prefix] for prefix in config.data.blend(stream)[0]]
            made.append(_blended(config, parts_of(config, of_stream, stream), count, dataset))
        if evaluated and config.data.valid_sets:
            made[1] = _named_sets(config, opened, made[1], evaluated, dataset)
    train, valid = made
    assert train is not None
    if training.skip_train and valid is None:
        raise DataError(
            f"--skip-train evaluates, and --split {config.data.split} leaves no validation documents: make its second "
            "number larger"
        )
    return Datasets(train=train, valid=valid)


def _named_sets(
    config: ResolvedConfig,
    opened: Mapping[str, IndexedDataset],
    main: SampleDataset | None,
    count: int,
    dataset: Callable[[Part, int], SampleDataset],
) -> NamedSets:
    """The validation data, if there are some, and the sets of --valid-sets, of `count` samples each. Raises DataError
    where a set has nothing to predict."""
    sets = {} if main is None else {"": main}
    for name, prefix in config.data.named_valid_sets().items():
        parts = parts_of(config, [opened[prefix]], 1, whole=True)
        if not parts:
            raise DataError(f"--valid-sets {name}={prefix} has no document with a token to predict: leave it out")
        sets[name] = dataset(parts[0], count)
    return NamedSets(sets)


def parts_of(config: Config, opened: Sequence[IndexedDataset], stream: int, *, whole: bool = False) -> list[Part]:
    """The documents of a split (0 training, 1 validation) in every dataset that has some with tokens; for validation on
    samples of whole documents, some with two tokens. With `whole`, a split has all documents."""
    parts = []
    for number, indexed in enumerate(opened):
        documents = range(indexed.num_documents)
        if not whole and not config.data.is_split:
            documents = split_documents(indexed, config.data.split_shares())[stream]
        part = Part(indexed, documents, number, stream)
        if not _tokens(part):
            continue
        lengths = np.diff(indexed.document_offsets(part.documents.start, part.documents.stop))
        if stream == 0 or config.data.packing == "concat" or lengths.max() > 1:
            parts.append(part)
    return parts


class DocumentSplit(NamedTuple):
    """The documents of each split."""

    train: range
    valid: range
    test: range


def split_documents(indexed: IndexedDataset, shares: SplitShares) -> DocumentSplit:
    """Split the documents into training, validation and test: disjoint, in order, and complete. Raises DataError where
    there would be no document to train on."""
    count = indexed.num_documents
    bounds = [0, round(count * shares.train), round(count * (shares.train + shares.valid)), count]
    if shares.test == 0:
        bounds[2] = count  # 0.95 + 0.05 is not quite 1
    split = DocumentSplit(*(range(*pair) for pair in pairwise(bounds)))
    if not split.train or indexed.document_start(split.train.stop) == 0:
        raise DataError(
            f"--split leaves no tokens to train on in the {count} documents of {indexed.idx_path}: "
            "make its first number larger, or add documents"
        )
    return split


def _blended(
    config: ResolvedConfig, parts: Sequence[Part], count: int, dataset: Callable[[Part, int], SampleDataset]
) -> SampleDataset | None:
    """One split of all datasets, mixed by --data-path's weights or else by their tokens."""
    if not count or not parts:
        return None
    if len(parts) == 1:
        return dataset(parts[0], count)
    given = config.data.blend(parts[0].stream)[1]
    weights = [given[part.number] if given else _tokens(part) for part in parts]
    index, supplied = _blend(config, parts, weights, count, is_given=given is not None)
    built = []
    with Progress("index build", len(parts), unit="datasets") as progress:
        for part, samples in zip(parts, supplied, strict=True):
            built.append(dataset(part, samples))
            progress.advance(1)
    return BlendedDataset(built, index)


def _blend(
    config: ResolvedConfig, parts: Sequence[Part], weights: list[float], count: int, *, is_given: bool
) -> tuple[Arrays, list[int]]:
    """The order of a blend, and the samples that each dataset is built with. Raises DataError where Megatron-LM's order
    of datasets without weights has too few samples."""
    cache = cache_dir(config, parts[0].indexed)
    if config.data.sample_order == "megacore":
        index = blend_index(weights, count, cache)
        return index, np.bincount(index["dataset"], minlength=len(parts)).tolist()
    if is_given:
        return blend_index(weights, count, cache, megatron=True), megatron_order.sizes_of_blend(weights, count)
    sizes = [(int(_tokens(part)) - 1) // config.data.seq_length for part in parts]  # samples of an epoch
    if sum(sizes) < count:
        raise DataError(
            f"--sample-order megatron blends datasets without weights for one epoch, which has {sum(sizes):,} samples, "
            f"and {count:,} are needed: give weights (--data-path WEIGHT PREFIX ...), or use --sample-order megacore"
        )
    return blend_index(sizes, count, cache, megatron=True), sizes


def _tokens(part: Part) -> float:
    return float(part.indexed.document_start(part.documents.stop) - part.indexed.document_start(part.documents.start))


def _fill_in(config: ResolvedConfig) -> FillInTheMiddle | None:
    """What --fim-rate does to documents. Raises DataError where the tokenizer has no tokens that mark the parts."""
    data = config.data
    tokenizer = tokenizer_of(config) if data.fim_rate and not data.mock_data else None
    if tokenizer is None:
        return None
    return FillInTheMiddle(
        rate=data.fim_rate,
        spm_rate=data.fim_spm_rate,
        sentinels=sentinels_of(tokenizer, _sentinel_names(config)),
        eod=tokenizer.eod,
        seed=config.training.seed,
        tokenizer=tokenizer if data.fim_cut == "character" else None,
    )


def _sentinel_names(config: Config) -> tuple[str | None, ...]:
    return config.data.fim_prefix_token, config.data.fim_middle_token, config.data.fim_suffix_token


def cache_dir(config: Config, indexed: IndexedDataset) -> Path:
    """Where a dataset's indices are cached."""
    if config.data.data_cache_path is not None:
        return Path(config.data.data_cache_path)
    return indexed.idx_path.parent / "cache"


@functools.lru_cache(maxsize=1)
def _loaded(path: str, merges: str | None) -> Tokenizer:
    """The tokenizer of a path, which the start of a run asks for several times and which may take a second to load."""
    try:
        return load_tokenizer(path, merges)
    except DataError as error:
        raise DataError(f"--tokenizer {error}") from error


def tokenizer_of(config: Config) -> Tokenizer | None:
    """The tokenizer of a configuration, if it has one. Raises DataError where it cannot be read, or has no end of
    document where one is needed."""
    path = config.data.tokenizer
    if path is None:
        return None
    tokenizer = _loaded(path, config.data.merge_file)
    if config.data.eod_mask_loss and tokenizer.eod is None:
        raise DataError(f"--eod-mask-loss needs an end-of-document token, which the tokenizer {path} does not have")
    return tokenizer


def _vocab_size(config: Config, tokenizer: Tokenizer | None) -> int:
    given = config.model.vocab_size or None  # UNKNOWN_VOCAB_SIZE is no size
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
    if (
        sidecar is not None
        and tokenizer is not None
        and sidecar.tokenizer_fingerprint != tokenizer.fingerprint
        and (sidecar.tokenizer_ids is None or sidecar.tokenizer_ids != ids_fingerprint(tokenizer))
    ):
        raise DataError(
            f"{indexed.bin_path}: made with another tokenizer (fingerprint {sidecar.tokenizer_fingerprint[:12]}) than "
            f"--tokenizer (fingerprint {tokenizer.fingerprint[:12]}), whose ids differ: give the one it was made "
            "with"
        )
    if vocab_size is None or (sidecar is not None and sidecar.max_token_id < vocab_size):
        return 0
    tokens = min(indexed.num_tokens, max(budget, 0) // indexed.dtype.itemsize)
    check_token_ids(indexed, vocab_size, stop=tokens)
    return tokens * indexed.dtype.itemsize
