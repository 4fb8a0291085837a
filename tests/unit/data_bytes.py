"""An independent reader and writer of .bin/.idx, straight from the byte layout: struct only, none of our code."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}
Documents = Sequence[Sequence[Sequence[int]]]


def write(prefix: Path, documents: Documents, code: int = 8) -> Path:
    """Write documents of sequences of tokens; returns the prefix."""
    letter = CODES[code]
    sequences = [tokens for document in documents for tokens in document]
    pointers, position = [], 0
    for tokens in sequences:
        pointers.append(position)
        position += len(tokens) * struct.calcsize(letter)
    boundaries = [0]
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))
    idx = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(boundaries))
    idx += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    idx += struct.pack(f"<{len(sequences)}q", *pointers)
    idx += struct.pack(f"<{len(boundaries)}q", *boundaries)
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(b"".join(struct.pack(f"<{len(t)}{letter}", *t) for t in sequences))
    return prefix


def read(prefix: Path | str) -> list[list[list[int]]]:
    """Read documents of sequences of tokens."""
    idx, data = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert idx[:9] == b"MMIDIDX\x00\x00"
    version, code, count, boundary_count = struct.unpack_from("<QBQQ", idx, 9)
    assert version == 1
    lengths = struct.unpack_from(f"<{count}i", idx, 34)
    pointers = struct.unpack_from(f"<{count}q", idx, 34 + 4 * count)
    boundaries = struct.unpack_from(f"<{boundary_count}q", idx, 34 + 12 * count)
    assert len(idx) == 34 + 12 * count + 8 * boundary_count
    letter = CODES[code]
    sequences = [list(struct.unpack_from(f"<{n}{letter}", data, at)) for n, at in zip(lengths, pointers, strict=True)]
    return [sequences[a:b] for a, b in pairwise(boundaries)]
