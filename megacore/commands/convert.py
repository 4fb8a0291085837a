"""The command line of tools/convert_checkpoint.py. torch, which takes seconds to load, is imported for the conversion
itself."""

from __future__ import annotations

import importlib
import re
from argparse import ArgumentTypeError, Namespace

from megacore.checkpoint.download import local_checkpoint
from megacore.checkpoint.manifest import find_checkpoint, merging, read_manifest
from megacore.commands.tool import ToolParser, add_program
from megacore.config.messages import one_of
from megacore.convert.publish import published
from megacore.errors import UserError
from megacore.remote import is_url

_OF_MEGATRON = ("megatron", "torch_dist")
_WITH_PROGRAM = ("hf", "dcp")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
# By --from and --to, a function of megacore/commands/conversions.py.
_WAYS = {
    ("hf", "megacore"): "from_hf",
    ("megacore", "hf"): "to_hf",
    ("megatron", "megacore"): "from_megatron",
    ("torch_dist", "megacore"): "from_megatron",
    ("deepspeed", "megacore"): "from_deepspeed",
    ("dcp", "megacore"): "from_dcp",
    ("megacore", "dcp"): "to_dcp",
    ("megacore", "megatron"): "to_megatron",
    ("megacore", "torch_dist"): "to_megatron",
    ("megacore", "peft"): "to_peft",
    ("peft", "megacore"): "from_peft",
}


def parser() -> ToolParser:
    """The flags."""
    made = ToolParser.of("convert_checkpoint", size=size)
    add_program(made)
    return made


def convert(args: Namespace) -> None:
    """Convert, prove it, and publish. Raises UserError where the input cannot be converted exactly, or the output
    exists."""
    ways = _WAYS
    if args.upcycle is not None or args.merge:
        ways = {("megacore", "megacore"): "merge_adapters" if args.merge else "upcycle"}
    way = ways.get((args.source, args.target))
    if way is None:
        what = "is no conversion that there is" if args.upcycle is None else f"cannot have --upcycle {args.upcycle}"
        what = "cannot have --merge" if args.merge else what
        more = ", or add --upcycle or --merge" if args.source == args.target == "megacore" else ""
        raise UserError(
            f"--from {args.source} --to {args.target} {what}: "
            f"use {one_of([f'--from {source} --to {target}' for source, target in ways])}{more}"
        )
    for name, is_used in _uses(args).items():
        if getattr(args, name) != parser().get_default(name) and not is_used:
            flag, needs = f"--{name.replace('_', '-')}", ", or add --upcycle" if name == "moe_router_topk" else ""
            raise UserError(f"{flag} has no effect with --from {args.source} --to {args.target}: leave it out{needs}")
    if is_url(args.run) and args.source != "megacore":
        raise UserError(
            f"{args.run} is a URL, which --from {args.source} does not read: download it, and give its path"
        )
    # The copy of a URL lies beside the output, where there must be room for as much anyway.
    with local_checkpoint(args.run, args.output.absolute().parent) as args.run, published(args.output) as temporary:
        if args.source == "megacore" and args.target not in _WITH_PROGRAM:
            _refuse_layers_of_a_program(args)
        if args.source == "megacore" and args.target != "peft" and not args.merge:
            _refuse_adapters(args)
        # Tensors are read and freed one by one: without it the process keeps the memory of all of them.
        importlib.import_module("megacore.train.freed_memory").give_back_what_is_freed()
        getattr(importlib.import_module("megacore.commands.conversions"), way)(args, temporary)
    print(f"published {args.output}")


def _uses(args: Namespace) -> dict[str, bool]:
    """Whether the conversion uses each flag that is not for all of them."""
    source, target = args.source, args.target
    exports, of_megatron = target not in ("megacore", "peft"), target == "megatron"
    return {
        "dtype": exports,
        "like": target in ("hf", "dcp", "peft") or source in ("deepspeed", "dcp", "peft"),
        "base": args.merge or "peft" in (source, target),
        "upcycle": not args.merge,
        "ema": exports,
        "program": source == "megacore" and target in _WITH_PROGRAM,
        "dcp_names": target == "dcp",
        "vocab_size": source in (*_OF_MEGATRON, "deepspeed"),
        "ignore_config_field": source in ("hf", "deepspeed", "dcp"),
        "moe_router_topk": args.upcycle is not None,
        "check_tokens": not {source, target} & {*_OF_MEGATRON},
        "tp": of_megatron,
        "pp": of_megatron,
        "megatron_norms": of_megatron,
    }


def _refuse_layers_of_a_program(args: Namespace) -> None:
    directory = find_checkpoint(args.run)
    if read_manifest(directory).has_own_layers:
        raise UserError(
            f"{directory} was trained by a program that describes its own layers: use --to {one_of(_WITH_PROGRAM)} "
            f"instead of {args.target}, with --program FILE.py"
        )


def _refuse_adapters(args: Namespace) -> None:
    directory = find_checkpoint(args.run)
    if read_manifest(directory).settings.get("lora_rank") is not None:
        raise UserError(
            f"{directory} has adapters, and not the weights of the model: use --to peft, or first merge both with "
            f"{merging(directory, args.run)}"
        )


def size(text: str) -> int:
    """A number of bytes, such as 500MB."""
    # A bound on the digits: Python refuses to convert thousands of them with an error of its own.
    match = re.fullmatch(r"(\d{1,12})\s*([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in _UNITS or int(match[1]) < 1:
        raise ArgumentTypeError(f"{text!r} is no size: use, for example, 500MB or 5GB")
    return int(match[1]) * _UNITS[match[2]]
