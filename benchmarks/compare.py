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
import contextlib
import dataclasses
import json
import math
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.comparison import job as jobs  # noqa: E402
from benchmarks.comparison.configuration import cut  # noqa: E402
from benchmarks.comparison.job import Job, Layout, Sizes  # noqa: E402
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
EXTENSIONS = ROOT / ".venv-peers" / "torch_extensions"


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
        for ranks in (*(1 << power for power in range(11) if 1 << power < arguments.ranks), arguments.ranks):
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
    pythons = {peer: interpreter_with(peer.split("-")[0]) for peer in peers}
    found = {"megacore": sys.executable, PRODUCTS: sys.executable, **pythons}
    missing = {peer: "not installed; `make peers` installs it" for peer, python in pythons.items() if not python}
    return {peer: Path(python) for peer, python in found.items() if python}, missing


def _versions(pythons: dict[str, Path]) -> dict[str, str]:
    found = {}
    for peer, label in (("deepspeed", "DeepSpeed"), ("megatron-core", "Megatron-Core")):
        if peer in pythons:
            code = f"from importlib.metadata import version; print(version({peer!r}))"
            found[label] = subprocess.check_output([pythons[peer], "-c", code], text=True).strip()
    return found


# ---- what all sides start from: initial weights by megacore's names, and tokens

SAMPLES = 1024  # a run that needs more begins again
_CYCLE = 64
_NOISE = 0.1


def write_inputs(sizes: Sizes, directory: Path) -> tuple[str, str]:
    """Files of token ids and of initial weights for a model of these sizes."""
    tokens, weights = str(directory / "tokens.npy"), str(directory / "weights.npz")
    rng = np.random.default_rng(1)
    np.save(tokens, _tokens(sizes, rng))
    values: dict[str, Any] = dict(_weights(sizes, rng))
    np.savez(weights, **values)
    return tokens, weights


def _tokens(sizes: Sizes, rng: np.random.Generator) -> NDArray[np.int64]:
    """int64 [samples, s + 1]: nine times of ten the next token is the following one of a cycle of 64."""
    shape = (SAMPLES, sizes.seq + 1)
    steps = np.where(rng.random(shape) < _NOISE, rng.integers(_CYCLE, size=shape), 1)
    cycle = rng.permutation(sizes.vocab)[:_CYCLE]
    return cycle[np.cumsum(steps, axis=1) % len(cycle)].astype(np.int64)


def _weights(sizes: Sizes, rng: np.random.Generator) -> Iterator[tuple[str, NDArray[np.float32]]]:
    h = sizes.hidden

    def normal(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        return (0.02 * scale * rng.standard_normal(shape)).astype(np.float32)

    def norm(name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield f"{name}.weight", np.ones(h, np.float32)
        yield f"{name}.bias", np.zeros(h, np.float32)

    def linear(name: str, rows: int, columns: int, scale: float) -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield f"{name}.weight", normal(rows, columns, scale=scale)
        yield f"{name}.bias", normal(rows)

    yield "embedding.tokens.weight", normal(sizes.vocab, h)
    yield "embedding.positions", normal(sizes.seq, h)
    residual = 1 / math.sqrt(2 * sizes.layers)
    for block in (f"blocks.{number}" for number in range(sizes.layers)):
        yield from norm(f"{block}.attention_norm")
        yield from linear(f"{block}.attention.qkv", 3 * h, h, 1.0)  # rows by head: query, key, value
        yield from linear(f"{block}.attention.output", h, h, residual)
        yield from norm(f"{block}.mlp_norm")
        yield from linear(f"{block}.mlp.up", 4 * h, h, 1.0)
        yield from linear(f"{block}.mlp.down", h, 4 * h, residual)
    yield from norm("head.norm")
    yield "head.weight", normal(sizes.vocab, h)


# ---- the ranks of a side, which wait between its turns


class SideFailed(Exception):
    """A side could not be built, died or did not answer; the message says which, and what it printed is in its logs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What a number of steps took.

    Attributes:
        seconds: of the slowest rank.
        losses: of each step, the mean over the ranks that know it; NaN where none does.
        peak: bytes that the fullest rank has had in memory so far, without what it had before the model.
    """

    seconds: float
    losses: list[float]
    peak: int


class Side:
    """The ranks of one framework on one layout, until `close`.

    Args:
        job: for every rank.
        python: interpreter of the framework's environment.
        log: what the ranks print is appended there.
        patience: seconds to wait for an answer.

    Raises:
        SideFailed: a rank could not build the model.
    """

    def __init__(self, job: Job, python: Path, log: Path, *, patience: float = 300.0) -> None:
        self.patience = patience
        self._ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []
        for lock in EXTENSIONS.glob("*/lock"):  # of a compilation that was ended: torch would wait for it for ever
            lock.unlink(missing_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port, world = str(free.getsockname()[1]), str(job.layout.ranks)
        environment = os.environ | {  # torchrun's variables, and one thread per rank
            "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        }  # fmt: skip
        with log.open("ab") as out:
            for rank in range(job.layout.ranks):
                pipe, theirs = Pipe()
                process = subprocess.Popen(
                    [python, "-m", "benchmarks.comparison.worker", str(theirs.fileno())],
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=ROOT,
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=(theirs.fileno(),),
                )  # fmt: skip
                self._ranks.append((process, pipe))
                theirs.close()
        try:
            self.name = str(self._ask(job)[0]["name"])
        except BaseException:
            self.close()
            raise

    def run(self, steps: int) -> Turn:
        """Run steps on all ranks.

        Raises:
            SideFailed: a rank failed.
        """
        answers = self._ask(steps)
        losses = [_mean(known) for known in zip(*(answer["losses"] for answer in answers), strict=True)]
        seconds, peak = (max(answer[name] for answer in answers) for name in ("seconds", "peak"))
        return Turn(seconds=seconds, losses=losses, peak=peak)

    def _ask(self, what: object) -> list[dict[str, Any]]:
        """Every rank's answer; the first error ends the wait, as the other ranks may wait for that one."""
        for _, pipe in self._ranks:
            with contextlib.suppress(OSError):  # it has died, which its answer says
                pipe.send(what)
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.patience
        while len(answers) < len(self._ranks):
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in answers}
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise SideFailed(f"rank {min(waiting.values())} did not answer in {self.patience:.0f} s")
            for pipe, rank in ((pipe, waiting[pipe]) for pipe in ready if isinstance(pipe, Connection)):
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    answers[rank] = {"error": f"rank {rank} died"}
                if "error" in answers[rank]:
                    raise SideFailed(answers[rank]["error"])
        return [answers[rank] for rank in range(len(self._ranks))]

    def close(self) -> None:
        """End the ranks."""
        for process, _ in self._ranks:
            process.kill()
        for process, pipe in self._ranks:
            process.wait()
            pipe.close()


def _mean(values: tuple[float, ...]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


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
