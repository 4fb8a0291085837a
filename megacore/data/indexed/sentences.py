"""Splitting text into sentences by rules, for text of any language, with a knowledge of English abbreviations.

1. A blank line ends a sentence, and a single line break does not.
2. The full stops of scripts that need no space after them (。！？ । ۔ ։ ። and others) end one wherever they occur.
3. `.`, `!`, `?`, `…` and runs of them end one, closing quotes and brackets included, before white space and whatever is
   not a lower-case letter or punctuation that continues it: letters of scripts without case, digits and symbols too.
4. A single `.` does not after an abbreviation that asks for more (Dr., e.g.; No. and p. before a number), nor after the
   number or letter that a list item begins with. After an initial or acronym (J., U.S.), or an abbreviation that may
   end a sentence (etc., Inc.), it does only before a word that usually begins one (The, He, In). Titles, days and
   months are abbreviations only with a capital (Gen., Sun., Mar.), since small ones are words.

Nothing is lost but the white space between sentences. A trained splitter is better at abbreviations it has seen.
"""

from __future__ import annotations

import re

_CLOSING = r"""["'”’»«›)\]}」』】〉》]"""
_OPENING = r"""["'“‘«»‹„‚(\[{「『【〈《¿¡*_—–-]"""
_CANDIDATE = re.compile(
    # A run is looked at from its first mark only, and never given back: a line of a million dots takes no time.
    rf"(?<![.!?…‽⁇⁈⁉])(?P<stop>[.!?…‽⁇⁈⁉]++){_CLOSING}*+(?:[ \u00a0\u202f]»(?=\s|\Z))?(?=\s|\Z)"
    rf"|(?:[。！？｡।॥۔؟։።፧፨။។៕᠃᠉꓿]|．(?!\d))++[.!?…]*+{_CLOSING}*+"
    r"|\n[^\S\n]*\n"
)
_NEXT = re.compile(rf"\s+{_OPENING}*\s?(.)", re.DOTALL)
_GOES_ON = frozenset(",;:.!?%)]}…")
_LAST_WORD = re.compile(r"(?:^|[\s\"'“‘«‹„(\[{/—–-])([^\s\"'“‘«‹„(\[{/—–-]+)\.$")
_ACRONYM = re.compile(r"[^\W\d_](\.[^\W\d_]{1,2})*")
_ITEM = re.compile(r"\(?(\d{1,3}|[^\W\d_]|[ivxIVX]+)")
_ET_AL = re.compile(r"\bet\s+al\.$")
_WORD = re.compile(r"[^\W\d_]+")
_LONGEST_WORD = 32  # characters before a full stop that are looked at


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Written with a capital, or all in capitals: small, most of them are words (one more rep, the sun, he sat).
_TITLES = _words("""
    mr mrs ms messrs mme mlle dr drs prof rev revd fr hon sra srta dra gen col lt maj sgt cpl capt cmdr adm gov sen rep
    pres supt brig
""")
# Only thus: Sun., Mar., Co.
_DATES = _words("jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thur thurs fri sat sun co")
_CIRCA = "ca"  # with a capital, and no number after it, a place
_EDITION = "ed"  # with a capital a name
_AND_OTHERS = "et al"  # its second word is a name, or Spanish
_ASKS_FOR_MORE = _words("vs v cf e.g i.e eg ie viz approx c repr bzw hrsg vgl u.a z.b d.h p.ej")
_BEFORE_A_NUMBER = _words("no nos nr núm fig figs tab eq eqs sec secs ch chap vol vols bd art par pt pp p pág op ver")
_MAY_END = _words("""
    etc inc ltd corp bros plc llc gmbh jr sr esq ph.d eds dept univ st ste mt ft usw ave blvd rd trans
""")
_BEGINS = _words("""
    a after all although an and another any as at because before both but by despite during each every few finally first
    for from he her here his how however i if in instead it its last later many meanwhile more moreover most my
    nevertheless no not now on once one only or other our over several she since so some such that the their then there
    therefore these they this those though through thus to today under unlike until we what when where which while who
    why with yet you your
""")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, in order, without the white space around them."""
    sentences = []
    start = 0
    for match in _CANDIDATE.finditer(text):
        if match["stop"] and not _ends(text, start, match):
            continue
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _ends(text: str, start: int, match: re.Match[str]) -> bool:
    """Whether a sentence that began at `start` ends with this stop."""
    following = _NEXT.match(text, match.end())
    if following is None:
        return True
    if following[1].islower() or following[1] in _GOES_ON:
        return False
    if match["stop"] != ".":
        return True
    stop = match.start() + 1
    before = text[max(start, stop - _LONGEST_WORD) : stop].lstrip()
    word = _LAST_WORD.search(before)
    if word is None:
        return True
    is_all = stop - start <= _LONGEST_WORD and before == f"{word[1]}."
    abbreviation = _AND_OTHERS if _ET_AL.search(before) else word[1]
    return _ends_after(abbreviation, text, following.start(1), is_all)


def _ends_after(word: str, text: str, following: int, is_all: bool) -> bool:
    """Whether a single full stop after a word, inner full stops included, ends a sentence. `is_all`: the word is the
    whole sentence so far."""
    known = word.casefold()
    capital = word in (known.capitalize(), known.upper())
    circa = known == _CIRCA and (word == _CIRCA or text[following].isdigit())
    if known in _ASKS_FOR_MORE or (capital and known in _TITLES) or circa or (is_all and _ITEM.fullmatch(word)):
        return False
    if known in _BEFORE_A_NUMBER:
        return not text[following].isdigit() and not re.match(r"[IVXLC]+\b", text[following:])
    dated = word == known.capitalize() and known in _DATES  # SAT is a test
    if known in _MAY_END or dated or word in (_EDITION, _AND_OTHERS) or _ACRONYM.fullmatch(word):
        begins = _WORD.match(text, following)
        return begins is not None and begins[0].casefold() in _BEGINS
    return True
