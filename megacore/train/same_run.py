"""Refuses a job whose ranks have different flags, data or code.

Such a job hangs or, worse, trains something that nobody asked for. Every rank collects facts of its run by name. The
ranks compare one digest of them, and exchange the facts only if the digests differ. Paths may differ between nodes: of
a file or directory only its content is compared, and whether it was given. The checkpoint of --load is compared where
it is read (checkpoint/load.py).
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megacore
from megacore.checkpoint.directory import MANIFEST_NAME
from megacore.config import ResolvedConfig, sections_of
from megacore.config.dimensions import degrees_of, describe_rank
from megacore.config.fields import field_infos, flag
from megacore.config.messages import ranks_in_words
from megacore.config.sections import AUTO
from megacore.data.gpt.build import tokenizer_of
from megacore.data.indexed.reader import bin_path, idx_path
from megacore.errors import ConfigError, DataError
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Group
from megacore.plan.memory import PlannedLayer

Facts = dict[str, str]  # name -> value, both as messages show them

_PATHS = (
    "data_path",
    "tokenizer",
    "data_cache_path",
    "output_dir",
    "load",
    "init_from_hf",
    "schedule_csv",
    "tensorboard_dir",
)
_READ_WHOLE = 1 << 26  # bytes; of a larger file only samples are read
_SAMPLE = 1 << 16  # bytes
_SAMPLES = 64  # evenly spaced, the first and the last at the ends of the file
_MOST = 12  # differences that one message names


def refuse_different_ranks(config: ResolvedConfig, world: Group, layers: Sequence[PlannedLayer] = ()) -> None:
    """Compare configuration, data and code of all ranks, which call this together before training.

    Args:
        config: resolved.
        world: all ranks.
        layers: the whole model, where it does not follow from the configuration.

    Raises:
        ConfigError: a rank differs from rank 0; on every rank, with the same text.
    """
    if world.size == 1:
        return
    local = facts(config) | {f"layer {layer.name!r}": f"of {layer.parameters} parameters" for layer in layers}
    digests = all_gather_objects(hashlib.sha256(json.dumps(local, sort_keys=True).encode()).hexdigest(), world)
    if len(set(digests)) > 1:
        raise ConfigError(differences(all_gather_objects(local, world)))


def facts(config: ResolvedConfig) -> Facts:
    """The facts that must be equal on all ranks."""
    data = config.data
    result = dict(_settings(config))
    prefixes, weights = data.blend() if data.data_path else ((), None)
    result["weights of --data-path"] = "none" if weights is None else " ".join(map(str, weights))
    for number, prefix in enumerate(prefixes, 1):
        for path in (idx_path(prefix), bin_path(prefix)):
            result[f"--data-path, {path.suffix} of dataset {number}"] = _file(path)
    try:
        tokenizer = tokenizer_of(config)
        result["content of --tokenizer"] = "none" if tokenizer is None else tokenizer.fingerprint
    except DataError as error:
        result["content of --tokenizer"] = str(error)
    if config.parallel.schedule_csv is not None:
        result["content of --schedule-csv"] = _file(Path(config.parallel.schedule_csv))
    if config.checkpoint.init_from_hf is not None:
        for path in sorted(Path(config.checkpoint.init_from_hf).glob("*.*")):
            result[f"{path.name} of --init-from-hf"] = _file(path)
    program = getattr(sys.modules["__main__"], "__file__", None)  # none in an interactive session
    result["the program's source"] = "none" if program is None else f"{Path(program).name} {_digest(Path(program))}"
    package = Path(megacore.__file__).parent
    kernels = package / "kernels"  # in a checkout a link, which rglob does not follow
    for path in sorted({*package.rglob("*.py"), *kernels.rglob("*.py")}):
        result[f"megacore's {path.relative_to(package)}"] = _digest(path)
    versions = {"megacore": megacore.__version__, "torch": torch.__version__, "numpy": np.__version__}
    return result | {f"version of {name}": str(version) for name, version in versions.items()}


def differences(everyone: list[Facts]) -> list[str]:
    """The differences from rank 0, one line per fact and value.

    Args:
        everyone: the facts of every rank.
    """
    first = everyone[0]
    names = list(dict.fromkeys(name for of_rank in everyone for name in of_rank))
    lines = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(everyone):
            ranks_of.setdefault(of_rank.get(name, "missing"), []).append(rank)
        expected = first.get(name, "missing")
        lines += [
            f"{_who(ranks, first)}: {name} {value}, rank 0: {expected}"
            for value, ranks in ranks_of.items()
            if value != expected
        ]
    more = [f"and {len(lines) - _MOST} more differences"] if len(lines) > _MOST else []
    return [*lines[:_MOST], *more, "start every rank, on every node, with the same flags, data and installation"]


def _settings(config: ResolvedConfig) -> Iterator[tuple[str, str]]:
    for section in sections_of(type(config)):
        values = getattr(config, section)
        for name in field_infos(type(values)):
            value = getattr(values, name)
            yield flag(name), _given(name, value) if name in _PATHS else str(value)


def _given(name: str, path: Any) -> str:
    if path is None or path == ():
        return "not given"
    if name != "load":
        return "given"
    if path == AUTO:
        return AUTO
    return "a checkpoint" if (Path(path) / MANIFEST_NAME).is_file() else "a directory of checkpoints"


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        return f"{path}: {error.strerror}"


def _file(path: Path) -> str:
    """A file's size and a checksum: of all of it, or of samples where it is large."""
    try:
        with path.open("rb") as file:
            size, checksum = path.stat().st_size, 0
            spaced = ((size - _SAMPLE) * n // (_SAMPLES - 1) for n in range(_SAMPLES))
            for start in range(0, size, _SAMPLE) if size <= _READ_WHOLE else spaced:
                file.seek(start)
                checksum = zlib.crc32(file.read(_SAMPLE), checksum)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return f"{size} bytes ({checksum:08x})"


def _who(ranks: list[int], first: Mapping[str, str]) -> str:
    """Ranks in words, the first of them with its coordinates in the layout of rank 0."""
    coordinates = describe_rank(ranks[0], degrees_of(lambda field: int(first[flag(field)])))
    return f"{ranks_in_words(ranks)} ({coordinates if len(ranks) == 1 else f'the first: {coordinates}'})"
