"""What `--retune` tries next: a few measured steps find what is fast on a machine that the planner does not know."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megacore.config import ResolvedConfig, violations
from megacore.models.outline import outline
from megacore.plan.cluster import CLUSTERS, Cluster
from megacore.plan.next_layout import Measured, layouts_of_fewer, next_layout
from megacore.plan.row_fit import with_constants
from megacore.plan.search import search
from megacore.plan.search_space import Constraints
from megacore.plan.step_time import step_seconds
from megacore.survive.layouts import chosen_before, layout_for
from tests.parity.runs import Layout, make_config

# Logarithms of the factors by which the machine is not as the planner has it, in the order of row_fit.CONSTANTS.
SLOW_LINKS, SLOW_MEMORY = (0.0, 0.0, -1.5, 0.0, 1.5, 0.0, 0.0), (0.5, -1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
MACHINES = [(SLOW_LINKS, {}), pytest.param(SLOW_MEMORY, {"reproducible": True}, marks=pytest.mark.slow)]


def seconds(config: ResolvedConfig, cluster: Cluster = CLUSTERS["laptop"]) -> float:
    return step_seconds(config, outline(config), cluster)


@pytest.mark.parametrize(("machine", "changes"), MACHINES)
def test_few_trials_find_what_a_search_of_the_machine_itself_finds(
    machine: tuple[float, ...], changes: Mapping[str, Any], tmp_path: Path
) -> None:
    config = make_config((2, 1, 1), tmp_path, micro_batch_size=1, global_batch_size=4, num_layers=2, **changes)
    cluster = with_constants(CLUSTERS["laptop"], machine, 1.0)
    best = search(config, cluster, Constraints(world_size=2, fixed=changes and {"micro_batch_size": 1})).layouts[0]

    measured = [Measured(config=config, seconds=seconds(config, cluster))]
    while len(measured) < 6 and (found := next_layout(measured, device_name="cpu")) is not None:
        measured.append(Measured(config=found.config, seconds=seconds(found.config, cluster)))
    for trained in (one.config.training for one in measured):
        assert (trained.global_batch_size, trained.micro_batch_size if changes else 1) == (4, 1)
    assert min(one.seconds for one in measured) <= best.seconds / 0.97


@pytest.mark.parametrize(("ranks", "plain"), [(8, (2, 2, 2)), (7, (2, 2, 1)), (3, (2, 1, 1)), (1, (1, 1, 1))])
def test_fewer_ranks_get_the_fastest_layout(ranks: int, plain: Layout, tmp_path: Path) -> None:
    """Of all degrees, one by one; without the planner as many ranks as share a batch of 4, split as before."""
    config = make_config((2, 2, 2), tmp_path, micro_batch_size=1, global_batch_size=4, zero_stage=1)
    assert [(layout_for(config, ranks) or {})[name] for name in ("tp", "pp", "dp")] == list(plain)
    *_, values = layouts_of_fewer(config, ranks, device_name="cpu", fixed={"schedule": "1f1b"})
    found, degrees = config.with_values(values), itertools.product((1, 2, 4), range(1, 5), (1, 2, 4))
    others = [found.with_values({"tp": t, "pp": p, "dp": d, "sequence_parallel": False}) for t, p, d in degrees]
    valid = [one for one in others if one.parallel.ranks <= ranks and not violations(one, one.parallel.ranks)]
    assert found.parallel.ranks <= ranks and (found.training.global_batch_size, found.parallel.zero_stage) == (4, 1)
    assert seconds(found) <= min(map(seconds, valid)) / 0.97


def test_all_ranks_that_are_left_train(tmp_path: Path) -> None:
    """Without what so few cannot hold."""
    given: Mapping[str, Any] = {"schedule": "interleaved", "virtual_stages": 2, "sequence_parallel": True}
    given = {**given, "async_tp": True, "zero_stage": 1, "zero_shard_size": 2}
    config = make_config((2, 2, 2), tmp_path, micro_batch_size=1, global_batch_size=24, num_layers=8, **given)
    for ranks in (6, 3, 1):
        planned = next(layouts_of_fewer(config, ranks, device_name="cpu", fixed=given))
        for values in (planned, layout_for(config, ranks) or {}):
            assert not violations(config.with_values(values), ranks)


DAMAGED = ("null", "[1]", '{"tp": null}', '{"tp": [2]}', '{"sequence_parallel": 3}')


def test_what_retune_has_chosen_is_read_from_a_damaged_file(tmp_path: Path) -> None:
    config = make_config((2, 1, 2), tmp_path, micro_batch_size=1, global_batch_size=4)
    for values in (*DAMAGED, '{"tp": 1, "dp": 4, "train_iters": 3}'):
        rows = b'{"event": "retune", "values": %b}\n{"event": "retune", "val{}\n\0\n\xff\n' % values.encode()
        Path(config.training.output_dir, "events.jsonl").write_bytes(rows + b"[" * 9999)
        assert chosen_before(config, {}) == (None if values in DAMAGED else {"tp": 1, "dp": 4})
