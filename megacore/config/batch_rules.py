"""What must hold between the batch, its microbatches and the replicas that share it."""

from __future__ import annotations

from collections.abc import Iterator

from megacore.config.dimensions import DIMENSIONS, ROLES, degree_fields, fill_degrees, size_of_role
from megacore.config.fields import field_infos
from megacore.config.parallel import ParallelConfig
from megacore.config.problem import Change, Problem, Values, divisors_of, multiples_of
from megacore.config.rampup import ramp_problems
from megacore.config.rules import FURTHER, Rules
from megacore.config.schema import Config

BATCH_RULES = Rules()


@BATCH_RULES.about(*degree_fields(), "micro_batch_size", "global_batch_size")
def _batch(config: Config, world_size: int) -> Iterator[str]:
    parallel, micro, batch = config.parallel, config.training.micro_batch_size, config.training.global_batch_size
    degrees = fill_degrees(parallel, world_size)
    replicas = size_of_role("batch", degrees)  # 0: too few processes, which _processes reports
    if batch is not None and replicas and batch % (micro * replicas):
        sharing = [d for d in DIMENSIONS if d.divides in ROLES["batch"] and isinstance(d.degree, str)]
        given = {str(d.degree): degree for d in sharing if (degree := getattr(parallel, str(d.degree))) is not None}
        factors = " x ".join(
            f"{field_infos(ParallelConfig)[str(d.degree)].flag} {degrees[d.name]}"
            + ("" if d.degree in given else " (derived)")
            for d in sharing
        )
        yield Problem(
            f"--global-batch-size {batch} must be a multiple of --micro-batch-size {micro} x {factors} "
            f"= {micro * replicas}",
            multiples_of("global_batch_size", batch, micro * replicas, bare=True),
            divisors_of("micro_batch_size", micro, batch // replicas) if batch % replicas == 0 else None,
            *(
                divisors_of(name, degree, batch // others)
                for name, degree in given.items()
                if batch % (others := micro * replicas // degree) == 0
            ),
            about=() if len(given) == len(sharing) else degree_fields(),
        )


@BATCH_RULES.about(*degree_fields(), "micro_batch_size", "global_batch_size", "rampup_batch_size", "schedule_csv")
def _ramp(config: Config, world_size: int) -> Iterator[str]:
    if not config.rampup.rampup_batch_size or config.rampup.problems():
        return
    ramp, training, file = config.rampup.ramp(), config.training, config.parallel.schedule_csv
    assert ramp is not None
    replicas = size_of_role("batch", fill_degrees(config.parallel, world_size))
    yield from ramp_problems(ramp, training.global_batch_size, training.micro_batch_size * replicas)
    if file is not None:
        yield (
            f"--rampup-batch-size is not possible with --schedule-csv {file}, which is a schedule of one number of "
            "microbatches: leave one of them out"
        )


@BATCH_RULES.about(
    *degree_fields(), "gradient_noise_interval", "micro_batch_size", "global_batch_size", "trace", "schedule_csv"
)
def _gradient_noise(config: Config, world_size: int) -> Iterator[str]:
    interval, training, file = config.logging.gradient_noise_interval, config.training, config.parallel.schedule_csv
    if not interval:
        return
    given = f"--gradient-noise-interval {interval}"
    small = training.micro_batch_size * size_of_role("batch", fill_degrees(config.parallel, world_size))
    batch = training.global_batch_size or small
    if batch <= small:
        larger = range(2 * small, 2 * small + FURTHER)
        yield Problem(
            f"{given} compares the gradient of one microbatch per replica with that of all of them, and there is one",
            Values(
                name="global_batch_size",
                among=larger,
                near=batch,
                bound="or more",
                most=3,
            ),
            Change("use a smaller --micro-batch-size"),
            about=("micro_batch_size", *degree_fields()),
        )
    if config.logging.trace:
        yield f"{given} adds a pass to steps that --trace records: leave one of them out"
    if file is not None:
        yield f"{given} is not possible with --schedule-csv {file}, which has one number of microbatches: leave it out"
