"""Command lines and tools do what is written down of them; `python -m tests.golden.make` writes it anew.

Of the command lines, one in 128 runs with `make test`; `make test-slow PIECE=golden` runs all.
"""

from __future__ import annotations

import pytest

from tests.golden import make
from tests.golden.trees import ROOT, differences

PARTS = {"argv": 128, "tools": 4}
USUAL = ("argv", 0)


@pytest.mark.parametrize(
    ("collection", "part"),
    [
        pytest.param(name, part, marks=() if (name, part) == USUAL else pytest.mark.slow)
        for name, parts in PARTS.items()
        for part in range(parts)
    ],
)
def test_what_is_written_down_holds(collection: str, part: int) -> None:
    expected = make.written(collection)
    keys = [key for number, key in enumerate(make.COLLECTIONS[collection]()) if number % PARTS[collection] == part]
    plain = set(map(make.plain_line, make.SCRIPTS)) if collection == "argv" else set()
    found = make.portable(make.collect(ROOT, {collection: {*keys, *plain}}, workers=1)[collection])
    wrong = [f"{key}\n  {line}" for key in keys for line in differences(expected[key], found[key])]
    assert not wrong, "\n".join([f"{len(wrong)} differences from tests/golden ('new' is this tree):", *wrong])


def test_every_row_is_written_down() -> None:
    assert len(make.argv()) >= 2_572, "a command line is lost"
    for collection in PARTS:
        written = make.written(collection)
        assert not [key for key in make.COLLECTIONS[collection]() if not written.get(key)]
