"""The quick start's parts that need no training: layouts, batch sizes, commands, corpus, and the stop at a failure."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from megacore.config import Config
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from tests.unit.packaging_builds import ROOT
from tools import quickstart
from tools.quickstart import Step

TRAINING = {"micro_batch_size": 4, "global_batch_size": 16}


LAYOUTS = {0: (2, 2, 2), 1: (1, 1, 1), 2: (2, 1, 1), 3: (1, 1, 3), 4: (2, 2, 1), 6: (2, 1, 3), 7: (1, 1, 7)}
LAYOUTS |= {8: (2, 2, 2), 16: (2, 2, 4)}


@pytest.mark.parametrize("gpus", [*range(17), 24])
def test_the_layout_uses_every_gpu_and_the_configuration_accepts_it(gpus: int) -> None:
    """Heads, blocks and batch of examples/quickstart.toml divide as the layout wants, by the trainer's own check."""
    layout = quickstart.layout_for(gpus)
    assert layout.processes == layout.tp * layout.pp * layout.dp == (gpus or 8)
    assert (layout.tp, layout.pp, layout.dp) == LAYOUTS.get(gpus, (layout.tp, layout.pp, layout.dp))
    words = list(quickstart.steps(gpus, TRAINING)[4].words)
    flags = words[words.index("pretrain_gpt.py") + 1 :]
    for name in ("--data-path", "--tokenizer"):  # files that are not there yet
        del flags[flags.index(name) : flags.index(name) + 2]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("WORLD_SIZE", layout.processes), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", 29500)):
            patch.setenv(name, str(value))
        patch.chdir(ROOT)
        config = parse_config([*flags, "--mock-data", "--vocab-size", "4096"], prog="x", description="x", kind=Config)
    assert (config.parallel.tp, config.parallel.pp, config.parallel.dp) == (layout.tp, layout.pp, layout.dp)


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
    failing = Step(title="break", words=(sys.executable, "-c", "import sys; sys.exit(7)"), environment=(("A", "b c"),))
    never = Step(title="never", words=("touch", "/nonexistent/never"))
    monkeypatch.setattr(quickstart, "steps", lambda gpus, training: [failing, never])
    assert quickstart.run_all(0) == 7
    printed = capfd.readouterr()
    assert "[1/2] break\n$ A='b c' " in printed.out
    assert "step 1 (break) ended with status 7" in printed.err
    assert "never" not in printed.out
    assert quickstart.run(Step(title="t", words=("sh", "-c", "kill -9 $$")), "1/1") == 137


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
