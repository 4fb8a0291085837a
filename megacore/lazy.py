"""Packages whose names are loaded when they are first used, so that importing the package stays cheap.

A package lists its names once, as imports under `if TYPE_CHECKING:`, where type checkers and editors find them. Here
these lines are read, and each name is imported when somebody asks for it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any


def listed_names(package: str) -> dict[str, str]:
    """The names that a package imports for type checkers only, each with its module.

    Args:
        package: its dotted name; it may be loading.
    """
    tree = ast.parse(inspect.getsource(sys.modules[package]))
    (listing,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = (node for node in listing.body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(line.module) for line in imports for alias in line.names}


def loader_of(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The package's `__getattr__`.

    Args:
        package: its dotted name.
        names: module of each name.
    """

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(names[name]), name)
        setattr(sys.modules[package], name, value)  # the next use does not come here
        return value

    return load
