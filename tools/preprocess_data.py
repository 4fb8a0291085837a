"""Tokenize text files into a .bin/.idx dataset.

    python tools/preprocess_data.py --input corpus.jsonl --tokenizer tokenizer --output-prefix data/corpus \\
        --append-eod --workers 8

writes data/corpus_text_document.bin, .idx and .json; they appear only when complete, and do not depend on --workers.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

if importlib.util.find_spec("megacore") is None:  # a bare checkout, which nothing has installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacore.commands.tool import ToolParser, positive, run_tool
from megacore.config.messages import counted
from megacore.data.indexed.corpus import TextUnit, check_files
from megacore.data.indexed.preprocess import Job, Report, preprocess
from megacore.data.tokenizers.chat_template import ChatTemplate, load_template
from megacore.data.tokenizers.fast_bpe import FastEncoder, fast_encoder
from megacore.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megacore.errors import ConfigError
from megacore.parallel.processors import available_cores
from megacore.progress import Progress

_WORTH_PROVING = 16_000_000  # bytes of input
_SHOWN = 20  # bad lines that are shown; all are counted


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 done, 2 refused, 1 failed."""
    return run_tool(_parser(), argv, _preprocess)


def _parser() -> ToolParser:
    parser = ToolParser(prog="preprocess_data.py", description="Tokenize text files into a .bin/.idx dataset.")
    add = parser.add_argument
    add(
        "--input", nargs="+", required=True, metavar="FILE",
        help=".jsonl or plain text, also .gz and .zst, or .parquet (pip install pyarrow)",
    )  # fmt: skip
    add(
        "--tokenizer", "--tokenizer-model", "--vocab-file", required=True, metavar="PATH",
        help="a tokenizer.json or a directory with one, a SentencePiece .model, GPT-2's vocab.json or BERT's vocab.txt",
    )  # fmt: skip
    add(
        "--merge-file", metavar="FILE",
        help="GPT-2's merges.txt, where --tokenizer is its vocab.json. Default: the file of that name beside it.",
    )  # fmt: skip
    add(
        "--output-prefix", required=True, metavar="P",
        help="prefix of the files to write: P_text_document.bin, .idx and .json",
    )  # fmt: skip
    add(
        "--json-keys", nargs="+", default=["text"], metavar="KEY",
        help="keys of the .jsonl objects, or columns of .parquet files; each has its own output. Default: text.",
    )  # fmt: skip
    add("--append-eod", action="store_true", help="end every document with the end-of-document token")
    add(
        "--split-sentences", action="store_true",
        help="make each sentence a sequence, for BERT's sentence pairs: writes P_text_sentence",
    )  # fmt: skip
    add(
        "--text-unit", choices=get_args(TextUnit), default="line",
        help="what is a document in plain text. Default: line.",
    )  # fmt: skip
    add(
        "--workers", type=worker_count, default=available_cores(), metavar="N",
        help="processes that tokenize. Default: one per core.",
    )  # fmt: skip
    add(
        "--encoder", choices=("auto", "tiktoken", "tokenizers"), default="auto",
        help="encoder of byte-level BPE. tiktoken: faster (pip install tiktoken), if it gives the same ids. auto: "
        "tiktoken for inputs of 16 MB or more, if possible. Default: auto.",
    )  # fmt: skip
    add("--deduplicate", action="store_true", help="drop a document whose texts equal those of an earlier one")
    add("--strict", action="store_true", help="refuse the input at its first bad line")
    add(
        "--sft", action="store_true",
        help="read conversations: .jsonl lines with messages (a list of role and content), or with prompt and "
        "completion. Only the assistant's replies are predicted. Writes P_sft_document and its loss mask, "
        "P_sft_document_loss_mask",
    )  # fmt: skip
    add(
        "--chat-template", choices=get_args(ChatTemplate), default="auto",
        help="how --sft renders messages. tokenizer: by the chat template of the tokenizer's directory, with "
        "transformers. plain: <|role|> on a line, then the content. auto: tokenizer if there is one, else plain. "
        "Default: auto.",
    )  # fmt: skip
    return parser


def worker_count(text: str) -> int:
    """The number of workers; a mistyped one would start more processes than the machine can run."""
    count, cores = positive(text), available_cores()
    most = max(64, 4 * cores)
    if count > most:
        raise ArgumentTypeError(
            f"{count} processes on {counted(cores, 'core')} only wait for each other: use at most {most}"
        )
    return count


def _preprocess(args: Namespace) -> None:
    # The worker processes are the parallelism: threads within each would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    file_bytes = check_files(args.input, None if args.sft else args.json_keys)
    job = Job(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
        text_unit=args.text_unit,
        workers=args.workers,
        strict=args.strict,
        sft=args.sft,
        deduplicate=args.deduplicate,
        tokenizer=args.tokenizer,
    )
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
    _summarize(job, report)


def _encoder(args: Namespace, tokenizer: Tokenizer, file_bytes: int) -> FastEncoder | None:
    """The fast encoder, where it is asked for, or pays: proving it takes as long as some megabytes of text."""
    if args.encoder == "tokenizers" or args.sft or (args.encoder == "auto" and file_bytes < _WORTH_PROVING):
        return None
    fast = fast_encoder(tokenizer, args.workers)
    if fast is None and args.encoder == "tiktoken":
        raise ConfigError(
            [
                f"--encoder tiktoken cannot encode for {args.tokenizer}: tiktoken is not installed (pip install "
                "tiktoken), the tokenizer is no byte-level BPE, or some ids differ: use --encoder auto or tokenizers"
            ]
        )
    return fast


def _refuse_without_effect(args: Namespace) -> None:
    """Refuse flags that are of conversations, or of texts, where the others are read."""
    problems = []
    if not args.sft and args.chat_template != "auto":
        problems.append(f"--chat-template {args.chat_template} has no effect without --sft: leave it out, or use --sft")
    if args.sft:
        given = {
            f"--json-keys {' '.join(args.json_keys)}": args.json_keys != ["text"],
            "--append-eod": args.append_eod,
            "--split-sentences": args.split_sentences,
            f"--text-unit {args.text_unit}": args.text_unit != "line",
            "--strict": args.strict,
            "--deduplicate": args.deduplicate,
            f"--encoder {args.encoder}": args.encoder != "auto",
        }
        problems += [f"{flag} has no effect with --sft: leave it out" for flag, is_given in given.items() if is_given]
    if problems:
        raise ConfigError(problems)


def figures(report: Report) -> str:
    """Documents, megabytes of text and tokens per second."""
    seconds = max(report.seconds, 1e-9)
    return (
        f"{report.documents / seconds:,.0f} documents/s, {report.text_bytes / seconds / 1e6:.2f} MB/s, "
        f"{report.tokens / seconds:,.0f} tokens/s"
    )


def _summarize(job: Job, report: Report) -> None:
    for line in report.bad[:_SHOWN]:
        print(f"left out {line}", file=sys.stderr)
    if report.bad_count:
        print(f"left out {counted(report.bad_count, 'bad line')}; --strict refuses them", file=sys.stderr)
    if report.empty:
        print(f"left out {counted(report.empty, 'empty document')}", file=sys.stderr)
    if report.repeated:
        print(f"left out {counted(report.repeated, 'repeated document')}", file=sys.stderr)
    outputs = ", ".join(
        f"{prefix}.bin|idx" + ("|json" if Path(f"{prefix}.json").exists() else "") for prefix in job.outputs
    )
    written = f"{report.documents:,} documents, {report.tokens:,} tokens in {report.seconds:.1f} s"
    print(f"{outputs}: {written} ({figures(report)})")


if __name__ == "__main__":
    sys.exit(main())
