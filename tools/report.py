"""Write the report of a run: one HTML page with its verdict, curves, memory, pipeline, settings and versions.

    python tools/report.py output/mine                  # writes output/mine/report.html
    python tools/report.py output/mine -o mine.html

The page needs no network and no other file. It also works for a run that is running, failed, or left half a line.
docs/reference/metrics.md describes it. Nothing here loads torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.commands.tool import ToolParser, run_tool
from megacore.errors import UserError
from megacore.files import replace_bytes
from megacore.observe.report.files import read_run
from megacore.observe.report.page import page, verdict_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 done, 1 the page cannot be written, 2 refused."""
    return run_tool(ToolParser.of("report"), argv, _report)


def _report(args: argparse.Namespace) -> None:
    output = Path(args.run, "report.html") if args.output is None else args.output
    problems = []
    if output.is_dir():
        problems.append(f"-o {output} is a directory: name a file in it, as in -o {output / 'report.html'}")
    elif args.output is not None and not output.absolute().parent.is_dir():
        problems.append(f"-o {output}: {output.parent} is not a directory: make it, or choose another path")
    try:
        run = read_run(Path(args.run))
    except UserError as error:
        problems.append(str(error))
    if problems:
        raise UserError("; ".join(problems))
    text = page(run).encode()
    replace_bytes(output, text, durable=False)
    verdict = verdict_of(run)
    print(f"{output}: {len(text) / 1000:,.0f} kB; {verdict.word}: {verdict.text}")


if __name__ == "__main__":
    sys.exit(main())
