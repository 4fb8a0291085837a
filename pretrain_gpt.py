"""Pretrain a GPT with tensor x pipeline x data parallelism.

    python pretrain_gpt.py --mock-data --vocab-size 512 --preset gpt2-tiny --train-iters 20
    torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2 --pp 2 --dp 2 --config examples/quickstart.toml

The path of a batch: data/gpt -> data/loading -> train/trainer -> pipeline/runtime -> models/gpt -> layers/block.

torch is imported inside the functions, on purpose: loading it takes seconds per rank, and a wrong flag or a broken
input file is refused before that. The first line of the log comes before all imports that take time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megacore.train.starting import announce, announce_stage

if __name__ == "__main__":
    announce()

from megacore.commands.dry_run import dry_run, is_dry_run
from megacore.commands.pretrain_gpt import datasets, read_config, train
from megacore.config import ResolvedConfig
from megacore.train.starting import set_torch_defaults
from megacore.train.stopping import prepare_signals
from megacore.train.survival import survival
from megacore.train.watchdog import watchdog
from megacore.verify.rehearse import is_rehearsal, rehearse

if TYPE_CHECKING:
    from megacore.parallel.mesh import Mesh

    Program = Callable[[ResolvedConfig, Mesh], object]

__all__ = ["main", "run", "train"]


def main(argv: list[str], *, program: Program | None = None, prog: str = "pretrain_gpt.py") -> int:
    """Train as the flags say, or with --dry-run plan the run; returns the exit status.

    Args:
        argv: the words of the command line.
        program: what each rank does instead of `train`, for a program of one's own (docs/extend/extending.md).
        prog: the name of the program, for messages.
    """
    if is_rehearsal(argv):
        return rehearse(argv, "pretrain_gpt.py")
    if is_dry_run(argv):
        return dry_run(argv, "pretrain_gpt.py")
    config = read_config(argv, prog=prog)
    launched = partial(_launched, program=program or train)
    status = survival().keep(config, launched, datasets)
    return launched(config) if status is None else status


def _launched(config: ResolvedConfig, *, program: Program) -> int:
    watchdog().begin(config)
    set_torch_defaults()
    announce_stage("loading torch")
    from megacore.train.launch import launch

    return launch(config, program)


def run(program: Program | None = None) -> NoReturn:
    """Train as the words of the command line say, and end the process.

    Args:
        program: what each rank does instead of `train`.
    """
    announce()
    prepare_signals()
    name = Path(sys.argv[0]).name  # of a program of one's own; the console script has another one
    status = main(sys.argv[1:], program=program, prog=name if name.endswith(".py") else "pretrain_gpt.py")
    from megacore.train.launch import exit_with

    exit_with(status)


if __name__ == "__main__":
    run()
