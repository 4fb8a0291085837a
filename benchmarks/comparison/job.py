"""What is measured: sizes of the model, ways to divide it, and what a rank of a side is told. Standard library alone:
the ranks of a peer import this in an environment without megacore's requirements.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

Schedule = Literal["default", "1f1b", "interleaved", "zero-bubble"]
SIDES = ("megacore", "torch", "deepspeed", "megatron-core")
PEERS = SIDES[1:]
# Products of square matrices that each rank computes in a step of the measurement of the machine's limit.
PRODUCTS, PRODUCTS_SIZE = 20, 1024
PRODUCTS_FLOPS = 2.0 * PRODUCTS_SIZE**3 * PRODUCTS
# One training step. Returns the mean loss over what this rank has computed, or None where another pipeline rank has it.
Step = Callable[[], float | None]


class Unsupported(Exception):
    """A framework does not offer this way to divide a model."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A GPT-2 with an untied head and no dropout, and its batch."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    seq: int = 256
    vocab: int = 8192
    batch: int = 8

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        h = self.hidden
        return self.layers * (12 * h * h + 13 * h) + 2 * self.vocab * h + self.seq * h + 2 * h

    @property
    def step_flops(self) -> float:
        """Floating-point operations of the model in a step, attention in full (Narayanan et al. 2021, section 5.1)."""
        h = self.hidden
        per_token = self.layers * (24 * h * h + 4 * self.seq * h) + 2 * h * self.vocab
        return 3.0 * self.tokens * per_token


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to divide a model over ranks.

    Attributes:
        kind: name of the way, whatever the number of ranks.
        tp, pp, dp: ranks of each group.
        zero: ZeRO stage.
        sequence_parallel: divide the norms of tensor-parallel blocks by positions.
        schedule: of the pipeline. default: what each framework takes by itself, 1F1B in all but megacore.
    """

    kind: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"

    @property
    def ranks(self) -> int:
        """Processes that it takes."""
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        """In words: `tp on 2 ranks`."""
        return f"{self.kind} on {self.ranks} rank" + "s" * (self.ranks > 1)

    @property
    def virtual_stages(self) -> int:
        """Stages per rank."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def microbatches(self) -> int:
        """Per step and replica."""
        return 4 if self.pp > 1 else 1


# Way to divide -> its name, and what a layout of n ranks has. Combinations give two ranks to each group but the last.
_WAYS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "dp": ("data parallel", lambda n: {"dp": n}),
    "zero1": ("ZeRO 1", lambda n: {"dp": n, "zero": 1}),
    "zero2": ("ZeRO 2", lambda n: {"dp": n, "zero": 2}),
    "zero3": ("ZeRO 3", lambda n: {"dp": n, "zero": 3}),
    "tp": ("tensor parallel", lambda n: {"tp": n}),
    "tp-sp": ("tensor and sequence parallel", lambda n: {"tp": n, "sequence_parallel": True}),
    "pp": ("pipeline, 1F1B", lambda n: {"pp": n}),
    "pp-default": ("pipeline, default schedule", lambda n: {"pp": n, "schedule": "default"}),
    "pp-interleaved": ("pipeline, interleaved", lambda n: {"pp": n, "schedule": "interleaved"}),
    "pp-zero-bubble": ("pipeline, zero-bubble", lambda n: {"pp": n, "schedule": "zero-bubble"}),
    "tp-dp": ("tensor x data parallel", lambda n: {"tp": 2, "dp": n // 2}),
    "tp-zero1": ("tensor parallel x ZeRO 1", lambda n: {"tp": 2, "dp": n // 2, "zero": 1}),
    "tp-zero3": ("tensor parallel x ZeRO 3", lambda n: {"tp": 2, "dp": n // 2, "zero": 3}),
    "pp-dp": ("pipeline x data parallel, 1F1B", lambda n: {"pp": 2, "dp": n // 2}),
    "pp-dp-default": (
        "pipeline x data parallel, default schedule",
        lambda n: {"pp": 2, "dp": n // 2, "schedule": "default"},
    ),
    "pp-zero1": ("pipeline x ZeRO 1, 1F1B", lambda n: {"pp": 2, "dp": n // 2, "zero": 1}),
    "tp-pp": ("tensor parallel x pipeline, 1F1B", lambda n: {"tp": 2, "pp": n // 2}),
}
NAMES = {"one": "one process", **{kind: name for kind, (name, _) in _WAYS.items()}}


def _layout(kind: str, ranks: int) -> Layout:
    return Layout(kind=kind, **_WAYS[kind][1](ranks))


KINDS: dict[str, Callable[[int], Layout]] = {kind: partial(_layout, kind) for kind in _WAYS}
ONE = Layout(kind="one")


def is_combination(kind: str) -> bool:
    """Whether two ways are combined, which takes four ranks or more."""
    return "-" in kind and KINDS[kind](8).ranks != max(KINDS[kind](8).tp, KINDS[kind](8).pp, KINDS[kind](8).dp)


def rank_counts(most: int) -> list[int]:
    """Powers of two below the largest number of ranks, and that."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def layouts(kinds: Sequence[str], ranks: int) -> Iterator[Layout]:
    """The layouts of one number of ranks."""
    if ranks == 1:
        yield ONE
        return
    for kind in kinds:
        if not is_combination(kind) or (ranks >= 4 and ranks % 2 == 0):
            yield KINDS[kind](ranks)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank of a side is told.

    Attributes:
        side: one of SIDES, or `products`: the machine's limit.
        sizes: of the model.
        layout: how it is divided.
        stages: layers [start, stop) of every pipeline stage, of all sides alike; layer 0 is the embedding, the last one
            the head.
        tokens: file of token ids, int64 [samples, s + 1].
        weights: file of the initial weights by megacore's names; None: drawn.
        directory: where a run may write.
        lr, betas, eps, weight_decay: of AdamW. Gradients are not clipped.
    """

    side: str
    sizes: Sizes
    layout: Layout
    stages: tuple[tuple[int, int], ...]
    tokens: Path
    weights: Path | None
    directory: Path
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    @property
    def micro_batch(self) -> int:
        """Sequences of a microbatch."""
        return self.sizes.batch // self.layout.dp // self.layout.microbatches

    def to_json(self) -> str:
        """The job as text."""
        return json.dumps(asdict(self), default=str)

    @staticmethod
    def from_json(text: str) -> Job:
        """The job of a text."""
        table = json.loads(text)
        weights = table["weights"]
        return Job(
            **{
                **table,
                "sizes": Sizes(**table["sizes"]),
                "layout": Layout(**table["layout"]),
                "stages": tuple((start, stop) for start, stop in table["stages"]),
                "tokens": Path(table["tokens"]),
                "weights": None if weights is None else Path(weights),
                "directory": Path(table["directory"]),
                "betas": tuple(table["betas"]),
            }
        )
