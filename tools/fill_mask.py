"""Fill the masks of a text with a trained BERT, from a checkpoint of any layout, in one process.

python tools/fill_mask.py output "the capital of [MASK] is london ."
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.checkpoint.manifest import find_checkpoint, read_manifest, section_of
from megacore.commands.tool import ToolParser, run_tool
from megacore.config import ResolvedModel, TrainingConfig
from megacore.config.bert import BertConfig, ResolvedBert
from megacore.data.bert.masking import special_tokens
from megacore.errors import UserError
from megacore.remote import usable


def main(argv: Sequence[str] | None = None) -> int:
    """Print the likeliest tokens of each mask; the exit status is 0 done, 2 refused."""
    return run_tool(ToolParser.of("fill_mask"), argv, _fill)


def _fill(args: Namespace) -> None:
    directory = find_checkpoint(usable(args.run))
    manifest = read_manifest(directory)
    trained = section_of(manifest, directory, "model", ResolvedModel)
    if "bert" not in manifest.config:
        raise UserError(f"{directory} holds a GPT, which only predicts the next token: use tools/generate.py")
    # Torch takes seconds to import: not before the command line and the checkpoint are right.
    from megacore.inference.fill_mask import fill_mask
    from megacore.inference.trained import model_of, tokenizer_of
    from megacore.models.bert import bert_layers
    from megacore.parallel.mesh import select_device

    bert = section_of(manifest, directory, "bert", ResolvedBert)
    config = BertConfig(model=trained, bert=bert, training=TrainingConfig(train_iters=1)).resolve(1)
    model = config.model
    tokenizer = tokenizer_of(directory, args.tokenizer, model)
    special = special_tokens(tokenizer, args.tokenizer or str(directory))
    tokens = [special.cls, *tokenizer.encode(args.text), special.sep]
    masks, room = tokens.count(special.mask), model.max_position_embeddings
    if not masks:
        raise UserError("the text has no [MASK]: put one where a token is to be predicted")
    if len(tokens) > room:
        raise UserError(f"the text has {len(tokens)} tokens with its ends, but the model {room} positions: shorten it")
    stage = model_of(directory, partial(bert_layers, config), select_device(args.device))
    spelled = [token for token in range(tokenizer.vocab_size) if tokenizer.piece(token)]  # the model may have more ids
    sizes = {"vocab_size": model.vocab_size, "top_k": args.top_k}
    predicted = fill_mask(stage, tokens, mask=special.mask, allowed=spelled, **sizes)
    for number, predictions in enumerate(predicted, start=1):
        if masks > 1:
            print(f"[MASK] {number} of {masks}")
        for token, probability in predictions:
            # Special tokens have no text, and neither has white space: their spelling says which they are.
            print(f"{probability:.4f}  {tokenizer.decode([token]).strip() or tokenizer.piece(token)}")


if __name__ == "__main__":
    sys.exit(main())
