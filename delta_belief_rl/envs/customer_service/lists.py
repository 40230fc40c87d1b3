"""Whether a message of Customer Service gives one answer, or several on offer.

Naming the right cause among others, or the right remedy, is no solution. Looked for are
alternatives ("the hose or the filter"), fallbacks ("if that does not help, ..."), enumerations of
pieces, and faults or remedies of other pieces, whatever mark or word stands between them.
Preparations of one fix (switching off and on, waiting) are no second one, and neither is a single
further remark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from delta_belief_rl.envs.customer_service.data import Rubric, lexicon
from delta_belief_rl.envs.customer_service.text import Phrases, Sentence, sentences

MAX_SOLVING_WORDS = 120
"""A longer message is no answer but a leaflet."""
MANY_PARTS = 4
"""So many other pieces in one sentence make a list."""
MANY_REMEDIES = 3
"""So many kinds of advice make a list, also without the right one."""
MANY_OTHERS = 2
"""So many other causes and remedies make a list."""

_PREPARATION = frozenset(("restart", "wait", "mode", "reconnect"))
"""Remedies that are also steps of another one ("switch it off first, and on again afterwards")."""
_SEPARATORS = frozenset((",", "and", "or", "but", "because", "then", "also", "plus"))
_FALLBACK = re.compile(
    r"\b(?:alternatively|otherwise|another (?:option|possibility)|second option|if not|"
    r"(?:if|in case) (?:that|this|it|the problem|the issue) (?:does|is|do|did|still|persist)\w*"
    r"[^.,;]{0,30}|or else|failing that)[ ,.]+(?P<rest>.+)"
)
_VERBS = ("is", "are", "has", "have", "might", "may", "could", "must", "was", "were")
_BESIDE_OR = 3
"""So many words on each side of an "or" are looked at."""


def is_list(message: str, rubric: Rubric) -> bool:
    """Whether the cause or fix that a message names is one of several on offer."""
    parts = sentences(message)
    if len(message.split()) > MAX_SOLVING_WORDS:
        return True
    stated = [sentence for sentence in parts if sentence.mood != "open"]
    if any(_offers_alternative(sentence, rubric) or _pair(sentence, rubric) for sentence in stated):
        return True
    if any(len(_other_parts(sentence, rubric)) >= MANY_PARTS for sentence in stated):
        return True
    if _falls_back(parts, rubric):
        return True
    enumerated = sum(max(0, _bare_names(sentence) - 1) for sentence in stated)
    return _others(stated, rubric) + enumerated >= MANY_OTHERS


def offers_many_remedies(message: str) -> bool:
    """Whether a message proposes many kinds of advice, be the right one among them or not."""
    stated = [sentence for sentence in sentences(message) if sentence.mood == "statement"]
    kinds = [
        name
        for name, advice in lexicon().remedies.items()
        if any(advice.words.first(sentence) for sentence in stated)
    ]
    return len(kinds) >= MANY_REMEDIES


def other_object(start: int, sentence: Sentence, rubric: Rubric) -> bool:
    """Whether a remedy at a place of a sentence is meant for another piece than the rubric's."""
    near = Sentence(sentence.words[start : start + 6])
    return rubric.part.first(near) is None and bool(lexicon().parts.all(near))


def _others(stated: Iterable[Sentence], rubric: Rubric) -> int:
    """Clauses about another piece, and kinds of advice besides."""
    count = 0
    kinds: set[str] = set()
    for segment in (each for sentence in stated for each in _segments(sentence)):
        pairs = _other_pairs(segment, rubric)
        if _speaks_of_other_piece(segment, rubric):
            count += max(pairs, 1)
        else:
            count += pairs
            kinds |= _other_kinds(segment, rubric) - _PREPARATION
    return count + len(kinds)


def _offers_alternative(sentence: Sentence, rubric: Rubric) -> bool:
    """Whether an "or" joins the rubric's words with another piece, fault or remedy."""
    for at, word in enumerate(sentence.words):
        if word != "or":
            continue
        before = Sentence(sentence.words[max(0, at - _BESIDE_OR) : at])
        behind = Sentence(sentence.words[at + 1 : at + 1 + _BESIDE_OR])
        for side in (before, behind):
            if _other_kinds(side, rubric) or (not _of_rubric(side, rubric) and _of_lexicon(side)):
                return True
    return False


def _pair(sentence: Sentence, rubric: Rubric) -> bool:
    """Whether the piece shares its fault with another one ("filter and pump are clogged")."""
    words = sentence.words
    for at, word in enumerate(words):
        if word not in ("and", ","):
            continue
        before, behind = Sentence(words[max(0, at - 2) : at]), Sentence(words[at + 1 : at + 4])
        mine = rubric.part.first(before) or rubric.part.first(behind)
        other = _other_parts(before, rubric) or _other_parts(behind, rubric)
        if mine and other and behind.has(*_VERBS):
            return True
    return False


def _falls_back(parts: tuple[Sentence, ...], rubric: Rubric) -> bool:
    """Whether other advice follows a phrase such as "if that does not help"."""
    match = _FALLBACK.search(". ".join(" ".join(sentence.words) for sentence in parts))
    if match is None:
        return False
    rest = [each for sentence in sentences(match["rest"]) for each in _segments(sentence)]
    return any(
        _other_kinds(segment, rubric) or _speaks_of_other_piece(segment, rubric) for segment in rest
    )


def _segments(sentence: Sentence) -> Iterator[Sentence]:
    """The sentence cut at commas and conjunctions."""
    part: list[str] = []
    for word in (*sentence.words, ","):
        if word not in _SEPARATORS:
            part.append(word)
        elif part:
            yield Sentence(tuple(part), sentence.mood)
            part = []


def _speaks_of_other_piece(segment: Sentence, rubric: Rubric) -> bool:
    """Whether a clause gives a fault or a remedy to a piece that is not the rubric's."""
    if rubric.part.first(segment) or not _other_parts(segment, rubric):
        return False
    words = lexicon()
    return bool(words.faults.first(segment)) or any(
        advice.words.first(segment) for advice in words.remedies.values()
    )


def _other_pairs(segment: Sentence, rubric: Rubric) -> int:
    """Other pieces with a fault or remedy of their own right beside them.

    It finds the members of a list that nothing separates ("pump broken replace pump hose kinked").
    """
    words = lexicon()
    mine = _places_of(segment, rubric.part)
    said = _places_of(segment, words.faults, *(each.words for each in words.remedies.values()))
    said -= _places_of(segment, rubric.fault)
    # The "charging" of a charging station belongs to its name, and "clean" to the piece beside it.
    said = {
        at
        for at in said
        if not segment.words[at].endswith("ing") and mine.isdisjoint((at - 1, at + 1))
    }
    taken, count = mine | _places_of(segment, rubric.remedy), 0
    for piece in words.parts.items:
        places = {
            at for match in piece.find_all(segment) if not match.at & taken for at in match.at
        }
        beside = any(not said.isdisjoint((at - 1, at + 1)) for at in places)
        taken, count = (taken | places, count + 1) if beside else (taken, count)
    return count


def _bare_names(sentence: Sentence) -> int:
    """Members of an enumeration of pieces: clauses that are little but a name."""
    return sum(
        len(segment.words) <= 2 and bool(lexicon().parts.first(segment))
        for segment in _segments(sentence)
    )


def _other_parts(sentence: Sentence, rubric: Rubric) -> list[frozenset[int]]:
    """Places of words for pieces that are not the rubric's."""
    mine = _places_of(sentence, rubric.part, rubric.remedy)
    found: list[frozenset[int]] = []
    for match in lexicon().parts.found(sentence, frozenset(mine)):
        if not any(match.at & at for at in found):
            found.append(match.at)
    return found


def _other_kinds(segment: Sentence, rubric: Rubric) -> set[str]:
    """Kinds of advice that the rubric's own words are no part of."""
    mine = _places_of(segment, rubric.part, rubric.fault, rubric.remedy)
    return {
        name
        for name, advice in lexicon().remedies.items()
        if (match := advice.words.first(segment)) and not match.at & mine
    }


def _places_of(sentence: Sentence, *groups: Phrases) -> set[int]:
    return {at for group in groups for match in group.all(sentence) for at in match.at}


def _of_rubric(side: Sentence, rubric: Rubric) -> bool:
    return bool(_places_of(side, rubric.part, rubric.fault, rubric.remedy))


def _of_lexicon(side: Sentence) -> bool:
    words = lexicon()
    remedies = (advice.words for advice in words.remedies.values())
    return bool(_places_of(side, words.parts, words.faults, *remedies))
