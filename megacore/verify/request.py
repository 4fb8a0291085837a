"""What a command line of `tools/verify.py` asks for, read and refused without torch."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from megacore.commands.plan_parser import ENTRIES
from megacore.commands.tool import PassingParser, ToolParser
from megacore.config import Config, ResolvedConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from megacore.config.dimensions import degree_fields
from megacore.config.flags import read_flags
from megacore.config.messages import nearest_name
from megacore.config.toml import read_toml
from megacore.convert.start import check_init_from_hf, shape_from_hf
from megacore.data.bert.build import check_bert_inputs
from megacore.data.gpt.build import check_inputs, vocabulary_size
from megacore.errors import Collected, UserError
from megacore.models.outline import outline
from megacore.pipeline.schedule_choice import choose_schedule, is_open
from megacore.pipeline.schedule_file import check_schedule
from megacore.train.planning import planner
from megacore.verify.defects import BY_NAME, DEFECTS, Defect
from megacore.verify.narrow import STEPS, narrow

if TYPE_CHECKING:
    from megacore.models.spec import DescribesLayers

# The memory of the whole model is not checked: a small copy runs.
_GPT_CHECKS, _BERT_CHECKS = (check_inputs, check_init_from_hf, check_schedule), (check_bert_inputs, check_schedule)
_MOST_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for."""

    config: ResolvedConfig  # of the layout, narrowed
    layers: DescribesLayers  # describes a GPT
    changes: tuple[str, ...]  # what narrowing changed
    defects: tuple[Defect, ...]  # to plant, one run each
    self_test: bool  # whether they must all be found
    json: Path | None  # file for the result, or None


def make_parser() -> ToolParser:
    """The parser of the tool's flags. It leaves the others to the trainer, as `flags`."""
    parser = PassingParser(
        prog="verify.py",
        usage="verify.py {pretrain_gpt.py,pretrain_bert.py,MY.py} [flags of the trainer] [--self-test] [--json FILE]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Compare a parallel layout with one process, on a narrowed copy of the model in fp32 on gloo: token\n"
            "counts, dropout masks, outputs of layers, losses, every gradient, moment and weight change of "
            f"{STEPS} steps.\n\n"
            "    python tools/verify.py pretrain_gpt.py --tp 2 --pp 2 --dp 2 --zero-stage 1\n\n"
            "starts the ranks itself; under torchrun it takes those of the job. All flags of the trainer are taken,\n"
            "and validated by the trainer. Without data it uses --mock-data. docs/guides/verify.md is the manual."
        ),
        epilog="exit status: 0 everything compared agrees, 1 something differs or a run failed, 2 refused",
    )
    parser.flag("--self-test", "inject every defect that the layout can have; each must be found")
    parser.flag("--defect NAME", "inject one defect, and show its report")
    parser.flag("--list-defects", "list the defects, and end")
    parser.flag("--json FILE", "write the complete result to FILE as JSON")
    return parser


# ---- the request


def request_of(parser: ToolParser, args: argparse.Namespace) -> Request:
    """What a command line asks for. `parser`: of `make_parser`, for its refusals. Raises SystemExit where the trainer
    refuses its flags; the message is printed."""
    problems: list[str] = args.problems
    program, *words = args.flags or [""]
    name = Path(program).name
    layers: DescribesLayers | None = None
    if name not in ENTRIES and name.endswith(".py") and Path(program).is_file():
        from megacore.inference.program import layers_of

        with Collected(problems):
            layers = layers_of(program)
    elif name not in ENTRIES:
        near = nearest_name(name, ENTRIES)
        hint = f"; did you mean {near}?" if near else ""
        given = f"not {program!r}" if program else "and nothing was given"
        ways = "pretrain_gpt.py, pretrain_bert.py or a file of your own"
        problems.append(f"the first word must be {ways}, {given}{hint}")
        words = args.flags if program.startswith("-") else words
    if args.self_test and args.defect is not None:
        problems.append("--self-test plants every defect and --defect one of them: keep one of the two")
    if args.defect is not None and args.defect not in BY_NAME:
        near = nearest_name(args.defect, BY_NAME)
        hint = f": did you mean {near}?" if near else ""
        problems.append(f"--defect {args.defect} is unknown{hint} (--list-defects)")
    path = None if args.json is None else Path(args.json)
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        problems.append(f"--json {path} must be a file in a directory that exists and can be written to")
    narrowed = narrow(_config(name, words, problems))
    config, ranks = narrowed.config, narrowed.config.parallel.ranks
    if "WORLD_SIZE" not in os.environ and ranks > _MOST_RANKS:
        parser.error(
            f"the layout has {ranks} ranks, and this tool starts at most {_MOST_RANKS} on a machine: use smaller --tp, "
            "--pp or --dp (two of each show the same defects), or start it under torchrun"
        )
    defects: tuple[Defect, ...] = () if args.defect is None else (BY_NAME[args.defect],)
    for defect in defects:
        if not defect.possible(config):
            parser.error(f"--defect {defect.name} is not possible with this layout: it needs {defect.needs}")
    if args.self_test:  # planted functions would be missing from compiled code
        config = replace(config, training=replace(config.training, compile=False))
        defects = tuple(defect for defect in DEFECTS if defect.possible(config))
    from megacore.models.gpt import gpt_layers

    return Request(
        config=config,
        layers=layers or gpt_layers,
        changes=narrowed.changes,
        defects=defects,
        self_test=args.self_test,
        json=path,
    )


def _config(name: str, words: Sequence[str], problems: Sequence[str]) -> ResolvedConfig:
    """The resolved configuration, or the trainer's refusal with the tool's `problems`; what only a real run needs gets
    a value."""
    is_bert = name == "pretrain_bert.py"
    kind: type[Any] = BertConfig if is_bert else Config
    given = read_flags(words, kind).values
    if (path := given.pop("config", None)) is not None:
        with contextlib.suppress(UserError, OSError):
            given = {**read_toml(path, kind).values, **given}
    added = [] if given.get("data_path") or given.get("mock_data") else ["--mock-data"]
    if given.get("train_iters") is None:
        added += ["--train-iters", "1000000"]  # no setting is beyond this run
    if given.get("vocab_size") is None and not any(map(given.get, ("preset", "tokenizer", "init_from_hf"))):
        added += ["--vocab-size", "512"]
    if given.get("spare_ranks"):
        added += ["--spare-ranks", "0"]  # nothing is lost here
    # The trainer sees as many processes as the layout needs, unless torchrun has started some.
    degrees = [degree for field in degree_fields() if isinstance(degree := given.get(field), int) and degree > 0]
    launched = {"RANK": "0", "WORLD_SIZE": f"{math.prod(degrees)}", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with patch.dict(os.environ, {} if "WORLD_SIZE" in os.environ else launched):
        config: ResolvedConfig = parse_config(
            [*words, *added],
            prog=name,
            description="",
            kind=kind,
            shape=None if is_bert else shape_from_hf,
            vocabulary=vocabulary_size,
            checks=_BERT_CHECKS if is_bert else _GPT_CHECKS,
            problems=problems,
            exits=not problems,
        )
    if is_open(config):  # as a launch on a CPU chooses
        choices = planner().schedules_by_time(config, outline(config), on_cpu=True)
        return choose_schedule(config, choices, lambda candidate: True)
    return config
