"""BERT's two losses: predict the masked tokens, and say how the two segments belong together.

Each is a sum with a count of its own, masked tokens and sentence pairs, so that the mean over the global batch of the
one plus that of the other is what is trained (Devlin et al. 2018, arXiv 1810.04805, appendix A.2), whatever masked
tokens and pairs a microbatch happens to hold; one without any adds nothing.

Shape legend: s sequence, b micro-batch, V vocabulary, t tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config.bert import ResolvedBertConfig
from megacore.models.spec import Terms, TokenBatch, counted_tokens
from megacore.parallel.cross_entropy import CrossEntropyOptions, vocab_parallel_argmax, vocab_parallel_cross_entropy
from megacore.parallel.mesh import Group

Output = Tensor | tuple[Tensor, Tensor]  # logits of the tokens [b, s, padded V/t], and of the sentence task [b, 2]
_NO_PAIR = -1


class MaskedBatch(TokenBatch, Protocol):
    """What BERT reads from a microbatch besides tokens, labels and loss mask."""

    @property
    def token_types(self) -> Tensor: ...  # [b, s] int64, 0 or 1
    @property
    def documents(self) -> Tensor: ...  # [b, s] int64, 0 where there is padding
    @property
    def sentence_labels(self) -> Tensor: ...  # [b] int64: 0, 1, or -1 where there is no pair


class BertLoss:
    """Summed losses of a microbatch, and the figures of an evaluation.

    Args:
        config: resolved.
        tp: the tensor-parallel group.

    Attributes:
        terms: what the call returns.
        eval_terms: what `evaluation` returns.
    """

    def __init__(self, config: ResolvedBertConfig, tp: Group) -> None:
        self.vocab_size, self.tp, self.sentence_task = config.model.vocab_size, tp, config.bert.has_sentence_head
        self.options = CrossEntropyOptions(
            label_smoothing=config.training.label_smoothing, z_loss=config.training.z_loss, in_place=True
        )
        losses = ("mlm_loss", "sentence_loss") if self.sentence_task else ("mlm_loss",)
        accuracies = tuple(name.replace("loss", "accuracy") for name in losses)
        self.terms = Terms(names=losses, counts=self._counts)
        self.eval_terms = Terms(names=losses + accuracies, counts=lambda batch: self._counts(batch).repeat(2))

    def __call__(self, output: Output, batch: MaskedBatch) -> Tensor:
        """Sums over masked tokens and, with a sentence task, over pairs: fp32 [1] or [2]"""
        return self._losses(output, batch, self.options)

    def evaluation(self, output: Output, batch: MaskedBatch) -> Tensor:
        """The sums without label smoothing and z-loss, then how often the likeliest answer was right: fp32 [2] or
        [4]"""
        tokens, pairs = _parts(output)
        right = [(self._likeliest(tokens) == batch.labels).float().mul(batch.loss_mask).sum()]
        if pairs is not None:
            right.append((pairs.argmax(-1) == batch.sentence_labels).float().sum())
        return torch.cat([self._losses(output, batch, None), torch.stack(right)])

    def _losses(self, output: Output, batch: MaskedBatch, options: CrossEntropyOptions | None) -> Tensor:
        tokens, pairs = _parts(output)
        per_token = vocab_parallel_cross_entropy(
            tokens, batch.labels, vocab_size=self.vocab_size, group=self.tp, options=options
        )
        sums = [torch.sum(per_token * batch.loss_mask)]
        if pairs is not None:
            labels = batch.sentence_labels
            sums.append(F.cross_entropy(pairs.float(), labels, ignore_index=_NO_PAIR, reduction="sum"))
        return torch.stack(sums)

    def _counts(self, batch: MaskedBatch) -> Tensor:
        counts = [counted_tokens(batch)]
        if self.sentence_task:
            counts.append((batch.sentence_labels != _NO_PAIR).sum(dtype=torch.float64))
        return torch.stack(counts)

    def _likeliest(self, tokens: Tensor) -> Tensor:
        return vocab_parallel_argmax(tokens, vocab_size=self.vocab_size, group=self.tp)


def _parts(output: Output) -> tuple[Tensor, Tensor | None]:
    return (output, None) if isinstance(output, Tensor) else output
