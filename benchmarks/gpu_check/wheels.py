"""Packages that the interpreter lacks, from a folder of wheels. Standard library and pip alone, and no network."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from collections.abc import Iterable
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


def name_of(requirement: str) -> str:
    """The canonical name of what a requirement asks for."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return canonical(found[0])


def missing_packages(names: Iterable[str] | None = None, *, path: Path | None = None) -> list[str]:
    """Which packages can be imported neither from the interpreter nor from `path`.

    Args:
        names: of distributions; None: everything that the check cannot do without.
        path: a further directory of packages.
    """
    wanted = {name_of(one) for one in requirements()} - OPTIONAL if names is None else {canonical(one) for one in names}
    return sorted(wanted - _installed(path))


def _installed(path: Path | None = None) -> set[str]:
    places = [*sys.path, *([str(path)] if path is not None else [])]
    names = (distribution.metadata["Name"] for distribution in metadata.distributions(path=places))
    return {canonical(name) for name in names if name}


def install_missing(wheels: Path, target: Path) -> Path | None:
    """Install those wheels of a folder whose packages the interpreter lacks.

    Args:
        wheels: the folder.
        target: a directory to put the packages into.

    Returns:
        The directory; None where nothing was lacking.

    Raises:
        CalledProcessError: pip refuses a wheel, as for another Python.
    """
    there = _installed()
    lacking = [wheel for wheel in sorted(wheels.glob("*.whl")) if canonical(wheel.name.split("-")[0]) not in there]
    if not lacking:
        return None
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "-q", *options, "--target", str(target)]
    subprocess.run([*command, *map(str, lacking)], check=True)
    return target
