"""A run's directory: names, order of publication, leftovers, retention, and the lock of its one writer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.checkpoint import lock as lock_module
from megacore.checkpoint.directory import (
    expired,
    free_name,
    next_serial,
    pointed_to,
    published,
    step_of,
    sweep,
    temporary_name,
)
from megacore.checkpoint.lock import WriterLock
from megacore.checkpoint.manifest import Manifest, read_manifest
from megacore.checkpoint.storage import LocalRun
from megacore.errors import CheckpointError, UserError

ROOT = Path(__file__).parents[2]


def checkpoint(run: Path, name: str, serial: int) -> Path:
    """A published checkpoint without tensors."""
    directory = run / name
    directory.mkdir(parents=True)
    manifest = Manifest(serial=serial, step=0, consumed_samples=0, topology={"tp": 1, "pp": 1, "dp": 1}, config={})
    (directory / "manifest.json").write_text(manifest.to_json())
    return directory


def test_the_order_is_that_of_publication_and_not_of_steps(tmp_path: Path) -> None:
    names = {"step_00000004": 1, "step_00000008": 2, "step_00000002": 3, "step_00000004.2": 4, "step_100000000": 5}
    for name, serial in names.items():
        checkpoint(tmp_path, name, serial)
    (tmp_path / "step_00000010.tmp-0123abcd").mkdir()
    assert [path.name for path in published(tmp_path)] == list(reversed(names))
    assert next_serial(tmp_path) == 6
    assert next_serial(tmp_path / "nowhere") == 1
    assert step_of(tmp_path / "step_00000004.2") == 4
    assert step_of(tmp_path / "step_4") is None


def test_what_has_lost_its_manifest_or_was_moved_away_is_still_seen(tmp_path: Path) -> None:
    checkpoint(tmp_path, "step_00000004", 1)
    checkpoint(tmp_path / "big", "step_00000006", 2)
    (tmp_path / "step_00000006").symlink_to(tmp_path / "big" / "step_00000006")
    (tmp_path / "step_00000008").mkdir()
    (tmp_path / "step_00000009").symlink_to(tmp_path / "nowhere")
    (tmp_path / "step_00000010").touch()
    (tmp_path / "step_00000011").symlink_to("step_00000011")
    names = [path.name for path in published(tmp_path)]
    assert names == [f"step_{step:08d}" for step in (11, 10, 9, 8, 6, 4)]
    assert next_serial(tmp_path) == 3
    assert free_name(tmp_path, 9) == "step_00000009.2"
    said = []
    for name in names[:4]:
        with pytest.raises(CheckpointError) as caught:
            read_manifest(tmp_path / name)
        said.append(str(caught.value).removeprefix(f"{tmp_path}/"))
    assert said == [
        "step_00000011/manifest.json cannot be read as a manifest: Too many levels of symbolic links",
        "step_00000010/manifest.json cannot be read as a manifest: Not a directory",
        f"step_00000009 is a link to {tmp_path}/nowhere, which is not there: the checkpoint is incomplete",
        "step_00000008/manifest.json is missing: the checkpoint is incomplete",
    ]
    assert read_manifest(tmp_path / "step_00000006").serial == 2


def test_retention_deletes_nothing_through_a_link(tmp_path: Path) -> None:
    """What is linked is neither counted nor deleted, nor is what a link leads to."""
    for step in (10, 20, 30):
        checkpoint(tmp_path, f"step_{step:08d}", step)
    outside = checkpoint(tmp_path / "big", "step_00000005", 5)
    newest = checkpoint(tmp_path / "big", "step_00000099", 99)
    for directory in (outside, newest):
        (tmp_path / directory.name).symlink_to(directory)
    (tmp_path / "step_00000010.2").symlink_to("step_00000010")
    found = expired(tmp_path, keep_last=1, keep_every=None, protected=[])
    assert [path.name for path in found] == ["step_00000020"]


def test_a_name_that_is_taken_is_never_given_again(tmp_path: Path) -> None:
    assert free_name(tmp_path, 4) == "step_00000004"
    final = checkpoint(tmp_path, "step_00000004", 1)
    assert free_name(tmp_path, 4) == "step_00000004.2"
    temporary = checkpoint(tmp_path, temporary_name(final.name), 2)
    before = (final / "manifest.json").read_bytes()
    manifest = (temporary / "manifest.json").read_text()
    with pytest.raises(FileExistsError):
        LocalRun(tmp_path).publish(temporary.name, final.name, manifest)
    assert (final / "manifest.json").read_bytes() == before
    LocalRun(tmp_path).publish(temporary.name, "step_00000004.2", manifest)
    assert free_name(tmp_path, 4) == "step_00000004.3"


def test_leftovers_are_swept_away_and_nothing_else(tmp_path: Path) -> None:
    kept = [checkpoint(tmp_path, "step_00000001", 1).name, "metrics.jsonl", "my.tmp-notes", "step_00000002.tmpx"]
    for name in kept[1:]:
        (tmp_path / name).touch()
    left = ["latest.tmp-01234567", "step_00000002.2.tmp-0123abcd", "step_00000002.tmp-0123abcd", "step_00000003.tmp"]
    (tmp_path / left[0]).touch()
    for name in left[1:]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    assert sweep(tmp_path) == left
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    assert sweep(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("last", "every", "protected", "gone"),
    [
        (None, None, [], []),
        (1, None, [], [10, 20, 30, 40]),
        (2, None, [], [10, 20, 30]),
        (2, 20, [], [10, 30]),
        (1, None, [10], [20, 30, 40]),
        (9, None, [], []),
    ],
)
def test_retention(tmp_path: Path, last: int | None, every: int | None, protected: list[int], gone: list[int]) -> None:
    paths = {step: checkpoint(tmp_path, f"step_{step:08d}", step) for step in (10, 20, 30, 40, 50)}
    kept = [paths[step] for step in protected]
    found = expired(tmp_path, keep_last=last, keep_every=every, protected=kept)
    assert [step_of(path) for path in found] == gone
    for path in found:
        LocalRun(tmp_path).retire(path.name)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        {p.name for p in paths.values()} - {p.name for p in found}
    )


def test_a_pointer_names_the_last_and_is_believed_only_where_it_can_be(tmp_path: Path) -> None:
    assert pointed_to(tmp_path) is None
    LocalRun(tmp_path).point_to(checkpoint(tmp_path, "step_00000001", 1).name)
    assert pointed_to(tmp_path) == tmp_path / "step_00000001"
    for text in ("../elsewhere", "step_00000002", "/etc", ""):
        (tmp_path / "latest").write_text(text)
        assert pointed_to(tmp_path) is None


HOLD = "import sys, time; from pathlib import Path; from megacore.checkpoint.lock import WriterLock; "
HOLD += "lock = WriterLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"


def test_one_writer_and_no_lock_outlives_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "PATIENCE_SECONDS", 0.2)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"written by another run \(pid {holder.pid} on .*\): use another"):
            WriterLock(tmp_path / "run")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    monkeypatch.setattr(lock_module, "PATIENCE_SECONDS", 5.0)
    lock = WriterLock(tmp_path / "run")
    assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    lock.release()
    WriterLock(tmp_path / "run").release()
