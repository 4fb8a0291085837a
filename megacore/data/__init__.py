"""Text to batches: tokenizers, the .bin/.idx format, GPT samples, blends and the loader.

The way of one token: `preprocess` (text -> .bin/.idx) -> `indexed` (opens and checks them) -> `gpt` (which tokens make
sample k) -> `blend` (which dataset sample k comes from) -> `loader` (which samples this rank gets at this step). Only
`loader` imports torch. The names below are the trainer's; each is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore.lazy import listed_names, loader_of

if TYPE_CHECKING:
    from megacore.data.bert.dataset import BertBatch
    from megacore.data.gpt.blend import KnowsDocuments, NamedSets, SampleDataset
    from megacore.data.gpt.build import build_datasets, check_inputs, tokenizer_of, vocabulary_size
    from megacore.data.gpt.packing import KnowsPacking, Packing
    from megacore.data.indexed.fetching import local_prefix
    from megacore.data.indexed.reader import bin_path, idx_path
    from megacore.data.loading.batch import Batch
    from megacore.data.loading.loader import BatchLoader, DeviceLoader, Microbatch, PackedMicrobatch, PaddedMicrobatch

_NAMES = listed_names(__name__)
__all__ = sorted(_NAMES)
__getattr__ = loader_of(__name__, _NAMES)
