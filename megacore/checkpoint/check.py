"""Looks at the checkpoint of `--load` before torch is loaded: a damaged one, or one of another model, is refused
within a second, once, instead of by every rank after the model is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megacore.checkpoint.manifest import TOKENIZER_DIRECTORY, Manifest, find_checkpoint, read_manifest, verify
from megacore.config import Config, known
from megacore.data.tokenizer import load_tokenizer
from megacore.errors import CheckpointError
from megacore.fields import flag

# Files are compared with their SHA-256 at the start up to this many bytes; the rest as it is read.
_READ_BYTES = 1 << 30
# The settings of the model that decide what its parameters are and mean.
_ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "max_position_embeddings",
    "vocab_size",
    "untie_embeddings_and_output_weights",
)
_ARCHITECTURE_OF_BERT = ("bert_style", "sentence_task", "global_attention_interval", "local_rotary_base")


def check_load(config: Config) -> None:
    """Check the checkpoint that the run continues from, if any.

    Raises:
        CheckpointError: it is missing, incomplete, or of another model.
    """
    if config.training.load is None:
        return
    directory = find_checkpoint(Path(config.training.load))
    manifest = read_manifest(directory)
    trained_with = manifest.config.get("optimizer", {}).get("optimizer")
    if not isinstance(trained_with, str) or "model" not in manifest.config:
        raise CheckpointError(
            f"--load {config.training.load}: the manifest of {directory} does not say which model and optimizer it is "
            "of: it is damaged: use another step's directory"
        )
    if trained_with != config.optimizer.optimizer:
        raise CheckpointError(
            f"--load {config.training.load}: {directory} holds the state of --optimizer {trained_with}, "
            f"not of {config.optimizer.optimizer}: use --optimizer {trained_with}"
        )
    budget = _READ_BYTES
    for name, entry in manifest.files.items():
        whole = entry.bytes <= budget
        verify(directory / name, entry, content=whole)
        budget -= entry.bytes if whole else 0
    if differences := list(_differences(manifest, config)):
        raise CheckpointError(
            f"--load {config.training.load}: {directory} is of another model: {', '.join(differences)}: "
            "use the flags that it was made with, or leave --load out"
        )
    if config.data.tokenizer is not None:
        refuse_other_tokenizer(directory, config.data.tokenizer, way_out="leave --load out")
    if manifest.step >= config.training.train_iters:
        raise CheckpointError(
            f"--load {config.training.load}: {directory} is at step {manifest.step} already: "
            f"use --train-iters {manifest.step + 1} or more"
        )


def refuse_other_tokenizer(directory: Path, tokenizer: str, *, way_out: str) -> None:
    """Refuse a tokenizer that gives other ids than the one a checkpoint was trained with.

    Args:
        directory: the checkpoint; nothing is compared where it holds no tokenizer.
        tokenizer: path of the other one.
        way_out: what else to do, for the message.

    Raises:
        CheckpointError: they differ.
        DataError: one of them cannot be read.
    """
    stored = directory / TOKENIZER_DIRECTORY
    if stored.is_dir() and load_tokenizer(stored).fingerprint != load_tokenizer(tokenizer).fingerprint:
        raise CheckpointError(
            f"--tokenizer {tokenizer} is not the one that {directory} was trained with, and its ids mean other texts: "
            f"use --tokenizer {stored}, or {way_out}"
        )


def samples_of_run(config: Config) -> int:
    """Training samples from the first to the last that a run reads, those before its checkpoint included."""
    batch, training = known(config.training.global_batch_size), config.training
    if training.load is None:
        return training.train_iters * batch
    manifest = read_manifest(find_checkpoint(Path(training.load)))
    return manifest.consumed_samples + (training.train_iters - manifest.step) * batch


def _differences(manifest: Manifest, config: Config) -> Iterator[str]:
    if ("bert" in manifest.config) != hasattr(config, "bert"):
        yield "a BERT there, a GPT here" if "bert" in manifest.config else "a GPT there, a BERT here"
        return
    yield from _differences_of(manifest, "model", config.model, _ARCHITECTURE)
    yield from _differences_of(manifest, "bert", getattr(config, "bert", None), _ARCHITECTURE_OF_BERT)


def _differences_of(manifest: Manifest, table: str, section: object, fields: Sequence[str]) -> Iterator[str]:
    if section is None:
        return
    there = manifest.config.get(table, {})
    for name in fields:
        here = getattr(section, name)
        # None: the vocabulary of a tokenizer that cannot be read, which is reported by itself.
        if here is not None and there.get(name) != here:
            yield f"{flag(name)} {there.get(name)} there, {here} here"
