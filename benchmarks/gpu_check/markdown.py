"""The report as a page of Markdown tables, for docs/reports/measured.md. Standard library alone."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.gpu_check.records import Record
from tools.generated_pages import table

# How a number is written in a unit: a factor, and a format.
_UNITS = {"KiB": (2**-10, ",.1f"), "MiB": (2**-20, ",.1f"), "GiB": (2**-30, ".2f"), "us": (1e6, ".1f")}
_UNITS |= {"G": (1e-9, ".2f"), "GB/s": (1e-9, ",.0f"), "T": (1e-12, ".0f"), "TB/s": (1e-12, ".2f")}
# Columns of tables, by title.
_TRAINING = {
    "shape": "{shape}", "mode": "{mode}", "micro batch": "{micro_batch}", "s": "{seq_length}",
    "tokens/s": "{tokens_per_second:,.0f}", "TFLOP/s": "{tflops_full:.1f}", "MFU": "{mfu_full:.1%}",
    "MFU, causal": "{mfu_causal:.1%}", "s a step": "{step_seconds:.4f}", "host waits": "{waits}",
}  # fmt: skip
_PEAKS = {
    "peak GiB, measured / estimated": "{peak_bytes:GiB} / {peak_bytes_predicted:GiB}",
    "KiB a token beyond state": "{beyond_state_bytes_per_token:KiB}",
}
_PROFILE = {"calls": "{calls}", "ms": "{ms:.2f}", "share": "{share:.1%}"}
_KERNELS = {
    "operator": "{operator}", "direction": "{direction}", "us": "{seconds:us}", "GB/s": "{rate:GB/s}",
    "of copy": "{share_of_copy:.0%}", "times torch": "{torch:.2f}", "times torch.compile": "{compiled:.2f}",
    "times liger": "{liger:.2f}",
}  # fmt: skip
_CHECKPOINT = {
    "": "{act}, GB/s", "here": "{ours:G}", "torch.save, torch.load": "{torch:G}",
    "torch.distributed.checkpoint": "{dcp:G}", "here / the faster": "{share:.2f}",
}  # fmt: skip
_LAYOUTS = {"model": "{model}", "precision": "{precision}", "layout": "`{layout}`", "against one rank": "{said}"}
_OF_LAYOUTS = "Ranks that share the device, with --reproducible: losses, norms, weights and optimizer state of 3 steps."
_OF_TRAINING = (
    "bf16, one microbatch and one update a step, the largest micro batch that fits, no dropout. MFU counts "
    "attention in full (Narayanan et al. 2021), and as the half that causality needs; compiled: --compile."
)


class _Text(string.Formatter):
    """Writes a number in a unit of `_UNITS`, as in {size:MiB}, and nothing for None."""

    def format_field(self, value: Any, spec: str) -> Any:
        factor, form = _UNITS.get(spec, (1, spec))
        return "" if value is None else format(value if factor == 1 else value * factor, form)


def page(report: dict[str, Any]) -> str:
    """All tables for which there are records, and what did not end well.

    Args:
        report: as gpu-report.json holds it.
    """

    def of(kind: str) -> list[Record]:
        return [record for part in report["parts"] for record in part["records"] if record["kind"] == kind]

    waits = {(one["shape"], one["mode"]): one["per_step"] for one in of("synchronisations")}
    runs = [run | {"waits": waits.get((run["shape"], run["mode"]))} for run in of("training")]
    states = {
        f"{kind}, counted / planned": f"{{state_bytes_counted[{kind}]:MiB}} / {{state_bytes_predicted[{kind}]:MiB}}"
        for kind in (runs[0]["state_bytes_counted"] if runs else ())
    }
    memory = {"shape": "{shape}", "mode": "{mode}", **states, **_PEAKS}
    sections = [
        f"## {'A trial of the check' if report['small'] else 'On a GPU'}",
        _Text().format(
            "`make gpu-check` on {started}, {seconds:.0f} s; commit {source[commit]}, sha256 of the code {digest}.",
            **report, digest=report["source"]["sha256"][:12],
        ),
        *map(_machine, of("machine")),
        *_lines(
            "A copy moves {copy_bytes_per_second:TB/s} TB/s; a bf16 matrix product runs at "
            "{matmul_flops_per_second:T} TFLOP/s.", of("rates"),
        ),
        _parts(report["parts"]),
        _tests(of("test")),
        section("Layouts", _OF_LAYOUTS, _LAYOUTS, of("layout")),
        section("Training", _OF_TRAINING, _TRAINING, runs),
        section("Memory", "State in MiB. docs/guides/memory.md says how peaks are estimated.", memory, runs),
        *map(_profile, of("profile")),
        _kernels(of("kernel")),
        *map(checkpoint, of("checkpoint")),
    ]  # fmt: skip
    return "\n\n".join(section for section in sections if section) + "\n"


def _lines(form: str, records: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each record."""
    return [_Text().vformat(form, (), record) for record in records]


def section(title: str, text: str, columns: Mapping[str, str], records: list[Record], below: str = "") -> str:
    """A heading, a text and a table with a row for each record, and what stands below it; nothing where there is
    neither."""
    parts = [f"### {title}", text, _rows(columns, records), below]
    return "\n\n".join(part for part in parts if part) if records or below else ""


def _rows(columns: Mapping[str, str], records: list[Record]) -> str:
    return table(list(columns), zip(*(_lines(form, records) for form in columns.values()), strict=True))


def _machine(machine: Record) -> str:
    versions = "".join(f", {name} {version}" for name, version in machine["versions"].items() if version)
    driver = ", ".join(f"{name} {value}" for name, value in machine["driver"].items())
    host = f"{machine['cpus']} CPUs, Python {machine['python']}, CUDA {machine['cuda']}"
    return f"{machine['device']}, {host}{versions}{'; ' * bool(driver)}{driver}."


def _parts(parts: list[Record]) -> str:
    bad = [part | {"kept": len(part["records"])} for part in parts if part["status"] != "done"]
    time = "{seconds:.0f} of {limit_seconds:.0f} s"
    columns = {"part": "{name}", "status": "{status}", "time": time, "records kept": "{kept}"}
    return section("Not done", "", columns, bad) or f"All {len(parts)} parts are done."


def _tests(tests: list[Record]) -> str:
    counts = Counter(test["outcome"] for test in tests)
    parts = [f"### Tests\n\n{', '.join(f'{count} {outcome}' for outcome, count in sorted(counts.items()))}."]
    failed = []
    for test in (test for test in tests if test["outcome"] == "failed"):
        said = test["message"].splitlines() or [""]
        reason = next((line for line in said if line.startswith("E ")), said[0]).removeprefix("E").strip()
        failed.append(f"- `{test['name']}`: {reason[:200]}")
    return "\n\n".join([*parts, *(["\n".join(failed)] if failed else [])]) if tests else ""


def _profile(profile: Record) -> str:
    parts = [f"### Where a step of {profile['shape']}, {profile['mode']}, goes"]
    if profile["launches"]:
        parts.append(f"{profile['launches']:,} kernels, {profile['device_ms']:,.1f} ms of device time.")
    for kind in ("operators", "kernels"):
        parts += [_rows({kind.removesuffix("s"): "`{name}`", **_PROFILE}, profile[kind])] if profile[kind] else []
    return "\n\n".join(parts)


def _kernels(figures: list[Record]) -> str:
    cells: dict[tuple[str, str], Record] = {}
    for figure in (figure for figure in figures if figure["error"] is None):
        name = figure["implementation"].removeprefix("torch.compile") or "compiled"
        cells.setdefault((figure["operator"], figure["direction"]), {})[name] = figure
    rows = []
    for found in cells.values():
        if ours := found.get("megacore"):
            times = {name: of["seconds"] / ours["seconds"] for name, of in found.items()}
            row = dict.fromkeys(("torch", "compiled", "liger")) | ours | times
            rows.append(row | {"rate": ours["bytes"] / ours["seconds"]})
    text = "bf16. Speed over that of the others: above 1 this project's kernel is faster."
    bad = [figure for figure in figures if figure["error"] is not None]
    return section("Kernels", text, _KERNELS, rows, "\n".join(_lines("- {operator}, {implementation}: {error}", bad)))


def checkpoint(run: Record) -> str:
    """What saving and loading take."""
    rows, seconds, size = [], run["seconds"], run["bytes"]
    for act in ("save", "load"):
        speeds = {who: size / taken for who in ("ours", "torch", "dcp") if (taken := seconds.get(f"{act}_{who}"))}
        faster = max((speed for who, speed in speeds.items() if who != "ours"), default=None)
        rows.append({"act": act, "torch": None, "dcp": None, **speeds, "share": faster and speeds["ours"] / faster})
    stall = f"{seconds['stall']:.3f} s, {seconds['stall'] / seconds['save_ours']:.1%} of a save"
    text = f"{size / 1e9:.2f} GB of training state on the device."
    return section("Checkpoints", text, _CHECKPOINT, rows, f"`--async-save` stalls for {stall}.")
