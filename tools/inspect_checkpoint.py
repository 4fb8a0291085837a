"""Look at checkpoints: list those of a run, or what one holds; verify every byte; compare two bit for bit.

    python tools/inspect_checkpoint.py output                           # the run's checkpoints
    python tools/inspect_checkpoint.py output/step_00001000             # what this one holds
    python tools/inspect_checkpoint.py output --verify                  # all of them, every file
    python tools/inspect_checkpoint.py --diff output/step_00001000 other/step_00001000

The exit status is 0 for whole or equal, 1 for damaged or different, 2 for what cannot be looked at, and 141 if
the reader of the output leaves (`| head`). Layouts do not matter to a comparison: it is of global tensors, one at a
time.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.checkpoint.directory import MANIFEST_NAME, pointed_to, published
from megacore.checkpoint.manifest import Manifest, find_checkpoint, read_manifest
from megacore.commands.tool import ToolParser, run_tool
from megacore.config.dimensions import describe_degrees
from megacore.errors import CheckpointError
from megacore.remote import Location, usable
from megacore.train.rollback import rollbacks_of

if TYPE_CHECKING:
    from torch import Tensor

EXIT_DIFFERENT = 1
_MOST_SHOWN = 40  # tensors that differ


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 whole or equal, 1 damaged or different, 2 refused."""
    parser = ToolParser.of("inspect_checkpoint")
    return run_tool(parser, argv, lambda args: EXIT_DIFFERENT if _inspect(parser, args) else 0)


def _inspect(parser: ToolParser, args: Namespace) -> list[str]:
    """Do what is asked, and print it; returns the problems."""
    if (args.diff is None) == (args.checkpoint is None):
        parser.error("give either RUN or --diff A B")
    if args.diff is not None:
        return list(_compare(*(find_checkpoint(usable(name)) for name in args.diff)))
    path = usable(args.checkpoint)
    if not (path / MANIFEST_NAME).is_file():
        find_checkpoint(path)  # refuses a directory without any
        return _list(path, verify=args.verify)
    problem = _damage(path, archived=True) if args.verify else None
    if problem is not None:
        print(f"damaged: {problem}")
        return [problem]
    _show(path, read_manifest(path))
    if args.verify:
        print("every file has the size, the SHA-256 and the XXH3 of the manifest")
    return []


def _damage(directory: Location, *, archived: bool = False) -> str | None:
    """What is wrong with the files of a checkpoint, of which every byte is read."""
    from megacore.checkpoint.choose import whole  # torch takes seconds to import, and a listing needs none
    from megacore.parallel.mesh import ALONE

    return whole(directory, ALONE, archived=archived)


# ---- listing


def _list(run: Location, *, verify: bool) -> list[str]:
    pointed, rows, problems = pointed_to(run), [], []
    for directory in published(run):
        problem = _damage(directory, archived=True) if verify else None
        try:
            manifest = read_manifest(directory)
        except CheckpointError as error:
            problem = problem or str(error)
        if problem is not None:
            problems.append(problem)
            rows.append([directory.name, "", "", "", "", "damaged"])
            continue
        state = "whole" if verify else "not verified"
        mark = ", latest" if directory == pointed else ""
        size = sum(entry.bytes for entry in manifest.files.values())
        numbers = [f"{manifest.step:,}", f"{manifest.serial}", f"{size / 1e6:,.1f}"]
        rows.append([directory.name, *numbers, describe_degrees(manifest.topology), state + mark])
    _table(["checkpoint", "step", "serial", "MB", "mesh", "state"], rows)
    for problem in problems:
        print(f"damaged: {problem}")
    return problems


def _show(directory: Location, manifest: Manifest) -> None:
    training, model = manifest.config.get("training", {}), manifest.config.get("model", {})
    print(f"{directory}: step {manifest.step:,}, {manifest.consumed_samples:,} samples, schema {manifest.schema}")
    print(f"  written on  {describe_degrees(manifest.topology)}")
    print(f"  model       {model.get('num_layers')} blocks of {model.get('hidden_size')}, seed {training.get('seed')}")
    print(f"  counters    {', '.join(f'{name} {value:g}' for name, value in sorted(manifest.counters.items()))}")
    for rollback in rollbacks_of(manifest.series):
        print(f"  rollback    {rollback}")
    print(f"  tokenizer   {manifest.tokenizer or 'none'}")
    print(f"  random      {manifest.random}")
    files = sorted(manifest.files.items())
    _table(["file", "bytes", "SHA-256"], [[name, f"{entry.bytes:,}", entry.sha256[:16]] for name, entry in files])
    kinds = sorted(manifest.tensors, key=lambda kind: (kind != "model", kind))
    names = manifest.tensors.get("model", {})
    rows = []
    for name, entry in names.items():
        held = [kind for kind in kinds if name in manifest.tensors[kind]]
        pieces = {len(manifest.tensors[kind][name].pieces) for kind in held}
        rows.append([name, "x".join(map(str, entry.shape)), entry.dtype, "/".join(map(str, pieces)), " ".join(held)])
    _table(["tensor", "shape", "dtype", "pieces", "kinds"], rows)


def _table(heads: list[str], rows: Iterable[list[str]]) -> None:
    rows = [heads, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


# ---- comparing


def _compare(first: Location, second: Location) -> Iterator[str]:
    """Prints and yields what differs."""
    for directory in (first, second):
        if (problem := _damage(directory)) is not None:
            raise CheckpointError(problem)
    from megacore.checkpoint.load import Reader

    manifests = read_manifest(first), read_manifest(second)
    readers = Reader(first, manifests[0]), Reader(second, manifests[1])
    found = {kind for manifest in manifests for kind in manifest.tensors}
    kinds = sorted(found, key=lambda kind: (kind != "model", kind))
    equal, different = 0, 0
    for kind in kinds:
        tables = [manifest.tensors.get(kind, {}) for manifest in manifests]
        for name in sorted(tables[0].keys() | tables[1].keys()):
            entries = [table.get(name) for table in tables]
            shapes = [None if entry is None else (entry.dtype, tuple(entry.shape)) for entry in entries]
            if shapes[0] != shapes[1] or shapes[0] is None:
                problem = " and ".join(f"{shape[0]} {list(shape[1])}" if shape else "missing" for shape in shapes)
            else:
                slices = tuple((0, size) for size in shapes[0][1])
                problem = _difference(*(reader.read(kind, name, slices) for reader in readers))
            if not problem:
                equal += 1
                continue
            different += 1
            if different <= _MOST_SHOWN:
                print(f"  {kind} {name}: {problem}")
            yield f"{kind} {name}"
    if different > _MOST_SHOWN:
        print(f"  and {different - _MOST_SHOWN} more")
    for name in ("step", "consumed_samples", "counters", "series", "tokenizer"):
        here, there = (getattr(manifest, name) for manifest in manifests)
        if here != there:
            print(f"  {name}: {here} and {there}")
            yield name
    print(f"{equal} tensors are equal bit for bit, {different} differ")


def _difference(here: Tensor, there: Tensor) -> str:
    """How two tensors of one shape differ; empty where they have the same bits."""
    import torch

    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (here, there)]
    if torch.equal(bits[0], bits[1]):
        return ""
    size = here.element_size()
    count = int((bits[0] != bits[1]).view(-1, size).any(dim=1).sum())
    largest = float((here.double() - there.double()).abs().max())
    return f"{count:,} of {here.numel():,} elements differ, by up to {largest:.3g}"


if __name__ == "__main__":
    sys.exit(main())
