"""Prints the reference of all tools as Markdown, from their --help.

    python tools/tool_reference.py                                 # print it
    python tools/tool_reference.py --write docs/reference/tools.md    # bring the document up to date
    python tools/tool_reference.py --check docs/reference/tools.md    # exit status 1 if it is not

In the document the reference is between two marker lines, and only what is between them is replaced.
"""

from __future__ import annotations

import configparser
import contextlib
import importlib
import importlib.util
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

if importlib.util.find_spec("tools") is None:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.generated_pages import written_reference

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- tools: begin (written by tools/tool_reference.py) -->"
END = "<!-- tools: end -->"
PARTS = {
    "Data": ("train_tokenizer", "preprocess_data", "merge_datasets"),
    "Before a run": ("rehearse", "plan", "verify", "draw_schedule", "draw_lr"),
    "During and after a run": (
        "where",
        "generate",
        "fill_mask",
        "perplexity",
        "inspect_checkpoint",
        "convert_checkpoint",
        "report",
    ),
    "Of developers": ("mup_check",),
}
"""Tools by the part of the reference that has them."""
_COMMANDS = 2  # of each tool; guides show more
UNLISTED = {
    "build_docs": "`make docs`",
    "deepspeed_reference": "writes the tables of coming-from-deepspeed.md",
    "flag_reference": "writes configuration.md",
    "generated_pages": "what the tools that write documentation share",
    "kernel_cases": "what kernel_report measures",
    "kernel_report": "compiles the kernels without a GPU",
    "megatron_reference": "writes the tables of coming-from-megatron.md",
    "prose": "finds the English of the quick start's corpus",
    "quickstart": "`make quickstart`",
    "tool_reference": "writes this page",
    "run_lm_eval": "the program of lm-evaluation-harness, with its flags",
}
"""Tools that a make target or another tool starts."""


def main(argv: Sequence[str]) -> int:
    """Prints, writes or checks it; returns the exit status."""
    return written_reference(argv, "the reference of all tools", reference, (BEGIN, END), prog="tool_reference.py")


def reference() -> str:
    """All tools, in the parts of `PARTS`."""
    return "\n".join(line for part, names in PARTS.items() for line in _part(part, names))


def console_scripts() -> dict[str, str]:
    """The console script of each tool that has one, by the tool's name."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = setup["options.entry_points"]["console_scripts"].split("\n")
    pairs = (line.split(" = ") for line in lines if " = " in line)
    return {target.split(":")[0].rpartition(".")[2]: name for name, target in pairs}


def help_of(name: str) -> str:
    """What `python tools/NAME.py --help` prints, 100 columns wide."""
    module = importlib.import_module(f"tools.{name}")
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
        mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}),
        mock.patch.object(sys, "argv", [f"tools/{name}.py", "--help"]),
    ):
        module.main(["--help"])
    return said.getvalue()


def _part(part: str, names: Sequence[str]) -> Iterator[str]:
    yield f"## {part}"
    yield ""
    for name in names:
        yield from _tool(name)


def _tool(name: str) -> Iterator[str]:
    module = importlib.import_module(f"tools.{name}")
    first, _, rest = str(module.__doc__).partition("\n\n")
    script = console_scripts().get(name)
    yield f"### {name}"
    yield ""
    yield (f"`{script}`: " if script else "") + " ".join(first.split())
    yield ""
    yield from ("```bash", *_commands(rest), "```", "")
    options = _options(help_of(name))
    if options:
        yield from ("```text", options, "```", "")


def _commands(text: str) -> list[str]:
    """The first commands of a docstring, without their comments, in lines of at most 80 columns."""
    commands = re.findall(r"^ *((?:python|torchrun) (?:.*\\\n)*.*)$", text, re.MULTILINE)
    lines = []
    for command in commands[:_COMMANDS]:
        line = " ".join(command.partition(" #")[0].replace("\\\n", " ").split())
        line = re.sub(r"(--[\w-]+) (?!-)", "\\1\xa0", line)  # a flag and its value stay together
        wrapped = textwrap.wrap(line, 78, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        lines += [part.replace("\xa0", " ") for part in ([f"{part} \\" for part in wrapped[:-1]] + wrapped[-1:])]
    return lines


def _options(text: str) -> str:
    """The part of a help text that lists arguments."""
    found = re.search(r"^(?:positional arguments|options|[A-Za-z ]+):\n {2}\S", text, re.MULTILINE)
    listed = re.sub(r"^(options:\n)? +-h, --help .*\n", "", text[found.start() :] if found else "", flags=re.MULTILINE)
    return listed.replace("positional arguments:\n", "").rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
