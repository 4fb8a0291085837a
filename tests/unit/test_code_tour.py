"""docs/explain/code-tour.md is true: its stops name what their files define, and an editor can follow every call."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.unit.packaging_builds import ROOT

ANCHOR = re.compile(r"^\d+\. \[`(?P<path>[\w/.]+)`\]\(\.\./\.\./(?P=path)\) `(?P<symbol>[\w.]+)`")
STOPS = [
    match for line in (ROOT / "docs/explain/code-tour.md").read_text().splitlines() if (match := ANCHOR.match(line))
]
FILES = [stop["path"] for stop in STOPS]
# What a batch passes through besides, and what is called there.
BESIDE = ["megacore/train/task.py", "megacore/train/bert_task.py", "megacore/train/plain_task.py"]
BESIDE += ["megacore/train/callbacks.py", "megacore/pipeline/stage.py", "megacore/train/parallelize.py"]


def test_the_tour_has_ten_files_at_most() -> None:
    assert 5 < len(STOPS) <= 10
    assert len(set(FILES)) == len(FILES)


@pytest.mark.parametrize("stop", STOPS, ids=FILES)
def test_a_stop_names_what_its_file_defines(stop: re.Match[str]) -> None:
    node: ast.Module | ast.stmt = ast.parse((ROOT / stop["path"]).read_text())
    for name in stop["symbol"].split("."):
        assert isinstance(node, ast.Module | ast.ClassDef)
        node = next(n for n in node.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)


def stored_callables(tree: ast.Module) -> Iterator[str]:
    """Fields that hold a function without a name: no editor finds what is called through them.

    A field is `self.x = ...`, or an annotated name in a class body.
    """
    for node in ast.walk(tree):
        value: ast.expr | None = None
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Attribute) for target in node.targets):
            value = node.value
        elif isinstance(node, ast.AnnAssign):
            if isinstance(node.target, ast.Attribute) and "Callable" in ast.unparse(node.annotation):
                yield f"line {node.lineno}: {ast.unparse(node.target)} is any callable"
            value = node.value
        if isinstance(value, ast.Lambda) or (
            isinstance(value, ast.Call) and ast.unparse(value.func) in ("partial", "functools.partial")
        ):
            yield f"line {value.lineno}: a field is {ast.unparse(value)}"
    for holder in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for field in holder.body:
            if isinstance(field, ast.AnnAssign) and "Callable" in ast.unparse(field.annotation):
                yield f"line {field.lineno}: {holder.name}.{ast.unparse(field.target)} is any callable"


@pytest.mark.parametrize("path", [*FILES, *BESIDE])
def test_no_field_on_the_way_holds_a_function_without_a_name(path: str) -> None:
    assert list(stored_callables(ast.parse((ROOT / path).read_text()))) == []


@pytest.mark.parametrize(
    "planted",
    [
        "class A:\n    def __init__(self, x):\n        self.loss = lambda y: y + x",
        "class A:\n    def __init__(self, x):\n        self.run = functools.partial(f, x)",
        "class A:\n    loss: Callable[[Any], Tensor]",
        "class A:\n    def __init__(self):\n        self.run: Callable[[], None] = f",
        "stage.run_layer = partial(run, 1)",
    ],
)
def test_a_planted_one_is_found(planted: str) -> None:
    assert list(stored_callables(ast.parse(planted)))
    assert not list(stored_callables(ast.parse("class A:\n    step: int\n    def f(self):\n        self.x = g(1)")))
