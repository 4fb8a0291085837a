"""The command-line tool: validate, start the ranks or join those of torchrun, compare, report."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from megacore.commands.tool import EXIT_FAILED, ToolParser, run_tool
from megacore.config import Config, ResolvedConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from megacore.config.dimensions import degree_fields, named_degrees
from megacore.config.flags import read_flags
from megacore.config.messages import counted, nearest_name
from megacore.config.reproducible import canonical_blocks
from megacore.config.toml import read_toml
from megacore.convert.start import check_init_from_hf, shape_from_hf
from megacore.data.bert.build import check_bert_inputs
from megacore.data.gpt.build import check_inputs, vocabulary_size
from megacore.errors import EXIT_REFUSED, UserError
from megacore.models.gpt import gpt_layers
from megacore.models.outline import outline
from megacore.models.program import layers_of
from megacore.models.spec import DescribesLayers
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Mesh, build_mesh, compute_reproducibly, leave, world_size
from megacore.pipeline.schedule_choice import choose_schedule, is_open
from megacore.pipeline.schedule_file import check_schedule
from megacore.train.planning import planner
from megacore.verify.compare import Verdict, as_json, compare, describe
from megacore.verify.defects import BY_NAME, DEFECTS
from megacore.verify.narrow import STEPS, WARMUP_STEPS, narrow
from megacore.verify.planting import Defect, planted
from megacore.verify.reference import Reference, make_reference
from megacore.verify.run import Record, Recorder, batches, gather, load_steps

EXIT_DIVERGES = 1
_DEFAULTS: Mapping[str, str] = {"train_iters": "1000000", "vocab_size": "512"}  # no setting is beyond this run
_SECONDS_TO_END = 10.0
_MOST_RANKS = 64
_WIDTH = 118


@dataclass(frozen=True, kw_only=True)
class Program:
    """An entry point whose flags are taken.

    Attributes:
        kind: of its configuration.
        layers: describes a GPT.
        shape: what else sets the shape of the model.
        checks: of its input files. The memory of the whole model is not checked: a small copy runs.
    """

    kind: type[Any]
    layers: DescribesLayers = gpt_layers
    shape: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None
    checks: tuple[Callable[[Any], object], ...]


PROGRAMS = {
    "pretrain_gpt.py": Program(
        kind=Config, shape=shape_from_hf, checks=(check_inputs, check_init_from_hf, check_schedule)
    ),
    "pretrain_bert.py": Program(kind=BertConfig, shape=None, checks=(check_bert_inputs, check_schedule)),
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for.

    Attributes:
        config: of the layout, narrowed.
        layers: describes a GPT.
        changes: what narrowing changed.
        defects: to plant, one run each.
        self_test: whether they must all be found.
        json: file for the result, or None.
    """

    config: ResolvedConfig
    layers: DescribesLayers
    changes: tuple[str, ...]
    defects: tuple[Defect, ...]
    self_test: bool
    json: Path | None


class _Parser(ToolParser):
    """Leaves the words that it does not know to the trainer."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        arguments, arguments.words = self.parse_known_args(args, namespace)
        return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 everything agrees, 1 something differs or a run failed, 2 refused."""
    parser = make_parser()
    status = [0]

    def action(args: argparse.Namespace) -> None:
        status[0] = _list_defects() if args.list_defects else _verify(request_of(parser, args))

    return run_tool(parser, argv, action) or status[0]


def make_parser() -> ToolParser:
    """The parser of the tool's flags. It leaves the others to the trainer, as `words`."""
    parser = _Parser(
        prog="verify.py",
        usage="verify.py {pretrain_gpt.py,pretrain_bert.py,MY.py} [flags of the trainer] [--self-test] [--json FILE]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Compare a parallel layout with one process, on a narrowed copy of the model in fp32 on gloo: token\n"
            "counts, dropout masks, outputs of layers, losses, every gradient, moment and weight change of "
            f"{STEPS} steps.\n\n"
            "    python tools/verify.py pretrain_gpt.py --tp 2 --pp 2 --dp 2 --zero-stage 1\n\n"
            "starts the ranks itself; under torchrun it takes those of the job. All flags of the trainer are taken,\n"
            "and validated by the trainer. Without data it uses --mock-data. docs/guides/verify.md is the manual."
        ),
        epilog="exit status: 0 everything compared agrees, 1 something differs or a run failed, 2 refused",
    )
    add = parser.add_argument
    add(
        "--self-test",
        action="store_true",
        help="inject every defect that the layout can have; each must be found",
    )
    add("--defect", metavar="NAME", help="inject one defect, and show its report")
    add("--list-defects", action="store_true", help="list the defects, and end")
    add("--json", metavar="FILE", help="write the complete result to FILE as JSON")
    return parser


def _list_defects() -> int:
    for defect in DEFECTS:
        print(f"{defect.name:<28}{defect.what}" + (f" (needs {defect.needs})" if defect.needs else ""))
    return 0


# ---- the request


def request_of(parser: ToolParser, args: argparse.Namespace) -> Request:
    """What a command line asks for.

    Args:
        parser: of `make_parser`, for its refusals.
        args: what it has read.

    Raises:
        SystemExit: the trainer refuses its flags; the message is printed.
    """
    program, *words = args.words or [""]
    name = Path(program).name
    known = PROGRAMS.get(name)
    if known is None and name.endswith(".py") and Path(program).is_file():
        known = replace(PROGRAMS["pretrain_gpt.py"], layers=layers_of(program))
    if known is None:
        near = nearest_name(name, PROGRAMS)
        hint = f"; did you mean {near}?" if near else ""
        given = f"not {program!r}" if program else "and nothing was given"
        ways = "pretrain_gpt.py, pretrain_bert.py or a file of your own"
        parser.error(f"the first word must be {ways}, {given}{hint}")
    defects = _defects(parser, args)
    path = None if args.json is None else Path(args.json)
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        parser.error(f"--json {path} must be a file in a directory that exists and can be written to")
    narrowed = narrow(_config(known, name, words))
    ranks = narrowed.config.parallel.ranks
    if "WORLD_SIZE" not in os.environ and ranks > _MOST_RANKS:
        parser.error(
            f"the layout has {ranks} ranks, and this tool starts at most {_MOST_RANKS} on a machine: use smaller --tp, "
            "--pp or --dp (two of each show the same defects), or start it under torchrun"
        )
    for defect in defects if args.defect else ():
        if not defect.possible(narrowed.config):
            parser.error(f"--defect {defect.name} is not possible with this layout: it needs {defect.needs}")
    config = narrowed.config
    if args.self_test:  # planted functions would be missing from compiled code
        config = replace(config, training=replace(config.training, compile=False))
        defects = tuple(defect for defect in defects if defect.possible(config))
    return Request(
        config=config,
        layers=known.layers,
        changes=narrowed.changes,
        defects=defects,
        self_test=args.self_test,
        json=path,
    )


def _defects(parser: ToolParser, args: argparse.Namespace) -> tuple[Defect, ...]:
    if args.defect is None:
        return DEFECTS if args.self_test else ()
    if args.self_test:
        parser.error("--self-test plants every defect and --defect one of them: keep one of the two")
    if args.defect not in BY_NAME:
        near = nearest_name(args.defect, BY_NAME)
        parser.error(f"--defect {args.defect} is unknown{f': did you mean {near}?' if near else ''} (--list-defects)")
    return (BY_NAME[args.defect],)


def _config(program: Program, name: str, words: Sequence[str]) -> ResolvedConfig:
    """The resolved configuration, or the trainer's refusal; what only a real run needs gets a value."""
    given = read_flags(words, program.kind).values
    if (path := given.pop("config", None)) is not None:
        with contextlib.suppress(UserError, OSError):
            given = {**read_toml(path, program.kind).values, **given}
    added = [word for field, value in _missing(given) for word in (f"--{field.replace('_', '-')}", value) if word]
    with _processes(given):
        config: ResolvedConfig = parse_config(
            [*words, *added],
            prog=name,
            description="",
            kind=program.kind,
            shape=program.shape,
            vocabulary=vocabulary_size,
            checks=program.checks,
        )
    if is_open(config):  # as a launch on a CPU chooses
        choices = planner().schedules_by_time(config, outline(config), on_cpu=True)
        return choose_schedule(config, choices, lambda candidate: True)
    return config


def _missing(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not given.get("data_path") and not given.get("mock_data"):
        yield "mock_data", ""
    for field, value in _DEFAULTS.items():
        known = {"vocab_size": ("preset", "tokenizer", "init_from_hf")}.get(field, ())
        if given.get(field) is None and not any(given.get(other) for other in known):
            yield field, value


@contextlib.contextmanager
def _processes(given: Mapping[str, Any]) -> Iterator[None]:
    """The trainer sees as many processes as the layout needs, unless torchrun has started some."""
    if "WORLD_SIZE" in os.environ:
        yield
        return
    degrees = (given.get(name) for name in degree_fields())
    count = math.prod(degree for degree in degrees if isinstance(degree, int) and degree > 0)
    environment = {"RANK": "0", "WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in environment:
            del os.environ[name]


# ---- processes


def _verify(request: Request) -> int:
    ranks = request.config.parallel.ranks
    if ranks == 1 or "WORLD_SIZE" in os.environ:
        return run_rank(request)
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_child, args=(request, {**address, "RANK": str(rank)}), daemon=True)
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        return _status(processes)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(_SECONDS_TO_END)


def _child(request: Request, environment: Mapping[str, str]) -> None:
    local = {"LOCAL_RANK": environment["RANK"], "LOCAL_WORLD_SIZE": environment["WORLD_SIZE"]}
    os.environ.update({**environment, **local, "OMP_NUM_THREADS": "1", "TORCH_GLOO_LAZY_INIT": "1"})
    status = run_rank(request)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status(processes: Sequence[BaseProcess]) -> int:
    """The ranks' status once all have ended; that of the first that fails, at once."""
    running = dict(enumerate(processes))
    statuses: list[int] = []
    while running:
        ended = wait([process.sentinel for process in running.values()])
        for rank, process in [(rank, process) for rank, process in running.items() if process.sentinel in ended]:
            del running[rank]
            process.join()
            code = process.exitcode or 0
            if code < 0:
                print(f"verify.py: no result: rank {rank} was ended by signal {-code}", file=sys.stderr)
                return EXIT_FAILED
            statuses.append(code)
        if any(status in (EXIT_REFUSED, _EXIT_RAISED) for status in statuses):
            return EXIT_REFUSED if EXIT_REFUSED in statuses else EXIT_FAILED
    return max(statuses)


_EXIT_RAISED = 3  # of a rank that this tool started; the tool ends with EXIT_FAILED


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_rank(request: Request) -> int:
    """Verify on this rank of the job; returns the same status on every rank."""
    try:
        return _run_rank(request)
    except UserError as error:
        print(f"verify.py: error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except Exception:
        print(f"verify.py: no result: rank {os.environ.get('RANK', '0')} failed", file=sys.stderr)
        traceback.print_exc()
        return EXIT_FAILED if world_size() == 1 else _EXIT_RAISED


def _run_rank(request: Request) -> int:
    config = request.config
    if config.training.reproducible:
        compute_reproducibly()
    elif world_size() > 1:
        torch.set_num_threads(1)
    mesh = build_mesh(config.parallel)
    is_first = mesh.world.rank == 0
    directory = _directory(config) if is_first else None
    reference: Reference | None = None
    try:
        if is_first and directory is not None:
            for line in _heading(request):
                print(textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False), flush=True)
            reference = make_reference(config, directory, mesh.device, request.layers)
        checkpoint = all_gather_objects(None if reference is None else str(reference.checkpoint), mesh.world)[0]
        status = _compare_all(request, mesh, Path(checkpoint), reference)
        leave(mesh)
        return status
    finally:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _directory(config: ResolvedConfig) -> Path:
    """Where the checkpoint of the warm-up goes: for several nodes a place that all of them see."""
    local = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    if local == os.environ.get("WORLD_SIZE", "1"):
        return Path(tempfile.mkdtemp(prefix="verify-"))
    output = Path(config.training.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="verify-", dir=output))


def run_layout(
    config: ResolvedConfig, mesh: Mesh, checkpoint: Path, layers: DescribesLayers, defect: Defect | None = None
) -> Record | None:
    """Train the layout, with a defect or without; the record on rank 0."""
    steps = load_steps(config, mesh, checkpoint, layers)
    recorder = Recorder(steps)
    with planted(defect, steps):
        recorder.run(batches(config, mesh, steps.task, after=WARMUP_STEPS))
    return gather(recorder, mesh)


def _compare_all(request: Request, mesh: Mesh, checkpoint: Path, reference: Reference | None) -> int:
    config, results = request.config, dict[str, Verdict]()
    for defect in (None, *request.defects) if request.self_test or not request.defects else request.defects:
        record = run_layout(config, mesh, checkpoint, request.layers, defect)
        if record is not None and reference is not None:
            verdict = compare(record, reference, config)
            results["" if defect is None else defect.name] = verdict
            for line in _lines(verdict, reference, defect if request.self_test else None):
                print(line, flush=True)
    status = 0
    if reference is not None:
        status = _conclude(request, results)
    return max(all_gather_objects(status, mesh.world))


# ---- words


def _heading(request: Request) -> Iterator[str]:
    parallel = request.config.parallel
    named = named_degrees(parallel.degrees)
    layout = " ".join(f"--{field} {getattr(parallel, field)}" for field in degree_fields() if field in named)
    yield f"layout: {layout}, against one process"
    yield f"narrowed: {', '.join(request.changes) or 'nothing'}"
    yield (
        f"start: a checkpoint of one process after {WARMUP_STEPS} steps; compared: {STEPS} steps of "
        f"{counted(request.config.microbatches, 'microbatch', 'microbatches')} per replica, with uneven loss masks"
    )


def _lines(verdict: Verdict, reference: Reference, defect: Defect | None) -> Iterator[str]:
    if defect is None:
        yield from describe(verdict, reference)
        return
    if verdict.agrees or verdict.first is None:
        yield f"  NOT FOUND  {defect.name}: {defect.what}"
        return
    named = "found" if verdict.first.key.kind in defect.kinds else "found, in another place than expected,"
    yield f"  {named} {defect.name}: {len(verdict.disagreeing)} tensors, first {verdict.first.key}"


def _conclude(request: Request, results: Mapping[str, Verdict]) -> int:
    """Print what follows, and write the JSON file; returns the exit status."""
    clean, planted_ = results.get(""), {name: verdict for name, verdict in results.items() if name}
    missed = [name for name, verdict in planted_.items() if verdict.agrees]
    misplaced = [
        name
        for name, verdict in planted_.items()
        if verdict.first is not None and verdict.first.key.kind not in BY_NAME[name].kinds
    ]
    for line in not_covered(request.config):
        print(textwrap.fill(f"not covered: {line}", _WIDTH, subsequent_indent="  "))
    agrees = clean is None or clean.agrees
    if request.self_test:
        skipped = [defect.name for defect in DEFECTS if defect not in request.defects]
        detected = len(planted_) - len(missed)
        line = f"self-test: {detected} of {len(planted_)} planted defects found; not possible here: {_or_none(skipped)}"
        print(textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False))
        status = 0 if agrees and not missed and not misplaced else EXIT_DIVERGES
    else:
        status = 0 if agrees and all(verdict.agrees for verdict in planted_.values()) else EXIT_DIVERGES
        print("result: everything that was compared agrees" if status == 0 else "result: the layout differs")
    if request.json is not None:
        body = {
            "status": status,
            "changes": request.changes,
            "not_covered": list(not_covered(request.config)),
            "result": None if clean is None else as_json(clean),
            "defects": {name: as_json(verdict) for name, verdict in planted_.items()},
        }
        request.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return status


def _or_none(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def not_covered(config: ResolvedConfig) -> Iterator[str]:
    """What agreement says nothing about."""
    yield "the whole model's width, depth, vocabulary and sequence length; 16-bit formats and their loss scale"
    if config.spikes.on_spike == "none":
        yield "the spike guard (--on-spike)"
    if config.parallel.device == "cpu":
        yield "accelerators and NCCL: the ranks compute on CPUs and communicate through gloo"
    yield "Triton kernels; reading of datasets; learning-rate schedules; evaluation; more than three steps"
    yield "errors that a layout and one process make alike, beyond the checks with torch.optim and torch.autograd"
    if config.training.compile and max(config.model.hidden_dropout, config.model.attention_dropout) > 0:
        yield "dropout masks of compiled code"
    if config.training.reproducible and config.parallel.tp > 1 and canonical_blocks(config) == 1:
        yield "bitwise equality: with --reproducible-blocks 1 it is promised for one --tp, and one process has --tp 1"
