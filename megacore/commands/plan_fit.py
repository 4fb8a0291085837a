"""`tools/plan.py --fit`: fit a cluster and its trainer to measured rows of a CSV file."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megacore.config import Config, ResolvedConfig
from megacore.config.dry_run_flags import DRY_RUN
from megacore.config.flags import read_flags, without_fields
from megacore.config.messages import counted
from megacore.errors import ConfigError
from megacore.files import replace_bytes, why_unwritable
from megacore.plan.cluster import Cluster, to_toml
from megacore.plan.planner import scheduled, step_flops
from megacore.plan.row_file import FileRow, RowFile
from megacore.plan.row_fit import LEAST_ROWS, MeasuredRow, RowFit, fit_json, fit_rows, fit_text

_REPLICAS = {"dp", "world_size"}


def measured_rows(
    args: argparse.Namespace, kind: type[Config], resolved: Callable[[Sequence[str]], ResolvedConfig] | None
) -> list[MeasuredRow]:
    """The rows of --fit; what is wrong with them is added to the problems of the command line. `resolved`: maps flags
    of a run, without those of the planner, to its configuration; None: there is no cluster."""
    file = RowFile(args.fit, kind, args.cluster)
    rows: list[MeasuredRow] = []
    for row in file.rows:
        if resolved is None:
            break
        not_of_run = [
            flag for word in row.flags if (flag := word.split("=")[0]) in {*args.own_flags, DRY_RUN} - {"--world-size"}
        ]
        if not_of_run:
            file.refuse(f"{not_of_run[0]} is no flag of a run: leave it out", row.line)
            continue
        try:
            config = resolved(_flags(args, row, kind))
        except ConfigError as error:
            for problem in error.problems:
                file.refuse(problem, row.line)
            continue
        rows.append(MeasuredRow(line=row.line, config=config, seconds=_seconds(row, config)))
    problems = file.problems
    if not problems and len(file.rows) < LEAST_ROWS:
        found = counted(len(file.rows), "measured step")
        problems.append(f"--fit {args.fit} has {found}: give at least {LEAST_ROWS}, better 20")
    args.problems += problems
    if args.fit_out is not None:
        if args.fit_out.suffix != ".toml":
            args.problems.append(f"--fit-out {args.fit_out} must end in .toml: use {args.fit_out.with_suffix('.toml')}")
        elif (why := why_unwritable(args.fit_out)) is not None:
            args.problems.append(f"--fit-out {args.fit_out} {why}: use --fit-out fitted.toml")
    return rows


def _flags(args: argparse.Namespace, row: FileRow, kind: type[Config]) -> list[str]:
    """Those of the command, with the row's in their place: its number of ranks decides that of replicas."""
    fields = {*row.fields, *read_flags(row.flags, kind).values}
    fields |= {"world_size"} if "--world-size" in row.flags else set()
    fields |= _REPLICAS if fields & _REPLICAS else set()
    world = [] if args.world_size is None or fields & _REPLICAS else ["--world-size", str(args.world_size)]
    return [*without_fields(args.flags, sorted(fields), kind), *world, *row.flags]


def _seconds(row: FileRow, config: ResolvedConfig) -> float:
    """Of a step, from what is measured."""
    ranks, tokens = config.parallel.ranks, config.training.global_batch_size * config.data.seq_length
    if row.measure == "tflops_per_gpu":
        return step_flops(config, attention="full", hardware=False) / ranks / row.value / 1e12
    seconds = {
        "seconds": row.value,
        "milliseconds": row.value / 1e3,
        "tokens_per_second": tokens / row.value,
        "tokens_per_second_per_gpu": tokens / ranks / row.value,
    }
    return seconds[row.measure]


def fitted_cluster(args: argparse.Namespace, rows: Sequence[MeasuredRow], base: Cluster) -> Cluster:
    """Fit, print what was found, and write the file of --fit-out. With --json they are a part of what is printed, and
    told on stderr as well."""
    fit = fit_rows([replace(row, config=scheduled(row.config, base)) for row in rows], base)
    cluster = _named(fit, args.fit)
    args.fitted = {"fitted": fit_json(fit, args.fit)}
    print(fit_text(fit, args.fit), end="\n\n", file=sys.stderr if args.json else sys.stdout)
    if args.fit_out is not None:
        replace_bytes(args.fit_out, to_toml(cluster).encode(), durable=False)
        print(f"wrote {args.fit_out}: use it with --cluster {args.fit_out}", end="\n\n", file=sys.stderr)
    return cluster


def _named(fit: RowFit, path: Path) -> Cluster:
    if not fit.is_kept:
        return fit.cluster
    name = path.name if path.name.isprintable() else ascii(path.name)
    source = f"fitted to {counted(len(fit.rows), 'row')} of {name}, median error left out {fit.median_left_out:.1%}"
    device = replace(fit.cluster.device, name=f"{fit.base.name.removesuffix('-fitted')}-fitted")
    return replace(fit.cluster, device=device, source=source)


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    """Without what is said of a run, of which a file of rows has hundreds."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
