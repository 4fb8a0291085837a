"""A run that is started as one before it ends: the watcher of that one stays, or the new run gets its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megacore.files import take_lock
from megacore.watch import start
from megacore.watch.ledger import Ledger
from megacore.watch.marks import Current
from megacore.watch.node import Node, leaving_file, make, remove
from megacore.watch.processes import born
from megacore.watch.watcher import Watcher
from tests.unit.watch_records import identity

ME = {"pid": os.getpid(), "born": born(os.getpid())}


def test_a_watcher_leaves_unless_a_rank_of_a_new_run_is_there(tmp_path: Path) -> None:
    watcher = Watcher(Node(tmp_path), sys.stderr)
    watcher.run()  # returns at once: whoever has started it is gone
    assert leaving_file(tmp_path).exists()  # a rank that comes now waits until the directory is gone
    Ledger(tmp_path, identity(0, 2, **ME))
    assert not watcher._leaves()
    assert not leaving_file(tmp_path).exists()
    assert [one.rank for one in watcher.node.look()] == [0]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_comes_while_a_watcher_leaves_has_a_ledger_and_a_watcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(start.subprocess, "Popen", lambda command, **_: started.append(command))
    monkeypatch.setattr(start.faulthandler, "register", lambda *_, **__: None)
    monkeypatch.setattr(Current, "ledger", None)
    directory = tmp_path / "ledgers"
    make(directory)
    lock = os.open(directory / start._LOCK, os.O_RDWR | os.O_CREAT)
    take_lock(lock)  # as the watcher of the run before
    leaving_file(directory).touch()

    def decide() -> None:
        time.sleep(0.1)
        if leaves:
            remove(directory)
            os.close(lock)
        else:
            leaving_file(directory).unlink()

    watcher = threading.Thread(target=decide)
    watcher.start()
    begun = [start._begin_in(directory, identity(0, 2, **ME))]
    watcher.join()
    if leaves:
        begun.append(start._begin_in(directory, identity(0, 2, **ME)))
    assert begun == ([False, True] if leaves else [True])
    assert [one.rank for one in Node(directory).look()] == [0]
    assert len(started) == leaves
    assert [path.name for path in tmp_path.iterdir()] == ["ledgers"]
