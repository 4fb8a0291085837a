"""The README and the documents tell the truth: what they name exists, and their runnable commands run as written.

In every document, each ```bash block after a `<!-- runnable -->` line runs in a folder like a fresh checkout. Only the
sizes are smaller (see SMALLER): flags, paths and their order are exactly those that a reader copies. By default the
blocks run that need at most two processes, started warm (tests/warm.py). In `make test-slow` bash starts all
of them.

The blocks after `<!-- runnable: page -->` lines continue each other: in `make test-slow` bash runs all of a page.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launching import ROOT, TORCHRUN, records_of, run_cold, run_warm
from tests.test_argv import answer

README = ROOT / "README.md"
GETTING_STARTED = ROOT / "docs" / "start" / "getting-started.md"
DOCUMENTS = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
BLOCK = re.compile(r"^(<!-- runnable -->\n|<!-- runnable: page -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Numbers that decide only how long a command takes; a test's corpus is small, too.
SIZES = """
--vocab-size 400 --train-iters 4 --lr-warmup-iters 1 --eval-interval 2 --eval-iters 1 --hidden-size 48 --num-layers 2
--seq-length 32
"""
SMALLER = dict(re.findall(r"(--\S+) (\S+)", SIZES))
# What the commands make, rather than find.
MADE = ("quickstart/", "output/", "models/", "OUTPUT_DIR/", "data/", ".venv/", "dist/")


def blocks(document: Path, language: str, *, mark: str = "") -> list[str]:
    """The fenced blocks of a document in a language, after a line with this mark."""
    fenced = BLOCK.findall(document.read_text(encoding="utf-8"))
    return [text for found, kind, text in fenced if kind == language and found == (mark and f"<!-- {mark} -->\n")]


RUNNABLE = [
    pytest.param(text, id=f"{document.name}-{number}")
    for document in DOCUMENTS
    for number, text in enumerate(blocks(document, "bash", mark="runnable"))
]
WHOLE_PAGES = [
    pytest.param("\n".join(texts), id=document.name)
    for document in DOCUMENTS
    if (texts := blocks(document, "bash", mark="runnable: page"))
]


def smaller(text: str) -> str:
    """The commands with the sizes of SMALLER; a run that continues a finished one takes two steps more."""
    for flag, value in SMALLER.items():
        text = re.sub(rf"(?<={flag} )\S+", value, text)
    return re.sub(r"(?<=--load )(output/\S+ --train-iters )4", r"\g<1>6", text)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the repository's files, this environment as its .venv, and a small corpus."""
    for name in ("pretrain_gpt.py", "pretrain_bert.py", "megacore", "kernels", "tools", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "data").mkdir()
    draw = random.Random(0)
    words = ["once", "upon", "a", "time", "there", "was", "model", "that", "learned", "to", "read", "and", "write"]
    sentences = [" ".join(draw.choices(words, k=12)).capitalize() + "." for _ in range(2000)]
    lines = [json.dumps({"text": " ".join(sentences[start : start + 5])}) for start in range(0, 2000, 5)]
    (tmp_path / "data" / "text.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def through_bash(script: str, checkout: Path) -> None:
    """Run a block as a reader does."""
    done = run_cold("bash", "-euo", "pipefail", "-c", script, directory=checkout, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def warm(script: str, checkout: Path) -> None:
    """Run the commands of a block one after the other."""
    first, *lines = [shlex.split(line) for line in script.replace("\\\n", " ").splitlines() if line.strip()]
    assert first == ["source", ".venv/bin/activate"]
    for program, *arguments in lines:
        command = {"python": arguments, "torchrun": [str(TORCHRUN), *arguments]}[program]
        done = run_warm(Path(command[0]), *command[1:], timeout=120, directory=checkout)
        assert done.returncode == 0, f"{program} {arguments}\n{done.stdout}\n{done.stderr}"


def trained(checkout: Path) -> None:
    """Every run of a block has made all its steps."""
    steps = [records_of(run)[-1]["step"] for run in (checkout / "output").iterdir()]
    assert set(steps) == {4}


@pytest.mark.parametrize("text", [block for block in RUNNABLE if "--nproc-per-node 4" not in str(block.values[0])])
def test_the_runnable_commands_run(text: str, checkout: Path) -> None:
    warm(smaller(text), checkout)
    trained(checkout)


@pytest.mark.slow
@pytest.mark.parametrize("text", WHOLE_PAGES)
def test_the_commands_of_a_page_run_one_after_the_other(text: str, checkout: Path) -> None:
    through_bash(smaller(text), checkout)


@pytest.mark.slow  # an interpreter takes 3 s of CPU time, and the blocks start twenty-odd
@pytest.mark.parametrize("text", RUNNABLE)
def test_the_runnable_commands_run_in_bash(text: str, checkout: Path) -> None:
    through_bash(smaller(text), checkout)
    trained(checkout)


def test_what_getting_started_says_of_a_laptop_is_accepted() -> None:
    block = blocks(GETTING_STARTED, "bash", mark="runnable")[0].replace("\\\n", " ")
    command = block.partition("pretrain_gpt.py")[2].partition("\n")[0]
    words = re.sub(r"--data-path \S+ +--tokenizer \S+", "--mock-data --vocab-size 64", command)
    for flag, value in re.findall(r"(--\S+) (\d+)", re.findall(r"begin with `(.*)`", GETTING_STARTED.read_text())[0]):
        words = re.sub(rf"(?<={flag} )\S+", value, words)
    assert answer({"plain": "", "ranks": 4, "program": "pretrain_gpt.py"}, words).sentences == []


def test_there_are_runnable_commands() -> None:
    assert len(blocks(GETTING_STARTED, "bash", mark="runnable")) == 4


@PAGES
def test_every_command_parses(document: Path) -> None:
    for text in [text for mark in ("", "runnable", "runnable: page") for text in blocks(document, "bash", mark=mark)]:
        assert subprocess.run(["bash", "-n", "-c", text], check=False).returncode == 0, text


def test_the_first_two_commands_are_quickstart_and_test() -> None:
    lines = [line.split("#")[0].strip() for line in blocks(README, "bash")[0].splitlines()]
    assert lines == ["make quickstart", "make test"]


@PAGES
def test_every_make_target_exists(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text(encoding="utf-8"), re.MULTILINE))
    assert {name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)} == set()


def test_make_leaves_an_environment_alone_that_is_of_another_directory(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".installed").write_text("/theirs")
    (tmp_path / ".venv").symlink_to("theirs")
    for name in ("Makefile", "setup.cfg", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    done = {
        words: subprocess.run(["make", *words.split()], cwd=tmp_path, capture_output=True, text=True, check=False)
        for words in ("-n quickstart", "no-target", "help", "setup")
    }
    assert [one.returncode for one in done.values()] == [0, 2, 0, 2]
    assert ".venv is a link to theirs, which is not of this directory: remove the link" in done["setup"].stderr
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == [".installed"]
    assert done["help"].stdout.startswith("make setup ")


@PAGES
def test_every_row_of_a_table_has_as_many_cells_as_its_first(document: Path) -> None:
    """A `|` in a cell ends it on GitHub, in code as well, unless it is written `\\|`."""
    for table in re.findall(r"(?:^ *\|.*\n)+", document.read_text(encoding="utf-8"), re.MULTILINE):
        first, *rows = [re.split(r"(?<!\\)\|", row) for row in table.splitlines()]
        assert [row for row in rows if len(row) != len(first)] == []


@PAGES
def test_every_link_leads_somewhere(document: Path) -> None:
    text = BLOCK.sub("", document.read_text(encoding="utf-8"))  # code has brackets of its own
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (document.parent / link).exists()] == []


def anchors(document: Path) -> set[str]:
    """What GitHub makes of a document's headings: lower case, without punctuation, spaces as dashes."""
    text = BLOCK.sub("", document.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@PAGES
def test_every_link_to_a_section_leads_to_one(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*(?<!\.py))#([^)]+)\)", document.read_text(encoding="utf-8"))
    pages = {name: document.parent / name if name else document for name, _ in links}
    assert [f"{name}#{anchor}" for name, anchor in links if anchor not in anchors(pages[name])] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").split()) < 750


def named_file_exists(name: str) -> bool:
    """Whether the repository has it; the documents name a module by its package, with or without .py."""
    spellings = (name, f"megacore/{name}", f"megacore/{name}.py")
    return any((ROOT / spelling).exists() for spelling in spellings)


@PAGES
def test_every_file_named_exists(document: Path) -> None:
    quoted = re.findall(r"`([\w./-]+)`", document.read_text(encoding="utf-8"))
    known = [name for name in quoted if named_file_exists(name.split("/")[0])]
    paths = [name for name in known if ("/" in name or name.endswith(".py")) and not name.startswith(MADE)]
    assert [name for name in paths if not named_file_exists(name)] == []


def test_every_name_in_the_tree_exists() -> None:
    (tree,) = blocks(ROOT / "docs" / "explain" / "design.md", "text")
    folder = ""
    for line in tree.splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else name if name == "megacore/" else ""
        assert (ROOT / (folder if line.startswith(" ") else "") / name).exists(), line
    # The other way round: a file or a folder of the top level that the tree does not show.
    shown = {line.split()[0].rstrip("/") for line in tree.splitlines() if not line.startswith(" ")}
    found = {path.name for path in ROOT.iterdir() if path.is_dir() or path.name.startswith("pretrain_")}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    top = {line.split("/")[0] for line in tracked.splitlines()}
    assert {name for name in found & top if not name.startswith(".")} <= shown
