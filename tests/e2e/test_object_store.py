"""Runs whose checkpoints and data are on a real S3 server (moto's, in another process), spoken to over HTTP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs

from tests.e2e.launching import (
    PROGRAM,
    ROOT,
    alone,
    free_port,
    losses,
    losses_of_one_process,
    needs_proc,
    patched_program,
    small_run,
    under_torchrun,
)
from tests.patience import until
from tests.unit import data_bytes

pytestmark = needs_proc
SECONDS = 120.0
SAME = {"reproducible": True, "micro_batch_size": 1, "global_batch_size": 4, "lr_decay_iters": 20}
URL = "s3://bucket/runs/one"


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server, which the environment leads to."""
    port = free_port()
    keys = {"ACCESS_KEY_ID": "someone", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with (tmp_path / "server.log").open("w") as log:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: listens(port), SECONDS, "the server does not listen")
        yield server
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def store(server: subprocess.Popen[bytes]) -> s3fs.S3FileSystem:
    """The server with one bucket."""
    files = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    files.mkdir("bucket")
    return files


def test_a_run_goes_on_from_s3(store: s3fs.S3FileSystem, tmp_path: Path) -> None:
    for steps in (2, 4):
        flags = small_run(tmp_path / "out", **{**SAME, "save": URL, "load": "auto", "train_iters": steps})
        done = alone(*flags, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
    assert f"continues {URL}/step_00000002" in " ".join(done.stdout.split())
    assert losses(tmp_path / "out") == losses_of_one_process(tmp_path / "alone", **SAME, train_iters=4)
    assert store.exists("bucket/runs/one/step_00000004")


# The first rank dies in the middle of the first of three shards of the second save.
DYING = """
from itertools import count
from pathlib import Path
from megacore.checkpoint import storage

seen = count(1)
def passing(point):
    if point == "shard half written" and os.environ["RANK"] == "0" and next(seen) == 4:
        Path(os.environ["DIED"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
storage.passing = passing
"""


@pytest.mark.slow
def test_a_run_that_dies_in_a_save_goes_on_from_s3_on_another_layout(
    store: s3fs.S3FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of step 4 is cut off. What was published before is there, and nothing else is ever loaded."""
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    given = {**SAME, "save": URL, "save_interval": 2, "keep_last": 1, "load": "auto"}
    first = small_run(tmp_path / "out", **{**given, "train_iters": 20, "tp": 2})
    with under_torchrun(tmp_path / "logs", 2, patched_program(tmp_path, DYING), *first) as job:
        status, said = job.ends(SECONDS)
        assert status == 1, said
    assert (tmp_path / "died").exists(), job.said()
    second = small_run(tmp_path / "out", **{**given, "train_iters": 8, "pp": 2})
    with under_torchrun(tmp_path / "again", 2, PROGRAM, *second) as job:
        assert job.ends(SECONDS)[0] == 0, job.said()
    assert f"continues {URL}/step_00000002" in " ".join(job.said("stdout").split())
    assert "removed what an interrupted save had left" in job.said()
    assert "passed over" not in job.said()
    assert losses(tmp_path / "out") == losses_of_one_process(tmp_path / "alone", **SAME, train_iters=8)
    names = [name.removeprefix("bucket/runs/one/") for name in store.find("bucket/runs/one")]
    assert not [name for name in names if ".tmp-" in name]
    # --keep-last 1: what the second start loaded is kept too.
    assert {name.partition("/")[0] for name in names} == {"latest", "step_00000002", "step_00000008"}
    inspect = ROOT / "tools" / "inspect_checkpoint.py"
    done = alone(URL, "--verify", program=inspect, timeout=SECONDS)
    assert done.returncode == 0 and "step_00000008" in done.stdout, done.stdout + done.stderr
    local, remote = tmp_path / "alone" / "step_00000008", f"{URL}/step_00000008"
    done = alone("--diff", local, remote, program=inspect, timeout=SECONDS)
    assert done.returncode == 0, done.stdout  # bit for bit, weights and optimizer


@pytest.mark.slow
def test_data_come_from_s3(store: s3fs.S3FileSystem, tmp_path: Path) -> None:
    documents = [[[(7 * document + token * token) % 64 for token in range(64)]] for document in range(40)]
    data_bytes.write(tmp_path / "corpus", documents)
    for ending in (".bin", ".idx"):
        store.put(f"{tmp_path / 'corpus'}{ending}", f"bucket/data/corpus{ending}")
    data = {"mock_data": None, "data_path": "s3://bucket/data/corpus", "data_cache_path": tmp_path / "cache"}
    flags = small_run(tmp_path / "out", **{**SAME, **data, "tp": 2})
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *flags) as job:
        assert job.ends(SECONDS)[0] == 0, job.said()
    here = {"mock_data": None, "data_path": tmp_path / "corpus"}
    assert losses(tmp_path / "out") == losses_of_one_process(tmp_path / "alone", **SAME, **here)
    assert len(list((tmp_path / "cache").rglob("corpus.bin"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["bucket", "credentials", "server"])
def test_what_cannot_work_is_refused_before_training(
    store: s3fs.S3FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    url = "s3://another/run" if problem == "bucket" else URL
    if problem == "credentials":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    if problem == "server":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    flags = small_run(tmp_path / "out", save=url, load=url, dp=2)
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *flags) as job:
        assert job.ends(SECONDS)[0] == 1  # torchrun's own
        said = job.said()
    expected = {"bucket": "bucket does not exist", "credentials": "credentials", "server": "Could not connect"}
    assert said.count("megacore: refused: ") == 1, said
    assert f"--save {url} cannot be written: " in " ".join(said.split()), said
    assert expected[problem] in said, said
    assert "Traceback" not in said
    assert os.listdir(tmp_path / "logs")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_connection_that_is_lost_midway_ends_the_run_with_one_message(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    flags = small_run(tmp_path / "out", save=URL, save_interval=2, dp=2, train_iters=1_000_000)
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *flags) as job:
        until(lambda: "saved" in job.said("stdout"), SECONDS, "no checkpoint")
        server.kill()
        assert job.ends(SECONDS)[0] == 1
        said = " ".join(job.said().split())
    assert said.count("failed: the checkpoint cannot be written: s3://bucket/runs/one") == 1, said
    assert "Could not connect" in said, said
    assert "Traceback" not in said
