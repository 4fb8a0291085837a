"""Install the frameworks that benchmarks/compare.py measures beside megacore into an environment of their own.

    make peers                                                 # all of them
    python -m benchmarks.comparison.install --peers deepspeed

They get the build of torch that this interpreter has: a comparison wants the same torch on both sides, and where
megacore runs on torch's CPU build no CUDA library is downloaded. Versions: constraints.txt and peers.txt. A framework
that does not install is named, and the next one is tried.

Exit status: 0 all are installed, 1 some are not, 2 the environment could not be made.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = ROOT / ".venv-peers"
VERSIONS = ROOT / "benchmarks" / "peers.txt"
INSTALLED = ("deepspeed", "megatron-core")
# DeepSpeed's setup compiles nothing, and asks for no CUDA.
_SETUP = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}


def python_of(environment: Path) -> Path:
    """The interpreter of an environment."""
    return environment / "bin" / "python"


def make_environment(environment: Path) -> None:
    """An environment with this interpreter's build of torch.

    Raises:
        CalledProcessError: it could not be made, or pip does not find that build.
    """
    if not python_of(environment).exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    _pip(environment, "-c", str(VERSIONS), "setuptools", "wheel", f"torch=={version('torch')}")


def install(environment: Path, names: Sequence[str]) -> list[str]:
    """Install frameworks one by one.

    Args:
        environment: with torch.
        names: packages.

    Returns:
        Those that did not install; pip has said why.
    """
    failed = []
    for name in names:
        try:
            _pip(environment, "--no-build-isolation", "-c", str(VERSIONS), name)
        except subprocess.CalledProcessError:
            failed.append(name)
    return failed


def _pip(environment: Path, *arguments: str) -> None:
    command = [str(python_of(environment)), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([*command, *constraints, *arguments], check=True, env={**os.environ, **_SETUP})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT, help="where. Default: .venv-peers")
    parser.add_argument("--peers", nargs="+", choices=INSTALLED, default=INSTALLED, help="which. Default: all")
    arguments = parser.parse_args(argv)
    try:
        make_environment(arguments.environment)
    except subprocess.CalledProcessError as error:
        print(f"{arguments.environment} could not be made: {' '.join(map(str, error.cmd))} failed", file=sys.stderr)
        return 2
    failed = install(arguments.environment, arguments.peers)
    for name in arguments.peers:
        state = "NOT installed: see pip's message above" if name in failed else "installed"
        print(f"{name}: {state}", file=sys.stderr if name in failed else sys.stdout)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
