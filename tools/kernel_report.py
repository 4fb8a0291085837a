"""Compile every kernel for GPUs that need not be there, and look at what the compiler made of it.

    python tools/kernel_report.py                           one line a kernel
    python tools/kernel_report.py --write docs/kernels.md   the table in the documentation
    python tools/kernel_report.py --json                    for tests/kernels

The launchers of `megacore.kernels` are called with meta tensors, so that what is compiled is what a run would launch:
the same block sizes, warps and alignments. Nothing runs; no GPU and no CUDA is needed, for ptxas and the disassemblers
come with Triton. A kernel that spills registers, asks for more shared memory than there is or moves an aligned row in
pieces of less than 128 bits is reported as wrong.
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
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tools.kernel_cases import Case, cases

ARCHITECTURES = {90: "sm_90 (H100, H200)", 80: "sm_80 (A100)"}
SHARED_LIMIT = {90: 232_448, 80: 166_912}
_BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_MARK = "<!-- the table: tools/kernel_report.py --write -->"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What became of one kernel.

    Attributes:
        case: the operator, shape and dtype it was launched for.
        kernel: the kernel's name.
        architecture: 90 or 80.
        warps: of a program.
        registers: of a thread.
        stack: bytes of a thread; more than 0 means that registers spilled.
        spills: instructions that move registers to memory and back.
        shared: bytes of shared memory of a program.
        wide: global loads and stores of 128 bits.
        narrow: global loads and stores of less.
        pieces: those among them of less than 32 bits: a row of 16-bit numbers read one by one.
        allowed: narrow ones that are as they should be (a row's mean, its target, ...).
    """

    case: str
    kernel: str
    architecture: int
    warps: int
    registers: int
    stack: int
    spills: int
    shared: int
    wide: int
    narrow: int
    pieces: int
    allowed: int

    @property
    def name(self) -> str:
        """Unique among all that are compiled."""
        return f"{self.case}, {self.kernel}, sm_{self.architecture}"

    def problems(self) -> list[str]:
        """What is wrong with it, one line each."""
        problems = []
        if self.stack or self.spills:
            problems.append(f"{self.name} spills: {self.stack} bytes of stack, {self.spills} LDL/STL")
        if self.shared > SHARED_LIMIT[self.architecture]:
            problems.append(f"{self.name} asks for {self.shared} bytes of shared memory")
        if self.allowed >= 0 and (self.narrow > self.allowed or not self.wide):
            problems.append(
                f"{self.name} has {self.narrow} global accesses of less than 128 bits ({self.pieces} of less than 32) "
                f"and {self.wide} of 128; {self.allowed} narrow ones are expected"
            )
        return problems


class _Target:
    """As much of a driver as compiling needs."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # Triton keeps the compiled kernels per device: each architecture is a different device.
        return int(self._target.arch)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def _compiling(architecture: int, made: list[tuple[str, Any]]) -> Iterator[None]:
    """Every launch inside compiles its kernel for the architecture, and runs nothing."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        made.append((self.fn.__name__, kernel))
        return kernel

    triton.runtime.driver.set_active(_Target(architecture))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


@dataclass(frozen=True, kw_only=True)
class _Binary:
    """One kernel as the compiler returned it; the attributes are those of `Compiled`."""

    case: str
    kernel: str
    architecture: int
    warps: int
    shared: int
    allowed: int
    cubin: bytes


def compile_case(case: Case, architecture: int) -> list[_Binary]:
    """Compile the kernels that a case launches."""
    made: list[tuple[str, Any]] = []
    with _compiling(architecture, made):
        case.launch()
    return [
        _Binary(
            case=case.name,
            kernel=name.strip("_"),
            architecture=kernel.metadata.target.arch,
            warps=kernel.metadata.num_warps,
            shared=kernel.metadata.shared,
            allowed=case.narrow.get(name.strip("_"), 0) if case.aligned else -1,
            cubin=kernel.asm["cubin"],
        )
        for name, kernel in made
    ]


def compile_all(only: Sequence[str], architectures: Sequence[int], jobs: int) -> list[Compiled]:
    """Compile the cases whose name contains one of `only`, or all, in their order, in several processes."""
    chosen = [
        (i, architecture)
        for i, case in enumerate(cases())
        if not only or any(part in case.name for part in only)
        for architecture in architectures
    ]
    # Forked: the children find the imports done. They run one thread, as this process has so far. Neighbouring cases go
    # to the same one, because many of them turn out to be the same code.
    with ProcessPoolExecutor(max(1, jobs), mp_context=multiprocessing.get_context("fork")) as pool:
        binaries = [binary for compiled in pool.map(_compile_numbered, chosen, chunksize=8) for binary in compiled]
    figures: dict[bytes, dict[str, int]] = {}
    for architecture in architectures:
        figures |= _disassembled({b.cubin for b in binaries if b.architecture == architecture}, architecture)
    return [
        Compiled(
            case=b.case, kernel=b.kernel, architecture=b.architecture, warps=b.warps, shared=b.shared,
            allowed=b.allowed, **figures[b.cubin],
        )
        for b in binaries
    ]  # fmt: skip


def _compile_numbered(chosen: tuple[int, int]) -> list[_Binary]:
    return compile_case(cases()[chosen[0]], chosen[1])


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


def table(compiled: Sequence[Compiled]) -> str:
    """Registers, shared memory and access widths as Markdown."""
    lines = [
        "| operator, shape, dtype | kernel | warps | registers sm_90 / sm_80 | shared bytes | 128-bit | narrower |",
        "|---|---|---|---|---|---|---|",
    ]
    second = {(c.case, c.kernel): c for c in compiled if c.architecture == 80}
    for c in compiled:
        if c.architecture == 90:
            other = second.get((c.case, c.kernel))
            registers = f"{c.registers} / {other.registers}" if other else str(c.registers)
            lines.append(f"| {c.case} | {c.kernel} | {c.warps} | {registers} | {c.shared} | {c.wide} | {c.narrow} |")
    return "\n".join(lines)


def write(path: Path, compiled: Sequence[Compiled]) -> None:
    """Replace what follows the mark in a page by the table."""
    head = path.read_text(encoding="utf-8").split(_MARK)[0]
    heading = f"Compiled by Triton {triton.__version__}.\n\n"
    path.write_text(f"{head}{_MARK}\n\n{heading}{table(compiled)}\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Compile all, or those whose name contains --only; exit status 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT",
        help="compile only the cases whose name contains this text; give it again for more of them",
    )  # fmt: skip
    parser.add_argument(
        "--architecture", type=int, choices=list(ARCHITECTURES), help="compile for this architecture. Default: for all."
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="number of processes that compile. Default: one per core."
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table into this Markdown page")
    options = parser.parse_args(argv)
    if options.write and (options.only or options.architecture):
        parser.error("--write needs every case on every architecture: leave out --only and --architecture")
    architectures = [options.architecture] if options.architecture else list(ARCHITECTURES)
    compiled = compile_all(options.only, architectures, options.jobs)
    problems = [problem for result in compiled for problem in result.problems()]
    if options.json:
        records = [asdict(result) | {"name": result.name} for result in compiled]
        print(json.dumps({"triton": triton.__version__, "compiled": records, "problems": problems}, indent=1))
    elif options.write:
        write(options.write, compiled)
    else:
        for c in compiled:
            print(
                f"{c.name}: {c.warps} warps, {c.registers} registers, {c.shared} B shared, {c.wide} x 128 bits, "
                f"{c.narrow} narrower, {c.pieces} pieces, stack {c.stack}, spills {c.spills}"
            )
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
