"""`tools/plan.py --operators`: the time of a step operator by operator, by a roofline. Rank 0 takes a step on fake
tensors, so that its operators, bytes and FLOPs are counted; only their times are estimated (docs/reports/measured.md,
"Roofline: an estimate")."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, get_args

from megacore.commands.plan_parser import print_json
from megacore.config import ResolvedConfig
from megacore.config.messages import counted
from megacore.errors import ConfigError
from megacore.models.flops import Attention
from megacore.models.outline import outline
from megacore.plan.cluster import Cluster
from megacore.plan.devices import Range
from megacore.plan.memory import RankMemory
from megacore.plan.plan_report import layout_lines
from megacore.plan.planner import CASES, step_flops, usable_bytes
from megacore.plan.roofline import Timing, Totals
from megacore.plan.state import held_experts, updated_parameters
from megacore.plan.traffic import ROLE_NAMES
from megacore.tracer.memory import traced_memory

ROLES: Mapping[str, str] = {
    **ROLE_NAMES,
    "world": "all ranks",
    "dispatch": "expert parallel",
    "expert_layer": "tensor parallel, experts",
    "expert_replicas": "data parallel, experts",
}
_SMALL = 0.004  # share of the step below which operators are listed together
_UNKNOWN = {
    "offload_optimizer": "work of the host",
    "offload_params": "copies over the host link",
    "offload_activations": "copies over the host link",
    "compile": "kernels that are generated on the device",
}


def require_operators(config: ResolvedConfig, cluster: Cluster | None) -> None:
    """The roofline knows all operators of the run. Raises ConfigError with everything that it does not know."""
    parallel, settings = config.parallel, {**vars(config.parallel), **vars(config.training)}
    problems = []
    if not config.is_causal:
        problems.append("--operators knows the operators of GPT models only: use pretrain_gpt.py")
    if cluster is not None and cluster.on_cpu:
        problems.append(f"--operators: {cluster.name} computes on CPUs: use --cluster h100 or another device")
    if parallel.pp > 1:
        problems.append(f"--pp {parallel.pp}: --operators knows no pipeline: use --pp 1, or --tp for large models")
    for field, unknown in _UNKNOWN.items():
        if settings[field]:
            problems.append(f"--{field.replace('_', '-')}: --operators knows no {unknown}: leave it out")
    if problems:
        raise ConfigError(problems)


def run_operators(args: argparse.Namespace, config: ResolvedConfig, cluster: Cluster) -> None:
    """Record a step, and print what its operators take."""
    from megacore.tracer.step_trace import record_step

    config = config.for_device(on_cpu=False)
    given = config.logging.peak_tflops
    peak = cluster.peak(config.precision.precision) if given is None else given * 1e12
    assert peak is not None
    (memory,) = traced_memory(config, outline(config), on_cpu=False)
    events = record_step(config)
    slow, expected, fast = (
        events.timing(cluster.device, microbatches=config.microbatches, case=case, peak=peak) for case in CASES
    )
    seconds = Range(slow.seconds, expected.seconds, fast.seconds)
    if args.json:
        print_json(args, _as_json(config, cluster, expected, seconds, peak, memory))
    else:
        print("\n".join(_report(config, cluster, expected, seconds, peak, memory)))


def _mfu(config: ResolvedConfig, seconds: Range, peak: float) -> dict[str, Range]:
    """Share of the peak that the FLOPs of the model are, by what counts of attention."""
    found, conventions = dict[str, Range](), get_args(Attention)
    for attention in conventions:
        flops = step_flops(config, attention=attention, hardware=False) / config.parallel.ranks
        found[attention] = Range(*(flops / one / peak for one in (seconds.slow, seconds.expected, seconds.fast)))
    return found


def _report(
    config: ResolvedConfig, cluster: Cluster, timing: Timing, seconds: Range, peak: float, memory: RankMemory
) -> Iterator[str]:
    training = config.training
    layout = next(layout_lines(config)).removeprefix("- layout: ")
    experts = "" if config.model.experts is None else ", experts with equally many tokens"
    yield (
        f"Estimate for {config.model.preset or 'the model'} on {config.parallel.ranks} x {cluster.name}: {layout}; "
        f"{counted(config.microbatches, 'microbatch', 'microbatches')} of {training.micro_batch_size} x "
        f"{config.data.seq_length} tokens{experts}"
    )
    yield "Operators, bytes and FLOPs are counted for rank 0; times are estimated, not measured.\n"
    yield "| phase | operator | limited by | launches | GB | TFLOP | ms | share |\n|---|---|---|---|---|---|---|---|"
    total = Totals()
    small: dict[str, tuple[int, Totals]] = {}
    for (phase, kind, name), totals in timing.rows.items():
        total = total if kind == "transfer" else total.plus(totals)
        if totals.seconds >= _SMALL * timing.seconds:
            yield _row(phase, name, kind, totals, timing.seconds)
        else:
            count, others = small.get(phase, (0, Totals()))
            small[phase] = count + 1, others.plus(totals)
    for phase, (count, totals) in small.items():
        yield _row(phase, f"{counted(count, 'other')}", "", totals, timing.seconds)
    yield ""
    tokens = training.global_batch_size * config.data.seq_length
    yield f"Step: {_in_range(seconds, 1e3, '.1f')} ms, {tokens / timing.seconds:,.0f} tokens/s"
    for attention, share in _mfu(config, seconds, peak).items():
        yield f"MFU, {attention} attention: {_in_range(share, 100, '.1f')} %"
    yield f"FLOPs executed: {timing.work / timing.seconds / peak:.1%} of the peak"
    share_of_step = f"{total.seconds * 1e3:.1f} ms ({total.seconds / timing.seconds:.1%} of the step)"
    yield f"Operators: {total.launches:,.0f} launches, {total.bytes / 1e9:,.1f} GB, {share_of_step}"
    for role, exposed in timing.exposed.items():
        yield f"Exposed communication, {ROLES.get(role, role)}: {exposed * 1e3:.1f} ms ({exposed / timing.seconds:.1%})"
    yield f"Waiting for the host: {timing.late * 1e3:.1f} ms ({timing.late / timing.seconds:.1%})"
    update = f"{timing.update * 1e3:.1f} ms ({timing.update / timing.seconds:.1%})"
    yield f"Update: {update}, {_update_bytes(config, timing, memory):.1f} bytes per parameter that the rank updates"
    size = usable_bytes(cluster, config.parallel.ranks)
    fits = "fits" if memory.expected <= size else "does not fit"
    yield f"Memory: {memory.expected / 1e9:.1f} GB expected, traced, of {size / 1e9:.1f} GB usable: {fits}"


def _row(phase: str, name: str, kind: str, totals: Totals, step: float) -> str:
    return (
        f"| {phase} | {name} | {kind} | {totals.launches:,.0f} | {totals.bytes / 1e9:.2f} | "
        f"{totals.flops / 1e12:.2f} | {totals.seconds * 1e3:.2f} | {totals.seconds / step:.1%} |"
    )


def _in_range(values: Range, factor: float, form: str) -> str:
    low, high = sorted((values.slow * factor, values.fast * factor))
    return f"{values.expected * factor:{form}} ({low:{form}} to {high:{form}})"


def _update_bytes(config: ResolvedConfig, timing: Timing, memory: RankMemory) -> float:
    """Bytes of the update per parameter that the rank updates."""
    moved = sum(t.bytes for (phase, kind, _), t in timing.rows.items() if (phase, kind) == ("update", "memory"))
    return moved / updated_parameters(memory.parameters, config, experts=held_experts(config, outline(config)))


def _as_json(
    config: ResolvedConfig, cluster: Cluster, timing: Timing, seconds: Range, peak: float, memory: RankMemory
) -> dict[str, Any]:
    tokens = config.training.global_batch_size * config.data.seq_length
    return {
        "estimate": True,
        "device": cluster.name,
        "step_seconds": asdict(seconds),
        "tokens_per_second": tokens / timing.seconds,
        **{f"mfu_{name}_attention": asdict(share) for name, share in _mfu(config, seconds, peak).items()},
        "executed_share_of_peak": timing.work / timing.seconds / peak,
        "exposed_seconds": {ROLES.get(role, role): exposed for role, exposed in timing.exposed.items()},
        "waiting_for_host_seconds": timing.late,
        "update_seconds": timing.update,
        "update_bytes_per_parameter": _update_bytes(config, timing, memory),
        "memory_bytes": memory.expected,
        "device_memory_bytes": cluster.device.memory_bytes,
        "operators": [
            {"phase": phase, "limited_by": kind, "operator": name, **totals._asdict()}
            for (phase, kind, name), totals in timing.rows.items()
        ],
    }
