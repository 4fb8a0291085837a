"""Experts as transformers 5 has them in memory, stacked, and as its directories have them, each with matrices apart.

Checkpoints of its parameters, such as those of FSDP2 and DeepSpeed, have the former:

    model.layers.3.mlp.experts.gate_up_proj [E, 2 f, h], model.layers.3.mlp.experts.down_proj [E, h, f]

Legend: E experts, h hidden size, f inner width of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

Read = Callable[[], Tensor]
Source = Mapping[str, tuple[torch.dtype, tuple[int, ...], Read]]  # name -> dtype, shape, and how it is read
_STACKED = re.compile(r"(?P<before>.*\.)mlp\.experts\.(?P<kind>gate_up_proj|down_proj)")
_ROUTER = ".mlp.gate.weight"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_OF_MIXTRAL = ("w1", "w3", "w2")
_STORED_SO = ("gpt_oss",)  # their directories have what they have in memory
_BLOCK_OF_MIXTRAL = ".block_sparse_moe."


def experts_apart(tensors: Source, model_type: str) -> Source:
    """Tensors by the names of a directory of transformers; those that have them already stay as they are. `tensors`: by
    the names that parameters have in memory."""
    if model_type in _STORED_SO:
        return tensors
    is_mixtral = model_type == "mixtral"
    gate, up, down = _OF_MIXTRAL if is_mixtral else _PROJECTIONS
    last, found = _LastRead(), dict[str, tuple[torch.dtype, tuple[int, ...], Read]]()
    for name, (dtype, shape, read) in tensors.items():
        match = _STACKED.fullmatch(name)
        if match is None or len(shape) != 3:
            ours = name.replace(".mlp.", _BLOCK_OF_MIXTRAL) if is_mixtral and name.endswith(_ROUTER) else name
            found[ours] = dtype, shape, read
            continue
        experts, rows, columns = shape
        cuts = {gate: (0, rows // 2), up: (rows // 2, rows)} if match["kind"] == "gate_up_proj" else {down: (0, rows)}
        block = f"{match['before'].rstrip('.')}{_BLOCK_OF_MIXTRAL if is_mixtral else '.mlp.'}experts"
        for expert in range(experts):
            for matrix, (first, end) in cuts.items():
                part = partial(last.part, name, read, expert, slice(first, end))
                found[f"{block}.{expert}.{matrix}.weight"] = dtype, (end - first, columns), part
    return found


class _LastRead:
    """Reads parts of tensors, and of several parts of one tensor that follow each other the tensor only once."""

    def __init__(self) -> None:
        self._name, self._value = "", torch.empty(0)

    def part(self, name: str, read: Read, expert: int, rows: slice) -> Tensor:
        """[E, r, c] -> some rows of an expert, [., c]"""
        if name != self._name:
            self._name, self._value = name, read()
        return self._value[expert, rows].contiguous()


def experts_stacked(tensors: Mapping[str, Tensor], model_type: str) -> Iterator[tuple[str, Tensor]]:
    """The reverse of `experts_apart`. `tensors`: by the names of a directory."""
    if model_type in _STORED_SO:
        yield from tensors.items()
        return
    is_mixtral = model_type == "mixtral"
    block = re.escape(_BLOCK_OF_MIXTRAL if is_mixtral else ".mlp.")
    names = _OF_MIXTRAL if is_mixtral else _PROJECTIONS
    pattern = re.compile(rf"(.*){block}experts\.(\d+)\.({'|'.join(names)})\.weight")
    layers: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, value in tensors.items():
        if match := pattern.fullmatch(name):
            layers.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = value
        else:
            is_router = is_mixtral and name.endswith(f"{_BLOCK_OF_MIXTRAL}gate.weight")
            yield name.replace(_BLOCK_OF_MIXTRAL, ".mlp.") if is_router else name, value
    for layer, kinds in layers.items():
        gate, up, down = (torch.stack([matrices for _, matrices in sorted(kinds[name].items())]) for name in names)
        yield f"{layer}.mlp.experts.gate_up_proj", torch.cat([gate, up], dim=1)
        yield f"{layer}.mlp.experts.down_proj", down
