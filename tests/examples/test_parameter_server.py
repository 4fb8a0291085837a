"""examples/parameter_server: consistency, and a server that is killed for real."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest
import torch
from torch import Tensor

import parameter_server
from client import KeysLost, ParameterClient
from hash_ring import HashRing
from server import ASYNCHRONOUS, Server, serve
from tasks import MODELS, load
from tests.distributed import run_distributed, start_server
from tests.examples.conftest import printed
from tests.patience import patience
from training import Plan, train_alone, work

SECRET, SERVERS, WORKERS, KEYS = b"secret", 3, 2, 200


def test_without_a_server_its_keys_are_where_their_copies_were() -> None:
    before, after = HashRing(range(4)), HashRing((0, 1, 3))
    for key in range(KEYS):
        owner, copy = before.holders(key, KEYS)
        assert after.holders(key, KEYS)[0] == (copy if owner == 2 else owner)


def test_a_push_that_arrives_twice_counts_once() -> None:
    keys = torch.tensor([4, 9])
    server = Server(keys, torch.zeros(2, 3).double(), workers=2, staleness=ASYNCHRONOUS)
    for clock, worker in ((1, 0), (1, 0), (1, 1), (2, 0)):
        server.push(worker, clock, keys[1:], torch.ones(1, 3).double())
    assert server.values.tolist() == [[0.0] * 3, [3.0] * 3]
    assert server.clocks.tolist() == [[0, 0], [2, 1]]


@pytest.mark.parametrize("staleness, answered", [(0, 1), (2, 3), (ASYNCHRONOUS, 5)])
def test_a_reader_runs_ahead_of_the_slowest_worker_by_the_staleness(staleness: int, answered: int) -> None:
    keys = torch.tensor([0])
    server = Server(keys, torch.zeros(1, 1).double(), workers=2, staleness=staleness)
    server.push(1, 1, keys, torch.ones(1, 1).double())  # the slow one
    for clock in range(1, 6):
        server.push(0, clock, keys, torch.ones(1, 1).double())
        assert (server.pull(keys, clock) is not None) == (clock <= answered)
    server.leave(1)
    assert server.pull(keys, 5) is not None, "nobody waits for a worker that has left"


def test_bulk_synchronous_values_never_contain_a_later_step_of_a_fast_worker() -> None:
    keys, one = torch.tensor([0]), torch.ones(1, 1).double()
    server = Server(keys, torch.zeros(1, 1).double(), workers=2, staleness=0)
    server.push(0, 1, keys, one)
    assert server.pull(keys, 1) is None
    server.push(1, 1, keys, one)
    server.push(0, 2, keys, 10 * one)  # before worker 1 has read the values of step 1
    values = server.pull(keys, 1)
    assert values is not None
    assert values.tolist() == [[2.0]]
    server.push(1, 2, keys, one)
    assert server.values.tolist() == [[13.0]]


def host(number: int, plan: Plan, pipe: Connection) -> None:
    """The process of a server."""
    ring = HashRing(range(SERVERS))
    held = torch.tensor([key for key in range(plan.keys) if number in ring.holders(key, plan.keys)])
    server = Server(held, plan.initial_values()[held], workers=plan.workers, staleness=0)
    listener = Listener(("127.0.0.1", 0), authkey=SECRET)
    pipe.send(listener.address)
    serve(server, listener, plan.workers)
    pipe.send(server.clocks.unique().tolist())


@contextlib.contextmanager
def hosted(plan: Plan) -> Iterator[tuple[list[ForkServerProcess], list[Any], dict[int, tuple[str, int]]]]:
    """Three processes of servers, the pipes to them, and their addresses."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    pipes, processes = list[Any](), list[ForkServerProcess]()
    for number in range(SERVERS):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=host, args=(number, plan, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        yield processes, pipes, {number: pipe.recv() for number, pipe in enumerate(pipes)}
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_server_is_killed_and_nothing_is_lost() -> None:
    """Worker 0 is at its sixth step then, and worker 1 waits for it at a server."""
    train, _ = load()
    has_come, is_killed = threading.Event(), threading.Event()
    plan = Plan(MODELS["logistic"], steps=12, workers=WORKERS)
    with hosted(plan) as (processes, pipes, addresses):
        clients = [ParameterClient(addresses, SECRET, worker=w, keys=plan.keys) for w in range(WORKERS)]
        pull = clients[0].pull

        def pull_after_the_kill() -> Tensor:
            if clients[0].clock == 5:
                has_come.set()
                is_killed.wait(patience(60))
            return pull()

        clients[0].pull = pull_after_the_kill  # type: ignore[method-assign]
        threads = [threading.Thread(target=work, args=(clients[w], plan, train, w)) for w in range(WORKERS)]
        for thread in threads:
            thread.start()
        assert has_come.wait(patience(60))
        processes[1].kill()
        is_killed.set()
        for thread in threads:
            thread.join()
        values = clients[0].pull()
        assert [client.dead for client in clients] == [{1}, {1}]
        for client in clients:
            client.close()
        assert [pipes[number].recv() for number in (0, 2)] == [[plan.steps]] * 2, "every push is in every key"
    torch.testing.assert_close(values, train_alone(plan, train), rtol=0, atol=1e-12)


def test_two_deaths_are_reported_with_the_key() -> None:
    plan = Plan(MODELS["logistic"], steps=1, workers=1)
    with hosted(plan) as (processes, _, addresses):
        client = ParameterClient(addresses, SECRET, worker=0, keys=plan.keys)
        for process in processes[:2]:
            process.kill()
            process.join()
        with pytest.raises(KeysLost, match=r"key \d+ was on servers \((0, 1|1, 0)\), which are dead"):
            client.pull()
        client.close()


@pytest.mark.slow
def test_the_script_trains_at_every_staleness() -> None:
    argv = ["--steps", "20", "--staleness", "0,2,async", "--straggle", "0.001", "--kill-at", "7"]
    (status, text), *others = run_distributed(printed, 4, parameter_server.main, argv, init=False)
    assert status == 0
    assert others == [(0, "")] * 3
    rows = re.findall(r"^ *(\S+) +\d+ +(\d+) +[\d.]+ +([\d.]+)%$", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["0", "2", "asynchronous"]
    assert int(rows[0][1]) == 0
    assert int(rows[1][1]) <= 2
    assert all(float(share) > 80 for _, _, share in rows)
    assert "dead for the workers: [0]" in text
    assert "in every key that is left: [20] of 20" in text
    differences = [float(number) for number in re.findall(r"largest difference (\S+)", text)]
    assert len(differences) == 2
    assert max(differences) < 1e-12
