"""The progress of commands: a line per minute without a terminal, from any thread, and the bytes that there are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megacore.commands import progress
from megacore.commands.progress import ByteProgress
from megacore.data.indexed.writer import IndexedWriter, merge


def test_a_line_per_minute_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with ByteProgress("verifying", 10 * 10**9) as shown:
        for second in range(0, 130, 10):
            now[0] = float(second)
            shown.advance(10**8)
    assert capsys.readouterr().err.splitlines() == [
        "verifying: 7%, 0.7 of 10.0 GB",
        "verifying: 13%, 1.3 of 10.0 GB",
    ]


def test_merging_counts_every_byte(tmp_path: Path) -> None:
    sizes = []
    for number in (1, 2):
        with IndexedWriter(str(tmp_path / f"{number}"), np.dtype(np.uint16)) as writer:
            writer.add(np.arange(7 * number))
            writer.end_document()
            writer.commit()
        sizes.append((tmp_path / f"{number}.bin").stat().st_size)
    copied: list[int] = []
    merge([str(tmp_path / "1"), str(tmp_path / "2")], str(tmp_path / "out"), on_copied=copied.append)
    assert copied == sizes == [14, 28]
