"""Megatron-LM's checkpoints in the torch_dist format, which any parallel form may have written: tensors in the files of
torch.distributed.checkpoint under Megatron core's names, those of equal layers as one with the layers along its first
dimension, or each with its layer's number; the flags in common.pt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megacore.convert.dcp_files import INDEX, TensorInPieces, open_dcp
from megacore.convert.hf_directory import inside
from megacore.convert.megatron_files import RankFile, described, iteration_directory
from megacore.convert.pickled import load
from megacore.errors import CheckpointError

_COMMON = "common.pt"
_NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state", "opt_param_scheduler")
_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)  # fmt: skip
_STACKED = re.compile(r"((?:.*\.)?layers)\.(?!\d)(.+)")
_PREFIX = re.compile(r"(?:model\d*|module)\.")


def is_torch_dist(path: Path) -> bool:
    """Whether a directory of Megatron-LM's is in this format."""
    return path.is_dir() and (iteration_directory(path) / INDEX).is_file()


def open_torch_dist(path: Path) -> list[list[RankFile]]:
    """The model as that of one rank, [0][0]. `path`: an iter_NNNNNNN directory, or the one above it. Raises
    CheckpointError where files are missing or damaged, or hold what megacore does not load."""
    directory = iteration_directory(path)
    about = described(load(inside(directory, _COMMON)), directory / _COMMON, version=3.0)
    chunk: dict[str, Tensor] = {}
    for name, stored in open_dcp(directory).items():
        if name.startswith(_NOT_WEIGHTS) or name.endswith("_extra_state") or "/shard_" in name:
            continue
        for ours, tensor in _tensors(_PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name, stored):
            if ours in chunk:
                raise CheckpointError(f"{directory} has {ours[:120]} twice")
            chunk[ours] = tensor
    about["args"] |= dict.fromkeys(_SIZES, 1)
    return [[RankFile(path=directory, tp=0, pp=0, chunks=[chunk], **about)]]


def _tensors(name: str, stored: TensorInPieces) -> Iterator[tuple[str, Tensor]]:
    whole = stored.read()
    match = _STACKED.fullmatch(name)
    if match is None:
        yield name, whole
        return
    for layer, tensor in enumerate(torch.unbind(whole)):
        yield f"{match[1]}.{layer}.{match[2]}", tensor
