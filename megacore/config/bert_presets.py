"""Named shapes of BERT models, as in presets.py: small differences from what --bert-style says.

bert-base and bert-large follow Devlin et al. (arXiv 1810.04805, section 3) with the released uncased vocabulary,
modernbert-base Warner et al. (arXiv 2412.13663, table 4).
"""

from __future__ import annotations

Shape = dict[str, int | float | bool | str]


def _classic(num_layers: int, hidden_size: int, num_attention_heads: int) -> Shape:
    return {
        "bert_style": "classic",
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "seq_length": 512,
        "max_position_embeddings": 512,
        "vocab_size": 30522,
    }


BERT_PRESETS: dict[str, Shape] = {
    "bert-tiny": {
        **_classic(2, 64, 4),
        "seq_length": 64,
        "max_position_embeddings": 64,
        "vocab_size": 512,
    },  # for tests
    "bert-base": _classic(12, 768, 12),  # 110M
    "bert-large": _classic(24, 1024, 16),  # 335M
    "modernbert-base": {  # 149M
        "bert_style": "modern",
        "num_layers": 22,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "ffn_hidden_size": 1152,
        "seq_length": 1024,
        "max_position_embeddings": 8192,
        "vocab_size": 50368,
    },
}
