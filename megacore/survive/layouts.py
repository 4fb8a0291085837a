"""The layout of the ranks that are left: the planner's best, or without it as many as can share the batch, as near to
what was asked for as they can."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacore.config import ResolvedConfig, violations
from megacore.config.flags import all_fields
from megacore.config.messages import divisors
from megacore.errors import ConfigError
from megacore.files import open_regular
from megacore.observe.records import json_lines

_SPLITS = ("tp", "pp", "cp", "ep")


def layout_for(config: ResolvedConfig, ranks: int) -> dict[str, Any] | None:
    """The degrees by field, for at most `ranks`, and what has no meaning for them as it is without; None where no
    number of them can train this model. All else of `config` stays, the global batch too. Of the layouts of the most
    ranks it is the one that splits the model most like `config` does: that fits into memory if this one did."""
    splits = [sorted(divisors(getattr(config.parallel, name) or 1, most=None), reverse=True) for name in _SPLITS]
    for count in range(min(ranks, config.parallel.ranks), 0, -1):
        for tp, pp, cp, ep in itertools.product(*splits):
            dp, rest = divmod(count, tp * pp * cp)
            if rest:
                continue
            degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": dp}
            if not violations(found := config.with_degrees(degrees), count):
                names = (*config.parallel.infos, *config.training.infos)
                return {name: found.value(name) for name in names if found.value(name) != config.value(name)} | degrees
    return None


def write_layouts(descriptor: int, config: ResolvedConfig, ranks: int, fixed: Mapping[str, Any]) -> None:
    """Write the planner's layouts for at most `ranks`, each better than the one before, as lines of JSON: values by
    field; without a word where that fails. `fixed`: what stays."""
    plan = {name: importlib.import_module(f"megacore.plan.{name}") for name in ("next_layout", "measured_run")}
    device = None
    with contextlib.suppress(ConfigError):  # damaged: the device is not known
        device = plan["measured_run"].read_launch(Path(config.training.output_dir, "events.jsonl")).device
    found = plan["next_layout"].layouts_of_fewer(config, ranks, device_name=device or "cpu", fixed=fixed)
    with contextlib.suppress(Exception):
        for values in found:
            os.write(descriptor, json.dumps(values).encode() + b"\n")


def chosen_before(config: ResolvedConfig, fixed: Mapping[str, Any]) -> dict[str, Any] | None:
    """What --retune has chosen before this start of the run, by its events.jsonl: values by field; None where that is
    not known, or cannot train now. `fixed`: what stays."""
    said: Any = None
    with contextlib.suppress(OSError), open_regular(Path(config.training.output_dir, "events.jsonl")) as file:
        for _, row in json_lines(file):
            said = row.get("values") if row and row.get("event") == "retune" else said
    tuned = importlib.import_module("megacore.plan.next_layout").TUNED
    values = {name: said[name] for name in tuned if name in said} if isinstance(said, dict) else {}
    infos = all_fields(type(config))
    for name, value in values.items():
        is_read = type(value) is infos[name].kind or (value is None and infos[name].optional)
        if not is_read or fixed.get(name, value) != value:
            return None
    return None if violations(config.with_values(values), config.parallel.ranks) else values or None
