"""The report as a page of Markdown tables, for docs/reports/measured.md. Standard library alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu_check.records import Record
from tools.generated_pages import table

# Columns of the table of training runs: title, key of the record, format.
_OF_TRAINING = (
    ("micro batch", "micro_batch", ""),
    ("s", "seq_length", ""),
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("TFLOP/s", "tflops_full", ".1f"),
    ("MFU", "mfu_full", ".1%"),
    ("MFU, causal", "mfu_causal", ".1%"),
    ("s a step", "step_seconds", ".4f"),
)
_OTHERS = ("torch", "torch.compile", "liger")


def page(report: dict[str, Any]) -> str:
    """All tables for which there are records, and what did not end well.

    Args:
        report: as gpu-report.json holds it.
    """
    records = [record for part in report["parts"] for record in part["records"]]
    sections = [
        _machine(report, records),
        _parts(report),
        _tests(_of(records, "test")),
        _training(_of(records, "training"), _of(records, "synchronisations")),
        _memory(_of(records, "training")),
        *map(_profile, _of(records, "profile")),
        _kernels(_of(records, "kernel")),
        _checkpoint(_of(records, "checkpoint")),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _of(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _number(value: float | None, form: str = ",.0f") -> str:
    return "" if value is None else format(value, form)


def _machine(report: dict[str, Any], records: list[Record]) -> str:
    source = report["source"]
    lines = [
        f"## {'A trial of the check' if report['small'] else 'On a GPU'}",
        f"`make gpu-check` on {report['started']}, {report['seconds']:.0f} s; commit {source['commit']}, sha256 of the "
        f"code {source['sha256'][:12]}.",
    ]
    for machine in _of(records, "machine"):
        versions = "".join(f", {name} {version}" for name, version in machine["versions"].items() if version)
        driver = ", ".join(f"{name} {value}" for name, value in machine["driver"].items())
        host = f"{machine['cpus']} CPUs, Python {machine['python']}, CUDA {machine['cuda']}"
        lines.append(f"{machine['device']}, {host}{versions}{'; ' * bool(driver)}{driver}.")
    for rates in _of(records, "rates"):
        copied, multiplied = rates["copy_bytes_per_second"] / 1e12, rates["matmul_flops_per_second"] / 1e12
        lines.append(f"A copy moves {copied:.2f} TB/s; a bf16 matrix product runs at {multiplied:.0f} TFLOP/s.")
    return "\n\n".join(lines)


def _parts(report: dict[str, Any]) -> str:
    rows = [
        (part["name"], part["status"], f"{part['seconds']:.0f} of {part['limit_seconds']:.0f} s", len(part["records"]))
        for part in report["parts"]
        if part["status"] != "done"
    ]
    done = f"All {len(report['parts'])} parts are done."
    return "Not done:\n\n" + table(("part", "status", "time", "records kept"), rows) if rows else done


def _tests(tests: list[Record]) -> str:
    if not tests:
        return ""
    counts = Counter(test["outcome"] for test in tests)
    text = "### Tests\n\n" + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) + "."
    failed = [f"- `{test['name']}`: {_last_line(test['message'])}" for test in tests if test["outcome"] == "failed"]
    return "\n\n".join([text, "\n".join(failed)]) if failed else text


def _last_line(message: str) -> str:
    """What a traceback ends with."""
    lines = [line for line in message.splitlines() if line.startswith("E ")] or message.splitlines() or [""]
    return lines[0].removeprefix("E").strip()[:200]


def _section(title: str, text: str, head: Sequence[str], rows: Iterable[Sequence[object]], below: str = "") -> str:
    """A heading, a text and a table, and what stands below it; nothing where there is neither."""
    rows = list(rows)
    parts = [f"### {title}", text, table(head, rows), *([below] if below else [])]
    return "\n\n".join(parts) if rows or below else ""


def _training(runs: list[Record], synchronisations: list[Record]) -> str:
    waits = {(one["shape"], one["mode"]): one["per_step"] for one in synchronisations}
    rows = []
    for run in runs:
        cells = (_number(run[key], form) for _, key, form in _OF_TRAINING)
        rows.append((run["shape"], run["mode"], *cells, _number(waits.get((run["shape"], run["mode"])))))
    text = (
        "bf16, one microbatch and one update a step, the largest micro batch that fits, no dropout. MFU counts "
        "attention in full (Narayanan et al. 2021), and as the half that causality needs; compiled: --compile."
    )
    return _section("Training", text, ("shape", "mode", *(name for name, _, _ in _OF_TRAINING), "host waits"), rows)


def _memory(runs: list[Record]) -> str:
    kinds = list(runs[0]["state_bytes_counted"]) if runs else []
    head = ["shape", "mode", *(f"{kind}, counted / planned" for kind in kinds)]
    head += ["peak GiB, measured / estimated", "KiB a token beyond state"]
    rows = []
    for run in runs:
        counted, predicted = run["state_bytes_counted"], run["state_bytes_predicted"]
        pairs = [f"{counted[kind] / 2**20:,.1f} / {predicted[kind] / 2**20:,.1f}" for kind in kinds]
        pairs.append(f"{run['peak_bytes'] / 2**30:.2f} / {run['peak_bytes_predicted'] / 2**30:.2f}")
        beyond = run["beyond_state_bytes_per_token"]
        rows.append((run["shape"], run["mode"], *pairs, _number(None if beyond is None else beyond / 1024, ",.1f")))
    return _section("Memory", "State in MiB. docs/guides/memory.md says how peaks are estimated.", head, rows)


def _profile(profile: Record) -> str:
    text = f"### Where a step of {profile['shape']}, {profile['mode']}, goes"
    if profile["launches"]:
        text += f"\n\n{profile['launches']:,} kernels, {profile['device_ms']:,.1f} ms of device time."
    for kind in ("operators", "kernels"):
        rows = [(f"`{row['name']}`", row["calls"], f"{row['ms']:.2f}", f"{row['share']:.1%}") for row in profile[kind]]
        text += f"\n\n{table((kind.removesuffix('s'), 'calls', 'ms', 'share'), rows)}" if rows else ""
    return text


def _kernels(figures: list[Record]) -> str:
    cells: dict[tuple[str, str], dict[str, Record]] = {}
    problems = []
    for figure in figures:
        if figure["error"] is None:
            cells.setdefault((figure["operator"], figure["direction"]), {})[figure["implementation"]] = figure
        else:
            problems.append(f"- {figure['operator']}, {figure['implementation']}: {figure['error']}")
    rows = []
    for names, found in cells.items():
        if ours := found.get("megacore"):
            seconds = (found[other]["seconds"] if other in found else None for other in _OTHERS)
            times = (_number(taken and taken / ours["seconds"], ".2f") for taken in seconds)
            rate = f"{ours['bytes'] / ours['seconds'] / 1e9:,.0f}"
            rows.append((*names, f"{ours['seconds'] * 1e6:.1f}", rate, f"{ours['share_of_copy']:.0%}", *times))
    head = ("operator", "direction", "us", "GB/s", "of copy", *(f"times {other}" for other in _OTHERS))
    text = "bf16. Speed over that of the others: above 1 this project's kernel is faster."
    return _section("Kernels", text, head, rows, "\n".join(problems))


def _checkpoint(runs: list[Record]) -> str:
    text = ""
    for run in runs:
        seconds, size = run["seconds"], run["bytes"] / 1e9
        rows = []
        for act in ("save", "load"):
            taken = (seconds.get(f"{act}_{who}") for who in ("ours", "torch", "dcp"))
            rows.append((f"{act}, GB/s", *(_number(one and size / one, ".2f") for one in taken)))
        share = seconds["stall"] / seconds["save_ours"]
        stall = f"`--async-save` stalls for {seconds['stall']:.3f} s, {share:.1%} of a save."
        head = ("", "here", "torch.save, torch.load", "torch.distributed.checkpoint")
        text += _section("Checkpoints", f"{size:.2f} GB of training state on the device.", head, rows, stall)
    return text
