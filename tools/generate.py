"""Generate text from a checkpoint of any layout, in one process.

python tools/generate.py output --prompt "def " --max-new-tokens 64 --temperature 0.8 --top-p 0.95
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.checkpoint.manifest import find_checkpoint
from megacore.commands.tool import ToolParser, add_program, require_none, run_tool
from megacore.errors import Collected, UserError
from megacore.remote import usable


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt and its continuation; the exit status is 0 done, 2 refused."""
    parser = ToolParser.of("generate")
    add_program(parser)
    return run_tool(parser, argv, _generate)


def _generate(args: Namespace) -> None:
    directory = find_checkpoint(usable(args.run))
    # Torch takes seconds to import: not before the command line and the path are right.
    from megacore.inference.generate import Sampling, generate
    from megacore.inference.trained import causal_model
    from megacore.parallel.mesh import select_device

    problems: list[str] = []
    with Collected(problems):
        select_device(args.device)
    with Collected(problems):
        model = causal_model(directory, args.tokenizer, args.program)
    require_none(problems)
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


def _text(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError("--prompt is not valid UTF-8 text") from None
    return prompt


if __name__ == "__main__":
    sys.exit(main())
