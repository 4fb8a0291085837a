"""Megatron-LM's checkpoint files, mp_rank_XX[_YYY]/model_optim_rng.pt, which are pickles: only data is read. Besides
tensors and plain values, argparse.Namespace is loaded, in which Megatron-LM keeps its flags (pickled.py)."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megacore.convert.hf_directory import inside
from megacore.convert.pickled import load
from megacore.errors import CheckpointError

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?")
_POINTER = "latest_checkpointed_iteration.txt"
_DEEPEST = 32  # tables within tables, of which Megatron-LM has about ten


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """What one rank wrote."""

    path: Path
    tp: int
    pp: int
    args: dict[str, Any]
    version: float  # of the order of query, key and value
    iteration: int
    chunks: list[dict[str, Tensor]]  # the tensors of each of its virtual stages, by dotted name
    ep: int = 0

    def __post_init__(self) -> None:
        if tensors := [str(name) for name, value in self.args.items() if isinstance(value, Tensor)]:
            raise CheckpointError(f"{self.path}: in its args {tensors[0][:80]} is a tensor, and should be a setting")


def open_ranks(path: Path) -> list[list[RankFile]]:
    """The files of all ranks, [pp][ep tp]: those of the first expert-parallel rank, then those of the next one. Raises
    CheckpointError where files are missing, or hold what megacore does not load."""
    directory = iteration_directory(path)
    found: dict[tuple[str, ...], Path] = {}
    for entry in sorted(directory.iterdir()):
        if match := _RANK.fullmatch(entry.name):
            found[tuple(filter(None, match.groups()))] = _file(entry)
        elif entry.name.startswith("mp_rank_"):
            raise CheckpointError(f"{entry}: megacore reads mp_rank_TT[_PPP][_EEE], without further dimensions")
    if not found:
        raise CheckpointError(
            f"{directory} has no mp_rank_TT[_PPP][_EEE]/{FILE}: it is not in Megatron-LM's torch format"
        )
    loaded: dict[tuple[int, int, int], RankFile] = {}
    for numbers, file in found.items():
        rank = _load(file, numbers)
        loaded[rank.pp, rank.ep, rank.tp] = rank
    stages, experts, ranks = (max(key[i] for key in loaded) + 1 for i in range(3))
    for pp, ep, tp in itertools.product(range(stages), range(experts), range(ranks)):
        if (pp, ep, tp) not in loaded:
            where = f"tensor rank {tp}, pipeline rank {pp}" + (f", expert rank {ep}" if experts > 1 else "")
            raise CheckpointError(f"{directory} lacks the file of {where}")
    first = loaded[0, 0, 0]
    sizes = {"tensor_model_parallel_size": ranks, "pipeline_model_parallel_size": stages}
    for name, size in (sizes | {"expert_model_parallel_size": experts}).items():
        said = first.args.get(name, size)
        if said != size:
            raise CheckpointError(f"{directory} has files of {size} ranks, but its {name} is {said!r}")
    return [[loaded[pp, ep, tp] for ep in range(experts) for tp in range(ranks)] for pp in range(stages)]


def iteration_directory(path: Path) -> Path:
    """The directory of a step: the given one, or that which the file with the latest step names."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    pointer = path / _POINTER
    if not pointer.exists():
        return path
    text = inside(path, _POINTER).read_bytes()[:64].decode("ascii", "replace").strip()
    if text != "release" and not (text.isdecimal() and len(text) < 12):
        raise CheckpointError(f"{pointer} says {text!r}, not a number or release")
    directory = path / (text if text == "release" else f"iter_{int(text):07d}")
    if directory.is_symlink() or not directory.is_dir():
        raise CheckpointError(f"{pointer} says {text}, but {directory} is no directory")
    return directory


def _file(entry: Path) -> Path:
    if entry.is_symlink():
        raise CheckpointError(f"{entry} is a link: give a directory with the files themselves")
    return inside(entry, FILE)


def _load(path: Path, numbers: tuple[str, ...]) -> RankFile:
    state = load(path)
    about = described(state, path, version=0)
    names = ["model"] if "model" in state else [f"model{i}" for i in range(len(state)) if f"model{i}" in state]
    if not names:
        raise CheckpointError(f"{path} has no model")
    try:
        chunks = [dict(flat(state[name], "", set())) for name in names]
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    tp, pp, ep = _numbers_of([int(number) for number in numbers], about["args"])
    return RankFile(path=path, tp=tp, pp=pp, ep=ep, chunks=chunks, **about)


def described(state: Any, path: Path, *, version: float) -> dict[str, Any]:
    """The flags, the version and the step of a file, as a RankFile has them. `version`: of a file that says none.
    Raises CheckpointError where the file is not Megatron-LM's."""
    args = state.get("args") if isinstance(state, dict) else None
    if not isinstance(args, argparse.Namespace):
        raise CheckpointError(f"{path} has no args: it is not a checkpoint of Megatron-LM's")
    version, iteration = state.get("checkpoint_version", version), state.get("iteration", 0)
    if type(version) not in (int, float) or type(iteration) is not int:
        raise CheckpointError(f"{path}: checkpoint_version or iteration is not a number")
    return {"args": vars(args), "version": float(version), "iteration": iteration}


def _numbers_of(numbers: list[int], args: dict[str, Any]) -> tuple[int, int, int]:
    """The tensor-, pipeline- and expert-parallel rank of a file, of which its name has the first, and those of the
    others whose size is not 1."""
    tp, *others = numbers
    if len(others) == 2:
        return tp, others[0], others[1]
    if others and args.get("pipeline_model_parallel_size", 2) == 1 and args.get("expert_model_parallel_size", 1) != 1:
        return tp, 0, others[0]
    return tp, others[0] if others else 0, 0


def flat(value: Any, name: str, seen: set[int], depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Nested tables as dotted names; what is no tensor is not a weight. Raises ValueError where the tables are nested
    too deep, or one is there twice, perhaps in itself."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        if depth > _DEEPEST or id(value) in seen:
            raise ValueError(f"its tables are nested too deep, or one is there twice: {name[:80]}")
        seen.add(id(value))
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key), seen, depth + 1)
