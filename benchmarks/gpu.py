"""Everything that only a GPU can show, in one command of at most nine minutes: `make gpu-check`.

    python benchmarks/gpu.py --output output/gpu-check
    python benchmarks/gpu.py --device cpu --small        try the command itself, without a GPU

It runs the tests marked `gpu`; times every kernel beside a copy, torch, torch.compile and Liger-Kernel; trains GPT-2
small, GPT-2 XL, Llama-3.2-1B and a small Mixtral in bf16 at the largest micro batch that fits, the first three compiled
too, and GPT-2 XL with the optimizer offloaded; and saves and loads checkpoints. Each part is a process of its own with
a share of the time: one that fails or takes too long costs the others nothing. `gpu-report.json` has every figure,
`gpu-report.md` the tables for docs/reports/measured.md, and `gpu-report.log` what the parts that did not end well
printed.

No network is needed. Packages that this interpreter lacks come from a folder of wheels (`--wheels`, filled by
`make gpu-wheels`), and go into a temporary directory.

Exit status: 0 everything is done, 1 a part failed or was cut off, 2 nothing could be measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_check.markdown import page  # noqa: E402
from benchmarks.gpu_check.parts import Outcome, Part, run_parts  # noqa: E402
from benchmarks.gpu_check.wheels import install_missing, missing_packages  # noqa: E402

SCHEMA = 1
SHAPES = ("gpt2-small", "gpt2-xl", "llama-3.2-1b")
PLAIN_ONLY = "experts"
# Left for writing the report when the last part has used all of its time.
_SECONDS_TO_END = 5.0


def parts_of(device: str, directory: Path, *, small: bool) -> list[Part]:
    """The parts in order: first what later ones need, last what may take longest. Weights are about the seconds
    that each needs on an H100; `machine` pays for loading torch from a cold disk.

    Args:
        device: kind of device.
        directory: where each part's records are written, of which some parts read others'.
        small: sizes for trying out the command.
    """
    common = ["--device", device, *(["--small"] if small else [])]
    kernels = ["-m", "benchmarks.kernels", *common, *(["--no-compile"] if small else [])]
    checkpoint = ["-m", "benchmarks.checkpoint", *common, *([] if small else ["--megabytes", "1500", "--rounds", "2"])]

    def training(shape: str, mode: str, weight: float, *, like: str | None = None) -> Part:
        arguments = ["-m", "benchmarks.gpu_check.training", "--shape", shape, "--mode", mode, *common]
        if like is not None:
            arguments += ["--like", str(directory / f"{like}.jsonl")]
        return Part(name=f"train {shape}, {mode}".replace(", plain", ""), arguments=arguments, weight=weight)

    return [
        Part(name="machine", arguments=["-m", "benchmarks.gpu_check.machine", *common], weight=60, required=True),
        Part(name="tests", arguments=_pytest_arguments(small), weight=80),
        *(training(shape, "plain", weight) for shape, weight in zip(SHAPES, (45, 45, 40), strict=True)),
        training(PLAIN_ONLY, "plain", 40),
        Part(name="kernels", arguments=kernels, weight=110),
        training("gpt2-xl", "offload", 35, like="train gpt2-xl"),
        Part(name="checkpoint", arguments=checkpoint, weight=40),
        *(
            training(shape, "compiled", weight, like=f"train {shape}")
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
    workers = min(8, os.cpu_count() or 1)
    spread = (
        [] if small or workers == 1 or "pytest-xdist" in missing_packages(["pytest-xdist"]) else ["-n", str(workers)]
    )
    plugin = ["-p", "benchmarks.gpu_check.outcomes", "-p", "no:cacheprovider"]
    return ["-m", "pytest", "-q", "-m", "gpu or on_device", *plugin, *spread, *files]


def report_of(outcomes: Sequence[Outcome], *, started: datetime, seconds: float, options: argparse.Namespace) -> Any:
    """The report as JSON holds it."""
    return {
        "schema": SCHEMA,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "device": options.device,
        "small": options.small,
        "source": source(),
        "parts": [
            asdict(one) | {"seconds": round(one.seconds, 1), "limit_seconds": round(one.limit_seconds, 1)}
            for one in outcomes
        ],
    }


def source() -> dict[str, str | None]:
    """The git commit, `+` added where files differ from it, and a digest of the code, which a copy without git has
    too."""
    digest = hashlib.sha256()
    for path in _code():
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    commit = _git("rev-parse", "HEAD")
    changed = commit is not None and _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": f"{commit}+" if changed else commit, "sha256": digest.hexdigest()}


def _code() -> Iterator[Path]:
    for folder in ("megacore", "kernels", "benchmarks", "tests"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def environment_of(site: Path | None) -> dict[str, str]:
    """The caller's environment with the repository and the wheels' packages importable."""
    paths = [str(ROOT), *([str(site)] if site is not None else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


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
        if missing := missing_packages(path=site):
            print(
                f"gpu-check: {sys.executable} lacks {', '.join(missing)}: run `make gpu-wheels WHEELS=DIR` where "
                "there is a network, bring DIR here, and say `make gpu-check WHEELS=DIR`",
                file=sys.stderr,
            )
            return 2
        outcomes: list[Outcome] = []

        def note(outcome: Outcome) -> None:
            outcomes.append(outcome)
            print(f"{outcome.name}: {outcome.status} after {outcome.seconds:.0f} s", flush=True)
            seconds = time.monotonic() - start
            write(options.output, report_of(outcomes, started=started, seconds=seconds, options=options), outcomes)

        parts = [
            part
            for part in parts_of(options.device, folder, small=options.small)
            if part.required or any(word in part.name for word in options.only or [""])
        ]
        left = options.minutes * 60 - (time.monotonic() - start) - _SECONDS_TO_END
        run_parts(parts, folder, seconds=left, environment=environment_of(site), report=note)
    print((options.output / "gpu-report.md").read_text(encoding="utf-8"))
    print(f"the output is in {options.output}")
    if outcomes[0].status != "done":
        return 2
    return 0 if all(outcome.status == "done" for outcome in outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu", "pretend"), help="where to run (cuda); pretend: the tests'")
    add("--small", action="store_true", help="tiny sizes: tries out the command, measures nothing")
    add(
        "--output", type=Path, default=Path("output/gpu-check"), metavar="DIR", help="for the report (output/gpu-check)"
    )
    add("--minutes", type=float, default=9.0, metavar="N", help="for the whole command (9)")
    add(
        "--only", nargs="+", metavar="WORD",
        help="parts whose name contains one of these: tests, kernels, compiled, ...",
    )  # fmt: skip
    add("--wheels", type=Path, metavar="DIR", help="packages that this interpreter lacks (see make gpu-wheels)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
