"""GPT pretraining, from words to a trained model: what `pretrain_gpt.py` and `megacore.pretrain_gpt` share. torch is
imported inside the functions, on purpose: see pretrain_gpt.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.checkpoint.check import check_load, samples_of_run, settings_to_continue
from megacore.config import Config, ResolvedConfig
from megacore.config.cli import parse_config
from megacore.convert.start import WeightsFromHF, check_init_from_hf, ignored_fields, shape_from_hf
from megacore.data.gpt.build import Datasets, build_datasets, check_inputs, vocabulary_size
from megacore.parallel.processors import computes_on_cpu
from megacore.pipeline.schedule_file import check_schedule
from megacore.remote import location
from megacore.train.planning import check_memory
from megacore.train.survival import survival

if TYPE_CHECKING:
    from megacore.models.spec import DescribesLayers
    from megacore.parallel.mesh import Mesh
    from megacore.parallel.products import Products
    from megacore.train.callbacks import Callback
    from megacore.train.trainer import Trainer


def read_config(argv: Sequence[str], *, prog: str, exits: bool = True, planned: bool = False) -> ResolvedConfig:
    """The configuration of a run, checked with all its inputs; else as `parse_config`."""
    return parse_config(
        argv,
        prog=prog,
        description="Pretrain a GPT with tensor x pipeline x data parallelism. --dry-run plans the run instead.",
        kind=Config,
        shape=shape_from_hf,
        continued=settings_to_continue,
        vocabulary=vocabulary_size,
        checks=[check_inputs, check_load, check_init_from_hf, check_schedule, check_memory, survival().check],
        computes_on_cpu=computes_on_cpu,
        exits=exits,
        planned=planned,
    )


def train(
    config: ResolvedConfig,
    mesh: Mesh,
    *,
    callbacks: Sequence[Callback] = (),
    products: Products | None = None,
    layers: DescribesLayers | None = None,
) -> Trainer:
    """Pretrain a GPT on this rank of the mesh; returns what trained, after the last step."""
    trainer = trainer_of(config, mesh, callbacks=callbacks, products=products, layers=layers)
    trainer.run()
    return trainer


def trainer_of(
    config: ResolvedConfig,
    mesh: Mesh,
    *,
    callbacks: Sequence[Callback] = (),
    products: Products | None = None,
    layers: DescribesLayers | None = None,
) -> Trainer:
    """Supply what GPT pretraining consists of, a task and data. `products`: computes the matrix products of linear
    layers; None: torch does. `layers`: describes the model; None: `gpt_layers` does."""
    from megacore.checkpoint.load import WeightsOfCheckpoint
    from megacore.commands.lr_range import range_test
    from megacore.models.gpt import gpt_layers
    from megacore.models.initialize import BesideAdapters, InitialWeights, RandomWeights
    from megacore.parallel.products import TORCH
    from megacore.train.gpt_task import GPTTask
    from megacore.train.trainer import Trainer

    source, ignored = config.checkpoint.init_from_hf, ignored_fields(config.checkpoint.ignore_config_field)
    weights: InitialWeights | None = None if source is None else WeightsFromHF(Path(source), ignored)
    if config.lora.lora_rank is not None:
        base = config.start.pretrained_checkpoint
        weights = BesideAdapters(
            weights or WeightsOfCheckpoint(location(str(base)), mesh.world),
            RandomWeights(config.model, seed=config.training.seed),
        )
    task = GPTTask(config, mesh, weights=weights, products=products or TORCH, layers=layers or gpt_layers)
    train_data, valid_data = datasets(config)
    return Trainer(config, mesh, task, train_data, valid_data, callbacks=[*range_test(config), *callbacks])


def datasets(config: ResolvedConfig) -> Datasets:
    """What a run trains on, and is evaluated with."""
    return build_datasets(config, train_samples=samples_of_run(config))
