"""`kernels/` is imported as `megacore.kernels`, never in place of the package `kernels` that transformers looks for.

How: kernels/ has no __init__.py, so a folder of that name on the path gives way to any real package;
megacore/kernels/__init__.py points to it in a checkout, and the build puts its files in that one's place. Every way to
have megacore is tried with and without another package `kernels`, in a fresh interpreter each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.packaging_builds import ROOT

PROBE = """
import json, site, sys
for directory in sys.argv[1:]:
    site.addsitedir(directory)
import megacore, megacore.kernels.availability as ours
try:
    import kernels
    theirs = getattr(kernels, "__file__", None)
except ImportError:
    theirs = None
print(json.dumps({"megacore": megacore.__file__, "ours": ours.__file__, "theirs": theirs}))
"""


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder with another regular package named `kernels`, and its metadata."""
    site = tmp_path / "foreign"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("__version__ = '0.0.1'\n")
    (site / "kernels-0.0.1.dist-info").mkdir()
    (site / "kernels-0.0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.0.1\n")
    return site


def probe(cwd: Path, python_path: list[Path], sites: list[Path]) -> dict[str, str | None]:
    """Import both packages in a fresh interpreter and say where each came from."""
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(str(path) for path in python_path)}
    # -S: without this environment's site-packages, where megacore itself is installed.
    command = [sys.executable, "-S", "-c", PROBE, *map(str, sites)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def checkout(_: pytest.FixtureRequest) -> tuple[list[Path], list[Path], Path]:
    return [ROOT], [], ROOT


def wheel(request: pytest.FixtureRequest) -> tuple[list[Path], list[Path], Path]:
    site: Path = request.getfixturevalue("wheel_site")
    return [site], [], site


def editable(request: pytest.FixtureRequest) -> tuple[list[Path], list[Path], Path]:
    site: Path = request.getfixturevalue("editable_site")
    return [], [site], site.parent / "editable-tree"


@pytest.mark.parametrize("with_foreign", [False, True], ids=["alone", "beside-another-kernels"])
@pytest.mark.parametrize("way", [checkout, wheel, editable])
def test_each_package_is_found_under_its_own_name(
    way: Callable[[pytest.FixtureRequest], tuple[list[Path], list[Path], Path]],
    with_foreign: bool,
    foreign: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    python_path, sites, home = way(request)
    # The other package comes last on the path: it must win by being a real package, not by its place.
    found = probe(tmp_path, python_path, [*sites, foreign] if with_foreign else sites)
    assert found["megacore"] == str(home / "megacore" / "__init__.py")
    folder = home / "megacore" / "kernels" if way is wheel else home / "kernels"
    assert found["ours"] == str(folder / "availability.py")
    assert found["theirs"] == (str(foreign / "kernels" / "__init__.py") if with_foreign else None)


def test_a_script_started_in_the_checkout_sees_the_real_kernels(foreign: Path) -> None:
    """`python -c` and `-m` put the current folder first on the path: there a regular package would shadow."""
    assert probe(ROOT, [], [foreign])["theirs"] == str(foreign / "kernels" / "__init__.py")


def test_transformers_does_not_take_our_folder_for_the_package(foreign: Path) -> None:
    code = "from transformers.utils import import_utils; print(import_utils.is_kernels_available())"
    for python_path in ([ROOT], [ROOT, foreign]):
        environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, python_path))}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        # Version 0.0.1 is too old for transformers, which only a package that was really found can be.
        assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_kernels_is_a_folder_without_an_init_and_the_package_a_pointer_to_it() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert os.listdir(ROOT / "megacore" / "kernels") in (["__init__.py"], ["__init__.py", "__pycache__"])


def test_the_tree_has_no_symbolic_links() -> None:
    """A zip download or a checkout on Windows turns them into text files."""
    assert [path for path in ROOT.iterdir() if path.is_symlink()] == []
    assert [path for path in (ROOT / "megacore").rglob("*") if path.is_symlink()] == []
