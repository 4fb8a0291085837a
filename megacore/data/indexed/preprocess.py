"""Text files to .bin/.idx: chunks are tokenized by worker processes and written in order by this one. The output does
not depend on the number of workers, because the chunks do not. Memory does not grow with the input: a few chunks a
worker are under way at any time, and the writer streams. However the main process ends, its workers end with it."""

from __future__ import annotations

import gc
import hashlib
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megacore.config.messages import counted
from megacore.data.indexed.corpus import (
    CHUNK_BYTES,
    LONG_LINE_BYTES,
    MOST_DIVIDED_BYTES,
    MOST_DOCUMENT_BYTES,
    Chunk,
    TextUnit,
    is_json,
    read_chunks,
)
from megacore.data.indexed.documents import BadLine, parse, rendered_lines
from megacore.data.indexed.long_lines import LongLine, LongText, unnamed_file
from megacore.data.indexed.reader import token_dtype
from megacore.data.indexed.sentences import split_sentences
from megacore.data.indexed.sidecar import MASK_DTYPE, Sidecar, idx_bytes, loss_mask_prefix
from megacore.data.indexed.writer import IndexedWriter, output_files, refuse_overwriting, require_prefix
from megacore.data.tokenizers.chat_template import Template, encode_passage
from megacore.data.tokenizers.fast_bpe import FastEncoder
from megacore.data.tokenizers.same_ids import ids_fingerprint
from megacore.data.tokenizers.tokenizer import Tokenizer
from megacore.errors import DataError

_SLOT_BYTES = 1 << 22  # of the tokens of a chunk that are shared between processes; more are sent
_BAD_SHOWN = 50  # of those that are an error
_COMPARED_BYTES = 1 << 21  # of the inputs, that both encoders are compared on
_COPIED_BYTES = 1 << 22  # of tokens, from a temporary file
_BAD_KEPT = 1000  # located bad lines that are remembered; all are counted
Ids = Sequence[int] | NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to preprocess."""

    inputs: tuple[str, ...]  # text files, in the order of the output
    output_prefix: str  # outputs are `{output_prefix}_{key}_document.bin|idx|json` (`_sentence` with split_sentences)
    json_keys: tuple[str, ...] = ("text",)  # keys of the JSON objects to tokenize, each into a separate output
    append_eod: bool = False  # whether every document ends with the tokenizer's end-of-document token
    split_sentences: bool = False  # whether each sentence becomes a sequence of its document
    text_unit: TextUnit = "line"  # what a document is in plain text
    workers: int = 1  # processes that tokenize; 1 tokenizes in this process
    strict: bool = False  # whether the first bad line is an error
    # Whether the inputs hold conversations or prompts with completions, of which only the replies are predicted:
    # outputs are `{output_prefix}_sft_document`, and its loss mask. Bad lines are an error, reported together.
    sft: bool = False
    deduplicate: bool = False  # whether a document whose texts an earlier one has is left out
    tokenizer: str | None = None  # where the tokenizer was read from, which must not be written over

    @property
    def outputs(self) -> tuple[str, ...]:
        if self.sft:
            return f"{self.output_prefix}_sft_document", loss_mask_prefix(f"{self.output_prefix}_sft_document")
        unit = "sentence" if self.split_sentences else "document"
        return tuple(f"{self.output_prefix}_{key}_{unit}" for key in self.json_keys)

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Columns of Parquet files that are read; None: all."""
        return None if self.sft else self.json_keys

    def dtypes(self, tokenizer: Tokenizer) -> tuple[np.dtype, ...]:
        tokens = token_dtype(tokenizer.vocab_size)
        return (tokens, MASK_DTYPE) if self.sft else (tokens,) * len(self.json_keys)


@dataclass(kw_only=True)
class Report:
    """How far a run is, and what it found."""

    documents: int = 0  # documents written (for every key)
    tokens: int = 0  # tokens written, end-of-document tokens included, over all keys
    text_bytes: int = 0  # bytes of input read, after decompression
    file_bytes: int = 0  # bytes of the input files read, as they lie on disk
    bad_count: int = 0  # lines that were left out
    bad: list[BadLine] = field(default_factory=list)  # the first of them
    empty: int = 0  # documents left out because they held no tokens
    repeated: int = 0  # documents left out because an earlier one is the same
    seconds: float = 0.0


class _Shared(NamedTuple):
    """Tokens in the memory that processes share: its bytes [begin, end)."""

    begin: int
    end: int
    dtype: np.dtype


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The tokens of a chunk for one output: pickling lists of Python integers would cost more than making them."""

    # Of the output's dtype; those of a long line are in an open temporary file, which whoever writes or drops them
    # closes.
    tokens: NDArray | BinaryIO | _Shared
    lengths: NDArray[np.int32]  # of each sequence
    sizes: NDArray[np.int64]  # sequences of each document

    def some(self, keep: NDArray[np.bool_]) -> Packed:
        sequences = np.repeat(keep, self.sizes)
        if isinstance(self.tokens, np.ndarray):
            tokens = self.tokens[np.repeat(sequences, self.lengths)]
        else:  # the one document of a long line
            assert not isinstance(self.tokens, _Shared)
            self.tokens.close()
            tokens = np.empty(0, np.uint16)
        return Packed(tokens=tokens, lengths=self.lengths[sequences], sizes=self.sizes[keep])


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A tokenized chunk."""

    packed: tuple[Packed, ...]  # the tokens for each output
    documents: int
    empty: int  # documents without tokens, which are left out
    bad: list[BadLine]  # lines without a document
    digests: tuple[bytes, ...] = ()  # of the documents, where repeated ones are left out


def _packed(documents: Sequence[Sequence[Ids]], dtype: np.dtype, tail: Sequence[int] = ()) -> Packed:
    """Documents of sequences of numbers, each document with a tail."""
    sizes = np.fromiter(map(len, documents), np.int64, count=len(documents))
    lengths = np.fromiter((len(ids) for sequences in documents for ids in sequences), np.int32)
    if tail:
        lengths[np.cumsum(sizes) - 1] += len(tail)
    pieces = list(chain.from_iterable(((*sequences, tail) for sequences in documents) if tail else documents))
    if any(isinstance(piece, np.ndarray) for piece in pieces[:1]):
        tokens = np.concatenate([np.asarray(piece, np.uint32) for piece in pieces])
    else:
        tokens = np.fromiter(chain.from_iterable(pieces), np.int64, count=int(lengths.sum(dtype=np.int64)))
    return Packed(tokens=_narrowed(tokens, dtype), lengths=lengths, sizes=sizes)


def _narrowed(ids: NDArray, dtype: np.dtype) -> NDArray:
    """Token ids in the dtype of their output; numpy alone would keep the lower bits of one that does not fit."""
    if ids.size and not 0 <= ids.min() <= ids.max() <= np.iinfo(dtype).max:
        raise DataError(
            f"the tokenizer gives ids from {ids.min()} to {ids.max()}, and its vocabulary is one of {dtype.name}: "
            "a file of it is of another tokenizer: use one whose vocabulary has all of its tokens"
        )
    return ids.astype(dtype, copy=False)


class Encoder:
    """Turns chunks into packed tokens, of conversations also into a mask of those to predict; each worker has one."""

    def __init__(
        self, job: Job, tokenizer: Tokenizer, fast: FastEncoder | None = None, template: Template | None = None
    ) -> None:
        if job.append_eod and tokenizer.eod is None:
            raise DataError("--append-eod: this tokenizer has no end-of-document token")
        self._job, self._tokenizer, self._fast, self._template = job, tokenizer, fast, template
        self._encode_batch: Callable[[Sequence[str]], Sequence[Ids]] = (fast or tokenizer).encode_batch
        self._dtypes = job.dtypes(tokenizer)
        self._tail = [tokenizer.eod] if job.append_eod and tokenizer.eod is not None else []

    def __call__(self, chunk: Chunk) -> Encoded:
        if chunk.long is not None:
            with closing(chunk.long) as line:
                return self._encode_long(chunk, line)
        if self._template is not None:
            return self._encode_conversations(chunk, self._template)
        parsed = parse(chunk, self._job.json_keys)
        encoded = [self._sequences(texts) for texts in parsed.texts]
        # A document without tokens under one key is left out under all, so that the outputs stay aligned.
        groups = enumerate(zip(*encoded, strict=True))
        kept = [number for number, group in groups if all(any(map(len, sequences)) for sequences in group)]
        return Encoded(
            packed=tuple(
                _packed([documents[number] for number in kept], dtype, self._tail)
                for documents, dtype in zip(encoded, self._dtypes, strict=True)
            ),
            documents=len(kept),
            empty=len(parsed.texts[0]) - len(kept),
            bad=parsed.bad,
            digests=tuple(self._digests([texts[number] for texts in parsed.texts] for number in kept)),
        )

    def _sequences(self, texts: list[str]) -> list[list[Ids]]:
        if not self._job.split_sentences:
            return [[ids] for ids in self._encode_batch(texts)]
        split = [split_sentences(text) for text in texts]
        ids: Iterator[Ids] = iter(self._encode_batch(list(chain.from_iterable(split))))
        return [[sequence for _ in sentences if len(sequence := next(ids))] for sentences in split]

    def _digests(self, documents: Iterable[Sequence[str | LongText]]) -> Iterator[bytes]:
        """What tells documents from others, by all their texts."""
        for texts in documents if self._job.deduplicate else ():
            digest = hashlib.blake2b(digest_size=16)
            for text in texts:
                length = 0
                for piece in [text] if isinstance(text, str) else text:
                    data = piece.encode()
                    digest.update(data)
                    length += len(data)
                digest.update(length.to_bytes(8, "little"))  # behind the text, so that a long one is read once
            yield digest.digest()

    def _encode_conversations(self, chunk: Chunk, template: Template) -> Encoded:
        rendered, bad = rendered_lines(chunk, template)
        outputs: tuple[list[list[list[int]]], ...] = [], []  # tokens, and which of them are predicted
        for passages in rendered:
            encoded = [encode_passage(self._tokenizer, passage) for passage in passages]
            for output, parts in zip(outputs, zip(*encoded, strict=True), strict=True):
                output.append([list(chain.from_iterable(parts))])
        packed = tuple(_packed(*pair) for pair in zip(outputs, self._dtypes, strict=True))
        return Encoded(packed=packed, documents=len(rendered), empty=0, bad=bad)

    def _encode_long(self, chunk: Chunk, line: LongLine) -> Encoded:
        """Parse and tokenize a long line, with a part of each text in memory."""
        nothing = tuple(_packed([], dtype) for dtype in self._dtypes)
        try:
            texts = line.texts(self._job.json_keys)
        except ValueError as error:
            bad = [BadLine(chunk.source, chunk.first_line, str(error))]
            return Encoded(packed=nothing, documents=0, empty=0, bad=bad)
        if texts is None:
            return self(replace(chunk, data=line.read(), long=None))
        spooled = tuple(map(self._spooled, texts, self._dtypes))
        if any(int(part.lengths[0]) == len(self._tail) for part in spooled):
            for part in spooled:
                part.some(np.zeros(1, np.bool_))
            return Encoded(packed=nothing, documents=0, empty=1, bad=[])
        return Encoded(packed=spooled, documents=1, empty=0, bad=[], digests=tuple(self._digests([texts])))

    def _spooled(self, text: LongText, dtype: np.dtype) -> Packed:
        """The tokens of a text, as one sequence in a temporary file."""
        assert self._fast is not None, "only an encoder that divides texts gets long lines"
        file = unnamed_file(Path(self._job.output_prefix).absolute().parent)
        for ids in chain(self._fast.encode_parts(text), [np.array(self._tail, dtype)]):
            file.write(_narrowed(ids, dtype).tobytes())
        length = file.tell() // dtype.itemsize
        file.seek(0)
        return Packed(tokens=file, lengths=np.array([length], np.int32), sizes=np.ones(1, np.int64))


def preprocess(
    job: Job,
    tokenizer: Tokenizer,
    on_progress: Callable[[Report], None] = lambda report: None,
    *,
    template: Template | None = None,
    fast: FastEncoder | None = None,
    long_line_bytes: int = LONG_LINE_BYTES,
) -> Report:
    """Tokenize the inputs of a job and write its outputs, or nothing.

    Args:
        on_progress: called with the report so far after every chunk.
        template: renders the messages of a job of conversations.
        fast: gives the ids instead of the tokenizer, if both agree on the first megabytes of the inputs.
        long_line_bytes: of a JSON line that goes through a temporary file, where `fast` can encode it in parts.

    Raises:
        DataError: an input is unusable, nothing is left to write, or (strict, conversations) a line is bad.
    """
    _check(job)
    assert template is not None or not job.sft, "conversations need one"
    begun, report, seen = time.monotonic(), Report(), set[bytes]()
    chunks = partial(_chunks, job, MOST_DOCUMENT_BYTES, None)
    if fast is not None and fast.divides:
        in_parts = not (job.split_sentences or job.sft)
        chunks = partial(_chunks, job, MOST_DIVIDED_BYTES, long_line_bytes if in_parts else None)
    # Other ids than the tokenizer's would be noticed only when the model speaks nonsense.
    if fast is not None and not fast.agrees(_first_texts(job, chunks), job.workers):
        fast, chunks = None, partial(_chunks, job, MOST_DOCUMENT_BYTES, None)
    encoder = Encoder(job, tokenizer, fast, template if job.sft else None)
    with ExitStack() as stack:
        outputs = zip(job.outputs, job.dtypes(tokenizer), strict=True)
        writers = [stack.enter_context(IndexedWriter(*output)) for output in outputs]
        workers = Workers(job.workers, encoder, tokenizer)
        stack.callback(workers.close)
        for chunk, encoded in workers.encoded(lambda places: chunks(places=places)):
            if encoded.bad and job.strict:
                raise DataError(f"{encoded.bad[0]} (--strict)")
            if job.deduplicate:
                encoded = _without_repeated(encoded, seen, report)
            report.documents += encoded.documents
            report.empty += encoded.empty
            report.text_bytes += chunk.size
            report.file_bytes += chunk.file_bytes
            report.bad_count += len(encoded.bad)
            report.bad.extend(encoded.bad[: _BAD_KEPT - len(report.bad)])
            for writer, part in zip(writers, encoded.packed, strict=True):
                tokens = part.tokens
                if not isinstance(tokens, np.ndarray):
                    assert not isinstance(tokens, _Shared)
                    with closing(tokens) as file:
                        for block in iter(lambda: file.read(_COPIED_BYTES), b""):
                            writer.begin_sequence(np.frombuffer(block, writer.dtype))
                    tokens = np.empty(0)
                writer.extend(tokens.astype(writer.dtype, copy=False), part.lengths, part.sizes)
            report.tokens = sum(writer.num_tokens for writer in (writers[:1] if job.sft else writers))
            report.seconds = time.monotonic() - begun
            on_progress(report)
        if job.sft and report.bad:
            raise DataError(_all_bad(report))
        if report.documents == 0:
            where = job.inputs[0] if len(job.inputs) == 1 else f"the {len(job.inputs)} input files"
            first = f"; the first bad line is {report.bad[0]}" if report.bad else ""
            left_out = f"{counted(report.bad_count, 'bad line')}, {counted(report.empty, 'empty document')}"
            raise DataError(f"{where}: no documents in it ({left_out}{first})")
        if job.sft:  # before the tokens, which would otherwise all be predicted
            writers.pop().commit()
        for writer in writers:
            writer.commit(_sidecar(writer, tokenizer, workers.ids_fingerprint(), job))
    report.seconds = time.monotonic() - begun
    return report


def _without_repeated(encoded: Encoded, seen: set[bytes], report: Report) -> Encoded:
    """A chunk without the documents that an earlier one, or an earlier place in it, has; adds its own to `seen`."""
    keep = np.zeros(encoded.documents, np.bool_)
    for number, digest in enumerate(encoded.digests):
        keep[number] = digest not in seen
        seen.add(digest)
    if keep.all():
        return encoded
    report.repeated += int((~keep).sum())
    return replace(encoded, packed=tuple(part.some(keep) for part in encoded.packed), documents=int(keep.sum()))


def _chunks(
    job: Job,
    most_document_bytes: int,
    long_line_bytes: int | None,
    *,
    places: bool = False,
    inputs: Sequence[str] | None = None,
) -> Iterator[Chunk]:
    """The inputs, or some of them, in order; with `long_line_bytes`, longer JSON lines are in temporary files beside
    the outputs."""
    read = partial(read_chunks, text_unit=job.text_unit, most_document_bytes=most_document_bytes, columns=job.columns)
    if long_line_bytes is not None:
        long_line = partial(LongLine, Path(job.output_prefix).absolute().parent)
        read = partial(read, long_line=long_line, long_line_bytes=long_line_bytes)
    for path in job.inputs if inputs is None else inputs:
        yield from read(path, places=places)


def _first_texts(job: Job, chunks: Callable[..., Iterator[Chunk]]) -> list[str]:
    """The texts of the first megabytes of the inputs that can be read again."""
    texts, size = list[str](), 0
    for chunk in chunks(inputs=[path for path in job.inputs if Path(path).is_file()]):
        size += chunk.size
        if chunk.long is None:
            texts += (text[:_COMPARED_BYTES] for text in chain.from_iterable(parse(chunk, job.json_keys).texts))
        else:
            with closing(chunk.long) as line, suppress(ValueError):  # a bad line is reported later
                texts += (next(iter(text), "")[:_COMPARED_BYTES] for text in line.texts(job.json_keys) or ())
        if size >= _COMPARED_BYTES:
            break
    return texts


class Workers:
    """The processes that tokenize, or with `count` 1 this one alone. Text and tokens do not pass through pipes: a
    worker reads its chunk from the file, and leaves the tokens in shared memory, one slot for each chunk under way."""

    def __init__(self, count: int, encoder: Encoder, tokenizer: Tokenizer) -> None:
        self._encoder, self._tokenizer, self._most = encoder, tokenizer, 2 * count + 2  # chunks under way
        self._pool: ProcessPoolExecutor | None = None
        self._ids: Future[str] | None = None
        self._slots: mmap.mmap | None = None
        if count > 1:
            # Forked where that is the custom: a worker starts in milliseconds, with the tokenizer already loaded.
            forks = os.uname().sysname == "Linux"
            if forks:
                self._slots = mmap.mmap(-1, (self._most + 1) * _SLOT_BYTES)
            context = multiprocessing.get_context("fork" if forks else "spawn")
            shared = (encoder, tokenizer, self._slots, os.getpid())
            self._pool = ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=shared)

    def encoded(self, chunks: Callable[[bool], Iterator[Chunk]]) -> Iterator[tuple[Chunk, Encoded]]:
        """Every chunk with its encoding, in order, with a bounded number under way. `chunks`: makes them; its argument
        is whether they may have a place instead of data."""
        if self._pool is None:
            yield from ((chunk, self._encoder(chunk)) for chunk in chunks(False))
            return
        self._ids = self._pool.submit(_ids_in_worker)
        under_way: deque[tuple[Chunk, Future[Encoded] | None]] = deque()
        size = 0
        for number, chunk in enumerate(chain(chunks(True), [None])):
            if chunk is not None:
                # The tokens of the chunk that had this slot have been copied out of it.
                slot = number % (self._most + 1)
                under_way.append((chunk, None if chunk.long else self._pool.submit(_encode_in_worker, chunk, slot)))
                size += 0 if chunk.long else chunk.size
            while under_way and (
                chunk is None
                or len(under_way) > self._most
                or (size > 2 * self._most * CHUNK_BYTES and len(under_way) > 1)
            ):
                first, future = under_way.popleft()
                size -= 0 if first.long else first.size
                yield first, self._encoder(first) if future is None else self._received(future.result())

    def _received(self, encoded: Encoded) -> Encoded:
        """A chunk with its tokens, wherever a worker has left them."""
        parts = []
        for part in encoded.packed:
            if isinstance(part.tokens, _Shared):
                assert self._slots is not None
                data = self._slots[part.tokens.begin : part.tokens.end]
                part = replace(part, tokens=np.frombuffer(data, part.tokens.dtype))
            parts.append(part)
        return replace(encoded, packed=tuple(parts))

    def ids_fingerprint(self) -> str:
        return self._ids.result() if self._ids is not None else ids_fingerprint(self._tokenizer)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._slots is not None:
            self._slots.close()


_worker: tuple[Encoder, Tokenizer, mmap.mmap | None]  # in a worker process: what it works with


def _start_worker(encoder: Encoder, tokenizer: Tokenizer, slots: mmap.mmap | None, parent: int) -> None:
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


def _encode_in_worker(chunk: Chunk, slot: int) -> Encoded:
    encoder, _, slots = _worker
    encoded, parts, begin = encoder(chunk.loaded()), list[Packed](), slot * _SLOT_BYTES
    if slots is None:
        return encoded
    for part in encoded.packed:
        if isinstance(part.tokens, np.ndarray) and begin + part.tokens.nbytes <= (slot + 1) * _SLOT_BYTES:
            end = begin + part.tokens.nbytes
            slots[begin:end] = part.tokens.view(np.uint8).data
            part, begin = replace(part, tokens=_Shared(begin, end, part.tokens.dtype)), end
        parts.append(part)
    return replace(encoded, packed=tuple(parts))


def _ids_in_worker() -> str:
    return ids_fingerprint(_worker[1])


def _check(job: Job) -> None:
    require_prefix(job.output_prefix)
    if len(job.json_keys) > 1 and not all(is_json(path) for path in job.inputs):
        raise DataError(
            f"--json-keys {' '.join(job.json_keys)}: plain text has no keys; give .jsonl files only, or one key"
        )
    if len(set(job.json_keys)) < len(job.json_keys):
        raise DataError(f"--json-keys {' '.join(job.json_keys)} names a key twice")
    if job.sft and not all(is_json(path) for path in job.inputs):
        wrong = next(path for path in job.inputs if not is_json(path))
        raise DataError(f"--sft reads JSON lines, which {wrong} is not by its name: give .jsonl files (also .gz, .zst)")
    for key in job.json_keys:
        if not key or "/" in key or "\0" in key:
            raise DataError(f"--json-keys {key!r} cannot be part of a file name")
    outputs = chain.from_iterable(map(output_files, job.outputs))
    refuse_overwriting(outputs, [*job.inputs, *([job.tokenizer] if job.tokenizer else [])])


def _all_bad(report: Report) -> str:
    """The bad lines, each on a line, or the first of them."""
    shown = [str(line) for line in report.bad[:_BAD_SHOWN]]
    more = report.bad_count - len(shown)
    return "\n  ".join(
        [
            f"{counted(report.bad_count, 'bad line')}; nothing is written: correct or remove them",
            *shown,
            *([f"and {more} more"] if more else []),
        ]
    )


def _sidecar(writer: IndexedWriter, tokenizer: Tokenizer, tokenizer_ids: str, job: Job) -> Sidecar:
    return Sidecar(
        documents=writer.num_documents,
        sequences=writer.num_sequences,
        tokens=writer.num_tokens,
        dtype=writer.dtype.name,
        max_token_id=writer.max_token_id,
        vocab_size=tokenizer.vocab_size,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer_ids=tokenizer_ids,
        eod=tokenizer.eod,
        append_eod=job.append_eod,
        bin_bytes=writer.num_tokens * writer.dtype.itemsize,
        idx_bytes=idx_bytes(writer.num_sequences, writer.num_documents),
    )
