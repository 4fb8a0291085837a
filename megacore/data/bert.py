"""What BERT reads: masked samples of sentence pairs, of single segments, or of packed documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megacore.data.batch import Batch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class BertBatch(Batch):
    """What one forward pass of BERT reads.

    Attributes:
        tokens: int64 [b, s], with what is to be predicted masked, and padding after the end.
        token_types: int64 [b, s], 0 in the first segment and in padding, 1 in the second segment.
        documents: int64 [b, s], which packed document a position belongs to: 1, 2, ...; 0 in padding. All real
            positions of a sample that is not packed are 1.
        labels: int64 [b, s], the tokens before masking.
        loss_mask: float32 [b, s], 1 where the token is predicted.
        sentence_labels: int64 [b], 0 where the segments stand in order, 1 where the second is another document's
            (nsp) or they are swapped (sop), -1 where there is no sentence task.
    """

    tokens: torch.Tensor
    token_types: torch.Tensor
    documents: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    sentence_labels: torch.Tensor
