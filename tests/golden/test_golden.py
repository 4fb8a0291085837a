"""Command lines and tools do what is written down of them; `python -m tests.golden.make` writes it anew.

All command lines are read with `make test`; `make test-slow PIECE=golden` runs the tools.
"""

from __future__ import annotations

import random

import pytest

from tests.golden import make
from tests.golden.trees import ROOT, differences

# The slow tests of the tools, as many as workers can share.
TOOLS = 4


@pytest.mark.parametrize(
    ("collection", "part", "parts"),
    [("argv", 0, 1), *(pytest.param("tools", part, TOOLS, marks=pytest.mark.slow) for part in range(TOOLS))],
)
def test_what_is_written_down_holds(collection: str, part: int, parts: int) -> None:
    """In another order than that in which it was written: no row changes what a later one does."""
    expected, keys = make.written(collection), [*make.COLLECTIONS[collection]()][part::parts]
    random.Random(part).shuffle(keys)
    found = make.portable(make.collect(ROOT, {collection: keys}, workers=1)[collection])
    wrong = [f"{key}\n  {line}" for key in keys for line in differences(expected[key], found[key])]
    assert not wrong, "\n".join([f"{len(wrong)} differences from tests/golden ('new' is this tree):", *wrong])


def test_every_row_is_written_down() -> None:
    assert len(make.argv()) >= 2_604, "a command line is lost"
    for collection in ("argv", "tools"):
        written = make.written(collection)
        assert not [key for key in make.COLLECTIONS[collection]() if not written.get(key)]
