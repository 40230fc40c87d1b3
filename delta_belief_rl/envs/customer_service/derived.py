"""A rubric for golden answers that come without one.

Task files from elsewhere hold a golden answer of one sentence and nothing else to decide by.
"""

from __future__ import annotations

import re
from functools import lru_cache

from delta_belief_rl.envs.answers import normalise
from delta_belief_rl.envs.customer_service.data import Rubric
from delta_belief_rl.envs.customer_service.text import Phrases

_GOLDEN = re.compile(
    r"(?P<subject>.+?) (?:is|are|was|were|has|have|had|needs?|lacks?|uses?|contains?|does|do)\b"
    r"(?P<predicate>.+?)(?:,|;| and| so)(?: and| so)? (?P<fix>[^,;]*?ing\b.*?)(?: will\b|$)"
)
_OWNER = re.compile(r"^.*?'s? ")
_SMALL = frozenset(
    (
        *("a", "an", "the", "of", "in", "on", "to", "at", "by", "for", "from", "with", "and", "or"),
        *("is", "are", "be", "been", "being", "was", "were", "has", "have", "its", "it", "their"),
        *("due", "too", "very", "that", "this", "which", "causing", "customer", "slightly", "up"),
    )
)


@lru_cache(maxsize=1 << 10)
def derived_rubric(answer: str) -> Rubric | None:
    """A rubric from a golden answer like "The hose is kinked, and straightening it will help.".

    The last noun of the subject is the part, every content word of what is said about it a fault,
    and the verbs in -ing of the second clause the remedies. None where the sentence has another
    form: then nothing can be decided by code.
    """
    match = _GOLDEN.match(normalise(answer).replace("n't", " not"))
    if match is None:
        return None
    part = _content(_OWNER.sub("", match["subject"]))
    fault = _content(match["predicate"])
    remedy = [_beginning(word) for word in re.findall(r"\b(?:re-)?(\w{2,}ing)\b", match["fix"])]
    if not part or not fault or not remedy:
        return None
    return Rubric(
        part=Phrases((part[-1],)),
        fault=Phrases(fault),
        remedy=Phrases(remedy),
        forbid=Phrases(()),
    )


def _content(text: str) -> list[str]:
    """Beginnings of the words that carry meaning; a negation goes with the word behind it."""
    found: list[str] = []
    negation = ""
    for word in re.findall(r"\w+", text):
        if word in ("not", "no"):
            negation = "not "
        elif word not in _SMALL:
            found.append(negation + _beginning(word))
            negation = ""
    return found


def _beginning(word: str) -> str:
    """The beginning that the inflections of a word share, as a word of a phrase.

    Example:
        >>> _beginning("clogged"), _beginning("closing"), _beginning("full")
        ('clog*', 'clos*', 'full*')
    """
    for ending in ("ing", "ed", "es", "s", "e"):
        short = word.removesuffix(ending)
        if short != word and len(short) >= 3:
            if ending in ("ing", "ed") and re.search(r"([bdgmnprt])\1$", short):
                short = short[:-1]
            return f"{short}*"
    return f"{word}*" if len(word) > 3 else word
