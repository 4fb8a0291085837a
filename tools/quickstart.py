"""From nothing to generated text: corpus, tokenizer, dataset, training on every device there is, a sample, a report.

    make quickstart                           # or, in the environment that `make setup` made:
    .venv/bin/python tools/quickstart.py      # the whole of it
    .venv/bin/python tools/quickstart.py corpus     # only its corpus: English prose
    .venv/bin/python tools/quickstart.py sources    # the code of the standard library, for docs/guides/bert.md

Every step is a command that is printed before it runs, and that works when repeated by hand from the repository's root.
Everything is written under quickstart/. Without a GPU the first steps run on 8 CPU processes that talk through gloo.
The rest of the run takes 2, which is faster on few cores: a checkpoint of one layout continues on another.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = Path("quickstart")
CORPUS = DIRECTORY / "corpus.jsonl"
SOURCES = DIRECTORY / "sources.jsonl"
TOKENIZER = DIRECTORY / "tokenizer"
DATASET = DIRECTORY / "english"
RUN = DIRECTORY / "run"
ALONE = DIRECTORY / "alone"
CONFIG = Path("examples/quickstart.toml")
VOCAB_SIZE = 4096
PROMPT = "If the file"
# Left out: what is not part of the library, its tests (odd cases in long rows), and its tables of character codes.
NOT_CORPUS = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "testing", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip
# What an installation has, with much English in its docstrings.
PACKAGES = (
    "numpy", "torch", "networkx", "sympy", "mpmath", "huggingface_hub", "fsspec", "filelock", "jinja2", "rich",
    "pygments", "markdown_it", "click", "anyio", "httpx", "pip", "setuptools",
)  # fmt: skip
FIRST_STEPS = 20  # those that 8 processes take, where there is no GPU


class Layout(NamedTuple):
    """How the quick start spreads over the processes of one machine."""

    tp: int
    pp: int
    dp: int


def layout_for(gpus: int) -> Layout:
    """The layout for this many GPUs of one machine; for none, 2 x 2 x 2 processes on the CPU.

    All GPUs are used: a factor of two goes to tensor parallelism, a second one to the pipeline, the rest to data.
    """
    if gpus == 0:
        return Layout(tp=2, pp=2, dp=2)
    tp = 2 if gpus % 2 == 0 else 1
    pp = 2 if gpus // tp % 2 == 0 else 1
    return Layout(tp=tp, pp=pp, dp=gpus // (tp * pp))


def train(layout: Layout, flags: str, training: dict[str, int]) -> str:
    """The command that trains on a layout, with the batch nearest to the configured one that its replicas can share.

    Args:
        layout: the degrees of parallelism.
        flags: more of the command's words.
        training: the [training] table of the configuration file.
    """
    processes, share = math.prod(layout), layout.dp * training["micro_batch_size"]
    batch = share * max(1, round(training["global_batch_size"] / share))
    torchrun = Path(sys.executable).with_name("torchrun")
    launcher = _shown(torchrun) if torchrun.exists() else f"{_shown(Path(sys.executable))} -m torch.distributed.run"
    return (
        f"OMP_NUM_THREADS={max(1, (os.cpu_count() or 1) // processes)} {launcher} --nproc-per-node {processes} "
        f"pretrain_gpt.py --tp {layout.tp} --pp {layout.pp} --dp {layout.dp} --config {CONFIG} "
        f"--data-path {DATASET}_text_document --tokenizer {TOKENIZER} --global-batch-size {batch} {flags}"
    )


def steps(gpus: int, training: dict[str, int]) -> dict[str, str]:
    """The commands in order, by what they are for.

    Args:
        gpus: number of GPUs here.
        training: as for `train`.
    """
    python = _shown(Path(sys.executable))
    if gpus:
        runs = {f"train on {gpus} GPU{'s' * (gpus > 1)}": train(layout_for(gpus), f"--output-dir {RUN}", training)}
    else:
        first = f"--micro-batch-size 2 --log-interval 5 --trace --exit-interval {FIRST_STEPS}"
        alone = "another run: the same steps on one process, to compare losses (about 15 s)"
        parts = {
            f"train: the first {FIRST_STEPS} steps on 8 processes (about 30 s)": (layout_for(0), f"{RUN} {first}"),
            alone: (Layout(tp=1, pp=1, dp=1), f"{ALONE} {first}"),
            "train: the other steps on 2 processes (about 4 minutes)": (Layout(tp=1, pp=1, dp=2), f"{RUN} --load auto"),
        }
        runs = {title: train(layout, f"--output-dir {flags}", training) for title, (layout, flags) in parts.items()}
    return {
        "clear the runs of an earlier quick start": f"rm -rf {RUN} {ALONE}",
        "collect a corpus: English from docstrings (about 20 s)": f"{python} tools/quickstart.py corpus",
        "train a tokenizer (about 5 s)": f"{python} tools/train_tokenizer.py --input {CORPUS} --model bpe "
        f"--vocab-size {VOCAB_SIZE} --output {TOKENIZER} --overwrite",
        "tokenize (about 5 s)": f"{python} tools/preprocess_data.py --input {CORPUS} --tokenizer {TOKENIZER} "
        f"--output-prefix {DATASET} --append-eod --workers 2",
        **runs,
        "write a page about the run (about 3 s)": f"{python} tools/report.py {RUN}",
        "generate (about 5 s)": f"{python} tools/generate.py {RUN} --prompt '{PROMPT}' --max-new-tokens 80 "
        "--temperature 0.9 --top-p 0.9 --seed 3",
    }


def _shown(path: Path) -> str:
    """A path as one types it in the repository's root; links stay links (a venv's python is one)."""
    return shlex.quote(str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path))


def source_files(root: Path) -> list[Path]:
    """The .py files of a library or a package, shuffled by the hash of their names.

    The split into training and validation is by position: in alphabetical order it would separate packages.
    """
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - NOT_CORPUS
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: _digest(path.relative_to(root).as_posix()))


def write_corpus(roots: Sequence[Path], topics: Mapping[str, str], target: Path) -> tuple[int, int]:
    """Write the English of source files and of reference topics; return the number of documents and of their bytes.

    A document is all docstrings of one file, or one topic: its paragraphs, a line each. A paragraph that several
    documents have is kept once.

    Args:
        roots: folders with .py files, which are read except in folders of tests.
        topics: texts by their names.
        target: the file to write, one JSON object per document.
    """
    texts: dict[str, Iterable[str]] = {f"topics/{name}": [text] for name, text in topics.items()}
    for root in roots:
        for path in source_files(root):
            texts[f"{root.name}/{path.relative_to(root).as_posix()}"] = docstrings(path)
    seen: set[str] = set()
    documents: dict[str, str] = {}
    for name in sorted(texts, key=_digest):
        fresh = dict.fromkeys(line for text in texts[name] for line in paragraphs(text) if line not in seen)
        seen.update(fresh)
        if fresh:
            documents[name] = "\n".join(fresh)
    return _write_documents(documents, target)


def write_sources(library: Path, target: Path) -> tuple[int, int]:
    """Write one JSON object per readable source file; return the number of documents and of their bytes."""
    documents: dict[str, str] = {}
    for path in source_files(library):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # some of the library's files are in another encoding on purpose
        if text.strip():
            documents[path.relative_to(library).as_posix()] = text
    return _write_documents(documents, target)


def _write_documents(documents: Mapping[str, str], target: Path) -> tuple[int, int]:
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text, "path": name}) + "\n" for name, text in documents.items()]
    target.write_text("".join(lines), encoding="utf-8")
    return len(documents), sum(len(text.encode()) for text in documents.values())


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def summary(run: Path, alone: Path) -> str:
    """How the loss fell, from the metrics that training wrote.

    Args:
        run: the run's output directory.
        alone: that of the first steps on one process, if there was such a run.
    """
    losses, held_out = _series(run, "train/loss"), _series(run, "eval/loss")
    last, curve = max(losses), list(losses.values())
    lines = [
        f"  loss           {curve[0]:.2f} {bars(curve)} {curve[-1]:.2f} over {last:,} steps",
        f"  learning rate       {bars(list(_series(run, 'train/lr').values()))}",
    ]
    if alone.exists():
        here, there = (f"{_series(path, 'train/loss')[FIRST_STEPS]:.4f}" for path in (run, alone))
        lines.append(f"  same loss at step {FIRST_STEPS}: {here} on 8 processes, {there} on one")
    if held_out:
        guess = f"guessing gives {math.log(VOCAB_SIZE):.3f}"
        lines.append(f"  held-out loss  {held_out[max(held_out)]:.3f} nats per token ({guess})")
    return "\n".join(lines)


def _series(run: Path, name: str) -> dict[int, float]:
    """The values of a metric by step."""
    records = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {record["step"]: record[name] for record in records if name in record}


def bars(values: Sequence[float]) -> str:
    """A picture of numbers in one line: a block for each, higher where it is larger."""
    low, high = min(values), max(values)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / (high - low or 1))] for value in values)


def run_all(gpus: int) -> int:
    """Print and run every command; stop at the first that fails, with its status."""
    started = time.monotonic()
    if not gpus:
        cores, load = os.cpu_count() or 1, os.getloadavg()[0]
        slow = ": it will take longer" if cores - load < 1.5 else ""
        print(f"quick start: about 7 minutes on 2 free cores; {cores} cores here, load {load:.1f}{slow}", flush=True)
    with (ROOT / CONFIG).open("rb") as file:
        commands = steps(gpus, tomllib.load(file)["training"])
    for number, (title, line) in enumerate(commands.items(), start=1):
        print(f"\n[{number}/{len(commands)}] {title}\n$ {line}", flush=True)
        if status := subprocess.run(line, shell=True, cwd=ROOT, check=False).returncode:
            way = "\nThe same command continues from the newest checkpoint." if "--load auto" in line else ""
            print(f"\nquickstart: step {number} ({title}) ended with status {status}:\n  {line}{way}", file=sys.stderr)
            return status
    print(f"\ndone in {(time.monotonic() - started) / 60:.1f} minutes\n{summary(ROOT / RUN, ROOT / ALONE)}")
    print(f"{RUN}/report.html shows the curves and the pipeline; {RUN}/step_*/ has the weights.")
    print(f"Next, train on your own text instead of {CORPUS}: docs/start/getting-started.md")
    return 0


def main(argv: Sequence[str]) -> int:
    """The whole quick start, or with `corpus` or `sources` a corpus alone; returns the exit status."""
    library = Path(sysconfig.get_paths()["stdlib"])
    if argv in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if argv not in ([], ["corpus"], ["sources"]):
        print(f"quickstart.py takes no arguments, `corpus` or `sources`; not {' '.join(argv)}", file=sys.stderr)
        return 2
    if argv:
        path = CORPUS if argv == ["corpus"] else SOURCES
        specs = [importlib.util.find_spec(name) for name in PACKAGES]
        roots = [library, *(Path(str(spec.origin)).parent for spec in specs if spec is not None)]
        texts = write_corpus(roots, topics, ROOT / path) if path == CORPUS else write_sources(library, ROOT / path)
        print(f"{texts[0]:,} documents, {texts[1] / 1e6:.1f} MB -> {path}")
        return 0 if texts[0] else 1
    print("quick start: looking for GPUs", flush=True)
    import torch  # takes seconds

    return run_all(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


# ---- English from Python's own files: docstrings and reference topics without code, tables and signatures

_MARKUP = re.compile(r":[a-z:]+:(?=`)|`+|\*\*|(?<=\w)_(?=\s|$)")
_BULLET = re.compile(r"^(?:[-*+o]|\(?\d+[.)]|@\w+:?|:\w+[^:]*:)\s+")
_WORD = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*")
_SENTENCE_END = re.compile(r"[a-z)\"'][.!?][\"')]?$")
_CODE = re.compile(r"[][_=<>{}|*\\#@^~+$%&/]|\w\.\w|\(\)")
# Code has few of these words; about every third word of English is one of them.
_FREQUENT = frozenset(
    re.findall(
        "[a-z]+",
        "a all an and any are as at be been but by can do does each either for from has have if in into is it its may "
        "more must no not of on one only or other same should so such than that the their then there these they this "
        "to two use used was when where which will with without would you your",
    )
)
_FEWEST_WORDS = 5
_FEWEST_ENGLISH = 0.85  # of all words, those of letters only
_FEWEST_FREQUENT = 0.25
_PUNCTUATION = "\"'“”‘’().,:;!?"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a source file, in its order. A file that is no Python of this version has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of "\d" in a string
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text
        if isinstance(node, (*_DOCUMENTED, ast.If, ast.Try)):
            pending.extend(reversed(list(ast.iter_child_nodes(node))))


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of English in a text, each as one line.

    A paragraph is a run of lines with one indentation. It counts as English if it begins and ends as a sentence does,
    has no signs of code, nearly all of its words have letters only, and enough of them are frequent ones.
    """
    for (filled, _), lines in itertools.groupby(inspect.cleandoc(text).splitlines(), key=_kind):
        if filled:
            yield from filter(_is_english, (" ".join(_MARKUP.sub("", item).split()) for item in _items(lines)))


def _kind(line: str) -> tuple[bool, int]:
    """Whether a line has text rather than nothing or a rule, and the column where its text begins, after a bullet."""
    bare = line.lstrip()
    return any(map(str.isalnum, line)), len(line) - len(_BULLET.sub("", bare))


def _items(lines: Iterable[str]) -> Iterator[str]:
    """Lines joined, except where a bullet begins another item."""
    item: list[str] = []
    for line in lines:
        bare = _BULLET.sub("", line.strip())
        if bare != line.strip() and item:
            yield " ".join(item)
            item = []
        item.append(bare)
    yield " ".join(item)


def _is_english(text: str) -> bool:
    words = text.split()
    if len(words) < _FEWEST_WORDS or not text[0].isupper() or not _SENTENCE_END.search(text) or _CODE.search(text):
        return False
    english = [bare for word in words if _WORD.fullmatch(bare := word.strip(_PUNCTUATION))]
    frequent = sum(word.lower() in _FREQUENT for word in english)
    return len(english) >= _FEWEST_ENGLISH * len(words) and frequent >= _FEWEST_FREQUENT * len(words)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
