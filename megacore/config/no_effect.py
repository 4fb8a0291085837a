"""Flags that change nothing in a run with its number of ranks: a note, not a refusal, as a script may start runs of all
sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megacore.config.dimensions import ranks_of_role
from megacore.config.schema import ResolvedConfig
from megacore.config.spelling import flag_and_value


def without_effect(config: ResolvedConfig, typed: Mapping[str, Any]) -> Iterator[str]:
    """A note on each flag among `typed` that changes nothing."""
    parallel = config.parallel
    may_offload = parallel.offload_optimizer or parallel.offload_params
    if typed.get("zero_stage") and ranks_of_role("replicas", parallel) == 1 and not may_offload:
        given = flag_and_value("zero_stage", typed["zero_stage"])
        yield f"{given} changes nothing with one data-parallel rank (--dp 1)"
    if typed.get("etp") and config.model.experts is None:
        yield f"{flag_and_value('etp', typed['etp'])} changes nothing without experts"
    if parallel.pp == 1:
        if typed.get("schedule") == "1f1b":  # others have another order of forwards and backwards on one rank too
            yield f"{flag_and_value('schedule', '1f1b')} changes nothing without a pipeline (--pp 1)"
        if "pipeline_balance" in typed:
            given = flag_and_value("pipeline_balance", typed["pipeline_balance"])
            yield f"{given} changes nothing without a pipeline (--pp 1)"
