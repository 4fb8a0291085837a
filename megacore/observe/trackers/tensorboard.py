"""`--tensorboard-dir`: event files as TensorBoard reads them, written without the package tensorboard.

An event file is a sequence of records, `u64 length | u32 checksum of it | data | u32 checksum of the data`, little
endian. The checksums are CRC-32C, rotated and shifted by a constant. The data is an `Event` message of protocol
buffers (tensorflow/core/util/event.proto), of which only a few fields are needed:

    Event       1 wall_time (double), 2 step (int64), 3 file_version (string), 5 summary, 7 session_log
    Summary     1 value, repeated; Value: 1 tag (string), 2 simple_value (float)
    SessionLog  1 status; 1 is START: what was written before of this step and later ones does not count
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacore.files import GrowingFile
from megacore.observe.trackers.tracker import RunInfo

_START = 1
_DOUBLE, _VARINT, _BYTES, _FLOAT = 1, 0, 2, 5  # wire types


class TensorBoard:
    """A tracker that writes one event file per start of the run. `directory`: of the event files; made if it does not
    exist."""

    flag = "--tensorboard-dir"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self, run: RunInfo) -> None:
        """Begin an event file; of a resumed run it replaces the steps after the checkpoint."""
        self._directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}"
        self._file = GrowingFile(self._directory / name)
        # Without this first record readers take the file for another format.
        self._write(_field(3, _BYTES, b"brain.Event:2"), 0)
        if run.first_step:
            self.rewind(run.first_step)

    def write(self, record: Mapping[str, Any]) -> None:
        values = (
            _field(1, _BYTES, _field(1, _BYTES, key.encode()) + _field(2, _FLOAT, float(value)))
            for key, value in record.items()
            # A bool is an int to Python, and no curve.
            if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        )
        self._write(_field(5, _BYTES, b"".join(values)), int(record["step"]))

    def rewind(self, step: int) -> None:
        """Let what follows replace what was written of later steps."""
        self._write(_field(7, _BYTES, _field(1, _VARINT, _START)), step + 1)

    def close(self, *, failed: bool) -> None:
        self._file.close()

    def _write(self, content: bytes, step: int) -> None:
        event = _field(1, _DOUBLE, time.time()) + _field(2, _VARINT, step) + content
        length = struct.pack("<Q", len(event))
        self._file.append(length + _checksum(length) + event + _checksum(event))


def _field(number: int, wire: int, value: Any) -> bytes:
    key = _varint(number << 3 | wire)
    if wire == _DOUBLE:
        return key + struct.pack("<d", value)
    if wire == _FLOAT:
        return key + _float32(value)
    return key + (_varint(value) if wire == _VARINT else _varint(len(value)) + value)


def _float32(value: float) -> bytes:
    """A number as fp32; one beyond its range is infinite."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C of the data."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF)
