"""The CPU judge of Murder Mystery: it knows the packaged cases and answers from them.

A reply is a function of the request alone. What has been found follows from the earlier actions of
the request's history, read by the same rules as the action itself.

The judge never says who is guilty: a right accusation is confirmed, a wrong one is refused, and
every other text comes from the case file, which accuses nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.envs.goal_phrase import GOAL_PHRASE, has_goal_phrase
from delta_belief_rl.envs.murder_mystery.actions import Reading, read_action
from delta_belief_rl.envs.murder_mystery.data import Case, case_of
from delta_belief_rl.types import Verdict

TEXTS: Mapping[str, str] = {
    "win": (
        f"{GOAL_PHRASE.capitalize()}. You have accused the right person, and the case is closed."
    ),
    "wrong": "The accusation falls apart, and the murderer goes free. The case is closed.",
    "several_accused": (
        "Nobody can be charged on an accusation of several people. The case is closed without a "
        "conviction."
    ),
    "goal_phrase": (
        "It is not for you to say that the case is solved, so the accusation is thrown out. The "
        "case is closed."
    ),
    "several": "One action at a time: examine one thing, or ask one person about one matter.",
    "vague": (
        "That is no action of a detective. Examine a place or a thing, have something tested, "
        "interview somebody about something, have an alibi checked, or accuse one person."
    ),
    "untold": "Say what or whom you mean: name one place, thing or person.",
    "nobody": "Name the person whom you accuse.",
    "solution": "That is for you to find out. Take an action, or accuse one person.",
    "not_there": "You find nothing and nobody of that kind, at least not yet.",
    "no_result": "The {name} shows nothing of use in that respect.",
    "no_more": "{name} has nothing to say about that.",
    "nothing_on_person": "There is nothing noticeable about {name}. Ask about something instead.",
}
"""Replies that are not in a case."""


class MysteryJudge:
    """Answers for the packaged mysteries; any other task is an error."""

    def answer(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        """One reply for each request, in their order."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: JudgeRequest) -> JudgeReply:
        case = case_of(request.task)
        if case is None:
            reason = f"The task {request.task.id!r} is none of the packaged mysteries."
            return JudgeReply(Verdict.ERROR, reason=reason)
        found = found_clues(case, (action for action, _ in request.history))
        reading = read_action(case, request.action)
        if reading.kind == "accuse" and has_goal_phrase(request.action):
            return JudgeReply(Verdict.OTHER, TEXTS["goal_phrase"])
        return _reply(case, reading, found)


def found_clues(case: Case, actions: Iterable[str]) -> frozenset[str]:
    """Keys of the clues that actions bring to light, taken in this order."""
    found: set[str] = set()
    for action in actions:
        clue = case.clues.get(read_action(case, action).key)
        if clue is not None and found.issuperset(clue.after):
            found.add(clue.key)
    return frozenset(found)


def _reply(case: Case, reading: Reading, found: frozenset[str]) -> JudgeReply:
    if reading.kind == "accuse":
        if reading.accused == (case.culprit,):
            return JudgeReply(Verdict.WIN, TEXTS["win"])
        return JudgeReply(Verdict.OTHER, TEXTS["several_accused" if reading.several else "wrong"])
    if reading.kind == "clue":
        clue = case.clues[reading.key]
        if found.issuperset(clue.after):
            return JudgeReply(Verdict.OTHER, clue.text)
        # A clue that is still hidden must not be told apart from one that does not exist.
        person = reading.key.partition("/")[0]
        return _nothing(case, person if person in _named(case) else "", talks=True)
    if reading.kind == "nothing":
        clue = case.clues.get(reading.about)
        hidden = clue is not None and not found.issuperset(clue.after)
        return _nothing(case, "" if hidden else reading.about, reading.talks)
    return JudgeReply(Verdict.INVALID, TEXTS[reading.kind])


def _nothing(case: Case, about: str, talks: bool) -> JudgeReply:
    """The reply to an action that is understood and brings nothing."""
    if not about:
        return JudgeReply(Verdict.OTHER, TEXTS["not_there"])
    if about not in _named(case):
        return JudgeReply(Verdict.OTHER, TEXTS["no_result"].format(name=about))
    text = TEXTS["no_more" if talks else "nothing_on_person"]
    return JudgeReply(Verdict.OTHER, text.format(name=about))


def _named(case: Case) -> frozenset[str]:
    return frozenset({case.victim, *(person.name for person in case.people)})
