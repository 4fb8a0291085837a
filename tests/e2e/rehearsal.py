"""Runs launch scripts of other trainers unedited: notes the command line that they start, and makes it small.

A script is run with this folder's own `torchrun`, `deepspeed`, `srun` and `python` first on its PATH. They note their
words instead of starting anything; what remains of a command line is a program and its flags.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from tests.patience import patience

SCRIPTS = Path(__file__).parent / "scripts"
PROGRAMS = ("pretrain_gpt.py", "pretrain_bert.py")
_SIZES = """
--num-layers 16 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --kv-channels 8 --num-query-groups 2
--seq-length 32 --max-position-embeddings 32 --train-iters 2 --lr-decay-iters 2 --lr-warmup-iters 1 --vocab-size 512
"""
SMALL: Mapping[str, str] = dict(re.findall(r"(--\S+) (\S+)", _SIZES))
"""The sizes that every command line gets instead of its own."""
_STUB = """#!{python}
import json, sys
words = sys.argv[1:]
if "bash" in words:  # srun bash -c COMMAND
    import subprocess
    sys.exit(subprocess.call(words[words.index("bash"):]))
with open({notes!r}, "a") as file:
    file.write(json.dumps(words) + "\\n")
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What a script starts.

    Attributes:
        program: its name.
        processes: how many of it.
        flags: the program's, as the script gives them.
    """

    program: str
    processes: int
    flags: tuple[str, ...]

    def shrunk(self) -> list[str]:
        """The flags with the sizes of SMALL; those that a script does not give are left out."""
        words = list(self.flags)
        for at, word in enumerate(words):
            if word in SMALL:
                words[at + 1] = SMALL[word]
        return words


def run(script: str, arguments: Sequence[str], folder: Path) -> Launch:
    """What a script of `SCRIPTS` starts.

    Args:
        script: its name.
        arguments: the words that it is called with.
        folder: for the programs that are put on its PATH.
    """
    notes = folder / "notes.jsonl"
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in ("torchrun", "deepspeed", "srun", "python", "python3"):
        path = programs / name
        path.write_text(_STUB.format(python=sys.executable, notes=str(notes)))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", str(SCRIPTS / script), *arguments], env=environment, check=True, timeout=patience(60))
    (words,) = (json.loads(line) for line in notes.read_text().splitlines())
    at = next(index for index, word in enumerate(words) if Path(word).name in PROGRAMS)
    given = {word.replace("_", "-"): value for word, value in pairwise(words[:at])}
    nodes = int(given.get("--nnodes") or given.get("--num-nodes", "1"))
    each = int(given.get("--nproc-per-node") or given.get("--num-gpus", "1"))
    return Launch(program=Path(words[at]).name, processes=nodes * each, flags=tuple(words[at + 1 :]))
