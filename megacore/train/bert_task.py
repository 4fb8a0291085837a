"""What BERT pretraining is: the layers of models/bert.py, and two losses.

One is for predicting the masked tokens, the other for saying how the two segments belong together.

Each is a sum with a separate count, masked tokens and sentence pairs, so that the mean over the global batch of the
one plus that of the other is what is trained (Devlin et al. 2018, arXiv 1810.04805, appendix A.2), whatever masked
tokens and pairs a microbatch happens to hold; one without any adds nothing.

Shape legend: s sequence, b micro-batch, V vocabulary, t tensor-parallel ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config.bert import ResolvedBertConfig
from megacore.data import BertBatch
from megacore.layers.context import BuildContext
from megacore.models.bert import Output, bert_flops, bert_layers
from megacore.models.initialize import InitialWeights, RandomWeights
from megacore.ops import CrossEntropyOptions, summed_cross_entropy
from megacore.parallel.loss import vocab_parallel_argmax
from megacore.parallel.mesh import Mesh
from megacore.parallel.random import RandomStreams
from megacore.train.gpt_task import TransformerTask

_NO_PAIR = -1


class BertTask(TransformerTask):
    """Predict masked tokens and, with a sentence task, how segments belong together. `weights`: None: from the run's
    seed."""

    batch_type = BertBatch
    config: ResolvedBertConfig
    layers_from = "configuration"

    def __init__(self, config: ResolvedBertConfig, mesh: Mesh, *, weights: InitialWeights | None = None) -> None:
        streams = RandomStreams(config.training.seed, mesh.device)
        context = BuildContext.of(
            config, layer_group=mesh.layer, sequence_group=mesh.sequence, device=mesh.device, streams=streams
        )
        losses = ("mlm_loss", "sentence_loss") if config.bert.has_sentence_head else ("mlm_loss",)
        accuracies = tuple(name.replace("loss", "accuracy") for name in losses)
        super().__init__(
            config,
            context,
            bert_layers(config, context),
            weights or RandomWeights(config.model, seed=config.training.seed),
            loss_names=losses,
            evaluation_names=losses + accuracies,
        )
        self.has_pairs = config.bert.has_sentence_head

    def of_rank(self, microbatch: BertBatch) -> BertBatch:
        """This rank's positions, with the document numbers of the whole sequence, by which attention masks. A pair is
        counted once, by the rank that holds the first position. Labels are as for `GPTTask.of_rank`."""
        if self.sequence.group.size == 1:
            return microbatch
        pairs = microbatch.sentence_labels
        return dataclasses.replace(
            microbatch,
            tokens=self.sequence.take(microbatch.tokens, 1),
            token_types=self.sequence.take(microbatch.token_types, 1),
            labels=self.scored.take(microbatch.labels, 1),
            loss_mask=self.scored.take(microbatch.loss_mask, 1),
            sentence_labels=pairs if self.sequence.group.is_first else torch.full_like(pairs, _NO_PAIR),
        )

    def first_input(self, microbatch: BertBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and segments of this rank's positions, and the document numbers of whole sequences, [b, s] each."""
        return microbatch.tokens, microbatch.token_types, microbatch.documents

    def loss(self, output: Output, microbatch: BertBatch) -> Tensor:
        """Sums over masked tokens and, with a sentence task, over pairs: fp32 [1] or [2]."""
        tokens, *pairs = _parts(output)
        return self._losses(tokens, pairs, microbatch, self.options)

    def counts(self, microbatch: BertBatch) -> Tensor:
        """Masked tokens and, with a sentence task, pairs: fp64 [1] or [2]."""
        counts = [self.counted_here(microbatch.loss_mask.sum(dtype=torch.float64))]
        if self.has_pairs:
            counts.append((microbatch.sentence_labels != _NO_PAIR).sum(dtype=torch.float64))
        return torch.stack(counts)

    def evaluation_loss(self, output: Output, microbatch: BertBatch) -> Tensor:
        """Sums without label smoothing and z-loss, and how often the likeliest answer was right: fp32 [2] or [4]."""
        tokens, *pairs = _parts(output)
        if self.head_has_loss:
            likeliest, *pairs = pairs
        else:
            likeliest = vocab_parallel_argmax(tokens, self.share)
        right = [self.counted_here((likeliest == microbatch.labels).float().mul(microbatch.loss_mask).sum())]
        right += [(pair.argmax(-1) == microbatch.sentence_labels).float().sum() for pair in pairs]
        return torch.cat([self._losses(tokens, pairs, microbatch, None), torch.stack(right)])

    def evaluation_counts(self, microbatch: BertBatch) -> Tensor:
        """The counts of the losses, then the same for the accuracies: fp64 [2] or [4]."""
        return self.counts(microbatch).repeat(2)

    def flops_per_sequence(self) -> float:
        return bert_flops(self.config)

    def _losses(
        self, tokens: Tensor, pairs: Sequence[Tensor], microbatch: BertBatch, options: CrossEntropyOptions | None
    ) -> Tensor:
        """Sums from the tokens' logits, or their loss where the head has it, and from the pairs' logits, if any."""
        labels, mask = microbatch.sentence_labels, microbatch.loss_mask
        if self.head_has_loss:
            sums = [self.counted_here(tokens)]
        else:
            loss_sum = self.compiled_loss or summed_cross_entropy
            sums = [loss_sum(tokens, microbatch.labels, mask, options=options, share=self.share)]
        sums += [F.cross_entropy(pair.float(), labels, ignore_index=_NO_PAIR, reduction="sum") for pair in pairs]
        return torch.stack(sums)


def _parts(output: Output) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else output
