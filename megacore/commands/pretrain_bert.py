"""BERT pretraining, from words to a trained model: what `pretrain_bert.py` and a replay share. torch is imported inside
the functions, as in commands/pretrain_gpt.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megacore.checkpoint.check import check_load, samples_of_run, settings_to_continue
from megacore.config.bert import BertConfig, ResolvedBertConfig
from megacore.config.cli import parse_config
from megacore.data.bert.build import build_bert_datasets, check_bert_inputs
from megacore.data.gpt.build import Datasets, vocabulary_size
from megacore.parallel.processors import computes_on_cpu
from megacore.pipeline.schedule_file import check_schedule
from megacore.train.planning import check_memory
from megacore.train.survival import survival

if TYPE_CHECKING:
    from megacore.parallel.mesh import Mesh
    from megacore.train.trainer import Trainer


def read_config(argv: Sequence[str], *, prog: str, exits: bool = True) -> ResolvedBertConfig:
    """The configuration of a run, checked with all its inputs; else as `parse_config`."""
    return parse_config(
        argv,
        prog=prog,
        description="Pretrain a BERT, classic or modern, with tensor x pipeline x data parallelism. "
        "--dry-run plans the run instead.",
        kind=BertConfig,
        continued=settings_to_continue,
        vocabulary=vocabulary_size,
        checks=[check_bert_inputs, check_load, check_schedule, check_memory, survival().check],
        computes_on_cpu=computes_on_cpu,
        exits=exits,
    )


def train(config: ResolvedBertConfig, mesh: Mesh) -> None:
    """Pretrain a BERT on this rank of the mesh."""
    trainer_of(config, mesh).run()


def trainer_of(config: ResolvedBertConfig, mesh: Mesh) -> Trainer:
    """Supply what BERT pretraining consists of, a task and data."""
    from megacore.commands.lr_range import range_test
    from megacore.train.bert_task import BertTask
    from megacore.train.trainer import Trainer

    train_data, valid_data = datasets(config)
    return Trainer(config, mesh, BertTask(config, mesh), train_data, valid_data, callbacks=range_test(config))


def datasets(config: ResolvedBertConfig) -> Datasets:
    """What a run trains on, and is evaluated with."""
    return build_bert_datasets(config, train_samples=samples_of_run(config))
