"""What training takes of a rank's memory, traced: a rank of each kind takes a step on fake tensors (profile.py). From
what its layers did the peak of every rank of the pipeline follows, by the actions of its schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from megacore.config import ResolvedConfig
from megacore.models.outline import ModelLayer
from megacore.pipeline.schedule import Action, Op, Schedule
from megacore.pipeline.schedule_file import training_schedule
from megacore.plan.in_flight import enough_microbatches
from megacore.plan.memory import RankMemory, as_computed, copied_logits, held_state, microbatches_in_flight
from megacore.plan.stages import StagedModel
from megacore.tracer.cache import profiles_of
from megacore.tracer.step_memory import MOST_UNLIKE, StepProfile, alike, change_of, left_by, peak_of, successions


def traced_rank(
    config: ResolvedConfig, layers: Sequence[ModelLayer], rank: int, *, on_cpu: bool, number: int | None = None
) -> RankMemory:
    """The memory of one rank of a pipeline, which takes a step on fake tensors. Loads torch, unless it is known.
    `layers`: the whole model. `on_cpu`: whether the ranks compute in host memory. `number`: of the rank in its stage;
    None: the one that keeps most."""
    config = as_computed(config, on_cpu=on_cpu)
    staged = StagedModel(config, layers)
    (profile,) = profiles_of(config, [rank], on_cpu=on_cpu, shares_work=False)
    on_rank = staged.on_rank(config, rank)
    like = [alike(config, chunk)[1] for chunk in on_rank.chunks]
    held = held_state(config, on_rank, rank=rank, on_cpu=on_cpu, number=number)
    return _traced(config, held, profile, like, list(_schedule(config).action_groups(rank)))


def traced_memory(
    config: ResolvedConfig, layers: Sequence[ModelLayer], *, on_cpu: bool, copies_logits: bool = False
) -> list[RankMemory]:
    """The memory of the ranks of a pipeline, of which one of each kind takes a step on fake tensors; arguments as for
    `plan_memory`. Loads torch, unless all kinds have been traced before."""
    config = as_computed(config, on_cpu=on_cpu)
    staged, kinds = StagedModel(config, layers), dict[Hashable, list[int]]()
    schedule = _schedule(config)
    stages = {
        rank: [alike(config, chunk) for chunk in staged.on_rank(config, rank).chunks] for rank in range(staged.ranks)
    }
    for rank, of_rank in stages.items():
        chunks = staged.on_rank(config, rank).chunks
        built = tuple(tuple(id(chunk[n]) for n in numbers) for chunk, (numbers, _) in zip(chunks, of_rank, strict=True))
        kinds.setdefault((rank == 0, built, _actions(config, schedule, rank)), []).append(rank)
    # Of ranks that are alike the last one fills the pipeline with the fewest microbatches.
    profiles, found = (
        profiles_of(config, [ranks[-1] for ranks in kinds.values()], on_cpu=on_cpu),
        dict[int, RankMemory](),
    )
    for ranks, profile in zip(kinds.values(), profiles, strict=True):
        for rank in ranks:
            held = held_state(config, staged.on_rank(config, rank), rank=rank, on_cpu=on_cpu)
            like = [numbers for _, numbers in stages[rank]]
            found[rank] = _traced(config, held, profile, like, list(schedule.action_groups(rank)))
    if copies_logits:
        holder = staged.placement.rank_of(len(staged.chunks) - 1)
        last = found[holder]
        found[holder] = dataclasses.replace(last, working=max(last.working, copied_logits(config)))
    return [found[rank] for rank in range(staged.ranks)]


def _schedule(config: ResolvedConfig) -> Schedule:
    """What the ranks do in a step, of as many microbatches as fill the pipeline alike, and as a profile has."""
    count = max(enough_microbatches(config.parallel, config.microbatches), MOST_UNLIKE)
    return training_schedule(config.parallel, min(count, config.microbatches))


def _actions(config: ResolvedConfig, schedule: Schedule, rank: int) -> Hashable:
    """What the actions of ranks that are alike have in common."""
    if config.parallel.schedule_csv is None:
        return successions(config, rank, schedule.microbatches)
    order = schedule.computations(rank)
    before = left_by(config, order)
    return tuple((a.op, a.stage // schedule.ranks, left) for a, left in zip(order, before, strict=True))


def _traced(
    config: ResolvedConfig,
    held: RankMemory,
    profile: StepProfile,
    like: Sequence[Sequence[int]],
    order: Sequence[tuple[bool, Sequence[Action]]],
) -> RankMemory:
    """A rank with its state, `held`, and what a profile says of its actions; other arguments as for `peak_of`."""
    peak = peak_of(profile, like, order, config)
    gradients = held.state["grads"] - held.host.get("grads", 0.0)
    on_host = {"activations": float(peak.on_host)} if peak.on_host else {}
    return dataclasses.replace(
        held,
        host={**held.host, **on_host},
        activations=float(peak.kept),
        in_flight=sum(microbatches_in_flight(config, held.pp_rank)),
        working=float(profile.beside_state + peak.bytes - peak.kept - peak.made),
        updating=float(profile.updating),
        absent=held.absent + (1 - profile.lasting_gradients) * gradients - peak.made,
        microbatch=[
            change_of(numbers, profile.passes[Op.FORWARD, stage][0].passages, Op.FORWARD).net
            for stage, numbers in enumerate(like)
        ],
        is_traced=True,
    )
