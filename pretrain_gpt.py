"""Pretrain a GPT with tensor x pipeline x data parallelism.

    python pretrain_gpt.py --mock-data --vocab-size 512 --preset gpt2-tiny --train-iters 20
    torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2 --pp 2 --dp 2 --config examples/quickstart.toml

The path of a batch: data/gpt -> data/loading -> train/trainer -> pipeline/runtime -> models/gpt -> layers/block.

torch is imported inside the functions, on purpose: loading it takes seconds per rank, and a wrong flag or a broken
input file is refused before that. The first line of the log comes before all imports that take time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megacore.starting import announce, announce_stage

if __name__ == "__main__":
    announce()

from megacore.checkpoint.check import check_load, samples_of_run, settings_to_continue
from megacore.commands.plan import dry_run, is_dry_run
from megacore.config import Config, ResolvedConfig
from megacore.config.cli import parse_config
from megacore.convert.start import WeightsFromHF, check_init_from_hf, ignored_fields, shape_from_hf
from megacore.data.gpt.build import build_datasets, check_inputs, vocabulary_size
from megacore.pipeline.schedule_file import check_schedule
from megacore.plan.fit import check_memory, computes_on_cpu
from megacore.train.stopping import prepare_signals
from megacore.train.torch_defaults import set_torch_defaults
from megacore.watch.start import begin_watch

if TYPE_CHECKING:
    from megacore.parallel.mesh import Mesh
    from megacore.parallel.products import Products
    from megacore.train.callbacks import Callback

    Program = Callable[[ResolvedConfig, Mesh], None]


def main(argv: list[str], *, program: Program | None = None, prog: str = "pretrain_gpt.py") -> int:
    """Train as the flags say, or with --dry-run plan the run; returns the exit status.

    Args:
        argv: the words of the command line.
        program: what each rank does instead of `train`, for a program of one's own (docs/extend/extending.md).
        prog: the name of the program, for messages.
    """
    if is_dry_run(argv):
        return dry_run(argv, "pretrain_gpt.py")
    config = parse_config(
        argv,
        prog=prog,
        description="Pretrain a GPT with tensor x pipeline x data parallelism. --dry-run plans the run instead.",
        kind=Config,
        shape=shape_from_hf,
        continued=settings_to_continue,
        vocabulary=vocabulary_size,
        checks=[check_inputs, check_load, check_init_from_hf, check_schedule, check_memory],
        computes_on_cpu=computes_on_cpu,
    )
    begin_watch(config)
    set_torch_defaults()
    announce_stage("loading torch")
    from megacore.train.launch import launch

    return launch(config, program or train)


def train(
    config: ResolvedConfig, mesh: Mesh, *, callbacks: Sequence[Callback] = (), products: Products | None = None
) -> None:
    """Supply what GPT pretraining consists of, a task and data, and run it on this rank of the mesh.

    Args:
        config: resolved.
        mesh: this rank's groups and device.
        callbacks: of one's own.
        products: computes the matrix products of linear layers; None: torch does.
    """
    from megacore.parallel.products import TORCH
    from megacore.train.gpt_task import GPTTask
    from megacore.train.trainer import Trainer

    source, ignored = config.checkpoint.init_from_hf, ignored_fields(config.checkpoint.ignore_config_field)
    weights = None if source is None else WeightsFromHF(Path(source), ignored)
    task = GPTTask(config, mesh, weights=weights, products=products or TORCH)
    train_data, valid_data = build_datasets(config, train_samples=samples_of_run(config))
    Trainer(config, mesh, task, train_data, valid_data, callbacks=callbacks).run()


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
