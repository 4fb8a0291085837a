"""The tokenizer of an export: the one that the checkpoint was trained with, as its manifest vouches for it. A file that
the manifest does not list is not carried, since nothing says that it is the one that was saved. Another directory's
tokenizer is taken only where its ids mean the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megacore.checkpoint.files import TOKENIZER_DIRECTORY, verify
from megacore.convert.checkpoint_tensors import CheckpointTensors
from megacore.convert.hf_directory import TOKENIZER_FILES, present
from megacore.data.tokenizers.tokenizer import load_tokenizer
from megacore.errors import CheckpointError

# A directory with one of these has a tokenizer; the other files say something about one.
_VOCABULARIES = frozenset(("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"))


@dataclass(frozen=True, kw_only=True)
class ExportTokenizer:
    """What an export carries."""

    directory: Path | None  # where the files lie; None where there is none
    files: list[Path]
    note: str | None = None  # what a user should know about it


def export_tokenizer(tensors: CheckpointTensors, like: Path | None) -> ExportTokenizer:
    """Choose and verify a tokenizer, of the checkpoint or of the directory `like`. Raises CheckpointError where the
    checkpoint's is damaged or another one, DataError where a tokenizer cannot be read."""
    kept = _tokenizer_of_checkpoint(tensors)
    if like is None:
        return kept
    others = present(like, TOKENIZER_FILES)
    if not any(path.name in _VOCABULARIES for path in others):
        return kept
    if kept.directory is not None and load_tokenizer(kept.directory).fingerprint != load_tokenizer(like).fingerprint:
        raise CheckpointError(
            f"--like {like} has another tokenizer than {tensors.directory} was trained with, and its ids mean other "
            "texts: take the tokenizer's files out of a copy of that directory, to export that of the checkpoint"
        )
    return ExportTokenizer(directory=like, files=others)


def _tokenizer_of_checkpoint(tensors: CheckpointTensors) -> ExportTokenizer:
    directory = tensors.directory / TOKENIZER_DIRECTORY
    listed = {name: entry for name in TOKENIZER_FILES if (entry := tensors.manifest.files.get(_key(name))) is not None}
    for name, entry in listed.items():
        verify(directory / name, entry)
    unlisted = [name for name in TOKENIZER_FILES if name not in listed and (directory / name).exists()]
    note = None
    if unlisted:
        note = f"left out, as the manifest does not list them: {', '.join(_key(name) for name in unlisted)}"
        note += "" if listed else "; --like DIR takes a tokenizer from elsewhere"
    files = [directory / name for name in listed]
    return ExportTokenizer(directory=directory if listed else None, files=files, note=note)


def _key(name: str) -> str:
    return f"{TOKENIZER_DIRECTORY}/{name}"
