"""The command-line tool: validate, start the ranks or join those of torchrun, compare, report."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import socket
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megacore.commands.plan_parser import ENTRIES
from megacore.commands.tool import EXIT_FAILED, PassingParser, ToolParser, require_none, run_tool
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
from megacore.errors import EXIT_REFUSED, Collected, UserError
from megacore.inference.program import layers_of
from megacore.models.gpt import gpt_layers
from megacore.models.outline import outline
from megacore.models.spec import DescribesLayers
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Mesh, build_mesh, compute_reproducibly, leave, world_size
from megacore.pipeline.schedule_choice import choose_schedule, is_open
from megacore.pipeline.schedule_file import check_schedule
from megacore.train.planning import planner
from megacore.verify.compare import Verdict, as_json, compare, describe
from megacore.verify.defects import BY_NAME, DEFECTS, Defect
from megacore.verify.narrow import STEPS, WARMUP_STEPS, narrow
from megacore.verify.reference import Reference, make_reference
from megacore.verify.run import Record, Recorder, batches, gather, load_steps

EXIT_DIVERGES = 1
_EXIT_RAISED = 3  # of a rank that this tool started; the tool ends with EXIT_FAILED
# The memory of the whole model is not checked: a small copy runs.
_GPT_CHECKS, _BERT_CHECKS = (check_inputs, check_init_from_hf, check_schedule), (check_bert_inputs, check_schedule)
_SECONDS_TO_END = 10.0
_MOST_RANKS = 64
_WIDTH = 118


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for."""

    config: ResolvedConfig  # of the layout, narrowed
    layers: DescribesLayers  # describes a GPT
    changes: tuple[str, ...]  # what narrowing changed
    defects: tuple[Defect, ...]  # to plant, one run each
    self_test: bool  # whether they must all be found
    json: Path | None  # file for the result, or None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 everything agrees, 1 something differs or a run failed, 2 refused."""
    parser = make_parser()

    def run(args: argparse.Namespace) -> int:
        if not args.list_defects:
            return _verify(request_of(parser, args))
        require_none(args.problems)
        for defect in DEFECTS:
            print(f"{defect.name:<28}{defect.what}" + (f" (needs {defect.needs})" if defect.needs else ""))
        return 0

    return run_tool(parser, argv, run)


def make_parser() -> ToolParser:
    """The parser of the tool's flags. It leaves the others to the trainer, as `flags`."""
    parser = PassingParser(
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
    parser.flag("--self-test", "inject every defect that the layout can have; each must be found")
    parser.flag("--defect NAME", "inject one defect, and show its report")
    parser.flag("--list-defects", "list the defects, and end")
    parser.flag("--json FILE", "write the complete result to FILE as JSON")
    return parser


# ---- the request


def request_of(parser: ToolParser, args: argparse.Namespace) -> Request:
    """What a command line asks for. `parser`: of `make_parser`, for its refusals. Raises SystemExit where the trainer
    refuses its flags; the message is printed."""
    problems: list[str] = args.problems
    program, *words = args.flags or [""]
    name = Path(program).name
    layers: DescribesLayers = gpt_layers
    if name not in ENTRIES and name.endswith(".py") and Path(program).is_file():
        with Collected(problems):
            layers = layers_of(program)
    elif name not in ENTRIES:
        near = nearest_name(name, ENTRIES)
        hint = f"; did you mean {near}?" if near else ""
        given = f"not {program!r}" if program else "and nothing was given"
        ways = "pretrain_gpt.py, pretrain_bert.py or a file of your own"
        problems.append(f"the first word must be {ways}, {given}{hint}")
        words = args.flags if program.startswith("-") else words
    if args.self_test and args.defect is not None:
        problems.append("--self-test plants every defect and --defect one of them: keep one of the two")
    if args.defect is not None and args.defect not in BY_NAME:
        near = nearest_name(args.defect, BY_NAME)
        hint = f": did you mean {near}?" if near else ""
        problems.append(f"--defect {args.defect} is unknown{hint} (--list-defects)")
    path = None if args.json is None else Path(args.json)
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        problems.append(f"--json {path} must be a file in a directory that exists and can be written to")
    narrowed = narrow(_config(name, words, problems))
    config, ranks = narrowed.config, narrowed.config.parallel.ranks
    if "WORLD_SIZE" not in os.environ and ranks > _MOST_RANKS:
        parser.error(
            f"the layout has {ranks} ranks, and this tool starts at most {_MOST_RANKS} on a machine: use smaller --tp, "
            "--pp or --dp (two of each show the same defects), or start it under torchrun"
        )
    defects: tuple[Defect, ...] = () if args.defect is None else (BY_NAME[args.defect],)
    for defect in defects:
        if not defect.possible(config):
            parser.error(f"--defect {defect.name} is not possible with this layout: it needs {defect.needs}")
    if args.self_test:  # planted functions would be missing from compiled code
        config = replace(config, training=replace(config.training, compile=False))
        defects = tuple(defect for defect in DEFECTS if defect.possible(config))
    return Request(
        config=config,
        layers=layers,
        changes=narrowed.changes,
        defects=defects,
        self_test=args.self_test,
        json=path,
    )


def _config(name: str, words: Sequence[str], problems: Sequence[str]) -> ResolvedConfig:
    """The resolved configuration, or the trainer's refusal with the tool's `problems`; what only a real run needs gets
    a value."""
    is_bert = name == "pretrain_bert.py"
    kind: type[Any] = BertConfig if is_bert else Config
    given = read_flags(words, kind).values
    if (path := given.pop("config", None)) is not None:
        with contextlib.suppress(UserError, OSError):
            given = {**read_toml(path, kind).values, **given}
    added = [] if given.get("data_path") or given.get("mock_data") else ["--mock-data"]
    if given.get("train_iters") is None:
        added += ["--train-iters", "1000000"]  # no setting is beyond this run
    if given.get("vocab_size") is None and not any(map(given.get, ("preset", "tokenizer", "init_from_hf"))):
        added += ["--vocab-size", "512"]
    if given.get("spare_ranks"):
        added += ["--spare-ranks", "0"]  # nothing is lost here
    # The trainer sees as many processes as the layout needs, unless torchrun has started some.
    degrees = [degree for field in degree_fields() if isinstance(degree := given.get(field), int) and degree > 0]
    launched = {"RANK": "0", "WORLD_SIZE": f"{math.prod(degrees)}", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with patch.dict(os.environ, {} if "WORLD_SIZE" in os.environ else launched):
        config: ResolvedConfig = parse_config(
            [*words, *added],
            prog=name,
            description="",
            kind=kind,
            shape=None if is_bert else shape_from_hf,
            vocabulary=vocabulary_size,
            checks=_BERT_CHECKS if is_bert else _GPT_CHECKS,
            problems=problems,
            exits=not problems,
        )
    if is_open(config):  # as a launch on a CPU chooses
        choices = planner().schedules_by_time(config, outline(config), on_cpu=True)
        return choose_schedule(config, choices, lambda candidate: True)
    return config


# ---- processes


def _verify(request: Request) -> int:
    """Verify on the ranks of the job, or on ranks that are started here; returns the exit status."""
    ranks = request.config.parallel.ranks
    if ranks == 1 or "WORLD_SIZE" in os.environ:
        return run_rank(request)
    torch.set_num_threads(1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_child, args=(request, rank, port), daemon=True) for rank in range(ranks)]
    try:
        for process in processes:
            process.start()
        return _status(processes)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(_SECONDS_TO_END)


def _child(request: Request, rank: int, port: int) -> None:
    ranks = str(request.config.parallel.ranks)
    os.environ.update(
        {"RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": ranks}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        | {"OMP_NUM_THREADS": "1", "TORCH_GLOO_LAZY_INIT": "1"}
    )
    status = run_rank(request)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status(processes: Sequence[BaseProcess]) -> int:
    """The ranks' status once all have ended; that of the first that fails, at once."""
    while True:
        codes = [process.exitcode for process in processes]
        for rank, code in enumerate(codes):
            if code is not None and code < 0:
                print(f"verify.py: no result: rank {rank} was ended by signal {-code}", file=sys.stderr)
                return EXIT_FAILED
        if EXIT_REFUSED in codes or _EXIT_RAISED in codes:
            return EXIT_REFUSED if EXIT_REFUSED in codes else EXIT_FAILED
        if None not in codes:
            return max(code or 0 for code in codes)
        wait([process.sentinel for process, code in zip(processes, codes, strict=True) if code is None])


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
    reference, checkpoint = None, None
    with contextlib.ExitStack() as stack:
        if mesh.world.rank == 0:
            folder = tempfile.TemporaryDirectory(prefix="verify-", dir=_shared(config), ignore_cleanup_errors=True)
            directory = Path(stack.enter_context(folder))
            for line in _heading(request):
                print(textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False), flush=True)
            reference = make_reference(config, directory, mesh.device, request.layers)
            checkpoint = str(reference.checkpoint)
        checkpoint = all_gather_objects(checkpoint, mesh.world)[0]
        verdicts = dict[str, Verdict]()
        for defect in (None, *request.defects) if request.self_test or not request.defects else request.defects:
            record = _run_layout(request, mesh, Path(checkpoint), defect)
            if record is not None and reference is not None:
                verdict = verdicts[defect.name if defect else ""] = compare(record, reference, config)
                for line in _lines(verdict, reference, defect if request.self_test else None):
                    print(line, flush=True)
        status = 0 if reference is None else _conclude(request, verdicts)
        status = max(all_gather_objects(status, mesh.world))
        leave(mesh)
        return status


def _shared(config: ResolvedConfig) -> Path | None:
    """Where the checkpoint of the warm-up goes: for several nodes a place that all of them see; None: anywhere."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", ranks) == ranks:
        return None
    output = Path(config.training.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    return output


def _run_layout(request: Request, mesh: Mesh, checkpoint: Path, defect: Defect | None) -> Record | None:
    """Train the layout, with a defect or without; the record on rank 0."""
    steps = load_steps(request.config, mesh, checkpoint, request.layers)
    recorder = Recorder(steps)
    with contextlib.nullcontext() if defect is None else defect.planted(steps):
        recorder.run(batches(request.config, mesh, steps.task, after=WARMUP_STEPS))
    return gather(recorder, mesh)


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


def _conclude(request: Request, verdicts: Mapping[str, Verdict]) -> int:
    """Print what follows, and write the JSON file; returns the exit status."""
    clean, planted = verdicts.get(""), {name: verdict for name, verdict in verdicts.items() if name}
    gaps = list(not_covered(request.config))
    for line in gaps:
        print(textwrap.fill(f"not covered: {line}", _WIDTH, subsequent_indent="  "))
    agrees = clean is None or clean.agrees
    if request.self_test:
        found = {name: verdict.first.key.kind for name, verdict in planted.items() if verdict.first is not None}
        agrees = agrees and all(found.get(defect.name) in defect.kinds for defect in request.defects)
        skipped = ", ".join(defect.name for defect in DEFECTS if defect not in request.defects) or "none"
        line = f"self-test: {len(found)} of {len(planted)} planted defects found; not possible here: {skipped}"
        print(textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    else:
        agrees = agrees and all(verdict.agrees for verdict in planted.values())
        print("result: everything that was compared agrees" if agrees else "result: the layout differs")
    status = 0 if agrees else EXIT_DIVERGES
    if request.json is not None:
        body = {
            "status": status,
            "changes": request.changes,
            "not_covered": gaps,
            "result": None if clean is None else as_json(clean),
            "defects": {name: as_json(verdict) for name, verdict in planted.items()},
        }
        request.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return status


def not_covered(config: ResolvedConfig) -> Iterator[str]:
    """What agreement says nothing about."""
    yield "the whole model's width, depth, vocabulary and sequence length; 16-bit formats and their loss scale"
    if config.spikes.on_spike == "none":
        yield "the spike guard (--on-spike)"
    if config.parallel.device == "cpu":
        yield "accelerators and NCCL: the ranks compute on CPUs and communicate through gloo"
    yield "Triton kernels; reading of datasets; learning-rate schedules; more than three steps"
    yield "errors that a layout and one process make alike, beyond the checks with torch.optim and torch.autograd"
    if config.training.compile and max(config.model.hidden_dropout, config.model.attention_dropout) > 0:
        yield "dropout masks of compiled code"
    if config.training.reproducible and config.parallel.tp > 1 and canonical_blocks(config) == 1:
        yield "bitwise equality: with --reproducible blocks=1 it is promised for one --tp, and one process has --tp 1"
