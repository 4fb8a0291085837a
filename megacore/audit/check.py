"""What a ledger says of a run, whether its lines agree with each other, with checkpoints, and with another ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megacore.audit.ledger import BEGINS, FILE, BrokenLedger, Line, lines_of
from megacore.audit.state_hash import SHORT, in_hex, stored_hash, totals
from megacore.checkpoint.files import FileEntry, refuse_unlisted, verify
from megacore.checkpoint.load import Reader
from megacore.checkpoint.manifest import Manifest, marked_in_doubt, read_manifest
from megacore.config.messages import counted
from megacore.config.spelling import flag
from megacore.errors import CheckpointError, UserError
from megacore.remote import Location

CAUSES = {
    "samples": "it took other samples",
    "data": "the samples with these numbers have another content",
    "lr": "the learning rate is another",
    "loss": "the forward pass, or the weights before it",
    "norm": "the backward pass, or a sum of gradients",
    "skipped": "only one of them updated the weights",
    "state": "the update of weights and optimizer, or what changed them afterwards",
}
"""What a step's line tells, in the order in which a step makes it, and what is to blame where it is the first to
differ."""
# Without --reproducible: how far a loss and a norm may be from each other, relative, for each step since the weights
# were the same. As the layouts' tests allow.
_ROUNDING = {"fp32": {"loss": 1e-5, "norm": 1e-4}, "16 bits": {"loss": 2e-3, "norm": 3e-2}}
_MOST_STEPS = 100  # for which it grows: a loss of fp32 is then 0.1% away
_NO_STATE = in_hex(0)


class History:
    """A ledger whose chain holds, and whose lines follow from each other. Raises BrokenLedger at the first line that
    was changed, or does not follow; UserError where the file cannot be read, or has no line."""

    def __init__(self, path: Path, lines: Iterable[Line] | None = None) -> None:
        self.path = path
        self.lines: list[Line] = []  # all of them
        self.steps: dict[int, Line] = {}  # the line of each step that counts: the run went back behind the others
        self.saves: dict[str, Line] = {}  # the line of each checkpoint, by the digest of its manifest
        self.gone: set[str] = set()  # the digests of those behind which the run went back
        # Of each line with which the run went back, the steps that no longer count.
        self.abandoned: dict[int, range] = {}
        self._states: dict[int, tuple[Mapping[str, str], Line]] = {}  # known after each step
        self._starts: list[Line] = []  # of each line
        self._position = -1, -1  # the last step, and the samples that it leaves behind
        for line in lines_of(path) if lines is None else lines:
            if (wrong := self._follows(line) or self._other_state(line)) is not None:
                raise BrokenLedger(f"line {line.number} of {path} {wrong}")
            self.lines.append(line)
            self._starts.append(line if line.kind == "start" or not self._starts else self._starts[-1])
        if not self.lines or self.lines[0].kind != "start":
            raise UserError(f"{path} has no start of a run: give the {FILE} of a run with --ledger")

    def _follows(self, line: Line) -> str | None:
        """Take a line in; why it does not follow from those before it."""
        said, (step, samples) = line.record, self._position
        if line.kind in BEGINS:
            self._position = line.step, said["samples"]
            before = self.steps
            if said.get("loaded") in self.gone:  # a checkpoint of steps that no longer counted: they do again
                past = History(self.path, self.lines[: self.saves[said["loaded"]].number])
                self.steps, self._states = past.steps, past._states
                self.gone = set(self.saves) - (past.saves.keys() - past.gone)
            self.steps = {number: kept for number, kept in self.steps.items() if number <= line.step}
            self.gone |= {digest for digest, save in self.saves.items() if save.step > line.step}
            self._states = {number: state for number, state in self._states.items() if number <= line.step}
            if lost := [number for number, step_line in before.items() if self.steps.get(number) is not step_line]:
                self.abandoned[line.number] = range(min(lost), max(lost) + 1)
            if said.get("loaded") and not _begins_anew(totals(said["state"])):
                # A run that was killed between a save and its line goes on from it.
                self.saves.setdefault(said["loaded"], line)
        elif line.kind == "step":
            first, stop = said["samples"]
            self._position = line.step, stop
            self.steps[line.step] = line
            if (line.step, first) != (step + 1, samples):
                return f"has step {line.step} from sample {first} on, after step {step} and sample {samples}"
        else:
            self.saves[said["manifest"]] = line
        return None

    @property
    def start(self) -> Line:
        return self.start_of(self.lines[-1])

    def start_of(self, line: Line) -> Line:
        return self._starts[line.number - 1]

    def facts_of(self, line: Line) -> dict[str, str]:
        """Settings, code and libraries of a line's start, with the flags of today: an earlier ledger has some as flags
        that are parameters of another one now."""
        said = self.start_of(line).record["facts"].items()
        return {flag(name[2:].replace("-", "_")) if name[:2] == "--" else name: text for name, text in said}

    def save_of(self, step: int) -> Line | None:
        """The last save of a step."""
        return next((line for line in reversed(list(self.saves.values())) if line.step == step), None)

    def rounding_of(self, line: Line) -> Mapping[str, float] | None:
        """How far a step's loss and norm may be from those of another layout; None: not at all."""
        facts = self.start_of(line).record["facts"]
        if facts["--reproducible"] == "True":
            return None
        return _ROUNDING["fp32" if facts["--precision"] == "fp32" else "16 bits"]

    def different_tensors(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Kind and name of the tensors that differ in two lines of a step; none where they tell nothing."""
        names = self._names
        here, there = (_parts(line.get("tensors", "")) for line in (one, other))
        if not len(here) == len(there) == len(names):
            return []
        return [name for name, a, b in zip(names, here, there, strict=True) if a != b]

    @property
    def _names(self) -> list[tuple[str, str]]:
        return [(kind, name) for kind, of_kind in self.start.record["state"].items() for name in of_kind]

    def which_tensors(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
        """The same in words."""
        found = self.different_tensors(one, other)
        tensors = counted(len(self._names), "tensor")
        return f"; first {found[0][0]} of {found[0][1]}, {len(found)} of {tensors}" if found else ""

    def _other_state(self, line: Line) -> str | None:
        """How the state of a line differs from what an earlier one says of the same step."""
        state = totals_of(line)
        if state is None:
            return None
        known, of = self._states.setdefault(line.step, (state, line))
        for kind in known.keys() & state.keys():
            if known[kind] != state[kind] and not (_begins_anew(state) and kind != "model"):
                return f"has other {kind} after step {line.step} than line {of.number}: they changed in between"
        return None


def _begins_anew(state: Mapping[str, str]) -> bool:
    """Whether the optimizer has no state, as where none was loaded. `state`: hashes by kind."""
    return all(value == _NO_STATE for kind, value in state.items() if kind != "model")


def totals_of(line: Line) -> Mapping[str, str] | None:
    """The hashes of a line's state, one for each kind of tensor; None where it has none."""
    state = line.record.get("state")
    return state if state is None or line.kind == "step" else totals(state)


def checkpoint_problems(directory: Location, history: History) -> Iterator[str]:
    """What of a checkpoint is not as the ledger says."""
    where = directory.name
    try:
        manifest = read_manifest(directory)
        save = _saved_as(directory, manifest, history)
        changed = [name for name, entry in sorted(manifest.files.items()) if not _is_as_saved(directory / name, entry)]
        yield from (f"{where}: {name} is not what its manifest says" for name in changed)
        refuse_unlisted(directory, manifest.files)
        if save is None:
            yield f"{where}: no line has its manifest.json: it was changed, or saved while no ledger was written"
            save = history.save_of(manifest.step)
        if save is None:
            return
        for name, there, here in (
            ("step", save.step, manifest.step),
            ("consumed_samples", save.record["samples"], manifest.consumed_samples),
            ("updates", save.record.get("updates"), manifest.updates),
        ):
            if there not in (here, None):
                yield f"{where}: {name} {here}, but line {save.number} says {there}"
        reader = Reader(directory, manifest)
        said = save.record["state"]
        for kind in sorted(said.keys() | history.start_of(save).record["state"].keys()):
            names, entries = said.get(kind, {}), manifest.tensors.get(kind, {})
            for name in sorted(names.keys() | entries.keys()):
                if name not in entries or name not in names:
                    yield f"{where}: {kind} of {name} is {'missing' if name in names else 'new'}"
                elif stored_hash(reader, kind, name, entries[name].shape) != names[name]:
                    yield f"{where}: {kind} of {name} is not what line {save.number} says"
    except CheckpointError as error:
        yield f"{where}: {error}"


def _is_as_saved(path: Location, entry: FileEntry) -> bool:
    """Whether a file has the SHA-256 of its manifest: other weights can have one 64-bit hash of the ledger."""
    try:
        verify(path, entry, archived=True)
    except CheckpointError:
        return False
    return True


def _saved_as(directory: Location, manifest: Manifest, history: History) -> Line | None:
    """The line of the save of a checkpoint, whose weights may have been marked as in doubt since."""
    save = history.saves.get(manifest.manifest_sha256)
    if save is None and manifest.is_in_doubt:
        sound = read_manifest(directory, marked_in_doubt(directory, 0).encode())
        save = history.saves.get(sound.manifest_sha256)
    return save


def uncovered(directory: Location, history: History) -> set[str]:
    """The kinds of tensors in a checkpoint of which the ledger says nothing."""
    return read_manifest(directory).tensors.keys() - history.start.record["state"].keys()


def first_difference(history: History, line: Line, other: Mapping[str, Any], since: int) -> tuple[str, str] | None:
    """What of two lines of a step differs first, and how in words. `other`: the record of the other one. `since`: the
    step after which the weights were the same."""
    rounding, one = history.rounding_of(line), line.record
    near = {name: min(line.step - since, _MOST_STEPS) * each for name, each in (rounding or {}).items()}
    for name, cause in CAUSES.items():
        here, there = one.get(name), other.get(name)
        if here == there or (name in ("data", "state") and None in (here, there)):
            continue
        if rounding is not None and (name == "state" or _near(here, there, near.get(name))):
            continue
        tensors = history.which_tensors(one, other) if name == "state" else ""
        return name, f"{name} {_shown(name, here)} and {_shown(name, there)}: {cause}{tensors}"
    return None


def _near(here: Any, there: Any, rounding: float | None) -> bool:
    """Whether two numbers are equal but for rounding, where there may be any."""
    a, b = (float.fromhex(text) if rounding is not None else 0.0 for text in (here, there))
    return rounding is not None and abs(a - b) <= rounding * max(abs(a), abs(b))


def _shown(name: str, value: Any) -> str:
    return f"{float.fromhex(value):.9g} ({value})" if name in ("lr", "loss", "norm") else str(value)


def _parts(text: str) -> list[str]:
    return [text[start : start + SHORT] for start in range(0, len(text), SHORT)]


def different_facts(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """What differs in settings, code and libraries of two starts."""
    return [
        f"{name}: {one.get(name)} and {other.get(name)}"
        for name in {**one, **other}
        if one.get(name) != other.get(name)
    ]


def in_ranges(steps: Iterable[int]) -> str:
    """`1 to 40, 43`."""
    found: list[list[int]] = []
    for step in sorted(steps):
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    return ", ".join(f"{a} to {b}" if a < b else f"{a}" for a, b in found)
