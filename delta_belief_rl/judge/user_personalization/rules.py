"""The rule judge of user personalization: role-player and rater, without any model.

As role-player it looks for the one fact that a question is about, by phrases of its topic, and
tells it in the user's own words. Several questions in one message get one fact. What it has no fact
about, it has no wish about; what it does not understand, it says it does not understand; a question
for everything at once, or for what it was told to be, is refused.

As rater it counts phrases (``user_personalization.rating``). Every reply is a function of the
request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from delta_belief_rl.envs.answers import normalise
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.envs.user_personalization.data import (
    AT_MOST,
    LEAVE_OUT,
    WEAK,
    Profile,
    library,
)
from delta_belief_rl.envs.user_personalization.game import MARK
from delta_belief_rl.envs.user_personalization.text import places, plain
from delta_belief_rl.judge.user_personalization.rating import rate
from delta_belief_rl.types import Verdict

TOO_MUCH = "That is too much at once. Please ask me about one thing."
NOT_TOLD = "I will not talk about that. Please ask me about something that you need for my request."
NO_WISH = "I have no particular wish there."
NOT_UNDERSTOOD = "I do not know what to say to that. Please ask me about one thing, in plain words."
NOTHING_MORE = "I cannot think of anything else. Please ask me about something in particular."


def _any_of(*patterns: str) -> re.Pattern[str]:
    """Matches where one of the patterns stands as words."""
    return re.compile(rf"\b(?:{'|'.join(patterns)})\b")


_ENOUGH = 1.0
"""Weight of a question that is about a topic for sure; a word of its own has it."""
_WEAK_WORD, _MOST_OF_WEAK = 0.2, 0.9
"""Weights of phrases that other topics' questions have, too: "what would you like to pay?"."""

_WISHES = (
    r"(?:preference|fact|need|detail|information|requirement|wish|constraint|condition|restriction|"
    r"like|thing)"
)
_EVERYTHING = _any_of(
    r"(?:tell|share|give|list|name|explain|describe|know) (?:me )?(?:everything|every detail)",
    r"everything (?:about|i|you|that|relevant|important)",
    rf"all (?:of )?(?:your|the|relevant|important|his|her|their)\b.{{0,20}}{_WISHES}",
    r"(?:list|enumerate|name|state|give|write down) (?:me )?(?:all|each|every)",
    rf"(?:list|enumerate) (?:your|the) (?:\w+ )?{_WISHES}",
    r"(?:full|whole|entire|complete) (?:profile|story|list|background|picture|description)",
    r"in full detail",
    rf"\d+ {_WISHES} about (?:you|yourself)",
)
_BEHIND_THE_SCENES = _any_of(
    r"(?:ignore|disregard|forget|override) .{0,40}(?:instruction|rule|prompt|above|before)",
    r"system (?:prompt|message)",
    r"your (?:prompt|instruction|secret)",
    r"(?:the|hidden|your) (?:scenario|rubric|persona)",
    r"you are (?:now )?(?:an? )?(?:ai|judge|role ?player|language model|rater)",
    r"role ?player",
    r"rate (?:me|this|it)",
    r"(?:rating|score) (?:would|will|do|can) (?:you|i) (?:give|get)",
    r"(?:my|your) (?:rating|score)",
    r"rubric|goal reached|what matter for the task|10 (?:of|out of) 10",
)
_BROAD = _any_of(
    r"anything (?:else|more|(?:that )?i should|important|special|particular)",
    r"something (?:else|i should)",
    r"what (?:else )?should i (?:know|consider)",
    r"(?:about|describe) yourself",
    r"tell me (?:more )?about you",
    r"more about you",
    r"who are you",
    rf"(?:any (?:other )?|what are your ){_WISHES}",
)
_FIRST_QUESTION = re.compile(r"[^?\uff1f]*[?\uff1f]")


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that the user can tell, and the phrases of questions about it with weights."""

    topic: str
    say: str
    phrases: tuple[tuple[str, float], ...]


class UserPersonalizationJudge:
    """Plays the packaged users and rates answers for them.

    A task with another secret is an error, never a reply.
    """

    def __init__(self) -> None:
        self._profiles = {normalise(profile.secret): profile for profile in library().profiles}

    def answer(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        """One reply for each request, in their order."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: JudgeRequest) -> JudgeReply:
        profile = self._profiles.get(normalise(request.task.secret))
        if profile is None:
            reason = f"The user of the task {request.task.id!r} is not among the packaged ones."
            return JudgeReply(Verdict.ERROR, reason=reason)
        if request.action.startswith(MARK):
            rating = rate(profile, request.action.removeprefix(MARK))
            return JudgeReply(
                Verdict.OTHER, f"{rating.value:.1f}", rating.problem, score=rating.score
            )
        return play(profile, request.action, [reply for _, reply in request.history])


def play(profile: Profile, question: str, told: Sequence[str] = ()) -> JudgeReply:
    """The user's reply to a question.

    Args:
        question: One message of the agent.
        told: Earlier replies of the game; only an unspecific question looks at them.

    Example:
        >>> play(library().profiles[0], "How much can you spend?").text
        'I can spend 40 dollars on all five dinners together.'
    """
    text = plain(question)
    if _BEHIND_THE_SCENES.search(text):
        return JudgeReply(Verdict.INVALID, NOT_TOLD)
    if _EVERYTHING.search(text):
        return JudgeReply(Verdict.INVALID, TOO_MUCH)
    first = _FIRST_QUESTION.match(question)
    asked = plain(first.group()) if first else text
    fact = _fact(profile, asked) or _fact(profile, text)
    if fact is not None:
        return JudgeReply(Verdict.OTHER, fact.say)
    if _BROAD.search(text):
        # Facts of no weight come freely; what matters has to be asked for.
        untold = [say for say in profile.more.values() if say not in told]
        return JudgeReply(Verdict.OTHER, untold[0] if untold else NOTHING_MORE)
    known = any(_weight(phrases, text) for phrases in _topics())
    return JudgeReply(Verdict.OTHER, NO_WISH if known else NOT_UNDERSTOOD)


def _fact(profile: Profile, text: str) -> Fact | None:
    """The fact that a question of plain form is about most; of equal ones the first named.

    None where the question is rather about a topic on which the user has nothing to tell.
    """
    best: tuple[float, int] = (0.0, 0)
    found: Fact | None = None
    for fact in facts(profile.id):
        weight = _weight(fact.phrases, text)
        starts = [place[0] for phrase, _ in fact.phrases for place in places(phrase, text)]
        if weight and (weight, -min(starts)) > best:
            best, found = (weight, -min(starts)), fact
    if best[0] < _ENOUGH and any(_weight(phrases, text) >= _ENOUGH for phrases in _topics()):
        return None
    return found


def _weight(phrases: Sequence[tuple[str, float]], text: str) -> float:
    return sum(weight for phrase, weight in phrases if places(phrase, text))


def _topic_phrases(phrases: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Phrases of a topic with their weights: the number of words, little for weak ones."""
    return tuple(
        (
            phrase.removeprefix(WEAK),
            min(_MOST_OF_WEAK, _WEAK_WORD * (1 + len(phrase.split())))
            if phrase.startswith(WEAK)
            else float(len(phrase.split())),
        )
        for phrase in phrases
    )


@lru_cache(maxsize=1)
def _topics() -> tuple[tuple[tuple[str, float], ...], ...]:
    return tuple(_topic_phrases(phrases) for phrases in library().topics.values())


@lru_cache(maxsize=1)
def _facts_of_all() -> Mapping[str, tuple[Fact, ...]]:
    topics = library().topics
    told: dict[str, tuple[Fact, ...]] = {}
    for profile in library().profiles:
        decisive = tuple(
            Fact(
                need.topic,
                need.say,
                (
                    *_topic_phrases(topics[need.topic]),
                    *((phrase, 2.0 * len(phrase.split())) for phrase in need.ask),
                    *(
                        (phrase.removeprefix(LEAVE_OUT), 1.0)
                        for group in need.must
                        for phrase in group
                        if not phrase.startswith(AT_MOST)
                    ),
                ),
            )
            for need in profile.needs
        )
        others = tuple(
            Fact(topic, say, _topic_phrases(topics[topic])) for topic, say in profile.more.items()
        )
        told[profile.id] = decisive + others
    return told


def facts(profile_id: str) -> tuple[Fact, ...]:
    """Everything that a packaged user can tell, the decisive facts first."""
    return _facts_of_all()[profile_id]
