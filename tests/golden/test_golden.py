"""This tree answers as it is written down (`make.py`). After a change that means to change words, `python -m
tests.golden.make --only argv` or `tools` writes them anew, and the commit shows what they were."""

from __future__ import annotations

import pytest

from tests.golden import make
from tests.golden.trees import differences

PARTS = {"argv": 32, "tools": 4}


@pytest.mark.parametrize(
    ("collection", "part"),
    [
        pytest.param(collection, part, marks=[] if (collection, part) == ("argv", 0) else pytest.mark.slow)
        for collection, count in PARTS.items()
        for part in range(count)
    ],
)
def test_answers_are_those_written_down(collection: str, part: int) -> None:
    written = make.written(collection)
    keys = set(list(written)[part :: PARTS[collection]]) | (set(map(make.plain_line, make.SCRIPTS)) & set(written))
    found = make.portable(make.collect(make.ROOT, {collection: keys}, workers=1)[collection])
    different = {key: lines for key in keys if (lines := list(differences(written[key], found[key])))}
    assert not different, "\n".join("\n  ".join([key, *lines]) for key, lines in different.items())
