"""Packages that the interpreter lacks, from a folder of wheels. Standard library and pip alone, and no network."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Measured beside, where it is there.
OPTIONAL = {"liger-kernel", "pytest-xdist"}


def canonical(name: str) -> str:
    """A distribution's name as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[str]:
    """What the check imports, as setup.cfg requires it: the package itself and its extra `gpu`."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = setup["options"]["install_requires"] + setup["options.extras_require"]["gpu"]
    return [line.strip() for line in lines.splitlines() if line.strip()]


def missing_packages(site: Path | None = None) -> list[str]:
    """What the check cannot do without, and can import neither from the interpreter nor from a directory."""
    names = (re.match(r"[A-Za-z0-9._-]+", one) for one in requirements())
    return sorted({canonical(name[0]) for name in names if name} - OPTIONAL - _installed(site))


def _installed(site: Path | None = None) -> set[str]:
    found = metadata.distributions(path=[*sys.path, *([] if site is None else [str(site)])])
    return {canonical(name) for distribution in found if (name := distribution.metadata["Name"])}


def install_missing(wheels: Path, target: Path) -> Path | None:
    """Install those wheels of a folder whose packages the interpreter lacks into a directory, and return it; None where
    nothing was lacking. Raises CalledProcessError where pip refuses a wheel, as for another Python."""
    there = _installed()
    lacking = [wheel for wheel in sorted(wheels.glob("*.whl")) if canonical(wheel.name.split("-")[0]) not in there]
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check", "--target"]
    if lacking:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, target, *lacking], check=True)
    return target if lacking else None
