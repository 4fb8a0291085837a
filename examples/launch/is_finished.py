"""Whether a run has done all its steps: `python is_finished.py CONFIG.toml`.

Exit status 0: it has; 3: it has a checkpoint, and steps are left; 1: there is no checkpoint; 2: the file is unusable.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Compare the newest checkpoint's step with train_iters."""
    if len(arguments) != 1:
        print("usage: is_finished.py CONFIG.toml", file=sys.stderr)
        return 2
    try:
        training = tomllib.loads(Path(arguments[0]).read_text(encoding="utf-8"))["training"]
        output_dir, train_iters = training["output_dir"], training["train_iters"]
    except (OSError, ValueError) as error:
        print(f"is_finished.py: {arguments[0]} cannot be read: {error}", file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"is_finished.py: {arguments[0]}: set {error}, in the table [training]", file=sys.stderr)
        return 2
    steps = [int(path.name[5:13]) for path in Path(output_dir).glob("step_????????*") if path.name[5:13].isdigit()]
    if not steps:
        return 1
    return 0 if max(steps) >= train_iters else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
