"""A plan in words: Markdown to read, or figures as JSON, each with its unit, origin and range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from megacore.config import ResolvedConfig
from megacore.config.dimensions import ranks_of_role
from megacore.config.messages import counted
from megacore.config.parallel import StagesThatFit
from megacore.models.flops import Attention
from megacore.models.size import vocabulary_rows
from megacore.plan.checked import checked_line, checked_steps
from megacore.plan.memory import GIB, RankMemory, held_after_loss
from megacore.plan.plan_json import (
    REPORT,
    cluster_json,
    layout_flags,
    layout_json,
    node_host_json,
    other_settings,
    run_json,
)
from megacore.plan.planner import (
    LOW_CONFIDENCE,
    Figure,
    Plan,
    by_formula,
    exact,
    host_terms,
    largest_term,
    memory_figures,
    memory_terms,
    peak_figure,
    rank_kinds,
)
from megacore.plan.size_unit import SizeUnit, memory_unit, size_unit

PARTS: Mapping[str, str] = REPORT["parts"]
"""The parts of a step's time, in the order in which they are told."""
AFTER_WARM_UP = "{} sends whole gradients in its warm-up: all times, bytes, days and the price are those after it"
_ROUNDING = 0.02 * GIB  # of the columns of memory, which have two decimals
LINKS = {"node": "in a node", "network": "between nodes"}


def markdown(plan: Plan, *, tokens: float | None = None, goodput: float = 0.9) -> str:
    """The report of a plan.

    Args:
        plan: to describe.
        tokens: of the whole training; None: days and price are left out.
        goodput: share of the time that makes progress.
    """
    sections = [_head(plan), _memory(plan), _time(plan), _links(plan)]
    if tokens is not None:
        sections.append(_cost(plan, tokens, goodput))
    return "\n\n".join("\n".join(section) for section in sections)


def _head(plan: Plan) -> Iterator[str]:
    config, cluster = plan.config, plan.cluster
    training = config.training
    yield f"# Plan: {config.model.preset or 'model'} on {config.parallel.ranks} x {cluster.name}{config.watch.beside}"
    yield ""
    active = f", of which a token uses {plan.active_parameters:,}" if config.model.experts is not None else ""
    yield f"- model: {plan.parameters:,} parameters{active} (exact{_without_padding(config)})"
    yield from layout_lines(config)
    yield (
        f"- batch: {counted(training.global_batch_size, 'sequence')} of {counted(config.data.seq_length, 'token')}, "
        f"{counted(config.microbatches, 'microbatch', 'microbatches')} of {training.micro_batch_size} per replica"
    )
    if config.model.experts is not None:
        yield "- experts: figures are for experts with equally many tokens; the busiest rank of a real step has more"
    yield f"- cluster figures: {cluster.source}"
    yield f"- software that runs the step: {cluster.software.name}"


def _without_padding(config: ResolvedConfig) -> str:
    """How the vocabulary of the ranks differs from that of the model, where it does."""
    size, split = config.model.vocab_size, ranks_of_role("layer", config.parallel)
    padded = vocabulary_rows(config.model, split) * split
    return "" if padded == size else f", without padding; ranks hold a vocabulary padded from {size:,} to {padded:,}"


def layout_lines(config: ResolvedConfig) -> Iterator[str]:
    """What tells a layout from others: a line of its flags and precision, and what `settings_line` has."""
    has_other_stages = isinstance(config.parallel, StagesThatFit)
    why = "; stages balanced by parameters, because by time they do not fit" if has_other_stages else ""
    yield f"- layout: `{layout_flags(config)}`, {config.precision.precision}{why}"
    yield from settings_line(config)


def settings_line(config: ResolvedConfig) -> Iterator[str]:
    """A line of a report on the settings that no other line names; none where all have their defaults."""
    if settings := other_settings(config):
        yield f"- other settings that are not the default: `{' '.join(settings)}`"


def _memory(plan: Plan) -> Iterator[str]:
    kinds = list(rank_kinds(plan.memory))
    names = [name for name in memory_terms(plan.memory[0]) if any(memory_terms(rank)[name] for _, rank in kinds)]
    unit, capacity = memory_unit(plan.memory), size_unit([plan.capacity]).text(plan.capacity)
    padded = ", padding included" if _without_padding(plan.config) else ""
    how = "traced" if plan.fullest.is_traced else "estimated"
    yield f"## Memory per rank in {unit.name}, {capacity} usable (parameters: exact{padded}; bytes: {how})"
    yield ""
    host_names = [name for name in host_terms(plan.fullest) if any(host_terms(rank)[name] for _, rank in kinds)]
    columns = {name: unit.column([memory_terms(rank)[name] for _, rank in kinds]) for name in names}
    for name in host_names:
        columns[f"{name}, in host memory"] = unit.column([host_terms(rank)[name] for _, rank in kinds])
    peaks = unit.column([rank.expected for _, rank in kinds])
    yield f"| pipeline rank | parameters | {' | '.join(columns)} | microbatches in flight | peak |"
    yield "|---" * (len(columns) + 4) + "|"
    for (ranks, rank), *cells, peak in zip(kinds, *columns.values(), peaks, strict=True):
        where = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        yield f"| {where} | {rank.parameters:,} | {' | '.join(cells)} | {rank.in_flight} | **{peak}** |"
    yield ""
    fullest = plan.fullest
    if any(sum(memory_terms(rank).values()) > rank.expected + _ROUNDING for _, rank in kinds):
        yield "The columns add up to more than the peak: not all of these tensors exist at once."
        yield ""
    if fullest.on_host:
        yield (
            f"{unit.text(fullest.on_host)} of pipeline rank {fullest.pp_rank} are in host memory. The peak "
            f"does not include them. {_on_host(plan, unit)}"
        )
        yield ""
    yield from _verdict(plan, unit)
    if plan.fits:
        return
    yield "Each of these changes is expected to fit:"
    yield from (f"{number}. {way.in_markdown()}" for number, way in enumerate(plan.suggestions(), start=1))


def _on_host(plan: Plan, unit: SizeUnit) -> str:
    """What the ranks of a node hold in host memory, and of how much."""
    held, node = unit.text(plan.on_host), min(plan.cluster.device.node_ranks, plan.config.parallel.ranks)
    ranks = f"The {counted(node, 'rank')} of a node" if node > 1 else "A node"
    verb = "have" if node > 1 else "has"
    lost = held_after_loss(plan.config, plan.memory, plan.cluster.device.node_ranks)
    after = f" While a run goes on without a lost node, {unit.text(lost)} are copies of the state." if lost else ""
    limit = f", and no limit is checked: {plan.cluster.name} has no host_memory_gb"
    if plan.host_capacity is not None:
        limit = f", of {unit.text(plan.host_capacity)} usable"
    return f"{ranks} {verb} {held} there{limit}.{after}"


def _verdict(plan: Plan, unit: SizeUnit) -> Iterator[str]:
    """Whether the plan fits on the device and, where something is offloaded, in host memory."""
    peak = peak_figure(*plan.memory)
    if plan.fits_device:
        fullest, fits = plan.fullest, "Fits" if plan.fits else "Fits on the device"
        low, high = unit.number(peak.low), unit.number(peak.high)
        yield (
            f"{fits}: the highest peak is on pipeline rank {fullest.pp_rank}, {unit.text(fullest.expected)} "
            f"({low} to {high}); {_largest(fullest, unit)}."
        )
        if peak.high > plan.capacity:
            yield f"The upper end of this range does not fit into {size_unit([plan.capacity]).text(plan.capacity)}."
    yield from misfits(plan, unit)
    if plan.host_capacity is None or not plan.fits_host:
        return
    if (high_on_host := by_formula(plan.on_host, low=plan.on_host).high) > plan.host_capacity:
        high, usable = unit.text(high_on_host), unit.text(plan.host_capacity)
        yield f"The upper end of the range of the host memory, {high}, does not fit into {usable}."


def misfits(plan: Plan, unit: SizeUnit) -> Iterator[str]:
    """What the plan needs more of than there is, a line each: memory of the device, of the host of a node."""
    if not plan.fits_device:
        fullest, peak = plan.fullest, peak_figure(*plan.memory)
        low, high = unit.number(peak.low), unit.number(peak.high)
        needed, usable = unit.apart(fullest.expected, plan.capacity)
        yield (
            f"DOES NOT FIT: pipeline rank {fullest.pp_rank}, {needed} {unit.name} ({low} to {high}) of {usable} "
            f"{unit.name}; {_largest(fullest, unit)}."
        )
    if not plan.fits_host:
        assert plan.host_capacity is not None
        on_host = by_formula(plan.on_host, low=plan.on_host)
        low, high = unit.number(on_host.low), unit.number(on_host.high)
        most = max(plan.memory, key=lambda rank: rank.on_host)
        term, size = max(host_terms(most).items(), key=lambda item: item[1])
        needed, usable = unit.apart(on_host.value, plan.host_capacity)
        yield (
            f"DOES NOT FIT: host memory of a node, {needed} {unit.name} ({low} to {high}) of {usable} {unit.name}; its "
            f"largest term is {term}, {unit.text(size)} per rank."
        )


def _largest(rank: RankMemory, unit: SizeUnit) -> str:
    term, size = largest_term(rank)
    return f"its largest term is {term}, {unit.text(size)}"


def _time(plan: Plan) -> Iterator[str]:
    seconds = plan.time.seconds
    yield f"## Step time ({plan.timed_origin}; range: from the fast case to the slow case)"
    yield ""
    yield "| part | s | share | range |"
    yield "|---|---|---|---|"
    for name, text in PARTS.items():
        figure = plan.part(name)
        if four_digits(figure.high) != "0":
            yield f"| {text} | {four_digits(figure.value)} | {figure.value / seconds:.1%} | {_range(figure)} |"
    whole = plan.timed(seconds, "s")
    yield f"| **step** | **{four_digits(seconds)}** | 100% | {_range(whole)} |"
    yield ""
    hidden = ", ".join(f"{role} {four_digits(size)} s" for role, size in plan.time.hidden.items() if size > 0)
    yield f"- overlapped with computation: {hidden or 'nothing'}"
    for key, figure in throughput(plan).items():
        label = key.replace("per GPU", "per rank") if plan.cluster.on_cpu else key
        is_share = figure.unit == "share"
        text = f"{figure.value:.1%}" if is_share else four_digits(figure.value)
        spread = f"{figure.low:.1%} to {figure.high:.1%}" if is_share else _range(figure)
        yield f"- {label}: {text} ({spread})"
    yield f"- {checked_line(plan.config, plan.cluster)}"
    if plan.is_small:
        yield f"- low confidence: the time may be far off, because {LOW_CONFIDENCE}"
    replicas = ranks_of_role("replicas", plan.config.parallel)
    if replicas > 1 and plan.config.optimizer_settings.momentum_format is not None:
        yield f"- {AFTER_WARM_UP.format(plan.config.optimizer.optimizer)}"


def throughput(plan: Plan) -> dict[str, Figure]:
    """Rates, by what they are."""
    figures = {"tokens/s": plan.timed(plan.tokens_per_second, "tokens/s", of="rate")}
    conventions: tuple[Attention, ...] = ("full", "causal") if plan.config.is_causal else ("full",)
    for attention in conventions:
        for hardware in (False, True):
            kind = "hardware FLOPs" if hardware else "model FLOPs"
            name = "HFU" if hardware else "MFU"
            rate = plan.tflops(attention, hardware=hardware)
            share = plan.utilization(attention, hardware=hardware)
            figures[f"TFLOP/s per GPU, {kind}, {attention} attention"] = plan.timed(rate, "TFLOP/s", of="rate")
            figures[f"{name}, {attention} attention"] = plan.timed(share, "share", of="rate")
    return figures


def _links(plan: Plan) -> Iterator[str]:
    yield "## Bytes sent per rank and step (exact; without small collectives and bucket padding)"
    yield ""
    yield "| transfers | links | MB (10^6 bytes) |"
    yield "|---|---|---|"
    sizes = plan.link_bytes()
    kinds = list(dict.fromkeys(kind for kind, _ in sizes))
    for (kind, link), size in sorted(sizes.items(), key=lambda item: kinds.index(item[0][0])):
        yield f"| {kind} | {LINKS[link]} | {size / 1e6:,.3f} |"
    if not sizes:
        yield "| none | | 0 |"


def _cost(plan: Plan, tokens: float, goodput: float) -> Iterator[str]:
    days, price = cost_figures(plan, tokens, goodput)
    yield f"## {tokens:,.0f} tokens at a goodput of {goodput:.0%} (assumed)"
    yield ""
    yield f"- {four_digits(days.value)} days ({_range(days)})"
    hourly = plan.cluster.price_per_hour
    if hourly:
        spread = f"{price.low:,.0f} to {price.high:,.0f}"
        yield f"- {price.value:,.0f} USD at {hourly:g} USD per device and hour (assumed; {spread})"
    else:
        yield "- no price: it is 0 USD per device and hour; --price-per-hour USD sets another"


def cost_figures(plan: Plan, tokens: float, goodput: float) -> tuple[Figure, Figure]:
    """Days and USD."""
    days, price = plan.cost(tokens, goodput=goodput)
    return plan.timed(days, "days"), plan.timed(price, "USD")


def _range(figure: Figure) -> str:
    return f"{four_digits(figure.low)} to {four_digits(figure.high)}"


def four_digits(value: float) -> str:
    """Four digits or more, without an exponent: 51,851, 146.1, 6.170, 0.1687."""
    if abs(value) < 5e-7:  # a difference of two times that are equal up to rounding has either sign
        return "0"
    decimals = 3 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{min(max(decimals, 0), 6)}f}"


# ---- JSON ------------------------------------------------------------------------------------------------------------


def as_json(plan: Plan, *, tokens: float | None = None, goodput: float = 0.9) -> dict[str, Any]:
    """All figures of a plan; arguments as for `markdown`."""
    active = None if plan.config.model.experts is None else plan.active_parameters
    report: dict[str, Any] = {
        **run_json(plan.config, plan.layers),
        **cluster_json(plan.config, plan.cluster, capacity=plan.capacity),
        "layout": layout_json(plan.config),
        "flags": layout_flags(plan.config),
        "parameters": asdict(exact(plan.parameters, "parameters")),
        **({} if active is None else {"active_parameters": asdict(exact(active, "parameters"))}),
        **fit_json(plan),
        "memory": [_rank_json(plan, number) for number in range(len(plan.memory))],
        "step_seconds": asdict(plan.timed(plan.time.seconds, "s")),
        "step_parts": {name: asdict(plan.part(name)) for name in PARTS},
        "hidden": {role: asdict(figure) for role, figure in plan.hidden().items()},
        "throughput": {name: asdict(figure) for name, figure in throughput(plan).items()},
        "bytes_per_rank_and_step": {
            f"{kind}, {LINKS[link]}": asdict(exact(size, "bytes")) for (kind, link), size in plan.link_bytes().items()
        },
        "low_confidence": plan.is_small,
        "checked_steps": checked_steps(plan.config, plan.cluster),
    }
    if not plan.fits:
        report["suggestions"] = list(map(str, plan.suggestions()))
    if tokens is not None:
        days, price = cost_figures(plan, tokens, goodput)
        report["training"] = {"tokens": tokens, "goodput": goodput, "days": asdict(days), "price": asdict(price)}
    return report


def fit_json(plan: Plan) -> dict[str, Any]:
    """Whether the plan fits, and what it is compared by."""
    return {
        "fits": plan.fits,
        "peak": asdict(peak_figure(*plan.memory)),
        **node_host_json(plan.config, plan.memory, plan.cluster),
    }


def _rank_json(plan: Plan, number: int) -> dict[str, Any]:
    rank = plan.memory[number]
    return {
        "pp_rank": number,
        "parameters": asdict(exact(rank.parameters, "parameters")),
        "terms": {name: asdict(figure) for name, figure in memory_figures(rank).items()},
        "host_terms": {name: asdict(by_formula(size, low=size)) for name, size in host_terms(rank).items()},
        "in_flight": rank.in_flight,
        "peak": asdict(peak_figure(rank)),
        "largest_term": largest_term(rank)[0],
    }
