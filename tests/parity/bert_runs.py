"""A short run of BERT on any layout, for comparing layouts: as tests/parity/runs.py has it for GPT."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from megacore.config import ModelConfig
from megacore.config.bert import BertConfig, BertSection, ResolvedBertConfig
from megacore.config.fields import field_infos
from megacore.parallel.mesh import Mesh
from megacore.train.bert_task import BertTask
from megacore.train.trainer import Trainer
from tests.parity.runs import SEQUENCE, VOCAB, Layout, make_config

_NO_PAIR = -1


class RaggedPairs:
    """Random samples of every length and number of masked tokens, none included, of which some are no pair.

    Microbatches of one or two samples therefore have no masked token, or no pair, now and then: a wrong weighting of
    either loss cannot hide.

    Args:
        samples: their number.
        packed: documents one after the other, instead of a pair.
        pairs: whether there is a sentence task.
    """

    def __init__(self, samples: int, *, packed: bool, pairs: bool) -> None:
        self._samples, self._packed, self._pairs = samples, packed, pairs

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = np.random.default_rng(index)
        tokens, labels = random.integers(0, VOCAB, (2, SEQUENCE))
        length = random.integers(3, SEQUENCE + 1)
        real = np.arange(SEQUENCE) < length
        first, second = np.sort(random.integers(1, length, 2))
        segments = (np.arange(SEQUENCE) >= first).astype(np.int64)
        documents = 1 + segments + (np.arange(SEQUENCE) >= second) if self._packed else np.ones(SEQUENCE, np.int64)
        masked = real & (random.random(SEQUENCE) < random.choice([0.0, 0.0, 0.1, 0.9]))
        pair = int(random.integers(-1, 2)) if self._pairs else _NO_PAIR
        return {
            "tokens": tokens,
            "token_types": segments * real if self._pairs else np.zeros(SEQUENCE, np.int64),
            "documents": documents * real,
            "labels": labels,
            "loss_mask": masked.astype(np.float32),
            "sentence_labels": np.int64(pair),
        }


def make_bert_config(layout: Layout, output_dir: Path | str, **changes: Any) -> ResolvedBertConfig:
    """BERT of the size of `make_config`'s GPT, without dropout; `changes` by field name, also of the BERT section."""
    own = {field.name for field in dataclasses.fields(BertSection)}
    section = BertSection(**{name: value for name, value in changes.items() if name in own})
    others = {name: value for name, value in changes.items() if name not in own}
    style = BertConfig.defaults({"bert_style": section.bert_style})
    style = {name: value for name, value in style.items() if name in field_infos(ModelConfig)}
    gpt = make_config(layout, output_dir, **{**style, "hidden_dropout": 0.0, "attention_dropout": 0.0, **others})
    sections = {field.name: getattr(gpt, field.name) for field in dataclasses.fields(gpt)}
    return BertConfig(**sections, bert=section).resolve(math.prod(layout) * gpt.parallel.cp)


def make_bert_trainer(config: ResolvedBertConfig, mesh: Mesh, data: Any = None) -> Trainer:
    """A trainer on `data`, by default as many random samples as the run takes."""
    samples = config.training.global_batch_size * config.training.train_iters
    data = data or RaggedPairs(samples, packed=config.bert.packed, pairs=config.bert.sentence_task != "none")
    return Trainer(config, mesh, BertTask(config, mesh), data, data)
