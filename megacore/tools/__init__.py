"""The programs of the folder `tools/` at the top of a checkout, under the name `megacore.tools`, for console scripts.

An installed package holds the programs here, instead of this file.
"""

from __future__ import annotations

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "tools")]
