"""Perplexity and bits per byte of texts under a checkpoint of any layout, in one process.

python tools/perplexity.py output --input corpus.jsonl book.txt --stride 256
python tools/perplexity.py output --data-path data/corpus_text_document
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.checkpoint.manifest import find_checkpoint
from megacore.commands.tool import ToolParser, add_program, run_tool
from megacore.data.indexed.corpus import check_files, read_chunks
from megacore.data.indexed.documents import parse
from megacore.data.indexed.reader import IndexedDataset, int64_tokens
from megacore.data.tokenizers.tokenizer import Tokenizer
from megacore.errors import UserError
from megacore.files import replacing
from megacore.remote import usable

if TYPE_CHECKING:
    from megacore.inference.scoring import Surprise

Document = tuple[Sequence[int], int]  # tokens, bytes of text


def main(argv: Sequence[str] | None = None) -> int:
    """Print the perplexity; the exit status is 0 done, 2 refused."""
    parser = ToolParser.of("perplexity")
    add_program(parser)
    return run_tool(parser, argv, _measure)


def _measure(args: Namespace) -> None:
    if bool(args.input) == bool(args.data_path):
        raise UserError("give texts with --input FILE..., or a dataset with --data-path PREFIX")
    run = find_checkpoint(usable(args.run))
    check_files(args.input)
    if args.per_document:
        _check_output(Path(args.per_document), args.input)
    # Torch takes seconds to import: not before the command line and the files are right.
    from megacore.inference.scoring import Scorer, Surprise, context_of, surprises
    from megacore.inference.trained import causal_model

    model = causal_model(run, args.tokenizer, args.program)
    config, tokenizer = model.config, model.tokenizer
    length = context_of(args.context, config)
    stride = args.stride or max(1, length // 2)
    if stride > length:
        raise UserError(f"--stride {stride} is more than the context of {length} tokens: use {length} or less")
    prefix = _prefix(args.prefix, tokenizer)
    if args.input:
        documents = _texts(args.input, args.text_key, args.text_unit, tokenizer)
    else:
        documents = _stored(IndexedDataset(args.data_path), tokenizer, config.vocab_size)
    scorer = Scorer(model.stage(args.device), config, batch_size=args.batch_size)
    total = Surprise()
    with ExitStack() as stack:
        path = Path(args.per_document) if args.per_document else None
        # Whole or absent, unless it is a pipe or a device.
        opened = path and (path.open("wb") if path.exists() and not path.is_file() else replacing(path.resolve()))
        file = stack.enter_context(opened) if opened else None
        for found in surprises(scorer, documents, prefix=prefix, length=length, stride=stride):
            if file is not None:
                file.write((json.dumps({"document": total.documents, **_record(found)}) + "\n").encode())
            total += found
    if not total.tokens:
        raise UserError("there is no token to predict: give longer texts, or --prefix bos or eod")
    if args.json:
        print(json.dumps({"checkpoint": str(model.directory), "context": length, "stride": stride, **_record(total)}))
        return
    print(f"{total.documents:,} documents, {total.tokens:,} predicted tokens, {total.bytes:,} bytes of text")
    print(f"perplexity per token  {total.perplexity:.4f}   ({total.nats / total.tokens:.6f} nats per token)")
    if total.bits_per_byte is not None:
        print(f"bits per byte         {total.bits_per_byte:.6f}")


def _record(of: Surprise) -> dict[str, Any]:
    names = ("documents", "tokens", "bytes", "nats", "perplexity", "bits_per_byte")
    return {name: getattr(of, name) for name in names}


def _check_output(path: Path, inputs: Sequence[str]) -> None:
    """Refuse a file of results that cannot be written, before anything is computed.

    Raises:
        UserError: it is one of the inputs, or a directory, or its directory is missing.
    """
    if path.exists() and any(path.samefile(each) for each in inputs):
        raise UserError(f"--per-document {path} would overwrite one of the inputs: name another file")
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--per-document {path} cannot be written: name a file in a directory that exists")


def _prefix(choice: str, tokenizer: Tokenizer) -> int | None:
    """The token before each document."""
    known = {"bos": tokenizer.bos, "eod": tokenizer.eod}
    if choice == "auto":
        return tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    if choice in known and known[choice] is None:
        raise UserError(f"--prefix {choice}: the tokenizer has no such token: use --prefix none")
    return known.get(choice)


def _texts(paths: Sequence[str], key: str, unit: Any, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents of files of text.

    Raises:
        UserError: a line holds no usable document.
    """
    for path in paths:
        for chunk in read_chunks(path, unit, columns=(key,)):
            parsed = parse(chunk, (key,))
            if parsed.bad:
                raise UserError(str(parsed.bad[0]))
            for text in parsed.texts[0]:
                yield tokenizer.encode(text), len(text.encode())


def _stored(dataset: IndexedDataset, tokenizer: Tokenizer, vocab_size: int) -> Iterator[Document]:
    """The documents of a preprocessed dataset, whose texts have the bytes that its tokens decode to."""
    for number in range(dataset.num_documents):
        start, stop = dataset.document_start(number), dataset.document_start(number + 1)
        tokens = int64_tokens(dataset, start, stop, vocab_size).tolist()
        yield tokens, len(tokenizer.decode(tokens).encode())


if __name__ == "__main__":
    sys.exit(main())
