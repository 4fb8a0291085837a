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
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.comparison.configuration import cut  # noqa: E402
from benchmarks.comparison.inputs import write_inputs  # noqa: E402
from benchmarks.comparison.job import (  # noqa: E402
    KINDS,
    PEERS,
    PRODUCTS_FLOPS,
    Job,
    Layout,
    Sizes,
    is_combination,
    layouts,
    rank_counts,
)
from benchmarks.comparison.launcher import Side, SideFailed, Turn  # noqa: E402
from benchmarks.comparison.results import MIB, Largest, Results, Row, markdown, replace_section  # noqa: E402
from benchmarks.gpu_check.fitting import largest_fitting  # noqa: E402
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
    failed: list[str] = []
    return run_tool(_parser(), argv, lambda arguments: failed.extend(_compare(arguments))) or int(bool(failed))


def _parser() -> ToolParser:
    parser = ToolParser(
        prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--ranks", type=whole(1, _MOST_RANKS), default=2, metavar="N", help="most ranks; combinations take 4 (2)")
    add("--peers", type=_some_of(PEERS), default=list(PEERS), metavar="A,B", help=f"from {','.join(PEERS)} (all)")
    add("--modes", type=_some_of(KINDS), default=list(KINDS), metavar="A,B", help=f"from {','.join(KINDS)} (all)")
    add("--rounds", type=positive, default=6, metavar="N", help="rounds of each framework (6)")
    add("--steps", type=positive, default=2, metavar="N", help="steps of a round (2)")
    add("--patience", type=positive, default=300, metavar="S", help="seconds for a start, and for each turn (300)")
    add("--memory-limit-mib", type=whole(0), default=1024, metavar="N", help="of the largest model; 0: none (1024)")
    add("--output", type=Path, default=ROOT / "output" / "compare", metavar="DIR", help="(output/compare)")
    add("--measured", action="store_true", help=f"write the section of {MEASURED.relative_to(ROOT)} as well")
    for field in dataclasses.fields(Sizes):
        add(f"--{field.name}", type=positive, default=field.default, metavar="N", help=f"({field.default})")
    return parser


def _some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """For argparse: names separated by commas, each once."""

    def parsed(text: str) -> list[str]:
        names = list(dict.fromkeys(name for name in text.split(",") if name))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name} is not known: use {', '.join(known)}{did_you_mean(name, known)}"
                )
        return names

    return parsed


def _compare(arguments: argparse.Namespace) -> list[str]:
    """Measure, and write the results; returns what is wrong with them."""
    sizes = Sizes(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Sizes)})
    pythons, missing = interpreters(arguments.peers)
    results = Results(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        machine=f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, gloo",
        versions={"torch": version("torch").split("+")[0], **_versions(pythons)},
        sizes=sizes,
        missing=missing,
    )
    for kind in arguments.modes:
        if arguments.ranks < 4 and is_combination(kind):
            results.missing[kind] = f"takes 4 ranks or more, and --ranks is {arguments.ranks}"
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        comparison = Comparison(
            results, pythons, Path(directory), arguments.output / "ranks.log", patience=arguments.patience
        )
        for ranks in rank_counts(arguments.ranks):
            for layout in layouts(arguments.modes, ranks):
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
    names = {"deepspeed": "DeepSpeed", "megatron-core": "Megatron-Core"}
    found = {}
    for peer, label in names.items():
        if peer in pythons:
            code = f"from importlib.metadata import version; print(version({peer!r}))"
            run = subprocess.run([pythons[peer], "-c", code], capture_output=True, text=True, check=True)
            found[label] = run.stdout.strip()
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
                job = self._job(name, self.results.sizes, layout, stages=stages, inputs=self._inputs)
                start = time.monotonic()
                try:
                    sides[name] = stack.enter_context(closing(Side(job, python, self._log, patience=self._patience)))
                except SideFailed as error:
                    self._miss(name, layout, error)
                if (seconds := time.monotonic() - start) > _LONG_START:
                    self._say(f"  {name}: {seconds:.0f} s to start")
            turns = self._turns(sides, layout, rounds=rounds, steps=steps)
            if PRODUCTS not in turns:
                return  # without the machine's limit a row says little; `missing` has the reason
            limits = [PRODUCTS_FLOPS * layout.ranks * steps / turn.seconds for turn in turns.pop(PRODUCTS)[1::2]]
            for name, taken in turns.items():
                last = taken[-1]
                self.results.rows.append(
                    Row(
                        side=name,
                        implementation=sides[name].name,
                        layout=layout,
                        seconds=[turn.seconds / steps for turn in taken[1::2]],
                        limit=sorted(limits)[len(limits) // 2],
                        peak=last.peak,
                        process_peak=last.process_peak,
                        losses=[loss for turn in taken for loss in turn.losses],
                    )
                )
            self._say(f"  measured in {time.monotonic() - begin:.0f} s")

    def _turns(self, sides: dict[str, Side], layout: Layout, *, rounds: int, steps: int) -> dict[str, list[Turn]]:
        """Pairs of turns: one step after the change, and the timed ones. Every other round is in reverse order, so that
        no side always follows the same one. A side that fails takes part no more."""
        turns: dict[str, list[Turn]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in sorted(turns, key=list(sides).index, reverse=number % 2 == 1):
                try:
                    turns[name] += [sides[name].run(1), sides[name].run(steps)]
                except SideFailed as error:
                    self._miss(name, layout, error)
                    del turns[name]
        return turns

    def find_largest(self, kinds: Sequence[str], ranks: int) -> None:
        """The largest model of every framework that fits the limit.

        Args:
            kinds: ways to divide a model.
            ranks: processes.
        """
        self.results.largest_sizes = LARGEST_SIZES
        for layout in layouts(kinds, ranks):
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
                    found = self._largest(name, python, layout)
                except SideFailed as error:
                    self._miss(f"{name}, largest model", layout, error)
                    continue
                if found is not None:
                    self.results.largest.append(found)

    def _largest(self, name: str, python: Path, layout: Layout) -> Largest | None:
        unit, peaks = layout.pp * layout.virtual_stages, dict[int, int]()

        def peak(units: int) -> int:
            peaks[units] = self._peak(name, python, layout, units * unit)
            return peaks[units]

        limit = self.results.limit_bytes
        if not (units := largest_fitting(peak, memory=limit, at_most=_MOST_LAYERS // unit, exact=True)):
            return None
        parameters = dataclasses.replace(LARGEST_SIZES, layers=units * unit).parameters
        return Largest(side=name, layout=layout, layers=units * unit, parameters=parameters, peak=peaks[units])

    def _peak(self, name: str, python: Path, layout: Layout, layers: int) -> int:
        sizes = dataclasses.replace(LARGEST_SIZES, layers=layers)
        job = self._job(name, sizes, layout, stages=cut(sizes, layout), inputs=(self._tokens(sizes), None))
        with closing(Side(job, python, self._log, patience=self._patience)) as side:
            return side.run(2).peak

    def _tokens(self, sizes: Sizes) -> Path:
        directory = self._directory / "largest"
        if not directory.exists():
            directory.mkdir()
            write_inputs(dataclasses.replace(sizes, layers=1), directory)
        return directory / "tokens.npy"

    def _job(
        self, side: str, sizes: Sizes, layout: Layout, *,
        stages: tuple[tuple[int, int], ...], inputs: tuple[Path, Path | None],
    ) -> Job:  # fmt: skip
        tokens, weights = inputs
        return Job(
            side=side, sizes=sizes, layout=layout, stages=stages, tokens=tokens, weights=weights,
            directory=self._directory,
        )  # fmt: skip

    def _miss(self, name: str, layout: Layout, error: SideFailed) -> None:
        reason = _first(error).removeprefix("Unsupported: ")
        self.results.missing[f"{name}, {layout.name}"] = reason
        self._say(f"  {name}: {reason}")

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _first(error: Exception) -> str:
    """What an error says first, in a line."""
    return str(error).strip().splitlines()[0].removeprefix("- ")


def _keep(results: Results, output: Path) -> str:
    """Write the figures so far as JSON and as tables; returns the tables."""
    (output / "results.json").write_text(json.dumps(results.to_json(), indent=1), encoding="utf-8")
    text = markdown(results)
    (output / "results.md").write_text(text + "\n", encoding="utf-8")
    return text


if __name__ == "__main__":
    sys.exit(main())
