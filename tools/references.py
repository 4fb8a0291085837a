"""Write the parts of the documentation that come from the code: flags, tools, what becomes of other trainers' settings.

    python tools/references.py              # bring every page up to date
    python tools/references.py --check      # exit status 1 if a page is not, without a change

Each part is between two marker lines of a page, and only what is between them is replaced.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import importlib
import importlib.util
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from unittest import mock

from megacore.arrive.deepspeed import DEEPSPEED_FLAGS, all_keys
from megacore.arrive.megatron import FOREIGN, LISTS, NOT_YET, REPLACED
from megacore.config import SECTIONS, Config, sections_of
from megacore.config.bert import BertConfig
from megacore.config.fields import FieldInfo, Range, field_infos
from megacore.config.flags import flags_by_name, setting_files
from megacore.config.help import HelpText, help_text_of
from megacore.config.messages import number

if importlib.util.find_spec("tools") is None:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.generated_pages import bring_up_to_date, table

ROOT = Path(__file__).resolve().parent.parent
LISTED = {
    "Data": ("train_tokenizer", "preprocess_data", "merge_datasets"),
    "Before a run": ("rehearse", "plan", "verify", "draw_schedule", "draw_lr"),
    "During and after a run": (
        "where", "generate", "fill_mask", "perplexity", "inspect_checkpoint", "audit", "convert_checkpoint", "report",
    ),
}  # fmt: skip
"""Tools by the section of the page that has them."""
UNLISTED = {
    "build_docs": "`make docs`",
    "generated_pages": "what programs that write documentation share",
    "kernel_cases": "what kernel_report measures",
    "kernel_report": "compiles the kernels without a GPU",
    "ladder": "planner.md has its commands",
    "mup_check": "optimizers.md has its commands",
    "quickstart": "`make quickstart`",
    "references": "writes this page",
    "run_lm_eval": "the program of lm-evaluation-harness, with its flags",
}
"""Tools that a make target or another tool starts, or that a page names by itself."""
_KINDS = {"sets": "{}", "idle": "no effect", "some": "only {}"}

# ---- flags


def flags() -> str:
    """All flags by section."""
    lines = []
    for info in setting_files().values():
        lines += [f"`{info.flag} {info.metavar}`: {help_text_of(info, Config).meaning}", ""]
    for name, section in sections_of(BertConfig).items():
        only = "" if name in SECTIONS else ", only pretrain_bert.py"
        lines += [f"### [{name}]{only}", "", str(section.__doc__), ""]
        lines += [_section_table(name, section), ""] if field_infos(section) else []
    return "\n".join(lines)


def _section_table(name: str, section: type) -> str:
    rows = []
    for info in field_infos(section).values():
        names = f"`{info.flag}`" + "".join(f"<br>`{alias}`" for alias in info.aliases)
        bert = None if info.name in BertConfig.unsupported else help_text_of(info, BertConfig)
        gpt = help_text_of(info, Config) if name in SECTIONS else bert
        assert gpt is not None, "a section of pretrain_bert.py has only flags that it accepts"
        texts = (_both(gpt, bert, name) for name in ("default", "meaning"))
        rows.append((names if bert else f"{names} †", _value(info), *texts))
    return table(("flag", "value", "default", "meaning"), rows)


def _both(gpt: HelpText, bert: HelpText | None, name: str) -> str:
    """The default or the meaning and, where it differs, that of pretrain_bert.py."""
    text, other = (getattr(of, name) for of in (gpt, bert or gpt))
    return (text or "required") + (f"<br>BERT: {other}" if other != text else "")


def _value(info: FieldInfo) -> str:
    """What a flag takes; nothing for a switch."""
    if info.kind is bool:
        return ""
    if info.choices:
        return f"`{'|'.join(info.choices)}`"
    return f"`{_bounds(info.range, info.kind)}`" if info.range else f"`{info.metavar}`"


def _bounds(of: Range, kind: type) -> str:
    """`1..9`, or `>0.0..<1.0` where bounds are excluded and the number may be a fraction."""
    signs = ((">=", of.low), (">", of.above), ("<=", of.high), ("<", of.below))
    bounds = [f"{sign}{_number(bound, kind)}" for sign, bound in signs if bound is not None]
    return bounds[0] if len(bounds) == 1 else "..".join(bound.replace(">=", "").replace("<=", "") for bound in bounds)


def _number(value: float, kind: type) -> str:
    text = number(value)
    return f"{text}.0" if kind is float and text.isdigit() else text


# ---- tools


def tools() -> str:
    """All tools of `LISTED`, from their --help."""
    lines = []
    for section, names in LISTED.items():
        lines += [f"## {section}", "", *(line for name in names for line in _tool(name))]
    return "\n".join(lines)


def console_scripts() -> dict[str, str]:
    """The console script of each tool that has one, by the tool's name."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = setup["options.entry_points"]["console_scripts"].split("\n")
    pairs = (line.split(" = ") for line in lines if " = " in line)
    return {target.split(":")[0].rpartition(".")[2]: name for name, target in pairs}


def _tool(name: str) -> Iterator[str]:
    module = importlib.import_module(f"tools.{name}")
    first, _, rest = str(module.__doc__).partition("\n\n")
    script = console_scripts().get(name)
    yield from (f"### {name}", "", (f"`{script}`: " if script else "") + " ".join(first.split()), "")
    yield from ("```bash", *_command(rest), "```", "")
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
        mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}),
        mock.patch.object(sys, "argv", [f"tools/{name}.py", "--help"]),
    ):
        module.main(["--help"])
    if options := _options(said.getvalue()):
        yield from ("```text", options, "```", "")


def _command(text: str) -> Iterator[str]:
    """The first command of a docstring, without its comment, in lines of at most 80 columns; guides show more."""
    if found := re.search(r"^ *((?:python|torchrun) (?:.*\\\n)*.*)$", text, re.MULTILINE):
        line = " ".join(found[1].partition(" #")[0].replace("\\\n", " ").split())
        line = re.sub(r"(--[\w-]+) (?!-)", "\\1\xa0", line)  # a flag and its value stay together
        *first, last = textwrap.wrap(line, 78, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        yield from (part.replace("\xa0", " ") for part in (*(f"{part} \\" for part in first), last))


def _options(text: str) -> str:
    """The part of a help text that lists arguments."""
    found = re.search(r"^(?:positional arguments|options|[A-Za-z ]+):\n {2}\S", text, re.MULTILINE)
    listed = re.sub(r"^(options:\n)? +-h, --help .*\n", "", text[found.start() :] if found else "", flags=re.MULTILINE)
    return listed.replace("positional arguments:\n", "").rstrip()


# ---- other trainers


def _megatron(words: Mapping[str, str], title: str) -> str:
    """Flags of Megatron-LM; those of which the same is said share a row."""
    rows: dict[str, list[str]] = {}
    for name in sorted(words, key=str.lower):
        rows.setdefault(words[name], []).append(name)
    cells = ((", ".join(_short(names)), text) for text, names in rows.items())
    return table(("Megatron-LM", title), cells) + "\n"


def _short(names: Sequence[str]) -> Iterator[str]:
    """Names, or `--first-*` for three or more that begin as no other flag does."""
    known = {*FOREIGN, *REPLACED, *NOT_YET, *flags_by_name(BertConfig)}
    for first, alike in groupby(names, key=lambda name: name.split("-")[2]):
        group, start = list(alike), f"--{first}-"
        if len(group) >= 3 and {name for name in known if name.startswith(start)} == set(group):
            yield f"`{start}*`"
        else:
            yield from (f"`{name}`" for name in group)


def deepspeed() -> str:
    """The keys of DeepSpeed's file by section, then Megatron-DeepSpeed's flags."""
    keys = table(("key", "becomes"), ((f"`{name}`", text) for name, text in _keys()))
    idle = [name for name, flag in sorted(DEEPSPEED_FLAGS.items()) if flag.becomes.startswith("nothing: ")]
    others = sorted(DEEPSPEED_FLAGS.keys() - set(idle))
    rows = [(f"`{name}`", DEEPSPEED_FLAGS[name].becomes) for name in others]
    flags = table(("flag", "becomes"), [*rows, (", ".join(f"`{name}`" for name in idle), "no effect")])
    return f"### Keys of the file\n\n{keys}\n\n### Flags of Megatron-DeepSpeed\n\n{flags}\n"


def _keys() -> Iterator[tuple[str, str]]:
    """Keys of a section that become the same share a row. The key that turns a section on is first, idle ones last."""
    known = all_keys()

    def place(path: str) -> tuple[bool, str, bool, bool]:
        section, _, name = path.rpartition(".")
        is_idle = known[path].kind == "idle"
        return bool(section), section, is_idle, not is_idle and name not in ("enabled", "type")

    def described(path: str) -> tuple[str, str, str]:
        return path.rpartition(".")[0], known[path].kind, _KINDS[known[path].kind].format(known[path].becomes)

    for (section, _, text), paths in groupby(sorted(known, key=place), key=described):
        names = [path.removeprefix(f"{section}.") if section else path for path in paths]
        yield "`, `".join([f"{section}.{names[0]}" if section else names[0], *names[1:]]), text


PARTS: dict[tuple[str, str], Callable[[], str]] = {
    ("reference/configuration.md", "flags"): flags,
    ("reference/tools.md", "tools"): tools,
    ("guides/coming-from-megatron.md", "translated"): lambda: _megatron(
        {name: flag.becomes for name, flag in {**FOREIGN, **LISTS}.items() if not flag.is_idle}, "becomes"
    ),
    ("guides/coming-from-megatron.md", "replaced"): lambda: _megatron(REPLACED, "instead"),  # another name, or no need
    ("guides/coming-from-megatron.md", "not yet"): lambda: _megatron(
        {name: text.removeprefix("without it, ") for name, text in NOT_YET.items()}, "without it"
    ),
    ("guides/coming-from-deepspeed.md", "keys"): deepspeed,
}
"""What makes each part, by its page and the name in its marker lines."""


def bring(part: tuple[str, str], *, writes: bool) -> bool:
    """Write a part into its page, or only compare it; whether it was there already."""
    page, name = part
    markers = (f"<!-- {name}: begin (written by tools/references.py) -->", f"<!-- {name}: end -->")
    return bring_up_to_date(ROOT / "docs" / page, PARTS[part](), markers, writes=writes)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check every part; the exit status is 1 where a check has failed."""
    parser = argparse.ArgumentParser(prog="references.py", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the pages, without a change")
    checks = parser.parse_args(argv).check
    stale = [f"docs/{page}, {name}" for page, name in PARTS if not bring((page, name), writes=not checks)]
    if checks and stale:
        print(f"not current: {'; '.join(stale)}: run python tools/references.py")
    return int(checks and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
