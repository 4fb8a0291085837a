"""Cluster files of tools/plan.py: they are read back as written, and what is wrong with one is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megacore.errors import ConfigError
from megacore.plan.cluster import CLUSTERS, cluster_named, fields_of, load_cluster, to_toml
from tools.plan import main


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_is_read_back_as_it_is_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(to_toml(CLUSTERS[name]), encoding="utf-8")
    read, expected = load_cluster(path), CLUSTERS[name]
    assert fields_of(read) == pytest.approx(fields_of(expected))
    assert read.peaks == pytest.approx(expected.peaks)
    assert read.device.network_efficiency == expected.device.network_efficiency
    assert read.device.node_mesh == expected.device.node_mesh
    assert read.notes == ()
    assert all(expected.peak(precision) for precision in ("fp32", "bf16", "fp16"))


IN_BITS = (
    "nic_bandwidth_gb_s = 400 is more than a network card carries; the fastest have 100 GB/s. If it is in Gb/s, write "
    "nic_bandwidth_gb_s = 50"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nic_bandwidth_gb_s = 400", IN_BITS),
        ("nic_bandwidth_gb_s = 12.5", None),
        ("nic_bandwidth_gb_s = 400\nmemory_bandwidth_gb_s = 8\non_cpu = true", None),
        ('nic_bandwidth_gb_s = 400\nsource = "fitted to output/run"', None),
    ],
)
def test_a_unit_that_is_probably_mistaken_is_noted(
    text: str, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f'based_on = "h100"\n{text}\n', encoding="utf-8")
    flags = ["pretrain_gpt.py", "--preset", "gpt2-small", "--global-batch-size", "8", "--precision", "fp32"]
    assert main([*flags, "--cluster", str(path)]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if str(path) in line]
    assert notes == ([] if said is None else [f"megacore: note: {path}: {said}"])


def holds(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "directory": (Path.mkdir, "cannot be read: Is a directory"),
    "pipe": (os.mkfifo, "cannot be read: is not a regular file"),
    "empty": (holds(b""), "is empty: give its fields"),
    "binary": (holds(b"\xff\x00"), "is not valid TOML: it is not text in UTF-8"),
    "nested": (holds(b"a = " + b"[" * 100_000), "is not valid TOML: its values are nested too deeply"),
    "huge": (holds(b"#" * (1 << 21)), "cannot be read: has 2,097,152 bytes, more than the 1,048,576 that are read"),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_cluster_file_is_refused_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    path, (make, said) = tmp_path / "own.toml", ODD[kind]
    make(path)
    with pytest.raises(ConfigError) as refused:
        cluster_named(str(path))
    (problem,) = refused.value.problems
    assert problem.startswith(f"--cluster {path} {said}")


MIXED = "[[kinds]]\nbased_on = 'a100-80g'\nnodes = 2\n[[kinds]]\nbased_on = '{}'\nnodes = 1\n"


@pytest.mark.parametrize(
    ("ranks", "other", "slowest", "least"),
    [
        (16, "a100-40g", "a100-80g", "a100-80g"),  # which the first two nodes hold
        (17, "a100-40g", "a100-40g", "a100-40g"),
        (24, "h100", "a100-80g", "h100"),
    ],
)
def test_the_slowest_and_the_smallest_of_two_kinds(
    ranks: int, other: str, slowest: str, least: str, tmp_path: Path
) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(MIXED.format(other), encoding="utf-8")
    used, slow = load_cluster(path).used_by(ranks), CLUSTERS[slowest]
    assert used.device.memory_bytes == pytest.approx(CLUSTERS[least].device.memory_bytes)
    assert used.device.memory_bandwidth == pytest.approx(slow.device.memory_bandwidth)
    assert used.peaks["bf16"] == slow.peaks["bf16"]
    assert used.device.product_efficiency == slow.device.product_efficiency
    price = 1.8 if ranks == 16 else (2 * 1.8 + CLUSTERS[other].price_per_hour) / 3
    assert used.price_per_hour == pytest.approx(price)
    assert used.chip == ("" if other == "h100" and ranks > 16 else "a100")
