"""What one message of the support agent does: solves the case, asks for a fact, or gives advice.

Code reads every message the same way whoever plays the customer, so that the strict win, the facts
gathered and the score are functions of the messages alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from delta_belief_rl.envs.customer_service.data import Rubric, Scenario, lexicon, scenarios
from delta_belief_rl.envs.customer_service.lists import is_list, offers_many_remedies, other_object
from delta_belief_rl.envs.customer_service.text import Match, Sentence, sentences
from delta_belief_rl.envs.goal_phrase import has_goal_phrase

Kind = Literal["fact", "topic", "advice", "remedy", "talk", "jargon", "none"]

_PRONOUNS = ("it", "them", "they", "this", "that", "these", "those", "one", "ones", "its")


@dataclass(frozen=True, slots=True)
class Named:
    """What a message says of the cause and the fix, by the phrases of a rubric.

    Attributes:
        cause: A part is named together with its fault.
        fix: A remedy is proposed for the part.
        is_list: Several causes or remedies are on offer.
        forbidden: It says something that no right answer contains.
    """

    cause: bool = False
    fix: bool = False
    is_list: bool = False
    forbidden: bool = False

    @property
    def any(self) -> bool:
        """The cause or the fix is named, and the message is fit to win."""
        return (self.cause or self.fix) and not (self.is_list or self.forbidden)

    @property
    def solved(self) -> bool:
        """The strict win: the one cause and its fix."""
        return self.cause and self.fix and not (self.is_list or self.forbidden)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a message of a packaged scenario does.

    Attributes:
        kind: ``fact``: asks for a fact of the scenario. ``topic``: asks for something else about
            the product. ``advice``: advice that the scenario says not to help. ``remedy``: other
            advice. ``talk``, ``jargon`` and ``none``: neither.
        key: Name of the fact, topic or remedy, number of the advice, or the word of jargon.
    """

    named: Named
    kind: Kind
    key: str


@dataclass(frozen=True, slots=True)
class _Found:
    """Something that a message may be about; the best weight wins, then the earliest place."""

    kind: Kind
    key: str
    weight: float
    place: int


@lru_cache(maxsize=1 << 15)
def read_named(message: str, rubric: Rubric) -> Named:
    """What a message says of the cause and the fix; nothing where it speaks the goal phrase."""
    if has_goal_phrase(message):
        return Named()
    cause, fix = _cause_and_fix(sentences(message), rubric)
    return Named(
        cause=cause,
        fix=fix,
        is_list=(cause or fix) and is_list(message, rubric),
        forbidden=any(rubric.forbid.first(sentence) for sentence in sentences(message)),
    )


@lru_cache(maxsize=1 << 15)
def read_message(message: str, scenario: Scenario) -> Reading:
    """What a message does in a scenario.

    Several things asked at once count as the one that is asked most clearly: a customer answers one
    question at a time. Who also names the cause or the fix of another scenario of the product gives
    a list.
    """
    named = read_named(message, scenario.rubric)
    if named.any:
        others = any(any(_cause_and_fix(sentences(message), r)) for r in _other_rubrics(scenario))
        listed = others
    else:
        listed = not has_goal_phrase(message) and offers_many_remedies(message)
    if listed:
        named = Named(named.cause, named.fix, True, named.forbidden)
    found = _found(sentences(message), scenario)
    best = max(found, key=lambda each: (each.weight, -each.place), default=None)
    if best is None:
        return Reading(named, "none", "")
    return Reading(named, best.kind, best.key)


def _cause_and_fix(parts: tuple[Sentence, ...], rubric: Rubric) -> tuple[bool, bool]:
    """Whether the cause and the fix are named, be it among others.

    The piece may stand in an earlier sentence when a pronoun refers to it. A remedy without any
    piece is meant for the cause that was named.
    """
    cause, fix, known = False, False, False
    for sentence in parts:
        pieces = rubric.part.all(sentence)
        refers = known and sentence.has(*_PRONOUNS)
        faults = _faults(sentence, rubric, pieces, refers)
        says_cause = bool(faults) and sentence.mood != "open"
        cause = cause or says_cause
        if sentence.mood == "statement":
            remedies = rubric.remedy.all(sentence)
            if says_cause:
                # One word cannot be both: "the tap is not open" proposes nothing.
                remedies = _apart(remedies, faults)
            to_piece = remedies if refers else _apart(remedies, pieces)
            meant = [r for r in remedies if not other_object(min(r.at), sentence, rubric)]
            fix = fix or bool(to_piece) or bool(meant and cause)
        known = known or bool(pieces)
    return cause, fix


def _faults(sentence: Sentence, rubric: Rubric, pieces: list[Match], refers: bool) -> list[Match]:
    """The faults that a sentence gives to the piece, by name or (``refers``) by a pronoun."""
    faults = rubric.fault.all(sentence)
    if refers:
        return faults
    # In "the plug does not support 5 GHz" the negation belongs to the fault, not to the piece.
    denied = [each for each in faults if each.denied]
    anywhere = rubric.part.all(sentence, denied_too=True) if denied else []
    plain = [each for each in faults if not each.denied]
    return _apart(plain, pieces) + _apart(denied, anywhere)


def _apart(matches: list[Match], others: list[Match]) -> list[Match]:
    """The matches that share no word with at least one of the others."""
    return [match for match in matches if any(not match.at & other.at for other in others)]


@lru_cache(maxsize=1 << 10)
def _other_rubrics(scenario: Scenario) -> tuple[Rubric, ...]:
    """Those of the other scenarios of the same product."""
    return tuple(
        other.rubric
        for other in scenarios().values()
        if other.product == scenario.product and other.id != scenario.id
    )


# --- what is asked or advised -----------------------------------------------------------------


def _found(parts: tuple[Sentence, ...], scenario: Scenario) -> Iterator[_Found]:
    """Everything that the message may be about, weighed."""
    for place, sentence in enumerate(parts):
        inspects = sentence.mood != "statement" or bool(lexicon().inspect.first(sentence))
        asked, advised = (1.5, 0.0) if inspects else (0.0, 1.5)
        yield from _asked(sentence, scenario, asked, place)
        yield from _advised(sentence, scenario, advised, place)
        yield from _talk(sentence, place)


def _asked(sentence: Sentence, scenario: Scenario, bonus: float, place: int) -> Iterator[_Found]:
    topics = lexicon().topics
    for name, fact in scenario.facts.items():
        own = fact.ask.first(sentence) if fact.ask else None
        shared = topics[name].words.first(sentence) if name in topics else None
        for match, weight in ((own, 1.0), (shared, 0.5)):
            if match:
                yield _Found("fact", name, 2.0 * match.weight + weight + bonus, place)
    # What he does not understand he answers from what he has noticed, or not at all.
    plain = lexicon().jargon.first(sentence) is None
    for name, topic in topics.items():
        if plain and name not in scenario.facts and (match := topic.words.first(sentence)):
            yield _Found("topic", name, 2.0 * match.weight + bonus, place)
    if scenario.rubric.part.first(sentence):
        # Nothing clear is asked, but of the right piece: the most telling fact is the answer.
        name = "look" if "look" in scenario.needed else scenario.needed[-1]
        yield _Found("fact", name, 1.0, place)


def _advised(sentence: Sentence, scenario: Scenario, bonus: float, place: int) -> Iterator[_Found]:
    if sentence.mood != "open":
        for number, advice in enumerate(scenario.fails):
            if match := advice.words.first(sentence):
                yield _Found("advice", str(number), 2.0 * match.weight + 0.7 + bonus, place)
    if sentence.mood == "statement":
        for name, remedy in lexicon().remedies.items():
            if match := remedy.words.first(sentence):
                yield _Found("remedy", name, 2.0 * match.weight + 0.3 + bonus, place)


def _talk(sentence: Sentence, place: int) -> Iterator[_Found]:
    """Courtesies, and words that the customer does not know."""
    words = lexicon()
    for name, talk in words.talk.items():
        if match := talk.words.first(sentence):
            weight = 2.0 * match.weight + 0.2 if match.weight > 1 else 0.5
            yield _Found("talk", name, weight, place)
    for match in words.jargon.found(sentence):
        # Below the facts of the scenario and advice.
        word = " ".join(sentence.words[at] for at in sorted(match.at))
        yield _Found("jargon", word, 3.7, place)
