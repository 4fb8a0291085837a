"""Text files to .bin/.idx: chunks are tokenized by worker processes and written in order by this one.

The output does not depend on the number of workers, because the chunks do not. Memory does not grow with the input: a
few chunks a worker are under way at any time, and the writer streams.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megacore.config.messages import counted
from megacore.data.indexed.conversations import rendered_lines
from megacore.data.indexed.corpus import (
    LONG_LINE_BYTES,
    MOST_DIVIDED_BYTES,
    MOST_DOCUMENT_BYTES,
    Chunk,
    TextUnit,
    is_json,
    read_chunks,
)
from megacore.data.indexed.documents import BadLine, parse
from megacore.data.indexed.encoded import ChunkEncoder, Encoded, Ids, Packed, close_files, packed
from megacore.data.indexed.long_lines import LongLine, LongText, unnamed_file
from megacore.data.indexed.loss_mask import MASK_DTYPE, loss_mask_prefix
from megacore.data.indexed.reader import token_dtype
from megacore.data.indexed.sentences import split_sentences
from megacore.data.indexed.sidecar import Sidecar, idx_bytes
from megacore.data.indexed.workers import Workers
from megacore.data.indexed.writer import IndexedWriter, output_files, refuse_overwriting, require_prefix
from megacore.data.tokenizers.chat_template import Template, encode_passage
from megacore.data.tokenizers.fast_bpe import FastEncoder
from megacore.data.tokenizers.tokenizer import Tokenizer
from megacore.errors import DataError

_BAD_SHOWN = 50  # of those that are an error
_COMPARED_BYTES = 1 << 21  # of the inputs, that both encoders are compared on
_DIGEST_BYTES = 16
_COPIED_BYTES = 1 << 22  # of tokens, from a temporary file
_BAD_KEPT = 1000  # located bad lines that are remembered; all are counted


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to preprocess.

    Attributes:
        inputs: Text files, in the order of the output.
        output_prefix: Outputs are `{output_prefix}_{key}_document.bin|idx|json` (`_sentence` with split_sentences).
        json_keys: Keys of the JSON objects to tokenize, each into a separate output.
        append_eod: Whether every document ends with the tokenizer's end-of-document token.
        split_sentences: Whether each sentence becomes a sequence of its document.
        text_unit: What a document is in plain text.
        workers: Processes that tokenize; 1 tokenizes in this process.
        strict: Whether the first bad line is an error.
        sft: Whether the inputs hold conversations or prompts with completions, of which only the replies are predicted:
            outputs are `{output_prefix}_sft_document`, and its loss mask. Bad lines are an error, reported together.
        deduplicate: Whether a document whose texts an earlier one has is left out.
        tokenizer: Where the tokenizer was read from, which must not be written over.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    text_unit: TextUnit = "line"
    workers: int = 1
    strict: bool = False
    sft: bool = False
    deduplicate: bool = False
    tokenizer: str | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """Prefixes of the outputs."""
        if self.sft:
            return f"{self.output_prefix}_sft_document", loss_mask_prefix(f"{self.output_prefix}_sft_document")
        unit = "sentence" if self.split_sentences else "document"
        return tuple(f"{self.output_prefix}_{key}_{unit}" for key in self.json_keys)

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Columns of Parquet files that are read; None: all."""
        return None if self.sft else self.json_keys

    def dtypes(self, tokenizer: Tokenizer) -> tuple[np.dtype, ...]:
        """Those of the outputs."""
        tokens = token_dtype(tokenizer.vocab_size)
        return (tokens, MASK_DTYPE) if self.sft else (tokens,) * len(self.json_keys)


@dataclass(kw_only=True)
class Report:
    """How far a run is, and what it found.

    Attributes:
        documents: Documents written (for every key).
        tokens: Tokens written, end-of-document tokens included, over all keys.
        text_bytes: Bytes of input read, after decompression.
        file_bytes: Bytes of the input files read, as they lie on disk.
        bad_count: Lines that were left out.
        bad: The first of them.
        empty: Documents left out because they held no tokens.
        repeated: Documents left out because an earlier one is the same.
        seconds: Time taken.
    """

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    file_bytes: int = 0
    bad_count: int = 0
    bad: list[BadLine] = field(default_factory=list)
    empty: int = 0
    repeated: int = 0
    seconds: float = 0.0


class Encoder:
    """Turns chunks into packed tokens; each worker has one."""

    def __init__(self, job: Job, tokenizer: Tokenizer, fast: FastEncoder | None = None) -> None:
        if job.append_eod and tokenizer.eod is None:
            raise DataError("--append-eod: this tokenizer has no end-of-document token")
        self._job = job
        self._encode_batch: Callable[[Sequence[str]], Sequence[Ids]] = tokenizer.encode_batch
        if fast is not None:
            self._encode_batch = fast.encode_batch
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._fast = fast
        self._tail = [tokenizer.eod] if job.append_eod and tokenizer.eod is not None else []

    def __call__(self, chunk: Chunk) -> Encoded:
        """Parse and tokenize a chunk."""
        if chunk.long is not None:
            with closing(chunk.long) as line:
                return self._encode_long(chunk, line)
        parsed = parse(chunk, self._job.json_keys)
        encoded = [self._encode(texts) for texts in parsed.texts]
        # A document without tokens under one key is left out under all, so that the outputs stay aligned.
        groups = enumerate(zip(*encoded, strict=True))
        kept = [number for number, group in groups if all(any(map(len, sequences)) for sequences in group)]
        total = len(parsed.texts[0])
        made = tuple(packed([documents[number] for number in kept], self._dtype, self._tail) for documents in encoded)
        digests = b""
        if self._job.deduplicate:
            digests = b"".join(_digest([texts[number] for texts in parsed.texts]) for number in kept)
        return Encoded(packed=made, documents=len(kept), empty=total - len(kept), bad=parsed.bad, digests=digests)

    def _encode_long(self, chunk: Chunk, line: LongLine) -> Encoded:
        """Parse and tokenize a long line, with a part of each text in memory."""
        try:
            texts = line.texts(self._job.json_keys)
        except ValueError as error:
            bad = [BadLine(chunk.source, chunk.first_line, str(error))]
            nothing = tuple(packed([], self._dtype) for _ in self._job.json_keys)
            return Encoded(packed=nothing, documents=0, empty=0, bad=bad)
        if texts is None:
            return self(replace(chunk, data=line.read(), long=None))
        made = tuple(map(self._spooled, texts))
        if any(not part.document_sizes for part in made):
            close_files(made)
            made = tuple(packed([], self._dtype) for _ in made)
            return Encoded(packed=made, documents=0, empty=1, bad=[])
        digests = _digest(texts) if self._job.deduplicate else b""
        return Encoded(packed=made, documents=1, empty=0, bad=[], digests=digests)

    def _spooled(self, text: LongText) -> Packed:
        """The tokens of a text in a temporary file; no document if there are none."""
        assert self._fast is not None, "only an encoder that divides texts gets long lines"
        file = unnamed_file(Path(self._job.output_prefix).absolute().parent)
        length = 0
        for ids in self._fast.encode_parts(text):
            file.write(ids.astype(self._dtype).tobytes())
            length += len(ids)
        if not length:
            return replace(packed([], self._dtype), tokens=file)
        file.write(np.array(self._tail, self._dtype).tobytes())
        file.seek(0)
        lengths = np.array([length + len(self._tail)], np.int32)
        return Packed(tokens=file, lengths=lengths.tobytes(), document_sizes=np.ones(1, np.int64).tobytes())

    def _encode(self, texts: list[str]) -> list[list[Ids]]:
        """Token ids of the sequences of each document."""
        if not self._job.split_sentences:
            return [[ids] for ids in self._encode_batch(texts)]
        split = [split_sentences(text) for text in texts]
        ids: Iterator[Ids] = iter(self._encode_batch(list(chain.from_iterable(split))))
        return [[sequence for _ in sentences if len(sequence := next(ids))] for sentences in split]


def _digest(texts: Sequence[str | LongText]) -> bytes:
    """What tells a document from others, by all its texts."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for text in texts:
        length = 0
        for piece in [text] if isinstance(text, str) else text:
            data = piece.encode()
            digest.update(data)
            length += len(data)
        digest.update(length.to_bytes(8, "little"))  # behind the text, so that a long one is read once
    return digest.digest()


class ConversationEncoder:
    """Turns chunks of conversations into packed tokens, and a packed mask of those to predict.

    Args:
        job: what to preprocess.
        tokenizer: makes the tokens.
        template: renders messages.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer, template: Template) -> None:
        self._tokenizer, self._template, self._dtypes = tokenizer, template, job.dtypes(tokenizer)

    def __call__(self, chunk: Chunk) -> Encoded:
        """Parse, render and tokenize a chunk."""
        rendered, bad = rendered_lines(chunk, self._template)
        tokens, masks = list[list[list[int]]](), list[list[list[int]]]()
        for passages in rendered:
            encoded = [encode_passage(self._tokenizer, passage) for passage in passages]
            tokens.append([list(chain.from_iterable(ids for ids, _ in encoded))])
            masks.append([list(chain.from_iterable(mask for _, mask in encoded))])
        made = tuple(packed(*pair) for pair in zip((tokens, masks), self._dtypes, strict=True))
        return Encoded(packed=made, documents=len(tokens), empty=0, bad=bad)


def preprocess(
    job: Job,
    tokenizer: Tokenizer,
    on_progress: Callable[[Report], None] = lambda report: None,
    *,
    template: Template | None = None,
    fast: FastEncoder | None = None,
    long_line_bytes: int = LONG_LINE_BYTES,
) -> Report:
    """Tokenize the inputs of a job and write its outputs.

    Args:
        job: What to do.
        tokenizer: Makes the tokens; its vocabulary decides the output's dtype.
        on_progress: Called with the report so far after every chunk.
        template: Renders the messages of a job of conversations.
        fast: Gives the ids instead of the tokenizer, if both agree on the first megabytes of the inputs.
        long_line_bytes: Of a JSON line that goes through a temporary file, where `fast` can encode it in parts.

    Raises:
        DataError: An input is unusable, nothing is left to write, or (strict, conversations) a line is bad. There is no
            output then.
    """
    _check(job)
    begun = time.monotonic()
    report = Report()
    chunks = partial(_chunks, job, MOST_DOCUMENT_BYTES, None)
    if fast is not None and fast.divides:
        in_parts = not (job.split_sentences or job.sft)
        chunks = partial(_chunks, job, MOST_DIVIDED_BYTES, long_line_bytes if in_parts else None)
    if fast is not None and not fast.agrees(_first_texts(job, chunks), job.workers):
        fast, chunks = None, partial(_chunks, job, MOST_DOCUMENT_BYTES, None)
    encoder: ChunkEncoder = Encoder(job, tokenizer, fast)
    seen: set[bytes] = set()
    if job.sft:
        assert template is not None, "conversations need one"
        encoder = ConversationEncoder(job, tokenizer, template)
    with ExitStack() as stack:
        outputs = zip(job.outputs, job.dtypes(tokenizer), strict=True)
        writers = [stack.enter_context(IndexedWriter(*output)) for output in outputs]
        workers = Workers(job.workers, encoder, tokenizer)
        stack.callback(workers.close)
        for chunk, encoded in workers.encoded(lambda places: chunks(places=places)):
            if job.deduplicate:
                encoded = _without_repeated(encoded, seen, job, tokenizer, report)
            _count(report, job, chunk, encoded)
            for writer, part in zip(writers, encoded.packed, strict=True):
                _write(writer, part)
            report.tokens = sum(writer.num_tokens for writer in (writers[:1] if job.sft else writers))
            report.seconds = time.monotonic() - begun
            on_progress(report)
        if job.sft and report.bad:
            raise DataError(_all_bad(report))
        if report.documents == 0:
            raise DataError(_nothing(job, report))
        if job.sft:  # before the tokens, which would otherwise all be predicted
            writers.pop().commit()
        for writer in writers:
            writer.commit(_sidecar(writer, tokenizer, workers.ids_fingerprint(), job))
    report.seconds = time.monotonic() - begun
    return report


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
    folder = Path(job.output_prefix).absolute().parent
    read = partial(read_chunks, text_unit=job.text_unit, most_document_bytes=most_document_bytes, columns=job.columns)
    read = partial(read, places=places)
    if long_line_bytes is not None:
        read = partial(read, long_line=partial(LongLine, folder), long_line_bytes=long_line_bytes)
    for path in job.inputs if inputs is None else inputs:
        yield from read(path)


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


def _write(writer: IndexedWriter, part: Packed) -> None:
    """Append the tokens of a chunk to an output."""
    tokens = part.tokens
    if not isinstance(tokens, bytes):
        with closing(tokens) as file:
            for block in iter(lambda: file.read(_COPIED_BYTES), b""):
                writer.begin_sequence(np.frombuffer(block, writer.dtype))
        tokens = b""
    lengths, sizes = np.frombuffer(part.lengths, np.int32), np.frombuffer(part.document_sizes, np.int64)
    writer.extend(np.frombuffer(tokens, writer.dtype), lengths, sizes)


def _without_repeated(encoded: Encoded, seen: set[bytes], job: Job, tokenizer: Tokenizer, report: Report) -> Encoded:
    """A chunk without the documents that an earlier one, or an earlier place in it, has.

    Args:
        encoded: the chunk.
        seen: digests of the documents so far; those of this chunk are added.
        job: of the run.
        tokenizer: its.
        report: counts what is left out.
    """
    keep = np.zeros(encoded.documents, bool)
    for number in range(encoded.documents):
        digest = encoded.digests[number * _DIGEST_BYTES : (number + 1) * _DIGEST_BYTES]
        keep[number] = digest not in seen
        seen.add(digest)
    if keep.all():
        return encoded
    close_files(encoded.packed)
    report.repeated += int((~keep).sum())
    parts = tuple(
        _some_documents(part, keep, dtype) for part, dtype in zip(encoded.packed, job.dtypes(tokenizer), strict=True)
    )
    return replace(encoded, packed=parts, documents=int(keep.sum()))


def _some_documents(part: Packed, keep: NDArray[np.bool_], dtype: np.dtype) -> Packed:
    """The tokens of some of the documents."""
    lengths, sizes = np.frombuffer(part.lengths, np.int32), np.frombuffer(part.document_sizes, np.int64)
    sequences = np.repeat(keep, sizes)
    if not isinstance(part.tokens, bytes):  # the one document of a long line
        return packed([], dtype)
    tokens = np.frombuffer(part.tokens, dtype)[np.repeat(sequences, lengths)]
    return Packed(tokens=tokens.tobytes(), lengths=lengths[sequences].tobytes(), document_sizes=sizes[keep].tobytes())


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


def _count(report: Report, job: Job, chunk: Chunk, encoded: Encoded) -> None:
    if encoded.bad and job.strict:
        raise DataError(f"{encoded.bad[0]} (--strict)")
    report.documents += encoded.documents
    report.empty += encoded.empty
    report.text_bytes += chunk.size
    report.file_bytes += chunk.file_bytes
    report.bad_count += len(encoded.bad)
    report.bad.extend(encoded.bad[: _BAD_KEPT - len(report.bad)])


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


def _nothing(job: Job, report: Report) -> str:
    where = job.inputs[0] if len(job.inputs) == 1 else f"the {len(job.inputs)} input files"
    first = f"; the first bad line is {report.bad[0]}" if report.bad else ""
    left_out = f"{counted(report.bad_count, 'bad line')}, {counted(report.empty, 'empty document')}"
    return f"{where}: no documents in it ({left_out}{first})"


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
