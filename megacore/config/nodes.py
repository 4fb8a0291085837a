"""What a launcher says in the environment, and the flags of torchrun that start a number of processes, on one node or
on several."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from megacore.config.messages import one_of
from megacore.config.numbers import parse_int
from megacore.errors import ConfigError

_USUAL_PER_NODE = 8
"""GPUs of a common node. A job that needs more processes than this probably needs several nodes."""


def launcher_number(
    name: str, default: int | None = None, *, low: int = 0, environment: Mapping[str, str] = os.environ
) -> int:
    """A number from the launcher's environment, at least `low`. `default`: where it is not set or empty; None: it must
    be. Raises ConfigError."""
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    with contextlib.suppress(ValueError):
        if (value := parse_int(text)) >= low:
            return value
    raise ConfigError([f"the environment's {name} is '{text}', not a number from {low}: start through torchrun"])


def launched_processes() -> int:
    """The number of processes that the launcher says it has started; 0 where it says none."""
    return _number("WORLD_SIZE")


def has_several_nodes() -> bool:
    """Whether the launcher says that the job has ranks on other nodes too."""
    return launched_processes() > _number("LOCAL_WORLD_SIZE") > 0


def torchrun_flags(*counts: int) -> str:
    """The flags that start any of these numbers of processes: `--nnodes 4 --nproc-per-node 8`. On several nodes each
    keeps its number of processes. On one node, a job that fits there stays there."""
    per_node = _number("LOCAL_WORLD_SIZE")
    has_nodes = has_several_nodes()
    if not has_nodes and max(counts) <= max(per_node, _USUAL_PER_NODE):
        return f"--nproc-per-node {one_of(counts)}"
    # On one node the launcher's number says only what was tried, not what a node holds.
    per_node = per_node if has_nodes else _USUAL_PER_NODE
    if all(count % per_node == 0 for count in counts):
        return f"--nnodes {one_of([count // per_node for count in counts])} --nproc-per-node {per_node}"
    return f"--nnodes N --nproc-per-node M with N x M = {one_of(counts)}"


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0
