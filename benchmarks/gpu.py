"""Everything that only a GPU can show, in one command of at most nine minutes: `make gpu-check`.

    python benchmarks/gpu.py --output output/gpu-check
    python benchmarks/gpu.py --device cpu --small        try the command itself, without a GPU

It runs the tests marked `gpu`; compares layouts whose ranks share the device with one rank, bit for bit; times every
kernel beside a copy, torch, torch.compile and Liger-Kernel; trains GPT-2 small, GPT-2 XL, Llama-3.2-1B and a small
Mixtral in bf16 at the largest micro batch that fits, the first three compiled too, and GPT-2 XL with the optimizer
offloaded; and saves and loads checkpoints. Each part is a process of its own with a share of the time: one that fails
or takes too long costs the others nothing. `gpu-report.json` has every figure, `gpu-report.md` the tables for
docs/reports/measured.md, and `gpu-report.log` what the parts that did not end well printed.

No network is needed. Packages that this interpreter lacks come from a folder of wheels (`--wheels`, filled by
`make gpu-wheels`), and go into a temporary directory.

Exit status: 0 everything is done, 1 a part failed or was cut off, 2 nothing could be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_check.markdown import page  # noqa: E402
from benchmarks.gpu_check.records import Record, read_records  # noqa: E402
from benchmarks.gpu_check.wheels import install_missing, missing_packages  # noqa: E402

SCHEMA = 1
SHAPES = ("gpt2-small", "gpt2-xl", "llama-3.2-1b")
# Left for writing the report when the last part has used all of its time.
_SECONDS_TO_END = 5.0
Status = Literal["done", "failed", "cut off", "not started"]
# With less than this left a part is not started: it would not get past its imports.
LEAST_SECONDS = 5.0
_LOG_TAIL = 20_000


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the check.

    Attributes:
        name: in the report, and of its files.
        arguments: of the interpreter; `--records FILE` is added.
        weight: its share of the time that is left, relative to the weights of the parts after it.
        required: without it nothing else is started.
    """

    name: str
    arguments: Sequence[str]
    weight: float
    required: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a part ended.

    Attributes:
        name: the part's.
        status: done; failed (exit status not 0); cut off at its limit; not started, because no time was left or a
            required part failed.
        exit_status: of its process; None if it was cut off or never started.
        seconds: that it ran.
        limit_seconds: that it might have run.
        records: what it measured, complete or not.
        log_tail: the end of what it printed, unless it is done.
    """

    name: str
    status: Status
    exit_status: int | None
    limit_seconds: float
    seconds: float = 0.0
    records: list[Record] = field(default_factory=list)
    log_tail: str = ""


def run_parts(
    parts: Sequence[Part], directory: Path, *, seconds: float, environment: Mapping[str, str]
) -> Iterator[Outcome]:
    """Run all parts that the time allows; yields each outcome as soon as it is known.

    A part may take `weight / (its weight and those of all later parts)` of the time that is left, so that what one
    leaves unused goes to those after it.

    Args:
        parts: in order.
        directory: for their records and logs.
        seconds: for all of them.
        environment: of their processes.
    """
    end, useless = time.monotonic() + seconds, False
    for index, part in enumerate(parts):
        left = 0.0 if useless else max(0.0, end - time.monotonic())
        outcome = _run(part, directory, left * part.weight / sum(later.weight for later in parts[index:]), environment)
        useless |= part.required and outcome.status != "done"
        yield outcome


def _run(part: Part, directory: Path, limit: float, environment: Mapping[str, str]) -> Outcome:
    if limit < LEAST_SECONDS:
        return Outcome(name=part.name, status="not started", exit_status=None, limit_seconds=round(limit, 1))
    records, log = directory / f"{part.name}.jsonl", directory / f"{part.name}.log"
    start, exit_status = time.monotonic(), None
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *part.arguments, "--records", str(records)],
            cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            exit_status = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
            process.wait()
    status: Status = "cut off" if exit_status is None else "failed" if exit_status else "done"
    said = "" if status == "done" else log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]
    return Outcome(
        name=part.name, status=status, exit_status=exit_status, seconds=round(time.monotonic() - start, 1),
        limit_seconds=round(limit, 1),
        records=read_records(records), log_tail=said,
    )  # fmt: skip


def parts_of(device: str, directory: Path, *, small: bool) -> list[Part]:
    """The parts in order: first what later ones need, last what may take longest. Weights are about the seconds
    that each needs on an H100; `machine` pays for loading torch from a cold disk.

    Args:
        device: kind of device.
        directory: where each part's records are written, of which some parts read others'.
        small: sizes for trying out the command.
    """
    small_too = ["--small"] if small else []

    def part(name: str, words: str, weight: float, *more: str, required: bool = False) -> Part:
        arguments = ["-m", *words.split(), "--device", device, *small_too, *more]
        return Part(name=name, arguments=arguments, weight=weight, required=required)

    def training(shape: str, mode: str, weight: float, *more: str) -> Part:
        name = f"train {shape}, {mode}".replace(", plain", "")
        return part(name, f"benchmarks.gpu_check.training --shape {shape} --mode {mode}", weight, *more)

    def like(shape: str) -> tuple[str, str]:
        return "--like", str(directory / f"train {shape}.jsonl")

    checkpoint = "benchmarks.checkpoint" if small else "benchmarks.checkpoint --megabytes 1500 --rounds 2"
    return [
        part("machine", "benchmarks.gpu_check.machine", 60, required=True),
        Part(name="tests", arguments=_pytest_arguments(small), weight=80),
        part("layouts", "benchmarks.gpu_check.layouts", 80),
        *map(training, SHAPES, ("plain",) * 3, (45, 45, 40)),
        training("experts", "plain", 40),
        part("kernels", "benchmarks.kernels", 110, *(["--no-compile"] if small else [])),
        training("gpt2-xl", "offload", 35, *like("gpt2-xl")),
        part("checkpoint", checkpoint, 40),
        *(
            training(shape, "compiled", weight, *like(shape))
            for shape, weight in zip(SHAPES, (40, 60, 50), strict=True)
        ),
    ]


def _pytest_arguments(small: bool) -> list[str]:
    """The files that have tests for a GPU; spread over processes where pytest-xdist is there, as none of them times."""
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if any(mark in path.read_text(encoding="utf-8") for mark in ("mark.gpu", "mark.on_device"))
    ]
    workers = 1 if small or importlib.util.find_spec("xdist") is None else min(8, os.cpu_count() or 1)
    plugin = ["-p", "benchmarks.gpu_check.outcomes", "-p", "no:cacheprovider"]
    spread = ["-n", str(workers)] if workers > 1 else []
    return ["-m", "pytest", "-q", "-m", "gpu or on_device", *plugin, *spread, *files]


def report_of(outcomes: Sequence[Outcome], *, started: datetime, seconds: float, options: argparse.Namespace) -> Any:
    """The report as JSON holds it."""
    run = {"schema": SCHEMA, "started": started.isoformat(timespec="seconds"), "seconds": round(seconds, 1)}
    what = {"device": options.device, "small": options.small, "source": source()}
    return {**run, **what, "parts": list(map(asdict, outcomes))}


def source() -> dict[str, str | None]:
    """The git commit, `+` added where files differ from it, and a digest of the code, which a copy without git has
    too."""
    digest = hashlib.sha256()
    for folder in ("megacore", "kernels", "benchmarks", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    commit = _git("rev-parse", "HEAD")
    changed = commit is not None and _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": f"{commit}+" if changed else commit, "sha256": digest.hexdigest()}


def _git(*arguments: str) -> str | None:
    try:
        return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write(directory: Path, report: Any, outcomes: Sequence[Outcome]) -> None:
    """Write the three files anew, so that they are complete whenever the command is ended from outside."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "gpu-report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (directory / "gpu-report.md").write_text(page(report), encoding="utf-8")
    logs = [f"==== {one.name}: {one.status} ====\n{one.log_tail}\n" for one in outcomes if one.log_tail]
    (directory / "gpu-report.log").write_text("\n".join(logs), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts and write the report."""
    start, started = time.monotonic(), datetime.now(UTC)
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as temporary:
        folder = Path(temporary)
        site = None if options.wheels is None else install_missing(options.wheels, folder / "site")
        if missing := missing_packages(site):
            where = "where there is a network, bring DIR here, and say `make gpu-check WHEELS=DIR`"
            lacking = f"{sys.executable} lacks {', '.join(missing)}"
            print(f"gpu-check: {lacking}: run `make gpu-wheels WHEELS=DIR` {where}", file=sys.stderr)
            return 2
        parts = [
            part
            for part in parts_of(options.device, folder, small=options.small)
            if part.required or any(word in part.name for word in options.only or [""])
        ]
        # The repository and the wheels' packages are importable, too.
        paths = [str(ROOT), *([] if site is None else [str(site)]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        left = options.minutes * 60 - (time.monotonic() - start) - _SECONDS_TO_END
        outcomes: list[Outcome] = []
        for outcome in run_parts(parts, folder, seconds=left, environment=environment):
            outcomes.append(outcome)
            print(f"{outcome.name}: {outcome.status} after {outcome.seconds:.0f} s", flush=True)
            seconds = time.monotonic() - start
            write(options.output, report_of(outcomes, started=started, seconds=seconds, options=options), outcomes)
    print((options.output / "gpu-report.md").read_text(encoding="utf-8"))
    print(f"the output is in {options.output}")
    failed = [outcome.name for outcome in outcomes if outcome.status != "done"]
    return 2 if outcomes[0].name in failed else int(bool(failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, output = parser.add_argument, Path("output/gpu-check")
    add("--device", default="cuda", choices=("cuda", "cpu", "pretend"), help="where to run (cuda); pretend: the tests'")
    add("--small", action="store_true", help="tiny sizes: tries out the command, measures nothing")
    add("--output", type=Path, default=output, metavar="DIR", help="for the report (output/gpu-check)")
    add("--minutes", type=float, default=9.0, metavar="N", help="for the whole command (9)")
    names = "parts whose name contains one of these: tests, kernels, compiled, ..."
    add("--only", nargs="+", metavar="WORD", help=names)
    add("--wheels", type=Path, metavar="DIR", help="packages that this interpreter lacks (see make gpu-wheels)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
