"""Text to batches: tokenizers, the .bin/.idx format, GPT samples, blends and the loader.

The way of one token: `preprocess` (text -> .bin/.idx) -> `indexed` (opens and checks them) -> `gpt` (which tokens make
sample k) -> `blend` (which dataset sample k comes from) -> `loader` (which samples this rank gets at this step).
Only `loader` imports torch; everything else is NumPy, so that inputs are checked before torch is loaded.

The names below are what the trainer uses; each is loaded when it is first used, so that nothing loads torch early.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacore.data.bert.dataset import BertBatch
    from megacore.data.gpt.blend import KnowsDocuments, NamedSets, SampleDataset
    from megacore.data.gpt.build import build_datasets, check_inputs, tokenizer_of, vocabulary_size
    from megacore.data.gpt.packing import KnowsPacking, Packing
    from megacore.data.indexed.fetching import local_prefix
    from megacore.data.indexed.reader import bin_path, idx_path
    from megacore.data.loading.batch import Batch
    from megacore.data.loading.loader import BatchLoader, DeviceLoader, Microbatch, PackedMicrobatch, PaddedMicrobatch

__all__ = [
    "Batch", "BatchLoader", "BertBatch", "DeviceLoader", "KnowsDocuments", "KnowsPacking", "Microbatch",
    "NamedSets", "PackedMicrobatch", "Packing", "PaddedMicrobatch", "SampleDataset", "bin_path",
    "build_datasets", "check_inputs", "idx_path", "local_prefix", "tokenizer_of", "vocabulary_size",
]  # fmt: skip
_NAMES = {
    "bert.dataset": "BertBatch",
    "gpt.blend": "KnowsDocuments NamedSets SampleDataset",
    "gpt.build": "build_datasets check_inputs tokenizer_of vocabulary_size",
    "gpt.packing": "KnowsPacking Packing",
    "indexed.fetching": "local_prefix",
    "indexed.reader": "bin_path idx_path",
    "loading.batch": "Batch",
    "loading.loader": "BatchLoader DeviceLoader Microbatch PackedMicrobatch PaddedMicrobatch",
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names.split():
            value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
