"""What `--retune` tries next: a few measured steps find what is fast on a machine that the planner does not know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megacore.config import ResolvedConfig
from megacore.models.outline import outline
from megacore.plan.cluster import CLUSTERS
from megacore.plan.next_layout import Measured, next_layout
from megacore.plan.row_fit import with_constants
from megacore.plan.search import search
from megacore.plan.search_space import Constraints
from megacore.plan.step_time import step_seconds
from tests.parity.runs import make_config

# Logarithms of the factors by which the machine is not as the planner has it, in the order of row_fit.CONSTANTS.
SLOW_LINKS, SLOW_MEMORY = (0.0, 0.0, -1.5, 0.0, 1.5, 0.0, 0.0), (0.5, -1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("machine", "changes"),
    [(SLOW_LINKS, {}), pytest.param(SLOW_MEMORY, {"reproducible": True}, marks=pytest.mark.slow)],
)
def test_few_trials_find_what_a_search_of_the_machine_itself_finds(
    machine: tuple[float, ...], changes: Mapping[str, Any], tmp_path: Path
) -> None:
    config = make_config((2, 1, 1), tmp_path, micro_batch_size=1, global_batch_size=4, num_layers=2, **changes)
    cluster = with_constants(CLUSTERS["laptop"], machine, 1.0)
    fixed = {"micro_batch_size": 1} if changes else {}
    best = search(config, cluster, Constraints(world_size=2, fixed=fixed)).layouts[0]

    def measure(config: ResolvedConfig) -> Measured:
        return Measured(config=config, seconds=step_seconds(config, outline(config), cluster))

    measured = [measure(config)]
    while len(measured) < 6 and (found := next_layout(measured, device_name="cpu")) is not None:
        measured.append(measure(found.config))
    trained = [one.config.training for one in measured]
    assert {one.global_batch_size for one in trained} == {4}
    assert not changes or {one.micro_batch_size for one in trained} == {1}
    assert min(one.seconds for one in measured) <= best.seconds / 0.97
