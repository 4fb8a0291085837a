"""From a directory of transformers to a checkpoint of megacore."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megacore.checkpoint.files import TOKENIZER_DIRECTORY
from megacore.checkpoint.tensor_file import DTYPES, read_tensor
from megacore.config import ResolvedModel
from megacore.config.bert import ResolvedBert
from megacore.convert.checkpoint_tensors import write_weights
from megacore.convert.hf_directory import (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER_FILES,
    HFDirectory,
    carried_tokenizer,
    carry,
    inside,
    open_directory,
    present,
    read_config,
)
from megacore.convert.plan import Step, StoredTensors, find_tensors, make_plan, require_enough, whole_config
from megacore.models.hf.families import family_of
from megacore.models.hf.family import Family

# Kept in the checkpoint, so that the way back gives the same files.
KEPT_CONFIG = "hf_config.json"
KEPT_GENERATION_CONFIG = "hf_generation_config.json"
KEPT_SOURCE = "hf_source.json"


@dataclass(frozen=True, kw_only=True)
class HFModel:
    """A directory of transformers that megacore can represent."""

    directory: HFDirectory
    family: Family
    config: ResolvedModel  # the model, resolved
    bert: ResolvedBert | None  # its BERT section, if it is a BERT
    plan: list[Step]
    stored: StoredTensors  # the tensors of its files
    unknown: tuple[str, ...]  # fields of its config.json that megacore does not know
    ignored: tuple[str, ...]  # fields of its config.json that are left out

    def read(self, step: Step) -> Tensor:
        """One of megacore's tensors, whole, in the stored dtype."""
        return step.assemble(lambda source: read_tensor(self.stored.tensors[step.theirs[source]]))


def open_model(path: Path, ignored: Sequence[str] = ()) -> HFModel:
    """Look at a directory of transformers; no tensor is read, but for a tied one that is stored twice. `ignored`:
    fields of config.json to leave out. Raises CheckpointError with what megacore cannot read or represent exactly."""
    directory = open_directory(path, ignored)
    family = family_of(directory.config, directory.where)
    described = family.describe(directory.config, directory.where)
    config = family.stored_model(described.model, directory.tensors)
    present(path, (*TOKENIZER_FILES, GENERATION_CONFIG))
    paired = any(name.endswith("seq_relationship.weight") for name in directory.tensors)
    bert = family.to_bert(directory.config, directory.where, paired=paired)
    require_enough(family, config, bert, len(directory.tensors), str(path))
    plan = make_plan(family, config, bert)
    stored = find_tensors(plan, family, directory.tensors, str(path), model=config)
    return HFModel(
        directory=directory,
        family=family,
        config=config,
        bert=bert,
        plan=plan,
        stored=stored,
        unknown=described.unknown,
        ignored=tuple(ignored),
    )


def write_checkpoint(model: HFModel, target: Path, *, most_bytes: int) -> None:
    """Write a checkpoint of the weights, in the dtypes that they have, with the files that belong to the model.
    `target`: an empty directory. Raises DataError where its tokenizer cannot be read."""
    tokenizer = carried_tokenizer(model.directory.path)
    tensors = model.stored.tensors
    types_of = {step.ours: (DTYPES[tensors[step.theirs[0]].dtype], step.shape) for step in model.plan}
    write_weights(
        target,
        whole_config(model.config, model.bert),
        types_of,
        ((step.ours, model.read(step)) for step in model.plan),
        most_bytes=most_bytes,
        others=_keep(model, target),
        tokenizer=None if tokenizer is None else tokenizer.fingerprint,
        buffers=[step.ours for step in model.plan if step.is_buffer],
    )


def _keep(model: HFModel, target: Path) -> list[str]:
    """Carry what is no weight; returns the files that the manifest should list."""
    source = model.directory.path
    tokenizer = present(source, TOKENIZER_FILES)
    if tokenizer:
        carry(tokenizer, target / TOKENIZER_DIRECTORY)
    kept_config = inside(source, CONFIG).read_bytes()
    if any(tensor.packed for tensor in model.stored.tensors.values()):  # they are bf16 from here on
        values = {name: value for name, value in read_config(source).items() if name != "quantization_config"}
        kept_config = (json.dumps(values, indent=2) + "\n").encode()
    (target / KEPT_CONFIG).write_bytes(kept_config)
    kept = [KEPT_CONFIG, KEPT_SOURCE, *(f"{TOKENIZER_DIRECTORY}/{path.name}" for path in tokenizer)]
    if generation := present(source, (GENERATION_CONFIG,)):
        (target / KEPT_GENERATION_CONFIG).write_bytes(generation[0].read_bytes())
        kept.append(KEPT_GENERATION_CONFIG)
    about = {"names": model.stored.names, "copies": model.stored.copies, "ignored": list(model.ignored)}
    (target / KEPT_SOURCE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return kept
