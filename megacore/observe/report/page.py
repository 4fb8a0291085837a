"""The page: what happened to a run, from the verdict down to its settings, in one HTML file without any reference. The
page has no script. Charts are inline SVG; a browser shows the text of a mark under the pointer. Every string of the run
is escaped."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

import megacore
from megacore.config.messages import counted
from megacore.drawing.canvas import to_svg as drawing_to_svg
from megacore.drawing.timelines import diagram
from megacore.drawing.traced import traced_panels
from megacore.models.flops import CONVENTION
from megacore.observe.report.chart import Bar, Chart, Curve, Mark, bars_to_svg, to_svg
from megacore.observe.report.files import Record, RunFiles, lasting, require_readable
from megacore.observe.report.series import Point, finite, quantile, short, smoothed
from megacore.observe.report.style import STYLE

_MOST_MARKS, _MOST_RANKS, _MOST_ROWS, _MOST_SPANS = 300, 24, 60, 700
_SMOOTHING = 100  # a curve is smoothed over this part of its points
_SMOOTHED_FROM = 50  # points


@dataclass(frozen=True)
class Verdict:
    """How a run ended."""

    kind: str  # class of its badge: good, warn, bad, or live
    word: str  # on the badge
    text: str  # the sentence beside it


def verdict_of(run: RunFiles) -> Verdict:
    """How the run ended, from what the last start left."""
    total = run.setting("training", "train_iters")
    last = max((int(r["step"]) for r in (*run.steps[-1:], *run.evaluations[-1:])), default=0)
    starts = [n for n, event in enumerate(run.events) if event["event"] == "launch"]
    since = run.events[starts[-1] if starts else 0 :]
    last = max([last, *(e["step"] for e in lasting(since) if e["event"] != "rollback" and type(e.get("step")) is int)])
    of = f"step {last:,} of {total:,}" if isinstance(total, int) else f"step {last:,}"
    ends = [event for event in since if event["event"] in ("end", "error")]
    if run.is_running and not ends:
        return Verdict("live", "running", f"A process holds the directory; {of} is on record.")
    if not ends:
        if not run.events and isinstance(total, int) and last >= total:
            return Verdict("good", "finished", f"All {total:,} steps are on record.")
        if not run.steps:
            return Verdict("warn", "no steps", "No step is on record.")
        return Verdict("bad", "ended without a word", f"At {of} or soon after: killed, or its machine went down.")
    end = ends[-1]
    if end["event"] == "error":
        return Verdict("bad", "failed", f"At {of}: {end.get('error')}")
    if end.get("reason") is None:
        return Verdict("good", "finished", f"Ended as planned, at {of}.")
    return Verdict("warn", "stopped", f"At {of}, by {end['reason']}.")


def page(run: RunFiles) -> str:
    """The report as HTML."""
    body = "\n".join(_Page(run).sections())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(_name(run))}: megacore run</title>'
        f"<style>{STYLE}</style></head><body><main>\n{body}\n</main></body></html>\n"
    )


def _name(run: RunFiles) -> str:
    """The directory with the one that it is in: many runs are called `run` or by a date."""
    return "/".join(run.directory.resolve().parts[-2:])


class Position(NamedTuple):
    """How many tokens of the data were read or skipped after a step."""

    step: float
    tokens: float


class _Page:
    def __init__(self, run: RunFiles) -> None:
        self.run = run
        self.launches = run.events_of("launch")
        self.by_tokens = any(finite(record.get("consumed_tokens")) for record in run.steps)
        self.x_name = "tokens" if self.by_tokens else "steps"
        self.lasting = lasting(run.events)
        self.positions = self._positions()

    def sections(self) -> Iterator[str]:
        yield self.header()
        yield self.figures()
        yield self.loss()
        yield '<div class="grid">'
        yield from self.validation_sets()
        yield self._chart("Learning rate", "train/lr", from_zero=True, is_noisy=False)
        yield self.gradient_norm()
        yield self._chart("Throughput", "perf/tokens_per_sec", note="tokens per second, all ranks", from_zero=True)
        yield self.step_times()
        yield "</div>"
        yield self.experts()
        yield self.memory()
        yield self.pipeline()
        yield self.starts()
        yield '<div class="grid">'
        yield self.settings()
        yield self.versions()
        yield "</div>"
        yield f"<footer>written by megacore {escape(megacore.__version__)}, tools/report.py</footer>"

    # ---- head

    def header(self) -> str:
        verdict, run = verdict_of(self.run), self.run
        remarks = [f"The watchdog reported a hang: {', '.join(run.hangs)}."] if run.hangs else []
        remarks += [f"{problem}." for problem in run.problems]
        notes = "".join(f'<p class="remark">{escape(remark)}</p>' for remark in remarks)
        return (
            f'<header><h1>{escape(_name(run))}</h1><p class="sub">{escape(self._subtitle())}</p>'
            f'<p class="verdict"><span class="badge {verdict.kind}">{escape(verdict.word)}</span> '
            f"{escape(verdict.text)}</p>{notes}</header>"
        )

    def _subtitle(self) -> str:
        model = [f"{n} blocks" for n in [self.run.setting("model", "num_layers")] if n]
        model += [f"of {n}" for n in [self.run.setting("model", "hidden_size")] if n]
        parts = [" ".join(model), _layout(self.launches[-1]) if self.launches else ""]
        parts += [str(self.run.setting("precision", "precision") or "")]
        parts += [str(self.launches[-1].get("device", "")) if self.launches else ""]
        return " · ".join(part for part in parts if part)

    def figures(self) -> str:
        """The numbers that a person looks for first; one that is not known has no tile."""
        steps, evaluated = self.run.steps, _numbers(self.run.evaluations, "eval/loss")
        losses, speeds = _numbers(steps, "train/loss"), _numbers(steps, "perf/tokens_per_sec")
        times, mfus = _numbers(steps, "perf/step_time_s"), _numbers(steps, "perf/mfu")
        tokens = finite(steps[-1].get("consumed_tokens")) if steps else None
        rollbacks = len(self.run.events_of("rollback"))
        tiles = [("last loss", f"{losses[-1]:.4f}", "nats per token")] if losses else []
        tiles += [("best evaluation", f"{min(evaluated):.4f}", "eval loss")] if evaluated else []
        tiles += (
            [("data", short(tokens), f"tokens read{' or skipped' * bool(rollbacks)}")] if tokens is not None else []
        )
        tiles += [("throughput", short(quantile(speeds, 0.5)), "tokens/s, median")] if speeds else []
        tiles += [("step", f"{quantile(times, 0.5):.3g} s", "median")] if times else []
        tiles += [("MFU", f"{quantile(mfus, 0.5):.1%}", f"median; {CONVENTION}")] if mfus else []
        failures = len(self.run.events_of("recovery"))
        kinds = ("failure", failures), ("resume", max(len(self.launches) - 1 - failures, 0)), ("rollback", rollbacks)
        counts = [("step", sum(event["event"] == "skip" for event in self.lasting)), *kinds]
        disturbed = [counted(count, what) + " skipped" * (what == "step") for what, count in counts if count]
        tiles += [("disturbances", disturbed[0], ", ".join(disturbed[1:]))] if disturbed else []
        items = (
            f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(unit)}</small></div>'
            for name, value, unit in tiles
        )
        return f'<section class="tiles">{"".join(items)}</section>'

    # ---- charts

    def loss(self) -> str:
        raw = self._points(self.run.steps, "train/loss")
        smooth = smoothed(raw, len(raw) / _SMOOTHING)
        evaluated = self._points(self.run.evaluations, "eval/loss")
        curves = [
            Curve(name="training, as logged", style="soft", points=raw),
            Curve(name="training, smoothed", style="main", points=smooth),
            Curve(name="evaluation", style="dots", points=evaluated),
        ]
        marks = list(self._marks())
        kinds = [("resume", "resumed"), ("spike", "spike"), ("skip", "not trained on"), ("rollback", "rolled back")]
        keys = [(curve.style, curve.name) for curve in curves if any(p.y is not None for p in curve.points)]
        keys += [(style, name) for style, name in kinds if any(mark.style == style for mark in marks)]
        legend = "".join(f'<span class="key {style}">{escape(name)}</span>' for style, name in keys)
        lines, title = [curve for curve in curves if curve.points], f"Loss over {self.x_name}"
        drawn = Chart(title=title, curves=lines, marks=marks, x_name=self.x_name, width=1140, height=340)
        return _card("Loss", f'{to_svg(drawn)}<p class="legend">{legend}</p>', note="nats per token", wide=True)

    def _marks(self) -> Iterator[Mark]:
        yield from self._resumes()
        yield from self._rollbacks()
        of_kind = {kind: [e for e in self.lasting if e["event"] == kind] for kind in ("spike", "skip")}
        spikes = [(self._x_of_step(e), f"step {e.get('step')}: {e.get('reason')}") for e in of_kind["spike"]]
        skips = [(self._x_of_step(e), f"step {e.get('step')} skipped: {e.get('reason')}") for e in of_kind["skip"]]
        bad = (r for r in self.run.steps if "train/loss" in r and finite(r["train/loss"]) is None)
        skips += [(self._x(r), f"step {r['step']}: the loss is not finite") for r in bad]
        for style, found in (("spike", spikes), ("skip", skips)):
            for x, text in found[:: max(1, -(-len(found) // _MOST_MARKS))]:
                yield Mark(x=x, style=style, text=text[:200])

    def _resumes(self) -> Iterator[Mark]:
        """The starts but the first; after a failure that --survive has outlived with its cause, whose event is next."""
        texts = list[str]()
        for event in self.run.events:
            if event["event"] == "launch":
                texts.append(f"resumed at step {event.get('step')}, {_layout(event)}")
            elif event["event"] == "recovery" and texts:
                texts[-1] += f": {event.get('cause')}"
        for launch, text in list(zip(self.launches, texts, strict=True))[1:]:
            yield Mark(x=self._x_of_step(launch), style="resume", text=text[:200])

    def _rollbacks(self) -> Iterator[Mark]:
        for event in self.run.events_of("rollback")[:_MOST_MARKS]:
            x, end = self._skipped_range(event)
            text = f"step {event.get('step')} rolled back to {event.get('to_step')}: {event.get('reason', '')}"
            yield Mark(x=x, end=end, style="rollback", text=text[:200])

    def validation_sets(self) -> Iterator[str]:
        keys = dict.fromkeys(key for record in self.run.evaluations for key in record)
        named = [key for key in keys if key.startswith("eval/") and key.endswith("/loss") and key.count("/") > 1]
        for key in named[:_MOST_MARKS]:
            name = key.removeprefix("eval/").removesuffix("/loss")
            yield self._chart(f"Loss on {name}", key, note="nats per token, validation set", is_noisy=False)

    def gradient_norm(self) -> str:
        clip, norms = finite(self.run.setting("optimizer", "clip_grad")), _numbers(self.run.steps, "train/grad_norm")
        note, level = "before clipping", None
        if self.run.setting("optimizer", "clip_grad_adaptive") is True and norms:
            pairs = [(finite(r.get("train/grad_norm")), finite(r.get("train/clip_limit"))) for r in self.run.steps]
            share = sum(norm is not None and limit is not None and norm > limit for norm, limit in pairs) / len(norms)
            note = f"{share:.1%} of the logged steps are clipped, adaptively"
        elif clip and norms:
            share = sum(norm > clip for norm in norms) / len(norms)
            note, level = f"{share:.1%} of the logged steps are clipped", (clip, f"clipped to {clip:g}")
        return self._chart("Gradient norm", "train/grad_norm", note=note, level=level)

    def _chart(self, title: str, key: str, *, note: str = "", is_noisy: bool = True, **how: Any) -> str:
        """A card with the curve of one metric; empty where no number of it was logged. `how` is what a Chart takes."""
        points = self._points(self.run.evaluations if key.startswith("eval/") else self.run.steps, key)
        if all(point.y is None for point in points):
            return ""
        curves = [Curve(name=title, style="main", points=points)]
        if is_noisy and len(points) > _SMOOTHED_FROM:
            smooth = smoothed(points, len(points) / _SMOOTHING)
            curves = [Curve(name=title, style="soft", points=points), Curve(name="", style="main", points=smooth)]
        drawn = Chart(title=title, curves=curves, marks=list(self._rollbacks()), x_name=self.x_name, **how)
        return _card(title, to_svg(drawn), note=note)

    def experts(self) -> str:
        """How evenly experts are used: over the run, and by layer at its end; nothing for a model without experts."""
        records = [record for record in self.run.steps if "moe/mean_violation" in record]
        if not records:
            return ""
        charts = [self._chart("Largest load of an expert over the mean, less 1", "moe/mean_violation", from_zero=True)]
        if _numbers(records, "moe/dropped"):
            charts.append(self._chart("Dropped choices", "moe/dropped", form=_percent, from_zero=True))
        rows: dict[int, dict[str, float | None]] = {}
        for key, value in records[-1].items():
            if named := re.fullmatch(r"moe/block_(\d{1,9})/(\w+)", key):
                rows.setdefault(int(named[1]), {})[named[2]] = finite(value)
        head = [name for name in _OF_EXPERTS if any(name in row for row in rows.values())]
        cells = (
            (str(block), *("none" if (value := rows[block].get(name)) is None else short(value) for name in head))
            for block in sorted(rows)
        )
        table = _table(("block", *(_OF_EXPERTS[name] for name in head)), cells)
        card = _card("Experts by layer", table, note=f"step {records[-1]['step']:,}", wide=True)
        return f'<div class="grid">{"".join(charts)}</div>{card}'

    # ---- ranks

    def memory(self) -> str:
        events = [event for event in self.run.events_of("memory") if isinstance(event.get("ranks"), list)]
        ranks = [rank for rank in (events[-1]["ranks"] if events else []) if isinstance(rank, dict)]
        bytes_of = [(finite(rank.get("peak_bytes")) or 0.0, finite(rank.get("predicted_bytes"))) for rank in ranks]
        named = zip(map(_rank_name, ranks), bytes_of, strict=True)
        bars = [Bar(name=name, measured=measured, predicted=predicted) for name, (measured, predicted) in named]
        if not bars:
            return ""
        note = "peak; the line is the prediction" if any(bar.predicted is not None for bar in bars) else "peak"
        scale = max(max(bar.measured, bar.predicted or 0.0) for bar in bars)
        if len(bars) > _MOST_RANKS:
            note += f"; the {_MOST_RANKS} fullest of {len(bars)} ranks"
            least = sorted((bar.measured for bar in bars), reverse=True)[_MOST_RANKS - 1]
            bars = [bar for bar in bars if bar.measured >= least][:_MOST_RANKS]  # in the order of the ranks
        half = -(-len(bars) // 2) if len(bars) > 4 else len(bars)
        svgs = (bars_to_svg(part, scale, "Memory of each rank") for part in (bars[:half], bars[half:]) if part)
        return _card("Memory of each rank", f'<div class="pair">{"".join(svgs)}</div>', note=note, wide=True)

    def step_times(self) -> str:
        """Slow steps, waiting for data, and slow ranks."""
        times = [(t, r["step"]) for r in self.run.steps if (t := finite(r.get("perf/step_time_s"))) is not None]
        rows: list[Sequence[str]] = []
        if times:
            rows.append(("95% are below", f"{quantile([seconds for seconds, _ in times], 0.95):.3g} s"))
            rows += [(f"slow: step {step:,}", f"{seconds:.3g} s") for seconds, step in sorted(times, reverse=True)[:3]]
        if waited := _numbers(self.run.steps, "perf/data_wait_fraction"):
            share = f"{_percent(sum(waited) / len(waited))} of the steps' time, at most {_percent(max(waited))}"
            rows.append(("wait for data", share))
        keys = dict.fromkeys(key for record in self.run.steps for key in record if key.startswith("perf/straggler"))
        for key in keys:
            if values := _numbers(self.run.steps, key):
                most = "" if key.endswith("_rank") else f", most {short(max(values))}"
                figures = f"last {short(values[-1])}{most}"
                rows.append((key.removeprefix("perf/").replace("_", " "), figures))
        return _card("Step times and stragglers", _table((), rows)) if rows else ""

    def pipeline(self) -> str:
        path = self.run.directory / "trace.json"
        if not path.exists():
            return ""
        try:
            require_readable(path)
            panels = traced_panels(path)
        except ValueError as error:  # of which UserError is one
            return _card("Pipeline", f'<p class="none">{escape(str(error))}</p>', wide=True)
        spans = sum(len(row) for panel in panels for row in panel.timeline.spans)
        if spans > _MOST_SPANS:
            text = f"{spans:,} computations are too many for this page: tools/draw_schedule.py --from-trace draws them"
            return _card("Pipeline", f'<p class="none">{escape(text)}</p>', wide=True)
        svg = drawing_to_svg(diagram(panels, unit="ms"))
        svg = svg.replace(' xmlns="http://www.w3.org/2000/svg"', "")
        return _card("Pipeline, predicted and measured", f'<div class="paper">{svg}</div>', wide=True)

    # ---- tables

    def starts(self) -> str:
        rows: list[Sequence[str]] = []
        places = [place for place, event in enumerate(self.run.events) if event["event"] == "launch"]
        for number, (place, stop) in enumerate(pairwise([*places, None]), start=1):
            event, *own = self.run.events[place:stop]
            last = next((e for e in reversed(own) if e["event"] in ("end", "error")), None)
            how = "no end on record" if last is None else str(last.get("error") or last.get("reason") or "finished")
            saves, code = sum(e["event"] == "save" for e in own), event.get("git") or event.get("version")
            cells = (number, _time(event), event.get("step"), _layout(event), code, event.get("host"), saves, how)
            rows.append(tuple(map(str, cells)))
        if not rows:
            return ""
        head = ("start", "time (UTC)", "from step", "layout", "code", "host", "saves", "end")
        left_out = f"the last {_MOST_ROWS} of {len(rows)}" if len(rows) > _MOST_ROWS else ""
        return _card("Starts", _table(head, rows[-_MOST_ROWS:]), note=left_out, wide=True)

    def settings(self) -> str:
        rows = [(s.flag, s.value, s.default) for s in self.run.changed_settings()]
        content = _table(("flag", "value", "default"), rows) if rows else '<p class="none">config.toml is not there</p>'
        return _card("Settings that differ from the defaults", content)

    def versions(self) -> str:
        launch: Record = self.launches[-1] if self.launches else {}
        code = f"{launch.get('version', 'unknown')}, git {launch.get('git') or 'none'}"
        rows: list[Sequence[str]] = [("megacore", code)]
        packages = launch.get("packages")
        rows += [(str(k), str(v)) for k, v in packages.items()] if isinstance(packages, dict) else []
        rows += [(name, str(launch[name])) for name in ("device", "host", "platform") if name in launch]
        command = f"<pre>{escape(str(launch['command']))}</pre>" if "command" in launch else ""
        return _card("Versions and hardware", _table((), rows) + command)

    # ---- the x axis

    def _points(self, records: Sequence[Record], key: str) -> list[Point]:
        return [Point(self._x(record), finite(record[key])) for record in records if key in record]

    def _x(self, record: Record) -> float:
        tokens = finite(record.get("consumed_tokens")) if self.by_tokens else None
        return self._x_of_step(record) if tokens is None else tokens

    def _x_of_step(self, event: Record) -> float:
        """Where an event is: between the positions of the steps around it."""
        step = finite(event.get("step")) or 0.0
        if not self.by_tokens:
            return step
        after = bisect_right(self.positions, Position(step, math.inf))
        left, right = self.positions[max(after, 1) - 1], self.positions[min(after, len(self.positions) - 1)]
        share = (step - left.step) / (right.step - left.step) if right.step > left.step else 0.0
        return left.tokens + share * (right.tokens - left.tokens)

    def _positions(self) -> list[Position]:
        """Where both are known, in order. A step that a rollback returns to has a second one, behind the samples that
        are skipped."""
        known = [Position(0.0, 0.0)]
        for record in (*self.run.steps, *self.run.evaluations):
            if (tokens := finite(record.get("consumed_tokens"))) is not None:
                known.append(Position(float(record["step"]), tokens))
        for event in self.lasting:
            step, skipped = finite(event.get("to_step")), self._skipped_tokens(event)
            if event["event"] == "rollback" and step is not None and skipped is not None:
                known.append(Position(step, skipped[1]))
        return sorted(known) if self.by_tokens else []

    def _skipped_range(self, event: Record) -> tuple[float, float]:
        """What a rollback skips of the x axis."""
        skipped = self._skipped_tokens(event) if self.by_tokens else None
        if skipped is None:
            skipped = self._x_of_step({"step": event.get("to_step")}), self._x_of_step(event)
        return min(skipped), max(skipped)

    def _skipped_tokens(self, event: Record) -> tuple[float, float] | None:
        """The tokens that a rollback skips, from the first to the one after the last, if its event has them."""
        samples, last = event.get("skipped_samples"), self.run.steps[-1] if self.run.steps else {}
        read, tokens = finite(last.get("consumed_samples")), finite(last.get("consumed_tokens"))
        if not (isinstance(samples, list) and len(samples) == 2 and read and tokens):
            return None
        first, stop = finite(samples[0]), finite(samples[1])
        return None if first is None or stop is None else (first * tokens / read, stop * tokens / read)


def _card(title: str, content: str, *, note: str = "", wide: bool = False) -> str:
    small = f" <small>{escape(note)}</small>" if note else ""
    kind = "card wide" if wide else "card"
    return f'<section class="{kind}"><h2>{escape(title)}{small}</h2>{content}</section>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    lines = (f"<tr>{''.join(f'<td>{escape(cell[:400])}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{"".join(lines)}</tbody></table></div>'


def _numbers(records: Iterable[Record], key: str) -> list[float]:
    return [number for record in records if (number := finite(record.get(key))) is not None]


_OF_EXPERTS = {
    "max_violation": "largest load over the mean, less 1", "min_load": "smallest load over the mean",
    "dropped": "dropped choices", "smallest_gap": "smallest gap of a choice",
}  # fmt: skip


def _percent(value: float) -> str:
    return f"{value:.1%}" if 0 < abs(value) < 0.1 else f"{value:.0%}"


def _layout(launch: Record) -> str:
    degrees = launch.get("degrees")
    return " x ".join(f"{name} {n}" for name, n in degrees.items()) if isinstance(degrees, dict) else "layout unknown"


def _rank_name(rank: dict[str, Any]) -> str:
    where = " ".join(f"{name}{n}" for name, n in rank.items() if name not in ("rank", "peak_bytes", "predicted_bytes"))
    return f"{rank.get('rank')}: {where}"[:18]


def _time(event: Record) -> str:
    return re.sub(r"T|\+00:00", " ", str(event.get("time", ""))).strip()
