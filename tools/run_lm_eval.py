"""lm-evaluation-harness with checkpoints of megacore as a type of model: its program, and all its flags.

    python tools/run_lm_eval.py output --tasks hellaswag --batch_size 16

`--program my.py` is megacore's, as of its other tools: the Python file that trained a model with layers of your own.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.errors import EXIT_REFUSED, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the harness; the exit status is 0 done, 2 refused."""
    if importlib.util.find_spec("lm_eval") is None:
        needed = "needs the package lm_eval, which is not installed: pip install lm_eval, or megacore[eval]"
        print(f"run_lm_eval.py: error: {needed}", file=sys.stderr)
        return EXIT_REFUSED
    importlib.import_module("megacore.inference.lm_eval_model")  # registers the type of model
    harness = importlib.import_module("lm_eval.__main__")
    given = _with_model(list(sys.argv[1:] if argv is None else argv))
    asks = bool({"-h", "--help", "--model", "-m"} & {word.partition("=")[0] for word in given})
    before, sys.argv = sys.argv, ["run_lm_eval.py", *given, *([] if asks or not given else ["--model", "megacore"])]
    try:
        harness.cli_evaluate()
    except UserError as error:
        print(f"run_lm_eval.py: error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    finally:
        sys.argv = before
    return 0


def _with_model(words: list[str]) -> list[str]:
    """The words for the harness, where the first is a run: it is an argument of the model, as --program is, beside
    others of it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--program")
    found, rest = parser.parse_known_args(words)
    arguments = [] if found.program is None else [f"program={found.program}"]
    if rest and not rest[0].startswith("-") and Path(rest[0]).exists():
        arguments.insert(0, f"checkpoint={rest.pop(0)}")
    flag = "--model_args"
    if arguments and flag in rest[:-1]:
        at = rest.index(flag)
        arguments.append(rest[at + 1])
        del rest[at : at + 2]
    return [*([flag, ",".join(arguments)] if arguments else []), *rest]


if __name__ == "__main__":
    sys.exit(main())
