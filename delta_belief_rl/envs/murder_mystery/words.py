"""Words of a mystery and of an action in the form in which they are compared."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from delta_belief_rl.envs.answers import normalise

Phrase = tuple[str, ...]
"""Words in compared form; never empty."""

MIN_STEM = 5
"""Words of so many letters are also found as the beginning of a longer one."""

_NEW_LINE = re.compile(r"\s*[\r\n\u2028\u2029]+\s*")
_LIST_HEAD = re.compile(r":\s*[\r\n]+\s*")
_NUMBERED = re.compile(r"(?:^|\s)\(?\d{1,2}\)\s|(?:^|[.;:!?\n])\s*\d{1,2}\.\s")
_TOKEN = re.compile(r"[^\W_]+|[.,;:!?/&+]")
_CONTRACTIONS = (
    (re.compile(r"\b(can't|cannot)\b"), "can not"),
    (re.compile(r"\bwon't\b"), "will not"),
    (re.compile(r"(?<=[a-z])n't\b"), " not"),
    (re.compile(r"\b(i|we|you|they|he|she)'d\b"), r"\1 would"),
    (re.compile(r"\b(i|we|you|they|he|she)'ll\b"), r"\1 will"),
    (re.compile(r"\b(we|you|they)'re\b"), r"\1 are"),
    (re.compile(r"\bi'm\b"), "i am"),
    (re.compile(r"\b(it|he|she|that|what|who|where)'s\b"), r"\1 is"),
    (re.compile(r"\blet's\b"), "let us"),
    (re.compile(r"(?<=\w)'s\b|(?<=s)'(?=\s|$)"), ""),
    (re.compile(r"\b(mr|mrs|ms|dr|prof|capt|sgt|col|rev|st)\."), r"\1"),
)
_SPELLING = {
    "fiber": "fibre",
    "fibers": "fibre",
    "gray": "grey",
    "color": "colour",
    "colors": "colour",
    "analyze": "analyse",
    "analyzed": "analyse",
    "analysed": "analyse",
    "analysis": "analyse",
    "doctor": "dr",
    "professor": "prof",
    "captain": "capt",
    "commander": "cmdr",
    "sergeant": "sgt",
    "colonel": "col",
    "reverend": "rev",
    "mister": "mr",
    "knives": "knife",
    "shelves": "shelf",
    "jewelry": "jewellery",
}
_LAST = "zz"
_NO_PLURALS = frozenset(["perhaps", "does", "always"])
_KEPT_S = ("ss", "us", "is")


def word_set(text: str) -> frozenset[str]:
    """The words of a text that are separated by spaces, as a set."""
    return frozenset(text.split())


@lru_cache(maxsize=20_000)
def tokens(text: str) -> Phrase:
    """Words and separators of a text, in order.

    Case, accents, possessives and plurals are gone; a new line and the number of an item are full
    stops.

    Example:
        >>> tokens("Search Mrs. Hale's desks, please!")
        ('search', 'mrs', 'hale', 'desk', ',', 'please', '!')
    """
    lines = _NEW_LINE.sub(" . ", _NUMBERED.sub(" . ", _LIST_HEAD.sub(": ", text)))
    # The last word keeps the punctuation before it from being stripped.
    flat = normalise(f"{lines} {_LAST}")
    decomposed = unicodedata.normalize("NFD", flat)
    plain = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
    for pattern, replacement in _CONTRACTIONS:
        plain = pattern.sub(replacement, plain)
    return tuple(_stem(token) for token in _TOKEN.findall(plain)[:-1])


def phrase(text: str) -> Phrase:
    """The words of a text without its separators and a leading article."""
    found = tuple(token for token in tokens(text) if token[0].isalnum())
    return found[1:] if len(found) > 1 and found[0] in ("the", "a", "an") else found


def contains(text: Phrase, wanted: Phrase) -> bool:
    """Whether the wanted words stand in a text, one behind the other."""
    size = len(wanted)
    return any(text[at : at + size] == wanted for at in range(len(text) - size + 1))


def contains_any(text: Phrase, wanted: Iterable[Phrase]) -> bool:
    """Whether one of several phrases stands in a text."""
    return any(contains(text, words) for words in wanted)


def speaks_of(text: Phrase, wanted: Iterable[Phrase]) -> bool:
    """Whether one of several phrases stands in a text, its long words in any form.

    Example:
        >>> speaks_of(tokens("He poisoned it"), [phrase("poison")])
        True
    """
    return any(
        all(
            _form_of(word, own) for word, own in zip(text[at : at + len(words)], words, strict=True)
        )
        for words in wanted
        for at in range(len(text) - len(words) + 1)
    )


def _form_of(word: str, stem: str) -> bool:
    return word == stem or (len(stem) >= MIN_STEM and word.startswith(stem))


def _stem(word: str) -> str:
    word = _SPELLING.get(word, word)
    plural = len(word) > 3 and word.endswith("s") and not word.endswith(_KEPT_S)
    if plural and word not in _NO_PLURALS:
        return word[:-3] + "y" if word.endswith("ies") and len(word) > 4 else word[:-1]
    return word
