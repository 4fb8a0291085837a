"""Train a tokenizer on text files.

    python tools/train_tokenizer.py --input corpus.jsonl --model bpe --vocab-size 8192 --output tokenizer

The output directory is what `--tokenizer` of the other tools takes. The same input gives the same files.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.commands.tool import ToolParser, positive, run_tool
from megacore.config.messages import counted, one_of
from megacore.data.indexed.corpus import TextUnit, check_files, read_chunks
from megacore.data.indexed.documents import BadLine, parse
from megacore.data.indexed.writer import refuse_overwriting
from megacore.data.tokenizers.tokenizer import refuse_other_kind, refuse_replacing, saved_files
from megacore.data.tokenizers.training import TokenizerKind, train_tokenizer
from megacore.errors import DataError, UserError

LARGEST_VOCABULARY = 10_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 done, 2 refused."""
    named: dict[str, Any] = {"TextUnit": get_args(TextUnit), "TokenizerKind": get_args(TokenizerKind)}
    return run_tool(ToolParser.of("train_tokenizer", vocabulary_size=vocabulary_size, **named), argv, _train)


def vocabulary_size(text: str) -> int:
    """Beyond this the trainers reserve memory until they are killed."""
    size = positive(text)
    if size > LARGEST_VOCABULARY:
        raise ArgumentTypeError(f"{size} is more tokens than any text has: use at most {LARGEST_VOCABULARY}")
    return size


def _train(args: Namespace) -> None:
    if args.lowercase and args.model != "wordpiece":
        raise UserError(f"--lowercase has no effect with --model {args.model}: leave it out, or use --model wordpiece")
    check_files(args.input, args.json_keys, read_again=True)
    refuse_other_kind(args.output, args.model)
    refuse_overwriting(saved_files(args.output), args.input)
    texts = _Texts(args)
    options = {"lowercase": args.lowercase, "show_progress": sys.stderr.isatty()}
    tokenizer = train_tokenizer(texts, args.model, args.vocab_size, **options)
    if not args.overwrite:
        refuse_replacing(args.output, tokenizer)
    tokenizer.save(args.output)
    for line in texts.bad[:10]:
        print(f"left out {line}", file=sys.stderr)
    if texts.bad:
        print(f"left out {counted(len(texts.bad), 'bad line')}", file=sys.stderr)
    size, fingerprint = tokenizer.vocab_size, tokenizer.fingerprint[:12]
    print(f"{args.output}: {args.model} tokenizer with a vocabulary of {size}, fingerprint {fingerprint}")


class _Texts:
    """The texts of the input files, read anew in each iteration; `bad` is what the last one left out."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self.bad: list[BadLine] = []

    def __iter__(self) -> Iterator[str]:
        """Raises DataError where there is no text."""
        self.bad.clear()
        found = False
        for path in self._args.input:
            for chunk in read_chunks(path, self._args.text_unit, columns=self._args.json_keys):
                parsed = parse(chunk, self._args.json_keys if chunk.unit == "json" else ("text",))
                self.bad.extend(parsed.bad)
                for texts in parsed.texts:
                    found = found or any(texts)
                    yield from texts
        if not found:
            first = f"the first bad line is {self.bad[0]}" if self.bad else "all documents are empty"
            raise DataError(f"{one_of(self._args.input)}: no text to train on ({first})")


if __name__ == "__main__":
    sys.exit(main())
