"""The quick start's parts that need no training: layouts, batch sizes, commands, corpus, and the stop at a failure."""

from __future__ import annotations

import json
import math
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from megacore.config import Config
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from tests.unit.packaging_builds import ROOT
from tools import quickstart

TRAINING = tomllib.loads((ROOT / quickstart.CONFIG).read_text())["training"]
LAYOUTS = {0: (2, 2, 2), 1: (1, 1, 1), 2: (2, 1, 1), 3: (1, 1, 3), 4: (2, 2, 1), 6: (2, 1, 3), 7: (1, 1, 7)}
LAYOUTS |= {8: (2, 2, 2), 16: (2, 2, 4)}


@pytest.mark.parametrize("gpus", [*range(17), 24])
def test_the_layout_uses_every_gpu_and_the_configuration_accepts_it(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads, blocks and batch of examples/quickstart.toml divide as the layout wants, by the trainer's own check."""
    layout = quickstart.layout_for(gpus)
    assert math.prod(layout) == (gpus or 8)
    assert layout == LAYOUTS.get(gpus, layout)
    runs = [line for line in quickstart.steps(gpus, TRAINING).values() if "pretrain_gpt.py" in line]
    degrees = [check(shlex.split(line), monkeypatch) for line in runs]
    assert degrees == ([layout] if gpus else [layout, (1, 1, 1), (1, 1, 2)])


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """The degrees of a training command that the trainer accepts."""
    flags = words[words.index("pretrain_gpt.py") + 1 :]
    for name in ("--data-path", "--tokenizer", "--load"):  # files that are not there yet
        if name in flags:
            del flags[flags.index(name) : flags.index(name) + 2]
    processes = words[words.index("--nproc-per-node") + 1]
    for name, value in (("WORLD_SIZE", processes), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    config = parse_config([*flags, "--mock-data", "--vocab-size", "4096"], prog="x", description="x", kind=Config)
    return config.parallel.tp, config.parallel.pp, config.parallel.dp


def test_the_sources_are_every_readable_file_in_an_order_of_their_own(tmp_path: Path) -> None:
    library = tmp_path / "library"
    names = ("b.py", "a.py", "c.txt", "empty.py", "pkg/z.py", "test/no.py", "site-packages/no.py", "pkg/tests/no.py")
    for name in names:
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("" if name == "empty.py" else f"# {name}: é\n", encoding="utf-8")
    (library / "latin.py").write_bytes(b"# caf\xe9\n")
    size = sum(len(f"# {name}: é\n".encode()) for name in ("a.py", "b.py", "pkg/z.py"))
    assert quickstart.write_sources(library, tmp_path / "out" / "sources.jsonl") == (3, size)
    lines = (tmp_path / "out" / "sources.jsonl").read_text(encoding="utf-8").splitlines()
    # `printf b.py | sha256sum` begins 4a5b; pkg/z.py 5380; a.py f0de.
    assert [json.loads(line)["text"] for line in lines] == ["# b.py: é\n", "# pkg/z.py: é\n", "# a.py: é\n"]


def test_a_failing_step_gives_its_status_and_its_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = {"break": "A='b c' sh -c 'exit 7'", "never": "touch /nonexistent/never"}
    monkeypatch.setattr(quickstart, "steps", lambda gpus, training: lines)
    assert quickstart.run_all(0) == 7
    printed = capfd.readouterr()
    assert "[1/2] break\n$ A='b c' " in printed.out
    assert "step 1 (break) ended with status 7" in printed.err
    assert "never" not in printed.out


def test_the_summary_draws_the_loss_and_compares_the_first_steps(tmp_path: Path) -> None:
    for name, losses in {"run": (8.0, 4.5, 4.0), "alone": (8.0,)}.items():
        lines = [{"step": 20 * n, "train/loss": loss, "train/lr": 0.4 / n} for n, loss in enumerate(losses, start=1)]
        lines.append({"step": 60, "eval/loss": 4.25})
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert quickstart.summary(tmp_path / "run", tmp_path / "alone").splitlines() == [
        "  loss           8.00 █▂▁ 4.00 over 60 steps",
        "  learning rate       █▃▁",
        "  same loss at step 20: 8.0000 on 8 processes, 8.0000 on one",
        "  held-out loss  4.250 nats per token (guessing gives 8.318)",
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_configuration_is_accepted(path: Path) -> None:
    with path.open("rb") as file:
        given = tomllib.load(file)
    argv = ["--config", str(path), "--mock-data", "--vocab-size", "4096"]
    kind = BertConfig if "bert" in given else Config
    of_name = re.search(r"-(\d+)gpu", path.name)
    world_size = None if of_name is None else int(of_name[1])
    planned: Any = {"planned": of_name is not None, "world_size": world_size}
    config = parse_config(argv, prog="x", description="x", kind=kind, **planned)
    for table, values in given.items():
        for key, value in values.items():
            assert getattr(getattr(config, table), key) == value, f"{table}.{key}"
