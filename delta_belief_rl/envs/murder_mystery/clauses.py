"""A detective's text cut into clauses, with the people and things that each of them names.

In a clause every person can be replaced by one word, its *mark*: ``#0``, ``#1`` ... for the people
of the case in their order, and ``#v`` for the victim.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from delta_belief_rl.envs.murder_mystery.data import Case
from delta_belief_rl.envs.murder_mystery.words import Phrase, word_set

LOOK_VERBS = word_set(
    "examine inspect look search check study read investigate observe view watch see visit enter "
    "go explore review survey scan open unlock lift take pick listen play trace consult verify "
    "walk return head peek browse rummage scrutinise scrutinize approach unfold turn empty find "
    "locate secure collect retrieve measure count move photograph perform conduct reconstruct "
    "continue"
)
GO_VERBS = word_set("go walk return head enter visit approach")
TEST_VERBS = word_set(
    "test dust analyse swab send run order request have get compare sample match submit take "
    "perform conduct check examine commission process try do"
)
ASK_VERBS = word_set(
    "ask interview question talk speak interrogate press confront quiz grill tell call summon hear "
    "inquire enquire consult meet approach find"
)
CHECK_VERBS = word_set(
    "check verify confirm corroborate test examine investigate review look validate"
)
VERBS = LOOK_VERBS | TEST_VERBS | ASK_VERBS | CHECK_VERBS
_WEAK_VERBS = word_set(
    "do have get see take find call hear turn order request match sample watch meet count move run "
    "go play try process head open trace return perform continue measure tell"
)
"""Too common elsewhere in a sentence to begin a clause there."""
_BEFORE_VERBS = word_set("and then i , also so will now let us me to we would like next")
PRONOUNS = frozenset(["him", "her", "them", "he", "she", "his"])
ASKS_LOOK = word_set("what is are does do how was were any which")
ALIBI_WORDS = word_set("alibi story whereabout statement account movement claim")

_SEPARATORS = frozenset([",", "/", "&", "+", ";", ":"])
JOINERS = _SEPARATORS | frozenset(["and", "or", "plus", "also", "nor", "versus", "vs", "then"])
"""Words that can join the items of a list."""
BETWEEN = JOINERS | word_set(
    "the a an about both either maybe perhaps possibly his her their of as well on in for with "
    "some any all at to"
)
"""Words that may stand between the items of a list."""
_LEAD = re.compile(
    r"^(?:(?:so|now|first|next|then|ok|okay|well|please|finally|also|therefore|and|alright|right|"
    r"thus|hence|good|great|again|instead|action|my|step|turn|is|to|will|be|the|,|:|\d+)\s+)*"
    r"(?:(?:i|we)\s+(?:(?:would|will|shall|should|must|need|want|wish|like|decide|choose|am|are|"
    r"going|to|now|then|first|next|also|again|have|proceed)\s+)*|"
    r"let me\s+|let us\s+|(?:can|could|may|would|will) (?:i|we|you)\s+(?:please\s+)?|to\s+)?"
    r"(?:(?:carefully|closely|thoroughly|quickly|now|then|just|first|next|please)\s+)*"
)
_ENDS = frozenset(".!?;")


@dataclass(frozen=True, slots=True)
class Mention:
    """Where a person, the victim or a look is named: ``words[start:end]`` of the clause."""

    start: int
    end: int
    name: str
    sort: Literal["person", "victim", "look"]


@dataclass(frozen=True, slots=True)
class Clause:
    """A part of a text.

    Attributes:
        ends: The character that ends it; empty where it goes on.
        mentions: The people and looks that it names, in order.
        verb: The verb of acting that opens it; empty where none does.
    """

    words: Phrase
    ends: str
    mentions: tuple[Mention, ...]
    verb: str


@lru_cache(maxsize=512)
def _index(case: Case) -> dict[str, list[tuple[Phrase, Mention]]]:
    """Phrases by their first word, longest first."""
    named: list[tuple[Phrase, Mention]] = []
    for person in case.people:
        named += [(words, Mention(0, 0, person.name, "person")) for words in person.names]
    for look in case.looks:
        named += [(words, Mention(0, 0, look.name, "look")) for words in look.names]
    named += [(words, Mention(0, 0, case.victim, "victim")) for words in case.victim_names]
    index: dict[str, list[tuple[Phrase, Mention]]] = {}
    for words, mention in sorted(named, key=lambda item: -len(item[0])):
        index.setdefault(words[0], []).append((words, mention))
    return index


def _mentions(case: Case, words: Phrase) -> tuple[Mention, ...]:
    """People and looks that a text names, in order; the longest name counts."""
    index, found, at = _index(case), list[Mention](), 0
    while at < len(words):
        for name, mention in index.get(words[at], ()):
            if words[at : at + len(name)] == name:
                found.append(Mention(at, at + len(name), mention.name, mention.sort))
                at += len(name) - 1
                break
        at += 1
    return tuple(found)


def clauses(case: Case, words: Phrase) -> Iterator[Clause]:
    """Cut a text at the ends of sentences, and where "and" or a comma leads to the next verb."""
    begin = 0
    for at, word in enumerate(words):
        if word in ("and", "then", ",") and _verb_follows(case, words, at + 1):
            yield _clause(case, words[begin:at], "")
            begin = at + 1
        elif word in _ENDS:
            yield _clause(case, words[begin:at], word)
            begin = at + 1
    yield _clause(case, words[begin:], "")


def _verb_follows(case: Case, words: Phrase, at: int) -> bool:
    """Whether a new command begins here, "I will" and the like left out."""
    while at < len(words) and words[at] in _BEFORE_VERBS:
        at += 1
    strong = at + 1 < len(words) and words[at] in VERBS - _WEAK_VERBS
    return strong and not _is_noun(case, words, at)


def _is_noun(case: Case, words: Phrase, at: int) -> bool:
    """Whether a verb is the beginning of something's name, as in "test tube"."""
    return any(words[at : at + len(name)] == name for name, _ in _index(case).get(words[at], ()))


def _clause(case: Case, words: Phrase, ends: str) -> Clause:
    text = " ".join(words)
    match = _LEAD.match(text)
    rest = text[match.end() :] if match else text
    first = rest.split(" ", 1)[0]
    mentions = _mentions(case, words)
    start = len(words) - len(rest.split())
    named = any(mention.start <= start < mention.end for mention in mentions)
    return Clause(words, ends, mentions, "" if named or first not in VERBS else first)


def joined(words: Phrase, one: Mention, other: Mention) -> bool:
    """Whether two mentions stand side by side in a list."""
    between = words[one.end : other.start]
    return bool(set(between) & JOINERS) and set(between) <= BETWEEN


def sentences(case: Case, words: Phrase) -> Iterator[Clause]:
    """Cut a text at the ends of sentences only."""
    begin = 0
    for at, word in enumerate((*words, ".")):
        if word in _ENDS:
            if at > begin:
                yield _clause(case, words[begin:at], word)
            begin = at + 1


def mark(case: Case, name: str) -> str:
    """The word that stands for a person in a text."""
    for number, person in enumerate(case.people):
        if person.name == name:
            return f"#{number}"
    return "#v" if name == case.victim else "#all"


def with_people(case: Case, clause: Clause) -> str:
    """The text of a clause with one word for every person."""
    words: list[str] = list(clause.words)
    for mention in reversed(clause.mentions):
        if mention.sort != "look":
            words[mention.start : mention.end] = [mark(case, mention.name)]
    return " ".join(words)
