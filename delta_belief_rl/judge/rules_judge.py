"""The exact judge of an embedded world: replies come from the table, at once and without noise."""

from __future__ import annotations

from delta_belief_rl.envs.answers import strict_guess
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.envs.worlds.grammar import Grammar, answer
from delta_belief_rl.envs.worlds.table import World
from delta_belief_rl.types import Verdict

_TEXTS = {
    Verdict.YES: "Yes",
    Verdict.NO: "No",
    Verdict.INVALID: "Invalid",
    Verdict.REPEATED: "Repeated",
    Verdict.WIN: "Finished",
}


class WorldJudge:
    """Answers from the table.

    A property gets yes or no, a direct guess of the secret or of an alias wins, another direct
    guess gets no, and everything else is invalid. Where the request carries a history, a question
    that asks the same as an earlier one is repeated. An unknown secret is an error, never an
    answer.

    Args:
        world: The table.
        grammar: Its parser, when one exists already.
    """

    def __init__(self, world: World, grammar: Grammar | None = None) -> None:
        self.world = world
        self.grammar = grammar or Grammar(world)

    def answer(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        """One reply for each request, in their order."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: JudgeRequest) -> JudgeReply:
        task = request.task
        secret = self.grammar.thing_of(task.secret)
        if secret is None:
            reason = f"The secret {task.secret!r} is not a thing of the world {self.world.name!r}."
            return JudgeReply(Verdict.ERROR, reason=reason)
        parsed = self.grammar.parse(request.action)
        verdict = answer(self.world, parsed, secret)
        # "Is it orange?" asks for the colour, also when the secret is an orange.
        if parsed.kind != "property" and strict_guess(request.action, task.secret, task.aliases):
            verdict = Verdict.WIN
        asked = {self.grammar.parse(question).action_key for question, _ in request.history}
        if verdict in (Verdict.YES, Verdict.NO) and parsed.action_key in asked:
            verdict = Verdict.REPEATED
        return JudgeReply(verdict, _TEXTS[verdict], parsed.reason)
