"""Tokenize text files into a .bin/.idx dataset.

    python tools/preprocess_data.py --input corpus.jsonl --tokenizer tokenizer --output-prefix data/corpus \\
        --append-eod --workers 8

writes data/corpus_text_document.bin, .idx and .json; they appear only when complete, and do not depend on --workers.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.commands.tool import ToolParser, positive, run_tool
from megacore.config.messages import counted
from megacore.data.indexed.corpus import TextUnit, check_files, is_json
from megacore.data.indexed.preprocess import Job, Report, preprocess
from megacore.data.tokenizers.chat_template import load_template
from megacore.data.tokenizers.fast_bpe import FastEncoder, fast_encoder
from megacore.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megacore.errors import ConfigError
from megacore.parallel.processors import available_cores
from megacore.progress import Progress

_WORTH_PROVING = 16_000_000  # bytes of input
_SHOWN = 20  # bad lines that are shown; all are counted


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 done, 2 refused, 1 failed."""
    named: dict[str, Any] = {"TextUnit": get_args(TextUnit), "worker_count": worker_count, "cores": available_cores()}
    return run_tool(ToolParser.of("preprocess_data", **named), argv, _preprocess)


def worker_count(text: str) -> int:
    """The number of workers; a mistyped one would start more processes than the machine can run."""
    count, cores = positive(text), available_cores()
    most = max(64, 4 * cores)
    if count > most:
        waiting = f"{count} processes on {counted(cores, 'core')} only wait for each other"
        raise ArgumentTypeError(f"{waiting}: use at most {most}")
    return count


def _preprocess(args: Namespace) -> None:
    # The worker processes are the parallelism: threads within each would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    file_bytes = check_files(args.input, None if args.sft else args.json_keys)
    by_default, args.text_unit = args.text_unit is None, args.text_unit or "line"
    same = ("output_prefix", "append_eod", "split_sentences", "text_unit", "workers", "strict", "sft", "deduplicate")
    lists: dict[str, Any] = {"inputs": tuple(args.input), "json_keys": tuple(args.json_keys)}
    job = Job(**lists, **{name: getattr(args, name) for name in (*same, "tokenizer")})
    _refuse_without_effect(args)
    tokenizer = load_tokenizer(args.tokenizer, args.merge_file)
    template = load_template(args.tokenizer, args.chat_template, tokenizer) if args.sft else None
    with Progress("preprocessing", file_bytes) as progress:
        report = preprocess(
            job,
            tokenizer,
            lambda so_far: progress.reach(so_far.file_bytes, f"{so_far.documents:,} documents, {figures(so_far)}"),
            template=template,
            fast=_encoder(args, tokenizer, file_bytes),
        )
    plain = [path for path in args.input if not is_json(path)]
    if plain and by_default and not args.sft:
        print(f"{plain[0]}: each line is one document (--text-unit file or paragraph changes that)", file=sys.stderr)
    _summarize(job, report)


def _encoder(args: Namespace, tokenizer: Tokenizer, file_bytes: int) -> FastEncoder | None:
    """The fast encoder, where it is asked for, or pays: proving it takes as long as some megabytes of text."""
    if args.encoder == "tokenizers" or args.sft or (args.encoder == "auto" and file_bytes < _WORTH_PROVING):
        return None
    fast = fast_encoder(tokenizer, args.workers)
    if fast is None and args.encoder == "tiktoken":
        why = "tiktoken is not installed (pip install tiktoken), the tokenizer is no byte-level BPE, or some ids differ"
        said = f"--encoder tiktoken cannot encode for {args.tokenizer}: {why}: use --encoder auto or tokenizers"
        raise ConfigError([said])
    return fast


def _refuse_without_effect(args: Namespace) -> None:
    """Refuse flags that are of conversations, or of texts, where the others are read."""
    problems = []
    if not args.sft and args.chat_template != "auto":
        problems.append(f"--chat-template {args.chat_template} has no effect without --sft: leave it out, or use --sft")
    if args.sft:
        given = {
            f"--json-keys {' '.join(args.json_keys)}": args.json_keys != ["text"], "--append-eod": args.append_eod,
            "--split-sentences": args.split_sentences, f"--text-unit {args.text_unit}": args.text_unit != "line",
            "--strict": args.strict, "--deduplicate": args.deduplicate,
            f"--encoder {args.encoder}": args.encoder != "auto",
        }  # fmt: skip
        problems += [f"{flag} has no effect with --sft: leave it out" for flag, is_given in given.items() if is_given]
    if problems:
        raise ConfigError(problems)


def figures(report: Report) -> str:
    """Documents, megabytes of text and tokens per second."""
    seconds = max(report.seconds, 1e-9)
    documents, megabytes = report.documents / seconds, report.text_bytes / seconds / 1e6
    return f"{documents:,.0f} documents/s, {megabytes:.2f} MB/s, {report.tokens / seconds:,.0f} tokens/s"


def _summarize(job: Job, report: Report) -> None:
    for line in report.bad[:_SHOWN]:
        print(f"left out {line}", file=sys.stderr)
    if report.bad_count:
        print(f"left out {counted(report.bad_count, 'bad line')}; --strict refuses them", file=sys.stderr)
    for count, kind in ((report.empty, "empty document"), (report.repeated, "repeated document")):
        if count:
            print(f"left out {counted(count, kind)}", file=sys.stderr)
    files = ((prefix, "|json" if Path(f"{prefix}.json").exists() else "") for prefix in job.outputs)
    outputs = ", ".join(f"{prefix}.bin|idx{more}" for prefix, more in files)
    written = f"{report.documents:,} documents, {report.tokens:,} tokens in {report.seconds:.1f} s"
    print(f"{outputs}: {written} ({figures(report)})")


if __name__ == "__main__":
    sys.exit(main())
