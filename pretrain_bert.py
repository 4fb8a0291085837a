"""Pretrain a BERT, classic or modern, with tensor x pipeline x data parallelism.

    python pretrain_bert.py --mock-data --vocab-size 512 --preset bert-tiny --train-iters 20
    torchrun --nproc-per-node 8 pretrain_bert.py --tp 2 --pp 2 --dp 2 --config examples/bert_tiny.toml

The path of a batch differs from GPT's only at its ends: data/bert -> data/loading -> train/trainer ->
pipeline/runtime -> models/bert -> layers/block. As in pretrain_gpt.py, torch is imported inside the functions: what
cannot run is refused before it is loaded.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from megacore.train.starting import announce, announce_stage

if __name__ == "__main__":
    announce()

from megacore.commands.dry_run import dry_run, is_dry_run
from megacore.commands.pretrain_bert import datasets, read_config, train
from megacore.config.bert import ResolvedBertConfig
from megacore.train.starting import set_torch_defaults
from megacore.train.stopping import prepare_signals
from megacore.train.survival import survival
from megacore.train.watchdog import watchdog
from megacore.verify.rehearse import is_rehearsal, rehearse

__all__ = ["main", "run", "train"]


def main(argv: list[str]) -> int:
    """Train as the flags say, or with --dry-run plan the run; returns the exit status."""
    if is_rehearsal(argv):
        return rehearse(argv, "pretrain_bert.py")
    if is_dry_run(argv):
        return dry_run(argv, "pretrain_bert.py")
    config = read_config(argv, prog="pretrain_bert.py")
    status = survival().keep(config, _launched, datasets)
    return _launched(config) if status is None else status


def _launched(config: ResolvedBertConfig) -> int:
    watchdog().begin(config)
    set_torch_defaults()
    announce_stage("loading torch")
    from megacore.train.launch import launch

    return launch(config, train)


def run() -> NoReturn:
    """Train as the words of the command line say, and end the process."""
    announce()
    prepare_signals()
    status = main(sys.argv[1:])
    from megacore.train.launch import exit_with

    exit_with(status)


if __name__ == "__main__":
    run()
