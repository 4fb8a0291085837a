"""The built packages, shared by the tests that look at them; and plans that do not trace a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacore.commands import plan, plan_search
from megacore.plan.memory import plan_memory
from tests.unit import packaging_builds


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it."""
    return packaging_builds.build_sdist_and_wheel(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def wheel_site(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's files, as site-packages would."""
    return packaging_builds.unpack_wheel(built[1], tmp_path_factory.mktemp("wheel-site"))


@pytest.fixture(scope="session")
def editable_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site folder with an editable install of a copy of the tree."""
    return packaging_builds.install_editable(tmp_path_factory.mktemp("editable"))


@pytest.fixture(autouse=True)
def estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans take their memory from the estimate, at once."""
    for module in (plan, plan_search):
        monkeypatch.setattr(module, "traced_memory", plan_memory)
