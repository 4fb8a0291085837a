"""megacore beside torch, DeepSpeed and Megatron-Core: speed, scaling, memory, and the largest model that fits.

    make peers                                    # DeepSpeed and Megatron-Core, once
    python benchmarks/compare.py --ranks 2        # data, tensor and pipeline parallelism, ZeRO 1 to 3
    python benchmarks/compare.py --ranks 4 --measured   # and combinations; writes in docs/reports/measured.md
    python benchmarks/compare.py --ranks 2 --peers torch --modes dp,zero3 --memory-limit-mib 0

Every rank is a process with one thread, and every framework has processes of its own. All start from the same weights
and read the same tokens, and pipelines are cut at the same layers; losses are compared. The frameworks of a layout are
in memory together, and their rounds alternate: while one computes, the others wait. With them alternate as many
processes that only multiply matrices: the machine's limit at that moment. From 1 to N ranks, in powers of two.

Writes results.json and results.md into --output, after every layout what is measured so far: a run that is ended early
leaves its table. A framework that is not installed, does not offer a
layout, fails, or does not answer within --patience seconds is named, and the others are measured. What takes longest is
printed: DeepSpeed compiles its extension once, when it is first started.

Exit status: 0 done, 1 the losses of two frameworks differ or megacore failed, 2 refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.comparison import job as jobs  # noqa: E402
from benchmarks.comparison.configuration import cut  # noqa: E402
from benchmarks.comparison.inputs import write_inputs  # noqa: E402
from benchmarks.comparison.job import Job, Layout, Sizes  # noqa: E402
from benchmarks.comparison.launcher import Side, SideFailed  # noqa: E402
from benchmarks.comparison.results import MIB, Largest, Results, Row, markdown, replace_section  # noqa: E402
from benchmarks.gpu_check.fitting import largest_fitting  # noqa: E402
from benchmarks.in_turn import take_turns  # noqa: E402
from megacore.commands.tool import ToolParser, positive, run_tool, whole  # noqa: E402
from megacore.config.messages import did_you_mean  # noqa: E402
from tests.peers import interpreter_with  # noqa: E402

PRODUCTS = "products"
MEASURED = ROOT / "docs" / "reports" / "measured.md"
_MOST_RANKS = 1024  # processes of one machine, for each framework
# Ways whose largest model is sought, and its sizes: few tokens and a wide model, so that state outweighs activations.
LARGEST_KINDS = ("dp", "zero1", "zero2", "zero3", "tp", "pp", "tp-zero1")
LARGEST_SIZES = Sizes(layers=2, hidden=512, heads=8, seq=128, vocab=8192, batch=4)
_MOST_LAYERS = 4096
_LONG_START = 20.0  # seconds, of a framework's ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Compare as the flags say; the exit status is 0 done, 1 losses differ or megacore failed, 2 refused."""
    return run_tool(_parser(), argv, lambda arguments: int(bool(_compare(arguments))))


def _parser() -> ToolParser:
    parser = ToolParser(
        prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    flag = parser.flag
    flag("--ranks N", "most ranks; combinations take 4", whole(1, _MOST_RANKS), 2)
    flag("--peers A,B", f"from {','.join(jobs.PEERS)}. Default: all.", _some_of(jobs.PEERS), list(jobs.PEERS))
    flag("--modes A,B", f"from {','.join(jobs.KINDS)}. Default: all.", _some_of(jobs.KINDS), list(jobs.KINDS))
    flag("--rounds N", "rounds of each framework", positive, 6)
    flag("--steps N", "steps of a round", positive, 2)
    flag("--patience S", "seconds for a start, and for each turn", positive, 300)
    flag("--memory-limit-mib N", "of the largest model; 0: none", whole(0), 1024)
    flag("--output DIR", "Default: output/compare.", Path, ROOT / "output" / "compare")
    flag("--measured", f"write the section of {MEASURED.relative_to(ROOT)} as well")
    for field in dataclasses.fields(Sizes):
        flag(f"--{field.name} N", "", positive, field.default)
    return parser


def _some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """For argparse: names separated by commas, each once."""

    def parsed(text: str) -> list[str]:
        names = list(dict.fromkeys(filter(None, text.split(","))))
        for name in (name for name in names if name not in known):
            way_out = f"use {', '.join(known)}{did_you_mean(name, known)}"
            raise argparse.ArgumentTypeError(f"{name} is not known: {way_out}")
        return names

    return parsed


def _compare(arguments: argparse.Namespace) -> list[str]:
    """Measure, and write the results; returns what is wrong with them."""
    sizes = Sizes(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Sizes)})
    pythons, missing = interpreters(arguments.peers)
    for kind in arguments.modes:
        if arguments.ranks < 4 and jobs.is_combination(kind):
            missing[kind] = f"takes 4 ranks or more, and --ranks is {arguments.ranks}"
    machine = f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, gloo"
    versions = {"torch": version("torch").split("+")[0], **_versions(pythons)}
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    results = Results(date=date, machine=machine, versions=versions, sizes=sizes, missing=missing)
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        log = arguments.output / "ranks.log"
        comparison = Comparison(results, pythons, Path(directory), log, patience=arguments.patience)
        for ranks in jobs.rank_counts(arguments.ranks):
            for layout in jobs.layouts(arguments.modes, ranks):
                comparison.measure(layout, rounds=arguments.rounds, steps=arguments.steps)
                _keep(results, arguments.output)
        if arguments.memory_limit_mib:
            results.limit_bytes = arguments.memory_limit_mib * MIB
            comparison.find_largest([kind for kind in arguments.modes if kind in LARGEST_KINDS], arguments.ranks)
    text = _keep(results, arguments.output)
    print(text)
    if arguments.measured:
        replace_section(MEASURED, text)
    wrong = [f"megacore: {what}" for what in results.missing if what.startswith("megacore")]
    for row, difference in results.disagreements():
        wrong.append(f"{row.implementation}, {row.layout.name}: losses differ by {difference:.1e} from megacore's")
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return wrong if results.rows else ["nothing was measured"]


def interpreters(peers: Sequence[str]) -> tuple[dict[str, Path], dict[str, str]]:
    """The interpreter of each framework that is installed, and why the others are missing.

    Args:
        peers: frameworks beside megacore.
    """
    here = Path(sys.executable)
    found, missing = {"megacore": here, PRODUCTS: here}, {}
    for peer in peers:
        if python := interpreter_with(peer.split("-")[0]):
            found[peer] = Path(python)
        else:
            missing[peer] = "not installed; `make peers` installs it"
    return found, missing


def _versions(pythons: dict[str, Path]) -> dict[str, str]:
    found = {}
    for peer, label in (("deepspeed", "DeepSpeed"), ("megatron-core", "Megatron-Core")):
        if peer in pythons:
            code = f"from importlib.metadata import version; print(version({peer!r}))"
            found[label] = subprocess.check_output([pythons[peer], "-c", code], text=True).strip()
    return found


class Comparison:
    """Measures layouts one after the other.

    Args:
        results: where figures are added.
        pythons: the interpreter of each framework.
        directory: for inputs and what runs write.
        log: what the ranks print.
        patience: seconds to wait for a framework's start and for each of its turns.
    """

    def __init__(
        self, results: Results, pythons: dict[str, Path], directory: Path, log: Path, *, patience: float = 300.0
    ) -> None:
        self.results, self._pythons, self._directory, self._log = results, pythons, directory, log
        self._patience = patience
        self._inputs = write_inputs(results.sizes, directory)
        log.unlink(missing_ok=True)

    def measure(self, layout: Layout, *, rounds: int, steps: int) -> None:
        """All frameworks on one layout, in turns.

        Args:
            layout: how the model is divided.
            rounds: of each framework.
            steps: of a round; one more after each change is not timed.
        """
        self._say(layout.name)
        begin = time.monotonic()
        try:
            stages = cut(self.results.sizes, layout)
        except ValueError as error:
            self.results.missing[layout.name] = _first(error)
            return
        with ExitStack() as stack:
            sides: dict[str, Side] = {}
            for name, python in self._pythons.items():
                start = time.monotonic()
                try:
                    side = self._side(name, python, self.results.sizes, layout, stages, self._inputs)
                    sides[name] = stack.enter_context(closing(side))
                except SideFailed as error:
                    self._missed(layout, name, error)
                if (seconds := time.monotonic() - start) > _LONG_START:
                    self._say(f"  {name}: {seconds:.0f} s to start")
            # A turn begins with a step that is not timed: the first after another side has computed.
            pairs = {name: partial(lambda side: (side.run(1), side.run(steps)), side) for name, side in sides.items()}
            missed = partial(self._missed, layout)
            turns = take_turns(pairs, rounds, warm_up=0, failures=(SideFailed,), failed=missed)
        if PRODUCTS not in turns:
            return  # without the machine's limit a row says little; `missing` has the reason
        limits = [jobs.PRODUCTS_FLOPS * layout.ranks * steps / timed.seconds for _, timed in turns.pop(PRODUCTS)]
        limit = sorted(limits)[len(limits) // 2]
        for name, taken in turns.items():
            row = Row(
                side=name, implementation=sides[name].name, layout=layout, limit=limit,
                peak=taken[-1][1].peak, seconds=[timed.seconds / steps for _, timed in taken],
                losses=[loss for pair in taken for turn in pair for loss in turn.losses],
            )  # fmt: skip
            self.results.rows.append(row)
        self._say(f"  measured in {time.monotonic() - begin:.0f} s")

    def find_largest(self, kinds: Sequence[str], ranks: int) -> None:
        """The largest model of every framework that fits the limit.

        Args:
            kinds: ways to divide a model.
            ranks: processes.
        """
        self.results.largest_sizes = LARGEST_SIZES
        directory = self._directory / "largest"
        directory.mkdir()
        self._drawn = write_inputs(dataclasses.replace(LARGEST_SIZES, layers=1), directory)[0], None
        for layout in jobs.layouts(kinds, ranks):
            try:
                cut(dataclasses.replace(LARGEST_SIZES, layers=layout.pp * layout.virtual_stages), layout)
            except ValueError as error:
                self.results.missing[f"largest model, {layout.name}"] = _first(error)
                continue
            for name, python in self._pythons.items():
                if name == PRODUCTS or f"{name}, {layout.name}" in self.results.missing:
                    continue
                self._say(f"largest model: {name}, {layout.kind}")
                try:
                    self.results.largest += self._largest(name, python, layout)
                except SideFailed as error:
                    self._missed(layout, f"{name}, largest model", error)

    def _largest(self, name: str, python: Path, layout: Layout) -> Iterator[Largest]:
        unit, peaks = layout.pp * layout.virtual_stages, dict[int, int]()

        def peak(units: int) -> int:
            sizes = dataclasses.replace(LARGEST_SIZES, layers=units * unit)
            with closing(self._side(name, python, sizes, layout, cut(sizes, layout), self._drawn)) as side:
                peaks[units] = side.run(2).peak
            return peaks[units]

        limit = self.results.limit_bytes
        if units := largest_fitting(peak, memory=limit, at_most=_MOST_LAYERS // unit, exact=True):
            parameters = dataclasses.replace(LARGEST_SIZES, layers=units * unit).parameters
            found = {"layers": units * unit, "parameters": parameters, "peak": peaks[units]}
            yield Largest(side=name, layout=layout, **found)

    def _side(
        self, name: str, python: Path, sizes: Sizes, layout: Layout,
        stages: Sequence[Sequence[int]], inputs: tuple[str, str | None],
    ) -> Side:  # fmt: skip
        where: dict[str, Any] = {"tokens": inputs[0], "weights": inputs[1], "directory": str(self._directory)}
        job = Job(side=name, sizes=sizes, layout=layout, stages=stages, **where)
        return Side(job, python, self._log, patience=self._patience)

    def _missed(self, layout: Layout, name: str, error: BaseException) -> None:
        reason = _first(error).removeprefix("Unsupported: ")
        self.results.missing[f"{name}, {layout.name}"] = reason
        self._say(f"  {name}: {reason}")

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _first(error: BaseException) -> str:
    """What an error says first, in a line."""
    return str(error).strip().splitlines()[0].removeprefix("- ")


def _keep(results: Results, output: Path) -> str:
    """Write the figures so far as JSON and as tables; returns the tables."""
    (output / "results.json").write_text(json.dumps(dataclasses.asdict(results), indent=1), encoding="utf-8")
    text = markdown(results)
    (output / "results.md").write_text(text + "\n", encoding="utf-8")
    return text


if __name__ == "__main__":
    sys.exit(main())
