"""Draw who sends what when: a line for every rank, time from left to right, an arrow for every message."""

from __future__ import annotations

import math

from megacore.drawing.canvas import Box, Drawing, Line, Words
from wire import Message

ROUND_WIDTH, RANK_HEIGHT, LEFT, TOP, HEAD = 150.0, 70.0, 70.0, 70.0, 8.0
COLORS = ("#2f6fb2", "#c0562f", "#3a8f5c", "#7b4fa3", "#a8861a", "#b03a62", "#2d8f96", "#6a6f78")
INK, GRID = "#1f2430", "#d5d9e0"


def draw(title: str, messages: list[Message], ranks: int, rounds: int) -> Drawing:
    """The picture of one collective.

    Args:
        title: stands above.
        messages: of all ranks.
        ranks: number of ranks.
        rounds: number of rounds.
    """
    width, height = LEFT + rounds * ROUND_WIDTH + 40, TOP + ranks * RANK_HEIGHT
    drawing = Drawing(title=title, width=max(width, 16 + 9.0 * len(title)), height=height)
    drawing.marks.append(Words(x=16, y=20, text=title, size=15, bold=True))
    for number in range(rounds + 1):
        x = _x(number)
        drawing.marks.append(Line(x1=x, y1=TOP - 12, x2=x, y2=height - 24, color=GRID))
        if number < rounds:
            text = f"round {number + 1}"
            drawing.marks.append(Words(x=x + ROUND_WIDTH / 2, y=TOP - 22, text=text, anchor="middle", color="#6a6f78"))
    for rank in range(ranks):
        drawing.marks.append(Words(x=16, y=_y(rank), text=f"rank {rank}", bold=True, color=_color(rank)))
        drawing.marks.append(Line(x1=LEFT, y1=_y(rank), x2=_x(rounds), y2=_y(rank), color=INK))
    for message in messages:
        drawing.marks += _arrow(message)
    for message in messages:  # above all arrows
        drawing.marks += _label(message)
    return drawing


def _arrow(message: Message) -> list[Box | Line | Words]:
    color = _color(message.source)
    (x1, y1), (x2, y2) = _ends(message)
    angle = math.atan2(y2 - y1, x2 - x1)
    sides = [
        Line(x1=x2, y1=y2, x2=x2 - HEAD * math.cos(angle + turn), y2=y2 - HEAD * math.sin(angle + turn), color=color)
        for turn in (-0.4, 0.4)
    ]
    return [Line(x1=x1, y1=y1, x2=x2, y2=y2, color=color), *sides]


def _label(message: Message) -> list[Box | Line | Words]:
    """On the arrow, nearer to its sender: there arrows from different ranks do not cross."""
    (x1, y1), (x2, y2) = _ends(message)
    near, width = 0.28 * RANK_HEIGHT / abs(y2 - y1), 5.8 * len(message.content) + 6
    x, y = max(x1 + near * (x2 - x1), x1 + width / 2), y1 + near * (y2 - y1)
    note = f"{message.source} -> {message.destination}: {message.content}, {message.nbytes} bytes"
    return [
        Box(x=x - width / 2, y=y - 7, width=width, height=14, fill="#ffffff", note=note),
        Words(x=x, y=y, text=message.content, size=11, anchor="middle", color=_color(message.source)),
    ]


def _ends(message: Message) -> tuple[tuple[float, float], tuple[float, float]]:
    start, stop = _x(message.round) + 6, _x(message.round + 1) - 6
    return (start, _y(message.source)), (stop, _y(message.destination))


def _x(number: float) -> float:
    return LEFT + number * ROUND_WIDTH


def _y(rank: int) -> float:
    return TOP + 10 + rank * RANK_HEIGHT


def _color(rank: int) -> str:
    return COLORS[rank % len(COLORS)]
