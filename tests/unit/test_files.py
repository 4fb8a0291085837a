"""Files are replaced whole or not at all, and a lock keeps a second writer out for as long as its holder lives."""

from __future__ import annotations

import errno
import faulthandler
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megacore.checkpoint.directory import pointed_to
from megacore.checkpoint.lock import WriterLock, sees_lock
from megacore.convert.publish import published
from megacore.data.tokenizers.tokenizer import load_tokenizer
from megacore.errors import CheckpointError, DataError, UserError
from megacore.files import (
    GrowingFile,
    read_bounded,
    replace_bytes,
    replacing,
    take_lock,
)
from megacore.observe.sinks import keep_until
from megacore.safe_json import read_object
from tests.patience import patience


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def meet_a_full_disk() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: .*/a\.json"):
        meet_a_full_disk()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_lock_lasts_as_long_as_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = f"import fcntl, sys; f = open({str(path)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-u", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with path.open("w") as file:
        with pytest.raises(BlockingIOError):
            take_lock(file.fileno())
        holder.kill()
        assert take_lock(file.fileno(), patience=30.0)
    holder.communicate()


# Each reader with the file that it reads, and what it raises or returns where that is a pipe.
READERS: list[tuple[str, Callable[[Path], object], type[Exception] | object]] = [
    ("a", lambda directory: read_bounded(directory / "a", 9), OSError),
    ("a.json", lambda directory: read_object(directory / "a.json"), CheckpointError),
    ("latest", pointed_to, None),
    ("writer.lock", WriterLock, UserError),
    ("writer.lock", lambda directory: sees_lock(directory, "x", patience=0.0), False),
    ("metrics.jsonl", lambda directory: keep_until(directory / "metrics.jsonl", 3), UserError),
    ("tokenizer.json", load_tokenizer, DataError),
]


@pytest.mark.parametrize("special", ["pipe", "device", "link to a pipe"])
@pytest.mark.parametrize(("name", "read", "outcome"), READERS, ids=[name for name, *_ in READERS])
def test_a_pipe_or_device_is_not_read(
    special: str, name: str, read: Callable[[Path], object], outcome: type[Exception] | object, tmp_path: Path
) -> None:
    """Reading the pipe would wait for ever for its writer, and /dev/zero has no end."""
    run = tmp_path / "run"
    run.mkdir()
    os.mkfifo(tmp_path / "pipe")
    if special == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to("/dev/zero" if special == "device" else tmp_path / "pipe")
    faulthandler.dump_traceback_later(patience(20), exit=True)
    try:
        if isinstance(outcome, type):
            with pytest.raises(outcome):
                read(run)
        else:
            assert read(run) == outcome
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_a_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_bounded(tmp_path / "a", 5) == read_bounded(tmp_path / "b", 5) == b"12345"
    with pytest.raises(OSError, match="has 5 bytes, more than the 4 that are read"):
        read_bounded(tmp_path / "a", 4)
    with pytest.raises(IsADirectoryError):
        read_bounded(tmp_path, 4)


def test_appending_makes_a_file_and_refuses_what_would_block(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    GrowingFile(path).append(b"one\n")
    GrowingFile(path).append(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="is a symbolic link, which is not followed"):
        GrowingFile(tmp_path / "link").append(b"three\n")
    assert path.read_bytes() == b"one\ntwo\n"
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(OSError, match="is not a regular file"):
            GrowingFile(other)


def test_a_growing_file_outlives_its_name(tmp_path: Path) -> None:
    path, there = tmp_path / "run" / "a", tmp_path / "gone" / "a"
    path.parent.mkdir()
    file = GrowingFile(path)
    assert file.append(b"1") is None
    path.parent.rename(there.parent)
    assert file.append(b"2") == f"{path} is {there} now: it is made again, with all that it had"
    shutil.rmtree(path.parent)
    assert file.append(b"3") == f"{path} was deleted: it is made again, with all that it had"
    replace_bytes(path, path.read_bytes())  # moved to another disk, with a link to it
    assert file.append(b"4") is None
    replace_bytes(path, b"edited ")
    assert file.append(b"5") == f"{path} was deleted: what follows is appended to the file that has its name"
    assert (path.read_bytes(), there.read_bytes()) == (b"edited 5", b"1")


# ---- directories that are published ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "problem"),
    [("new/..", "is no name of a new directory"), ("file/out", "cannot be made"), ("/proc/x/y", "cannot be made")],
)
def test_an_impossible_output_is_refused_before_anything_is_written(output: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"--output .* {problem}"), published(tmp_path / output):
        pytest.fail("the conversion began")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from megacore.convert.publish import published\n"
        "with published(Path(sys.argv[1])) as made: (made / 'half').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], check=False, timeout=patience(60))
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1
    assert left[0].startswith(".out.tmp-")
    living, other = tmp_path / f".out.tmp-{os.getppid()}", tmp_path / ".outer.tmp-999999999"
    living.mkdir()
    other.mkdir()
    with published(tmp_path / "out") as made:
        (made / "whole").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([living.name, other.name, "out"])
