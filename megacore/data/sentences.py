"""Splitting English-like text into sentences with one regular expression and a list of abbreviations.

A sentence ends at `.`, `!` or `?`, closing quotes or brackets included, before white space and something that can begin
one. That is what the tools in this field do at heart; a trained splitter is better at abbreviations it has seen.
"""

from __future__ import annotations

import re

_END = re.compile(r"""[.!?…]+["'”’)\]]*(?=\s+["'“‘(\[]*[A-Z0-9À-ÖØ-Þ])|[。！？]+["'”’)\]」』]*|\n\s*\n""")
_LAST_WORD = re.compile(r"([^\W\d_][\w.]*)\.$")
_WORDS = """mr mrs ms dr prof rev hon st sr jr gen col lt sgt capt cmdr adm gov sen rep pres supt
vs etc e.g i.e cf al fig figs eq eqs sec no nos vol vols pp ed eds approx ca dept univ inc ltd co corp
jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat sun u.s u.k"""
_ABBREVIATIONS = frozenset(_WORDS.split())


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, without the white space between them."""
    sentences = []
    start = 0
    for match in _END.finditer(text):
        if match.group().startswith(".") and _abbreviated(text, start, match.start() + 1):
            continue
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _abbreviated(text: str, start: int, stop: int) -> bool:
    """Whether the word that ends with the full stop at `stop - 1` is an abbreviation or an initial."""
    word = _LAST_WORD.search(text, max(start, stop - 32), stop)
    return word is not None and (len(word[1]) == 1 or word[1].lower() in _ABBREVIATIONS)
