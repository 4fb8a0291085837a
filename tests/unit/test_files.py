"""Files are replaced whole or not at all, and a lock keeps a second writer out for as long as its holder lives."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.files import naming, replace_bytes, replacing, take_lock, write_all


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


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        replace_bytes(tmp_path / "gone" / "a", b"x")


def test_a_name_that_is_known_stays() -> None:
    with pytest.raises(OSError, match="'first'"), naming(Path("second")):
        raise OSError(errno.EIO, "broken", "first")


def test_all_is_written_however_little_the_system_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    with (tmp_path / "a").open("wb", buffering=0) as file:
        write_all(file.fileno(), b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_a_lock_lasts_as_long_as_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = f"import fcntl, sys; f = open({str(path)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with path.open("w") as file:
        with pytest.raises(BlockingIOError):
            take_lock(file.fileno())
        holder.kill()
        assert take_lock(file.fileno(), patience=30.0)
    holder.communicate()


def test_a_file_system_without_locks_is_told_from_a_lock_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "a").open("w") as file:
        assert not take_lock(file.fileno())
