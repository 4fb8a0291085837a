"""The data tools as a user runs them: from a bare checkout, with nonsense, interrupted and killed."""

from __future__ import annotations

import array
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import termios
import threading
import tomllib
from pathlib import Path
from typing import TextIO

import pytest

from megacore.data.indexed import corpus
from megacore.data.tokenizers.tokenizer import load_tokenizer
from megacore.watch.processes import born, is_busy, state_of
from tests.e2e.launching import ROOT, run_cold
from tests.patience import patience, until
from tests.unit import data_bytes
from tools.merge_datasets import main as merge_datasets
from tools.preprocess_data import main as preprocess_data
from tools.train_tokenizer import main as train_tokenizer

TOOLS = {"train": train_tokenizer, "preprocess": preprocess_data, "merge": merge_datasets}
NAMES = {"train": "train_tokenizer", "preprocess": "preprocess_data", "merge": "merge_datasets"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of JSON lines and a tokenizer trained on it."""
    folder = tmp_path_factory.mktemp("tools")
    texts = [path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert train_tokenizer(flags(input=folder / "corpus.jsonl", vocab_size=400, output=folder / "tokenizer")) == 0
    return folder


def flags(**values: object) -> list[str]:
    """Flags from keywords."""
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def start(tool: str, words: list[str], checkout: Path = ROOT) -> subprocess.Popen[str]:
    """Start a tool from a checkout, as where the dependencies are installed and megacore is not."""
    without_python = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables = without_python | {"PYTHONPATH": sysconfig.get_path("purelib")}
    # -S: no .pth files, and so no editable install of this or another checkout.
    command = [sys.executable, "-S", str(checkout / "tools" / f"{tool}.py"), *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd="/", env=variables, stdout=pipe, stderr=pipe, text=True)


def test_the_tools_run_from_a_bare_checkout(folder: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("megacore", "tools", "kernels"):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True)
    common = flags(input=folder / "corpus.jsonl")
    runs = [
        ("train_tokenizer", [*common, *flags(model="bpe", vocab_size=400, output=tmp_path / "t")]),
        ("preprocess_data", [*common, "--append-eod", *flags(tokenizer=tmp_path / "t", output_prefix=tmp_path / "d")]),
        ("merge_datasets", flags(input=tmp_path / "d_text_document", output_prefix=tmp_path / "m")),
    ]
    for tool, words in runs:
        process = start(tool, words, checkout)
        output, errors = process.communicate(timeout=patience(60))
        assert (process.returncode, errors) == (0, "")
        assert len(output.splitlines()) == 1
    tokenizer = load_tokenizer(tmp_path / "t")
    lines = (folder / "corpus.jsonl").read_text().splitlines()
    expected = [[[*tokenizer.encode(json.loads(line)["text"]), tokenizer.eod]] for line in lines]
    assert data_bytes.read(tmp_path / "m") == expected
    assert data_bytes.read(tmp_path / "d_text_document") == expected


@pytest.mark.parametrize("model", ["unigram", "wordpiece"])
def test_other_models_go_through_the_tools(model: str, folder: Path, tmp_path: Path) -> None:
    corpus = folder / "corpus.jsonl"
    assert train_tokenizer(flags(input=corpus, model=model, vocab_size=450, output=tmp_path / "t")) == 0
    made = flags(input=corpus, tokenizer=tmp_path / "t", output_prefix=tmp_path / "d", workers=2)
    assert preprocess_data([*made, "--append-eod"]) == 0
    tokenizer = load_tokenizer(tmp_path / "t")
    first = json.loads(corpus.read_text().splitlines()[0])["text"]
    assert data_bytes.read(tmp_path / "d_text_document")[0] == [[*tokenizer.encode(first), tokenizer.eod]]


NONSENSE: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("data_tools.toml").read_text())


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_gets_one_clear_line_and_status_2(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PIPE_SECONDS", 0.1)
    for pipe in ("p.txt", "p.parquet", "pipe.idx"):
        os.mkfifo(tmp_path / pipe)
    (tmp_path / "bad.jsonl").write_text("hello\n")
    (tmp_path / "bad.gz").write_text("hello\n")
    (tmp_path / "a.txt").write_text("hello\n")
    (tmp_path / "hollow.jsonl").write_text('{"text": ""}\n' * 3)
    shutil.copytree(folder / "tokenizer", tmp_path / "other")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer_config.json").write_text('{"text": "hello"}\n')
    for empty in ("empty.txt", "void.idx", "void.bin"):
        (tmp_path / empty).touch()
    data_bytes.write(tmp_path / "u16", [[[1]]], code=8)
    data_bytes.write(tmp_path / "i32", [[[1]]], code=4)
    before = sorted(tmp_path.iterdir())
    marks = {"in": f"--input {folder}/corpus.jsonl", "tok": f"--tokenizer {folder}/tokenizer"}
    tool, *words = NONSENSE[name]["words"].format(**marks, out=f"--output-prefix {tmp_path}/out", tmp=tmp_path).split()
    assert TOOLS[tool](words) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert len(errors.splitlines()) == 1
    assert errors.startswith(f"{NAMES[tool]}.py: error: ")
    assert NONSENSE[name]["says"] in errors
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("encoder", [pytest.param("tiktoken", marks=pytest.mark.slow), "tokenizers"])
def test_a_pipe_gives_what_its_file_does(encoder: str, folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    given = {"tokenizer": folder / "tokenizer", "encoder": encoder, "workers": 1}
    assert preprocess_data(flags(input=folder / "corpus.jsonl", output_prefix=tmp_path / "a", **given)) == 0
    text = (folder / "corpus.jsonl").read_bytes()
    writer = threading.Thread(target=(tmp_path / "pipe.jsonl").write_bytes, args=(text,))
    writer.start()
    assert preprocess_data(flags(input=tmp_path / "pipe.jsonl", output_prefix=tmp_path / "b", **given)) == 0
    writer.join()
    assert (tmp_path / "a_text_document.bin").read_bytes() == (tmp_path / "b_text_document.bin").read_bytes()


def test_the_same_tokenizer_may_be_trained_again_and_another_with_overwrite(folder: Path, tmp_path: Path) -> None:
    train = train_tokenizer
    common = flags(input=folder / "corpus.jsonl", output=tmp_path / "t")
    assert [train([*common, *flags(vocab_size=size)]) for size in (300, 300, 400)] == [0, 0, 2]
    assert load_tokenizer(tmp_path / "t").vocab_size == 300
    assert train([*common, *flags(vocab_size=400), "--overwrite"]) == 0
    assert load_tokenizer(tmp_path / "t").vocab_size == 400


# The first argument is the largest size of a file in bytes, which stands for the end of the disk.
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_file_that_grows_too_large_is_named_with_the_way_out(tmp_path: Path) -> None:
    source = tmp_path / "in"
    data_bytes.write(source, [[list(range(1000))]] * 30)
    words = flags(input=source, output_prefix=tmp_path / "o")
    merge = ROOT / "tools" / "merge_datasets.py"
    run = run_cold(sys.executable, "-c", LIMITED, 20000, merge, *words)
    assert run.returncode == 1
    assert run.stderr.rstrip().splitlines()[-1] == (
        f"merge_datasets.py: error: {tmp_path}/o.bin.partial: File too large; raise the largest "
        "size of a file (ulimit -f), or give an output path on a file system that allows it"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"in.bin", "in.idx"}


@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow), "SIGKILL"])
def test_an_interrupted_run_leaves_no_dataset_and_no_process(name: str, folder: Path, tmp_path: Path) -> None:
    # The input is a pipe that stays open: the run is under way until it is ended.
    pipe = tmp_path / "endless.jsonl"
    os.mkfifo(pipe)
    made = flags(input=pipe, tokenizer=folder / "tokenizer", output_prefix=tmp_path / "o", workers=2)
    process = start("preprocess_data", made)
    try:
        with open(pipe, "w") as feed:
            feed.write((folder / "corpus.jsonl").read_text() * 40)
            feed.flush()
            until(lambda: len(at_work(process.pid)) == 2, 30, "the workers did not start")
            # It waits for more: Python forgets a signal that comes while it fills a buffer from a file.
            until(lambda: waits_to_read(process.pid, feed), 30, "the run does not read on")
            workers = {worker: born(worker) for worker in at_work(process.pid)}
            process.send_signal(getattr(signal, name))
            errors = process.communicate(timeout=patience(30))[1]
    finally:
        process.kill()
    left = {path.name for path in tmp_path.iterdir()} - {pipe.name}
    if name == "SIGKILL":
        assert process.returncode == -signal.SIGKILL
        assert left == {"o_text_document.bin.partial"}  # the next run of the same name empties it
    else:
        assert process.returncode == {"SIGINT": 130, "SIGTERM": 143}[name]
        assert left == set()
        assert "Traceback" not in errors
    until(lambda: {state_of(*worker) for worker in workers.items()} == {"gone"}, 10, "workers outlive the run")


def at_work(pid: int) -> list[int]:
    """The workers of a run that are past their start, which ends with a thread that watches the run."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if len(list(Path(f"/proc/{child}/task").iterdir())) > 1]


def waits_to_read(pid: int, pipe: TextIO) -> bool:
    """Whether a process has read all of a pipe, and sleeps."""
    unread = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, unread)
    return unread[0] == 0 and not is_busy(pid)
