"""The flags of dry runs that an entry point's help shows. The planner reads them, among others of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

REHEARSE = "--rehearse"


class DryRunFlag(NamedTuple):
    """A flag that is no setting of a run: it asks for a dry run, or describes the job of one."""

    value: str  # what follows the flag, for the help
    text: str  # the help text; "Default: ..." ends it


DRY_RUN = "--dry-run"
DRY_RUN_FLAGS: Mapping[str, DryRunFlag] = {
    DRY_RUN: DryRunFlag(
        "[plan|full]",
        "Examines the run instead of starting it. plan: predicts memory, time per step and traffic. full: builds every "
        "kind of rank and takes a step on tensors without values, to find errors in shapes, types and devices. "
        "--dry-run --help lists all flags of a plan. Default: no dry run; plan, where no value follows.",
    ),
    "--world-size": DryRunFlag(
        "N",
        "Number of ranks of the job that --dry-run examines. Default: the launcher's WORLD_SIZE, if the degrees divide "
        "it; else --tp x --cp x --pp x --dp.",
    ),
    "--cluster": DryRunFlag(
        "NAME",
        "Cluster that --dry-run plans for: its name, or a FILE.toml (docs/guides/planner.md). Default: laptop; h100 "
        "with --dry-run=full.",
    ),
    REHEARSE: DryRunFlag(
        "[=N]",
        "Cuts the run to at most N processes of this machine and takes a few steps of it: the same features with small "
        "sizes, and mock data where the data is not here. The variable MEGACORE_REHEARSE=N does the same, and "
        "tools/rehearse.py for whole scripts (docs/guides/coming-from-megatron.md). Default: off; N = 8.",
    ),
}
"""The flags that `megacore.commands.plan` reads, which are fields of no section; it shows these texts too."""
