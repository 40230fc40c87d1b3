"""A game of an environment of ``verifiers``."""

from __future__ import annotations

import re

from delta_belief_rl.envs.answers import normalise
from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.single_use import question_text
from delta_belief_rl.envs.verifiers.rows import opening_problem, row_of
from delta_belief_rl.envs.verifiers.rubric import ScoreError
from delta_belief_rl.envs.verifiers.session import Output, Session, Step
from delta_belief_rl.envs.verifiers.settings import VerifiersSettings
from delta_belief_rl.envs.verifiers.source import Source
from delta_belief_rl.types import Task, Verdict

NOTICES = {
    "over": "The game is over.",
    "silent": "There is no reply.",
    "failed": "The game cannot go on.",
}
"""Replies where the environment has none."""

FAILED = "environment_failed"


class VerifiersGame:
    """One game. It goes one way only: the environment's state cannot be copied.

    Raises:
        UserError: The task is no row of the environment.
    """

    def __init__(self, task: Task, source: Source, settings: VerifiersSettings) -> None:
        self.task = task
        self.settings = settings
        self._source = source
        self._session = Session(
            source, row_of(task, source), settings.max_turns, settings.timeout_s
        )
        self._started = self._done = False
        self._feedback = ""

    def parse(self, text: str) -> Action:
        """Read the agent's text; the environment needs no judge."""
        question = question_text(text, self.settings.question_tag)
        return Action(text, question or None, needs_judge=False)

    def judge_request(self, action: Action) -> JudgeRequest:
        """There is none.

        Raises:
            ValueError: Always.
        """
        raise ValueError("No action of this environment needs a judge.")

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        """Say the agent's text to the environment.

        Raises:
            ValueError: When the game is over, or a judge's reply is given.
        """
        if self._done:
            raise ValueError("This game is over: make a new environment for the next one.")
        if reply is not None:
            raise ValueError("No action of this environment needs a judge.")
        outcome = self._outcome(action)
        self._done = outcome.done
        notes = f" ({', '.join(outcome.diagnostics)})" if outcome.diagnostics else ""
        self._feedback = f"Reply: {outcome.reply}{notes}"
        return outcome

    def feedback(self) -> str:
        """The last reply; empty before the first action."""
        return self._feedback

    def reference(self) -> str:
        """The secret."""
        return self.task.secret

    def action_key(self, text: str) -> str:
        """Equal for texts that differ in case, spaces and punctuation alone."""
        return normalise(self.parse(text).question or "") or "invalid"

    def _outcome(self, action: Action) -> Outcome:
        step = self._start()
        if not step.failure and step.output is None:
            tagged = self.settings.question_tag
            step = self._session.say((action.question or "") if tagged else action.text)
        if step.failure:
            return _failed(step.failure)
        said = "\n\n".join(text for _, text in step.messages if text.strip())
        notes = () if action.question is not None else ("no_question",)
        verdict = Verdict.OTHER if action.question is not None else Verdict.INVALID
        key = self.action_key(action.text)
        if step.output is None:
            reply = said or NOTICES["silent"]
            return Outcome(verdict, reply, False, action_key=key, diagnostics=notes)
        return self._end(step.output, verdict, said or NOTICES["over"], key, notes)

    def _start(self) -> Step:
        """Begin with the first action, so that a game that is not played costs nothing."""
        if self._started:
            return Step()
        self._started = True
        step = self._session.say(None)
        problem = step.failure or opening_problem(self.task, step.messages)
        return Step(step.messages, step.output, problem)

    def _end(
        self, output: Output, verdict: Verdict, reply: str, key: str, notes: tuple[str, ...]
    ) -> Outcome:
        try:
            score, won = self._source.scoring.read(output)
        except ScoreError as error:
            return _failed(str(error))
        if _tells(reply, self.task.secret):
            # Whoever reads it knows the secret, which would be paid as a change of belief.
            reply, notes = NOTICES["over"], (*notes, "secret_told")
        return Outcome(
            verdict=Verdict.WIN if won else verdict,
            reply=reply,
            done=True,
            strict_win=won,
            compatible_win=won,
            action_key=key,
            diagnostics=notes,
            score=score,
        )


def _failed(reason: str) -> Outcome:
    """The end of a game without an outcome: neither a win nor a loss."""
    return Outcome(Verdict.ERROR, NOTICES["failed"], True, diagnostics=(FAILED, reason))


def _tells(reply: str, secret: str) -> bool:
    """Whether a reply has the secret as a word."""
    pattern = rf"(?<!\w){re.escape(secret)}(?!\w)"
    return bool(secret) and re.search(pattern, reply, re.IGNORECASE) is not None
