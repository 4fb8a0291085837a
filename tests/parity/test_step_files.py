"""A train step, followed with a debugger: the files that it runs through, and whether an editor resolves its calls."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.parity.runs import trainer_of
from tests.unit.packaging_builds import ROOT

# The files that a step of GPT-2 runs through on one process. Add a file if the step needs another subject, and not in
# order to split one; remove a file that is gone.
FILES = """
data/loading/loader
layers/attention layers/block layers/norm
models/gpt
ops/activation ops/attention ops/dispatch ops/loss ops/norm
optim/adamw optim/fused_adam optim/lr_schedules optim/optimizer optim/spikes optim/update
parallel/canonical parallel/products parallel/sequence parallel/tensor
pipeline/backward pipeline/runtime pipeline/stage
train/callbacks train/clock train/gpt_task train/history train/sinks train/step train/stopping train/trainer
parallel/heartbeat watch/for_training watch/ledger watch/stragglers
zero/bucket zero/data_parallel zero/local_segments
"""
# Calls of a function under another name, with the reason.
EXCEPTIONS = {
    "activate": "an activation with or without a gate, with or without a bias, which its light recomputation calls too",
    "share.exchange": "operators know no groups: the collective is given to them",
}
# What Python calls for an expression without a name.
PROTOCOLS = {"__next__", "__getitem__", "__iter__", "__len__", "__enter__", "__exit__"}


@dataclass(frozen=True)
class Call:
    """A call of one function of megacore by another: the expression in the caller's source, and what it ran."""

    caller: CodeType
    called: CodeType
    expression: str

    @property
    def resolves(self) -> bool:
        """Whether the expression names the function, or its class, so that an editor finds the definition."""
        name = self.called.co_qualname.removesuffix(".__init__").removesuffix(".__post_init__").rpartition(".")[-1]
        return (
            name in PROTOCOLS
            or outer(self.called) == outer(self.caller) != self.called.co_qualname
            or re.search(rf"\b{re.escape(name)}\b", self.expression) is not None
            or any(self.expression.startswith(allowed) for allowed in EXCEPTIONS)
        )


def outer(code: CodeType) -> str:
    """The function or method that a lambda, a comprehension or a local function is part of, or the function itself."""
    return code.co_qualname.partition(".<locals>")[0]


@dataclass(frozen=True)
class Steps:
    """What a step ran: its functions, and their calls of each other."""

    functions: set[CodeType]
    calls: set[Call]


def record(body: Callable[[], Any], package: str) -> Steps:
    """The functions below a folder that this thread enters while `body` runs."""
    steps, sites = Steps(set(), set()), dict[tuple[CodeType, int, CodeType], None]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(package):
            return
        steps.functions.add(frame.f_code)
        # A generator that goes on was called before, and what torch or dataclasses call they find by its type.
        starts = not frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_lasti <= 0
        if starts and frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(package):
            sites[frame.f_back.f_code, frame.f_back.f_lasti, frame.f_code] = None

    sys.setprofile(note)
    try:
        body()
    finally:
        sys.setprofile(None)
    steps.calls.update(Call(caller, called, expression(caller, at)) for caller, at, called in sites)
    return steps


def expression(code: CodeType, at: int) -> str:
    """The source of the instruction at an offset of the byte code."""
    first, last, start, stop = list(code.co_positions())[at // 2]
    assert first is not None and last is not None
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
    return b"".join([*lines[:-1], lines[-1][:stop]])[start:].decode()


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    trainer = trainer_of((1, 1, 1), tmp_path_factory.mktemp("run"))
    trainer.train_step(next(trainer.batches))  # the first makes the schedule, buffers and state
    return record(lambda: trainer.train_step(next(trainer.batches)), str(ROOT / "megacore") + "/")


def test_a_steady_step_runs_through_these_files(steps: Steps) -> None:
    files = {Path(function.co_filename).relative_to(ROOT / "megacore") for function in steps.functions}
    assert {file.with_suffix("").as_posix() for file in files} == set(FILES.split()), "see the comment at FILES"


def test_every_call_of_a_step_names_what_it_calls(steps: Steps) -> None:
    assert len(steps.calls) > 150
    unresolved = sorted(
        f"{Path(call.caller.co_filename).relative_to(ROOT)} {call.caller.co_qualname}: "
        f"{call.expression!r} calls {call.called.co_qualname}"
        for call in steps.calls
        if not call.resolves
    )
    assert not unresolved, "\n".join(unresolved)


def plain(x: int) -> int:
    return x + 1


class Holder:
    def __init__(self) -> None:
        self.run = plain

    def direct(self) -> int:
        return plain(1)

    def through_a_field(self) -> int:
        return self.run(1)

    def through_a_lambda(self) -> int:
        call = lambda: plain(1)  # noqa: E731
        return call()


def test_a_call_through_a_field_is_found() -> None:
    here, holder = str(Path(__file__).parent) + "/", Holder()

    def unresolved(body: Callable[[], Any]) -> list[str]:
        calls = record(body, here).calls
        return [call.expression for call in calls if not call.resolves and call.caller is not record.__code__]

    assert unresolved(holder.direct) == []
    assert unresolved(holder.through_a_lambda) == []  # of the same function
    assert unresolved(holder.through_a_field) == ["self.run(1)"]
