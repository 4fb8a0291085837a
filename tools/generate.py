"""Generate text from a checkpoint of any layout, in one process.

python tools/generate.py output --prompt "def " --max-new-tokens 64 --temperature 0.8 --top-p 0.95
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.checkpoint.manifest import find_checkpoint
from megacore.commands.tool import ToolParser, add_program, positive, run_tool, whole
from megacore.config.fields import Range
from megacore.config.numbers import parse_float
from megacore.config.training import MAX_SEED
from megacore.errors import UserError
from megacore.remote import usable


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt and its continuation; the exit status is 0 done, 2 refused."""
    return run_tool(_parser(), argv, _generate)


def _generate(args: Namespace) -> None:
    directory = find_checkpoint(usable(args.run))
    # Torch takes seconds to import: not before the command line and the path are right.
    from megacore.inference.generate import Sampling, generate
    from megacore.inference.trained import causal_model

    model = causal_model(directory, args.tokenizer, args.program)
    tokenizer = model.tokenizer
    prompt = tokenizer.encode(_text(args.prompt))
    if not prompt:
        raise UserError("--prompt has no tokens: give at least one character")
    stage = model.stage(args.device)
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "seed")
    sampling = Sampling(**{name: getattr(args, name) for name in names})
    tokens, shown = list(prompt), ""

    def show(*, complete: bool) -> None:
        """Print what is new in the text; half a character waits for its rest until the text is complete."""
        nonlocal shown
        text = tokenizer.decode(tokens)
        if complete or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[len(shown) :], end="", flush=True)
            shown = text

    show(complete=False)
    for token in generate(stage, model.config, prompt, max_new_tokens=args.max_new_tokens, sampling=sampling):
        if token == tokenizer.eod:
            break
        tokens.append(token)
        show(complete=False)
    show(complete=True)
    print()
    if tokens == prompt:
        print("the model ended the document at once: try another --seed, or train longer", file=sys.stderr)


def _parser() -> ToolParser:
    parser = ToolParser(prog="generate.py", description=str(__doc__).partition("\n")[0])
    parser.add_run("--checkpoint")
    flag = parser.flag
    flag("--prompt TEXT", "text to continue", required=True)
    flag("--tokenizer PATH", "tokenizer to use. Default: the one in the checkpoint.")
    flag("--max-new-tokens N", "largest number of tokens to generate", positive, 64)
    heat = _within(Range(0, 1000))
    flag("--temperature T", "sampling temperature; 0 always takes the most likely token", heat, 0.8)
    flag("--top-k K", "sample from the K most likely tokens; 0: from all", whole(0), 0)
    likely = "sample from the most likely tokens whose probabilities sum to P"
    flag("--top-p P", likely, _within(Range(above=0, high=1)), 1.0)
    penalty = "divide positive logits of tokens that the text has by R, multiply negative ones; 1: off"
    flag("--repetition-penalty R", penalty, _within(Range(0.01, 100)), 1.0)
    flag("--seed N", "seed of the sampling", whole(0, MAX_SEED), 1234)
    flag("--device DEVICE", "auto, cpu, cuda or another accelerator", default="auto")
    add_program(parser)
    return parser


def _within(bounds: Range) -> Callable[[str], float]:
    """A type for argparse: the numbers within bounds."""

    def parsed(text: str) -> float:
        try:
            value = parse_float(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{error}: it must be {bounds}") from None
        if value not in bounds:
            raise ArgumentTypeError(f"{value} must be {bounds}")
        return value

    return parsed


def _text(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError("--prompt is not valid UTF-8 text") from None
    return prompt


if __name__ == "__main__":
    sys.exit(main())
