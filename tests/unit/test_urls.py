"""URLs on the command line: what they mean, and what is refused before anything starts; datasets are downloaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from megacore.config import ResolvedConfig
from megacore.config.cli import parse_config
from megacore.config.schema import Config
from megacore.data.gpt.build import build_datasets, check_inputs
from megacore.data.indexed import fetching
from megacore.data.indexed.fetching import local_prefix
from megacore.data.indexed.reader import IndexedDataset
from megacore.errors import DataError
from megacore.progress import Progress
from megacore.remote import RemotePath, url_problem
from tests.unit import data_bytes

BASE = ["--preset", "gpt2-tiny", "--vocab-size", "64", "--train-iters", "4", "--device", "cpu"]
MOCK = [*BASE, "--mock-data"]


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty store before and after, a directory to run in, and one for copies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    fsspec.filesystem("memory").store.clear()
    yield
    fsspec.filesystem("memory").store.clear()


def parse(*argv: str) -> ResolvedConfig:
    return parse_config(argv, prog="pretrain_gpt.py", description="", kind=Config, checks=[check_inputs])


def test_save_is_a_url_or_the_output_directory(tmp_path: Path) -> None:
    there = parse(*MOCK, "--save", "memory://run", "--output-dir", "here")
    assert (there.checkpoint_dir, there.training.output_dir) == ("memory://run", "here")
    assert RemotePath("memory://run").files() == []  # what tried whether it can be written is gone
    here = parse(*MOCK, "--save", "here")
    assert (here.checkpoint.save, here.training.output_dir, here.checkpoint_dir) == (None, "here", "here")
    both = parse(*MOCK, "--save", "memory://run", "--load", "memory://run")
    assert both.checkpoint.load == "auto"
    assert here.saving_to("memory://x").checkpoint_dir == "memory://x"
    assert there.saving_to("here").checkpoint_dir == "here"


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(scheme: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    problem = url_problem("s3://bucket/run")
    assert problem is not None
    assert 'needs the package s3fs, which is not installed: pip install "megacore[s3]"' in problem
    assert 'pip install "megacore[gcs]"' in (url_problem("gs://bucket/run") or "")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("Access Denied"), "may not be written: Access Denied: check the credentials"),
        (FileNotFoundError("The specified bucket does not exist"), "cannot be written: The specified bucket does not"),
        (RuntimeError("no route"), "cannot be written: RuntimeError: no route"),
    ],
)
def test_a_store_that_refuses(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", fail)
    assert message in (url_problem("memory://run", writes=True) or "")


# ---- datasets


def upload(source: Path, name: str, endings: tuple[str, ...] = (".bin", ".idx")) -> str:
    for ending in endings:
        RemotePath(f"memory://data/{name}{ending}").write_bytes(Path(f"{source}{ending}").read_bytes())
    return f"memory://data/{name}"


def corpus(directory: Path, first: int = 0) -> Path:
    documents = [[[(first + document * 7 + token) % 64 for token in range(70)]] for document in range(12)]
    data_bytes.write(directory / "corpus", documents)
    return directory / "corpus"


def test_a_dataset_is_downloaded_once_and_gives_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = corpus(tmp_path)
    url = upload(source, "corpus")
    flags = ["--seq-length", "16", "--data-cache-path", "cache"]
    sets = [build_datasets(parse(*BASE, *flags, "--data-path", path)).train for path in (url, str(source))]
    for index in range(4):
        assert (sets[0][index]["tokens"] == sets[1][index]["tokens"]).all()
    copy = local_prefix(url, "cache")
    assert Path(copy).parent.parent == Path("cache/datasets")
    monkeypatch.setattr(fetching, "fetch", None)
    assert local_prefix(url, "cache") == copy  # nothing is downloaded again
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    upload(corpus(tmp_path, first=5), "corpus")
    assert local_prefix(url, "cache") != copy  # the objects have changed
    assert list(IndexedDataset(local_prefix(url, "cache"))[0][:2]) == [5, 6]


def test_a_download_that_was_cut_off_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = corpus(tmp_path)
    url, size = upload(source, "corpus"), source.with_suffix(".bin").stat().st_size
    monkeypatch.setattr(fetching, "CHUNK", 100)
    read: list[int] = []

    class Cut(Exception):
        """The process ends here."""

    def advance(self: Progress, count: int) -> None:
        read.append(count)
        if sum(read) == 300:
            raise Cut

    monkeypatch.setattr(Progress, "advance", advance)
    with pytest.raises(Cut):
        local_prefix(url, "cache")
    (part,) = Path("cache").rglob("*.bin.part")
    assert part.stat().st_size == 300
    copy = local_prefix(url, "cache")
    assert sum(read) == size + source.with_suffix(".idx").stat().st_size  # nothing came twice
    for ending in (".bin", ".idx"):
        assert Path(copy + ending).read_bytes() == source.with_suffix(ending).read_bytes()
    assert not list(Path("cache").rglob("*.part"))


def test_a_full_disk_is_refused_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = upload(corpus(tmp_path), "corpus")
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(DataError, match=re.escape("more bytes in cache/datasets/corpus-")):
        local_prefix(url, "cache")
