"""Whether two tokenizers give the same ids, although their files, and so their fingerprints, differ: another version of
the library wrote them, or they are GPT-2's two files. Ids on probes tell: every token of the vocabulary between others,
two planes of Unicode, and texts on which tokenizers are known to differ."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator

from megacore.data.tokenizers.tokenizer import Tokenizer

# Code points: every one of the scripts with letters, and some of the others. Surrogates are no characters.
_PROBED = (range(1, 0x3000), range(0x3000, 0xD800, 37), range(0xE000, 0x20000, 37))
_TOGETHER = 64  # tokens, or characters, of a probe
_TEXTS = (
    *("", " ", "  a", "a  ", "\n\n", " \n\t x \r\n\r\n y", "a b\u00a0c\u3000d", "\u200b\ufeff"),
    *("don't I'LL he'S we've 'tis 'RE", "1 12 123 1234 1234567 3.14 1,000 x86_64 0x1F", "CamelCase snake_case ALLCAPS"),
    *(
        "!!!??? ... --- /// https://a.b/c?d=e#f",
        "e\u0301 \u00e9 \ufb01 \u1100\u1161 \uac00",
        "\U0001f469\u200d\U0001f680",
    ),
    "if (x == 0) {\n    return [1, 2];\n}\n\n\n\tdef f(a):\n\t\tpass  # done",
)


def ids_fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 (hex) of a tokenizer's ids on the probes; equal for tokenizers with equal ids."""
    texts = list(_TEXTS)
    for first in range(0, tokenizer.vocab_size, _TOGETHER):  # its tokens, with spaces and with letters between them
        tokens = [tokenizer.decode([index]) for index in range(first, min(first + _TOGETHER, tokenizer.vocab_size))]
        texts += [" ".join(tokens), "x".join(tokens)]
    texts += characters(_PROBED, "{}a ")
    digest = hashlib.sha256(f"{tokenizer.vocab_size} {tokenizer.eod}".encode())
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        digest.update(f"\n{text}\n{','.join(map(str, ids))}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether both give the same ids: they are the same, or agree on the probes."""
    return one.fingerprint == other.fingerprint or ids_fingerprint(one) == ids_fingerprint(other)


def characters(ranges: Iterable[range], written: str) -> Iterator[str]:
    """Texts with every character of some ranges of code points, some at a time, each as `written` in braces."""
    for codes in ranges:
        for first in range(0, len(codes), _TOGETHER):
            letters = map(chr, codes[first : first + _TOGETHER])
            yield "".join(written.format(letter) for letter in letters if unicodedata.category(letter) != "Cn")
