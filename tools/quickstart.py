"""From nothing to generated text: corpus, tokenizer, dataset, training on every device there is, a sample.

    make quickstart                           # or, in the environment that `make setup` made:
    .venv/bin/python tools/quickstart.py      # the whole of it
    .venv/bin/python tools/quickstart.py corpus     # only its corpus: English prose
    .venv/bin/python tools/quickstart.py sources    # the code of the standard library, for docs/guides/bert.md

Every step is a command that is printed before it runs, and that works when repeated by hand from the repository's root.
Everything is written under quickstart/. Without a GPU the model trains on 8 CPU processes that talk through gloo.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import shlex
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.prose import docstrings, paragraphs

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = Path("quickstart")
CORPUS = DIRECTORY / "corpus.jsonl"
SOURCES = DIRECTORY / "sources.jsonl"
TOKENIZER = DIRECTORY / "tokenizer"
DATASET = DIRECTORY / "english"
RUN = DIRECTORY / "run"
CONFIG = Path("examples/quickstart.toml")
VOCAB_SIZE = 4096
PROMPT = "This function"
# Left out: what is not part of the library, its tests (odd cases in long rows), and its tables of character codes.
NOT_CORPUS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the quick start spreads over the processes of one machine."""

    tp: int
    pp: int
    dp: int

    @property
    def processes(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command: what it is for, its words, and what it needs in the environment."""

    title: str
    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def line(self) -> str:
        """The command as one types it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment]
        return " ".join([*settings, shlex.join(self.words)])


def layout_for(gpus: int) -> Layout:
    """The layout for this many GPUs of one machine; for none, 2 x 2 x 2 processes on the CPU.

    All GPUs are used: a factor of two goes to tensor parallelism, a second one to the pipeline, the rest to data.
    """
    if gpus == 0:
        return Layout(tp=2, pp=2, dp=2)
    tp = 2 if gpus % 2 == 0 else 1
    pp = 2 if gpus // tp % 2 == 0 else 1
    return Layout(tp=tp, pp=pp, dp=gpus // (tp * pp))


def global_batch_for(dp: int, training: dict[str, int]) -> int:
    """The global batch nearest to the configured one that dp replicas can share in whole microbatches.

    Args:
        dp: number of replicas.
        training: the configuration's `global_batch_size` and `micro_batch_size`.
    """
    share = dp * training["micro_batch_size"]
    return share * max(1, round(training["global_batch_size"] / share))


def steps(gpus: int, training: dict[str, int]) -> list[Step]:
    """The commands, in order.

    Args:
        gpus: number of GPUs here.
        training: the [training] table of the configuration file.
    """
    python = _shown(Path(sys.executable))
    layout = layout_for(gpus)
    batch = global_batch_for(layout.dp, training)
    processes = "process" if layout.processes == 1 else "processes"
    train = (
        *_torchrun(python, layout.processes),
        *("pretrain_gpt.py", "--tp", str(layout.tp), "--pp", str(layout.pp), "--dp", str(layout.dp)),
        *("--config", str(CONFIG), "--data-path", f"{DATASET}_text_document", "--tokenizer", str(TOKENIZER)),
        *(() if batch == training["global_batch_size"] else ("--global-batch-size", str(batch))),
        *("--output-dir", str(RUN)),
    )
    tokenizer = ("--model", "bpe", "--vocab-size", str(VOCAB_SIZE), "--output", str(TOKENIZER), "--overwrite")
    dataset = ("--tokenizer", str(TOKENIZER), "--output-prefix", str(DATASET), "--append-eod", "--workers", "2")
    sample = (str(RUN), "--prompt", PROMPT, "--temperature", "0.8", "--top-k", "40", "--seed", "1")
    return [
        Step(title="clear the run of an earlier quick start", words=("rm", "-rf", str(RUN))),
        Step(title="collect a corpus: English from docstrings", words=(python, "tools/quickstart.py", "corpus")),
        Step(title="train a tokenizer", words=(python, "tools/train_tokenizer.py", "--input", str(CORPUS), *tokenizer)),
        Step(title="tokenize", words=(python, "tools/preprocess_data.py", "--input", str(CORPUS), *dataset)),
        Step(
            title=f"train on {layout.processes} {'GPU' if gpus else 'CPU'} {processes}",
            words=train,
            environment=(("OMP_NUM_THREADS", "1"),),
        ),
        Step(title="generate", words=(python, "tools/generate.py", *sample)),
    ]


def _shown(path: Path) -> str:
    """A path as one types it in the repository's root; links stay links (a venv's python is one)."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _torchrun(python: str, processes: int) -> tuple[str, ...]:
    script = Path(sys.executable).with_name("torchrun")
    launcher = (_shown(script),) if script.exists() else (python, "-m", "torch.distributed.run")
    return (*launcher, "--nproc-per-node", str(processes))


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
        roots: folders with .py files, which are read except in folders of tests and in private ones (_NAME).
        topics: texts by their names.
        target: the file to write, one JSON object per document.
    """
    texts: dict[str, Iterable[str]] = {f"topics/{name}": [text] for name, text in topics.items()}
    for root in roots:
        for path in source_files(root):
            inside = path.relative_to(root)
            if not any(folder.startswith("_") or folder == "testing" for folder in inside.parts[:-1]):
                texts[f"{root.name}/{inside.as_posix()}"] = docstrings(path)
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


def summary(directory: Path) -> str:
    """How the loss fell, from the metrics that training wrote.

    Args:
        directory: the run's output directory.
    """
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    training = [record for record in records if "train/loss" in record]
    evaluations = [record for record in records if "eval/loss" in record]
    first, last = training[0], training[-1]
    lines = [f"  training loss    {first['train/loss']:.3f} at step {first['step']}"]
    lines[0] += f" -> {last['train/loss']:.3f} at step {last['step']} (guessing gives {math.log(VOCAB_SIZE):.3f})"
    if evaluations:
        lines.append(f"  validation loss  {evaluations[-1]['eval/loss']:.3f} (nats per token, on text it never saw)")
    return "\n".join(lines)


def run(step: Step, label: str) -> int:
    """Print a command and run it; returns its exit status, 128 + the signal's number if a signal ended it."""
    print(f"\n[{label}] {step.title}\n$ {step.line}", flush=True)
    environment = os.environ | dict(step.environment)
    status = subprocess.run(step.words, cwd=ROOT, env=environment, check=False).returncode
    return status if status >= 0 else 128 - status


def run_all(gpus: int) -> int:
    """Run every step; stop at the first that fails, with its status."""
    started = time.monotonic()
    commands = steps(gpus, _configured_training())
    for number, step in enumerate(commands, start=1):
        status = run(step, f"{number}/{len(commands)}")
        if status:
            print(f"\nquickstart: step {number} ({step.title}) ended with status {status}:", file=sys.stderr)
            print(f"  {step.line}", file=sys.stderr)
            return status
    print(f"\ndone in {(time.monotonic() - started) / 60:.1f} minutes\n{summary(ROOT / RUN)}")
    for path, what in _what_lies_where():
        print(f"  {path:<36} {what}")
    return 0


def _configured_training() -> dict[str, int]:
    with (ROOT / CONFIG).open("rb") as file:
        table: dict[str, int] = tomllib.load(file)["training"]
    return table


def _what_lies_where() -> list[tuple[str, str]]:
    return [
        (str(CORPUS), "the corpus, one document a line"),
        (f"{TOKENIZER}/", "the tokenizer"),
        (f"{DATASET}_text_document.bin, .idx", "the tokens and their index"),
        (f"{RUN}/metrics.jsonl", "loss, gradient norm, speed and memory of every logged step"),
        (f"{RUN}/config.toml", "the whole configuration; --config reads it back"),
        (f"{RUN}/step_*/", "the trained weights (safetensors)"),
    ]


def main(argv: Sequence[str]) -> int:
    """The whole quick start, or with `corpus` or `sources` a corpus alone; returns the exit status."""
    library = Path(sysconfig.get_paths()["stdlib"])
    if argv == ["corpus"]:
        specs = [importlib.util.find_spec(name) for name in ("numpy", "torch")]
        packages = [Path(str(spec.origin)).parent for spec in specs if spec is not None]
        return _report(CORPUS, *write_corpus([library, *packages], topics, ROOT / CORPUS))
    if argv == ["sources"]:
        return _report(SOURCES, *write_sources(library, ROOT / SOURCES))
    if argv in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if argv:
        print(f"quickstart.py takes no arguments, `corpus` or `sources`; not {' '.join(argv)}", file=sys.stderr)
        return 2
    print("quick start: looking for GPUs", flush=True)
    import torch  # takes seconds

    return run_all(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def _report(path: Path, documents: int, size: int) -> int:
    print(f"{documents:,} documents, {size / 1e6:.1f} MB -> {path}")
    return 0 if documents else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
