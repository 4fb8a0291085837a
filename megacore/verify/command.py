"""The command-line tool. It loads torch after the command line is found valid."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megacore.commands.tool import require_none, run_tool
from megacore.verify.defects import DEFECTS
from megacore.verify.request import make_parser, request_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 everything agrees, 1 something differs or a run failed, 2 refused."""
    parser = make_parser()

    def run(args: argparse.Namespace) -> int:
        if not args.list_defects:
            request = request_of(parser, args)
            from megacore.verify.ranks import verify

            return verify(request)
        require_none(args.problems)
        for defect in DEFECTS:
            print(f"{defect.name:<28}{defect.what}" + (f" (needs {defect.needs})" if defect.needs else ""))
        return 0

    return run_tool(parser, argv, run)
