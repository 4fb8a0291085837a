"""Mistakes of gauntlet.toml in other trainers: does anything in them find these?

    .venv-peers/bin/python -m benchmarks.gauntlet_peers --page docs/reports/published-bugs.md      # after make peers

Trains as benchmarks/compare.py does, on two ranks of gloo, with mistakes that can be made at torch.distributed and
torch.optim, which these trainers call from Python: sums of gradients or activations, gathered or broadcast weights,
moments. The trainers' own checks are switched on: hashes of replicas in Megatron-Core
(check_param_hashes_across_dp_replicas, after the run), enable_sanity_checks in DeepSpeed. A cell has a word for each
layout:

    found         the trainer says so: it raises an error, its check fails, or it logs a line of none of its clean runs
    never         losses change by more than rounding, and it says nothing
    no-change     no loss changes: twice a gradient does not, as nothing is clipped and Adam divides it out
    hang, crash   ranks give no answer in time, or die without a word
    unsupported   runs without a mistake fail, or differ from each other
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing
import os
import queue
import re
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.comparison.job import Job, Sizes, layout_of
from tools.generated_pages import bring_up_to_date

PEERS = ("deepspeed", "megatron-core")  # torch's own wrappers sum gradients in C++
_MARKERS = "<!-- written by benchmarks/gauntlet_peers.py: begin -->", "<!-- end of others -->"
STEPS, RANKS, SECONDS, CLEAN_RUNS = 12, 2, 240, 3
_GRACE = 10.0  # seconds for the other ranks once one has raised an error
SIZES = Sizes(layers=2, hidden=32, heads=4, seq=16, vocab=128, batch=4)
_LARGE = 1000  # elements of gradients and activations; norms and counts are smaller
_SUMS, _SCATTERED = ("all_reduce", "reduce"), ("reduce_scatter_tensor", "_reduce_scatter_base")
_GATHERED = ("all_gather_into_tensor", "_all_gather_base", "all_gather")
_REAL = {name: getattr(dist, name) for name in (*_SUMS, *_SCATTERED, *_GATHERED, "broadcast")}
Change = Callable[..., Any]  # takes the real function, what it writes to, what it reads, and further arguments


def _lost(real: Change, to: Any, of: Any, *rest: Any, only: int | None = None, **more: Any) -> Any:
    """The others' part of a sum or of gathered tensors does not arrive, or not on one rank."""
    if only not in (None, dist.get_rank()):
        return real(to, of, *rest, **more) if of is not None else real(to, *rest, **more)
    copy = [part.clone() for part in to] if isinstance(to, list) else to.clone()
    work = real(copy, of, *rest, **more) if of is not None else real(copy, *rest, **more)
    if isinstance(to, list):
        to[dist.get_rank()].copy_(of)
    elif of is not None and of.numel() > to.numel():
        to.view(-1).copy_(of.reshape(RANKS, -1)[dist.get_rank()])
    elif of is not None:
        to.view(RANKS, -1)[dist.get_rank()].copy_(of.view(-1))
    return work


def _in_bf16(real: Change, to: Any, of: Any, *rest: Any, **more: Any) -> Any:
    """What is summed has lost digits."""
    if of is None:
        return real(to.copy_(to.bfloat16()), *rest, **more)
    return real(to, of.bfloat16().to(of.dtype), *rest, **more)


@dataclass(frozen=True)
class Mistake:
    """`change` stands for `functions` of torch.distributed, called in backward, in forward, or anywhere (None)."""

    layouts: tuple[str, ...]
    functions: tuple[str, ...] = (*_SUMS, *_SCATTERED)
    change: Change = _lost
    backward: bool | None = None


_REPLICAS = ("dp", "zero1", "zero2")
MISTAKES = {
    "missing-dp-sum": Mistake(_REPLICAS),
    "early-gradient-read": Mistake(_REPLICAS, change=partial(_lost, only=1)),
    "bf16-accumulation": Mistake(_REPLICAS, change=_in_bf16),
    "stale-parameters": Mistake(("zero1", "zero2"), _GATHERED),
    "missing-tp-forward-sum": Mistake(("tp",), backward=False),
    "missing-tp-backward-sum": Mistake(("tp",), backward=True),
    "replicas-begin-apart": Mistake(("dp",), ("broadcast",)),
    "lost-moments": Mistake(_REPLICAS, ()),  # in torch.optim
}


class Planted:
    """Stands before functions of torch.distributed, and makes a mistake in large tensors of floats."""

    def __init__(self) -> None:
        self.mistake: Mistake | None = None

    def begin(self) -> None:
        """Before a trainer is imported, which takes the functions."""
        for name in _REAL:
            setattr(dist, name, partial(self._call, name))

    def _call(self, name: str, *words: Any, **more: Any) -> Any:
        names = ["tensor"] if name in (*_SUMS, "broadcast") else ["output_tensor", "input_tensor"]
        names = {"all_gather": ["tensor_list", "tensor"], "reduce_scatter_tensor": ["output", "input"]}.get(name, names)
        names = ["output", "input"] if name == "_reduce_scatter_base" else names
        given = [*words, *(more.pop(of) for of in names[len(words) :])]
        to, of = given[0], given[1] if len(names) == 2 else None
        first, mistake = to[0] if isinstance(to, list) else to, self.mistake
        is_meant = first.is_floating_point() and max(first.numel(), 0 if of is None else of.numel()) >= _LARGE
        is_backward = torch._C._current_autograd_node() is not None
        if (
            mistake is None
            or name not in mistake.functions
            or not is_meant
            or mistake.backward not in (None, is_backward)
        ):
            return _REAL[name](*given, **more)
        return mistake.change(_REAL[name], to, of, *given[len(names) :], **more)


PLANTED = Planted()


def checked(peer: str) -> str:
    """What a trainer's own check of replicas says after the run."""
    if peer != "megatron-core":
        return ""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.utils import check_param_hashes_across_dp_replicas

    models = [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
    return "" if check_param_hashes_across_dp_replicas(models, cross_check=True) else "hashes of replicas differ"


def _with_checks(initialize: Change, *, config: dict[str, Any], **more: Any) -> Any:
    config["zero_optimization"]["enable_sanity_checks"] = True
    return initialize(config=config, **more)


def train(rank: int, side: Any, job: Job, mistake: str, answers: Any) -> None:
    """One rank's run; sends its losses, the error that ended it, and what its check found."""
    log = os.open(f"{job.directory}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    torch.manual_seed(rank if mistake == "replicas-begin-apart" else 0)
    losses, error, found = list[float](), "", ""
    PLANTED.mistake = MISTAKES.get(mistake)
    if job.side == "deepspeed":
        deepspeed: Any = sys.modules["deepspeed"]
        backend: Any = sys.modules["deepspeed.comm.torch"]
        backend.build_shm_op = lambda: None  # a shortcut for inference, which takes minutes to compile
        deepspeed.initialize = partial(_with_checks, deepspeed.initialize)
    take, taken = torch.optim.AdamW.step, 0

    def without_moments(optimizer: Any, *words: Any, **more: Any) -> Any:
        nonlocal taken
        taken += 1
        for state in optimizer.state.values() if taken == STEPS // 2 else ():
            state["exp_avg"].zero_(), state["exp_avg_sq"].zero_()
        return take(optimizer, *words, **more)

    try:
        with patch.object(torch.optim.AdamW, "step", without_moments if mistake == "lost-moments" else take):
            step = side.build(job)
            for _ in range(STEPS):
                losses.append(float(step() or 0.0))
        PLANTED.mistake = None
        found = checked(job.side)
    except BaseException as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {' '.join(str(raised).split())[:80]}"
    answers.put((rank, losses, error, found))
    answers.close(), answers.join_thread()
    os._exit(0)


@dataclass(frozen=True)
class Run:
    """What two ranks did."""

    losses: Sequence[Sequence[float]]  # of each rank that answered
    said: str = ""  # the error that a rank raised, or what its check found
    ended: str = ""  # "hang" or "crash", where a rank did not answer
    lines: frozenset[str] = frozenset()  # of the logs, without their numbers


def run(side: Any, peer: str, kind: str, mistake: str, tokens: str) -> Run:
    """Train with a mistake, or with none ("")."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        layout, stages = layout_of(kind, RANKS), [(0, SIZES.layers + 2)]
        job = Job(
            side=peer, sizes=SIZES, layout=layout, stages=stages, tokens=tokens, weights=None, directory=directory
        )
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        answers: Any = context.Queue()
        ranks = [context.Process(target=train, args=(rank, side, job, mistake, answers)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        said, until = list[tuple[int, list[float], str, str]](), time.monotonic() + SECONDS
        while len(said) < RANKS and time.monotonic() < until:
            is_over = not any(process.is_alive() for process in ranks)  # before the look for what they left
            try:
                said.append(answers.get(timeout=1))
            except queue.Empty:
                if is_over:
                    break
            if any(error for _, _, error, _ in said):  # the others may wait for that rank
                until = min(until, time.monotonic() + _GRACE)
        ended = "" if len(said) == RANKS else "hang" if any(process.is_alive() for process in ranks) else "crash"
        for process in ranks:
            process.kill()
            process.join()
        logs = "\n".join(path.read_text(errors="replace") for path in Path(directory).glob("*.log"))
    said.sort()
    lines = frozenset(re.sub(r"0x[\da-f]+|\d[\d.:,]*(e[+-]?\d+)?", "", line).strip() for line in logs.splitlines())
    return Run([losses for _, losses, _, _ in said], next((e or f for _, _, e, f in said if e or f), ""), ended, lines)


def verdict(run: Run, clean: Sequence[Run]) -> str:
    """The word for a run with a mistake. `clean`: several without one."""
    if any(each.said or each.ended or not _alike(each, clean[0]) for each in clean):
        return "unsupported"
    news = sorted(run.lines.difference(*(each.lines for each in clean)))
    if run.said or news:
        return f"found:{run.said or news[0]}"
    return run.ended or ("no-change" if _alike(run, clean[0]) else "never")


def _alike(run: Run, other: Run) -> bool:
    """Whether their losses are equal but for rounding."""
    if list(map(len, run.losses)) != list(map(len, other.losses)):
        return False
    pairs = zip(chain(*run.losses), chain(*other.losses), strict=True)
    return all(abs(a - b) <= 1e-6 * abs(b) for a, b in pairs)


def tried(peer: str, only: str, tokens: str) -> Iterator[tuple[str, str, str]]:
    """Mistake, layout, and the word for it in a trainer."""
    side = importlib.import_module(f"benchmarks.comparison.sides.{peer.replace('-', '_')}")
    clean = dict[str, list[Run]]()
    for name, mistake in MISTAKES.items():
        for kind in mistake.layouts if only in name else ():
            if kind not in clean:
                clean[kind] = [run(side, peer, kind, "", tokens) for _ in range(CLEAN_RUNS)]
            done = verdict(run(side, peer, kind, name, tokens), clean[kind])
            print(f"{peer:<14} {kind:<6} {name:<26} {done}", flush=True)
            yield name, kind, done


def main() -> int:
    """Try the mistakes in the trainers that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=[*PEERS], choices=PEERS)
    parser.add_argument("--only", default="", metavar="WORD", help="mistakes whose name has WORD")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table to a page")
    options = parser.parse_args()
    PLANTED.begin()
    cells: dict[str, list[str]] = {name: [] for name in MISTAKES}
    with tempfile.TemporaryDirectory() as directory:
        tokens = f"{directory}/tokens.npy"
        np.save(tokens, np.random.default_rng(0).integers(0, SIZES.vocab, (STEPS * SIZES.batch, SIZES.seq + 1)))
        for peer in options.peers:
            by = dict[str, dict[str, list[str]]]()
            for name, kind, found in tried(peer, options.only, tokens):
                by.setdefault(name, {}).setdefault(found, []).append(kind)
            for name in MISTAKES:
                said = [f"{'-'.join(found.split())}({','.join(kinds)})" for found, kinds in by.get(name, {}).items()]
                cells[name].append(";".join(said))
    if options.page:
        rows = [f"|{name}|{'|'.join(cells[name])}|" for name in MISTAKES]
        head = [f"|mistake|{'|'.join(options.peers)}|", "|-" * (1 + len(options.peers)) + "|"]
        bring_up_to_date(options.page, "\n".join([*head, *rows]), _MARKERS, writes=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
