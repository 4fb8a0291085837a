"""The repository keeps the rules of the house, and the checker finds a violation of each that is planted for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import pytest

from tests.unit import architecture_rules as rules
from tests.unit.architecture_rules import Source
from tests.unit.packaging_builds import ROOT

Rule = Callable[[Iterable[Source]], list[str]]

CASES: dict[str, dict[str, list[tuple[str, str]]]] = rules.TABLES["cases"]  # by the names of rules


@pytest.fixture(scope="module")
def repository() -> list[Source]:
    """Every Python file of the repository, read and parsed once."""
    files = [*ROOT.glob("pretrain_*.py"), *(file for folder in rules.FOLDERS for file in (ROOT / folder).rglob("*.py"))]
    sources = [Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in sorted(files)]
    # Of the millions of nodes none is garbage, and the collector would look at them again and again.
    gc.disable()
    try:
        assert all(source.nodes for source in sources)
    finally:
        gc.enable()
    return sources


def test_every_exception_is_still_needed(repository: list[Source]) -> None:
    texts = {source.path: source for source in repository}
    for path, module in rules.LATE_IMPORTS:
        assert any(item.late and item.module == module for item in texts[path].imports), (path, module)
    named = (rules.TABLES[name] for name in ("distributed", "cuda_names", "file_replacers"))
    assert set(texts) >= {path for paths in (*named, *rules.ALLOWED.values()) for path in paths}


@pytest.mark.parametrize("rule", [*CASES, "cycles", "early_torch"])
def test_the_repository_keeps_the_rule(rule: str, repository: list[Source]) -> None:
    assert len(repository) > 40
    violations = getattr(rules, rule)(repository)
    assert not violations, "\n".join(["", *violations])


@pytest.mark.parametrize("name", CASES)
def test_a_planted_violation_is_found_and_nothing_else(name: str) -> None:
    rule: Rule = getattr(rules, name)
    for path, text in CASES[name]["found"]:
        assert rule([Source(f"{path}.py", text)]), text
    for path, text in CASES[name].get("left_alone", []):
        assert rule([Source(f"{path}.py", text)]) == [], text


def test_a_cycle_is_found_even_when_a_function_hides_it() -> None:
    sources = [
        Source("megacore/data/a.py", "from megacore.data.b import x"),
        Source("megacore/data/b.py", "from megacore.data import c"),
        Source("megacore/data/c.py", "def f():\n    from megacore.data.a import y"),
        Source("megacore/data/d.py", "from megacore.data.a import y"),
    ]
    assert rules.cycles(sources) == ["megacore.data.a -> megacore.data.b -> megacore.data.c -> megacore.data.a"]
    assert rules.cycles(sources[:2] + sources[3:]) == []


def test_torch_behind_the_configuration_is_found() -> None:
    sources = [
        Source("megacore/config/cli.py", "from megacore.data import build"),
        Source("megacore/data/build.py", "from megacore.data.gpt import GPTDataset"),
        Source("megacore/data/gpt.py", "import numpy\nimport torch"),
        Source("megacore/data/loading/loader.py", "import torch"),
        Source("megacore/data/clean.py", "import numpy\ndef f():\n    import torch"),
        Source("pretrain_gpt.py", "from megacore.data.clean import f\nfrom megacore.data import build"),
    ]
    loading = ("megacore/config/cli", "megacore/data/build", "megacore/data/gpt", "pretrain_gpt")
    assert rules.early_torch(sources) == [f"{name}.py loads torch, through megacore/data/gpt.py" for name in loading]
