"""`--dry-run` of an entry point: planning in place of training. Only for it the planner is loaded: it is optional."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megacore.commands.plan_parser import dashed
from megacore.config.dry_run_flags import DRY_RUN


def is_dry_run(argv: Sequence[str]) -> bool:
    """Whether `--dry-run`, in either form, is among the flags of an entry point."""
    return any(word.split("=")[0] == DRY_RUN for word in map(dashed, argv))


def dry_run(argv: Sequence[str], entry: str) -> int:
    """Plan the run in place of it; with `--dry-run=full` take a step of it without devices. Returns the exit status: 0
    done, 2 refused, or a rank failed."""
    try:
        from megacore.commands.plan import plan_run
    except ModuleNotFoundError as error:
        # Another missing module is a fault of the installation, and must show as such.
        if error.name is None or not error.name.startswith("megacore.plan"):
            raise
        message = f"{DRY_RUN} needs the planner, megacore/plan, which is not installed: install megacore whole"
        print(f"{entry}: error: {message}, or leave {DRY_RUN} out", file=sys.stderr)
        return 2
    return plan_run(argv, entry)
