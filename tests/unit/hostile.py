"""What a pickle may do: here it makes a folder, by which a test sees that the pickle ran."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path | str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)
