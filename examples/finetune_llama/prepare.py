"""Make what a fine-tuning needs, small enough for a laptop: a Llama in Hugging Face's format, and conversations.

    python examples/finetune_llama/prepare.py output/finetune

The model is tiny and has random weights. The conversations are questions about Python's built-in types, answered with
the first sentence of their documentation. README.md says what to do with them, and with a real Llama.
"""

from __future__ import annotations

import argparse
import builtins
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megacore.commands.tool import ToolParser, positive, run_tool
from megacore.data.tokenizers.training import train_tokenizer
from megacore.errors import UserError

VOCABULARY, POSITIONS = 1024, 256


def conversations() -> Iterator[dict[str, list[dict[str, str]]]]:
    """A question and an answer for every public method of a built-in type that has documentation."""
    kinds = {each for each in vars(builtins).values() if isinstance(each, type)}
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        for name in sorted(name for name in vars(kind) if not name.startswith("_")):
            if text := (getattr(kind, name).__doc__ or "").strip():
                question = {"role": "user", "content": f"What does {kind.__name__}.{name} do?"}
                answer = {"role": "assistant", "content": _first_sentence(text)}
                yield {"messages": [question, answer]}


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".") + "."


def run(options: argparse.Namespace) -> None:
    """Write the model with its tokenizer, and chat.jsonl."""
    directory: Path = options.directory
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty: remove it, or name another directory")
    talks = list(conversations())
    texts = [message["content"] for talk in talks for message in talk["messages"]]
    tokenizer = train_tokenizer(texts, "bpe", VOCABULARY)
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eod,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    tokenizer.save(directory / "model")
    lines = [json.dumps(talk) for talk in talks]
    (directory / "chat.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{directory}: a Llama with {tokenizer.vocab_size} tokens, {len(talks)} conversations")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 if the command line cannot be used."""
    parser = ToolParser(prog="prepare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="that is made")
    parser.add_argument("--seed", type=positive, default=1, metavar="N", help="of the weights (default 1)")
    return run_tool(parser, argv, run)


if __name__ == "__main__":
    sys.exit(main())
