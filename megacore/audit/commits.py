"""The commit that changed a step: each revision of the repository computes it again, in a worktree of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import megacore
from megacore.errors import UserError

_OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_OF_TORCHRUN = ("TORCHELASTIC_", "ROLE_")
_SAYS = {0: "agrees with the ledger", 1: "differs from the ledger"}


def commits_since(revision: str, root: Path | None = None) -> list[str]:
    """A commit and those after it up to HEAD. `root`: of a checkout of the repository; None: megacore's.

    Raises UserError without git, a repository or the revision, or where it is not before HEAD."""
    root = root or Path(megacore.__file__).parents[1]
    _git(root, "rev-parse", "--git-dir", why=f"--against needs the repository, and {root} is no checkout of it")
    name = f"{revision}^{{commit}}"
    first = _git(root, "rev-parse", "--verify", "--quiet", name, why=f"--against {revision} is no commit: see git log")
    unrelated = f"--against {revision} is not before HEAD: give a commit that git log shows"
    _git(root, "merge-base", "--is-ancestor", first, "HEAD", why=unrelated)
    return [first, *_git(root, "rev-list", "--reverse", "--first-parent", f"{first}..HEAD", why="git fails").split()]


def first_change(revision: str, words: Sequence[str], root: Path | None = None) -> Iterator[str]:
    """Find the commit after `revision` from which on the audit of a step ends otherwise, by halving; yields what is
    found. Commits whose audit ends with neither status are left out.

    Args:
        revision: an ancestor of HEAD, of which the step ends otherwise than of HEAD.
        words: the command line of tools/audit.py that computes the step again, on as many processes as this job has.
        root: of a checkout of the repository; None: megacore's.

    Raises UserError as `commits_since`, and where both ends say the same.
    """
    commits, root = commits_since(revision, root), root or Path(megacore.__file__).parents[1]
    first = commits[0]
    with tempfile.TemporaryDirectory(prefix="audit-") as directory:
        tree = Path(directory, "tree")
        _git(root, "worktree", "add", "--detach", str(tree), first, why=f"git makes no worktree of {root}")
        try:
            tried = {number: _status(tree, commits[number], words) for number in {0, len(commits) - 1}}
            low, high = 0, len(commits) - 1
            ends = tried[low][0], tried[high][0]
            for number in tried:
                if tried[number][0] not in _SAYS:
                    raise UserError(f"commit {commits[number][:12]} does not compute the step: {tried[number][1]}")
            if ends[0] == ends[1]:
                said = f"the step {_SAYS[ends[0]]} of {revision} and of HEAD"
                if _git(root, "status", "--porcelain", "--untracked-files=no", why="git fails"):
                    said += ", without what is not committed"
                raise UserError(f"{said}: the change is in neither, or give --against an earlier commit")
            while between := [n for n in range(low + 1, high) if n not in tried]:
                number = min(between, key=lambda n: abs(2 * n - low - high))
                tried[number] = _status(tree, commits[number], words)
                if tried[number][0] == ends[0]:
                    low = number
                elif tried[number][0] == ends[1]:
                    high = number
        finally:
            _git(root, "worktree", "remove", "--force", str(tree), why=f"git keeps the worktree {tree}")
    yield f"the step {_SAYS[ends[0]]} up to {commits[low][:12]}, and from then on {_SAYS[ends[1]]}; it was changed by"
    for commit in commits[low + 1 : high + 1]:
        yield f"  {_git(root, 'log', '-1', '--format=%h %as %an: %s', commit, why='git fails')}"


def _git(root: Path, *words: str, why: str) -> str:
    """What git prints. Raises UserError where it fails, which says `why`."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"--against needs git, which does not start: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UserError(why + (f" ({said[-1]})" if said else ""))
    return done.stdout.strip()


def _status(tree: Path, commit: str, words: Sequence[str]) -> tuple[int, str]:
    """The exit status of the audit of a commit, and its last line."""
    _git(tree, "checkout", "--quiet", "--detach", commit, why=f"git checks out no {commit}")
    own = {k: v for k, v in os.environ.items() if k not in _OF_A_JOB and not k.startswith(_OF_TORCHRUN)}
    path = os.pathsep.join([str(tree), *filter(None, [own.get("PYTHONPATH")])])
    ranks = os.environ.get("WORLD_SIZE", "1")
    # Files of two commits may have the same size, and the second of their change: bytecode would be taken for both.
    env = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks != "1" else []
    command = [sys.executable, *several, str(tree / "tools" / "audit.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=own | env)
    if done.returncode == 1 and "wrong: " not in done.stdout:  # 1 is also the status of what raises
        return -1, (done.stderr.strip().splitlines() or [""])[-1]
    return done.returncode, ((done.stderr or done.stdout).strip().splitlines() or [""])[-1]
