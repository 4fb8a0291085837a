"""The recipe of examples/bert_tiny.toml on text that every machine has: the standard library's sources, as
docs/guides/bert.md says. A quarter of an hour on a quiet core.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from megacore.data.indexed.reader import IndexedDataset
from tests.e2e.launching import BERT_PROGRAM, ROOT, alone, records_of, words
from tools.preprocess_data import main as preprocess
from tools.quickstart import write_sources
from tools.train_tokenizer import main as train_tokenizer


def unigram_entropy(indexed: IndexedDataset) -> float:
    """Loss in nats of a model that knows nothing but how frequent each token is."""
    offsets = indexed.document_offsets(0, indexed.num_documents)
    counts = np.bincount(indexed.tokens(int(offsets[0]), int(offsets[-1])))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@pytest.mark.slow
def test_both_tasks_are_learned_from_the_standard_library(tmp_path: Path) -> None:
    text, tokenizer, output = tmp_path / "corpus.jsonl", tmp_path / "tokenizer", tmp_path / "run"
    write_sources(Path(sysconfig.get_paths()["stdlib"]), text)
    assert train_tokenizer(words(input=text, model="wordpiece", vocab_size=2048, output=tokenizer)) == 0
    made = words(input=text, tokenizer=tokenizer, output_prefix=tmp_path / "pairs", split_sentences=True)
    assert preprocess(made) == 0
    prefix = tmp_path / "pairs_text_sentence"
    flags = words(
        config=ROOT / "examples" / "bert_tiny.toml",
        data_path=prefix,
        tokenizer=tokenizer,
        micro_batch_size=32,
        output_dir=output,
    )
    done = alone(*flags, program=BERT_PROGRAM, timeout=3 * 3600)
    assert done.returncode == 0, done.stderr
    records = records_of(output)
    last = [record for record in records if "eval/loss" in record][-1]
    assert last["eval/mlm_loss"] < 0.7 * unigram_entropy(IndexedDataset(prefix)), last
    assert last["eval/sentence_accuracy"] > 0.6, last  # 9 sigma above chance: 2,048 pairs
