"""Jobs over several hosts, each with its own network, name and files: they train as one process does, a host that is
cut off, slow or dead is reported, and the job resumes on fewer hosts."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import launching
from tests.e2e.hanging import HANG
from tests.e2e.hosts import Denied, Hosts
from tests.e2e.launching import PROGRAM, START, Job, losses, losses_of_one_process, needs_proc, small_run
from tests.patience import scaled, scaled_minutes, until
from tests.unit import data_bytes

pytestmark = [needs_proc, pytest.mark.slow]
HANGING = Path(__file__).with_name("hanging.py")
END = 30.0
ENDLESS = {"train_iters": 1_000_000, "global_batch_size": 4}
OUT_OF_REACH = 30.0  # seconds until the watchers take a node that says nothing for out of reach
MakeHosts = Callable[[int], Hosts]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[MakeHosts]:
    """Makes hosts, which end with the test."""
    made: list[Hosts] = []

    def make(count: int) -> Hosts:
        try:
            made.append(Hosts(count, tmp_path / "hosts").__enter__())
        except Denied as reason:
            pytest.skip(f"no right to make network namespaces: {reason}")
        return made[0]

    yield make
    for one in made:
        one.__exit__()


def all_end(jobs: list[Job], within: float = START) -> list[int]:
    """The exit statuses of the torchruns, once no process is left."""
    return [job.ends(within)[0] for job in jobs]


def trained(network: Hosts, logs: Path, per_node: int, flags: list[str], *nodes: int, c10d: bool = False) -> None:
    """Run to the end on these nodes."""
    with network.torchrun(logs, per_node, PROGRAM, *flags, nodes=nodes, c10d=c10d) as jobs:
        assert all_end(jobs) == [0] * len(nodes), said_by(jobs)


def said_by(jobs: list[Job]) -> str:
    return "\n".join(job.said() + (job.logs / "torchrun.err").read_text() for job in jobs)


def write_dataset(directory: Path) -> None:
    """The files data.bin and data.idx: 40 documents of 64 tokens."""
    draw = random.Random(0)
    documents = [[[draw.randrange(64) for _ in range(64)]] for _ in range(40)]
    data_bytes.write(directory / "data", documents)


SAME = {"reproducible": True, "micro_batch_size": 1, "global_batch_size": 4}


@pytest.mark.parametrize(
    ("count", "per_node", "layout", "c10d"),
    [
        (2, 2, {"tp": 2, "pp": 1, "dp": 2, "zero_stage": 3}, True),
        (4, 2, {"tp": 2, "pp": 2, "dp": 2, "zero_stage": 1}, False),
        (4, 1, {"tp": 4, "pp": 1}, True),  # tensor parallelism between nodes: slow, and right
    ],
)
def test_hosts_train_as_one_process_does(
    tmp_path: Path, hosts: MakeHosts, count: int, per_node: int, layout: dict[str, int], c10d: bool
) -> None:
    network = hosts(count)
    flags = small_run(tmp_path / "out", **SAME, **layout)
    trained(network, tmp_path / "logs", per_node, flags, *range(count), c10d=c10d)
    assert losses(tmp_path / "out") == losses_of_one_process(tmp_path / "alone", **SAME)


def test_each_host_reads_its_own_copy_of_the_data(tmp_path: Path, hosts: MakeHosts) -> None:
    """The data set and its index cache are on the disks of the hosts, which none of them shares."""
    network = hosts(2)
    shared = tmp_path / "data"
    shared.mkdir()
    for directory in (shared, network.own_directory(0), network.own_directory(1)):
        write_dataset(directory)
    data = {"mock_data": None, "data_path": network.disk / "data", "data_cache_path": network.disk / "cache"}
    flags = small_run(tmp_path / "out", **SAME, **data, dp=2)
    trained(network, tmp_path / "logs", 1, flags, 0, 1)
    for number in range(2):
        assert list((network.own_directory(number) / "cache").glob("*/manifest.json"))
    same = {"mock_data": None, "data_path": shared / "data"}
    assert losses(tmp_path / "out") == losses_of_one_process(tmp_path / "alone", **SAME, **same)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_is_cut_off_is_reported_and_both_sides_end(tmp_path: Path, hosts: MakeHosts, victim: int) -> None:
    network = hosts(2)
    minutes = scaled_minutes(0.1)
    given = {"pp": 2, "hang_timeout_minutes": minutes, **ENDLESS}
    flags = small_run(tmp_path / "out", **given)
    with network.torchrun(tmp_path / "logs", 1, PROGRAM, *flags, nodes=range(2)) as jobs:
        jobs[0].wait_for_step(3)
        network.cut(victim)
        cut = time.monotonic()
        limit = 6 + OUT_OF_REACH + 5
        for number, job in enumerate(jobs):
            until(lambda job=job: "hang at step" in job.said(), limit, f"host {number} reports nothing")  # type: ignore[misc]
        assert time.monotonic() - cut > 60 * minutes
        assert all_end(jobs, within=END) == [1, 1]
        said = [job.said() for job in jobs]
    for number in range(2):
        other = 1 - number
        who = rf"megacore: hang at step \d+: probably rank {other} \(pp {other}, "
        assert re.search(who, said[number]), said[number]
        assert "out of reach" in said[number]


def test_a_slow_host_is_reported(tmp_path: Path, hosts: MakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks of a host compute slowly."""
    network = hosts(2)
    plan = [{"rank": rank, "at": "step", "call": 1, "fault": "slow"} for rank in (2, 3)]
    monkeypatch.setenv(HANG, json.dumps(plan))
    monkeypatch.setenv("SLOW", str(scaled(0.2)))
    flags = small_run(tmp_path / "out", **{**ENDLESS, "dp": 4, "log_interval": 8})
    with network.torchrun(tmp_path / "logs", 2, HANGING, *flags, nodes=range(2)) as jobs:
        until(lambda: "slow: rank" in jobs[0].said("stdout") + jobs[1].said("stdout"), START, "no report")
        said = jobs[0].said("stdout") + jobs[1].said("stdout")
    assert re.search(r"slow: rank [23] \(pp 0, dp [23], tp 0, on node1\) computes ", said), said


def test_a_slow_network_only_takes_time(tmp_path: Path, hosts: MakeHosts) -> None:
    network = hosts(2)
    network.limit(1, megabits=20)
    flags = small_run(tmp_path / "out", **SAME, dp=2, hang_timeout_minutes=scaled_minutes(0.02))
    trained(network, tmp_path / "logs", 1, flags, 0, 1)
    assert losses(tmp_path / "out") == losses_of_one_process(tmp_path / "alone", **SAME)


def test_a_run_continues_on_fewer_hosts_when_one_dies(tmp_path: Path, hosts: MakeHosts) -> None:
    network = hosts(4)
    given = {**SAME, "tp": 2, "pp": 2, "save_interval": 2, "load": "auto"}
    flags = small_run(tmp_path / "out", **{**given, "dp": 2, "train_iters": 1_000_000, "lr_decay_iters": 20})
    with network.torchrun(tmp_path / "logs", 2, PROGRAM, *flags, nodes=range(4)) as jobs:
        until(lambda: (tmp_path / "out" / "step_00000004").exists(), START, "no checkpoint")
        network[3].kill()
        assert all_end([jobs[0], jobs[1], jobs[2]], within=END) == [1, 1, 1]
        said = said_by(jobs[:3])
    assert "died" in said or "lost the connection to a rank of another machine" in said, said
    assert "Traceback" not in "\n".join(job.said() for job in jobs[:3])
    saved = max(int(path.name[5:]) for path in (tmp_path / "out").glob("step_????????"))
    flags = small_run(tmp_path / "out", **{**given, "dp": 1, "train_iters": saved + 2, "lr_decay_iters": 20})
    trained(network, tmp_path / "again", 2, flags, 0, 2)
    expected = losses_of_one_process(tmp_path / "alone", **SAME, train_iters=saved + 2, lr_decay_iters=20)
    assert losses(tmp_path / "out") == expected


def test_torchrun_goes_on_with_the_hosts_that_are_left(tmp_path: Path, hosts: MakeHosts) -> None:
    """`--nnodes 1:2`: the job continues on one host, with fewer replicas."""
    network = hosts(2)
    given = {**SAME, "tp": 2, "save_interval": 2, "load": "auto", "train_iters": 60}
    flags = small_run(tmp_path / "out", **given)
    elastic: dict[str, Any] = {"max_restarts": 3, "monitor_interval": 0.2, "rdzv_conf": "last_call_timeout=3"}
    with network.torchrun(
        tmp_path / "logs", 2, PROGRAM, *flags, nodes=range(2), c10d=True, nnodes="1:2", **elastic
    ) as jobs:
        until(lambda: (tmp_path / "out" / "step_00000004").exists(), START, "no checkpoint")
        network[1].kill()
        assert jobs[0].ends(START)[0] == 0, said_by(jobs)
    assert losses(tmp_path / "out") == losses_of_one_process(tmp_path / "alone", **SAME, train_iters=60)


LASTING = {**SAME, "global_batch_size": 6, "survive": True, "train_iters": 60}
ALONE = {"survive": None, "zero_stage": None}


@pytest.mark.parametrize(
    ("count", "per_node", "changes"),
    [
        (2, 1, {"zero_stage": 1}),
        (3, 1, {"zero_stage": 3}),
        (2, 3, {"zero_stage": 2}),
        (4, 1, {"zero_stage": 2, "global_batch_size": 4}),  # of the three that are left, two train
    ],
)
def test_a_run_survives_a_host_and_takes_it_back(
    tmp_path: Path, hosts: MakeHosts, count: int, per_node: int, changes: dict[str, int]
) -> None:
    network, output, logs = hosts(count), tmp_path / "out", tmp_path / "logs"
    flags = small_run(output, **{**LASTING, **changes}, dp=count * per_node)
    with network.torchrun(logs, per_node, PROGRAM, *flags, nodes=range(count)) as jobs:
        jobs[0].wait_for_step(3)
        victim = count - 1
        network[victim].kill()
        until(lambda: recoveries(output) == 1, START, "the run did not continue")
        with network.torchrun(
            tmp_path / "back", per_node, PROGRAM, *flags, nodes=range(count), starts=[victim]
        ) as back:
            assert all_end([*jobs[:victim], *back]) == [0] * count, said_by([*jobs, *back])
    said = said_by(jobs)
    assert "on disk" not in said and "its start" not in said, said
    assert recoveries(output) == 2
    assert losses(output) == losses_of_one_process(tmp_path / "alone", **{**LASTING, **changes, **ALONE})


def test_a_run_survives_a_cut_cable(tmp_path: Path, hosts: MakeHosts) -> None:
    """The host beyond it is lost, and taken in when it is within reach again."""
    network, output = hosts(2), tmp_path / "out"
    flags = small_run(output, **LASTING, dp=2)
    with network.torchrun(tmp_path / "logs", 1, PROGRAM, *flags, nodes=range(2)) as jobs:
        jobs[0].wait_for_step(3)
        network.cut(1)
        until(lambda: recoveries(output) == 1, START, "the run did not continue")
        network.join(1)
        assert all_end(jobs) == [0, 0], said_by(jobs)
    assert losses(output) == losses_of_one_process(tmp_path / "alone", **{**LASTING, "survive": None})


def test_nodes_save_together_what_none_has_room_for(tmp_path: Path, hosts: MakeHosts) -> None:
    """Each of those that are left has two of three parts, and no room in memory for the third."""
    network, output, alone = hosts(3), tmp_path / "out", {**LASTING, **ALONE}
    full = "import shutil, types\nshutil.disk_usage = lambda path: types.SimpleNamespace(free=0)"
    program = launching.patched_program(tmp_path, full)
    flags = small_run(output, **{**LASTING, "zero_stage": 2}, zero_shard_size=3, dp=3)
    with network.torchrun(tmp_path / "logs", 1, program, *flags, nodes=range(3)) as jobs:
        jobs[0].wait_for_step(3)
        network[2].kill()
        until(lambda: recoveries(output) == 1, START, "the run did not continue")
        with network.torchrun(tmp_path / "back", 1, program, *flags, nodes=range(3), starts=[2]) as back:
            assert all_end([*jobs[:2], *back]) == [0, 0, 0], said_by([*jobs, *back])
    assert len(re.findall(r"continue from step \d+ on disk", said_by(jobs))) == 2, said_by(jobs)
    assert losses(output) == losses_of_one_process(tmp_path / "alone", **alone)


def recoveries(output: Path) -> int:
    return (output / "events.jsonl").read_text().count('"recovery"')
