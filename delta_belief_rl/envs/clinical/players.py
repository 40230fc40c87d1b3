"""Players of clinical cases: one who follows Bayes' rule, an impatient one and a random one.

They know the tables, the stratum and what was answered, and never the hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from delta_belief_rl.algo.shapers.clinical import entropies
from delta_belief_rl.envs.base import Outcome
from delta_belief_rl.envs.clinical.game import ClinicalCase
from delta_belief_rl.envs.clinical.sheets import Facts, Sheet


class Player(Protocol):
    """Someone who handles a case."""

    def say(self, sheet: Sheet, stratum: str, facts: Facts, turns_left: int) -> str:
        """The next message.

        Args:
            sheet: The table of the case.
            stratum: Its stratum.
            facts: What was answered so far.
            turns_left: Messages until the case ends, this one included.
        """
        ...


@dataclass(frozen=True, slots=True)
class Bayes:
    """Asks what is expected to tell most, and decides when sure, or when time or questions end.

    Attributes:
        sure: Probability of a hidden state that is enough.
    """

    sure: float = 0.95

    def say(self, sheet: Sheet, stratum: str, facts: Facts, turns_left: int) -> str:
        """See ``Player``."""
        belief = sheet.posterior(stratum, facts)
        known = {key for key, _ in facts}
        gains = {
            key: expected_gain(sheet, stratum, facts, key)
            for key, question in sheet.questions.items()
            if key not in known and (not question.after or question.after in known)
        }
        if turns_left <= 1 or not gains or float(belief.max()) >= self.sure:
            return f"Decision: {sheet.decisions[sheet.best_decision(belief)].say}."
        return sheet.questions[max(gains, key=lambda key: gains[key])].say


@dataclass(frozen=True, slots=True)
class Impatient:
    """Decides at once for what is best by the prior."""

    def say(self, sheet: Sheet, stratum: str, facts: Facts, turns_left: int) -> str:
        """See ``Player``."""
        belief = sheet.posterior(stratum, facts)
        return f"Decision: {sheet.decisions[sheet.best_decision(belief)].say}."


@dataclass(frozen=True, slots=True)
class Random:
    """Any question, test or decision, all equally likely."""

    rng: np.random.Generator

    def say(self, sheet: Sheet, stratum: str, facts: Facts, turns_left: int) -> str:
        """See ``Player``."""
        said = [question.say for question in sheet.questions.values()]
        said += [f"Decision: {decision.say}." for decision in sheet.decisions.values()]
        return said[int(self.rng.integers(len(said)))]


def expected_gain(sheet: Sheet, stratum: str, facts: Facts, question: str) -> float:
    """Expected fall of the posterior's entropy, 0 to 1, by the reply to a question."""
    belief = sheet.posterior(stratum, facts)
    likely = belief @ sheet.questions[question].chance
    after = [
        float(share) * float(entropies(sheet.posterior(stratum, (*facts, (question, reply)))))
        for reply, share in enumerate(likely)
        if share > 0.0
    ]
    return float(entropies(belief)) - sum(after)


def play(game: ClinicalCase, player: Player, max_turns: int) -> list[Outcome]:
    """Play a fresh game to its end."""
    log: list[Outcome] = []
    while not log or not log[-1].done:
        left = max_turns - len(log)
        text = player.say(game.sheet, game.case.stratum, game.facts, left)
        log.append(game.apply(game.parse(text), None))
    return log
