"""Memory of a node's host in plans: what is offloaded there, and layouts that need more than there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.planning import planned, with_flags
from tools.plan import main

LLAMA_1B = "pretrain_gpt.py --preset llama-3.2-1b --global-batch-size 8"


def cluster(directory: Path, text: str) -> str:
    path = directory / "mine.toml"
    path.write_text(f'based_on = "h100"\n{text}\n', encoding="utf-8")
    return f"--cluster {path}"


def test_a_plan_whose_host_is_too_small_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{LLAMA_1B} --dp 8 --offload-optimizer {cluster(tmp_path, 'host_memory_gb = 64')}"
    plan = planned(capsys, flags)
    assert not plan["fits"]
    assert plan["ways_out"][0].startswith("--no-offload-optimizer: ")
    for way in plan["ways_out"]:
        words = with_flags(flags.split(), way.split(":")[0].split(",")[0].split())
        assert planned(capsys, " ".join(words))["fits"], way


def test_a_search_leaves_out_what_the_host_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{LLAMA_1B} --offload-optimizer --search --world-size 8 --top 1000 --max-tp 1 --max-pp 1"
    with_all = planned(capsys, f"{flags} --cluster h100")
    small = cluster(tmp_path, "host_memory_gb = 64")
    found = planned(capsys, f"{flags} {small}")
    usable = found["host_capacity_bytes"]
    assert max(layout["node_host_bytes"] for layout in found["layouts"]) <= usable
    kept = [layout["flags"] for layout in with_all["layouts"] if layout["node_host_bytes"] <= usable]
    assert 0 < len(kept) < len(with_all["layouts"])
    assert sorted(layout["flags"] for layout in found["layouts"]) == sorted(kept)
    assert main(f"{flags} --dp 8 --zero-stage 0 {small}".split()) == 2
    refused = capsys.readouterr().err
    assert "the one that offloads least needs 159 GB of host memory per node, of 62.0 usable: use " in refused
    assert "use --no-offload-optimizer" in refused
