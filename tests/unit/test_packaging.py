"""What the wheel and the sdist hold, and that the pins are complete and agree with what is installed."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megacore
from tests.unit.packaging_builds import ROOT


def requirements() -> list[Requirement]:
    """Every requirement of megacore and of its `test` extra, as setup.cfg writes them."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"] + setup["options.extras_require"]["test"]
    return [Requirement(line) for line in lines.splitlines() if line.strip()]


def pins() -> dict[str, str]:
    """Name -> version of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def closure() -> set[str]:
    """The names of all packages that an installation brings here, directly or not."""
    found: set[str] = set()
    waiting = requirements()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or []:
            needed = Requirement(line)
            extras = [{"extra": extra} for extra in ("", *requirement.extras)]
            if needed.marker is None or any(needed.marker.evaluate(extra) for extra in extras):
                waiting.append(needed)
    return found


def test_the_version_is_the_newest_dated_one_of_the_changelog() -> None:
    heading = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", re.MULTILINE)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = heading.findall(changelog)
    assert len(versions) == changelog.count("\n## [") - 1, "all but Unreleased have a number and a date"
    assert versions[0][0] == megacore.__version__
    assert [date for _, date in versions] == sorted((date for _, date in versions), reverse=True)
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None
    assert cited[1] == megacore.__version__
    assert metadata.version("megacore") == megacore.__version__


def test_the_wheel_holds_the_package_with_its_kernels_and_nothing_else(built: tuple[Path, Path]) -> None:
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    programs = {"pretrain_bert.py", "pretrain_gpt.py"}
    top = {"megacore", f"megacore-{megacore.__version__}.dist-info", *programs}
    assert {name.split("/")[0] for name in names} == top
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megacore").rglob("*.py")}
    for folder in ("kernels", "tools"):  # which megacore.kernels and megacore.tools stand for
        of_folder = {f"megacore/{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")}
        assert of_folder
        sources = (sources - {f"megacore/{folder}/__init__.py"}) | of_folder
    assert {name for name in names if name.endswith(".py")} == sources | programs
    tables = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megacore").rglob("*.toml")}
    assert {"megacore/py.typed", "megacore/arrive/megatron.toml", *tables} <= names


def test_the_sdist_holds_what_building_and_testing_need(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {"setup.cfg", "pyproject.toml", "constraints.txt", "Makefile", "LICENSE", "README.md", "CHANGELOG.md"}
    assert wanted | {"tests/distributed.py", "tests/unit/test_packaging.py", "kernels/availability.py"} <= names


def test_the_wheel_imports_where_nothing_else_of_the_project_is(wheel_site: Path, tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(wheel_site)!r}); import megacore.errors, megacore.kernels.availability"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


def test_every_console_script_is_a_program_of_the_wheel(wheel_site: Path, tmp_path: Path) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["console_scripts"].splitlines()
    scripts = [line.split(" = ")[1].split(":") for line in lines if line]
    assert ["pretrain_gpt", "run"] in scripts
    code = (
        f"import importlib, sys; sys.path.insert(0, {str(wheel_site)!r})\n"
        f"for module, name in {scripts!r}:\n"
        "    program = importlib.import_module(module)\n"
        "    assert callable(getattr(program, name)) and program.__file__.startswith(sys.path[0]), module\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


def test_every_installed_package_is_pinned_and_nothing_else() -> None:
    # Only torch's CUDA build brings packages that torch pins itself.
    pinned_by_torch = {name for name in closure() if name.startswith(("nvidia-", "cuda-"))}
    assert closure() - pinned_by_torch == set(pins())


def test_installed_versions_are_the_pinned_ones() -> None:
    installed = {name: metadata.version(name).split("+")[0] for name in pins()}
    assert installed == pins()


def test_the_pins_satisfy_the_declared_bounds() -> None:
    for requirement in requirements():
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), requirement
