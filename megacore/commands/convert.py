"""The command line of tools/convert_checkpoint.py, and the order of a conversion: read, write under a temporary name,
read both sides back and compare, publish.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

import torch

from megacore.commands.tool import ToolParser, positive
from megacore.config.messages import one_of
from megacore.convert.check import Agreement, check_tokens, compare, not_crossed
from megacore.convert.from_hf import open_model, write_checkpoint
from megacore.convert.megatron import describe, open_megatron, write_megatron
from megacore.convert.publish import published
from megacore.convert.start import ignored_fields
from megacore.convert.to_hf import plan_export, write_directory
from megacore.errors import UserError
from megacore.freed_memory import give_back_what_is_freed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parser() -> ToolParser:
    """The flags."""
    made = ToolParser(
        prog="convert_checkpoint.py",
        description="Convert checkpoints between Hugging Face transformers and megacore, and from Megatron-LM.",
    )
    add = made.add_argument
    add("--from", dest="source", required=True, choices=("hf", "megacore", "megatron"), help="format of the input")
    add("--to", dest="target", required=True, choices=("hf", "megacore"), help="format of the output")
    add("--input", required=True, type=Path, metavar="DIR", help="the directory to read")
    add("--output", required=True, type=Path, metavar="DIR", help="the directory to create; it must not exist")
    add(
        "--max-shard-size",
        type=size,
        default=size("5GB"),
        metavar="SIZE",
        help="largest size of a weight file, such as 500MB. Default: 5GB.",
    )
    add(
        "--dtype",
        choices=("keep", *DTYPES),
        default="keep",
        help="number format of the exported weights; keep: as stored. Default: keep.",
    )
    add(
        "--vocab-size",
        type=positive,
        metavar="N",
        help="size of the vocabulary without padding, for --from megatron. Default: the size in the checkpoint's args, "
        "else the padded size.",
    )
    add(
        "--ignore-config-field",
        metavar="NAME[,NAME]",
        help="fields of the input's config.json to leave out, for --from hf. The comparison of logits still decides.",
    )
    add("--like", type=Path, metavar="DIR", help="export with the config.json and tokenizer of this directory")
    add(
        "--check-tokens",
        type=Path,
        metavar="FILE",
        help="text on which the two models are compared. Default: a built-in text.",
    )
    add(
        "--tolerance",
        type=tolerance,
        default=1e-4,
        metavar="X",
        help="largest difference of logits, relative to the largest logit. Default: 1e-4.",
    )
    return made


def convert(args: Namespace) -> None:
    """Convert, prove it, and publish.

    Raises:
        UserError: the input cannot be converted exactly, or the output exists.
    """
    ways = {("hf", "megacore"): _from_hf, ("megacore", "hf"): _to_hf, ("megatron", "megacore"): _from_megatron}
    way = ways.get((args.source, args.target))
    if way is None:
        raise UserError(
            f"--from {args.source} --to {args.target} is no conversion that there is: "
            f"use {one_of([f'--from {source} --to {target}' for source, target in ways])}"
        )
    for flag, given, used in (
        ("--dtype", args.dtype != "keep", args.target == "hf"),
        ("--like", args.like is not None, args.target == "hf"),
        ("--vocab-size", args.vocab_size is not None, args.source == "megatron"),
        ("--ignore-config-field", args.ignore_config_field is not None, args.source == "hf"),
        ("--check-tokens", args.check_tokens is not None, args.source != "megatron"),
    ):
        if given and not used:
            raise UserError(f"{flag} has no effect with --from {args.source} --to {args.target}: leave it out")
    give_back_what_is_freed()
    with published(args.output) as temporary:
        way(args, temporary)
    print(f"published {args.output}")


def _from_hf(args: Namespace, temporary: Path) -> None:
    ignored = ignored_fields(args.ignore_config_field)
    model = open_model(args.input, ignored)
    print(f"{args.input}: {model.family.model_type}, {len(model.stored.tensors)} tensors")
    if model.stored.left_out:
        names = ", ".join(model.stored.left_out[:3])
        print(f"left out, as the model does not compute with them: {names} ({len(model.stored.left_out)} in all)")
    if model.unknown:
        names = ", ".join(name[:80] for name in model.unknown[:5])
        print(f"not known to megacore in config.json, so the logits decide: {names} ({len(model.unknown)} in all)")
    write_checkpoint(model, temporary, most_bytes=args.max_shard_size)
    tokens = check_tokens(model.config, args.input, args.check_tokens)
    agreement = compare(args.input, temporary, tokens, ignored=ignored)
    _report(agreement, not_crossed(model.config, tokens))
    agreement.require(args.tolerance, unknown=model.unknown)


def _to_hf(args: Namespace, temporary: Path) -> None:
    dtype = DTYPES.get(args.dtype)
    export = plan_export(args.input, like=args.like, dtype=dtype)
    print(f"{export.tensors.directory}: becomes {export.family.class_of(export.tensors.bert)}")
    if export.kept is None:
        print("config.json is made anew from the checkpoint's configuration")
    for note in export.notes:
        print(note)
    write_directory(export, temporary, most_bytes=args.max_shard_size)
    tokens = check_tokens(export.tensors.config, export.tokenizer.directory, args.check_tokens)
    agreement = compare(temporary, export.tensors.directory, tokens, rounded=dtype, ignored=export.ignored)
    _report(agreement, not_crossed(export.tensors.config, tokens))
    agreement.require(args.tolerance)


def _report(agreement: Agreement, untold: str | None) -> None:
    print(agreement)
    if untold is not None:
        print(untold)


def _from_megatron(args: Namespace, temporary: Path) -> None:
    model = open_megatron(args.input, args.vocab_size)
    print(describe(model))
    write_megatron(model, temporary, most_bytes=args.max_shard_size)
    print(
        "every tensor was read back and is bitwise the one that was converted; logits were NOT compared: Megatron-LM's "
        "model is not available to compute them"
    )


def size(text: str) -> int:
    """A number of bytes, such as 500MB."""
    match = re.fullmatch(r"(\d{1,12})\s*([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in _UNITS or int(match[1]) < 1:
        raise ArgumentTypeError(f"{text!r} is no size: use, for example, 500MB or 5GB")
    return int(match[1]) * _UNITS[match[2]]


def tolerance(text: str) -> float:
    """A number above 0 and at most 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return value
