"""The exact customer of the packaged scenarios: replies at once, free, and the same every time.

A layman who answers what he is asked from what he has noticed, tries what he is told to, and says
so when he does not understand. He never names the cause. When a message names it, or gives the fix,
he says the goal phrase; one that offers several causes or remedies he sends back.
"""

from __future__ import annotations

from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.envs.customer_service.data import Lexicon, Scenario, lexicon, scenario_of
from delta_belief_rl.envs.customer_service.reading import Reading, read_message
from delta_belief_rl.envs.goal_phrase import has_goal_phrase
from delta_belief_rl.types import Verdict

GOAL = "Yes, that was it! Goal reached"
TOO_MUCH = "That is a lot at once. Which one thing do you think it is?"
UNKNOWN = "I am not sure what you mean. Could you ask me in another way?"
JARGON = "I do not know what '{word}' means. Could you say it in plain words?"
AGAIN = "As I said: {text}"


class CustomerServiceRules:
    """Plays the customers of the packaged scenarios; any other task is an error."""

    def answer(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        """One reply for each request, in their order."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: JudgeRequest) -> JudgeReply:
        scenario = scenario_of(request.task)
        if scenario is None:
            reason = (
                f"The task {request.task.id!r} is no packaged scenario of Customer Service: only a "
                "language model can play its customer."
            )
            return JudgeReply(Verdict.ERROR, reason=reason)
        reading = read_message(request.action, scenario)
        if has_goal_phrase(request.action):
            return JudgeReply(Verdict.OTHER, UNKNOWN)
        if reading.named.is_list:
            return JudgeReply(Verdict.OTHER, TOO_MUCH)
        if reading.named.any:
            return JudgeReply(Verdict.WIN, GOAL)
        text = _reply(reading, scenario, lexicon())
        if reading.kind == "fact" and any(text in reply for _, reply in request.history):
            text = AGAIN.format(text=text)
        return JudgeReply(Verdict.OTHER, text)


def _reply(reading: Reading, scenario: Scenario, words: Lexicon) -> str:
    """What the customer says to a message that does not solve the case."""
    match reading.kind:
        case "fact":
            return scenario.facts[reading.key].say
        case "topic":
            return words.topics[reading.key].say
        case "advice":
            return scenario.fails[int(reading.key)].say
        case "remedy":
            return words.remedies[reading.key].say
        case "talk":
            return words.talk[reading.key].say
        case "jargon":
            return JARGON.format(word=reading.key)
        case "none":
            return UNKNOWN
