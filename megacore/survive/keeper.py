"""The keeper: the process that the launcher starts, whose child trains. It loads what training loads, computes nothing,
and has no threads of its own, so that a fork of it is a rank that is ready within milliseconds. Its life goes in
generations: the keepers meet and agree on a plan, their children train, and when one of these dies, is stopped or hangs
all are ended and the keepers meet again. A launcher that ends a node with its first process never sees a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from megacore import has_ring
from megacore.checkpoint.directory import next_serial, published
from megacore.checkpoint.manifest import read_manifest
from megacore.checkpoint.storage import LocalRun
from megacore.config import ResolvedConfig
from megacore.config.messages import counted, ranks_in_words
from megacore.config.spelling import flag_and_value
from megacore.data.gpt.build import tokenizer_of
from megacore.errors import EXIT_HUNG, EXIT_REFUSED, CheckpointError, UserError
from megacore.remote import location
from megacore.survive.copies import Inventory, NodeMemory, newest, publish_parts, remove_older, save_parts
from megacore.survive.layouts import chosen_before, layout_for, write_layouts
from megacore.survive.meeting import ASKED, BEAT_SECONDS, EXIT_ASKS, NOBODY, Meeting, Plan, Presence, Request
from megacore.train.peers import HANDLED
from megacore.train.stopping import ENDING, prepare_signals

Train = Callable[[Plan, int], int]
_LOADED = (  # by training, sooner or later
    *("commands.lr_range", "observe.for_training", "plan.for_training", "plan.next_layout", "survive.writer"),
    *("watch.for_training", "watch.start", "watch.stragglers"),
    *(f"train.{name}" for name in ("bert_task", "gpt_task", "launch", "trainer")),
)
_SECONDS_STOPPED = 1.0  # that a child may be stopped
_SECONDS_FOR_A_CAUSE = 6.0  # that another keeper has to say why a child failed, if that was only an echo
_SECONDS_BETWEEN_LOOKS, _SECONDS_BETWEEN_QUESTIONS = 0.02, 0.1
_MOST_TRIES = 7  # generations that begin at the same step
_MOST_FAILURES = 3  # of one rank among them, which then rests
_SECONDS_OF_REST = 600.0
_SECONDS_OF_CHOICE = 1.0  # that the planner may take for a layout
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
EXIT_FAILED = 1


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What a generation continues from: `load` or `slot` and `parts` as those of its plan."""

    step: int
    words: str
    load: str | None = None
    slot: str | None = None
    parts: Sequence[Sequence[int]] = ()
    problems: Sequence[str] = ()


class Child:
    """A process that trains."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None  # its exit status, as of subprocess, once it has ended
        self.ended = 0.0  # when that was seen
        self.stopped: float | None = None  # since when it is stopped

    def look(self) -> int | None:
        """See what has become of it; one that stays stopped is ended. Returns the exit status."""
        if self.status is not None:
            return self.status
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if pid and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
            self.status, self.ended = os.waitstatus_to_exitcode(status), time.monotonic()
            self.kill()  # what it has started
            return self.status
        if pid:
            self.stopped = time.monotonic() if os.WIFSTOPPED(status) else None
        if self.stopped is not None and time.monotonic() - self.stopped > _SECONDS_STOPPED:
            self.kill()
        return None

    def kill(self) -> None:
        """End it with all that it has started."""
        for end in (os.killpg, os.kill) if self.status is None else (os.killpg,):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)

    def failure(self) -> str | None:
        """How it has ended, if another one may do better; None: it has not, or has said why."""
        if self.status is None or (self.status >= 0 and self.status != EXIT_HUNG):
            return None
        if self.stopped is not None:
            return "was stopped, and is ended"
        return "was ended as hung" if self.status == EXIT_HUNG else f"was ended by {_name(-self.status)}"


class Keeper:
    """Keeps this process's part of a run. `train`: what a child does with a plan, and the number of the generation;
    returns its exit status. `fixed`: values that stay whatever the layout is, by field. `read_data`: builds the indexes
    of the data, which a spare needs once it trains."""

    def __init__(
        self, config: ResolvedConfig, train: Train, fixed: Mapping[str, Any], read_data: Callable[[], object]
    ) -> None:
        self._config, self._train, self.fixed, self._read_data = config, train, fixed, read_data
        self._checkpoints = location(config.checkpoint_dir)
        for name in ("torch._dynamo", *(f"megacore.{name}" for name in _LOADED if has_ring(name.partition(".")[0]))):
            importlib.import_module(name)
        gc.freeze()  # the collector would touch, and so copy, the pages that children share
        self.memory = NodeMemory(os.environ, config.training.output_dir, int(os.environ.get("RANK", "0")))
        self._meeting = Meeting(self.memory.node)
        self._child: Child | None = None
        self._reader: Child | None = None  # of a spare, that reads the data's indexes
        self.signal = 0  # that asks the run to end
        self._known: dict[int, Presence] = {}  # the keepers as they came last
        self._layouts: dict[int, dict[str, Any] | None] = {}  # that were chosen, by the most ranks

    def run(self) -> int:
        """Keep the run until it ends; its exit status."""
        before = {number: signal.signal(number, self._pass_on) for number in HANDLED}
        status: int | None = None
        try:
            generation, current = 0, self._meeting.generation()
            if current is None:  # what a killed job of the same name has left is not of this one
                remove_older(self.memory.path, sys.maxsize)
            else:  # the run goes on without this keeper, which is one of its ranks again or a spare
                status, generation = self._meeting.status(current), current
                plan = self._meeting.plan(current)
                if status is None and plan and (self._lacks(plan) or self._meeting.rank in plan.members):
                    self._meeting.end(current, f"rank {self._meeting.rank} is back")
                    generation += 1
            while status is None:
                plan = self._agreed(generation)
                if plan is None:
                    status = 128 + self.signal
                elif plan.refused:
                    status = EXIT_REFUSED if generation == 0 else EXIT_FAILED
                else:
                    status = self._lived(generation, plan)
                generation += 1
            self._meeting.leave()
        except RuntimeError as error:
            self._end_child()
            if status is None:
                where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                _say(f"rank {self._meeting.rank} lost the job's store at {where}, where the keepers meet: {error}")
                status = EXIT_FAILED
        finally:
            self.memory.leave()
            for number, handler in before.items():
                signal.signal(number, handler)
        return status

    def _ranks(self, values: Mapping[str, Any]) -> int:
        """That train with other values of the run's settings."""
        return self._config.with_values(values).parallel.ranks

    def _is_trial(self, plan: Plan, step: int) -> bool:
        """Whether a generation that has this step in memory still measures what --retune tries."""
        return plan.fallback is not None and step <= plan.step + self._config.watch.retune_after

    def _lacks(self, plan: Plan) -> bool:
        """Whether a generation has fewer ranks than the run has asked for."""
        return len(plan.members) < self._config.parallel.ranks

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """What the launcher tells this process is for its child."""
        self.signal = self.signal or (number if number != signal.SIGUSR1 else 0)
        if self._child is not None and self._child.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

    def _pause(self) -> None:
        self._meeting.beat()
        time.sleep(_SECONDS_BETWEEN_LOOKS)

    # ---- agreeing

    def _agreed(self, generation: int) -> Plan | None:
        """The plan of a generation, which the lowest of those that are there makes when nobody else is to come; None: a
        signal asks the run to end, which has nothing to save yet."""
        meeting = self._meeting
        begun = time.monotonic()
        meeting.enter(generation)
        while True:
            if self.signal and not generation:
                return None
            if (plan := meeting.plan(generation)) is not None:
                return plan
            present = meeting.present(generation)
            self._known |= present
            others = [rank for rank in range(meeting.size) if rank != meeting.rank]
            # At the start all are waited for: to load torch takes one longer than another.
            patience = 0.0 if generation else 60 * self._config.parallel.distributed_timeout_minutes
            waits = time.monotonic() - begun < patience
            lost = [] if waits else meeting.lost(others, self._known)
            here = {rank: one for rank, one in present.items() if rank not in lost}
            if len(here) + len(lost) >= meeting.size:
                self._planned_together(generation, here)
            self._pause()

    def _planned_together(self, generation: int, here: dict[int, Presence]) -> None:
        """The first keeper of each node says what its memory has, and does what is asked of it; the first of all asks,
        and makes the plan once it needs to ask no more."""
        meeting, nodes = self._meeting, {one.node for one in here.values()}
        request = meeting.asked(generation)
        if generation and meeting.rank == min(rank for rank, one in here.items() if one.node == self.memory.node):
            self._answer(generation, request)
        if meeting.rank != min(here):
            return
        shown = {node: found for node in nodes if (found := meeting.shown(generation, node)) is not None}
        if generation and (len(shown) < len(nodes) or (request and not all(map(request.is_met, shown.values())))):
            return
        plan = self._next_plan(generation, here, shown, request) if generation else self._first_plan(here)
        if plan is not None and meeting.propose(generation, plan):
            for line in plan.lines:
                _say(line)

    def _answer(self, generation: int, request: Request | None) -> None:
        """Say what this node's memory has, and do what is asked of it."""
        memory, found = self.memory, self._meeting.shown(generation, self.memory.node)
        if found is None:
            self._meeting.show(generation, memory.inventory())
        elif request is not None and not request.is_met(found):
            if request.slot not in found.checked:
                found = memory.check(found, request.slot, self._meeting.beat)
            if request.first:
                into, parts = Path(self._config.checkpoint_dir, request.first), request.parts.get(memory.node, ())
                problems = list(found.problems)
                try:
                    self._beating(partial(save_parts, memory.path / request.slot, parts, into))
                except OSError as error:
                    problems.append(str(error))
                found = dataclasses.replace(found, problems=problems, saved=request.first)
            self._meeting.show(generation, found)

    def _beating(self, call: Callable[[], None]) -> None:
        """Do what takes long, and give signs of life meanwhile."""
        with ThreadPoolExecutor(1) as thread:
            doing = thread.submit(call)
            while wait([doing], timeout=0.5).not_done:
                self._meeting.beat()
            doing.result()

    def _is_checked(self, generation: int, source: _Source, shown: Mapping[str, Inventory]) -> bool:
        """Whether all nodes have checked what the run is to continue from; else they are asked."""
        if source.slot is None or all(source.slot in found.checked for found in shown.values()):
            return True
        self._meeting.ask(generation, Request(slot=source.slot))
        return False

    def _first_plan(self, here: dict[int, Presence]) -> Plan:
        serial = next_serial(self._checkpoints) if isinstance(self._checkpoints, Path) else 0
        members = sorted(here)[: self._config.parallel.ranks]  # the others are spares
        start = Plan(present=sorted(here), members=members, nodes=_numbers(here, members), values={}, serial=serial)
        goes_on = self._config.watch.retune and self._config.checkpoint.load == "auto" and serial > 1
        if goes_on and (values := chosen_before(self._config, self.fixed)):
            flags = " ".join(flag_and_value(name, value) for name, value in values.items() if value is not None)
            lines = [f"the run goes on with what --retune has chosen: {flags}"]
            start = dataclasses.replace(start, values=values, tuning={"tried": [], "failed": []}, lines=lines)
        if missing := [rank for rank in range(self._meeting.size) if rank not in here]:
            why = f"{ranks_in_words(missing)} did not come in --distributed-timeout-minutes: start all of them"
            return dataclasses.replace(start, refused=why, lines=[why])
        return start

    def _next_plan(
        self, generation: int, here: dict[int, Presence], shown: dict[str, Inventory], request: Request | None
    ) -> Plan | None:
        """The plan after a failure; None: more is asked of the nodes before. `request`: what they have done."""
        before, over = self._meeting.plan(generation - 1), self._meeting.over(generation - 1)
        assert before is not None and over is not None
        cause, at = over["cause"], over["at"]
        passed = [*before.passed, over["passed"]] if over["passed"] else before.passed
        saved = self._saved(before.serial, passed)
        everything = _source(list(shown.values()), saved)
        step = everything.step
        blamed = list(before.blamed) if step == before.step else []
        if over["blamed"] is not None:
            blamed.append(over["blamed"])
        # As where a device is broken: without it the others may go on.
        bad = [rank for rank in sorted(here) if _rests(rank, blamed)]
        fit = [rank for rank in sorted(here) if rank not in bad]
        values, asked = self._layout(len(fit)), over["asked"] or {}
        chosen, tuning = asked.get("values", before.values), asked.get("tuning", before.tuning)
        if has_failed := not asked and tuning is not None and self._is_trial(before, step):
            *tried, last = tuning["tried"]
            chosen, tuning = before.fallback, {"tried": tried, "failed": [*tuning["failed"], last["values"]]}
        elif not asked and step > before.step + self._config.watch.retune_after:  # what it has decided stays
            tuning = tuning and {**tuning, "tried": []}
        # What was chosen for so many ranks stays.
        if values is not None and self._ranks(chosen) == self._ranks(values):
            values = chosen
            cause += " with settings that --retune tried, and does not try again" if has_failed else ""
        else:
            tuning, asked = None, {}
        if over["asked"] and (lost := [rank for rank in before.present if rank not in here]):
            cause = f"the keeper of {ranks_in_words(lost)} is lost as {cause}"
        why = ""
        if len(blamed) >= _MOST_TRIES or not fit:
            why = f"it has failed {len(blamed)} times after step {step}"
        elif values is None:
            why = f"{counted(len(fit), 'rank')} cannot train this model with this batch"
        elif passed and not step:
            why = "neither memory nor disk has another"
        if why or values is None:
            everything = _source(list(shown.values()), saved, needs_room=False)  # to save it takes none
            last = self._last_on_disk(generation, everything, saved, shown, request)
            if last is None:
                return None
            none = "" if passed else ", without a checkpoint on disk"
            rest = f"; --load auto continues from step {last}" if last else none
            line = f"{cause}, and the run ends: {why}{rest}"
            lines = [*everything.problems, line]
            return Plan(present=sorted(here), members=[], nodes=[], values={}, refused=why, lines=lines)
        members = _members(fit, self._ranks(values), here, shown)
        # Those that train bring the state: what a node without them has is out of reach.
        held = {node: shown[node] for node in dict.fromkeys(here[rank].node for rank in members)}
        source, whole = (_source(list(held.values()), saved, needs_room=needs) for needs in (True, False))
        if whole.step > source.step:  # what no node has room for goes over the disk
            if self._last_on_disk(generation, whole, saved, held, request) is None:
                return None
            source = _source(list(held.values()), self._saved(before.serial, passed))
        if not self._is_checked(generation, source, shown):
            return None
        degrees = self._config.with_values(values).parallel.degrees
        layout = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one process"
        lines = [*source.problems]
        if bad:
            rest = f"rests {_SECONDS_OF_REST / 60:g} minutes"
            lines.append(f"{ranks_in_words(bad)} failed {_MOST_FAILURES} times after step {step}, and {rest}")
        lines.append(f"{cause}: {counted(len(members), 'rank')} ({layout}) continue from {source.words}")
        interval = self._config.checkpoint.save_interval
        due = source.step - source.step % interval if interval and isinstance(self._checkpoints, Path) else 0
        if is_due := due > (saved.step if saved else 0):
            lines.append(f"the checkpoint of step {due} was not written: the next step is saved")
        return Plan(
            present=sorted(here),
            members=members,
            nodes=_numbers(here, members),
            values=values,
            load=source.load,
            slot=source.slot,
            parts=source.parts,
            step=source.step,
            saves=is_due,
            serial=before.serial,
            passed=passed,
            blamed=blamed,
            cause=cause,
            at=at,
            made=time.time(),
            asked=bool(asked),
            fallback=asked.get("fallback"),
            tuning=tuning,
            lines=lines,
        )

    def _layout(self, ranks: int) -> dict[str, Any] | None:
        """The layout for so many ranks: the planner's, if it is there and says so in time."""
        if ranks not in self._layouts:
            found = layout_for(self._config, ranks)
            if ranks < self._config.parallel.ranks and has_ring("plan"):
                reader, writer = os.pipe()
                # Another process: a search may start some, and ends at any time without a trace.
                child = Child(self._forked(partial(write_layouts, writer, self._config, ranks, self.fixed)))
                os.close(writer)
                deadline = time.monotonic() + _SECONDS_OF_CHOICE
                while child.look() is None and time.monotonic() < deadline:
                    self._pause()
                child.kill()
                while child.look() is None:
                    self._pause()
                with os.fdopen(reader, "rb") as said:
                    lines = said.read().splitlines()
                if lines:
                    found = json.loads(lines[-1])
                elif found is not None:
                    how = child.failure() or "found no layout"
                    _say(f"the planner {how}: what is left splits the model as before, as far as it can")
            self._layouts[ranks] = found
        return self._layouts[ranks]

    def _last_on_disk(
        self,
        generation: int,
        source: _Source,
        saved: _Source | None,
        shown: Mapping[str, Inventory],
        request: Request | None,
    ) -> int | None:
        """The step of the last checkpoint on disk, or 0, once what memory has of a later one is there; None: the nodes
        are asked for their parts of it before."""
        last = saved.step if saved else 0
        if not source.slot or source.step <= last or not isinstance(self._checkpoints, Path):
            return last
        if not self._is_checked(generation, source, shown):
            return None
        run = LocalRun(self._checkpoints)
        try:
            if request is None or not request.first:
                first, final = run.begin(source.step)
                owner = {part: node for node, parts in zip(shown, source.parts, strict=True) for part in parts}
                parts = {node: [part for part in owner if owner[part] == node] for node in shown}
                self._meeting.ask(generation, Request(slot=source.slot, first=first, last=final, parts=parts))
                return None
            ranks = len(set(chain.from_iterable(source.parts)))
            first, final = request.first, request.last
            self._beating(lambda: publish_parts(run, first, final, ranks, tokenizer_of(self._config)))
            return source.step
        except (OSError, UserError) as error:
            problems = chain([str(error)], *(found.problems for found in shown.values()))
            _say(f"step {source.step} in memory could not be saved: {'; '.join(problems)}")
        return last

    def _saved(self, serial: int, passed: Sequence[str]) -> _Source | None:
        """The newest checkpoint that this run has on disk, without those that are passed over; the first has that
        serial number."""
        if isinstance(self._checkpoints, Path):  # to list a store may start threads
            for directory in published(self._checkpoints):
                with contextlib.suppress(CheckpointError, OSError):
                    manifest = read_manifest(directory)
                    if manifest.serial >= serial and not manifest.is_in_doubt and str(directory) not in passed:
                        words = f"step {manifest.step} on disk: memory has no newer one"
                        return _Source(step=manifest.step, words=words, load=str(directory))
        return None

    # ---- a generation

    def _lived(self, generation: int, plan: Plan) -> int | None:
        """Let a child train, if the plan has one here, until the generation is over; the exit status of the run, if it
        is over too."""
        meeting, child = self._meeting, None
        self._known |= meeting.present(generation)
        if meeting.rank in plan.members:
            child = self._child = Child(self._forked(partial(self._become, plan, generation)))
            self.memory.note(child.pid)
            if self.signal:  # it came before there was a child
                self._pass_on(self.signal, None)
        elif meeting.rank not in plan.present and self._lacks(plan):
            meeting.end(generation, f"rank {meeting.rank} is back")
        elif self._reader is None:  # into the cache of this node, before a failure waits for it
            self._reader = Child(self._forked(self._read_ahead))
        # Each watches the one before it: of several that are lost together, one is missed.
        others = [rank for rank in plan.members if rank != meeting.rank]
        watched = [rank for rank in others if rank < meeting.rank][-1:] or others[-1:]
        begun = asked = looked = time.monotonic()
        has_ended = False
        while True:
            self._pause()
            now, is_over = time.monotonic(), False
            if self._reader is not None:
                self._reader.look()
            if child is not None and not has_ended and (ended := child.look()) is not None:
                has_ended = True
                # Whether a signal has ended it before training handled that.
                was_told = bool(self.signal) and ended in (-self.signal, 128 + self.signal)
                if ended == 0 or (was_told and not generation):
                    meeting.finish(generation, ended)  # it is done, or had nothing to save yet
                elif ended == EXIT_ASKS:
                    asked = json.loads((self.memory.path / ASKED).read_bytes())
                    meeting.end(generation, asked["cause"], asked=asked)
                # Settings that are tried may need too much memory; other causes come again, or are to be looked at.
                elif ended in (EXIT_FAILED, EXIT_REFUSED) and self._is_trial(plan, self.memory.newest_step()):
                    meeting.end(generation, f"rank {plan.members.index(meeting.rank)} failed")
                elif ended == EXIT_REFUSED and plan.load:  # it is damaged: an older one may be whole
                    meeting.end(generation, f"{plan.load} cannot be continued", passed=plan.load)
                elif how := f"was ended by {_name(self.signal)}" if was_told else child.failure():
                    blamed = NOBODY if was_told or ended == EXIT_HUNG else meeting.rank  # who hangs does not end first
                    meeting.end(generation, f"rank {plan.members.index(meeting.rank)} {how}", blamed=blamed)
            if has_ended or now - asked > _SECONDS_BETWEEN_QUESTIONS:
                asked, is_over = now, meeting.is_over(generation)
            if is_over:
                status = meeting.status(generation)
                if status != 0 or child is None or has_ended:  # else it is about to be done as well
                    self._end_child()
                    return status
            if now - looked > BEAT_SECONDS:
                looked = now
                has_rested = now - begun > _SECONDS_OF_REST and _rests(meeting.rank, plan.blamed)
                if has_rested and child is None and self._lacks(plan):
                    meeting.end(generation, f"rank {meeting.rank} is back")
                if lost := meeting.lost(watched, self._known):
                    meeting.end(generation, f"the keeper of {ranks_in_words(lost)} is lost", blamed=lost[0])
            if child is not None and has_ended and now - child.ended > _SECONDS_FOR_A_CAUSE:
                meeting.finish(generation, child.status or 0)  # it was no echo, and would come again

    def _end_child(self) -> None:
        child, self._child = self._child, None
        self.memory.note(0)
        if child is not None and child.status is None:
            child.kill()
            while child.look() is None:
                self._pause()

    def _forked(self, act: Callable[[], None]) -> int:
        """A process that does this, and ends with this one."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the store's, which a child does not use
            child = os.fork()
        if child:
            return child
        status = EXIT_FAILED
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() == parent:
                act()
                status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else EXIT_FAILED
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _read_ahead(self) -> None:
        with contextlib.suppress(Exception):  # whoever trains says what is wrong with the data
            self._read_data()

    def _become(self, plan: Plan, generation: int) -> None:
        """Train, in the child."""
        for number in HANDLED:
            # After a failure there is something to save: what ends the run is noted until training handles it.
            if not generation or number not in ENDING:
                signal.signal(number, signal.SIG_DFL)
        prepare_signals()
        if self.signal and not generation:
            signal.raise_signal(self.signal)
        attempt, me = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), plan.members.index(self._meeting.rank)
        os.environ |= {
            "RANK": str(me),
            "WORLD_SIZE": str(len(plan.members)),
            "LOCAL_WORLD_SIZE": str(plan.nodes.count(plan.nodes[me])),
            "GROUP_RANK": str(plan.nodes[me]),
            "TORCHELASTIC_RESTART_COUNT": f"{attempt}-{generation}",
        }
        # A spare may be beyond its node's devices: it takes one that no other member has.
        here = [one for one, node in zip(plan.members, plan.nodes, strict=True) if node == plan.nodes[me]]
        taken, devices = [self._known[one].local_rank for one in here], torch.accelerator.device_count()
        free = sorted(set(range(devices)) - set(taken))
        moved = dict(zip([one for one in taken if one >= devices], free, strict=False))
        if (local := self._known[self._meeting.rank].local_rank) in moved:
            os.environ["LOCAL_RANK"] = str(moved[local])
        if self._meeting.size > 1:
            # The store is a keeper's, or the launcher's: never this process's.
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
        status = self._train(plan, generation)
        importlib.import_module("megacore.train.launch").exit_with(status)


def _source(nodes: Sequence[Inventory], saved: _Source | None, *, needs_room: bool = True) -> _Source:
    """The newest whole step of the memory of some nodes, or a newer one that is saved."""
    slot, parts, found = newest(nodes, needs_room=needs_room)
    problems = [f"in memory, {problem}" for problem in found]
    if slot and (saved is None or slot.step >= saved.step):
        return _Source(
            step=slot.step, words=f"step {slot.step} in memory", slot=slot.name, parts=parts, problems=problems
        )
    start = _Source(step=0, words="its start: neither memory nor disk has a whole step")
    return dataclasses.replace(saved or start, problems=problems)


def _members(fit: Sequence[int], count: int, here: Mapping[int, Presence], shown: Mapping[str, Inventory]) -> list[int]:
    """So many of the ranks that may train, of nodes that together have as much of the newest step as they can."""
    _, parts, _ = newest(list(shown.values()))
    has = dict(zip(shown, map(set[int], parts), strict=False))  # nothing where no step is whole
    nodes, chosen, covered = list(dict.fromkeys(here[rank].node for rank in fit)), list[int](), set[int]()
    while nodes and len(chosen) < count:
        best = max(nodes, key=lambda node: len(has.get(node, set()) - covered))
        nodes.remove(best)
        covered |= has.get(best, set())
        chosen += [rank for rank in fit if here[rank].node == best]
    return sorted(chosen[:count])


def _numbers(here: Mapping[int, Presence], ranks: Sequence[int]) -> list[int]:
    """The number of the node of each of some ranks: the first has 0."""
    nodes = list(dict.fromkeys(here[rank].node for rank in ranks))
    return [nodes.index(here[rank].node) for rank in ranks]


def _rests(rank: int, blamed: Sequence[int]) -> bool:
    """Whether a rank has failed so often at the same step that the others go on without it."""
    return blamed.count(rank) >= _MOST_FAILURES


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of real time
        return f"signal {number}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"megacore: survive: {text}", file=sys.stderr, flush=True)
