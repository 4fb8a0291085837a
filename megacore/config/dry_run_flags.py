"""The flags of dry runs that an entry point's help shows. The planner reads them, among others of its own."""

from __future__ import annotations

from collections.abc import Mapping

from megacore.config.fields import FieldInfo

DRY_RUN, REHEARSE = "--dry-run", "--rehearse"
_FLAGS = (
    FieldInfo(
        name="dry_run",
        kind=str,
        metavar="[plan|full]",
        doc="Examines the run instead of starting it. plan: predicts memory, time per step and traffic. full: builds "
        "every kind of rank and takes a step on tensors without values, to find errors in shapes, types and devices. "
        "--dry-run --help lists all flags of a plan. Default: no dry run; plan, where no value follows.",
    ),
    FieldInfo(
        name="world_size",
        kind=int,
        metavar="N",
        doc="Number of ranks of the job that --dry-run examines. Default: the launcher's WORLD_SIZE, if the degrees "
        "divide it; else --tp x --cp x --pp x --dp.",
    ),
    FieldInfo(
        name="cluster",
        kind=str,
        metavar="NAME",
        doc="Cluster that --dry-run plans for: its name, or a FILE.toml (docs/guides/planner.md). Default: laptop; "
        "h100 with --dry-run=full.",
    ),
    FieldInfo(
        name="rehearse",
        kind=int,
        metavar="[=N]",
        doc="Cuts the run to at most N processes of this machine and takes a few steps of it: the same features with "
        "small sizes, and mock data where the data is not here. The variable MEGACORE_REHEARSE=N does the same, and "
        "tools/rehearse.py for whole scripts (docs/guides/coming-from-megatron.md). Default: off; N = 8.",
    ),
)
DRY_RUN_FLAGS: Mapping[str, FieldInfo] = {info.flag: info for info in _FLAGS}
"""The flags that `megacore.commands.plan` reads, which are fields of no section; it shows these texts too."""
