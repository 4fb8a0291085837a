"""What a page of the documentation shows as files and as commands, so that a test can run it as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FILE = re.compile(r"^<!-- file: ([\w.]+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def files_of(page: Path) -> dict[str, str]:
    """The files that a page shows by name: each is a block of code under a line `<!-- file: NAME -->`."""
    return dict(_FILE.findall(page.read_text(encoding="utf-8")))


def write_files(page: Path, folder: Path) -> None:
    """Write the files of a page."""
    for name, text in files_of(page).items():
        (folder / name).write_text(text, encoding="utf-8")


def commands_of(page: Path) -> list[list[str]]:
    """The words of every command in the page's blocks of bash."""
    blocks = _COMMANDS.findall(page.read_text(encoding="utf-8"))
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
