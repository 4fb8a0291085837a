"""Reads the ledger of another process, as a record of what its rank does at this moment."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from megacore.parallel.heartbeat import Channel, Phase
from megacore.watch.ledger import MAGIC, SIZE, TEXT, Identity, Word

_READS = 20


@dataclass(frozen=True, kw_only=True)
class Record:
    """A ledger as it was read."""

    identity: Identity
    phase: Phase  # the innermost one
    section: Phase  # the outer phase, which decides how long the inner one may take
    age: float  # seconds since the last mark
    step: int = 0  # number of the step, from 1; 0 before the first
    stage: int | None = None  # pipeline stage of a forward or backward, else None
    microbatch: int | None = None  # its number in the step, else None
    channel: Channel | None = None  # what the rank communicates over, or None
    awaited: int = 0  # the number of the operation on the channel that the rank waits for, from 1
    nbytes: int = 0  # size of that operation on this rank
    posted: Mapping[Channel, int] = field(default_factory=dict)  # operations that the rank has begun on each channel
    deviation: int = 0  # number of the step in which the rank left its usual order of operations; 0: it has not
    median_step: float = 0.0  # seconds; 0 until it is known
    flags: int = 0  # of `Flag`
    terminating: float | None = None  # seconds since a signal asked this rank to end; None: none has

    @property
    def rank(self) -> int:
        return self.identity.rank

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {
            "identity": asdict(self.identity),
            "phase": self.phase.name,
            "section": self.section.name,
            "channel": None if self.channel is None else asdict(self.channel),
            "posted": [[list(c.ranks), c.is_message, count] for c, count in self.posted.items()],
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Record:
        channel = values["channel"]
        return Record(
            **{
                **values,
                "identity": Identity(**values["identity"]),
                "phase": Phase[values["phase"]],
                "section": Phase[values["section"]],
                "channel": None if channel is None else Channel(tuple(channel["ranks"]), channel["is_message"]),
                "posted": {Channel(tuple(ranks), message): count for ranks, message, count in values["posted"]},
            }
        )


class LedgerFile:
    """Another process's ledger. Raises ValueError where it is not complete yet, or none; OSError where it cannot be
    read."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            status = os.fstat(descriptor)
            if status.st_size != SIZE:
                raise ValueError(f"{path} is not a ledger")
            # Tells the file from one that a later process of the same rank has put in its place.
            self.inode = status.st_ino
            self._map = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        if self._word(Word.MAGIC) != MAGIC:
            raise ValueError(f"{path} is not a ledger of this version")
        self._text = b""
        self._parse()

    def record(self) -> Record:
        """What the rank does now."""
        for _ in range(_READS):  # until no mark falls between two readings
            now, content = monotonic(), self._map[:TEXT]
            if self._map[:TEXT] == content:
                break
        self._parse()
        words = struct.unpack(f"={TEXT // 8}Q", content)
        reals = struct.unpack(f"={TEXT // 8}d", content)
        code, flags = words[Word.PHASE], words[Word.FLAGS]
        number, stage, microbatch = code >> 8 & 0xFF, code >> 16 & 0xFFFF, code >> 32
        phase, known = Phase(code & 0xFF), len(self._channels)
        terminating = reals[Word.TERMINATING]
        return Record(
            identity=self.identity,
            phase=phase,
            section=Phase(words[Word.SECTION]),
            age=max(0.0, now - reals[Word.SINCE]),
            step=words[Word.STEP],
            stage=stage - 1 if stage else None,
            microbatch=microbatch - 1 if microbatch else None,
            channel=self._channels[number - 1] if 0 < number <= known else None,
            awaited=words[Word.AWAITED] if phase.communicates else 0,
            nbytes=words[Word.BYTES] if phase.communicates else 0,
            posted={channel: words[Word.POSTED + 1 + i] for i, channel in enumerate(self._channels)},
            deviation=words[Word.DEVIATION],
            median_step=reals[Word.MEDIAN_STEP],
            flags=flags,
            terminating=now - terminating if terminating else None,
        )

    def last_mark(self) -> float:
        """When the rank made its last mark, by `time.monotonic`."""
        return float(struct.unpack_from("=d", self._map, 8 * Word.SINCE)[0])

    def pronounce(self, *, hung: bool) -> None:
        """Tell the rank that it is reported why the run ends: it hangs, or a rank has died."""
        self._map[8 * Word.VERDICT : 8 * Word.VERDICT + 8] = struct.pack("=Q", 2 if hung else 1)

    def _word(self, word: int) -> int:
        value: int = struct.unpack_from("=Q", self._map, 8 * word)[0]
        return value

    def _parse(self) -> None:
        length = self._word(Word.TEXT_BYTES)
        text = self._map[TEXT : TEXT + length]
        if not length or text == self._text:
            return
        with contextlib.suppress(ValueError):  # it is being written: the next reading sees it
            content = json.loads(text)
            self.identity = Identity(**content["identity"])
            self._channels = [Channel(_ranks(ranks), message) for ranks, message in content["channels"]]
            self._text = text
        if not self._text:
            raise ValueError("the ledger is being written")


def _ranks(progressions: Iterable[tuple[int, int, int]]) -> tuple[int, ...]:
    """The reverse of `_progressions`."""
    return tuple(first + number * step for first, step, count in progressions for number in range(count))
