"""How well an answer suits a user, decided by phrases: the rater of the rule judge.

``rating = 1 + 9 * max(0, kept - broken) / needs``. A need is *kept* when the answer has what the
need demands and nothing that breaks it, *broken* when it has something that breaks it or offers
several alternatives at once, and otherwise simply missed.

This sees whether an answer takes account of what the user said, not whether it is a good one. What
would pay without being an answer is cut out first (words to the judge, recited facts and rules,
repetitions, offers for whoever the user may be) or leaves the rating at 1 (no sentences, too short,
about something else).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from delta_belief_rl.envs.user_personalization.data import (
    AT_MOST,
    LEAVE_OUT,
    Need,
    Profile,
    opening,
    profiles,
)
from delta_belief_rl.envs.user_personalization.text import (
    amounts,
    is_negated,
    leaves_out,
    names,
    places,
    plain,
    uses,
)

MAX_WORDS = 300
"""Of a longer answer the rest is not read."""
MIN_WORDS = 30
MIN_DISTINCT_WORDS = 22
MIN_WORDS_OF_A_COPY = 3
MIN_GLUE = 0.14
"""Least share of words such as "the" and "with": a list of catchwords has none."""
MAX_NEEDS_OF_A_SENTENCE = 3
"""A sentence that sums up all facts counts for so many of them."""
MAX_AMOUNTS = 4
"""Of one unit; an answer with more different amounts has not decided on one."""
MAX_RIVALS = 1
"""So many demands of other users on the same topic an answer may meet by chance."""
MAX_OTHERS = 1
OTHERS_SHARE = 0.4
"""An answer that meets this share of the needs of more than ``MAX_OTHERS`` other users of the
domain is for everybody."""
ANOTHERS_SHARE = 0.6
"""An answer that meets this share of the needs of a single other one is for that one."""

_GLUE = frozenset(
    (
        *("a", "an", "the", "and", "or", "of", "to", "in", "on", "with", "for", "at", "by", "from"),
        *("it", "is", "are", "be", "can", "will", "this", "that", "as", "so", "if", "when", "then"),
        *("you", "your", "them", "each", "while", "into", "i", "we", "she", "he", "they", "her"),
        *("his", "its"),
    )
)
_EDGES = " .!?;:,|"
_HAS_DIGIT = re.compile(r"\d")
_BREAK = re.compile(r"(?<=[.!?;])\s+|\n+")


def _any_of(*patterns: str) -> re.Pattern[str]:
    """Matches where one of the patterns stands as words, in any case."""
    return re.compile(rf"\b(?:{'|'.join(patterns)})\b", re.IGNORECASE)


_TO_THE_JUDGE = _any_of(
    r"judge|rater|grader|grading|rubric|evaluator|role-?player|persona|system prompt",
    r"max(?:imum)? (?:score|rating|points)|full marks",
    r"(?:previous|prior|above|all) instructions?",
    r"(?:rate|rating|score|grade)\b[^.\n]{0,20}(?:\d|ten|highest|perfect|this|me)",
    r"(?:10|ten) ?(?:/|out of|of) ?(?:10|ten)",
    r"goal reached",
    r"satisf(?:y|ies|ied) (?:all|every) (?:needs?|requirements?|facts?|preferences?)",
    r"must (?:not )?(?:contain|mention|include)",
    r"what matters for the task|true of the user",
)
_TAG = re.compile(r"<\s*/?\s*\w+\s*>")
_RECITED = re.compile(
    r"^\W*(?:(?:since|as|because|so|okay|ok|well),?\s+)?(?:you|the user|the person)\s+(?:said|told|"
    r"mentioned|stated|are|have|live|own|work|like|love|prefer|dislike|hate|want|cannot|can't)\b"
    r"[^,:;\n]*$",
    re.IGNORECASE,
)
_FOR_ANYBODY = _any_of(
    r"if (?:you|your)\b(?! (?:like|wish|prefer|feel|get|run|have time))",
    r"in case (?:you|your)|whether you",
    r"depending on (?:your|whether|what|how|the)",
    r"for (?:those|anyone|people) (?:who|with)",
    r"no matter (?:what|which|whether)|regardless of|whatever your",
)


@dataclass(frozen=True, slots=True)
class Rating:
    """What the rater says of an answer.

    Attributes:
        value: From 1 to 10.
        kept: Topics of the needs that the answer respects.
        broken: Topics of the needs that it breaks.
        problem: Why nothing was counted; empty where it was.
    """

    value: float
    kept: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    problem: str = ""

    @property
    def score(self) -> float:
        """The rating in [0, 1]."""
        return (self.value - 1.0) / 9.0


def rate(profile: Profile, answer: str) -> Rating:
    """Rate an answer, without the word that marks it as one.

    Example:
        >>> rate(profiles()[0], "Eat something nice.").problem
        'too short'
    """
    said = _sentences(profile, answer)
    whole = plain("\n".join(said))
    problem = _problem(profile, whole)
    if problem:
        return Rating(1.0, problem=problem)
    offers = [plain(sentence) for sentence in said if not _FOR_ANYBODY.search(sentence)]
    if _is_for_others(profile, whole):
        return Rating(1.0, problem="for others")
    broken = tuple(need.topic for need in profile.needs if _breaks(profile, need, whole))
    kept = tuple(topic for topic in _kept(profile.needs, offers) if topic not in broken)
    share = max(0, len(kept) - len(broken)) / len(profile.needs)
    return Rating(1.0 + 9.0 * share, kept, broken)


def _sentences(profile: Profile, answer: str) -> list[str]:
    """Sentences and lines of the part that is read, without those that are no part of an answer."""
    words = list(re.finditer(r"\S+", answer))
    if len(words) > MAX_WORDS:
        answer = answer[: words[MAX_WORDS - 1].end()]
    seen: set[str] = set()
    kept: list[str] = []
    for sentence in _BREAK.split(answer):
        text = plain(sentence).strip(_EDGES)
        if not text or text in seen or any(copy in text for copy in _statements(profile.id)):
            continue
        seen.add(text)
        if not any(cut.search(sentence) for cut in (_TO_THE_JUDGE, _TAG, _RECITED)):
            kept.append(sentence)
    return kept


@lru_cache(maxsize=1024)
def _statements(profile_id: str) -> tuple[str, ...]:
    """Sentences about the user and the rules that were written elsewhere, in plain form.

    An answer does not earn with copies of them. Very short ones may stand in an answer by chance.
    """
    profile = next(profile for profile in profiles() if profile.id == profile_id)
    told = [need.say for need in profile.needs]
    told += [*profile.more.values(), profile.secret, profile.task, opening("", 1)[0].content]
    sentences = [plain(part).strip(_EDGES) for text in told for part in _BREAK.split(text)]
    return tuple(part for part in sentences if len(part.split()) >= MIN_WORDS_OF_A_COPY)


def _problem(profile: Profile, text: str) -> str:
    """Why the text is no answer to the task; empty where it is one."""
    words = [word for word in text.split() if word[0].isalnum()]
    if len(words) < MIN_WORDS:
        return "too short"
    if len(set(words)) < MIN_DISTINCT_WORDS:
        return "repetitive"
    if sum(word in _GLUE for word in words) < MIN_GLUE * len(words):
        return "no sentences"
    if not any(names(phrase, text) for phrase in profile.about):
        return "not about the task"
    return ""


def _is_for_others(profile: Profile, text: str) -> bool:
    others = [p for p in profiles() if p.domain == profile.domain and p.id != profile.id]
    shares = [_share_met(other.needs, text) for other in others]
    suited = sum(share >= OTHERS_SHARE for share in shares)
    return suited > MAX_OTHERS or max(shares, default=0.0) >= ANOTHERS_SHARE


def _share_met(needs: Sequence[Need], text: str) -> float:
    met = sum(all(_meets(group, text) for group in need.must) for need in needs)
    return met / len(needs)


def _kept(needs: Sequence[Need], offers: Sequence[str]) -> list[str]:
    """Topics of the needs whose demands the sentences meet.

    A sentence is used for few needs, so a need that several sentences meet takes the one that has
    the fewest others.
    """
    text = " | ".join(offers)
    met = [need for need in needs if all(_meets(group, text) for group in need.must)]
    where = {need.topic: _sentences_of(need, offers) for need in met}
    used = [0] * len(offers)
    kept: list[str] = []
    for topic in sorted(where, key=lambda name: len(where[name])):
        free = [i for i in where[topic] if used[i] < MAX_NEEDS_OF_A_SENTENCE]
        if free:
            used[min(free, key=lambda i: used[i])] += 1
            kept.append(topic)
    return [need.topic for need in needs if need.topic in kept]


def _sentences_of(need: Need, offers: Sequence[str]) -> list[int]:
    """Sentences that meet the first demand of a need."""
    return [i for i, offer in enumerate(offers) if _meets(need.must[0], offer)]


def _meets(group: Sequence[str], text: str) -> bool:
    return any(_has(phrase, text) for phrase in group)


def _has(phrase: str, text: str) -> bool:
    """Whether a text of plain form has one phrase of a rubric."""
    if phrase.startswith(AT_MOST):
        limit, unit = _limit(phrase)
        given = amounts(unit, text)
        return bool(given) and limit / 2 <= max(given) <= limit
    if phrase.startswith(LEAVE_OUT):
        return leaves_out(phrase.removeprefix(LEAVE_OUT), text)
    return names(phrase, text) and _is_decided(phrase, text)


def _is_decided(phrase: str, text: str) -> bool:
    """False where the phrase is an amount that stands among many others of its unit."""
    words = plain(phrase).split()
    if len(words) < 2 or not words[0].isdigit():
        return True
    return len(set(amounts(words[1], text))) <= MAX_AMOUNTS


def _breaks(profile: Profile, need: Need, text: str) -> bool:
    """Whether the answer goes against a need, or offers what other users want on the topic."""
    if any(uses(phrase, text) for phrase in need.never):
        return True
    for phrase in (phrase for group in need.must for phrase in group):
        if phrase.startswith(AT_MOST) and _is_over(*_limit(phrase), text):
            return True
    rivals = _rivals(profile.domain, need)
    return sum(all(_meets(group, text) for group in rival) for rival in rivals) > MAX_RIVALS


@lru_cache(maxsize=4096)
def _rivals(domain: str, need: Need) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Demands of the domain's other users on the topic, as far as they differ from these.

    Numbers are left out: a good answer has several of its own.
    """
    own = {plain(phrase) for group in need.must for phrase in group}
    others = [
        other
        for profile in profiles()
        if profile.domain == domain
        for other in profile.needs
        if other.topic == need.topic and other != need
    ]
    demands = [
        tuple(
            tuple(p for p in group if plain(p) not in own and not _HAS_DIGIT.search(plain(p)))
            for group in other.must
        )
        for other in others
    ]
    return tuple(demand for demand in demands if all(demand))


def _is_over(limit: float, unit: str, text: str) -> bool:
    return any(
        amount > limit and not is_negated(text, *place, reach=3)
        for amount in amounts(unit, text)
        for place in places(f"{amount:g} {unit}", text)
    )


def _limit(phrase: str) -> tuple[float, str]:
    """Amount and unit of ``<=30 minute``."""
    amount, unit = plain(phrase.removeprefix(AT_MOST)).split(" ", 1)
    return float(amount), unit
