"""Phrases and sentences: how Customer Service finds out what a message speaks of.

A message is split into sentences, a sentence into plain words. A phrase is found in a sentence when
all its words stand near each other, in any order unless it is a phrase of a question. What stands
behind a negation ("the filter is not clogged") is not found, and what is only asked for ("when did
you clean it?") is told from what is said or proposed by the sentence's mood.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from delta_belief_rl.envs.answers import normalise, strip_fillers

Mood = Literal["open", "status", "statement"]
"""``open``: asks what, when, where ... ``status``: asks whether something is so. ``statement``:
says or proposes something, also in the form of a question ("could you clean it?")."""

MAX_SENTENCES, MAX_WORDS = 30, 200
"""More than any message, and any sentence of it, holds; what follows is not read."""
SPREAD = 3
"""So many other words may stand between the words of a phrase."""
NEGATION_REACH = 3
"""A negation holds for so many words behind it."""

_NEGATIONS = frozenset(("not", "no", "never", "without", "neither", "nor", "instead", "hardly"))
_BREAKS = frozenset((",", "and", "but", "because", "since", "so", "as", "due", "then", "although"))
"""A negation does not reach beyond these."""

_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+")
_NOT = re.compile(
    r"n't\b|(?<=\b(?:do|is))nt\b|(?<=\b(?:did|was|has))nt\b|(?<=\b(?:does|were|have))nt\b"
)
_CLITIC = re.compile(r"'(?:s|re|ve|ll|d|m)\b")
_ASIDE = re.compile(r"\(([^()\s]+(?: [^()\s]+){0,2})\)")
"""Brackets around another name; longer ones hold a clause."""
_VERSUS = re.compile(r"\b(?:vs|versus)\b")
_MARK = re.compile(
    # Between words, and not within one as the hyphen of "re-seat" or the point of "2.4".
    r"(?<=\s)(?:[^\w\s/|&\u2044\u2215]|_)+(?=\s)|(?<=\s)-+(?=\w)|(?<=\w)-+(?=\s)|--+|\.\.+"
    r"|(?<=[^\W\d_])\.(?=[^\W\d_])|[\"']\s+(?=[\"'])"
    # Anything that is no part of a word, of a number, or of the markup around one.
    r"|[^\w\s,.:'\"/|&\u2044\u2215%\u00b0*#-]"
)
"""Marks that cut a sentence as a comma does: arrows, dashes, dots, brackets, pictures."""
_REWRITES = (
    (re.compile(r"\bcannot\b"), "can not"),
    (re.compile(r"\bon ?/ ?off\b"), "on off"),
    (re.compile(r":(?=\s|$)"), ","),
    (re.compile(r"\band ?/ ?or\b|[/|&\u2044\u2215]"), " or "),
    (re.compile(r"\bwi[ -]fi\b"), "wifi"),
    (re.compile(r"\bdo not disturb\b"), "dnd"),
    # None of these denies anything.
    (re.compile(r"\b(?:do not forget|make sure not to forget|not only|whether or not)\b"), " "),
    (re.compile(r"\bwhy (?:do not|not)\b"), "please"),
    # What is to be watched for afterwards is no question of its own.
    (
        re.compile(
            r"(?:,? ?(?:and|then|to|,) )(?:please )?(?:tell me|let me know|report|see|check) "
            r"(?:(?:back )?(?:if|whether|how) (?:it|that|this|the|things|your)\b.{0,40}?"
            r"(?:help|work|fix|solve|stop|improv|start|gone|chang|persist|still|better|again)"
            r"|what happens|how it goes).*"
        ),
        "",
    ),
)
_MARKS = "\"'\u201d\u2019)*_ "
"""May stand behind a question mark."""
_WORD = re.compile(r"[^\W_]+(?:\.\d\w*)*|,")
_OPEN = ("what", "when", "where", "why", "who", "whose", "which", "how")
_OPEN_EXCEPTIONS = re.compile(r"(?:how|what) (?:about|if)\b|what you (?:can|could|should)\b")
_INDIRECT = re.compile(
    r"\b(?:tell|know|say|describe|explain|remember|check|see|confirm|find out|ask|wonder\w*)\s"
    r"(?:\w+\s){0,2}?(?:what|when|where|why|who|which|how)\b"
)
_STATUS = re.compile(
    r"(?:is|are|was|were|am|does|did|has|had)\b"
    r"|do (?:you|your|the|they|any|these|those|all|we|both)\b"
)
_STATUS_EXCEPTIONS = re.compile(r"d(?:id|o) you (?:try|want to|mind)\b")
_INDIRECT_STATUS = re.compile(
    r"\b(?:tell me|let me know|know|say|confirm|ask|see|check|wonder\w*)\s(?:if|whether)\b"
)


@dataclass(frozen=True, slots=True)
class Sentence:
    """Plain words in lower case, commas kept as words of their own."""

    words: tuple[str, ...]
    mood: Mood = "statement"
    beginnings: frozenset[str] = field(init=False, compare=False, repr=False)
    """What the words begin with, one to three letters: a quick way to tell what is not there."""

    def __post_init__(self) -> None:
        found = {word[:length] for word in self.words for length in (1, 2, 3)}
        object.__setattr__(self, "beginnings", frozenset(found))

    def has(self, *words: str) -> bool:
        """Whether one of the words stands in the sentence."""
        return not set(words).isdisjoint(self.words)


@dataclass(frozen=True, slots=True)
class Match:
    """Where a phrase was found.

    Attributes:
        at: Indices of its words in the sentence.
        weight: Number of its words.
        denied: A negation stands before it.
    """

    at: frozenset[int]
    weight: int
    denied: bool = False


class Phrase:
    """One or more words; see ``word_matches`` for what each of them stands for.

    Args:
        text: As a data file has it. "not" in it demands a negation before the other words.
        ordered: The words stand in this order, as those of a question do.
    """

    def __init__(self, text: str, ordered: bool = False) -> None:
        self.words = tuple(text.lower().split())
        self._ordered = ordered
        self._denied = "not" in self.words
        content = [word for word in self.words if word != "not"]
        self._patterns = [re.compile(_pattern(word)) for word in content]
        self.beginnings = frozenset(word.strip("=*")[:3] for word in content)

    def find_all(self, sentence: Sentence, denied_too: bool = False) -> Iterator[Match]:
        """Every place where the phrase stands, from left to right.

        Args:
            sentence: Where to look.
            denied_too: Also where it is denied.
        """
        if not self.beginnings <= sentence.beginnings:
            return
        for place in _places(self._patterns, sentence.words, self._ordered):
            denied = _denied(min(place), sentence.words)
            if denied_too or denied == self._denied:
                yield Match(frozenset(place), len(self.words), denied)


class Phrases:
    """A group of phrases.

    Args:
        texts: The phrases as a data file has them.
        ordered: See ``Phrase``.
    """

    def __init__(self, texts: Iterable[str], ordered: bool = False) -> None:
        self.items = tuple(Phrase(text, ordered) for text in texts)

    def first(self, sentence: Sentence) -> Match | None:
        """The match of the longest phrase that is found; the first of equally long ones."""
        return max(self.found(sentence), key=lambda match: match.weight, default=None)

    def all(self, sentence: Sentence, denied_too: bool = False) -> list[Match]:
        """Every match of every phrase; see ``Phrase.find_all``."""
        return [match for each in self.items for match in each.find_all(sentence, denied_too)]

    def found(self, sentence: Sentence, taken: frozenset[int] = frozenset()) -> list[Match]:
        """For every phrase that is found, its first match that holds no taken word."""
        matches: list[Match] = []
        for each in self.items:
            free = (match for match in each.find_all(sentence) if not match.at & taken)
            matches += [match] if (match := next(free, None)) else []
        return matches


def word_matches(pattern: str, word: str) -> bool:
    """Whether a word of a phrase stands for a word.

    Four letters or more stand for every word that begins with them, fewer for the word and its
    plain inflections; ``*`` at the end makes any of them a beginning, ``=`` before it allows one
    word.

    Example:
        >>> word_matches("clog", "clogged"), word_matches("tap", "tape")
        (True, False)
    """
    return re.fullmatch(_pattern(pattern), word) is not None


def _pattern(pattern: str) -> str:
    """The regular expression of the words that a word of a phrase stands for."""
    core = re.escape(pattern.strip("=*"))
    if pattern.startswith("="):
        return core
    if pattern.endswith("*") or len(pattern) > 3:
        return core + r"\S*"
    if pattern.endswith("e"):
        return core + "[sd]?"
    return core + f"(?:s|{re.escape(pattern[-1:])}?(?:ed|ing))?"


@lru_cache(maxsize=1 << 14)
def sentences(text: str) -> tuple[Sentence, ...]:
    """The sentences of a message, in order, at most ``MAX_SENTENCES`` of them."""
    found: list[Sentence] = []
    for line in text.splitlines():
        for part in _SENTENCE_END.split(line):
            sentence = _sentence(part)
            if sentence.words:
                found.append(sentence)
                if len(found) == MAX_SENTENCES:
                    return tuple(found)
    return tuple(found)


def _sentence(part: str) -> Sentence:
    text = normalise(part)
    asks = part.rstrip(_MARKS).endswith("?")
    text = _CLITIC.sub("", _NOT.sub(" not", text))
    text = _VERSUS.sub(" or ", _ASIDE.sub(r" \1 ", text))
    text = _MARK.sub(" , ", text).replace("-", " ")
    for pattern, plain in _REWRITES:
        text = pattern.sub(plain, text)
    words = tuple(_WORD.findall(text)[:MAX_WORDS])
    return Sentence(words, _mood(strip_fillers(" ".join(text.split())), asks))


def _mood(text: str, asks: bool) -> Mood:
    """The mood of plain words; of a question the last clause, too ("I see, when was it?")."""
    clauses = [text, *([text.rsplit(", ", 1)[-1]] if asks else [])]
    for clause in clauses:
        if clause.split(" ")[0] in _OPEN and not _OPEN_EXCEPTIONS.match(clause):
            return "open"
        if _STATUS.match(clause) and not _STATUS_EXCEPTIONS.match(clause):
            return "status"
    if _INDIRECT.search(text):
        return "open"
    return "status" if _INDIRECT_STATUS.search(text) else "statement"


def _places(
    content: list[re.Pattern[str]], words: tuple[str, ...], ordered: bool
) -> Iterator[list[int]]:
    """Places of the content words of a phrase near each other, from left to right."""
    if not content:
        return
    hits = [[i for i, word in enumerate(words) if each.fullmatch(word)] for each in content]
    reach = len(content) + SPREAD
    for first in hits[0]:
        taken = [first]
        for others in hits[1:]:
            near = [i for i in others if i not in taken and abs(i - first) < reach]
            near = [i for i in near if i > taken[-1] or not ordered]
            if not near:
                break
            taken.append(min(near, key=lambda i: (abs(i - taken[-1]), i)))
        else:
            yield taken


def _denied(at: int, words: tuple[str, ...]) -> bool:
    """Whether a negation stands shortly before a word."""
    for back in range(at - 1, max(-1, at - 1 - NEGATION_REACH), -1):
        if words[back] in _NEGATIONS:
            return True
        if words[back] in _BREAKS:
            return False
    return False
