"""One clinical case as an environment: questions and tests in plain text, then one decision.

| what the text is | verdict | notes |
|---|---|---|
| a question or test that was answered | other | |
| the same once more, with the same reply | repeated | ``repeated`` |
| a question that the sheet does not know | other | ``unknown_question`` |
| a step that another one has to precede | invalid | ``too_early`` |
| neither, or a decision that does not count | invalid | ``no_action``, and why |
| the best decision for the hidden state | win | ``committed`` |
| any other decision | other | ``committed``, ``harm`` where its value is below 0 |

A decision ends the case. Its value in [-1, 1] is the grade ``(1 + value) / 2``; a case that the
turn limit ends undecided has the grade 0, which is the value -1. The reply to a decision does not
say what was hidden. A decision while no hidden state has a probability of 0.8 is ``premature``.
Notes that concern a decision stand a second time with the stratum behind them, as in
``premature_high``, so that their shares can be told apart.

``belief`` is the exact posterior of ``sheets``, and ``uncertainty`` its entropy over ``log H`` with
the log-probability of the true state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from delta_belief_rl.algo.shapers.clinical import LEAST_PROBABILITY, SURE, entropies
from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.clinical.reading import Reading, read
from delta_belief_rl.envs.clinical.settings import read_settings
from delta_belief_rl.envs.clinical.sheets import Facts, sheets
from delta_belief_rl.envs.clinical.tasks import Case, make_tasks
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.envs.single_use import SingleUseGame, digest, question_text
from delta_belief_rl.types import FloatArray, Task, UserError, Verdict

NOTICES: Mapping[str, str] = {
    "no_action": "That is neither a question, a test nor a decision.",
    "several_decisions": "Name one decision only.",
    "hedged_decision": 'That is no clear decision. Write "Decision: ..." when you are sure.',
    "negated_decision": "That says what is not decided. Name the decision itself.",
    "unknown_question": "About that nothing can be said.",
    "decided": "Noted: {decision}. The case is closed.",
    "too_early": "That is too early. First: {step}",
}
"""Replies of the environment itself."""


@dataclass(frozen=True, slots=True)
class GameState:
    """Everything that changes in a game; immutable, so a snapshot is the object itself."""

    facts: Facts = ()
    turns: int = 0
    done: bool = False
    feedback: str = ""
    footprint: tuple[frozenset[str], frozenset[str]] = (frozenset[str](), frozenset[str]())


class ClinicalCase(SingleUseGame[GameState]):
    """One game of a task.

    Raises:
        UserError: The task does not describe a case.
    """

    def __init__(self, task: Task, max_turns: int, question_tag: bool = False) -> None:
        try:
            self.case = Case.from_json(task.scenario or "")
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"The task {task.id!r} has no clinical case ({error}): use tasks that the "
                "environment clinical made."
            ) from error
        self.task = task
        self.sheet = sheets()[self.case.sheet]
        self._max_turns = max_turns
        self._question_tag = question_tag
        self._state = GameState()

    @property
    def facts(self) -> Facts:
        """What was answered so far."""
        return self._state.facts

    @property
    def turns(self) -> int:
        """Messages so far."""
        return self._state.turns

    def parse(self, text: str) -> Action:
        """Read the agent's text; no judge is asked."""
        return Action(text, self._said(self._read(text), text), needs_judge=False)

    def judge_request(self, action: Action) -> JudgeRequest:
        """No action of these games needs a judge.

        Raises:
            ValueError: Always.
        """
        raise ValueError("No message of a clinical case is sent to a judge.")

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        """Answer a question or a test, or close the case.

        Raises:
            ValueError: The game is over, or a judge's reply was given.
        """
        self._check_call(action, reply)
        state, reading = self._state, self._read(action.text)
        last = state.turns + 1 >= self._max_turns
        facts, footprint = state.facts, (frozenset[str](), frozenset[str]())
        if reading.kind == "decide":
            outcome = self._decide(reading)
            footprint = (frozenset(key for key, _ in facts), frozenset[str]())
        elif reading.kind == "ask":
            outcome, facts = self._ask(reading)
            if outcome.verdict is Verdict.OTHER:
                after = self.sheet.questions[reading.key].after
                footprint = (frozenset((after,) if after else ()), frozenset((reading.key,)))
        else:
            outcome = self._pass(reading)
        if last and not outcome.done:
            outcome = replace(outcome, done=True, score=0.0)
        outcome = replace(outcome, action_key=self._key(reading))
        self._state = GameState(
            facts, state.turns + 1, outcome.done, _feedback(reading, outcome), footprint
        )
        return outcome

    def state_key(self) -> str:
        """Name of the set of what was answered, in any order."""
        return digest("\n".join(sorted(f"{key}={reply}" for key, reply in self._state.facts)))

    def action_key(self, text: str) -> str:
        """Equal for texts that are the same question, test or decision."""
        return self._key(self._read(text)) or "invalid"

    def progress(self) -> float:
        """Share of the uncertainty about the hidden state that is gone; 0 where it has grown."""
        begin = float(entropies(self.sheet.prior[self.case.stratum]))
        return max(0.0, 1.0 - self.uncertainty()[0] / begin) if begin > 0.0 else 1.0

    def belief(self) -> Mapping[str, float]:
        """The exact posterior over hidden states, by their names in words."""
        return dict(zip(self.sheet.states.values(), map(float, self.posterior()), strict=True))

    def posterior(self) -> FloatArray:
        """The same as numbers, ``[H]``."""
        return self.sheet.posterior(self.case.stratum, self._state.facts)

    def uncertainty(self) -> tuple[float, float]:
        """Entropy of the posterior, 0 to 1, and log-probability of the true state in nats."""
        belief = self.posterior()
        own = max(float(belief[self.sheet.index(self.case.state)]), LEAST_PROBABILITY)
        return float(entropies(belief)), math.log(own)

    def footprint(self) -> tuple[frozenset[str], frozenset[str]]:
        """What the last action builds on, and what it established.

        A decision reads all that was answered. A question writes itself, and reads the step that
        has to precede it.
        """
        return self._state.footprint

    def reference(self) -> str:
        """The hidden state in words."""
        return self.task.secret

    def _read(self, text: str) -> Reading:
        return read(question_text(text, self._question_tag), self.case.sheet)

    def _key(self, reading: Reading) -> str:
        """A name of the action; empty where there is none."""
        if reading.kind == "decide":
            return f"decide:{reading.key}"
        if reading.kind == "ask":
            return f"{self.sheet.questions[reading.key].kind}:{reading.key}"
        return reading.kind if reading.kind == "unknown" else ""

    def _said(self, reading: Reading, text: str) -> str | None:
        """The action in full words, alike for all ways of saying it; None where there is none."""
        if reading.kind == "decide":
            return f"Decision: {self.sheet.decisions[reading.key].say}."
        if reading.kind == "ask":
            return self.sheet.questions[reading.key].say
        said = question_text(text, self._question_tag)
        return said if reading.kind == "unknown" else None

    def _ask(self, reading: Reading) -> tuple[Outcome, Facts]:
        facts, question = self._state.facts, self.sheet.questions[reading.key]
        known = dict(facts)
        if question.after and question.after not in known:
            step = self.sheet.questions[question.after].say
            text = NOTICES["too_early"].format(step=step)
            notes = (*reading.notes, "too_early")
            return Outcome(Verdict.INVALID, text, False, diagnostics=notes), facts
        if question.key in known:
            text, notes = question.replies[known[question.key]], (*reading.notes, "repeated")
            return Outcome(Verdict.REPEATED, text, False, diagnostics=notes), facts
        number = self.sheet.reply(self.case.key, self.case.state, question.key)
        outcome = Outcome(Verdict.OTHER, question.replies[number], False, diagnostics=reading.notes)
        return outcome, (*facts, (question.key, number))

    def _pass(self, reading: Reading) -> Outcome:
        """The reply to a text that does nothing."""
        if reading.kind == "unknown":
            notes = (*reading.notes, "unknown_question")
            return Outcome(Verdict.OTHER, NOTICES["unknown_question"], False, diagnostics=notes)
        why = reading.notes[0] if reading.notes else "no_action"
        notes = tuple(dict.fromkeys(("no_action", *reading.notes)))
        several = why == "several_decisions"
        return Outcome(Verdict.INVALID, NOTICES[why], False, is_list=several, diagnostics=notes)

    def _decide(self, reading: Reading) -> Outcome:
        decision = self.sheet.decisions[reading.key]
        value = float(decision.value[self.sheet.index(self.case.state)])
        best = value >= 1.0 - 1e-9
        notes = ["committed"]
        notes += ["premature"] if float(self.posterior().max()) < SURE else []
        notes += ["harm"] if value < 0.0 else []
        by_stratum = [f"{note}_{self.case.stratum}" for note in notes]
        return Outcome(
            Verdict.WIN if best else Verdict.OTHER,
            NOTICES["decided"].format(decision=decision.say),
            done=True,
            strict_win=best,
            compatible_win=best,
            is_guess=True,
            diagnostics=(*reading.notes, *notes, *by_stratum),
            score=(1.0 + value) / 2.0,
        )


def game_factory(options: EnvOptions) -> Callable[[Task], ClinicalCase]:
    """A function that makes one game of a task.

    Raises:
        UserError: The options do not fit.
    """
    read_settings(options.kwargs)
    if options.max_turns < 1:
        raise UserError(f"max_turns is {options.max_turns}: a game needs at least one turn.")
    return lambda task: ClinicalCase(task, options.max_turns, options.question_tag)


def tasks_of(split: str, options: EnvOptions) -> Sequence[Task]:
    """The cases of a split.

    Raises:
        UserError: The options do not fit.
    """
    settings = read_settings(options.kwargs)
    count = dict(settings.tasks)[split]
    explain = settings.prompt == "full"
    return make_tasks(split, count, settings.seed, settings.simulators, explain)


def _feedback(reading: Reading, outcome: Outcome) -> str:
    did = f"{reading.kind} {reading.key}".strip().capitalize()
    notes = f" ({', '.join(outcome.diagnostics)})" if outcome.diagnostics else ""
    return f"{did}. Reply: {outcome.reply}{notes}"
