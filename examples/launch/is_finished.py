"""Whether a run has done all its steps: `python is_finished.py CONFIG.toml [FLAGS of pretrain_gpt.py]`.

Exit status 0: it has; 3: it has a checkpoint, and steps are left; 1: there is no checkpoint; 2: it is unknown.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> int:
    """Compare the newest checkpoint's step with train_iters."""
    parser = argparse.ArgumentParser(prog="is_finished.py", allow_abbrev=False)
    parser.add_argument("config", type=Path)
    # The flags that override the file. Megatron-LM's --save is --output-dir where it is no URL.
    for flag in ("--output-dir", "--save"):
        parser.add_argument(flag, metavar="DIR")
    given, _ = parser.parse_known_args(arguments)
    try:
        settings = read(given.config)
        save = given.save or settings.get("checkpoint", {}).get("save")
        if save and "://" in save:
            print(f"is_finished.py: {save} is no directory; its checkpoints are not looked at", file=sys.stderr)
            return 2
        output_dir = Path(given.output_dir or given.save or settings["training"]["output_dir"])
        # The run has written all its settings there, those of flags too.
        written = output_dir / "config.toml"
        train_iters = (read(written) if written.exists() else settings)["training"]["train_iters"]
    except (OSError, ValueError) as error:
        print(f"is_finished.py: {given.config} cannot be read: {error}", file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"is_finished.py: {given.config}: set {error}, in the table [training]", file=sys.stderr)
        return 2
    # step_00000500 and step_00000500.1; what an interrupted save has left has .tmp- in its name.
    names = (re.fullmatch(r"step_(\d{8,})(\.\d+)?", path.name) for path in output_dir.glob("step_*"))
    steps = [int(name[1]) for name in names if name]
    if not steps:
        return 1
    return 0 if max(steps) >= train_iters else 3


def read(path: Path) -> dict[str, Any]:
    """The settings of a file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
