"""A headless Chromium, where this machine has one: what a page is once its scripts have run, and how it looks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.patience import patience

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
CHROMIUM = os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)
"""The program; None: this machine has none. The variable CHROMIUM names one that is not on the path."""


def _run(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--disable-gpu", "--no-first-run", "--enable-logging=stderr", "--v=0"]
    if os.geteuid() == 0:
        command.append("--no-sandbox")  # Chromium refuses to start as root otherwise
    # A page of the site reads the index of its search, a file too. Nothing is loaded from elsewhere.
    command += ["--allow-file-access-from-files", "--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars"]
    command += [f"--user-data-dir={profile}", "--virtual-time-budget=4000", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=patience(60))


def dom_and_complaints(page: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """The document of a page after its scripts have run, and the errors of its console.

    Args:
        page: an HTML file.
        profile: a folder for the browser's files.
        flags: of the browser.
    """
    done = _run(page, profile, "--dump-dom", *flags)
    lines = re.findall(r":(?:ERROR|INFO|WARNING):CONSOLE.*", done.stderr)
    return done.stdout, [line for line in lines if re.search(r"error|failed|refused", line, re.IGNORECASE)]


def screenshot(page: Path, profile: Path, target: Path, *, width: int = 1280, height: int = 1600) -> None:
    """Write a picture of a page, .png."""
    _run(page, profile, f"--screenshot={target}", f"--window-size={width},{height}")
