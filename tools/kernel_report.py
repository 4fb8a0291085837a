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
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
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
        """What is wrong with it, a line each."""
        found = []
        if self.stack or self.spills:
            found.append(f"{self.name} spills: {self.stack} bytes of stack, {self.spills} LDL/STL")
        if self.shared > SHARED_LIMIT[self.architecture]:
            found.append(f"{self.name} asks for {self.shared} bytes of shared memory")
        if self.allowed >= 0 and (self.narrow > self.allowed or not self.wide):
            found.append(
                f"{self.name} has {self.narrow} global accesses of less than 128 bits ({self.pieces} of less than 32) "
                f"and {self.wide} of 128; {self.allowed} narrow ones are expected"
            )
        return found


class _Target:
    """As much of a driver as compiling needs."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

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


def compile_case(case: Case, architecture: int) -> list[Compiled]:
    """Compile the kernels that a case launches."""
    made: list[tuple[str, Any]] = []
    with _compiling(architecture, made):
        case.launch()
    return [
        Compiled(
            case=case.name,
            kernel=name.strip("_"),
            architecture=architecture,
            warps=kernel.metadata.num_warps,
            shared=kernel.metadata.shared,
            allowed=case.narrow.get(name.strip("_"), 0) if case.aligned else -1,
            **_disassembled(kernel.asm["cubin"]),
        )
        for name, kernel in made
    ]


def compile_all(only: str, jobs: int) -> list[Compiled]:
    """Compile the cases whose name contains `only`, in their order, in several processes."""
    chosen = [
        (i, architecture) for i, case in enumerate(cases()) if only in case.name for architecture in ARCHITECTURES
    ]
    # Forked: the children find the imports done. They run one thread, as this process has so far. Neighbouring cases go
    # to the same one, because many of them turn out to be the same code.
    with ProcessPoolExecutor(max(1, jobs), mp_context=multiprocessing.get_context("fork")) as pool:
        return [result for results in pool.map(_compile_numbered, chosen, chunksize=8) for result in results]


def _compile_numbered(chosen: tuple[int, int]) -> list[Compiled]:
    return compile_case(cases()[chosen[0]], chosen[1])


@cache
def _disassembled(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        code = _run("nvdisasm", "--no-dataflow", "--print-code", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    accesses = re.findall(r"\b(?:LDG|STG|LDGSTS)(\.[\w.]+)", code)
    wide = [kind for kind in accesses if ".128" in kind]
    pieces = [kind for kind in accesses if re.search(r"\.[US](8|16)\b", kind)]
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "wide": len(wide),
        "narrow": len(accesses) - len(wide),
        "pieces": len(pieces),
    }


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
    parser.add_argument("--only", default="", help="compile only the cases whose name contains this text")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="number of processes that compile. Default: one per core."
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table into this Markdown page")
    options = parser.parse_args(argv)
    compiled = compile_all(options.only, options.jobs)
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
