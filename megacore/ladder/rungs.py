"""The file of a ladder, `ladder.json`, and the flags of its runs, which those of a proposal are like. No torch."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megacore.config import Config
from megacore.config.flags import read_flags
from megacore.config.model import ResolvedModel
from megacore.files import replace_bytes
from megacore.ladder.law import Law, Point

STYLE: Mapping[str, str] = {
    "normalization": "--normalization RMSNorm",
    "activation": "--activation swiglu",
    "disable_bias_linear": "--disable-bias-linear",
    "position_embedding_type": "--position-embedding-type rope",
}
"""What models of a ladder and of a proposal have where nothing else is given: blocks as in Llama."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """What `ladder.json` has of finished runs.

    Attributes:
        words: flags of each run, but for its width and length.
        widths: hidden sizes.
        steps: of the longest run of each width; none before the speeds were measured.
        batch_tokens: of a step.
        points: parameters without tables, tokens and held-out loss of each run, the narrow models first.
        law: None: some runs are missing.
    """

    words: Sequence[str]
    widths: Sequence[int]
    steps: Sequence[int] = ()
    batch_tokens: int = 0
    points: Sequence[Point] = ()
    law: Law | None = None

    @property
    def head_size(self) -> int:
        return min(math.gcd(*self.widths), 128)

    @property
    def most(self) -> Point:
        """The run of most operations."""
        return max(self.points, key=lambda point: point.parameters * point.tokens)


def width_flags(width: int, ladder: Ladder) -> list[str]:
    """Flags of a model of a width."""
    return [
        *f"--hidden-size {width} --num-attention-heads {width // ladder.head_size}".split(),
        *f"--ffn-hidden-size {inner_size(width)} --mup-base-width {ladder.widths[0]}".split(),
    ]


def inner_size(width: int) -> int:
    """Of a gated MLP: 8/3 of the width, as in Llama."""
    unit = 64 if width >= 512 else 8  # wide products are fastest in whole tiles
    return unit * round(8 * width / 3 / unit)


def without_tables(parameters: int, model: ResolvedModel) -> int:
    """Those of the blocks. The tables of tokens are most of a narrow model and little of a wide one: a law of all
    parameters would be one of the tables (Kaplan et al. 2020, arXiv 2001.08361, leave them out as well)."""
    return parameters - model.vocab_size * model.hidden_size * (1 + model.untie_embeddings_and_output_weights)


def schedule_flags(steps: int, longest: int) -> list[str]:
    """Flags of a run that decays over its last fifth. `longest`: steps of the run with whose rise it has in common."""
    return [
        *f"--train-iters {steps} --lr-decay-style WSD wsd-decay-iters={max(steps // 5, 1)}".split(),
        *f"wsd-decay-style=linear --min-lr 0 --lr-warmup-iters {max(longest // 50, 1)}".split(),
    ]


def with_usual(words: Sequence[str], usual: Mapping[str, str] = STYLE) -> list[str]:
    """The flags of a run, with those that are usual where they give no others."""
    given = read_flags(words, Config)
    named = given.values.keys() | given.unread
    return [*words, *(word for name, flags in usual.items() if name not in named for word in flags.split())]


def read_ladder(text: str) -> Ladder:
    """Of argparse: a finished ladder by its file."""
    way = "make it with tools/ladder.py --output-dir ladder, and give ladder/ladder.json"
    try:
        ladder = ladder_of(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {error.strerror}: {way}") from None
    except (ValueError, TypeError, KeyError):
        raise argparse.ArgumentTypeError(f"{text} is no ladder: {way}") from None
    if ladder.law is None:
        raise argparse.ArgumentTypeError(f"{text} lacks runs: repeat the command of tools/ladder.py, which goes on")
    return ladder


def ladder_of(file: Path) -> Ladder:
    """A ladder by its file, which some runs may still lack."""
    fields = json.loads(file.read_text(encoding="utf-8"))
    law = None if fields["law"] is None else Law(**fields["law"])
    return Ladder(**{**fields, "law": law, "points": [Point(*point) for point in fields["points"]]})


def write_ladder(ladder: Ladder, file: Path) -> None:
    """Replace the file at once, or not at all."""
    replace_bytes(file, (json.dumps(asdict(ladder), indent=1) + "\n").encode())
