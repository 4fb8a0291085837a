"""What a trained BERT predicts for masked tokens, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megacore.errors import CheckpointError
from megacore.pipeline.stage import Stage

Predictions = list[tuple[int, float]]  # token ids and their probabilities, the likeliest first


@torch.no_grad()
def fill_mask(
    stage: Stage, tokens: Sequence[int], *, mask: int, vocab_size: int, top_k: int, allowed: Sequence[int]
) -> list[Predictions]:
    """The likeliest tokens at each masked position of one text, [CLS] and [SEP] included. `allowed`: ids to choose
    from; probabilities are those among the whole vocabulary, whose true size is `vocab_size`. Raises CheckpointError
    where the model's output is not finite."""
    stage.eval()
    device = next(stage.parameters()).device
    text = torch.tensor([list(tokens)], device=device)
    output = stage((text, torch.zeros_like(text), torch.ones_like(text)))
    logits = (output if isinstance(output, torch.Tensor) else output[0])[0, :, :vocab_size]
    masked = logits[text[0] == mask].double().softmax(-1).cpu()
    if not masked.isfinite().all():
        raise CheckpointError(
            "the model's output is not finite (NaN or infinite): use a checkpoint of an earlier step, or one whose "
            "training did not diverge"
        )
    ids = torch.tensor(list(allowed))
    best = masked[:, ids].topk(min(top_k, len(ids)))
    rows = zip(ids[best.indices].tolist(), best.values.tolist(), strict=True)
    return [list(zip(tokens, probabilities, strict=True)) for tokens, probabilities in rows]
