"""Run a launch script of many nodes on this machine: what it starts is cut to a few processes, and takes a few steps.

    python tools/rehearse.py bash train.sh               # at most 8 processes
    python tools/rehearse.py --processes 4 torchrun --nnodes 48 --nproc-per-node 8 pretrain_gpt.py ...
    python tools/rehearse.py --failures 20 torchrun --nproc-per-node 4 pretrain_gpt.py --survive ...

The script finds this tool in place of torchrun, deepspeed, srun, mpirun and python: where one of them starts
pretrain_gpt.py or pretrain_bert.py, also those of Megatron-LM, megacore's own starts with --rehearse, as rank 0 of the
processes that the launcher would have started. See docs/guides/coming-from-megatron.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore import has_ring
from megacore.commands.plan import ENTRIES
from megacore.commands.tool import EXIT_FAILED, ToolParser, run_tool
from megacore.errors import UserError
from megacore.train.starting import REHEARSAL
from megacore.verify.rehearse import BEHIND, PROCESSES

_ALLOCATING = ("srun", "mpirun", "mpiexec")  # start any command; the others start a Python program
_PYTHONS = ("python", "python3")
_PYTHON_SWITCHES = ("-u", "-B", "-E", "-I", "-O", "-s", "-S", "-v")
_STARTING = ("torchrun", "deepspeed")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "deepspeed", "deepspeed.launcher.runner")
_NODES = ("--nnodes", "--num-nodes", "-N", "--nodes")
_PER_NODE = ("--nproc-per-node", "--num-gpus", "--ntasks-per-node")
_TASKS = ("-n", "-np", "--np", "--ntasks")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--in-place-of"]:
        return _in_place_of(words[1], words[2:])
    parser = ToolParser.of("rehearse", PROCESSES=PROCESSES)
    return run_tool(parser, words, _run)


def _run(given: argparse.Namespace) -> int:
    """Run a command that finds this tool under the names of launchers; returns its exit status."""
    command: Sequence[str] = given.command
    if given.failures is not None:
        return _fail(command, given.failures)
    if not command:
        raise UserError("no command is given: name the launch script, as in rehearse.py bash train.sh")
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        for name in (*_STARTING, *_ALLOCATING, *_PYTHONS):
            program = Path(folder, name)
            tool = shlex.join([sys.executable, str(Path(__file__).resolve()), "--in-place-of", name])
            program.write_text(f'#!/bin/sh\nexec {tool} "$@"\n')
            program.chmod(0o755)
        path = os.environ.get("PATH", os.defpath)
        ours = {REHEARSAL: str(given.processes), BEHIND: path, "PATH": f"{folder}{os.pathsep}{path}"}
        try:
            return subprocess.run(command, env=os.environ | ours, check=False).returncode
        except OSError as error:
            why = f"{command[0]}: {error.strerror}"
            raise UserError(f"{why}: give a command, as in rehearse.py bash train.sh") from None


def _fail(command: Sequence[str], failures: int) -> int:
    """Run a command with failures; returns its exit status."""
    if not has_ring("survive"):
        raise UserError("--failures needs megacore/survive, which is not installed: leave it out")
    if not command or shutil.which(command[0]) is None:
        wrong = f"{command[0]} is no program that can be started" if command else "no command is given"
        raise UserError(f"{wrong}: name one, as in rehearse.py --failures 5 torchrun ... --survive")
    status: int = importlib.import_module("megacore.survive.rehearse").rehearse_failures(command, failures)
    return status


def _in_place_of(launcher: str, words: Sequence[str]) -> int:
    """Do what a launcher is called for, as far as rank 0 is concerned; returns the exit status."""
    if launcher in _PYTHONS:
        command = list(itertools.dropwhile(lambda word: word in _PYTHON_SWITCHES, words))
        if command[:1] == ["-m"] and command[1:2] and command[1] in _MODULES:
            return _in_place_of("torchrun", command[2:])
        if not (command and Path(command[0]).name in ENTRIES):
            own = shutil.which(launcher, path=os.environ[BEHIND]) or sys.executable
            return subprocess.run([own, *words], check=False).returncode
        words = command
    at = next((place for place, word in enumerate(words) if _is_program(launcher, word)), None)
    if at is None:
        print(f"rehearse.py: {launcher} starts no program that is known: {shlex.join(words)}", file=sys.stderr)
        return EXIT_FAILED
    environment = {**os.environ, **_ranks(launcher, words[:at])}
    command = list(words[at:])
    if Path(command[0]).name in ENTRIES:
        origin = importlib.util.find_spec(Path(command[0]).stem)
        command[0] = str(origin.origin) if origin is not None else command[0]
    python = [sys.executable] if command[0].endswith(".py") else []
    return subprocess.run([*python, *command], env=environment, check=False).returncode


def _is_program(launcher: str, word: str) -> bool:
    """Whether a word is what a launcher starts, and no flag of its own or value of one."""
    is_command = launcher in _ALLOCATING and not word.isdecimal() and shutil.which(word) is not None
    return is_command or (word.endswith((".py", ".sh")) and not word.startswith("-"))


def _ranks(launcher: str, words: Sequence[str]) -> dict[str, str]:
    """The variables of rank 0 among the processes that a launcher's flags ask for."""
    given: dict[str, str] = {}
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        given[name.replace("_", "-") if name.startswith("--") else name] = value if equals else following

    def number(names: Sequence[str]) -> int | None:
        texts = (given[name].rpartition(":")[2] for name in names if name in given)  # --nnodes 1:4
        return next((int(text) for text in texts if text.isdecimal()), None)

    nodes, each = number(_NODES), number(_PER_NODE)
    processes = number(_TASKS) if launcher in _ALLOCATING else None
    if processes is None and (nodes or each):
        processes = (nodes or 1) * (each or 1)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    return variables if processes is None else {**variables, "WORLD_SIZE": str(processes)}


if __name__ == "__main__":
    sys.exit(main())
