"""Estimate the time of a training step on a device that need not be there, operator by operator.

    python tools/roofline.py --preset llama-3-8b --device h200
    python tools/roofline.py --preset llama-3-8b --tp 8 --device h100 --json

Takes the flags of pretrain_gpt.py. Without --config, --precision is bf16 and the data are --mock-data unless given.
The step runs on fake tensors, so that its operators, bytes and FLOPs are counted; only their times are estimated
(docs/reports/measured.md).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if importlib.util.find_spec("megacore") is None:  # a bare checkout, which nothing has installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import megacore
from megacore.commands.tool import ToolParser, run_tool
from megacore.config import Config, ResolvedConfig
from megacore.config.cli import parse_config
from megacore.config.help import help_topic
from megacore.config.messages import counted
from megacore.convert.start import shape_from_hf
from megacore.data.gpt.build import vocabulary_size
from megacore.errors import ConfigError
from megacore.models.flops import flops_per_sequence
from megacore.models.outline import outline
from megacore.plan.devices import DEVICES, Device, Range, device_named
from megacore.plan.memory import plan_memory
from megacore.plan.roofline import Estimate, Totals, estimate
from megacore.plan.state import held_experts, updated_parameters

ROLES = {
    "layer": "tensor parallel",
    "replicas": "data parallel",
    "world": "all ranks",
    "dispatch": "expert parallel",
    "expert_layer": "tensor parallel, experts",
    "expert_replicas": "data parallel, experts",
}
SMALL = 0.004  # share of the step below which operators are listed together


class _Parser(ToolParser):
    """Leaves the flags that it does not know to pretrain_gpt.py's parser."""

    def parse_args(self, argv: Any = None, namespace: Any = None) -> Any:
        argv = sys.argv[1:] if argv is None else argv
        if (topic := help_topic(argv)) and topic not in self._option_string_actions:
            _read_config(["--help", topic])  # prints a page of that parser, and exits
        known, rest = self.parse_known_args(argv, namespace)
        known.flags = rest
        return known


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 done, 2 refused."""
    parser = _Parser(
        prog="roofline.py",
        usage="roofline.py --device NAME [--json] [flags of pretrain_gpt.py]",
        description="Estimate the time of a training step on a device, by a roofline over the operators that it "
        "launches. All other flags are those of pretrain_gpt.py, such as --preset, --tp and --micro-batch-size: "
        "--help all lists them, as pretrain_gpt.py --help all does. --precision auto is bf16.",
        allow_abbrev=False,
    )
    names = ", ".join(device.name for device in DEVICES)
    parser.add_argument("--device", required=True, metavar="NAME", help=f"device that computes: {names}")
    parser.add_argument("--version", action="version", version=f"megacore {megacore.__version__}")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    return run_tool(parser, argv, _run)


def _run(args: argparse.Namespace) -> None:
    device = device_named(args.device)
    config = _read_config(_with_defaults(args.flags)).for_device(on_cpu=False, bf16=True)
    peak = _require_known(config, device)
    from megacore.tracer.step_trace import record_step

    microbatches, training, model = config.microbatches, config.training, config.model
    sequences = microbatches * training.micro_batch_size / (config.parallel.tp * config.parallel.cp)  # of a rank
    flops = [sequences * flops_per_sequence(model, config.data.seq_length, attention=a) for a in ("full", "causal")]
    result = estimate(
        record_step(config),
        device,
        microbatches=microbatches,
        tokens=training.global_batch_size * config.data.seq_length,
        model_flops=flops[0],
        causal_flops=flops[1],
        peak=peak,
    )
    print(json.dumps(_as_json(result, config), indent=1) if args.json else "\n".join(_report(result, config)))


def _read_config(flags: Sequence[str]) -> ResolvedConfig:
    """The configuration of the run, by the parser of pretrain_gpt.py."""
    return parse_config(
        flags,
        prog="roofline.py",
        description="Estimate the time of a training step on a device.",
        kind=Config,
        shape=shape_from_hf,
        vocabulary=vocabulary_size,
        planned=True,
    )


def _with_defaults(flags: Sequence[str]) -> list[str]:
    given = {flag.split("=")[0] for flag in flags}
    if "--config" in given:
        return list(flags)
    defaults = [] if given & {"--mock-data", "--data-path"} else ["--mock-data"]
    defaults += [] if "--train-iters" in given else ["--train-iters", "2"]
    return [*defaults, *flags]


def _require_known(config: ResolvedConfig, device: Device) -> float:
    """FLOP/s of the device's products.

    Raises:
        ConfigError: everything that the estimate does not know.
    """
    problems = []
    if config.parallel.pp > 1:
        problems.append(
            f"--pp {config.parallel.pp}: the estimate knows no pipeline: use --pp 1, or --tp for large models"
        )
    if config.parallel.offload_optimizer:
        problems.append("--offload-optimizer: the estimate knows no work of the host: leave it out")
    if config.parallel.offload_params:
        problems.append("--offload-params: the estimate knows no copies over the host link: leave it out")
    if config.training.offload_activations:
        problems.append("--offload-activations: the estimate knows no copies over the host link: leave it out")
    if config.training.compile:
        problems.append("--compile: which kernels are generated is known on the device only: leave it out")
    form, given = config.precision.precision, config.logging.peak_tflops
    peak = device.peak(form) if given is None else given * 1e12
    if peak is None:
        known = " or ".join(f for f in ("bf16", "fp16") if device.peak(f) is not None)
        problems.append(
            f"--precision {form}: the peak of {device.name} in {form} is not known: use {known}, or --peak-tflops"
        )
    if problems or peak is None:
        raise ConfigError(problems)
    return peak


# ---- what is printed


def _report(result: Estimate, config: ResolvedConfig) -> Iterator[str]:
    parallel, training, timing = config.parallel, config.training, result.timing
    yield (
        f"Estimate for {config.model.preset or 'the model'} on {parallel.ranks} x {result.device.name}, "
        f"{config.precision.precision}: tp {parallel.tp}{', sequence parallel' if parallel.sequence_parallel else ''}, "
        f"{f'cp {parallel.cp}, ' if parallel.cp > 1 else ''}dp {parallel.dp}, "
        f"{_experts(config)}ZeRO stage {parallel.zero_stage}, "
        f"{counted(config.microbatches, 'microbatch', 'microbatches')} of {training.micro_batch_size} x "
        f"{config.data.seq_length} tokens, recompute {training.recompute}"
    )
    yield "Operators, bytes and FLOPs are counted for rank 0; times are estimated, not measured.\n"
    yield "| phase | operator | limited by | launches | GB | TFLOP | ms | share |\n|---|---|---|---|---|---|---|---|"
    total = Totals()
    for (_, kind, _), totals in timing.rows.items():
        total = total if kind == "transfer" else total.plus(totals)
    small: dict[str, tuple[int, Totals]] = {}
    for (phase, kind, name), totals in timing.rows.items():
        if totals.seconds >= SMALL * timing.seconds:
            yield _row(phase, name, kind, totals, timing.seconds)
        else:
            count, others = small.get(phase, (0, Totals()))
            small[phase] = count + 1, others.plus(totals)
    for phase, (count, totals) in small.items():
        yield _row(phase, f"{counted(count, 'other')}", "", totals, timing.seconds)
    yield ""
    yield f"Step: {_in_range(result.seconds, 1e3, '.1f')} ms, {result.tokens / timing.seconds:,.0f} tokens/s"
    yield f"MFU, full attention: {_in_range(result.utilization(result.model_flops), 100, '.1f')} %"
    yield f"MFU, causal attention: {_in_range(result.utilization(result.causal_flops), 100, '.1f')} %"
    yield f"FLOPs executed: {timing.work / result.seconds.expected / result.peak:.1%} of the peak"
    share = f"{total.seconds * 1e3:.1f} ms ({total.seconds / timing.seconds:.1%} of the step)"
    yield f"Operators: {total.launches:,.0f} launches, {total.bytes / 1e9:,.1f} GB, {share}"
    for role, seconds in timing.exposed.items():
        yield f"Exposed communication, {ROLES.get(role, role)}: {seconds * 1e3:.1f} ms ({seconds / timing.seconds:.1%})"
    yield f"Waiting for the host: {timing.late * 1e3:.1f} ms ({timing.late / timing.seconds:.1%})"
    update = f"{timing.update * 1e3:.1f} ms ({timing.update / timing.seconds:.1%})"
    yield f"Update: {update}, {_update_bytes(result, config):.1f} bytes per parameter that the rank updates"
    needed = plan_memory(config, outline(config), on_cpu=False)[0].expected
    fits = "fits" if needed <= result.device.memory_bytes else "does not fit"
    yield f"Memory: {needed / 1e9:.1f} GB expected of {result.device.memory_bytes / 1e9:.0f} GB: {fits}"


def _experts(config: ResolvedConfig) -> str:
    """Of the title."""
    parallel, experts = config.parallel, config.model.experts
    if experts is None:
        return ""
    split = f", etp {parallel.expert_split}" if parallel.expert_split != parallel.tp else ""
    return f"ep {parallel.ep}{split}, {experts.num_experts} experts with equally many tokens, "


def _row(phase: str, name: str, kind: str, totals: Totals, step: float) -> str:
    return (
        f"| {phase} | {name} | {kind} | {totals.launches:,.0f} | {totals.bytes / 1e9:.2f} | "
        f"{totals.flops / 1e12:.2f} | {totals.seconds * 1e3:.2f} | {totals.seconds / step:.1%} |"
    )


def _in_range(values: Range, factor: float, form: str) -> str:
    low, high = sorted((values.slow * factor, values.fast * factor))
    return f"{values.expected * factor:{form}} ({low:{form}} to {high:{form}})"


def _update_bytes(result: Estimate, config: ResolvedConfig) -> float:
    """Bytes of the update per parameter that the rank updates."""
    moved = sum(t.bytes for (phase, kind, _), t in result.timing.rows.items() if (phase, kind) == ("update", "memory"))
    layers = outline(config)
    experts = held_experts(config, layers, [range(len(layers))])
    held = plan_memory(config, layers, on_cpu=False)[0].parameters
    return moved / updated_parameters(held, config, experts=experts)


def _as_json(result: Estimate, config: ResolvedConfig) -> dict[str, Any]:
    timing = result.timing
    return {
        "estimate": True,
        "device": result.device.name,
        "step_seconds": asdict(result.seconds),
        "tokens_per_second": result.tokens / timing.seconds,
        "mfu_full_attention": asdict(result.utilization(result.model_flops)),
        "mfu_causal_attention": asdict(result.utilization(result.causal_flops)),
        "executed_share_of_peak": timing.work / result.seconds.expected / result.peak,
        "exposed_seconds": {ROLES.get(role, role): seconds for role, seconds in timing.exposed.items()},
        "waiting_for_host_seconds": timing.late,
        "update_seconds": timing.update,
        "update_bytes_per_parameter": _update_bytes(result, config),
        "memory_bytes": plan_memory(config, outline(config), on_cpu=False)[0].expected,
        "device_memory_bytes": result.device.memory_bytes,
        "operators": [
            {"phase": phase, "limited_by": kind, "operator": name, **totals._asdict()}
            for (phase, kind, name), totals in timing.rows.items()
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
