"""The quick start's parts that need no training: layouts, batch sizes, commands, corpus, and the stop at a failure."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

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


@pytest.mark.parametrize(("dp", "expected"), [(1, 16), (2, 16), (3, 12), (5, 20), (7, 28), (40, 160)])
def test_the_global_batch_is_a_multiple_near_the_wanted_one(dp: int, expected: int) -> None:
    assert quickstart.global_batch_for(dp, TRAINING) == expected


def test_what_is_printed_is_what_runs() -> None:
    for step in quickstart.steps(0, TRAINING):
        words = shlex.split(step.line)
        assert [word for word in words if word not in {f"{k}={v}" for k, v in step.environment}] == list(step.words)
    line = quickstart.steps(0, TRAINING)[4].line
    assert "--nproc-per-node 8 pretrain_gpt.py --tp 2 --pp 2 --dp 2 --config examples/quickstart.toml" in line
    assert "--global-batch-size" not in line
    assert "--global-batch-size 12" in quickstart.steps(3, TRAINING)[4].line
    assert any("--temperature 0.8 --top-k 40" in step.line for step in quickstart.steps(0, TRAINING))


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


SOURCE = '''"""Tools for the text of a page.

They need no other package, and they
are the same on every machine.
"""
class Page:
    """A page of a book (see :class:`Book`) with the text that is on it.

    Parameters
    ----------
    width : int
        The number of letters that fit into a line.
    height : int, optional (default: 5)

    >>> Page("This is the text of a page in a book.")
    Page(1)

    - The first of its two rules.
    - The second one goes over
      two lines of the text.
    """
    def words(self):
        """words() -> list of str"""
    if True:
        def copy(self):
            """They need no other package, and they are the same on every machine."""
'''
PROSE = [
    "Tools for the text of a page.",
    "They need no other package, and they are the same on every machine.",
    "A page of a book (see Book) with the text that is on it.",
    "The number of letters that fit into a line.",
    "The first of its two rules.",
    "The second one goes over two lines of the text.",
]
TOPIC = """The "with" statement
********************

The "with" statement is used to wrap a block.

   with_stmt ::= "with" expression ["as" target]

They need no other package, and they are the same on every machine.
"""


def test_the_corpus_is_english_without_code_and_repetition(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "page.py").write_text(SOURCE, encoding="utf-8")
    (library / "copy.py").write_text(SOURCE, encoding="utf-8")
    (library / "_private").mkdir()
    (library / "_private" / "no.py").write_text('"""This is not a part of the corpus."""', encoding="utf-8")
    (library / "broken.py").write_text("not Python", encoding="utf-8")
    target = tmp_path / "out" / "corpus.jsonl"
    documents, size = quickstart.write_corpus([library], {"with": TOPIC}, target)
    texts = [json.loads(line)["text"] for line in target.read_text(encoding="utf-8").splitlines()]
    assert (documents, size) == (len(texts), sum(len(text.encode()) for text in texts))
    lines = [line for text in texts for line in text.splitlines()]
    assert sorted(lines) == sorted([*PROSE, 'The "with" statement is used to wrap a block.'])


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


def test_the_summary_is_of_the_metrics(tmp_path: Path) -> None:
    records = [{"step": 10, "train/loss": 8.0}, {"step": 100, "train/loss": 3.25}, {"step": 100, "eval/loss": 3.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = quickstart.summary(tmp_path)
    assert "8.000 at step 10 -> 3.250 at step 100" in text
    assert "3.500" in text


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_configuration_is_accepted(path: Path) -> None:
    with path.open("rb") as file:
        given = tomllib.load(file)
    argv = ["--config", str(path), "--mock-data", "--vocab-size", "4096"]
    kind = BertConfig if "bert" in given else Config
    of_name = re.search(r"-(\d+)gpu", path.name)
    world_size = None if of_name is None else int(of_name[1])
    config = parse_config(
        argv, prog="x", description="x", kind=kind, planned=world_size is not None, world_size=world_size
    )
    for table, values in given.items():
        for key, value in values.items():
            assert getattr(getattr(config, table), key) == value, f"{table}.{key}"
