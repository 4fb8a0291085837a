"""What BERT reads: masked samples of sentence pairs, single segments, or packed documents. Sample k depends only on
(seed, k): the same on every layout, with any number of workers, after a resume, and at every evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megacore.data.bert.masking import Masking
from megacore.data.bert.mock import MockBertText
from megacore.data.bert.text import BertText
from megacore.data.loading.batch import Batch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class BertBatch(Batch):
    """What one forward pass of BERT reads."""

    tokens: torch.Tensor  # int64 [b, s], with what is to be predicted masked, and padding after the end
    token_types: torch.Tensor  # int64 [b, s], 0 in the first segment and in padding, 1 in the second segment
    # int64 [b, s], which packed document a position belongs to: 1, 2, ...; 0 in padding. All real positions of a sample
    # that is not packed are 1.
    documents: torch.Tensor
    labels: torch.Tensor  # int64 [b, s], the tokens before masking
    loss_mask: torch.Tensor  # float32 [b, s], 1 where the token is predicted
    # int64 [b], 0 where the segments are in order, 1 where the second is another document's (nsp) or they are swapped
    # (sop), -1 where there is no sentence task.
    sentence_labels: torch.Tensor


class BertDataset:
    """Masked samples of a text; `stream` is the dataset's number in the run, so that no two draw the same random
    numbers."""

    def __init__(
        self,
        text: BertText | MockBertText,
        masking: Masking,
        *,
        num_samples: int,
        seq_length: int,
        pad: int,
        seed: int,
        stream: int,
    ) -> None:
        self.text, self.masking, self.seq_length = text, masking, seq_length
        self._num_samples, self._pad, self._key = num_samples, pad, np.array([seed, stream], np.uint64)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, NDArray]:
        """Sample `index`: the fields of `BertBatch` for one sample. Raises DataError where the sample holds a token id
        outside the vocabulary."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        # The two lower words count the draws of a sample: those of no two samples meet.
        rng = np.random.Generator(np.random.Philox(key=self._key, counter=np.array([0, 0, index, 0], np.uint64)))
        layout = self.text.layout(index, rng)
        tokens, predicted = self.masking.apply(layout.tokens, layout.begins, rng)
        return {
            "tokens": self._padded(tokens, self._pad),
            "token_types": self._padded(layout.token_types, 0),
            "documents": self._padded(layout.documents, 0),
            "labels": self._padded(layout.tokens, self._pad),
            "loss_mask": self._padded(predicted.astype(np.float32), 0),
            "sentence_labels": np.array(layout.label, np.int64),
        }

    def documents_of(self, index: int) -> str:
        """The documents of sample `index`, where the text knows them."""
        return self.text.documents_of(index) if isinstance(self.text, BertText) else "generated text"

    def _padded(self, values: NDArray, filling: int) -> NDArray:
        if len(values) == self.seq_length:
            return values
        padded = np.full(self.seq_length, filling, values.dtype)
        padded[: len(values)] = values
        return padded
