"""Generate text from a checkpoint of any layout, in one process.

python tools/generate.py output --prompt "def " --max-new-tokens 64 --temperature 0.8 --top-p 0.95
"""

from __future__ import annotations

import importlib.util
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

if importlib.util.find_spec("megacore") is None:  # a bare checkout, which nothing has installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacore.checkpoint.manifest import find_checkpoint, read_manifest, trained_model
from megacore.commands.tool import ToolParser, add_program, positive, run_tool, whole
from megacore.config.fields import Range
from megacore.config.numbers import parse_float
from megacore.config.training import MAX_SEED
from megacore.errors import UserError
from megacore.inference.generate import Sampling, generate
from megacore.inference.trained import model_of, tokenizer_of, trained_layers
from megacore.parallel.mesh import select_device
from megacore.remote import usable


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt and its continuation; the exit status is 0 done, 2 refused."""
    return run_tool(_parser(), argv, _generate)


def _generate(args: Namespace) -> None:
    directory = find_checkpoint(usable(args.run))
    manifest = read_manifest(directory)
    layers = trained_layers(args.program, manifest, directory)
    config = trained_model(manifest, directory)
    if "bert" in manifest.config:
        raise UserError(f"{directory} holds a BERT, which does not continue a text: use tools/fill_mask.py")
    tokenizer = tokenizer_of(directory, args.tokenizer, config)
    prompt = tokenizer.encode(_text(args.prompt))
    if not prompt:
        raise UserError("--prompt has no tokens: give at least one character")
    stage = model_of(directory, partial(layers, config), select_device(args.device))
    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
    tokens, shown = list(prompt), ""

    def show(*, complete: bool) -> None:
        """Print what is new in the text; half a character waits for its rest until the text is complete."""
        nonlocal shown
        text = tokenizer.decode(tokens)
        if complete or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[len(shown) :], end="", flush=True)
            shown = text

    show(complete=False)
    for token in generate(stage, config, prompt, max_new_tokens=args.max_new_tokens, sampling=sampling):
        if token == tokenizer.eod:
            break
        tokens.append(token)
        show(complete=False)
    show(complete=True)
    print()


def _parser() -> ToolParser:
    parser = ToolParser(
        prog="generate.py", description="Generate text from a checkpoint of any layout, in one process."
    )
    parser.add_run("--checkpoint")
    add = parser.add_argument
    add("--prompt", required=True, metavar="TEXT", help="text to continue")
    add("--tokenizer", metavar="PATH", help="tokenizer to use. Default: the one in the checkpoint.")
    add(
        "--max-new-tokens", type=positive, default=64, metavar="N",
        help="largest number of tokens to generate. Default: 64.",
    )  # fmt: skip
    add(
        "--temperature", type=_within(Range(0, 1000)), default=0.8, metavar="T",
        help="sampling temperature; 0 always takes the most likely token. Default: 0.8.",
    )  # fmt: skip
    add(
        "--top-k", type=whole(0), default=0, metavar="K",
        help="sample from the K most likely tokens; 0: from all. Default: 0.",
    )  # fmt: skip
    add(
        "--top-p", type=_within(Range(above=0, high=1)), default=1.0, metavar="P",
        help="sample from the most likely tokens whose probabilities sum to P. Default: 1.",
    )  # fmt: skip
    add(
        "--repetition-penalty", type=_within(Range(0.01, 100)), default=1.0, metavar="R",
        help="divide positive logits of tokens that the text has by R, multiply negative ones; 1: off. Default: 1.",
    )  # fmt: skip
    add("--seed", type=whole(0, MAX_SEED), default=1234, metavar="N", help="seed of the sampling. Default: 1234.")
    add("--device", default="auto", help="auto, cpu, cuda or another accelerator. Default: auto.")
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
