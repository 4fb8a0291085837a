"""A drawing of boxes, lines and words, in pixels from the upper left, written as SVG, or as PNG by matplotlib, which
nothing else needs. What is drawn is decided elsewhere (picture.py)."""

from __future__ import annotations

import importlib.util
import textwrap
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, BinaryIO

from megacore.errors import UserError
from megacore.files import replacing, why_unwritable

SUFFIXES = (".svg", ".png")
_FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
_HATCH = "#c3c8d0"
_DOTS_PER_INCH = 100  # of the drawing's pixels in a PNG, which has twice as many
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


@dataclass(frozen=True, kw_only=True)
class Box:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str | None = None
    hatched: bool = False  # whether it has diagonal stripes
    note: str = ""  # what it is; a browser shows it under the pointer


@dataclass(frozen=True, kw_only=True)
class Line:
    """A thin straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    color: str


@dataclass(frozen=True, kw_only=True)
class Words:
    """One line of text; `y` is its middle, and `anchor` says which point of it lies at `x`: start, middle, end."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: str = "start"
    bold: bool = False
    color: str = "#1f2430"


@dataclass(kw_only=True)
class Drawing:
    """What is drawn, later marks over earlier ones, on white."""

    title: str
    width: float
    height: float
    marks: list[Box | Line | Words] = field(default_factory=list)


def wrapped(text: str, width: float, *, size: float, bold: bool = False) -> list[str]:
    """Lines of a text, divided at spaces, that are no wider than so many pixels, in any viewer's font."""
    letters = max(int(width / (size * (0.64 if bold else 0.56))), 20)
    return textwrap.wrap(text, letters, break_long_words=False, break_on_hyphens=False)


def save(drawing: Drawing, path: Path) -> None:
    """Write a drawing as its name's ending says. If that fails, a file of this name stays as it was. Raises UserError
    with another ending than .svg and .png, or PNG without matplotlib; OSError where the file cannot be written."""
    require_writable(path)
    with replacing(path.resolve() if path.is_symlink() else path, durable=False) as file:
        if path.suffix.lower() == ".svg":
            file.write(to_svg(drawing).encode())
        else:
            _write_png(drawing, file)


def require_writable(path: Path, flag: str = "-o") -> None:
    """Refuse a file that `save` could not write, before anything is drawn. `flag`: that names it, for messages. Raises
    UserError as for `save`, or it is no regular file, or its directory does not exist or takes no files."""
    if path.suffix.lower() not in SUFFIXES:
        better = path.with_suffix(".svg") if path.name[:1] not in ("", ".") else "out.svg"
        raise UserError(f"{flag} {path} must end in .svg or .png: use {flag} {better}")
    if (why := why_unwritable(path)) == "is a directory":
        raise UserError(f"{flag} {path} is a directory: name a file in it, as in {flag} {path / 'out.svg'}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{flag} {path}: {path.parent} is not a directory: make it, or choose another path")
    if why is not None:
        raise UserError(f"{flag} {path} {why}: choose another path")
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            f"{flag} {path} needs matplotlib, which is not installed: use {flag} {path.with_suffix('.svg')}, "
            "or pip install matplotlib"
        )


def to_svg(drawing: Drawing) -> str:
    """A drawing as the text of an SVG file."""
    width, height = _number(drawing.width), _number(drawing.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="{_FONT}">',
        f"<title>{escape(drawing.title, quote=False)}</title>",
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="1.2" height="6" fill="{_HATCH}"/></pattern></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *(_svg_mark(mark) for mark in drawing.marks),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _svg_mark(mark: Box | Line | Words) -> str:
    if isinstance(mark, Box):
        return _svg_box(mark)
    if isinstance(mark, Line):
        ends = " ".join(f'{name}="{_number(getattr(mark, name))}"' for name in ("x1", "y1", "x2", "y2"))
        return f'<line {ends} stroke="{mark.color}"/>'
    weight = ' font-weight="bold"' if mark.bold else ""
    anchor = "" if mark.anchor == "start" else f' text-anchor="{mark.anchor}"'
    # The middle of the capitals, which no viewer's dominant-baseline agrees on, is 0.36 of the size above the baseline.
    attributes = f'x="{_number(mark.x)}" y="{_number(mark.y + 0.36 * mark.size)}" font-size="{_number(mark.size)}"'
    return f'<text {attributes} fill="{mark.color}"{anchor}{weight}>{escape(mark.text, quote=False)}</text>'


def _svg_box(box: Box) -> str:
    sides = " ".join(f'{name}="{_number(getattr(box, name))}"' for name in ("x", "y", "width", "height"))
    edge = f' stroke="{box.edge}"' if box.edge else ""
    note = f"<title>{escape(box.note, quote=False)}</title>" if box.note else ""
    text = f'<rect {sides} fill="{escape(box.fill)}"{edge}>{note}</rect>'
    return text + (f'\n<rect {sides} fill="url(#hatch)"/>' if box.hatched else "")


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _write_png(drawing: Drawing, file: BinaryIO) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(drawing.width / _DOTS_PER_INCH, drawing.height / _DOTS_PER_INCH))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")
    points = 72 / _DOTS_PER_INCH  # of a pixel
    for order, mark in enumerate(drawing.marks):
        if isinstance(mark, Box):
            rectangle = ((mark.x, mark.y), mark.width, mark.height)
            axes.add_patch(
                Rectangle(
                    *rectangle, facecolor=mark.fill, edgecolor=mark.edge or "none", linewidth=points, zorder=order
                )
            )
            if mark.hatched:
                axes.add_patch(
                    Rectangle(*rectangle, fill=False, edgecolor=_HATCH, hatch="////", linewidth=0, zorder=order)
                )
        elif isinstance(mark, Line):
            axes.plot((mark.x1, mark.x2), (mark.y1, mark.y2), color=mark.color, linewidth=points, zorder=order)
        else:
            weight, side = "bold" if mark.bold else "normal", _ANCHORS[mark.anchor]
            style: dict[str, Any] = {
                "color": mark.color,
                "weight": weight,
                "size": mark.size * points * 0.92,
                "ha": side,
                "zorder": order,
            }
            axes.text(mark.x, mark.y, mark.text, va="center_baseline", **style)
    with rc_context({"hatch.linewidth": 0.6}):
        figure.savefig(file, format="png", dpi=2 * _DOTS_PER_INCH, metadata={"Title": drawing.title})
