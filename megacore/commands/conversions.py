"""The conversions of tools/convert_checkpoint.py: each reads, writes under a temporary name, reads both sides back and
compares. Their arguments: the flags, and where the output is written until it is published."""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megacore.checkpoint.files import TOKENIZER_DIRECTORY
from megacore.checkpoint.manifest import base_of, find_checkpoint, read_manifest
from megacore.config.messages import one_of
from megacore.convert.as_hf import Source, export_dcp, read_dcp, write_hf
from megacore.convert.check import Agreement, check_tokens, compare, compare_adapted, compare_checkpoints, not_crossed
from megacore.convert.checkpoint_tensors import CheckpointTensors
from megacore.convert.deepspeed_files import open_deepspeed
from megacore.convert.from_hf import open_model, write_checkpoint
from megacore.convert.megatron import MegatronModel, describe, merge, open_megatron, write_megatron
from megacore.convert.peft import family_for, require_same_adapters, write_adapters, write_merged, write_peft
from megacore.convert.start import ignored_fields
from megacore.convert.to_hf import plan_export, write_directory
from megacore.convert.to_megatron import MegatronExport, plan_megatron, require_equal, write_ranks, write_torch_dist
from megacore.convert.upcycle import upcycled, write_upcycled
from megacore.errors import CheckpointError, UserError
from megacore.inference.trained import trained_layers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def merge_adapters(args: Namespace, temporary: Path) -> None:
    """Adapters and what they were trained beside, as one model."""
    adapters = CheckpointTensors(args.run)
    with _base(args, adapters, temporary) as (name, base):
        write_merged(adapters, base, temporary, most_bytes=args.max_shard_size)
        print(f"{adapters.directory}: merged into {name}")
        tokens = check_tokens(base.config, base.directory / TOKENIZER_DIRECTORY, args.check_tokens)
        agreement = compare_adapted(adapters, base, temporary, tokens)
    _report(agreement, not_crossed(base.config, tokens))
    agreement.require(args.tolerance)


@contextmanager
def _base(args: Namespace, adapters: CheckpointTensors, temporary: Path) -> Iterator[tuple[str, CheckpointTensors]]:
    """The name and the tensors of what adapters were trained beside; a directory of transformers is converted for the
    time."""
    settings = adapters.manifest.settings
    given = args.base or settings.get("init_from_hf")
    if given is None or not (Path(str(given)) / "config.json").is_file():
        base = CheckpointTensors(Path(str(base_of(adapters.manifest, adapters.directory, args.base))))
        yield str(base.directory), base
        return
    with _between(temporary) as between:
        ignored = settings.get("ignore_config_field")
        from_hf(Namespace(**{**vars(args), "run": Path(str(given)), "ignore_config_field": ignored}), between)
        try:
            base_of(adapters.manifest, adapters.directory, between)
        except CheckpointError:  # nor does the same model have the same manifest, written by another version
            was = settings.get("pretrained_checkpoint")
            print(f"warning: the adapters are of {was}; check that {given} is the same model", file=sys.stderr)
        yield str(given), CheckpointTensors(between)


@contextmanager
def _between(temporary: Path) -> Iterator[Path]:
    """A directory for what lies between two conversions."""
    between = temporary.with_name(f"{temporary.name}-between")
    try:
        between.mkdir()
        yield between
    finally:
        shutil.rmtree(between, ignore_errors=True)


def to_peft(args: Namespace, temporary: Path) -> None:
    """Adapters to PEFT's format."""
    tensors = CheckpointTensors(args.run)
    settings = tensors.manifest.settings
    unread = nullcontext((str(settings.get("pretrained_checkpoint")), None))
    with _base(args, tensors, temporary) if args.base or settings.get("lora_dora") else unread as (name, base):
        family = family_for(tensors.config, Path(name) if base is None else base.directory, args.like)
        write_peft(tensors, base, family, temporary, like=args.like)
        print(f"{tensors.directory}: {len(tensors.shapes)} tensors of adapters, of a {family.model_type}")
        worst = require_same_adapters(temporary, tensors, base, family)
    print(f"read back, what they {'add' if base is None else 'make of the weights'} is the same to {worst:.1e}")


def from_peft(args: Namespace, temporary: Path) -> None:
    """Adapters of PEFT's format."""
    if args.base is None:
        raise UserError("--from peft needs --base DIR, the checkpoint of megacore that the adapters are of")
    base = CheckpointTensors(args.base)
    write_adapters(
        args.run, base, family_for(base.config, base.directory, args.like), temporary, most_bytes=args.max_shard_size
    )
    print(f"{args.run}: adapters of {base.directory}")


def from_hf(args: Namespace, temporary: Path) -> None:
    """A directory of transformers."""
    ignored = ignored_fields(args.ignore_config_field)
    model = open_model(args.run, ignored)
    print(f"{args.run}: {model.family.model_type}, {len(model.stored.tensors)} tensors")
    if model.stored.left_out:
        names = ", ".join(model.stored.left_out[:3])
        print(f"left out, as the model does not compute with them: {names} ({len(model.stored.left_out)} in all)")
    if model.unknown:
        names = ", ".join(name[:80] for name in model.unknown[:5])
        print(f"not known to megacore in config.json, so the logits decide: {names} ({len(model.unknown)} in all)")
    write_checkpoint(model, temporary, most_bytes=args.max_shard_size)
    tokens = check_tokens(model.config, args.run, args.check_tokens)
    agreement = compare(args.run, temporary, tokens, ignored=ignored)
    _report(agreement, not_crossed(model.config, tokens))
    agreement.require(args.tolerance, unknown=model.unknown)


def to_hf(args: Namespace, temporary: Path) -> None:
    """To a directory of transformers."""
    directory, dtype = find_checkpoint(args.run), DTYPES.get(args.dtype)
    layers = trained_layers(args.program, read_manifest(directory), directory)
    export = plan_export(args.run, like=args.like, dtype=dtype, averaged=args.ema)
    print(f"{export.tensors.directory}: becomes {export.family.class_of(export.tensors.bert)}")
    if export.kept is None:
        print("config.json is made anew from the checkpoint's configuration")
    for note in export.notes:
        print(note)
    write_directory(export, temporary, most_bytes=args.max_shard_size)
    tokens = check_tokens(export.tensors.config, export.tokenizer.directory, args.check_tokens)
    agreement = compare(
        temporary,
        export.tensors.directory,
        tokens,
        rounded=dtype,
        ignored=export.ignored,
        averaged=args.ema,
        layers=layers,
    )
    _report(agreement, not_crossed(export.tensors.config, tokens))
    agreement.require(args.tolerance)


def upcycle(args: Namespace, temporary: Path) -> None:
    """A model without experts becomes a mixture."""
    tensors = CheckpointTensors(args.run)
    if tensors.bert is not None:
        raise UserError(f"{args.run} is a BERT, whose blocks have no experts: --upcycle needs a GPT")
    chosen = 2 if args.moe_router_topk is None else args.moe_router_topk
    model = upcycled(tensors.config, tensors.directory, experts=args.upcycle, chosen=chosen)
    print(f"{tensors.directory}: becomes a mixture of {args.upcycle} experts, of which a token uses {chosen}")
    write_upcycled(tensors, model, temporary, most_bytes=args.max_shard_size)
    tokens = check_tokens(model, tensors.directory / TOKENIZER_DIRECTORY, args.check_tokens)
    agreement = compare_checkpoints(tensors.directory, temporary, tokens)
    _report(agreement, not_crossed(model, tokens))
    agreement.require(args.tolerance)


def _report(agreement: Agreement, untold: str | None) -> None:
    print(agreement)
    if untold is not None:
        print(untold)


def from_deepspeed(args: Namespace, temporary: Path) -> None:
    """A checkpoint of DeepSpeed or Megatron-DeepSpeed."""
    checkpoint = open_deepspeed(args.run)
    if checkpoint.args is not None:
        if args.like is not None:
            raise UserError("--like has no effect with a checkpoint of Megatron-DeepSpeed's, which describes its model")
        _write_megatron(merge(checkpoint.megatron_ranks(), args.run, args.vocab_size), args, temporary)
        return
    weights = checkpoint.weights()
    formats = sorted({str(value.dtype).removeprefix("torch.") for value in weights.values()})
    print(f"{checkpoint.path}: DeepSpeed, {len(weights)} tensors in {one_of(formats)}")
    source = {
        name: (value.dtype, tuple(value.shape), partial(Tensor.contiguous, value)) for name, value in weights.items()
    }
    _from_source(args, source, temporary)


def from_dcp(args: Namespace, temporary: Path) -> None:
    """A checkpoint of torch.distributed.checkpoint."""
    source = read_dcp(args.run)
    print(f"{args.run}: torch.distributed.checkpoint, {len(source)} tensors")
    _from_source(args, source, temporary)


def _from_source(args: Namespace, source: Source, temporary: Path) -> None:
    """Through a directory of transformers, as `--like` describes the model, whose logits prove the conversion."""
    if args.like is None:
        raise UserError(
            f"--from {args.source} needs --like DIR, a directory of transformers with the config.json of the model: "
            f"{args.run} does not describe it"
        )
    with _between(temporary) as between:
        write_hf(between / "hf", source, args.like, str(args.run))
        from_hf(Namespace(**{**vars(args), "run": between / "hf"}), temporary)


def to_dcp(args: Namespace, temporary: Path) -> None:
    """To torch.distributed.checkpoint."""
    with _between(temporary) as between:
        # `export_dcp` reads one file.
        to_hf(Namespace(**{**vars(args), "max_shard_size": 1 << 40}), between)
        export_dcp(between, temporary, args.dcp_names or "torchtitan")


def to_megatron(args: Namespace, temporary: Path) -> None:
    """To Megatron core's formats."""
    tensors = CheckpointTensors(args.run, averaged=args.ema)
    export = plan_megatron(
        MegatronExport(
            tensors=tensors,
            tp=args.tp or 1,
            pp=args.pp or 1,
            norms=args.megatron_norms or "fused",
            dtype=DTYPES.get(args.dtype),
        )
    )
    (write_ranks if args.target == "megatron" else write_torch_dist)(export, temporary)
    count = require_equal(export, temporary)
    ranks = f"tp {export.tp}, pp {export.pp}, norms {export.norms}" if args.target == "megatron" else "any ranks"
    print(f"{tensors.directory}: Megatron core's format {args.target}, for {ranks}")
    print(
        f"{count} tensors were read back and are bitwise those of the checkpoint; logits were NOT compared: "
        "Megatron-LM's model is not available to compute them"
    )


def from_megatron(args: Namespace, temporary: Path) -> None:
    """Megatron-LM's formats."""
    _write_megatron(open_megatron(args.run, args.vocab_size), args, temporary)


def _write_megatron(model: MegatronModel, args: Namespace, temporary: Path) -> None:
    print(describe(model))
    write_megatron(model, temporary, most_bytes=args.max_shard_size)
    print(
        "every tensor was read back and is bitwise the one that was converted; logits were NOT compared: Megatron-LM's "
        "model is not available to compute them"
    )
