"""Named models and recipes: `--preset NAME` and `--recipe NAME` set the fields of a row of presets.toml; a
configuration file and flags override them. `vocab_size` applies only without a tokenizer."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from megacore.config.messages import did_you_mean, one_of

Shape = dict[str, int | float | bool | str]
_TABLES: Mapping[str, Mapping[str, Shape]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


def _presets(program: str) -> dict[str, Shape]:
    rows = {**_TABLES["families"], **_TABLES[program]}

    def whole(name: str) -> Shape:
        own = dict(rows[name])
        base = own.pop("based_on", None)
        return own if base is None else {**whole(str(base)), **own}

    return {name: whole(name) for name in _TABLES[program]}


GPT_PRESETS = _presets("gpt")
BERT_PRESETS = _presets("bert")
PRESETS = {**GPT_PRESETS, **BERT_PRESETS}
RECIPES = _TABLES["recipes"]
"""How a model of any shape is trained; they override presets."""


def preset_problem(name: str, accepted: Mapping[str, Shape]) -> str:
    """The message for a name that is not among the presets that an entry point accepts."""
    if name in PRESETS:
        owner, program = ("GPT's", "pretrain_gpt.py") if name in GPT_PRESETS else ("BERT's", "pretrain_bert.py")
        return f"--preset {name} is {owner}: use {one_of(list(accepted))}, or start {program} instead"
    return f"--preset {name} is not known: use {one_of(list(accepted))}{did_you_mean(name, accepted)}"
