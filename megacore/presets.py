"""Named model shapes, as plain data: small differences from the defaults of ModelConfig.

The GPT-2 family follows Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2, with
the head counts of the released weights. `--preset NAME` fills the fields below; a configuration file and flags are
stronger. `vocab_size` is taken only where no tokenizer is given, because a tokenizer knows its own.
"""

from __future__ import annotations

from megacore.bert_presets import BERT_PRESETS, Value


def _gpt2(num_layers: int, hidden_size: int, num_attention_heads: int) -> dict[str, Value]:
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "seq_length": 1024,
        "max_position_embeddings": 1024,
        "vocab_size": 50257,
    }


GPT_PRESETS: dict[str, dict[str, Value]] = {
    "gpt2-tiny": {**_gpt2(2, 64, 4), "seq_length": 64, "max_position_embeddings": 64, "vocab_size": 512},  # for tests
    "gpt2-small": _gpt2(12, 768, 12),  # 124M
    "gpt2-medium": _gpt2(24, 1024, 16),  # 355M
    "gpt2-large": _gpt2(36, 1280, 20),  # 774M
    "gpt2-xl": _gpt2(48, 1600, 25),  # 1.56B
}

PRESETS = {**GPT_PRESETS, **BERT_PRESETS}
