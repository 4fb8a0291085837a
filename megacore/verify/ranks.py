"""The ranks of a verification: started here or joined, they train the layout and the reference, compare and report."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from megacore.commands.tool import EXIT_FAILED
from megacore.config import ResolvedConfig
from megacore.config.dimensions import degree_fields, named_degrees
from megacore.config.messages import counted
from megacore.config.reproducible import canonical_blocks
from megacore.errors import EXIT_REFUSED, UserError
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Mesh, build_mesh, compute_reproducibly, leave, world_size
from megacore.verify.compare import Verdict, as_json, compare, describe
from megacore.verify.defects import DEFECTS, Defect
from megacore.verify.narrow import STEPS, WARMUP_STEPS
from megacore.verify.reference import Reference, make_reference
from megacore.verify.request import Request
from megacore.verify.run import Record, Recorder, batches, gather, load_steps

EXIT_DIVERGES = 1
_EXIT_RAISED = 3  # of a rank that this tool started; the tool ends with EXIT_FAILED
_SECONDS_TO_END = 10.0
_WIDTH = 118


def verify(request: Request) -> int:
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
