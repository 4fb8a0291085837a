"""Today's behaviour as data, and any tree held against it or against another tree.

    python -m tests.golden.make                            # write what no processor decides: argv.jsonl, tools.json
    python -m tests.golden.make --base REVISION            # run that revision and this tree here, and name what differs
    python -m tests.golden.make --base REVISION --only runs:zero   # some of it

Losses, norms and weights depend on the processor, and are compared between two trees on one machine. A difference that
a change means to make is named in its commit; there are no others. Exit status 1: something differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.golden.trees import HERE, ROOT, Worker, differences, files_below, folder, numbers_of, on_workers, tensors_of
from tests.parity.hf_models import CONFIGS

# Of every run: three steps of eight samples, an evaluation, and the weights at the end.
COMMON = """--mock-data --train-iters 3 --global-batch-size 8 --lr 1e-3 --lr-warmup-iters 1 --init-method-std 0.1
--seed 7 --eval-interval 3 --eval-iters 1 --log-interval 1 --save-interval 100 --hidden-dropout 0 --attention-dropout 0
--hang-timeout-minutes 0"""
SCRIPTS = ("pretrain_gpt.py", "pretrain_bert.py")
PLAIN = ["--mock-data", "--vocab-size", "64", "--train-iters", "10"]
Outcome = dict[str, Any]
Work = Mapping[str, Callable[[Worker], Outcome]]


def runs() -> Work:
    """The runs of runs.toml."""
    work: dict[str, Callable[[Worker], Outcome]] = {}
    for program, table in tomllib.loads((HERE / "runs.toml").read_text()).items():
        for name, given in table["runs"].items():
            commands = [given] if isinstance(given, str) else given
            work[f"{program}/{name}"] = partial(_train, table["script"], table["flags"], commands)
    return work


def _train(script: str, flags: str, commands: list[str], worker: Worker) -> Outcome:
    with folder() as directory:
        ended = []
        for command in commands:
            ranks, *words = shlex.split(command)
            if flags:
                words = _last_of_each(f"{COMMON} {flags}", words, ["--output-dir", str(directory / "run")])
            ended.append(worker.run(script, words, directory, ranks=int(ranks)))
        outcome: Outcome = {"statuses": [one.statuses for one in ended]}
        if any(status for one in ended for status in one.statuses):
            return outcome | {"err": ended[-1].err}
        if not (directory / "run").exists():
            return outcome | {"out": ended[-1].out}
        return outcome | {"numbers": numbers_of(directory / "run"), "tensors": tensors_of(directory / "run")}


def _last_of_each(plain: str, *more: list[str]) -> list[str]:
    """A command line of which later flags replace earlier ones, as not every revision does."""
    flags: dict[str, list[str]] = {}
    for word in [*shlex.split(plain), *(word for words in more for word in words)]:
        if word.startswith("--"):
            flags[latest := word] = [word]
        else:
            flags[latest].append(word)
    return [word for words in flags.values() for word in words]


def plain_line(script: str) -> str:
    """The key of the command line from which other configurations of a script are told."""
    return json.dumps({"script": script, "words": PLAIN})


def argv() -> Work:
    """The command lines of argv.jsonl and the plain ones, by their words."""
    lines = [json.loads(line) for line in (HERE / "argv.jsonl").read_text().splitlines()]
    keys = dict.fromkeys([*map(plain_line, SCRIPTS), *(json.dumps(line["given"]) for line in lines)])
    return {key: partial(_configure, json.loads(key)) for key in keys}


def _configure(given: dict[str, Any], worker: Worker) -> Outcome:
    """Exit status, words and the configuration that a command line gives."""
    with folder() as directory:
        for name, text in given.get("files", {}).items():
            (directory / name).write_text(text)
        words = [word.replace("{dir}", str(directory)) for word in given["words"]]
        ended = worker.run(given["script"], words, directory, environment=given.get("environment"))
        outcome: Outcome = {"status": ended.statuses[0], "says": ended.out + ended.err}
        if (directory / "config.toml").exists() and ended.statuses == [0]:
            outcome["fields"] = _fields((directory / "config.toml").read_text(), str(directory))
        return outcome


def _fields(text: str, directory: str) -> Outcome:
    tables = tomllib.loads(text.replace(directory, "{dir}"))
    return {key: value for section in tables.values() for key, value in section.items()}


def tools() -> Work:
    """The steps of tools.toml: commands that follow each other in one folder, and what they leave."""
    work: dict[str, Callable[[Worker], Outcome]] = {}
    for title, row in tomllib.loads((HERE / "tools.toml").read_text()).items():
        names = row.get("for", [""])
        for name in sorted(CONFIGS) if isinstance(names, str) else names:
            work[f"{title}/{name}".rstrip("/")] = partial(_steps, row, name)
    return work


def _steps(row: dict[str, Any], name: str, worker: Worker) -> Outcome:
    with folder() as directory:
        outcome: Outcome = {}
        for file, text in row.get("given", {}).items():
            (directory / file).write_text(text)
        for number, command in enumerate(row["run"]):
            script, *words = shlex.split(command.replace("{name}", name).replace("{dir}", str(directory)))
            ended = worker.run(script, words, directory)
            outcome[f"status {number}"] = ended.statuses[0]
            if row.get("prints", False) or ended.statuses != [0]:
                outcome[f"says {number}"] = (ended.out + ended.err).splitlines()
        if tensors := tensors_of(directory):
            outcome["tensors"] = tensors
        for file in row.get("files", []):
            outcome[file] = (directory / file).read_text().replace(str(directory), "{dir}").splitlines()
        if "settings" in row:
            outcome["settings"] = json.loads((directory / row["settings"]).read_text())["config"]["model"]
        for path in sorted(path for root in row.get("hashes", []) for path in files_below(directory / root)):
            if path.name == ".metadata":  # torch draws a number for each save
                continue
            outcome[str(path.relative_to(directory))] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return outcome


COLLECTIONS: dict[str, Callable[[], Work]] = {"argv": argv, "tools": tools, "runs": runs}


def chosen(only: str) -> dict[str, list[str]]:
    """The collections and keys that `--only` names: `argv`, or `runs:zero` for the runs with this in their names.

    Raises:
        ValueError: it names nothing.
    """
    name, _, word = only.partition(":")
    works = {each: work() for each, work in COLLECTIONS.items() if name in ("", each)}
    found = {each: [word] if word in work else [key for key in work if word in key] for each, work in works.items()}
    if not any(found.values()):
        raise ValueError(f"--only {only} names none of {', '.join(works)}: leave {word} out, or use a part of a name")
    return found


def collect(tree: Path, keys: Mapping[str, Iterable[str]], workers: int) -> dict[str, dict[str, Outcome]]:
    """What the chosen keys of each collection do in one tree, in this order."""
    found = {}
    for name, mine in keys.items():
        works, kind = COLLECTIONS[name](), "reader.py" if name == "argv" else "worker.py"
        found[name] = on_workers(tree, kind, {key: works[key] for key in mine}, workers)
    return found


def compare(base: str, only: str, workers: int) -> int:
    """Run a revision and this tree, and print what differs; returns the exit status."""
    keys = chosen(only)
    with tempfile.TemporaryDirectory(prefix="golden-base-") as name:
        tree = Path(name, "tree")
        subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", ROOT, tree], check=True)
        git = ["git", "-C", str(tree)]
        revision = [*git, "rev-parse", "-q", "--verify", "--end-of-options", f"{base}^{{commit}}"]
        found = subprocess.run(revision, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
        if not found:
            raise ValueError(f"--base {base} is no revision of this repository: use HEAD~1, or one of git log")
        subprocess.run([*git, "checkout", "-q", found], check=True)
        old, new = (collect(place, keys, workers) for place in (tree, ROOT))
    count = 0
    for collection, outcomes in new.items():
        different = {key: list(differences(old[collection][key], outcomes[key])) for key in outcomes}
        different = {key: lines for key, lines in different.items() if lines}
        for key, lines in different.items():
            print(f"{collection} {key}", *(f"  {line}" for line in lines[:6]), sep="\n")
            if len(lines) > 6:
                print(f"  and {len(lines) - 6} more")
        print(f"{collection}: {len(outcomes)} rows, {len(different)} differ")
        if failed := [key for key, outcome in outcomes.items() if "err" in outcome]:
            print(f"{collection}: {len(failed)} rows end with an error: {', '.join(failed)}")
        count += len(different)
    return min(count, 1)


def portable(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """Without what the machine decides, the values of tensors. Of a configuration, only what differs from that of its
    script's plain line stays; of these lines, everything."""
    plain = {key: outcomes[key]["fields"] for key in map(plain_line, SCRIPTS) if key in outcomes}
    found = {}
    for key, outcome in outcomes.items():
        found[key] = dict(outcome)
        if "tensors" in outcome:
            found[key]["tensors"] = {name: text.rsplit(" ", 1)[0] for name, text in outcome["tensors"].items()}
        if "fields" in outcome and key not in map(plain_line, SCRIPTS):
            first = plain[plain_line(json.loads(key)["script"])]
            found[key]["fields"] = {k: v for k, v in outcome["fields"].items() if k not in first or first[k] != v}
    return found


def written(collection: str) -> dict[str, Outcome]:
    """What is written down of a collection; nothing of an answer that was never written."""
    path = HERE / ("argv.jsonl" if collection == "argv" else "tools.json")
    if not path.exists():
        return {}
    if collection == "tools":
        found: dict[str, Outcome] = json.loads(path.read_text())
        return found
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {json.dumps(row.pop("given")): row for row in rows}


def write(only: str, workers: int) -> None:
    """Write the data that no processor decides from this tree; of a collection, what is chosen."""
    works = chosen(only)
    if not any(keys for name, keys in works.items() if name != "runs"):
        raise ValueError(f"--only {only} names runs, whose numbers are never written: compare them, with --base HEAD~1")
    for name, keys in works.items():
        if name != "runs":
            plain = map(plain_line, SCRIPTS) if name == "argv" else ()
            found = portable(collect(ROOT, {name: dict.fromkeys([*keys, *plain])}, workers)[name])
            before = written(name)
            rows: dict[str, Any] = {key: found.get(key) or before.get(key) or {} for key in COLLECTIONS[name]()}
            if never := [key for key, row in rows.items() if not row]:
                raise ValueError(f"--only leaves out what was never written: {', '.join(never)}")
            if name == "argv":
                lines = [json.dumps({"given": json.loads(key), **outcome}) for key, outcome in rows.items()]
                (HERE / "argv.jsonl").write_text("\n".join(lines) + "\n")
            else:
                (HERE / "tools.json").write_text(json.dumps(rows, indent=0) + "\n")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("--base", metavar="REVISION", help="compare with this revision of git instead of writing")
    parser.add_argument("--only", default="", metavar="NAME[:WORD]", help=f"one of {', '.join(COLLECTIONS)}")
    parser.add_argument("--workers", type=int, default=2, help="processes that start programs, a tree (default: 2)")
    given = parser.parse_args()
    if given.only.partition(":")[0] not in ("", *COLLECTIONS):
        parser.error(f"--only takes {', '.join(COLLECTIONS)}, not {given.only}")
    if given.workers < 1:
        parser.error(f"--workers {given.workers} must be at least 1: use --workers 2")
    try:
        if given.base is not None:
            return compare(given.base, given.only, given.workers)
        write(given.only, given.workers)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
