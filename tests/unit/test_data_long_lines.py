"""JSON lines that are read in pieces: the same tokens, and the same messages, as in one piece."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.data.indexed import long_lines
from megacore.data.indexed.preprocess import Job, preprocess
from megacore.data.tokenizers.fast_bpe import fast_encoder
from megacore.data.tokenizers.tokenizer import Tokenizer
from megacore.data.tokenizers.training import train_tokenizer
from tests.unit import test_data_preprocess
from tests.unit.test_data_preprocess import BAD_LINES, ROOT, SOURCES

tokenizer = test_data_preprocess.tokenizer  # fixture
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
