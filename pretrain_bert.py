"""Pretrain a BERT, classic or modern, with tensor x pipeline x data parallelism.

    python pretrain_bert.py --mock-data --vocab-size 512 --preset bert-tiny --train-iters 20
    torchrun --nproc-per-node 8 pretrain_bert.py --tp 2 --pp 2 --dp 2 --config examples/bert_tiny.toml

The path of a batch differs from GPT's only at its ends: data/bert -> data/loading -> train/trainer ->
pipeline/runtime -> models/bert -> layers/block. As in pretrain_gpt.py, torch is imported inside the functions: what
cannot run is refused before it is loaded.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from megacore.train.starting import announce, announce_stage

if __name__ == "__main__":
    announce()

from megacore.checkpoint.check import check_load, samples_of_run, settings_to_continue
from megacore.commands.dry_run import dry_run, is_dry_run
from megacore.config.bert import BertConfig, ResolvedBertConfig
from megacore.config.cli import parse_config
from megacore.data.bert.build import build_bert_datasets, check_bert_inputs
from megacore.data.gpt.build import vocabulary_size
from megacore.parallel.processors import computes_on_cpu
from megacore.pipeline.schedule_file import check_schedule
from megacore.train.planning import check_memory
from megacore.train.starting import set_torch_defaults
from megacore.train.stopping import prepare_signals
from megacore.train.survival import survival
from megacore.train.watchdog import watchdog
from megacore.verify.rehearse import is_rehearsal, rehearse

if TYPE_CHECKING:
    from megacore.parallel.mesh import Mesh


def main(argv: list[str]) -> int:
    """Train as the flags say, or with --dry-run plan the run; returns the exit status."""
    if is_rehearsal(argv):
        return rehearse(argv, "pretrain_bert.py")
    if is_dry_run(argv):
        return dry_run(argv, "pretrain_bert.py")
    config = parse_config(
        argv,
        prog="pretrain_bert.py",
        description="Pretrain a BERT, classic or modern, with tensor x pipeline x data parallelism. "
        "--dry-run plans the run instead.",
        kind=BertConfig,
        continued=settings_to_continue,
        vocabulary=vocabulary_size,
        checks=[check_bert_inputs, check_load, check_schedule, check_memory, survival().check],
        computes_on_cpu=computes_on_cpu,
    )
    status = survival().keep(config, _launched)
    return _launched(config) if status is None else status


def _launched(config: ResolvedBertConfig) -> int:
    watchdog().begin(config)
    set_torch_defaults()
    announce_stage("loading torch")
    from megacore.train.launch import launch

    return launch(config, train)


def train(config: ResolvedBertConfig, mesh: Mesh) -> None:
    """Supply what BERT pretraining consists of, a task and data, and run it on this rank of the mesh."""
    from megacore.commands.lr_range import range_test
    from megacore.train.bert_task import BertTask
    from megacore.train.trainer import Trainer

    train_data, valid_data = build_bert_datasets(config, train_samples=samples_of_run(config))
    Trainer(config, mesh, BertTask(config, mesh), train_data, valid_data, callbacks=range_test(config)).run()


def run() -> NoReturn:
    """Train as the words of the command line say, and end the process."""
    announce()
    prepare_signals()
    status = main(sys.argv[1:])
    from megacore.train.launch import exit_with

    exit_with(status)


if __name__ == "__main__":
    run()
