"""20 Questions over an embedded world, where what is known and what follows from it is exact."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from delta_belief_rl.algo.shapers.clinical import LEAST_PROBABILITY, entropies
from delta_belief_rl.envs.base import Action, Outcome
from delta_belief_rl.envs.twenty_questions import (
    GameState,
    Reading,
    TwentyQuestions,
    TwentyQuestionsSettings,
)
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.knowledge import Knowledge
from delta_belief_rl.types import Task, UserError, Verdict

WORLD_NOTICES: Mapping[str, str] = {
    "yes": "Yes",
    "no": "No",
    "finished": "Finished",
    "invalid": "Invalid",
    "repeated": "Repeated",
    "error": "Unknown",
}
"""Replies of the embedded world: one word each, for a small vocabulary."""


def world_settings(max_turns: int) -> TwentyQuestionsSettings:
    """Settings of the embedded world: the strict rule, lists refused, replies of one word."""
    return TwentyQuestionsSettings(
        max_turns=max_turns,
        verify_methods=("length", "multiple_questions", "sentence"),
        win_rule="strict",
        candidate_lists="refuse",
        judge_history=False,
        notices=WORLD_NOTICES,
    )


class WorldTwentyQuestions(TwentyQuestions):
    """One game over a thing of an embedded world; every optional hook is exact.

    Questions that ask for the same property, or guess the same thing, count as repeated in whatever
    words.

    Args:
        task: Its secret is a thing of the world, by name or alias.
        settings: Usually ``world_settings``.
        grammar: The parser of the world, shared by all games.
        candidates: Names of the things that the prior of ``belief`` and ``progress`` covers; all
            when None.

    Raises:
        UserError: For a secret that is not a thing of the world, or not a candidate.
    """

    def __init__(
        self,
        task: Task,
        settings: TwentyQuestionsSettings,
        grammar: Grammar,
        candidates: Iterable[str] | None = None,
    ) -> None:
        super().__init__(task, settings)
        self.grammar = grammar
        secret = grammar.thing_of(task.secret)
        knowledge = Knowledge.start(grammar.world, candidates)
        if secret is None or not knowledge.candidates[grammar.world.index(secret)]:
            raise UserError(
                f"The secret {task.secret!r} of the task {task.id!r} is not among the things of "
                f"the world {grammar.world.name!r}: use tasks made from that world."
            )
        self.secret = secret
        self._state = GameState(knowledge=knowledge)

    @property
    def knowledge(self) -> Knowledge:
        """The facts learnt so far."""
        if self._state.knowledge is None:
            raise ValueError("The restored snapshot belongs to a game without a world.")
        return self._state.knowledge

    def state_key(self) -> str:
        """Name of the set of facts learnt, in any order."""
        return self.knowledge.state_key()

    def progress(self) -> float:
        """Bits gained before the next action."""
        return self.knowledge.progress()

    def belief(self) -> Mapping[str, float]:
        """The exact posterior over things."""
        return self.knowledge.belief()

    def uncertainty(self) -> tuple[float, float]:
        """Entropy of that posterior over that of the prior, and log-probability of the secret."""
        known = self.knowledge
        posterior = known.posterior()
        own = max(float(posterior[self.grammar.world.index(self.secret)]), LEAST_PROBABILITY)
        return float(entropies(posterior[known.candidates])), math.log(own)

    def footprint(self) -> tuple[frozenset[str], frozenset[str]]:
        """Facts that the last action builds on, and the fact that it established.

        A question reads the facts that make it more informative than it was at the start; a guess
        reads the facts that rule out what nothing else does. Only an answered action writes.
        """
        before, key = self._state.known_before, self._state.last_key
        kind, _, name = key.partition(":")
        if before is None or not key:
            return frozenset(), frozenset()
        if kind == "property":
            return before.supporting_facts(name), frozenset({name})
        return before.useful_facts(), frozenset({key})

    def _read(self, question: str) -> Reading:
        reading = super()._read(question)
        parsed = self.grammar.parse(question)
        # "Is it orange?" asks for the colour, also when the secret is an orange.
        direct = reading.strict and parsed.kind != "property"
        strict = direct or (parsed.kind == "guess" and parsed.thing == self.secret)
        return replace(
            reading,
            strict=strict,
            is_guess=strict or parsed.kind == "guess",
            is_list=not strict and parsed.kind == "list",
            action_key=f"guess:{self.secret}" if strict else parsed.action_key,
        )

    def _repeat_key(self, question: str, reading: Reading) -> str:
        if reading.action_key.startswith(("property:", "guess:")):
            return reading.action_key
        return super()._repeat_key(question, reading)

    def _advance(self, action: Action, reading: Reading | None, outcome: Outcome) -> None:
        knowledge = self.knowledge
        super()._advance(action, reading, outcome)
        if reading is None or outcome.verdict not in (Verdict.YES, Verdict.NO, Verdict.WIN):
            return
        kind, _, name = reading.action_key.partition(":")
        if kind == "property":
            knowledge = knowledge.learn(name, outcome.verdict is Verdict.YES)
        elif kind == "guess":
            if outcome.verdict is Verdict.NO:
                knowledge = knowledge.rule_out(name)
        else:
            return
        self._state = replace(self._state, knowledge=knowledge, last_key=reading.action_key)
