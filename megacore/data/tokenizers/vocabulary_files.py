"""Tokenizers from the files that GPT-2 and BERT were published with: vocab.json with merges.txt, vocab.txt."""

from __future__ import annotations

import json
import re

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

_GPT2_SPECIAL = "<|endoftext|>"
_BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_IN_BRACKETS = re.compile(r"\[[^\]]*\]")


def is_plain_vocabulary(data: bytes) -> bool:
    """Whether a JSON file maps tokens to ids, and nothing else."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and bool(values) and all(type(number) is int for number in values.values())


def byte_level_bpe(vocabulary: bytes, merges: bytes) -> tokenizers.Tokenizer:
    """GPT-2's tokenizer (Radford et al. 2019, section 2.2).

    Args:
        vocabulary: the content of vocab.json.
        merges: that of merges.txt, a pair a line, perhaps after a line with the version.
    """
    lines = merges.decode("utf-8").splitlines()
    words = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    pairs = [(first, second) for first, second in words]
    backend = tokenizers.Tokenizer(models.BPE(json.loads(vocabulary), pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    if backend.token_to_id(_GPT2_SPECIAL) is not None:
        backend.add_special_tokens([AddedToken(_GPT2_SPECIAL, normalized=True)])
    return backend


def wordpiece(vocabulary: bytes) -> tokenizers.Tokenizer:
    """BERT's tokenizer (Devlin et al., arXiv 1810.04805), of lower-case text where its vocabulary has no capitals.

    Args:
        vocabulary: the content of vocab.txt, a token a line.
    """
    tokens = vocabulary.decode("utf-8").splitlines()
    lower = not any(token != token.lower() for token in tokens if not _IN_BRACKETS.fullmatch(token))
    backend = tokenizers.Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([token for token in _BERT_SPECIAL if token in set(tokens)])
    return backend
