"""The processes that tokenize chunks, while the main one reads and writes.

Memory does not grow with the input: a few chunks a worker are under way at any time. However the main process ends, its
workers end with it.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from megacore.data.indexed.corpus import CHUNK_BYTES, Chunk
from megacore.data.indexed.encoded import ChunkEncoder, Encoded
from megacore.data.tokenizers.same_ids import ids_fingerprint
from megacore.data.tokenizers.tokenizer import Tokenizer

_SLOT_BYTES = 1 << 22  # of the tokens of a chunk that are shared between processes; more are sent


class Workers:
    """The processes that tokenize, or this one alone.

    Text and tokens do not pass through pipes: a worker reads its chunk from the file where it can, and leaves the
    tokens in memory that all processes share, one slot of it for each chunk under way.

    Args:
        count: of the processes; 1: this one alone.
        encoder: of the chunks.
        tokenizer: whose ids are told apart.
    """

    def __init__(self, count: int, encoder: ChunkEncoder, tokenizer: Tokenizer) -> None:
        self._encoder, self._tokenizer = encoder, tokenizer
        self._most = 2 * count + 2  # chunks under way
        self._pool: ProcessPoolExecutor | None = None
        self._ids: Future[str] | None = None
        self._slots: mmap.mmap | None = None
        if count == 1:
            return
        # Forked where that is the custom: a worker starts in milliseconds, with the tokenizer already loaded.
        forks = os.uname().sysname == "Linux"
        if forks:
            self._slots = mmap.mmap(-1, (self._most + 1) * _SLOT_BYTES)
        shared = (encoder, tokenizer, self._slots, os.getpid())
        context = multiprocessing.get_context("fork" if forks else "spawn")
        self._pool = ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=shared)

    def encoded(self, chunks: Callable[[bool], Iterator[Chunk]]) -> Iterator[tuple[Chunk, Encoded]]:
        """Every chunk with its encoding, in order, with a bounded number under way.

        This process encodes long lines, whose temporary files have no name by which a worker could open them.

        Args:
            chunks: makes them; its argument is whether they may have a place instead of data.
        """
        if self._pool is None:
            yield from ((chunk, self._encoder(chunk)) for chunk in chunks(False))
            return
        self._ids = self._pool.submit(_ids_in_worker)
        under_way: deque[tuple[Chunk, Future[_Sent] | None]] = deque()
        size = 0
        for number, chunk in enumerate(chunks(True)):
            slot = number % (self._most + 1)
            under_way.append((chunk, None if chunk.long else self._pool.submit(_encode_in_worker, chunk, slot)))
            size += 0 if chunk.long else chunk.size
            while len(under_way) > self._most or (size > 2 * self._most * CHUNK_BYTES and len(under_way) > 1):
                size -= 0 if under_way[0][0].long else under_way[0][0].size
                yield self._received(*under_way.popleft())
        while under_way:
            yield self._received(*under_way.popleft())

    def _received(self, chunk: Chunk, future: Future[_Sent] | None) -> tuple[Chunk, Encoded]:
        if future is None:
            return chunk, self._encoder(chunk)
        sent = future.result()
        return chunk, sent.encoded if self._slots is None or sent.sizes is None else _from_slot(sent, self._slots)

    def ids_fingerprint(self) -> str:
        """That of the tokenizer, which a worker makes."""
        return self._ids.result() if self._ids is not None else ids_fingerprint(self._tokenizer)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._slots is not None:
            self._slots.close()


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """What a worker sends back.

    Attributes:
        encoded: the chunk; without its tokens, if they are in a slot.
        slot: of the memory that is shared.
        sizes: bytes of the tokens in the slot, for each output; None if they are not there.
    """

    encoded: Encoded
    slot: int
    sizes: tuple[int, ...] | None


def _to_slot(encoded: Encoded, slot: int, slots: mmap.mmap | None) -> _Sent:
    """Leave the tokens in a slot of the memory `slots`, if there is one and they fit."""
    parts = [part.tokens for part in encoded.packed if isinstance(part.tokens, bytes)]
    sizes = tuple(map(len, parts))
    if slots is None or sum(sizes) > _SLOT_BYTES:
        return _Sent(encoded=encoded, slot=slot, sizes=None)
    for part, (begin, end) in zip(parts, _places(sizes, slot), strict=True):
        slots[begin:end] = part
    without = tuple(replace(part, tokens=b"") for part in encoded.packed)
    return _Sent(encoded=replace(encoded, packed=without), slot=slot, sizes=sizes)


def _from_slot(sent: _Sent, slots: mmap.mmap) -> Encoded:
    """The chunk with the tokens that are in its slot."""
    assert sent.sizes is not None
    tokens = [slots[begin:end] for begin, end in _places(sent.sizes, sent.slot)]
    parts = zip(sent.encoded.packed, tokens, strict=True)
    return replace(sent.encoded, packed=tuple(replace(part, tokens=data) for part, data in parts))


def _places(sizes: Sequence[int], slot: int) -> Iterator[tuple[int, int]]:
    """Where parts of these sizes begin and end in the memory whose slot they are in."""
    return pairwise(accumulate(sizes, initial=slot * _SLOT_BYTES))


_worker: tuple[ChunkEncoder, Tokenizer, mmap.mmap | None] | None = None  # in a worker process: what it works with


def _start_worker(encoder: ChunkEncoder, tokenizer: Tokenizer, slots: mmap.mmap | None, parent: int) -> None:
    global _worker
    _worker = encoder, tokenizer, slots
    # The main process answers Ctrl-C and SIGTERM for all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.disable()  # nothing here makes cycles, and collecting would walk millions of live integers
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process once its parent is gone: a pool's worker would wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _encode_in_worker(chunk: Chunk, slot: int) -> _Sent:
    assert _worker is not None
    encoder, _, slots = _worker
    return _to_slot(encoder(chunk.loaded()), slot, slots)


def _ids_in_worker() -> str:
    assert _worker is not None
    return ids_fingerprint(_worker[1])
