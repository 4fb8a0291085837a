"""Builds of the working tree for the packaging tests, each made once a session and away from the tree itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "quickstart", "output", "runs", "node_modules"
)


def copy_of_tree(target: Path) -> Path:
    """Copy the sources, links as links: building writes into the tree it builds from."""
    shutil.copytree(ROOT, target, symlinks=True, ignore=NOT_SOURCE)
    return target


def run_quietly(*command: str | Path, cwd: Path) -> None:
    """Run a command; its output is shown when it fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"


def build_sdist_and_wheel(directory: Path) -> tuple[Path, Path]:
    """Build the sdist from a copy of the tree, and the wheel from the sdist alone."""
    tree = copy_of_tree(directory / "tree")
    # Without isolation: the pinned setuptools of this environment, and no network.
    run_quietly(sys.executable, "-m", "build", "--no-isolation", "--outdir", directory / "dist", tree, cwd=directory)
    return next((directory / "dist").glob("*.tar.gz")), next((directory / "dist").glob("*.whl"))


def unpack_wheel(wheel: Path, target: Path) -> Path:
    """Put a pure wheel's files where an installer would."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def install_editable(directory: Path) -> Path:
    """Make an editable install of a copy of the tree into a folder that `site.addsitedir` can add."""
    tree = copy_of_tree(directory / "editable-tree")
    site = directory / "editable-site"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    run_quietly(*pip, "--no-build-isolation", "--no-deps", "--no-index", "--target", site, "-e", tree, cwd=directory)
    return site
