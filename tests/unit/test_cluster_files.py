"""Cluster files of tools/plan.py: they are read back as written, and what is wrong with one is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megacore.errors import ConfigError
from megacore.plan.cluster import CLUSTERS, cluster_named, fields_of, load_cluster, to_toml
from tools.plan import main


def test_a_cluster_file_is_read_back_and_refused_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.toml"
    path.write_text(to_toml(CLUSTERS["h100"]), encoding="utf-8")
    device, expected = load_cluster(path).device, CLUSTERS["h100"].device
    assert device.memory_bytes == pytest.approx(expected.memory_bytes)
    assert device.host_memory == pytest.approx(expected.host_memory)
    assert device.network.bandwidth == pytest.approx(expected.network.bandwidth)
    assert device.product_efficiency == expected.product_efficiency
    path.write_text("memory_gb = -3\nnic = 4\n[peak_tflops]\nbf17 = 3\n", encoding="utf-8")
    assert main(["pretrain_gpt.py", "--preset", "gpt2-small", "--cluster", str(path)]) == 2
    text = capsys.readouterr().err
    for part in ("memory_gb = -3 must be", "nics_per_node is missing", "peak_tflops.bf17", "nic is not a field"):
        assert part in text


def test_efficiencies_are_in_order(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        'based_on = "h100"\n[efficiency]\nproducts = [0.8, 0.7, 0.6]\nhost_us = [1, 2, 3]', encoding="utf-8"
    )
    with pytest.raises(ConfigError) as refusal:
        load_cluster(path)
    assert list(refusal.value.problems) == [
        f"{path}: efficiency.products = [0.8, 0.7, 0.6] must rise: [slow, expected, fast]",
        f"{path}: efficiency.host_us = [1, 2, 3] must fall: [slow, expected, fast]",
    ]


def test_the_network_has_an_efficiency_of_its_own(tmp_path: Path) -> None:
    """`links` alone is for both, as in files of before."""
    path = tmp_path / "own.toml"
    for given, links, network in (("links = 0.5", 0.5, 0.5), ("links = 0.5\nnetwork = 0.9", 0.5, 0.9)):
        path.write_text(f'based_on = "h100"\n[efficiency]\n{given}\n', encoding="utf-8")
        device = load_cluster(path).device
        assert (device.link_efficiency.expected, device.network_efficiency.expected) == (links, network)
    path.write_text('based_on = "h100"\n[efficiency]\nnetwork = 0.9\n', encoding="utf-8")
    assert load_cluster(path).device.link_efficiency == CLUSTERS["h100"].device.link_efficiency


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "nic_bandwidth_gb_s = 400",
            "nic_bandwidth_gb_s = 400 is more than a network card carries; the fastest have 100 GB/s. If it is in "
            "Gb/s, write nic_bandwidth_gb_s = 50",
        ),
        (
            "nic_bandwidth_gb_s = 100\nnics_per_node = 32",
            "nic_bandwidth_gb_s = 100 is 400 GB/s per GPU; the fastest have 100 GB/s. If it is in Gb/s, write "
            "nic_bandwidth_gb_s = 12.5",
        ),
        (
            "memory_bandwidth_gb_s = 3.35",
            "memory_bandwidth_gb_s = 3.35 is less than any GPU has. If it is in TB/s, write "
            "memory_bandwidth_gb_s = 3350",
        ),
        ("memory_bandwidth_gb_s = 50", "memory_bandwidth_gb_s = 50 is less than any GPU has. Give GB/s"),
        (
            "gpus_per_node = 2",
            "nic_bandwidth_gb_s = 50 is 200 GB/s per GPU; the fastest have 100 GB/s. Give nics_per_node, as in "
            "nics_per_node = 2",
        ),
        ("nic_bandwidth_gb_s = 100", None),
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


def test_of_an_unknown_base_nothing_else_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('based_on = "h900"\nmemory_gb = -1', encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_cluster(path)
    assert len(refused.value.problems) == 2
    assert 'based_on = "h900" is not known' in refused.value.problems[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("peak_tflops = 300", "peak_tflops = 300 must be a table, as in [peak_tflops] and bf16 = 312"),
        ("name = 3", 'name = 3 must be one line of text in quotes, as in name = "mine"'),
        ("source = 3", 'source = 3 must be one line of text in quotes, as in source = "mine"'),
        ('source = "a\\nb"', 'source = "a\\nb" must be one line of text in quotes'),
        ("gpus_per_node = true", "gpus_per_node = true must be a whole number"),
        ('memory_gb = "80"', 'memory_gb = "80" must be a number'),
        ("memory_gb = [true, 1979-05-27]", "memory_gb = [true, 1979-05-27] must be a number"),
        ("on_cpu = 'yes'", 'on_cpu = "yes" must be true or false'),
        ("[memory_gb]\nbytes = 'x'", 'memory_gb = {bytes = "x"} must be a number'),
        (
            "[peak_tflops]\nbf17 = 3",
            "peak_tflops.bf17 is not a format: use fp32, tf32, bf16, fp16 or fp8 (did you mean bf16?)",
        ),
        ("[efficiency]\nlink = 0.5", "efficiency.link is not known: use products, attention, memory, links, network"),
    ],
)
def test_a_field_of_another_type_is_not_called_missing(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f'based_on = "h100"\n{text}\n', encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_cluster(path)
    (problem,) = refused.value.problems
    assert said in problem


def test_a_misspelled_base_is_suggested(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('based_on = "h10"\n', encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_cluster(path)
    assert refused.value.problems[0].endswith("(did you mean h100?)")


def make_odd_file(path: Path, kind: str) -> None:
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        contents = {"empty": b"", "binary": b"\xff\x00", "nested": b"a = " + b"[" * 100_000, "huge": b"#" * (1 << 21)}
        path.write_bytes(contents[kind])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("directory", "cannot be read: Is a directory"),
        ("pipe", "cannot be read: is not a regular file"),
        ("empty", "is empty: give its fields"),
        ("binary", "is not valid TOML: it is not text in UTF-8"),
        ("nested", "is not valid TOML: its values are nested too deeply"),
        ("huge", "cannot be read: has 2,097,152 bytes, more than the 1,048,576 that are read"),
    ],
)
def test_an_odd_cluster_file_is_refused_and_not_waited_for(kind: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    make_odd_file(path, kind)
    with pytest.raises(ConfigError) as refused:
        cluster_named(str(path))
    (problem,) = refused.value.problems
    assert problem.startswith(f"--cluster {path} {said}")


@pytest.mark.parametrize("text", ['based_on = ["h100"]', 'based_on = "h100"\nefficiency = 3', "memory_gb = ["])
def test_a_cluster_file_of_wrong_types_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(["pretrain_gpt.py", "--preset", "gpt2-small", "--cluster", str(path)]))
    assert stop.value.code == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("memory_gb = 1e300", "memory_gb = 1e+300 must be a number from 0.001 to 1,000,000"),
        ("memory_gb = 1e-300", "memory_gb = 1e-300 must be a number from 0.001 to 1,000,000"),
        ("host_memory_gb = 0", "host_memory_gb = 0 must be a number from 0.001 to 1,000,000"),
        ("node_latency_us = -1", "node_latency_us = -1 must be a number from 0 to 10,000,000"),
        ("gpus_per_node = 0", "gpus_per_node = 0 must be a whole number from 1 to 100,000"),
        ("[peak_tflops]\nbf16 = 1e-308", "peak_tflops.bf16 = 1e-308 must be a number from 1e-06 to 1,000,000"),
        (
            "[efficiency]\nlinks = 1e-300",
            "efficiency.links = 1e-300 must be one number or [slow, expected, fast], shares from 0.001 to 1",
        ),
        (
            "[efficiency]\nlinks = 3",
            "efficiency.links = 3 must be one number or [slow, expected, fast], shares from 0.001 to 1",
        ),
        (
            "[efficiency]\nhost_us = -1",
            "efficiency.host_us = -1 must be one number or [slow, expected, fast], microseconds from 0 to 1,000,000",
        ),
    ],
)
def test_a_number_that_no_machine_has_is_refused_with_its_bounds(field: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f'based_on = "h100"\n{field}\n', encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_cluster(path)
    assert refused.value.problems == (f"{path}: {said}",)


@pytest.mark.parametrize(
    ("name", "meant"), [("nope", ""), ("a100", "(did you mean a100-80g?)"), ("h10", "(did you mean h100?)")]
)
def test_a_cluster_is_suggested_only_where_its_name_is_near(
    name: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        cluster_named(name)
    assert refused.value.problems[0].partition(" in .toml")[2].strip() == meant


def test_the_host_memory_of_a_file_that_leaves_it_out_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    text = to_toml(CLUSTERS["h100"])
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("host_memory_gb ")))
    cluster = load_cluster(path)
    assert cluster.device.host_memory is None
    assert "host_memory_gb =" not in to_toml(cluster)
    path.write_text('based_on = "h100"\n', encoding="utf-8")
    assert load_cluster(path).device.host_memory == pytest.approx(2048 * 2**30)


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


def test_each_format_has_the_slowest_products(tmp_path: Path) -> None:
    """An H100 is slower than an RTX 4090 in fp32, and faster in bf16."""
    path = tmp_path / "mixed.toml"
    path.write_text(MIXED.replace("a100-80g", "h100").format("rtx4090"), encoding="utf-8")
    used = load_cluster(path).used_by(24)
    for form, slowest in (("fp32", "h100"), ("bf16", "rtx4090")):
        mixed, alone = (
            (cluster.peak(form) or 0) * cluster.device.product_efficiency.expected
            for cluster in (used, CLUSTERS[slowest])
        )
        assert mixed == pytest.approx(alone)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            MIXED.format("h100") + "software.name = 'megatron-lm'\n",
            "own.toml, kind 2: [kinds.software] cannot differ between kinds: leave it out, and use --software",
        ),
        (
            MIXED.format("a100-40g"),
            "--cluster own has 24 devices, fewer than the 48 ranks of the run: use --world-size 24",
        ),
        (MIXED.format("gb200"), "nodes have 8, 64 devices: give all kinds one gpus_per_node, as in gpus_per_node = 8"),
        (MIXED.format("laptop"), "kinds must be of accelerators: leave those with on_cpu out"),
        (MIXED.format("h1OO"), 'own.toml, kind 2: based_on = "h1OO" is not known'),
        ("memory_gb = 3\n" + MIXED.format("h100"), "memory_gb must be in each table of [[kinds]]"),
        (MIXED.format("h100").replace("= 2", "= 0"), "own.toml, kind 1: nodes = 0 must be a whole number from 1"),
        (
            MIXED.format("h100").replace("nodes = 1", ""),
            "own.toml, kind 2: nodes is missing: it must be a whole number from 1",
        ),
        ("kinds = 3", "kinds = 3 must be tables, as in [[kinds]]"),
    ],
)
def test_two_kinds_are_refused(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text, encoding="utf-8")
    assert main(["pretrain_gpt.py", "--preset", "gpt2-small", "--dp", "48", "--cluster", str(path)]) == 2
    assert said in capsys.readouterr().err
