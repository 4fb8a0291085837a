"""What is measured: sizes of the model, ways to divide it, and what a rank of a side is told. Standard library alone:
the ranks of a peer import this in an environment without megacore's requirements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Schedule = Literal["default", "1f1b", "interleaved", "zero-bubble"]
SIDES = ("megacore", "torch", "deepspeed", "megatron-core")
PEERS = SIDES[1:]
# Products of square matrices that each rank computes in a step of the measurement of the machine's limit.
PRODUCTS, PRODUCTS_SIZE = 20, 1024
PRODUCTS_FLOPS = 2.0 * PRODUCTS_SIZE**3 * PRODUCTS
# Of AdamW, on all sides. Gradients are not clipped.
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
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


# Way to divide -> its name, and what a layout has. Of n ranks, REST are those that the other groups leave over.
REST = 0
_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp": ("data parallel", {"dp": REST}),
    "zero1": ("ZeRO 1", {"dp": REST, "zero": 1}),
    "zero2": ("ZeRO 2", {"dp": REST, "zero": 2}),
    "zero3": ("ZeRO 3", {"dp": REST, "zero": 3}),
    "tp": ("tensor parallel", {"tp": REST}),
    "tp-sp": ("tensor and sequence parallel", {"tp": REST, "sequence_parallel": True}),
    "pp": ("pipeline, 1F1B", {"pp": REST}),
    "pp-default": ("pipeline, default schedule", {"pp": REST, "schedule": "default"}),
    "pp-interleaved": ("pipeline, interleaved", {"pp": REST, "schedule": "interleaved"}),
    "pp-zero-bubble": ("pipeline, zero-bubble", {"pp": REST, "schedule": "zero-bubble"}),
    "tp-dp": ("tensor x data parallel", {"tp": 2, "dp": REST}),
    "tp-zero1": ("tensor parallel x ZeRO 1", {"tp": 2, "dp": REST, "zero": 1}),
    "tp-zero3": ("tensor parallel x ZeRO 3", {"tp": 2, "dp": REST, "zero": 3}),
    "pp-dp": ("pipeline x data parallel, 1F1B", {"pp": 2, "dp": REST}),
    "pp-dp-default": ("pipeline x data parallel, default schedule", {"pp": 2, "dp": REST, "schedule": "default"}),
    "pp-zero1": ("pipeline x ZeRO 1, 1F1B", {"pp": 2, "dp": REST, "zero": 1}),
    "tp-pp": ("tensor parallel x pipeline, 1F1B", {"tp": 2, "pp": REST}),
}
KINDS = tuple(_WAYS)
NAMES = {"one": "one process", **{kind: name for kind, (name, _) in _WAYS.items()}}
ONE = Layout(kind="one")


def layout_of(kind: str, ranks: int) -> Layout:
    """A way to divide a model over so many ranks."""
    rest = ranks // 2 if is_combination(kind) else ranks
    given: dict[str, Any] = {name: value or rest for name, value in _WAYS[kind][1].items()}
    return Layout(kind=kind, **given)


def is_combination(kind: str) -> bool:
    """Whether two ways are combined, which takes four ranks or more."""
    return bool({"tp", "pp"} & {name for name, value in _WAYS[kind][1].items() if value == 2})


def layouts(kinds: Sequence[str], ranks: int) -> Iterator[Layout]:
    """The layouts of one number of ranks."""
    if ranks == 1:
        yield ONE
        return
    for kind in kinds:
        if not is_combination(kind) or (ranks >= 4 and ranks % 2 == 0):
            yield layout_of(kind, ranks)


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
    """

    side: str
    sizes: Sizes
    layout: Layout
    stages: Sequence[Sequence[int]]
    tokens: str
    weights: str | None
    directory: str

    @property
    def micro_batch(self) -> int:
        """Sequences of a microbatch."""
        return self.sizes.batch // self.layout.dp // self.layout.microbatches
