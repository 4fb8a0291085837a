"""From a configuration of pretrain_bert.py to its datasets, and what its inputs must have beyond GPT's: a tokenizer
with the tokens that samples are put together with, and documents of sentences where pairs are asked for."""

from __future__ import annotations

import logging

from megacore.config.bert import ResolvedBertConfig
from megacore.data.bert.dataset import BertDataset
from megacore.data.bert.masking import Masking, SpecialTokens, make_masking, special_tokens
from megacore.data.bert.mock import MOCK_TOKENS, MockBertText, mock_masking
from megacore.data.bert.text import BertText, Shape, Split, paired_documents
from megacore.data.gpt.blend import SampleDataset
from megacore.data.gpt.build import (
    Datasets,
    InputErrors,
    Part,
    cache_dir,
    check_inputs,
    datasets_of,
    parts_of,
    tokenizer_of,
    vocabulary_size,
)
from megacore.data.indexed.fetching import local_prefix
from megacore.data.indexed.reader import IndexedDataset
from megacore.data.indexed.sidecar import read_sidecar
from megacore.errors import Collected, DataError
from megacore.parallel.heartbeat import Phase, section

_LOG = logging.getLogger(__name__)


def check_bert_inputs(config: ResolvedBertConfig) -> None:
    """Check the tokenizer and every dataset of a configuration; warn of a dataset made with --append-eod. Raises
    InputErrors where Everything that is wrong."""
    problems: list[str] = []
    with Collected(problems):
        check_inputs(config)
    with Collected(problems):
        _masking(config, vocabulary_size(config))
    for prefix in config.data.prefixes():
        with Collected(problems):
            indexed = IndexedDataset(local_prefix(prefix, config.data.data_cache_path))
            _check_sentences(config, indexed)
            sidecar = read_sidecar(indexed)
            if sidecar is not None and sidecar.append_eod:
                _LOG.warning(
                    "%s was made with --append-eod: each document ends with that token in its samples, which have "
                    "[SEP] already: better preprocess it without --append-eod",
                    indexed.prefix,
                )
    if problems:
        raise InputErrors(problems)


@section(Phase.INDEX)
def build_bert_datasets(config: ResolvedBertConfig, *, train_samples: int | None = None) -> Datasets:
    """Make the datasets of a resolved configuration. `train_samples`: Size of the training set, by default
    `train_iters` global batches. Raises DataError where an input is unusable."""
    section = config.bert
    vocab_size = config.model.vocab_size
    tokens, masking = _masking(config, vocab_size)
    shape = Shape(
        seq_length=config.data.seq_length,
        special=tokens,
        short_seq_prob=section.short_seq_prob,
        mark_sentences=section.whole_word_masking,
        vocab_size=vocab_size,
    )

    def masked(text: BertText | MockBertText, num_samples: int, stream: int) -> BertDataset:
        return BertDataset(
            text,
            masking,
            num_samples=num_samples,
            seq_length=shape.seq_length,
            pad=tokens.pad,
            seed=config.training.seed,
            stream=stream,
        )

    def mock(stream: int, num_samples: int) -> SampleDataset:
        text = MockBertText(
            vocab_size,
            shape.seq_length,
            task=section.sentence_task,
            packed=section.packed,
            short_seq_prob=shape.short_seq_prob,
            seed=config.training.seed,
        )
        return masked(text, num_samples, stream)

    def dataset(part: Part, num_samples: int) -> SampleDataset:
        split = Split(
            indexed=part.indexed,
            documents=part.documents,
            num_samples=num_samples,
            seed=config.training.seed,
            cache_dir=cache_dir(config, part.indexed),
        )
        text = BertText(split, shape, "packed" if section.packed else section.sentence_task)
        return masked(text, num_samples, 2 * part.number + part.stream)

    return datasets_of(config, train_samples, mock, dataset)


def _masking(config: ResolvedBertConfig, vocab_size: int) -> tuple[SpecialTokens, Masking]:
    """The special tokens and the rules of masking of a run. Raises DataError where the tokenizer has not what they
    need."""
    section = config.bert
    if config.data.mock_data:
        return MOCK_TOKENS, mock_masking(vocab_size, prob=section.mask_prob, max_ngram=section.max_ngram)
    tokenizer = tokenizer_of(config)
    assert tokenizer is not None, "BertConfig asks for one"
    source = str(config.data.tokenizer)
    masking = make_masking(
        tokenizer,
        source,
        vocab_size=vocab_size,
        prob=section.mask_prob,
        whole_words=section.whole_word_masking,
        max_ngram=section.max_ngram,
    )
    return special_tokens(tokenizer, source), masking


def _check_sentences(config: ResolvedBertConfig, indexed: IndexedDataset) -> None:
    """Refuse a dataset that gives no pairs where they are asked for, in a split that is read. Raises DataError that
    names the split, the task and the way out."""
    task = config.bert.sentence_task
    if task == "none":
        return
    if len(indexed) <= indexed.num_documents and paired_documents(indexed, range(indexed.num_documents)) == 0:
        raise DataError(
            f"--sentence-task {task} needs documents of several sentences, but no document of {indexed.idx_path} has "
            "two: preprocess it with tools/preprocess_data.py --split-sentences, or use --sentence-task none"
        )
    evaluated = config.training.eval_interval > 0
    for stream, name in enumerate(("training", "validation") if evaluated else ("training",)):
        for part in parts_of(config, [indexed], stream):
            count, least = paired_documents(indexed, part.documents), 1 if task == "sop" else 2
            if count < least:
                few = "none" if count == 0 else "only one"
                raise DataError(
                    f"--sentence-task {task} needs {least} or more documents of several sentences, but of the "
                    f"{len(part.documents)} {name} documents of {indexed.idx_path} {few} has two: "
                    "give that split a larger share with --split, add documents, or use --sentence-task none"
                )
