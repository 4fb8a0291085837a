"""A trained model for a tool that uses it in one process: its configuration, its tokenizer, and its layers with their
weights, from a checkpoint of whatever layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from megacore.checkpoint.check import refuse_other_tokenizer
from megacore.checkpoint.files import verified_tokenizer
from megacore.checkpoint.load import load_parameters
from megacore.checkpoint.manifest import (
    Manifest,
    adapters_of,
    base_of,
    find_checkpoint,
    read_manifest,
    trained_model,
)
from megacore.config import ResolvedModel
from megacore.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megacore.errors import CheckpointError, Collected, ConfigError, UserError
from megacore.inference.program import layers_of
from megacore.layers.context import BuildContext
from megacore.layers.lora import is_adapter
from megacore.models.gpt import gpt_layers
from megacore.models.spec import DescribesLayers, LayerSpec, with_adapters
from megacore.parallel.mesh import select_device
from megacore.parallel.random import RandomStreams
from megacore.pipeline.stage import Stage
from megacore.remote import Location


@dataclass(frozen=True, kw_only=True)
class CausalModel:
    """A checkpoint of a GPT, whose weights are not read yet."""

    directory: Location
    config: ResolvedModel
    tokenizer: Tokenizer
    layers: DescribesLayers

    def stage(self, device: str) -> Stage:
        """The whole model on a device: auto, cpu, cuda or another accelerator."""
        return model_of(self.directory, partial(self.layers, self.config), select_device(device))


def causal_model(checkpoint: Location, tokenizer: str | None, program: str | None = None) -> CausalModel:
    """The model of a checkpoint, or a run's newest, that predicts the next token. `tokenizer`: path; None: the
    checkpoint's. `program`: that trained it, if it has layers or registered names of its own (inference/program.py).
    Raises UserError where it holds a BERT, or is damaged, or the tokenizer or the program does not fit."""
    directory = find_checkpoint(checkpoint)
    manifest = read_manifest(directory)
    problems: list[str] = []
    with Collected(problems):
        layers = trained_layers(program, manifest, directory)
    config = replace(trained_model(manifest, directory), mtp_num_layers=0)
    if "bert" in manifest.config:
        raise UserError(f"{directory} holds a BERT, which does not predict the next token: use tools/fill_mask.py")
    with Collected(problems):
        kept = tokenizer_of(directory, tokenizer, config)
    if problems:
        raise ConfigError(problems) if len(problems) > 1 else UserError(problems[0])
    return CausalModel(directory=directory, config=config, tokenizer=kept, layers=layers)


def trained_layers(program: str | None, manifest: Manifest, directory: Location) -> DescribesLayers:
    """What describes the layers of a checkpoint; those of a `program` are never taken for a GPT of megacore's. Raises
    UserError where it cannot be imported, or describes no layers and the checkpoint needs some."""
    layers = layers_of(program)
    if manifest.has_own_layers and layers is gpt_layers:
        lacking = "" if program is None else f"--program {program} has no function `layers`: "
        raise CheckpointError(
            f"{directory} was trained by a program that describes its own layers: {lacking}give that file, "
            "--program FILE.py"
        )
    return layers


def tokenizer_of(directory: Location, path: str | None, model: ResolvedModel) -> Tokenizer:
    """The tokenizer to use with a checkpoint. `path`: None: that of the checkpoint. Raises CheckpointError where the
    checkpoint holds none, a damaged one, or another one than the path; UserError where its vocabulary is larger than
    the model's."""
    stored = verified_tokenizer(directory, read_manifest(directory).files)
    if path is None and stored is None:
        raise CheckpointError(f"{directory} holds no tokenizer (it was trained without one): give --tokenizer PATH")
    tokenizer = load_tokenizer(path or str(stored))
    if path is not None:
        refuse_other_tokenizer(stored, tokenizer, path, way_out="leave --tokenizer out")
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer {path or stored} has a vocabulary of {tokenizer.vocab_size}, but the model of {directory} "
            f"only {model.vocab_size}: give the tokenizer that it was trained with"
        )
    return tokenizer


def model_of(directory: Location, layers: Callable[[BuildContext], list[LayerSpec]], device: torch.device) -> Stage:
    """The whole model on one device, with the checkpoint's weights, for evaluation. `layers`: describes the model,
    given the context of its layers. Raises CheckpointError where the checkpoint is damaged, or of another model."""
    context = BuildContext(device=device, streams=RandomStreams(0, device))
    manifest = read_manifest(directory)
    lora = adapters_of(manifest, directory)
    stage = Stage(with_adapters(layers(context), lora, trained_model(manifest, directory), context))
    layers_by_name = zip(stage.names, stage.layers, strict=True)
    buffers = {f"{name}.{local}": each for name, layer in layers_by_name for local, each in layer.named_buffers()}
    parameters = stage.by_name()
    learned = {name: one for name, one in parameters.items() if lora.lora_rank is None or is_adapter(name)}
    if lora.lora_rank is not None:
        base = base_of(manifest, directory)
        load_parameters(base, [one for name, one in parameters.items() if name not in learned], buffers)
    load_parameters(directory, learned.values(), buffers)
    return stage.eval()
