"""What the ranks of a running job do now, as a table; the job is not stopped.

python tools/where.py runs/a          # the job that writes to this output directory
python tools/where.py --pid 4711      # the job of this process
python tools/where.py                 # every job of this user on this machine
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence

from megacore.commands.tool import ToolParser, run_tool
from megacore.errors import UserError
from megacore.job_directory import job_directories
from megacore.watch.node import PURPOSE, Node
from megacore.watch.report import table


def main(argv: Sequence[str]) -> int:
    """Print the table; returns the exit status."""
    return run_tool(ToolParser.of("where"), argv, _print)


def _print(args: Namespace) -> None:
    jobs = [seen for directory in job_directories(PURPOSE) if (seen := Node(directory).look())]
    folder = args.output_dir and os.path.realpath(args.output_dir)
    wanted = [seen for seen in jobs if folder in (None, seen[0].record.identity.output_dir)]
    wanted = [seen for seen in wanted if args.pid in (None, *(one.record.identity.pid for one in seen))]
    if not wanted:
        given = [args.output_dir or "", "" if args.pid is None else f"--pid {args.pid}"]
        others = ", ".join(sorted({seen[0].record.identity.output_dir for seen in jobs})) or "none"
        raise UserError(
            f"{' '.join(filter(None, given)) or 'this machine'}: no watched job runs here (running: {others}): look on "
            "the machine of the job; one with --hang-timeout-minutes 0 has no ledger"
        )
    for seen in wanted:
        about = seen[0].record.identity
        here = {one.rank for one in seen}
        is_one_node = about.local_world_size == about.world_size
        absent = [rank for rank in range(about.world_size) if rank not in here] if is_one_node else []
        print(f"{about.output_dir}: {len(seen)} of {about.world_size} ranks, on {about.host}")
        print("\n".join(f"  {row}" for row in table(seen, absent)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
