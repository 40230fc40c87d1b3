"""Topics of the rule judge of Guess My City: what stands in the noun phrases of a city.

An open question gets the phrases of its field, those that share a word with it first. A question
for yes or no is answered yes where one phrase holds all its content words; where there is only a
part of them the phrase is told without a yes, and where there is none the judge knows of none.
"""

from __future__ import annotations

import re
from functools import lru_cache

from delta_belief_rl.envs.guess_my_city.data import City, name_key
from delta_belief_rl.judge.guess_my_city.lexicon import load_lexicon
from delta_belief_rl.judge.guess_my_city.question import UNKNOWN, Question, joined, sentence

NONE_KNOWN = "Not that I know of."
_TOLD = frozenset(("food", "sights", "work", "sport", "culture"))
"""Fields that name what a city is known for, so that something else is none of it."""
_PARTICULAR = frozenset(("past", "people"))
"""Fields where a phrase on something else is no answer."""


def about_facts(q: Question) -> str | None:
    """The answer from the phrases that a question is about; None where there is no such field."""
    known = load_lexicon().fields
    fields = [name for name, pattern in known.items() if pattern.search(q.text)]
    if not fields:
        return None
    if q.closed:
        return _closed(q, fields)
    phrases = _ordered(q, fields[0])
    if q.has(r"\bwhen\b|\byear\b|\bhow old\b"):
        # Only a phrase on the very thing has its date.
        wanted = content_words(q.text)
        phrases = tuple(text for text in phrases if _holds(text, wanted))
    return sentence(joined(phrases)) if phrases else UNKNOWN


def in_general(q: Question) -> str | None:
    """What the city is known for; None for a question for yes or no, or about something else."""
    if q.closed or not load_lexicon().general.search(q.text):
        return None
    facts = q.city.facts
    return f"It is known for {joined((facts['sights'][-1], facts['culture'][0]))}."


def anywhere(q: Question) -> str | None:
    """Yes where some phrase of the city holds all that a question asks about."""
    if not q.closed or q.negated or q.choice:
        return None
    wanted = content_words(q.text)
    hits = [text for text in _all(q.city) if wanted and _holds(text, wanted) == len(wanted)]
    return f"Yes: {hits[0]}." if hits else None


def content_words(text: str) -> tuple[str, ...]:
    """Words of a question that say what it is about, as stems."""
    words = (word for word in text.split() if word not in load_lexicon().stop and len(word) > 1)
    return tuple(dict.fromkeys(_stem(word) for word in words))


def _closed(q: Question, fields: list[str]) -> str:
    wanted = content_words(q.text)
    if q.negated:
        return UNKNOWN
    own = [text for field in fields for text in q.city.facts[field]]
    if not wanted:
        # "Does it have famous landmarks?"
        return f"Yes: {own[0]}." if own else NONE_KNOWN
    ranked = sorted(dict.fromkeys((*own, *_all(q.city))), key=lambda text: -_holds(text, wanted))
    best = _holds(ranked[0], wanted)
    if best == len(wanted) or (best and q.choice):
        return f"Yes: {ranked[0]}."
    if best:
        return f"I am not sure, but there is this: {ranked[0]}."
    # What nearly every city has is not missing where the data do not name it.
    told = not set(wanted) & load_lexicon().everywhere and set(fields) & _TOLD
    return NONE_KNOWN if told else UNKNOWN


def _ordered(q: Question, field: str) -> tuple[str, ...]:
    """Phrases of a field; only those that share a word with the question where there are any."""
    wanted = content_words(q.text)
    phrases = q.city.facts[field]
    hits = [text for text in (*phrases, *_all(q.city)) if _holds(text, wanted)]
    if not hits and wanted and field in _PARTICULAR:
        return ()
    return tuple(dict.fromkeys(hits))[:2] or phrases


def _all(city: City) -> tuple[str, ...]:
    return tuple(text for phrases in city.facts.values() for text in phrases)


def _holds(text: str, wanted: tuple[str, ...]) -> int:
    """How many of some stems a phrase holds."""
    stems, same = _stems(text), load_lexicon().same
    return sum(any(_found(other, stems) for other in same.get(word, (word,))) for word in wanted)


def _found(word: str, stems: frozenset[str]) -> bool:
    return word in stems or (len(word) > 4 and any(stem.startswith(word) for stem in stems))


@lru_cache(maxsize=1 << 13)
def _stems(text: str) -> frozenset[str]:
    return frozenset(_stem(word) for word in name_key(text).split())


def _stem(word: str) -> str:
    for ending, instead in (("ies", "y"), ("sses", "ss"), ("ches", "ch"), ("shes", "sh")):
        if word.endswith(ending):
            return word[: -len(ending)] + instead
    if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 3:
        return word[:-1]
    return re.sub(r"'$", "", word)
