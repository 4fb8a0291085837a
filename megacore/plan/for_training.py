"""What the planner tells a run that starts (megacore/train/planning.py)."""

from __future__ import annotations

from collections.abc import Sequence

from megacore.config import ResolvedConfig
from megacore.models.outline import ModelLayer
from megacore.parallel.host_memory import AvailableMemory
from megacore.pipeline.schedule_choice import ScheduleChoice
from megacore.plan import fastest_schedule, fit
from megacore.plan.memory import fullest_state, plan_memory
from megacore.train.planning import MemoryVerdict, Planner, PredictedMemory


class _Planner(Planner):
    def check_memory(self, config: ResolvedConfig) -> None:
        fit.check_memory(config)

    def device_verdict(
        self, config: ResolvedConfig, layers: Sequence[ModelLayer], stage: int, memory: AvailableMemory | None
    ) -> MemoryVerdict:
        problem = None if memory is None else fit.device_problem(config, layers, stage, memory)
        if problem is None and (config.parallel.offload_optimizer or config.training.offload_activations):
            problem = fit.offload_problem(config, layers)
        if problem or memory is None:
            return MemoryVerdict(problem)
        return MemoryVerdict(warning=fit.device_warning(config, layers, stage, memory))

    def host_verdict(self, config: ResolvedConfig, layers: Sequence[ModelLayer]) -> MemoryVerdict:
        if problem := fit.host_problem(config, layers, torch_is_loaded=True):
            return MemoryVerdict(problem)
        return MemoryVerdict(warning=fit.host_warning(config, layers))

    def predicted_memory(
        self, config: ResolvedConfig, layers: Sequence[ModelLayer], stage: int, *, on_cpu: bool
    ) -> PredictedMemory:
        ranks = plan_memory(config, layers, on_cpu=on_cpu)
        return PredictedMemory(fullest_state(ranks), ranks[stage].expected)

    def schedules_by_time(
        self, config: ResolvedConfig, layers: Sequence[ModelLayer], *, on_cpu: bool, device_name: str = ""
    ) -> list[ScheduleChoice]:
        cluster = fastest_schedule.typical_cluster(on_cpu=on_cpu, device_name=device_name)
        return fastest_schedule.schedules_by_time(config, layers, cluster)


PLANNER = _Planner()
