"""The peak of a device is that of its own data sheet, or none at all."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megacore.train.peaks import Format, peak_tflops

PEAKS = tomllib.loads(Path(__file__).with_name("peaks.toml").read_text(encoding="utf-8"))["peaks"]


@pytest.mark.parametrize(("name", "form", "peak"), [(*row, None)[:3] for row in PEAKS])
def test_peaks(name: str, form: Format, peak: float | None) -> None:
    assert peak_tflops(name, form) == peak
