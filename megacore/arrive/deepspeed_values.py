"""A key's value in a DeepSpeed configuration, what a key becomes, and how values are read.

deepspeed_keys.toml has the table of all keys.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megacore.arrive.translation import Shape, Translation
from megacore.config.messages import number

Document = Mapping[str, Any]
Translate = Callable[["Value"], Translation]
_MOST = 2**63


@dataclass(frozen=True)
class Value:
    """A key's value in its file, and what it may depend on.

    Attributes:
        path: of the key, `zero_optimization.stage`.
        value: of the key.
        document: the whole file.
        shape: of the run, as far as it is known.
    """

    path: str
    value: Any
    document: Document
    shape: Shape

    def __str__(self) -> str:
        return f"{self.path} {shown(self.value)}"

    def other(self, path: str, default: Any = None) -> Any:
        """The value of another key; the default where the file leaves it out or says "auto"."""
        found = value_at(self.document, path)
        return default if found is None or found == "auto" else found


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a key becomes.

    Attributes:
        kind: sets fields; idle: changes nothing; some: is accepted with some values.
        becomes: in words: the flags that are set, or why nothing changes, or the accepted values, the reason and the
            way out.
        fields: that it may set.
        translate: its value. Raises ValueError for one that has no translation.
        is_last: it depends on what others become.
    """

    kind: Literal["sets", "idle", "some"]
    becomes: str
    fields: tuple[str, ...] = ()
    translate: Callable[[Value], Translation] = field(default=lambda value: Translation())
    is_last: bool = False


def value_at(document: Document, path: str) -> Any:
    """The value of a key; None where the file leaves it out."""
    found: Any = document
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def shown(value: Any) -> str:
    """A value as a file has it; a text without its quotation marks."""
    if isinstance(value, str):
        text = value or '""'
    elif isinstance(value, int | float) and not isinstance(value, bool):
        text = number(value)
    else:
        text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _quoted(value: Value) -> str:
    """A key and its value, of which a text is told from a number."""
    return f'{value.path} "{shown(value.value)}"' if value.value and isinstance(value.value, str) else str(value)


def of_saved_inputs(name: str, shape: Shape) -> dict[str, Any]:
    """A switch about the inputs that full recomputation keeps, where there are any; dividing them needs --tp ranks."""
    settings = shape.settings
    divides = name == "distribute_saved_activations"
    has_effect = settings.get("recompute") == "full" and not (divides and (settings.get("tp") or 1) == 1)
    return {name: True} if has_effect else {}


# ---- reading a value, which raises ValueError ------------------------------------------------------------------------


def _without_marks(value: Value, example: str) -> str:
    """The way out for a text in place of a number."""
    text = value.value.strip() if isinstance(value.value, str) else ""
    try:
        float(text)
    except ValueError:
        return f"use, for example, {example}"
    return f"use {text}, without quotation marks"


def switch(value: Value) -> bool:
    """A value that is true or false."""
    if not isinstance(value.value, bool):
        raise ValueError(f"{_quoted(value)} must be true or false")
    return value.value


def whole(value: Value, *, low: int = 0) -> int:
    """A value that is a whole number of at least `low`; 5e8 is one too."""
    given = value.value
    if isinstance(given, bool) or not isinstance(given, int | float) or given != given // 1 or given < low:
        example = _without_marks(value, number(max(low, 1)))
        raise ValueError(f"{_quoted(value)} is not a whole number of {low} or more: {example}")
    if given > _MOST:
        raise ValueError(
            f"{value.path} has {len(str(int(given)))} digits: {_without_marks(value, number(max(low, 1)))}"
        )
    return int(given)


def real(value: Value, *, example: float = 0.1) -> float:
    """A value that is a finite number."""
    given = value.value
    if isinstance(given, bool) or not isinstance(given, int | float) or not abs(given) <= sys.float_info.max:
        raise ValueError(f"{_quoted(value)} is not a number: {_without_marks(value, number(example))}")
    return float(given)


def a_text(value: Value) -> str:
    """A value that is a text and not empty."""
    if not isinstance(value.value, str) or not value.value.strip():
        raise ValueError(f"{value} is not a text: leave it out, or use a name")
    return value.value
