"""What a comparison has measured, and its tables in Markdown."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.comparison.job import NAMES, SIDES, Layout, Sizes
from tools.generated_pages import bring_up_to_date, table

MIB = 1 << 20
LABELS = {"megacore": "megacore", "torch": "torch", "deepspeed": "DeepSpeed", "megatron-core": "Megatron-Core"}
# Losses of two frameworks that train the same model in fp32 differ by less, relative, after some dozen steps.
AGREEMENT = 1e-4


@dataclass(frozen=True, kw_only=True)
class Row:
    """One framework on one layout.

    Attributes:
        side, implementation: the framework, and what of it.
        layout: how the model is divided.
        seconds: per step, round by round; rounds of the sides of a layout alternate.
        limit: FLOP/s of matrix products on all ranks together, in the same rounds.
        peak: bytes of the fullest rank, without what it had in memory before the model.
        losses: of all steps.
    """

    side: str
    implementation: str
    layout: Layout
    seconds: list[float]
    limit: float
    peak: int
    losses: list[float]


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest model of one framework on one layout.

    Attributes:
        side: the framework.
        layout: how the model is divided.
        layers, parameters: of the model.
        peak: bytes of the fullest rank, measured.
    """

    side: str
    layout: Layout
    layers: int
    parameters: int
    peak: int


@dataclass(kw_only=True)
class Results:
    """A comparison.

    Attributes:
        date, machine, versions: when, on what, with what; in words.
        sizes: of the model that is timed.
        rows: what was timed.
        largest_sizes, limit_bytes: of the search for the largest model, and bytes per rank that it may take.
        largest: what was found.
        missing: `framework, layout` -> why there is no figure.
    """

    date: str
    machine: str
    versions: dict[str, str]
    sizes: Sizes
    rows: list[Row] = field(default_factory=list)
    largest_sizes: Sizes | None = None
    limit_bytes: int = 0
    largest: list[Largest] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def row(self, side: str, layout: Layout) -> Row | None:
        """The figures of one framework on one layout."""
        return next((row for row in self.rows if (row.side, row.layout) == (side, layout)), None)

    def compared(self) -> Iterator[tuple[Row, Row]]:
        """megacore's row and another framework's, of each layout that both have."""
        for row in self.rows:
            ours = self.row("megacore", row.layout)
            if ours is not None and row is not ours:
                yield ours, row

    def disagreements(self) -> Iterator[tuple[Row, float]]:
        """Rows whose losses differ from megacore's, and by how much."""
        for ours, row in self.compared():
            if (apart := difference(ours.losses, row.losses)) > AGREEMENT:
                yield row, apart


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest relative difference of two series of losses, of as many steps as both have; infinite where one is NaN."""
    apart = [abs(b / a - 1) for a, b in zip(ours, theirs, strict=False)]
    return math.inf if any(map(math.isnan, apart)) else max(apart, default=0.0)


def ratio(ours: Row, theirs: Row) -> float:
    """How much faster ours is: the median over the rounds."""
    return statistics.median(b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True))


# ---- Markdown --------------------------------------------------------------------------------------------------------


def markdown(results: Results) -> str:
    """The comparison as a section of a page."""
    parts = (_head(results), _figures(results), _largest(results), _notes(results))
    return "\n".join(_wrapped(line) for line in "\n\n".join(part for part in parts if part).split("\n"))


def _wrapped(line: str) -> str:
    """A paragraph or an item of a list in lines of the pages' width; rows of tables stay as they are."""
    if line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _head(results: Results) -> str:
    s, versions = results.sizes, ", ".join(f"{name} {version}" for name, version in results.versions.items())
    apart = [difference(ours.losses, row.losses) for ours, row in results.compared()]
    same = f" Their losses agree within {max(apart):.0e} (relative)." if apart else ""
    return (
        f"Measured on {results.date}: {results.machine}, {versions}. GPT-2 with {s.layers} layers, hidden size "
        f"{s.hidden}, sequence length {s.seq}, vocabulary {s.vocab:,}, an untied head and no dropout "
        f"({s.parameters / 1e6:.1f}M parameters); {s.batch} sequences = {s.tokens:,} tokens per step, 4 microbatches "
        "in pipelines; AdamW, fp32, no clipping. All frameworks have the same initial weights, tokens and "
        f"stages.{same}"
    )


def _figures(results: Results) -> str:
    sides = [side for side in SIDES if any(row.side == side for row in results.rows)]
    rows, shares = [], []
    for ours in (row for row in results.rows if row.side == "megacore"):
        found = [results.row(side, ours.layout) for side in sides]
        rate = 1 / statistics.median(ours.seconds)  # steps per second
        cells = [NAMES[ours.layout.kind], degrees(ours.layout), f"{results.sizes.tokens * rate:,.0f}"]
        cells += ["" if row is None else f"{ratio(ours, row):.2f}" for row in found[1:]]
        rows.append(cells + ["" if row is None else f"{row.peak / MIB:,.0f}" for row in found])
        shares.append(results.sizes.step_flops * rate / ours.limit)
    text = (
        "megacore's tokens/s, and how many times as fast it is as each framework (median of the rounds). MiB: the "
        "peak of the fullest rank, without what its process had before the model."
    )
    if shares:
        text += (
            f" megacore's model FLOP/s are {min(shares):.0%} to {max(shares):.0%} of those of large matrix products on "
            "as many processes."
        )
    head = ["", "ranks", "tokens/s", *(f"/ {LABELS[side]}" for side in sides[1:])]
    return f"{text}\n\n{table([*head, *(f'MiB, {LABELS[side]}' for side in sides)], rows)}"


def _largest(results: Results) -> str:
    if not results.largest or results.largest_sizes is None:
        return ""
    s = results.largest_sizes
    found = {(one.layout, one.side): f"{one.parameters / 1e6:,.0f}M ({one.layers})" for one in results.largest}
    sides = [side for side in SIDES if any(side == of for _, of in found)]
    rows = [
        [NAMES[layout.kind], degrees(layout), *(found.get((layout, side), "") for side in sides)]
        for layout in dict.fromkeys(one.layout for one in results.largest)
    ]
    text = (
        f"The largest model whose fullest rank stays below {results.limit_bytes / MIB:,.0f} MiB in two steps: hidden "
        f"size {s.hidden}, sequence length {s.seq}, vocabulary {s.vocab:,}, {s.batch} sequences per step, and as many "
        "layers (in brackets) as fit."
    )
    return f"{text}\n\n{table(['', 'ranks', *(LABELS[side] for side in sides)], rows)}"


def _notes(results: Results) -> str:
    names: dict[str, list[str]] = {}
    for row in results.rows:
        if row.side == "torch" and row.layout.ranks > 1:
            names.setdefault(row.implementation.removeprefix("torch: "), []).append(NAMES[row.layout.kind])
    lines = [f"- {'; '.join(dict.fromkeys(kinds))}: {name}" for name, kinds in names.items()]
    parts = ["Parts of torch:\n\n" + "\n".join(lines)] if lines else []
    if results.missing:
        parts.append(f"Not measured (numbers of ranks in brackets):\n\n{_missing(results.missing)}")
    return "\n\n".join(parts)


def _missing(reasons: Mapping[str, str]) -> str:
    """One item for all layouts of a framework that have one reason."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for what, why in reasons.items():
        side, _, layout = what.rpartition(", ")
        kind, _, ranks = layout.removesuffix(" ranks").partition(" on ")
        groups.setdefault((side, why), {}).setdefault(kind, []).append(ranks)
    lines = []
    for (side, why), kinds in groups.items():
        named = [f"{kind} ({', '.join(ranks)})" if any(ranks) else kind for kind, ranks in kinds.items()]
        lines.append(f"- {', '.join([side, *named] if side else named)}: {why}")
    return "\n".join(lines)


def degrees(layout: Layout) -> str:
    """The number of ranks, as a product where it is one."""
    named = [f"{name} {size}" for name in ("tp", "pp", "dp") if (size := getattr(layout, name)) > 1]
    return " x ".join(named) if len(named) > 1 else str(layout.ranks)


_WIDTH = 120  # of the page's lines
_MARKERS = ("<!-- written by benchmarks/compare.py: begin -->", "<!-- end -->")


def replace_section(page: Path, text: str) -> None:
    """Put a section between its markers on a page.

    Raises:
        ValueError: the page has no markers.
    """
    bring_up_to_date(page, text, _MARKERS, writes=True)
