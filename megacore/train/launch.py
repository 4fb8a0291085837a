"""From an accepted configuration to an exit status: join the job, run, and leave in order, whatever happens. Exit
statuses: 0 done, 2 refused configuration or input, 3 silent corruption, 4 diverged, 1 any other failure, 124 ended as
hung, 128 + n ended by signal n."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from megacore import ops
from megacore.config import ResolvedConfig, TrainingConfig, violations
from megacore.config.nodes import has_several_nodes
from megacore.errors import (
    EXIT_CORRUPT,
    EXIT_DIVERGED,
    EXIT_HUNG,
    EXIT_REFUSED,
    ConfigError,
    OutputClosed,
    SilentCorruption,
    TrainingDiverged,
    TrainingStopped,
    UserError,
    WorkerDied,
)
from megacore.models.outline import outline
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.compiled import why_not_compile
from megacore.parallel.heartbeat import Phase, section
from megacore.parallel.mesh import (
    Mesh,
    build_mesh,
    compute_deterministically,
    compute_reproducibly,
    has_fast_bf16,
    join_job,
    leave,
    lost_store,
    serves_store,
    world_size,
)
from megacore.pipeline.schedule_choice import choose_schedule, is_open, with_stages_that_fit
from megacore.train.failures import exit_with, lost_connection, outside_cause, report_cause
from megacore.train.freed_memory import keep_what_is_freed
from megacore.train.memory_check import fits_everywhere
from megacore.train.metrics import device_name
from megacore.train.output import output_directory
from megacore.train.peers import PeerWatch
from megacore.train.planning import planner
from megacore.train.same_run import refuse_different_ranks
from megacore.train.starting import announce_stage
from megacore.train.watchdog import watchdog

__all__ = ["exit_with", "launch"]

C = TypeVar("C", bound=ResolvedConfig)
R = TypeVar("R")
EXIT_FAILED = 1
_SECONDS_FOR_A_PEER_TO_DIE = 1.0
_SECONDS_FOR_A_PEER_TO_SPEAK = 5.0
_SECONDS_FOR_PEERS_TO_ASK = 1.0


class Job:
    """This rank's part in a job, from joining to leaving it."""

    def __init__(self) -> None:
        self.watch: PeerWatch | None = None  # of the other ranks, once they have met

    def run(self, config: C, body: Callable[[C, Mesh], R]) -> R:
        """Join, run `body` on this rank of the mesh, and leave. `body`: the training run; returns when it is done."""
        if world_size() > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        if config.training.reproducible:
            compute_reproducibly()
        elif config.training.deterministic:
            compute_deterministically()
        watchdog().begin(config)
        watchdog().rest_in(Phase.BUILD)
        if world_size() > 1:
            announce_stage(f"joining {world_size()} ranks and comparing them")
        device, world = join_job(config.parallel)
        config = for_device(config, device)
        refuse_different_ranks(config, world)
        mesh = build_mesh(config.parallel)
        config = with_pipeline(config, mesh)
        _choose_implementations(config.training, mesh.device)
        if mesh.device.type == "cpu":
            keep_what_is_freed()
        self.watch = PeerWatch(mesh)
        watchdog().note_guard()
        announce_stage("preparing data and model")
        with output_directory(config, mesh) as run_config:
            made = body(run_config, mesh)
        with section(Phase.EXIT):
            self.watch.stop()
            leave(mesh)
        watchdog().end()
        return made


def launch(config: C, body: Callable[[C, Mesh], object]) -> int:
    """Run `body` on this rank of the mesh, and report why if it fails. Returns the exit status."""
    job = Job()
    try:
        job.run(config, body)
        return 0
    except UserError as error:
        problems = "\n".join(f"  - {problem}" for problem in getattr(error, "problems", (str(error),)))
        return _end(f"refused on {_this_rank(job.watch)}:\n{problems}", EXIT_REFUSED, job.watch)
    except SilentCorruption as error:
        return _end(f"stopped: {error}", EXIT_CORRUPT, job.watch)
    except TrainingDiverged as error:
        return _end(f"stopped: {error}", EXIT_DIVERGED, job.watch)
    except (TrainingStopped, OutputClosed) as error:
        return _end(f"stopped: {error}", EXIT_FAILED, job.watch)
    except WorkerDied as error:
        return _end(f"{_this_rank(job.watch)} failed: {error}", EXIT_FAILED, job.watch)
    except Exception as error:
        if cause := outside_cause(error):
            return _end(f"{_this_rank(job.watch)} failed: {cause}", EXIT_FAILED, job.watch)
        if job.watch is not None and (gone := job.watch.dead(_SECONDS_FOR_A_PEER_TO_DIE)):
            job.watch.give_up(gone)  # the exception is only the echo of a death
        if job.watch is None and (deaths := watchdog().died_silently(_SECONDS_FOR_A_PEER_TO_DIE)):
            return _end(f"{deaths}; stopping the others", EXIT_FAILED, job.watch)
        if (lost := lost_store(error)) or (has_several_nodes() and (lost := lost_connection(error))):
            return _end(f"{_this_rank(job.watch)} {lost}", EXIT_FAILED, job.watch)
        what = f"{_this_rank(job.watch)} failed{watchdog().left_their_order()}"
        return _end(f"{what}:\n{traceback.format_exc()}", EXIT_FAILED, job.watch)


def for_device(config: C, device: torch.device) -> C:
    """The configuration with the defaults of the device, which is known for certain only once torch has found it.
    Raises ConfigError where these defaults violate a constraint."""
    config = config.for_device(on_cpu=device.type == "cpu", bf16=has_fast_bf16(device))
    if problems := violations(config, world_size()):
        raise ConfigError(problems)
    return config


def with_pipeline(config: C, mesh: Mesh) -> C:
    """With the schedule that --schedule auto is here, and stages that fit: the first rank predicts, all need room."""
    if config.parallel.pp == 1:
        return config
    layers, schedules = outline(config), None

    def fits(candidate: ResolvedConfig) -> bool:
        return fits_everywhere(candidate, mesh, layers)

    settled: ResolvedConfig = config
    if is_open(config):
        if mesh.world.is_first:
            on_cpu, name = mesh.device.type == "cpu", device_name(mesh.device)
            schedules = planner().schedules_by_time(config, layers, on_cpu=on_cpu, device_name=name)
        settled = choose_schedule(config, all_gather_objects(schedules, mesh.world)[0], fits)
    return cast(C, with_stages_that_fit(settled, fits))


def _choose_implementations(training: TrainingConfig, device: torch.device) -> None:
    problems = []
    if reason := ops.why_not(training.kernels, device):
        problems.append(f"--kernels {training.kernels} {reason}")
    if training.compile and (reason := why_not_compile(training.compile_backend, device)):
        problems.append(f"--compile {reason}")
    if problems:
        raise ConfigError(problems)
    ops.choose_kernels(training.kernels)


def _end(text: str, status: int, watch: PeerWatch | None) -> int:
    """Report a failure once. A launcher ends all ranks as soon as one exits: the others wait for the one to speak."""
    status, is_said = report_cause(text, status)
    if not is_said:
        if watch is None:
            time.sleep(_SECONDS_FOR_A_PEER_TO_SPEAK)
        else:
            watch.stop()  # it would report the end of the one that has spoken, and of the store in which that is known
            watch.dead(_SECONDS_FOR_A_PEER_TO_SPEAK)
    elif serves_store():
        time.sleep(_SECONDS_FOR_PEERS_TO_ASK)  # who speaks; without the store each of them would
    return EXIT_HUNG if watchdog().reported_hang() else status


def _this_rank(watch: PeerWatch | None) -> str:
    return f"rank {os.environ.get('RANK', '0')}" if watch is None else watch.describe(watch.me)
