"""A directory of Hugging Face transformers, as a stranger may have made it: nothing in it is run, nothing outside it is
read, and everything is checked before the first tensor is read. Weights are read only from safetensors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.checkpoint.tensor_header import StoredTensor, read_header
from megacore.config.messages import did_you_mean
from megacore.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megacore.errors import CheckpointError
from megacore.safe_json import read_object

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What belongs to a tokenizer; carried as it is.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
_READABLE = ("tokenizer.json", "tokenizer.model")  # the files that megacore's tokenizers are read from
_LARGEST_FILE = 1 << 28  # bytes of a file that is carried
_MOST_FILES = 4096  # of weights


@dataclass(frozen=True, kw_only=True)
class HFDirectory:
    """What a directory holds."""

    path: Path
    config: dict[str, Any]  # its config.json, without the fields to ignore
    tensors: dict[str, StoredTensor]  # where every tensor lies, by its stored name

    @property
    def where(self) -> str:
        return str(self.path / CONFIG)


def open_directory(path: Path, ignored: Sequence[str] = ()) -> HFDirectory:
    """Look at a directory of transformers, and check all that can be checked without reading a tensor. `ignored`:
    fields of config.json to leave out. Raises CheckpointError with what is wrong with it, by file."""
    config = read_config(path, ignored)
    files = _weight_files(path)
    tensors: dict[str, StoredTensor] = {}
    for name, listed in files.items():
        stored = read_header(inside(path, name))
        if listed is not None and (missing := sorted(listed - stored.keys())):
            raise CheckpointError(f"{path / INDEX} has {missing[0][:80]} in {name}, but it is not there")
        if listed is not None and (more := sorted(stored.keys() - listed)):
            raise CheckpointError(f"{path / name} has {more[0][:80]}, which {INDEX} does not list there")
        tensors |= stored
    return HFDirectory(path=path, config=config, tensors=_unpacked(tensors))


def _unpacked(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """With one tensor in the place of the blocks and scales of each that is in MXFP4."""
    found = dict(tensors)
    for name, blocks in tensors.items():
        whole = name.removesuffix("_blocks")
        scales, (experts, rows, *inner) = tensors.get(f"{whole}_scales"), (*blocks.shape, 0, 0)[:4]
        if whole == name or scales is None or {blocks.dtype, scales.dtype} != {"U8"}:
            continue
        if blocks.shape != (*scales.shape, 16) or len(blocks.shape) != 4:
            raise CheckpointError(f"{blocks.file}: {name[:80]} and its scales have shapes that do not fit each other")
        del found[name], found[scales.name]
        shape = experts, 32 * inner[0], rows
        found[whole] = StoredTensor(
            file=blocks.file, name=whole, dtype="BF16", shape=shape, start=0, packed=(blocks, scales)
        )
    return found


def read_config(path: Path, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """The config.json of a directory. `ignored`: fields to leave out (--ignore-config-field). Raises CheckpointError
    where there is no such directory or file, or it cannot be read, or it has no such field."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory: give a directory with {CONFIG} and safetensors files")
    if not (path / CONFIG).exists():
        raise CheckpointError(f"{path} has no {CONFIG}: give a directory of Hugging Face transformers")
    values = read_object(inside(path, CONFIG))
    if absent := [name for name in ignored if name not in values]:
        raise CheckpointError(
            f"--ignore-config-field {','.join(absent)[:200]}: {path / CONFIG} has no such field"
            f"{did_you_mean(absent[0][:80], values)}"
        )
    return {name: value for name, value in values.items() if name not in ignored}


def carried_tokenizer(directory: Path | None) -> Tokenizer | None:
    """The tokenizer in a directory; None where there is none, or none that megacore reads without transformers. Raises
    DataError where it is damaged."""
    if directory is None or not any((directory / name).exists() for name in _READABLE):
        return None
    return load_tokenizer(directory)


def inside(directory: Path, name: str) -> Path:
    """The file of a plain name in a directory. Raises CheckpointError where the name leads out of the directory,
    directly or by a link, or there is no such file."""
    if not name or "/" in name or "\\" in name or "\0" in name or name in (".", ".."):
        raise CheckpointError(f"{directory} names a file outside itself, {name[:80]!r}: it is not to be trusted")
    path = directory / name
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):
        raise CheckpointError(f"{path} is missing") from None
    # After links are followed: a link to, say, a key file would be copied into the export.
    if not any(target.is_relative_to(root) for root in _roots(directory.resolve())):
        raise CheckpointError(
            f"{path} is a link that leads out of the directory: copy the directory with its links followed (cp -rL), "
            "if you trust it"
        )
    if not target.is_file():
        raise CheckpointError(f"{path} is not a regular file")
    return path


def _roots(directory: Path) -> list[Path]:
    """Where links may lead: a snapshot of the hub's cache consists of links into the blobs of its model."""
    if directory.parent.name == "snapshots":
        return [directory, directory.parent.parent / "blobs"]
    return [directory]


def _weight_files(path: Path) -> dict[str, set[str] | None]:
    """File -> names of the tensors that it should hold, None where no index says it."""
    if (path / INDEX).exists():
        index = read_object(inside(path, INDEX))
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{path / INDEX} has no weight_map from names to files")
        count = len(set(weight_map.values()))
        if not 0 < count <= _MOST_FILES:
            raise CheckpointError(f"{path / INDEX} names {count} files, and should name 1 to {_MOST_FILES}")
        files: dict[str, set[str] | None] = {}
        for name, file in weight_map.items():
            listed = files.setdefault(file, set())
            assert listed is not None
            listed.add(name)
        for file in files:
            if not file.endswith(".safetensors"):
                raise CheckpointError(f"{path / INDEX} names {file[:80]!r}, which is not a .safetensors file")
        return files
    if (path / SINGLE).exists():
        return {SINGLE: None}
    pickles = [name.name for name in path.iterdir() if name.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl")]
    if pickles:
        raise CheckpointError(
            f"{path} has its weights in {sorted(pickles)[0]}, a pickle, which can run any code when it is read: get "
            f"{SINGLE} of the same model, or, if you trust the file, load it with transformers on an isolated machine "
            "and save it again with save_pretrained, which writes safetensors"
        )
    raise CheckpointError(f"{path} has no {SINGLE} and no {INDEX}")


def present(directory: Path, names: tuple[str, ...]) -> list[Path]:
    """Those of some files that a directory has, each checked. Raises CheckpointError where one leads out of the
    directory, or is far too large."""
    paths = [inside(directory, name) for name in names if os.path.lexists(directory / name)]
    for path in paths:
        if path.stat().st_size > _LARGEST_FILE:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes, too many for such a file")
    return paths


def carry(files: list[Path], target: Path) -> None:
    """Copy small files, with the content of links."""
    target.mkdir(exist_ok=True)
    for path in files:
        shutil.copyfile(path, target / path.name)
