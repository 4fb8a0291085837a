"""The layout of the ranks that are left: the planner's best, or without it as many as can share the batch, as near to
what was asked for as they can."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacore.config import ResolvedConfig, violations
from megacore.config.messages import divisors

_SPLITS = ("tp", "pp", "cp", "ep")


def layout_for(config: ResolvedConfig, ranks: int) -> dict[str, int] | None:
    """The degrees by field, for at most `ranks`; None where no number of them can train this model. All of `config` but
    its degrees stays, the global batch too. Of the layouts of the most ranks it is the one that splits the model most
    like `config` does: that fits into memory if this one did."""
    splits = [sorted(divisors(getattr(config.parallel, name) or 1, most=None), reverse=True) for name in _SPLITS]
    for count in range(min(ranks, config.parallel.ranks), 0, -1):
        for tp, pp, cp, ep in itertools.product(*splits):
            dp, rest = divmod(count, tp * pp * cp)
            if rest:
                continue
            parallel = dataclasses.replace(config.parallel, tp=tp, pp=pp, cp=cp, ep=ep, dp=dp)
            if not violations(dataclasses.replace(config, parallel=parallel), count):
                return {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": dp}
    return None


def write_layouts(descriptor: int, config: ResolvedConfig, ranks: int, fixed: Mapping[str, Any]) -> None:
    """Write the planner's layouts for at most `ranks`, each better than the one before, as lines of JSON: values by
    field. `fixed`: what stays."""
    plan = {name: importlib.import_module(f"megacore.plan.{name}") for name in ("next_layout", "measured_run")}
    launch = plan["measured_run"].read_launch(Path(config.training.output_dir, "events.jsonl"))
    found = plan["next_layout"].layouts_of_fewer(config, ranks, device_name=launch.device or "cpu", fixed=fixed)
    for values in found:
        os.write(descriptor, json.dumps(values).encode() + b"\n")


def chosen_before(config: ResolvedConfig, fixed: Mapping[str, Any]) -> dict[str, Any] | None:
    """What --retune has chosen before this start of the run, by its events.jsonl: values by field; None where that is
    not known, or cannot train now. `fixed`: what stays."""
    path = Path(config.training.output_dir, "events.jsonl")
    for line in reversed(path.read_bytes().splitlines()) if path.is_file() else ():
        event = json.loads(line) if b'"retune"' in line and line.endswith(b"}") else {}
        if event.get("event") == "retune":
            values: dict[str, Any] = event.get("values", {})
            chosen = config.with_values(values)
            is_other = any(values.get(name, value) != value for name, value in fixed.items())
            ranks = config.parallel.ranks
            return None if is_other or chosen.parallel.ranks != ranks or violations(chosen, ranks) else values
    return None
