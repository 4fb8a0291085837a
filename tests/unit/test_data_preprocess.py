"""From text files to tokens: what is read, what is left out and said so, and output that only the input decides."""

from __future__ import annotations

import gzip
import json
import os
import random
import sysconfig
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from megacore.data.indexed.corpus import TextUnit, check_files, read_chunks
from megacore.data.indexed.documents import BadLine, parse
from megacore.data.indexed.preprocess import Job, Report, preprocess
from megacore.data.indexed.reader import IndexedDataset
from megacore.data.indexed.sidecar import read_sidecar
from megacore.data.indexed.writer import merge
from megacore.data.tokenizers.tokenizer import Tokenizer
from megacore.data.tokenizers.training import train_tokenizer
from megacore.errors import DataError
from tests.unit import data_bytes

ROOT = Path(__file__).resolve().parents[2]
STDLIB = Path(sysconfig.get_path("stdlib"))
SOURCES = [path.read_text() for path in sorted((STDLIB / "json").glob("*.py"))] + [(STDLIB / "argparse.py").read_text()]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A small byte-level BPE."""
    return train_tokenizer(SOURCES, "bpe", 500)


def documents(path: Path, unit: TextUnit = "line", chunk_bytes: int = 1 << 19) -> tuple[list[str], list[BadLine]]:
    """All texts of a file and its bad lines."""
    texts, bad = [], []
    for chunk in read_chunks(str(path), unit, chunk_bytes):
        parsed = parse(chunk)
        texts.extend(parsed.texts[0])
        bad.extend(parsed.bad)
    return texts, bad


def run(folder: Path, content: str, tokenizer: Any, /, *, name: str = "a.txt", **options: Any) -> Report:
    """Tokenize a file with this content to `o`, beside it."""
    (folder / name).write_text(content)
    return preprocess(Job(inputs=(str(folder / name),), output_prefix=str(folder / "o"), **options), tokenizer)


# ---- reading ---------------------------------------------------------------------------------------------------------


PARAGRAPHS = b"\n\none\n  two\n\n \t\nthree\r\nfour\n\n\n\nfive"
LINES = "\ufefffirst\r\n\n  \n second\x0bstill\x0cstill\u2028still\x85still \nlast".encode()


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1 << 19])
@pytest.mark.parametrize(
    ("unit", "content", "expected"),
    [
        ("line", LINES, ["first", " second\x0bstill\x0cstill\u2028still\x85still ", "last"]),
        ("paragraph", PARAGRAPHS, ["one\n  two", "three\nfour", "five"]),
        ("file", PARAGRAPHS, ["\n\none\n  two\n\n \t\nthree\nfour\n\n\n\nfive"]),
    ],
)
def test_documents_end_where_their_unit_does(
    unit: TextUnit, content: bytes, expected: list[str], chunk_bytes: int, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert documents(tmp_path / "a.txt", unit, chunk_bytes) == (expected, [])


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
@pytest.mark.parametrize("begins", [b"", b"\xef\xbb\xbf", b"\n\n"])
def test_a_worker_reads_the_same_bytes_from_the_file(unit: TextUnit, begins: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(begins + "".join(SOURCES).encode() + b"\xff\n\nlast")
    for chunk_bytes in (1000, 200_000):
        held = list(read_chunks(str(path), unit, chunk_bytes))
        placed = list(read_chunks(str(path), unit, chunk_bytes, places=True))
        assert [chunk.loaded() for chunk in placed] == held
        assert [chunk.size for chunk in placed] == [len(chunk.data) for chunk in held]
        assert unit == "file" or sum(len(chunk.data) for chunk in placed) <= chunk_bytes  # the end alone


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(SOURCES))
    first, second = list(read_chunks(str(path), "line", 10_000, places=True))[:2]
    os.truncate(path, first.size + 1)
    assert first.loaded().data == "".join(SOURCES).encode()[: first.size]
    with pytest.raises(DataError, match="was replaced or cut while it was read"):
        second.loaded()
    path.write_text("".join(SOURCES))
    other = tmp_path / "c.txt"
    other.write_text("".join(SOURCES))
    placed = next(iter(read_chunks(str(path), "line", 10_000, places=True)))
    os.replace(other, path)
    with pytest.raises(DataError, match="was replaced or cut"):
        placed.loaded()


def test_compressed_files_are_read_to_their_end(tmp_path: Path) -> None:
    texts = [f"document {n} ü" for n in range(30_000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    half = len(lines) // 2
    zst = zstandard.ZstdCompressor()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines[:half]) + gzip.compress(lines[half:]))
    (tmp_path / "a.jsonl.zst").write_bytes(zst.compress(lines[:half]) + zst.compress(lines[half:]))
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        assert documents(tmp_path / name) == (texts, [])
        assert sum(c.file_bytes for c in read_chunks(str(tmp_path / name))) == (tmp_path / name).stat().st_size


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_a_damaged_compressed_file_is_refused(suffix: str, damage: str, tmp_path: Path) -> None:
    lines = os.urandom(200_000).hex().encode()
    packed = gzip.compress(lines) if suffix == "gz" else zstandard.ZstdCompressor().compress(lines)
    flipped = bytes([packed[0] ^ 1]) + packed[1:]
    path = tmp_path / f"a.txt.{suffix}"
    path.write_bytes({"cut": packed[:-20_000], "flipped": flipped, "other": b"not compressed at all"}[damage])
    with pytest.raises(DataError, match=rf"a\.txt\.{suffix}: cannot be read to its end .* damaged or cut short"):
        list(read_chunks(str(path)))


BAD_LINES = {
    b'{"text": "cut': "not JSON (Unterminated string starting at at column 10)",
    b'{"text": "a"} x': "not JSON (Extra data at column 15)",
    b'["text"]': "not a JSON object but list",
    b"3": "not a JSON object but int",
    b'{"Text": "a", "id": 3}': "no key 'text' (it has 'Text', 'id')",
    b"{}": "no key 'text' (it has none)",
    b'{"text": null}': "key 'text' holds NoneType, not text",
    b'{"text": ["a"]}': "key 'text' holds list, not text",
    b'{"text": "\xff"}': "not UTF-8 (byte 0xff at column 11)",
    b'{"text": "\\ud800"}': "key 'text' holds half a surrogate pair, which is no character",
    b'{"text": ' + b"[" * 100_000: "not usable JSON (too deep or too long a number)",
    b'{"text": ' + b"1" * 5000 + b"}": "not usable JSON (too deep or too long a number)",
}


@pytest.mark.parametrize(
    ("name", "unit", "separator", "way_out"),
    [
        ("a.jsonl", "line", b"\n", "split it over several lines"),
        ("a.txt.gz", "paragraph", b"\n\n", "--text-unit line"),
        ("a.txt", "file", b"", "smaller files"),
    ],
)
def test_a_document_too_long_for_memory_is_refused(
    name: str, unit: TextUnit, separator: bytes, way_out: str, tmp_path: Path
) -> None:
    short = (b"x" * 9_999 + separator) * 50
    path = tmp_path / name
    content = short + b"x" * 3_000_000 + separator + short
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    lines = separator.count(b"\n") * (50 if unit != "file" else 0) + 1
    with pytest.raises(DataError, match=rf"{name}:{lines}: the document .* 1,000,000 bytes, .*{way_out}"):
        list(read_chunks(str(path), unit, 20_000, most_document_bytes=1_000_000))
    whole = b"".join(chunk.data for chunk in read_chunks(str(path), unit, 20_000, most_document_bytes=4_000_000))
    assert whole == content


def test_bad_lines_are_located_and_explained(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(b'{"text": "good"}\n\n' + line for line in BAD_LINES))
    texts, bad = documents(path)
    assert texts == ["good"] * len(BAD_LINES)
    assert [line.reason for line in bad] == list(BAD_LINES.values())
    assert [line.line for line in bad] == [3 * (n + 1) for n in range(len(BAD_LINES))]
    assert str(bad[0]).startswith(f"{path}:3: not JSON")
    assert documents(path, chunk_bytes=1)[1] == bad


# ---- writing ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """About 1.5 MB of JSON lines, a few of them bad, and the good texts."""
    rng = random.Random(0)
    texts, lines = [], []
    for number in range(300):
        source = rng.choice(SOURCES)
        start = rng.randrange(len(source))
        text = source[start : start + rng.randint(1, 10_000)]
        texts.append(text)
        lines.append(json.dumps({"text": text, "title": f"title {number}"}, ensure_ascii=number % 2 == 0))
        if number % 100 == 50:
            lines.append("{bad")
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("\n".join(lines))
    return path, texts


def test_the_output_is_the_same_for_any_number_of_workers(
    corpus: tuple[Path, list[str]], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path, texts = corpus
    outputs, reports = [], []
    for workers in (1, 3):
        prefix = str(tmp_path / f"w{workers}")
        job = Job(inputs=(str(path),) * 2, output_prefix=prefix, append_eod=True, workers=workers)
        reports.append(preprocess(job, tokenizer))
        outputs.append([Path(f"{job.outputs[0]}.{ending}").read_bytes() for ending in ("bin", "idx", "json")])
    assert outputs[0] == outputs[1]
    assert reports[0].bad == reports[1].bad
    assert [line.line for line in reports[0].bad] == [52, 153, 254] * 2
    expected = [[[*tokenizer.encode(text), tokenizer.eod]] for text in texts] * 2
    assert data_bytes.read(tmp_path / "w3_text_document") == expected
    assert reports[0].documents == 600
    assert reports[0].tokens == sum(len(document[0]) for document in expected)
    assert reports[0].text_bytes == reports[0].file_bytes == 2 * path.stat().st_size


def test_the_rows_of_a_parquet_file_are_those_of_json_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"text": f"row {n} ü\n" * (n % 5), "title": f"t{n}", "id": n} for n in range(1500)]
    rows[700]["text"] = None
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=400)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reports = {}
    for name in ("a.parquet", "a.jsonl"):
        job = Job(inputs=(str(tmp_path / name),), output_prefix=str(tmp_path / name), json_keys=("text", "title"))
        reports[name] = preprocess(job, tokenizer)
    for end in ("text_document.bin", "text_document.idx", "title_document.bin", "title_document.idx"):
        assert (tmp_path / f"a.parquet_{end}").read_bytes() == (tmp_path / f"a.jsonl_{end}").read_bytes()
    ours, theirs = reports.values()
    assert (ours.documents, ours.empty, ours.bad_count) == (theirs.documents, theirs.empty, theirs.bad_count)
    assert ours.bad[0].line == theirs.bad[0].line == 701
    assert ours.file_bytes == (tmp_path / "a.parquet").stat().st_size
    with pytest.raises(DataError, match=r"no column 'body': use --json-keys with some of 'text', 'title', 'id'"):
        check_files([str(tmp_path / "a.parquet")], ["text", "body"])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(DataError, match=r"b\.parquet is no Parquet file, or is cut short"):
        check_files([str(tmp_path / "b.parquet")], ["text"])


def test_the_sidecar_describes_the_dataset(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name, text in (("a", "one\ntwo three\n"), ("b", "four\n")):
        (tmp_path / f"{name}.txt").write_text(text)
        preprocess(Job(inputs=(str(tmp_path / f"{name}.txt"),), output_prefix=str(tmp_path / name)), tokenizer)
    dataset = IndexedDataset(tmp_path / "a_text_document")
    sidecar = read_sidecar(dataset)
    assert sidecar is not None
    tokens = [token for document in data_bytes.read(dataset.prefix) for token in document[0]]
    assert (sidecar.documents, sidecar.sequences, sidecar.tokens) == (2, 2, len(tokens))
    assert (sidecar.max_token_id, sidecar.dtype) == (max(tokens), "uint16")
    assert sidecar.tokenizer_fingerprint == tokenizer.fingerprint
    assert sidecar.bin_bytes == dataset.bin_path.stat().st_size
    assert sidecar.idx_bytes == dataset.idx_path.stat().st_size
    merge([str(tmp_path / f"{name}_text_document") for name in "ab"], str(tmp_path / "m"))
    merged = read_sidecar(IndexedDataset(tmp_path / "m"))
    assert merged is not None
    assert (merged.documents, merged.tokens) == (3, len(tokens) + len(tokenizer.encode("four")))


@pytest.mark.parametrize("change", ["touched bin", "not JSON", "deep JSON", "a list", "wrong types", "other size"])
def test_a_sidecar_that_cannot_be_believed_is_ignored(change: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    run(tmp_path, "one\ntwo three\n", tokenizer)
    dataset = IndexedDataset(tmp_path / "o_text_document")
    path = tmp_path / "o_text_document.json"
    values = json.loads(path.read_text())
    if change == "touched bin":
        later = path.stat().st_mtime_ns + 10**9
        os.utime(dataset.bin_path, ns=(later, later))
    elif change in ("wrong types", "other size"):
        bin_bytes = "8" if change == "wrong types" else values["bin_bytes"] + 2
        path.write_text(json.dumps({**values, "bin_bytes": bin_bytes}))
    else:
        path.write_text({"not JSON": "{", "deep JSON": "[" * 100_000, "a list": "[]"}[change])
    assert read_sidecar(dataset) is None


# ---- refusing --------------------------------------------------------------------------------------------------------


def test_strict_refuses_at_the_first_bad_line_and_leaves_nothing(
    corpus: tuple[Path, list[str]], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    job = Job(inputs=(str(corpus[0]),), output_prefix=str(tmp_path / "o"), workers=2, strict=True)
    with pytest.raises(DataError, match=r"corpus\.jsonl:52: not JSON .*\(--strict\)"):
        preprocess(job, tokenizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n', "{bad\n"])
def test_an_input_without_documents_is_refused(content: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: no documents in it"):
        run(tmp_path, content, tokenizer, name="a.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("name", "through"),
    [
        ("o_text_document.json", "its name"),
        ("o_text_document.bin", "a link"),
        ("o_text_document.bin.partial", "another path"),
    ],
)
def test_an_input_is_never_written_over(name: str, through: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    given = tmp_path / name
    given.write_text("one\n" if name.endswith(("bin", "partial")) else '{"text": "one"}\n')
    content = given.read_bytes()
    (tmp_path / "link.json").symlink_to(given)
    path = {"its name": given, "a link": tmp_path / "link.json", "another path": tmp_path / ".." / tmp_path.name / name}
    with pytest.raises(DataError, match=f"{name} would be overwritten, but is one of the inputs"):
        preprocess(Job(inputs=(str(path[through]),), output_prefix=str(tmp_path / "o")), tokenizer)
    assert given.read_bytes() == content
