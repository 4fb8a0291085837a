"""Silent bugs that others have published: what would have found each of them here?

    python -m benchmarks.gauntlet                   # every row of gauntlet.toml, as a table
    python -m benchmarks.gauntlet --json lines.jsonl --page docs/reports/published-bugs.md
    python -m benchmarks.gauntlet --clean 20        # random layouts without a bug: false alarms
    python -m benchmarks.gauntlet --tamper          # of steps, files and lines of a run that was tampered with

A row makes the mistake at public functions of megacore (megacore/verify/defects.py), in a layout that can have it, and
asks in turn: does tools/verify.py find it before the run; do the run's own checks within its six steps; does
tools/audit.py find it, which checks the run's ledger and computes its steps again on one process without the mistake?
A mistake that one process makes too (`everywhere`) is made in verify's reference as well, and no second computation by
the same code can tell it: the audit is not asked. One of a resume is made when the run goes on from step 3.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megacore.audit.command import main as audit
from megacore.commands import pretrain_gpt
from megacore.config import ResolvedConfig
from megacore.errors import UserError
from megacore.parallel.mesh import build_mesh, compute_reproducibly
from megacore.train.callbacks import Callback, Run
from megacore.train.step import StepResult, TrainStep
from megacore.verify.defects import BY_NAME, Defect
from megacore.verify.ranks import run_rank
from megacore.verify.request import make_parser, request_of
from megacore.verify.run import UnevenData
from tests.distributed import RankFailed, run_distributed
from tools.generated_pages import bring_up_to_date

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
STEPS, RESUMED = 6, 3


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A published bug; gauntlet.toml says what each attribute is."""

    name: str
    layout: str
    defect: Defect
    published: dict[str, str]
    everywhere: bool = False
    built: bool = False
    resumed: bool = False
    reproducible: bool = True

    @property
    def is_early(self) -> bool:
        """Whether a run makes the mistake from the building of the model on."""
        return self.everywhere or self.built or (self.resumed and self.defect.calls is not None)

    @property
    def is_of_layout(self) -> bool:
        return not (self.everywhere or self.built or self.resumed)

    @property
    def words(self) -> list[str]:
        return [*words_of(TABLE["model"]), *shlex.split(TABLE["layouts"][self.layout])]


@dataclass(frozen=True, kw_only=True)
class Result:
    name: str
    found: dict[str, str]  # what each way to look says; nothing if it finds nothing
    seconds: float

    @property
    def by(self) -> str:
        return next((by for by, how in self.found.items() if how), "never")

    @property
    def how(self) -> str:
        return self.found.get(self.by, "")


def bug_of(name: str, row: dict[str, Any]) -> Bug:
    own = {field: row[field] for field in row.keys() & {field.name for field in fields(Bug)}}
    options: dict[str, Any] = row.get("options") or {field: row[field] for field in ("old", "new") if field in row}
    fault = row.get("fault", "changed_line")
    new = Defect(name=name, what="", fault=fault, kinds=[], calls=row.get("calls"), options=options)
    defect = replace(BY_NAME[row["defect"]], name=name) if "defect" in row else new
    return Bug(**own | {"name": name, "defect": defect})


BUGS = [bug_of(name, row) for name, row in TABLE["bugs"].items()]


# ---- before the run


def verify(rank: int, ranks: int, words: list[str], bugs: Sequence[Bug], path: str) -> int:
    """Run verify on this rank, with bugs of the layout, a bug of everywhere or without any; the status."""
    parser = make_parser()
    with contextlib.redirect_stdout(None), contextlib.ExitStack() as stack:
        request = request_of(parser, parser.parse_args(["pretrain_gpt.py", *words, "--json", path]))
        config = replace(request.config, training=replace(request.config.training, compile=False))
        for bug in bugs:
            if not bug.defect.possible(config):
                raise UserError(f"{bug.name}: the layout {bug.layout} lacks {bug.defect.needs}")
            if bug.everywhere:
                stack.enter_context(bug.defect.planted(None))
        planted = tuple(bug.defect for bug in bugs if not bug.everywhere)
        return run_rank(replace(request, config=config, defects=planted, self_test=len(planted) > 0))


def verified(words: list[str], bugs: Sequence[Bug] = ()) -> dict[str, str]:
    """What verify finds of each bug, and of none ("") where all are of the layout, in words."""
    with tempfile.TemporaryDirectory(prefix="gauntlet-") as directory:
        path, names = Path(directory) / "verify.json", [bug.name for bug in bugs]
        try:
            run_distributed(verify, ranks_of(words), words, bugs, str(path), init=False, timeout=60 + 10 * len(bugs))
        except RankFailed as failure:
            return _each(words, bugs, _raised(failure))
        if not path.exists():
            return _each(words, bugs, "an error ends it")
        said = json.loads(path.read_text())
    verdicts = said["defects"] or dict.fromkeys(names, said["result"])
    return {name: _first_of(verdict) for name, verdict in {"": said["result"], **verdicts}.items()}


def _each(words: list[str], bugs: Sequence[Bug], raised: str) -> dict[str, str]:
    """A bug that raises an error is found; of several, each is tried alone."""
    if len(bugs) < 2:
        return dict.fromkeys([bug.name for bug in bugs] or [""], raised)
    return {name: how for bug in bugs for name, how in verified(words, [bug]).items()}


def _first_of(verdict: dict[str, Any]) -> str:
    """What differs first, or which check against torch fails; empty where all agrees."""
    if verdict["agrees"]:
        return ""
    failed = [check["name"].split(" against ")[1] for check in verdict["checks"] if not check["agrees"]]
    return verdict["first"]["kind"] if verdict["first"] else f"against {failed[0].split(' ')[0]}"


# ---- in the run


def words_of(flags: dict[str, Any]) -> list[str]:
    """Flags of a table as words."""
    pairs = [[f"--{name}", *([] if value is True else [str(value)])] for name, value in flags.items() if value]
    return [word for pair in pairs for word in pair]


def uneven(config: ResolvedConfig, *, train_samples: int) -> tuple[UnevenData, None]:
    """Samples whose numbers of counted tokens differ, more than a run takes."""
    return UnevenData(config, 2 * train_samples), None


@contextlib.contextmanager
def quietly() -> Iterator[io.StringIO]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), patch.object(pretrain_gpt, "build_datasets", uneven):
        yield output


class _InStep(Callback):
    """A mistake that is made in one step only."""

    def __init__(self, defect: Defect, step: int) -> None:
        self._defect, self._step, self._made = defect, step, contextlib.ExitStack()
        self.steps: TrainStep | None = None

    def on_step_begin(self, run: Run, step: int) -> None:
        if step == self._step:
            self._made.enter_context(self._defect.planted(self.steps))

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self._made.close()


def train(rank: int, ranks: int, words: list[str], bug: Bug | None, step: int | None, flags: dict[str, Any]) -> str:
    """Train on this rank, with a bug or without, which may be made in one step only; what the run itself says of it."""
    plain: Any = contextlib.nullcontext()
    once = None if bug is None or step is None else _InStep(bug.defect, step)
    early = bug is not None and once is None and bug.is_early
    with quietly():
        exact = {"reproducible": (bug is None or bug.reproducible) and not {"ring", "allgather"} & {*words}}
        config = pretrain_gpt.read_config([*words, *words_of(TABLE["run"] | exact | flags)], prog="gauntlet")
        if config.training.reproducible:
            compute_reproducibly()
        with bug.defect.planted(None) if bug is not None and early else plain:
            callbacks = [] if once is None else [once]
            trainer = pretrain_gpt.trainer_of(config, build_mesh(config.parallel), callbacks=callbacks)
            if once is not None:
                once.steps = trainer.train_steps
            late = bug is not None and not early and once is None
            with bug.defect.planted(trainer.train_steps) if bug is not None and late else plain:
                trainer.run()
    return "a step is skipped" if trainer.update.skipped_steps else ""


def ran(words: list[str], directory: Path, bug: Bug | None = None, *, step: int | None = None, **flags: Any) -> str:
    """What a run finds, in words."""
    ranks, flags = ranks_of(words), {"output-dir": directory} | flags
    try:
        if bug is not None and bug.resumed:
            run_distributed(train, ranks, words, None, None, flags | {"exit-interval": RESUMED}, init=False, timeout=60)
            flags |= {"load": directory}
        return str(run_distributed(train, ranks, words, bug, step, flags, init=False, timeout=600)[0])
    except RankFailed as failure:
        return _raised(failure)


def _raised(failure: RankFailed) -> str:
    if failure.exception is None:
        return "a hang" if "no result within" in str(failure) else "a rank ends"
    said = " ".join(str(failure.exception).split())
    return f"{type(failure.exception).__name__} {said[:90]}"


# ---- after it


def audited_here(rank: int, ranks: int, words: list[str]) -> tuple[int, str]:
    with quietly() as output, contextlib.redirect_stderr(output):
        try:
            status = audit(words)
        except SystemExit as stop:
            status = int(stop.code or 0)
    return status, output.getvalue()


def audited(
    directory: Path, steps: str = f"1-{STEPS}", words: Sequence[str] = (), ranks: int = 1, *, checks: bool = True
) -> str:
    """What the audit finds: of the ledger and the checkpoints, then of steps that are computed again."""
    again = ["--replay", steps, "--device", "cpu", *words]
    asked: list[list[str]] = ([[]] if checks else []) + ([again] if steps else [])
    for further in asked:
        run = [str(directory), *further]
        status, said = run_distributed(audited_here, ranks if further else 1, run, init=False, timeout=120)[0]
        if status:
            wrong = [line for line in said.splitlines() if line.startswith("wrong: ")]
            return wrong[0].removeprefix("wrong: ") if wrong else f"status {status}: {said[-200:]}"
    return ""


# ---- bugs, clean layouts, tampering


def ranks_of(words: Sequence[str]) -> int:
    found = re.findall(r"--(?:tp|pp|dp|cp) (\d+)", " ".join(words))
    return math.prod(map(int, found))


def tried(bugs: Sequence[Bug], *, all_ways: bool) -> Iterator[Result]:
    """Look for bugs of one layout, each until it is found or in all ways."""
    begin, words = time.perf_counter(), bugs[0].words
    of_layout = [bug for bug in bugs if bug.is_of_layout]
    before = verified(words, of_layout) if of_layout else {}
    each = (time.perf_counter() - begin) / max(len(of_layout), 1)
    for bug in bugs:
        begin = time.perf_counter() - each * (bug in of_layout)
        how = (before | (verified(words, [bug]) if bug.everywhere else {})).get(bug.name, "")
        found = {"verify": how}
        with tempfile.TemporaryDirectory(prefix="gauntlet-") as name:
            if all_ways or not how:
                found["run"] = ran(words, Path(name), bug)
            if not bug.everywhere and (all_ways or not any(found.values())):
                found["audit"] = audited(Path(name))
        yield Result(name=bug.name, found=found, seconds=time.perf_counter() - begin)


def clean(count: int, draw: random.Random) -> Iterator[Result]:
    """Random layouts without a bug, as the trainer takes them; whatever is found in them is a false alarm."""
    while count:
        words = [*words_of(TABLE["model"]), *shlex.split(" ".join(map(draw.choice, TABLE["clean"].values())))]
        begin = time.perf_counter()
        try:
            with contextlib.redirect_stderr(None):
                request_of(make_parser(), make_parser().parse_args(["pretrain_gpt.py", *words]))
        except SystemExit:
            continue
        with tempfile.TemporaryDirectory(prefix="gauntlet-") as name:
            said = ran(words, Path(name))
            if said == "SystemExit 2":  # which --reproducible does not take
                said = ran(words, Path(name), reproducible=False)
            found = {"verify": verified(words)[""], "run": said, "audit": audited(Path(name))}
        yield Result(name=" ".join(words[10:]) or "one process", found=found, seconds=time.perf_counter() - begin)
        count -= 1


def tampered(only: str, draw: random.Random) -> Iterator[Result]:
    """Tamper with one step of a run, or with a bit of what it wrote: the audit must name that step first."""
    table, words = TABLE["tamper"], [*words_of(TABLE["model"]), *shlex.split(TABLE["layouts"]["zero1"])]
    with tempfile.TemporaryDirectory(prefix="gauntlet-") as name:
        kept = Path(name, "kept")
        if said := ran(words, kept) or audited(kept):
            raise SystemExit(f"without tampering: {said}")
        for number, (what, step) in enumerate((what, step) for what in table["bugs"] for step in table["steps"]):
            if only not in what:
                continue
            begin, directory = time.perf_counter(), Path(name, str(number))
            bug = bug_of(what, table["bugs"][what] | {"layout": "zero1", "published": {}})
            said = ran(words, directory, bug, step=step) or audited(directory)
            yield _judged(f"{what} in step {step}", said, f"step {step} ", begin)
        for number, (kind, step) in enumerate((kind, step) for kind in table["files"] for step in (3, 6) * 2):
            begin, directory = time.perf_counter(), Path(name, f"file-{number}")
            shutil.copytree(kept, directory)
            file = draw.choice(sorted((directory / f"step_{step:08d}").glob(f"{kind}-*.safetensors")))
            content = bytearray(file.read_bytes())
            content[-1 - draw.randrange(64)] ^= 1 << draw.randrange(8)
            file.write_bytes(content)
            said = audited(directory, steps="")
            yield _judged(f"a bit of {kind} in the checkpoint of step {step}", said, f"step_{step:08d}: {kind}", begin)


def _judged(name: str, said: str, expected: str, begin: float) -> Result:
    """`right` where the audit names the first wrong step, `wrong` where it says something else, or nothing."""
    found = {"right": said} if said.startswith(expected) else {"wrong": said or "nothing"}
    return Result(name=name, found=found, seconds=time.perf_counter() - begin)


def replayed(count: int, draw: random.Random) -> Iterator[Result]:
    """A long run on 8 ranks, and random steps of it computed again on other layouts, which must be equal."""
    table = TABLE["replays"]
    with tempfile.TemporaryDirectory(prefix="gauntlet-") as name:
        words = [*words_of(TABLE["model"]), *shlex.split(table["layout"])]
        if said := ran(words, Path(name), **table["run"]):
            raise SystemExit(said)
        for _ in range(count):
            begin, step = time.perf_counter(), draw.randrange(1, table["run"]["train-iters"] + 1)
            flags = draw.choice(table["again"])
            said = audited(Path(name), f"{step}", shlex.split(flags), ranks_of(flags.split()), checks=False)
            yield Result(
                name=f"step {step} {flags or 'one process'}",
                found={"differs": said} if said else {"equal": "every bit"},
                seconds=time.perf_counter() - begin,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run rows, and print what finds each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", metavar="WORD", default="", help="rows whose name, layout or sources have WORD")
    add("--all-ways", action="store_true", help="look in further ways where a bug is found")
    add("--part", metavar="I/N", default="1/1", help="every N-th layout, from the I-th: for several processes")
    add("--json", metavar="FILE", help="append a line for each row")
    add("--page", metavar="FILE", help="run nothing, and write the table of the lines of --json to a page")
    add("--clean", metavar="N", type=int, help="N random layouts without a bug")
    add("--tamper", action="store_true", help="tamper with runs")
    add("--replays", metavar="N", type=int, help="compute N random steps of a long run again")
    add("--seed", type=int, default=0, help="of what is random")
    options = parser.parse_args(argv)
    draw = random.Random(options.seed)
    if options.page and not options.json:
        parser.error("--page needs --json FILE")
    if options.page:
        return write_page(Path(options.page), Path(options.json))
    if options.clean:
        results: Iterator[Result] = clean(options.clean, draw)
    elif options.tamper:
        results = tampered(options.only, draw)
    elif options.replays:
        results = replayed(options.replays, draw)
    else:
        bugs = [bug for bug in BUGS if options.only in " ".join([bug.name, bug.layout, *bug.published])]
        first, step = map(int, options.part.split("/"))
        layouts = list(dict.fromkeys(bug.layout for bug in bugs))[first - 1 :: step]
        of_layouts = [[bug for bug in bugs if bug.layout == layout] for layout in layouts]
        results = (result for bugs in of_layouts for result in tried(bugs, all_ways=options.all_ways))
    counts = Counter[str]()
    for result in results:
        counts[result.by] += 1
        print(f"{result.by:<7}{result.seconds:6.1f} s  {result.name:<38}{result.how[:100]}", flush=True)
        if options.json:
            with open(options.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    print(", ".join(f"{by}: {count}" for by, count in counts.items()))
    return 0


# ---- the page

# What causes are called there that are long sentences, by what is in them
_SHORT = {
    "against those": "tokens that must not be seen",
    "against the": "choices of routers",
    "the initial weights": "initial weights",
    "has other": "state changed between two lines",
    "SilentCorruption": "replicas differ",
    "an error ends it": "an error",
}
_MARKERS = "<!-- written by benchmarks/gauntlet.py: begin -->", "<!-- end -->"


def write_page(page: Path, lines: Path) -> int:
    """Write the table of results between the markers of a page."""
    results = {line["name"]: Result(**line) for line in map(json.loads, lines.read_text().splitlines())}
    counts = Counter(results[bug.name].by for bug in BUGS for _ in bug.published)
    rows = [f"{sum(counts.values())} bugs: {', '.join(f'{by} {count}' for by, count in counts.items())}.", ""]
    rows += ["|mistake|found by|published|", "|-|-|-|"]
    for bug in BUGS:
        result = results[bug.name]
        compared = re.match(r"step \d+ \(.*?\): (\w+)", result.how)
        short = next((short for text, short in _SHORT.items() if text in result.how), result.how)
        cause = "-".join((compared[1] if compared else short).split())  # a bar is no word of its own
        sources = ",".join(source.replace(" ", "") for source in bug.published)
        rows.append(f"|{bug.name}|{':'.join(filter(None, [result.by, cause]))}|{sources}|")
    bring_up_to_date(page, "\n".join(rows), _MARKERS, writes=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
