"""Compile every kernel for GPUs that need not be there, and look at what the compiler made of it.

    python tools/kernel_report.py                           one line a kernel
    python tools/kernel_report.py --json                    for tests/kernels

The launchers of `megacore.kernels` are called with meta tensors, so that what is compiled is what a run would launch:
the same block sizes, warps and alignments. Nothing runs; no GPU and no CUDA is needed, for ptxas and the disassemblers
come with Triton. A kernel that spills registers, asks for more shared memory than there is or moves an aligned row in
pieces of less than 128 bits is reported as wrong, and so is one that moves more bytes than it must.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tools.kernel_cases import Case, cases, norm

ARCHITECTURES = {90: "sm_90 (H100, H200)", 80: "sm_80 (A100)"}
SHARED_LIMIT = {90: 232_448, 80: 166_912}
# Of a processor: 65,536 registers, given to a warp in units of 256; 64 warps; 32 programs, each with 1 KiB of shared
# memory beside what it asks for.
_REGISTERS, _REGISTERS_UNIT, _WARPS, _PROGRAMS, _SHARED_EXTRA = 65_536, 256, 64, 32, 1024
_SURPLUS = 1.05  # bytes moved over bytes stated: what there is one of a row or a program
_BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


_LINE = (
    "{name}: {warps} warps, {registers} registers, {shared} B shared, {wide} x 128 bits, {narrow} narrower, "
    "{pieces} pieces, stack {stack}, spills {spills}, {warps_per_sm} warps per SM, {asynchronous} async copies, "
    "{barriers} barriers, {moved} bytes"
)
Record = dict[str, Any]  # what became of one kernel: see compile_all


def problems_of(of: Record) -> list[str]:
    """What is wrong with a kernel, one line each."""
    rules = {
        "{name} spills: {stack} bytes of stack, {spills} LDL/STL": of["stack"] or of["spills"],
        "{name} asks for {shared} bytes of shared memory": of["shared"] > SHARED_LIMIT[of["architecture"]],
        "{name} has {narrow} global accesses of less than 128 bits ({pieces} of less than 32) and {wide} of 128; "
        "{allowed} narrow ones are expected": of["allowed"] >= 0 and (of["narrow"] > of["allowed"] or not of["wide"]),
        "{name} moves {moved} bytes; it should move {minimum}": of["minimum"]
        and not of["minimum"] <= of["moved"] <= _SURPLUS * of["minimum"],
    }
    return [text.format_map(of) for text, is_broken in rules.items() if is_broken]


def _warps_per_sm(of: Record) -> int:
    warp = -(-of["registers"] * 32 // _REGISTERS_UNIT) * _REGISTERS_UNIT
    shared = (SHARED_LIMIT[of["architecture"]] + _SHARED_EXTRA) // (of["shared"] + _SHARED_EXTRA)
    return int(of["warps"] * min(_WARPS // of["warps"], _REGISTERS // (warp * of["warps"]), shared, _PROGRAMS))


class Target:
    """As much of a driver as compiling needs."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # Triton keeps the compiled kernels per device: each architecture is a different device.
        return int(self._target.arch)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMIT[device]}

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def _compiling(architecture: int, made: list[tuple[str, Any, int]]) -> Iterator[None]:
    """Every launch inside compiles its kernel for the architecture, and runs nothing; `made` gets its name, what it
    compiled to and the bytes that it moves."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        tensors = [given[name] for name in self.arg_names if isinstance(given.get(name), torch.Tensor)]
        made.append((self.fn.__name__, kernel, _moved(kernel.asm["ttir"], tensors)))
        return kernel

    triton.runtime.driver.set_active(Target(architecture))
    norm.stages_of.cache_clear()  # of the architecture before
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


def _moved(code: str, tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the tensors that a kernel loads from, and of those that it stores to.

    Args:
        code: the kernel in Triton's first intermediate language, in which a pointer is an argument, or made of one by
            `splat`, `addptr` and `broadcast`.
        tensors: its arguments that are tensors, in their order.
    """
    (signature,) = re.findall(r"tt\.func public @\w+\((.*)", code)
    origin = {name: name for name in re.findall(r"(%\w+): !tt\.ptr", signature)}
    size = {name: t.numel() * t.element_size() for name, t in zip(list(origin), tensors, strict=True)}
    moved = {"load": set[str](), "store": set[str]()}
    for line in code.splitlines():
        loop = line.partition("iter_args(")[2]
        made = re.findall(r"(%\w+) = (%\w+)", loop)
        made += re.findall(r"(%\w+) = tt\.(?:splat|addptr|broadcast) (%\w+)", line)
        origin.update({new: origin[old] for new, old in made if old in origin})
        for access, pointer in re.findall(r"tt\.(load|store) (%\w+)", line):
            moved[access].add(origin[pointer])
    return sum(size[name] for names in moved.values() for name in names)


def compile_case(case: Case, architecture: int) -> list[tuple[Record, bytes]]:
    """The kernels that a case launches: what the compiler says of each, and the cubin."""
    made: list[tuple[str, Any, int]] = []
    with _compiling(architecture, made):
        case.launch()
    found = []
    for name, kernel, moved in made:
        short, of = name.strip("_"), kernel.metadata
        attributes = {
            "name": f"{case.name}, {short}, sm_{of.target.arch}", "case": case.name, "kernel": short,
            "architecture": of.target.arch, "warps": of.num_warps,
            "shared": of.shared, "allowed": case.narrow.get(short, 0) if case.aligned else -1, "moved": moved,
            "minimum": case.minimum.get(short, 0),
        }  # fmt: skip
        found.append((attributes, kernel.asm["cubin"]))
    return found


def compile_all(shapes: str, only: Sequence[str], architectures: Sequence[int], jobs: int) -> list[Record]:
    """Compile the cases of a set whose name contains one of `only`, or all, in their order, in several processes.

    Returns:
        A record of each kernel:
        case, kernel, architecture: the operator, shape and dtype it was launched for; its name; 90 or 80.
        name: of the three, unique among all that are compiled.
        warps, registers, stack: of a program; of a thread; bytes of a thread: more than 0 means that registers spilled.
        spills: instructions that move registers to memory and back.
        shared, barriers: bytes of shared memory of a program; barriers of a program.
        warps_per_sm: that a processor runs at once, of as many programs as its registers and shared memory hold.
        wide, narrow: global loads and stores of 128 bits; of less.
        pieces: the narrow ones of less than 32 bits: a row of 16-bit numbers read one by one.
        allowed: narrow ones that are as they should be (a row's mean, its target, ...); -1: any number.
        asynchronous: copies from global to shared memory that a thread does not wait for (LDGSTS).
        moved: bytes of the tensors that it reads, and of those that it writes; a second read comes from cache.
        minimum: bytes stated for it; 0: none are.
    """
    chosen = [
        (i, architecture)
        for i, case in enumerate(cases(shapes))
        if not only or any(part in case.name for part in only)
        for architecture in architectures
    ]
    # Forked: the children find the imports done. They run one thread, as this process has so far. Neighbouring cases go
    # to the same one, because many of them turn out to be the same code.
    with ProcessPoolExecutor(max(1, jobs), mp_context=multiprocessing.get_context("fork")) as pool:
        compiled = pool.map(_compile_numbered, repeat(shapes), *zip(*chosen, strict=True), chunksize=8)
        binaries = [binary for several in compiled for binary in several]
    figures: dict[bytes, dict[str, int]] = {}
    for architecture in architectures:
        figures |= _disassembled({cubin for of, cubin in binaries if of["architecture"] == architecture}, architecture)
    records = [attributes | figures[cubin] for attributes, cubin in binaries]
    return [one | {"warps_per_sm": _warps_per_sm(one)} for one in records]


def _compile_numbered(shapes: str, number: int, architecture: int) -> list[tuple[Record, bytes]]:
    return compile_case(cases(shapes)[number], architecture)


def _disassembled(cubins: Collection[bytes], architecture: int) -> dict[bytes, dict[str, int]]:
    """The figures of every cubin. One call disassembles all of them, because nvdisasm takes long to start."""
    codes = {cubin: _instructions(cubin) for cubin in cubins}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "code"
        file.write_bytes(b"".join(codes.values()))
        text = _run("nvdisasm", "--binary", f"SM{architecture}", str(file)) if codes else ""
        usage = {}
        for cubin in cubins:
            file.with_suffix(".cubin").write_bytes(cubin)
            usage[cubin] = _run("cuobjdump", "--dump-resource-usage", str(file.with_suffix(".cubin")))
    ends = list(accumulate(map(len, codes.values())))
    listings: list[list[str]] = [[] for _ in codes]
    for address, instruction in re.findall(r"^\s*/\*([0-9a-f]+)\*/\s+(.*)$", text, re.MULTILINE):
        listings[bisect_right(ends, int(address, 16))].append(instruction)
    return {cubin: _figures(usage[cubin], "\n".join(listing)) for cubin, listing in zip(codes, listings, strict=True)}


def _figures(usage: str, code: str) -> dict[str, int]:
    """What the disassembly of one kernel says."""
    resources = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert resources is not None, usage
    accesses = re.findall(r"\b(?:LDG|STG|LDGSTS)(\.[\w.]+)", code)
    wide = [kind for kind in accesses if ".128" in kind]
    pieces = [kind for kind in accesses if re.search(r"\.[US](8|16)\b", kind)]
    return {
        "registers": int(resources[1]),
        "stack": int(resources[2]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "wide": len(wide),
        "narrow": len(accesses) - len(wide),
        "pieces": len(pieces),
        "asynchronous": len(re.findall(r"\bLDGSTS\b", code)),
        "barriers": len(re.findall(r"\bBAR\.SYNC", code)),
    }


def _instructions(cubin: bytes) -> bytes:
    """The machine code of a cubin, an ELF file of 64 bits: the content of its section `.text.KERNEL`."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    # Of a section header: the offset of its name among the names, and that of its content in the file.
    sections = [struct.unpack_from("<I20xQQ", cubin, table + i * size) for i in range(count)]
    names = sections[of_names][1]
    (code,) = (
        cubin[offset : offset + length]
        for name, offset, length in sections
        if cubin.startswith(b".text.", names + name)
    )
    return code


def _run(program: str, *arguments: str) -> str:
    return subprocess.run([_BINARIES / program, *arguments], capture_output=True, text=True, check=True).stdout


def main(argv: list[str] | None = None) -> int:
    """Compile all, or those whose name contains --only; exit status 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    part = "compile only the cases whose name contains this text; give it again for more of them"
    add("--only", action="append", default=[], metavar="TEXT", help=part)
    shapes = (
        "common: the shapes of common models. product: row kernels at widths 2,048 to 16,384, sequences of 2k to "
        "32k and vocabulary shards of 16k to 128k. Default: common."
    )
    add("--shapes", choices=("common", "product"), default="common", help=shapes)
    one = "compile for this architecture. Default: for all."
    add("--architecture", type=int, choices=list(ARCHITECTURES), help=one)
    jobs = "number of processes that compile. Default: one per core."
    add("--jobs", type=int, default=os.cpu_count() or 1, help=jobs)
    add("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(argv)
    architectures = [options.architecture] if options.architecture else list(ARCHITECTURES)
    names = [case.name for case in cases(options.shapes)]
    if unknown := [part for part in options.only if not any(part in name for name in names)]:
        known = ", ".join(dict.fromkeys(name.split()[0] for name in names))
        parser.error(
            f"--only {', '.join(unknown)}: no case of these shapes has this in its name; names begin with: {known}"
        )
    compiled = compile_all(options.shapes, options.only, architectures, options.jobs)
    problems = [problem for one in compiled for problem in problems_of(one)]
    if options.json:
        print(json.dumps({"triton": triton.__version__, "compiled": compiled, "problems": problems}, indent=1))
    else:
        print("\n".join(_LINE.format_map(one) for one in compiled))
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
