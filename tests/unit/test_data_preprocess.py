"""From text files to tokens: what is read, what is left out and said so, and output that only the input decides;
long lines and conversations."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet
from transformers import AutoTokenizer

from megacore.data.gpt.packing import PackedDataset
from megacore.data.indexed import long_lines
from megacore.data.indexed.corpus import TextUnit, check_files, read_chunks
from megacore.data.indexed.documents import BadLine, parse
from megacore.data.indexed.preprocess import Job, Report, preprocess
from megacore.data.indexed.reader import IndexedDataset
from megacore.data.indexed.sidecar import is_predicted, loss_mask_prefix, open_loss_mask, read_sidecar
from megacore.data.indexed.writer import merge
from megacore.data.tokenizers import bounded, chat_template
from megacore.data.tokenizers.chat_template import Passage, PlainTemplate, TokenizerTemplate, load_template
from megacore.data.tokenizers.fast_bpe import fast_encoder
from megacore.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megacore.data.tokenizers.training import train_tokenizer
from megacore.errors import DataError
from tests.unit import data_bytes
from tests.unit.data_bytes import read
from tools import preprocess_data

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


@pytest.mark.parametrize("gives", [[70_000], [-1, 3], np.array([3, 70_000], np.uint32)], ids=str)
def test_an_id_that_the_dtype_cannot_hold_is_refused(gives: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with (
        patch.object(type(tokenizer), "encode_batch", lambda self, texts: [gives for _ in texts]),
        pytest.raises(DataError, match=f"ids from {min(gives)} to {max(gives)}, .* uint16"),
    ):
        run(tmp_path, "one\ntwo\n", tokenizer, workers=2)
    assert not list(tmp_path.glob("o_*"))


# ---- JSON lines that are read in pieces ------------------------------------------------------------------------------

LETTERS = [*'aé"\\/{]\t\n\x00', "b ", " c d ", "東京", "😀", "u12", " the quick fox "]
BROKEN = [
    *BAD_LINES,
    b'{"text": "LONG\x01 more", "x": "LONG"}',
    b'{"text": "LONG\\x more"}',
    b'{"text": "LONG\\u12"}',
    b'{"text": "LONG\\ud83d"}',
    b'{"text": "LONG\\ud83d", "text": "LONG"}',
    b'{"a": "LONG", "text": "LONG\\ude00\\ud83d end"}',
    b'{"a": "LONG", "text": "LONG}',
    b'{"a": "LONG", "text": "LONG\\',
    b'{"a": "LONG" "text": "LONG\\u1"}',
    b'{"a": "LONG", "text": 3}',
    b'{"a": "LONG", "b": "LONG"} "LONG"',
    b'{"a": "LONG", "b": "\xe6\x9d"}',
    b'{"a": "LONG", "b": "c\xe6\x9d',
    b'["LONG"]',
    b'"LONG"',
    b'LONG "LONG',
    b'{"text": ["LONG"]}',
]


@pytest.fixture(params=[3, 17, 64])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few bytes, so that all kinds of places lie at their edges."""
    monkeypatch.setattr(long_lines, "PIECE", request.param)
    monkeypatch.setattr(long_lines, "LONG_STRING", 20)
    monkeypatch.setattr(long_lines, "LONGEST_COPY", 400)
    monkeypatch.setattr("megacore.data.tokenizers.fast_bpe.WHOLE", 200)


def lines() -> list[bytes]:
    """Good and bad lines of many kinds."""
    rng = random.Random(3)
    made = []
    for _ in range(60):
        texts = {key: "".join(rng.choices(LETTERS, k=rng.choice([0, 3, 40, 300]))) for key in ("text", "b", "a é")}
        ordered = dict(rng.sample(list(texts.items()), 3))
        record = {"id": 7, **ordered, "more": [texts["b"], {"text": texts["a é"]}, None, "😀" * 30]}
        made.append(json.dumps(record, ensure_ascii=rng.random() < 0.5).encode())
    made += [
        b'{"text": "x", "b": "y", "n": [' + b"1, " * 200 + b"2]}",
        b" " * 900,
        b'{"text": "", "b": "' + b"a b" * 90 + b'"}',
    ]
    made += [made[0], made[5]]
    for line in BROKEN:
        if len(line) < 1000:  # nested as deep as BAD_LINES has it is the json module's own affair
            made.append(line.replace(b"LONG", "w é \\u4e2d\\ud83d\\ude00 a b".encode() * rng.choice([1, 4, 9])))
    return made


@pytest.mark.parametrize(
    ("small", "workers"), [(3, 1), pytest.param(17, 2, marks=pytest.mark.slow), (64, 1)], indirect=["small"]
)
def test_a_line_in_pieces_gives_what_it_gives_in_one(
    workers: int, small: None, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    fast = fast_encoder(tokenizer)
    assert fast is not None and fast.divides
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines()))
    reports, files = [], []
    for name, threshold in (("whole", 1 << 23), ("pieces", 1)):
        job = Job(
            inputs=(str(tmp_path / "a.jsonl"),),
            output_prefix=str(tmp_path / name / "o"),
            json_keys=("text", "b"),
            append_eod=True,
            deduplicate=True,
            workers=workers,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megacore.data.indexed.corpus.BLOCK", 50)
            defaults = ("line", 1, 1 << 25, None, None, 1 << 23)
            patch.setattr("megacore.data.indexed.corpus.read_chunks.__defaults__", defaults)
            reports.append(preprocess(job, tokenizer, fast=fast, long_line_bytes=threshold))
        made = sorted(path for path in (tmp_path / name).iterdir() if path.suffix != ".json")
        files.append({path.name: path.read_bytes() for path in made})
    whole, pieces = reports
    assert whole.bad == pieces.bad
    assert len(whole.bad) > 20
    assert (whole.documents, whole.empty, whole.repeated) == (pieces.documents, pieces.empty, pieces.repeated)
    assert (whole.tokens, whole.text_bytes, whole.file_bytes) == (pieces.tokens, pieces.text_bytes, pieces.file_bytes)
    assert whole.repeated >= 2
    assert files[0] == files[1]


@pytest.mark.slow
def test_a_line_of_300_mb_takes_no_more_memory_than_short_ones(tmp_path: Path) -> None:
    train_tokenizer(SOURCES, "bpe", 500).save(tmp_path / "tokenizer")
    text = "".join(SOURCES)
    peaks = []
    for name in ("short", "long"):
        with open(tmp_path / f"{name}.jsonl", "w", encoding="utf-8") as file:
            part = json.dumps(text)[1:-1]
            times = (300_000_000 if name == "long" else 17_000_000) // len(text)
            between = "" if name == "long" else '"}\n{"text": "'
            file.write('{"text": "' + part)
            for _ in range(times - 1):
                file.write(between + part)
            file.write('"}\n')
        words = f"--input {name}.jsonl --tokenizer tokenizer --output-prefix {name} --workers 1"
        code = (
            f"import resource, sys; sys.path.insert(0, {str(ROOT)!r}); from tools.preprocess_data import main; "
            f"assert main({words.split()}) == 0; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]) * 1024)
    assert peaks[1] - peaks[0] < 100_000_000, peaks
    short, long = ((tmp_path / f"{name}_text_document.bin").read_bytes() for name in ("short", "long"))
    assert long.startswith(short[: len(short) // 20])


# ---- conversations ---------------------------------------------------------------------------------------------------

# In transformers' own notation for what is predicted, which ours does not read.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITHOUT_REPLIES = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}"
)
TRIMMED = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
LAST_ONE_DIFFERS = "{% for m in messages %}{{ m['content'] }}{% if loop.last %}!{% endif %}{% endfor %}"
CONVERSATIONS: list[list[dict[str, str]]] = json.loads(
    Path(__file__).with_name("conversations.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without a chat template."""
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text()
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([text], "bpe", 400).save(folder)
    return folder


@pytest.fixture
def chat_tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


def with_template(directory: Path, folder: Path, template: str) -> Path:
    """A copy of the tokenizer's directory with a chat template."""
    folder.mkdir()
    for file in directory.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return folder


def write_records(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def run_sft(directory: Path, source: Path, prefix: Path, *flags: str) -> int:
    workers = () if "--workers" in flags else ("--workers", "1")
    argv = ["--sft", "--tokenizer", directory, "--input", source, "--output-prefix", prefix, *workers, *flags]
    return preprocess_data.main([str(part) for part in argv])


def test_the_plain_template_marks_replies_and_ends_them(chat_tokenizer: Tokenizer) -> None:
    passages = PlainTemplate().render(CONVERSATIONS[1])
    assert [passage.text for passage in passages] == [
        "<|system|>\nYou count.\n<|user|>\none\n<|assistant|>\ntwo, three",
        "\n<|user|>\nfour\nfive\n<|assistant|>\n  six ü 7",
    ]
    assert all(passage.ends for passage in passages)
    assert [passage.text[slice(*passage.predicted[0])] for passage in passages] == ["two, three", "  six ü 7"]


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_the_tokenizers_template_predicts_what_transformers_does(directory: Path, tmp_path: Path, number: int) -> None:
    folder = with_template(directory, tmp_path / "chat", CHATML)
    theirs = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        CONVERSATIONS[number], return_dict=True, return_assistant_tokens_mask=True
    )
    chat_tokenizer = load_tokenizer(folder)
    template = load_template(folder, "auto", chat_tokenizer)
    assert isinstance(template, TokenizerTemplate)
    (passage,) = template.render(CONVERSATIONS[number])
    ids, mask = chat_template.encode_passage(chat_tokenizer, passage)
    assert ids == theirs["input_ids"]
    assert mask == theirs["assistant_masks"]
    assert 0 < sum(mask) < len(mask)


def test_a_token_over_the_edge_of_a_reply_belongs_to_it(chat_tokenizer: Tokenizer) -> None:
    """Where the prompt's last character and the reply's first ones are one token."""
    text = "self" + "self.parser"
    whole = chat_tokenizer.encode(text)
    for at in range(len(text) + 1):
        ids, mask = chat_template.encode_passage(chat_tokenizer, Passage(text=text, predicted=((at, len(text)),)))
        assert ids == whole and mask == sorted(mask)
        before = chat_tokenizer.decode(ids[: mask.index(1)] if 1 in mask else ids)
        assert text.startswith(before) and len(before) <= at


def test_a_template_that_does_not_render_turn_by_turn_is_refused(directory: Path, tmp_path: Path) -> None:
    template = TokenizerTemplate(with_template(directory, tmp_path / "chat", LAST_ONE_DIFFERS))
    with pytest.raises(ValueError, match=r"message 3 when later ones follow, .* use --chat-template plain"):
        template.render(CONVERSATIONS[1])


def test_a_template_without_replies_is_refused_with_the_lines(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_template(directory, tmp_path / "chat", WITHOUT_REPLIES)
    source = write_records(tmp_path / "a.jsonl", [{"messages": each} for each in CONVERSATIONS[:2]])
    assert run_sft(folder, source, tmp_path / "out") == 2
    told = capsys.readouterr().err
    for line, message in ((1, 2), (2, 3)):
        assert f"{source}:{line}: the chat template leaves out the reply of message {message}" in told
    assert not list(tmp_path.glob("out*"))


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(t='a') %}{% for i in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}"
HOSTILE = {
    "loops": (LOOPS, "takes more than 0.2 s"),
    "multiplies": ("{{ 'a' * 10 ** 10 }}", "needs more than 1,024 MiB"),
    "writes": ("{% for i in range(1000) %}{{ 'a' * 10 ** 5 }}{% endfor %}", " more than "),
    "doubles": (DOUBLES, " more "),
}


@pytest.mark.parametrize(
    ("name", "workers"), [("loops", "2"), *((name, "1") for name in ("multiplies", "writes", "doubles"))]
)
def test_a_template_has_limits(
    name: str,
    workers: str,
    directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reached when it is loaded, or by a conversation."""
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    template, said = HOSTILE[name]
    if workers == "2":
        template = "{% if messages[0]['content'] != 'a' %}" + template + "{% endif %}"
    folder = with_template(directory, tmp_path / "t", template + TRIMMED)
    source = write_records(tmp_path / "c.jsonl", [{"messages": CONVERSATIONS[0]}])
    assert run_sft(folder, source, tmp_path / "out", "--workers", workers) == 2
    error = capsys.readouterr().err
    assert f"the chat template of {folder} " in error
    assert said in error
    assert error.count("\n") == 1
    assert (f"{source}:1: " in error) == (workers == "2")


def test_a_template_may_trim_replies(directory: Path, tmp_path: Path) -> None:
    template = TokenizerTemplate(with_template(directory, tmp_path / "chat", TRIMMED))
    (passage,) = template.render(CONVERSATIONS[1])
    assert "six ü 7\n" in passage.text[slice(*passage.predicted[-1])]


def test_a_template_that_is_not_there_is_refused(directory: Path, chat_tokenizer: Tokenizer) -> None:
    assert isinstance(load_template(directory, "auto", chat_tokenizer), PlainTemplate)
    with pytest.raises(DataError, match=r"--chat-template tokenizer: .* has none .* use --chat-template plain"):
        load_template(directory, "tokenizer", chat_tokenizer)


def test_the_outputs_are_an_ordinary_dataset_and_its_mask(directory: Path, tmp_path: Path) -> None:
    pair = {"prompt": "1 + 1 =", "completion": " 2"}
    source = write_records(tmp_path / "a.jsonl", [*({"messages": each} for each in CONVERSATIONS), pair])
    assert run_sft(directory, source, tmp_path / "one") == 0
    prefix, chat_tokenizer = f"{tmp_path}/one_sft_document", load_tokenizer(directory)
    documents, masks = read(prefix), read(loss_mask_prefix(prefix))
    predicted = [
        chat_tokenizer.decode([token for token, m in zip(ids, mask, strict=True) if m and token != chat_tokenizer.eod])
        for (ids,), (mask,) in zip(documents, masks, strict=True)
    ]
    replies = [[m["content"] for m in each if m["role"] == "assistant"] for each in CONVERSATIONS]
    assert predicted == ["".join(each) for each in replies] + [" 2"]
    ends = [sum(m for token, m in zip(ids, mask, strict=True) if token == chat_tokenizer.eod) for (ids,), (mask,) in
            zip(documents, masks, strict=True)]  # fmt: skip
    assert ends == [len(each) for each in replies] + [1]
    # What the model sees: labels that count are the replies, packed or not.
    indexed = IndexedDataset(prefix)
    data = PackedDataset(indexed, range(4), "best-fit", num_samples=8, seq_length=120, seed=1)
    counted = [sample["labels"][sample["loss_mask"] > 0].tolist() for sample in map(data.__getitem__, range(8))]
    total = sum(sum(mask[1:]) for (mask,) in masks)
    assert sum(map(len, counted[: data.packing.samples])) == total


def test_every_bad_line_is_named_and_nothing_is_written(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = {"role": "assistant", "content": "a"}
    bad: list[tuple[Any, str]] = [
        ("{", "not JSON"),
        ({"text": "a"}, "no key 'prompt' and no key 'completion'"),
        ({"prompt": "a"}, "no key 'completion'"),
        ({"prompt": "a", "completion": ""}, "key 'completion' is empty"),
        ({"messages": [reply, {"role": "user"}]}, "message 2 has no 'content'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message of the role 'assistant' has content"),
        (
            {"messages": [{"role": "tool", "content": "a"}, reply]},
            "the role 'tool' is unknown to --chat-template plain",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "'content' of message 1 holds NoneType, not text"),
    ]
    good = {"messages": [reply]}
    source = write_records(tmp_path / "a.jsonl", [part for each, _ in bad for part in (good, each)])
    assert run_sft(directory, source, tmp_path / "out") == 2
    told = capsys.readouterr().err.splitlines()
    assert "8 bad lines; nothing is written" in told[0]
    for number, (line, (_, words)) in enumerate(zip(told[1:], bad, strict=True), 1):
        assert line.strip().startswith(f"{source}:{2 * number}: ") and words in line
    assert not list(tmp_path.glob("out*"))


def test_masks_are_merged_with_their_datasets(directory: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        source = write_records(tmp_path / f"{name}.jsonl", [{"prompt": name, "completion": f"{name} and so on"}] * 3)
        assert run_sft(directory, source, tmp_path / name) == 0
    parts, merged = [f"{tmp_path}/{name}_sft_document" for name in ("a", "b")], f"{tmp_path}/all"
    merge(parts, merged)
    mask = open_loss_mask(IndexedDataset(merged))
    assert mask is not None
    expected = [read(loss_mask_prefix(part)) for part in parts]
    assert read(loss_mask_prefix(merged)) == expected[0] + expected[1]
    for path in (Path(f"{loss_mask_prefix(parts[1])}.{end}") for end in ("bin", "idx")):
        path.unlink()
    with pytest.raises(DataError, match="only 1 of the 2 inputs have one"):
        merge(parts, f"{tmp_path}/more")
    assert np.all(IndexedDataset(merged).sequence_lengths > 0)


def test_a_mask_of_other_values_is_refused_where_they_are_read(directory: Path, tmp_path: Path) -> None:
    source = write_records(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b and so on"}] * 3)
    assert run_sft(directory, source, tmp_path / "a") == 0
    dataset = IndexedDataset(f"{tmp_path}/a_sft_document")
    path = Path(f"{loss_mask_prefix(dataset.prefix)}.bin")
    values = np.frombuffer(path.read_bytes(), np.uint8)
    path.write_bytes((values * 255).tobytes())
    mask = open_loss_mask(dataset)
    assert mask is not None
    with pytest.raises(DataError, match=rf"has the value 255 for token {values.argmax()}, and a loss mask has 0 and 1"):
        is_predicted(mask, 0, len(values))
    assert is_predicted(mask, 0, 1).tolist() == [0]
