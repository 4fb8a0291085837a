"""The models and trainings of the table, by name: changes of `make_config`'s small GPT-2, or of BERT: programs.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

Changes = dict[str, Any]


def size_of(stages: int, *, reproducible: bool, whole: bool) -> Changes:
    """How long a run is and how deep its model: eight steps and the five blocks of `make_config`; or three steps, one
    more than the warm-up, and one block more than stages, so that no pp above 1 divides them. The last step has a rate
    as well: a resume takes no other. Exact sums take longer, and need fewer steps."""
    if whole:
        return {"train_iters": 4, "lr_warmup_iters": 1} if reproducible else {"train_iters": 8, "lr_warmup_iters": 2}
    steps = 2 if reproducible else 3
    return {"num_layers": stages + 1, "train_iters": steps, "lr_warmup_iters": steps - 1, "lr_decay_iters": 9}


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def changes_with_parts(row: Changes) -> Changes:
    """The fields of a row, after those of its parts."""
    made: Changes = {}
    for name in row.get("of", ()):
        made |= changes_with_parts(_TABLES["parts"][name])
    own = {name: value for name, value in row.items() if name not in ("of", "without")}
    made |= {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
    return made | dict.fromkeys(row.get("without", ()))


PARTS: dict[str, Changes] = {name: changes_with_parts(row) for name, row in _TABLES["parts"].items()}
PROGRAMS: dict[str, Changes] = {name: changes_with_parts(row) for name, row in _TABLES["programs"].items()}
LLAMA, SGD, SMOOTH, DROPOUT = (PARTS[name] for name in ("llama", "sgd", "smooth", "dropout"))
EXACT, UNCUT, LATENT, PACKED = (PARTS[name] for name in ("exact", "uncut", "latent", "packed"))
