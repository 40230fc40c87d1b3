"""One problem as an environment: a single answer, decided by code.

| what the answer is | verdict | |
|---|---|---|
| the sentence that is asked for, word for word | win | strict and compatible alike |
| no words | invalid | ``no_words`` |
| another sentence | other | ``wrong_words``, ``wrong_sum`` or ``wrong_agreement`` |

A sum is wrong where any number is; agreement is judged where all other words are right. Case and
the space before a full stop do not matter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from delta_belief_rl.envs.agreement.language import NUMBERS, Problem, base, tag
from delta_belief_rl.envs.agreement.settings import read_settings
from delta_belief_rl.envs.agreement.tasks import make_tasks
from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.envs.single_use import SingleUseGame, question_text
from delta_belief_rl.types import Task, UserError, Verdict

RIGHT, WRONG = "right .", "wrong ."

_PIECE = re.compile(r"[a-z]+|[^\sa-z]")


@dataclass(frozen=True, slots=True)
class GameState:
    """Everything that changes in a game."""

    done: bool = False
    feedback: str = ""


class Agreement(SingleUseGame[GameState]):
    """One game of a task.

    Raises:
        UserError: The task does not describe a problem.
    """

    def __init__(self, task: Task, question_tag: bool = False) -> None:
        try:
            self.problem = Problem(**json.loads(task.scenario or ""))
            self._wanted = _pieces(self.problem.answer())
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"The task {task.id!r} has no sum that can be said ({error}): use tasks that the "
                "environment agreement made."
            ) from error
        self.task = task
        self._question_tag = question_tag
        self._state = GameState()

    def parse(self, text: str) -> Action:
        """Read the agent's text; no judge is asked."""
        said = question_text(text, self._question_tag)
        return Action(text, said if _pieces(said) else None, needs_judge=False)

    def judge_request(self, action: Action) -> JudgeRequest:
        """No answer of these games needs a judge.

        Raises:
            ValueError: Always.
        """
        raise ValueError("No answer of this environment is sent to a judge.")

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        """Compare the answer; the game is over.

        Raises:
            ValueError: The game is over, or a judge's reply was given.
        """
        self._check_call(action, reply)
        said = _pieces(action.question or "")
        won = said == self._wanted
        note = "" if won else self._mistake(said)
        verdict = Verdict.WIN if won else Verdict.OTHER if said else Verdict.INVALID
        text = RIGHT if won else WRONG
        self._state = GameState(done=True, feedback=f"{text} {note}".strip())
        return Outcome(
            verdict=verdict,
            reply=text,
            done=True,
            strict_win=won,
            compatible_win=won,
            action_key=" ".join(said) or "invalid",
            diagnostics=(note,) if note else (),
        )

    def action_key(self, text: str) -> str:
        """Equal for texts that are the same answer."""
        return " ".join(_pieces(question_text(text, self._question_tag))) or "invalid"

    def reference(self) -> str:
        """The sentence that is asked for; empty where the game is over."""
        return "" if self._state.done else self.problem.answer()

    def _mistake(self, said: Sequence[str]) -> str:
        """What is wrong with an answer that is."""
        if not said:
            return "no_words"
        if len(said) != len(self._wanted):
            return "wrong_words"
        pairs = [pair for pair in zip(said, self._wanted, strict=True) if pair[0] != pair[1]]
        if any(tag(one) != tag(other) for one, other in pairs):
            return "wrong_words"
        if any(other in NUMBERS for _, other in pairs):
            return "wrong_sum"
        return "wrong_agreement" if all(base(a) == base(b) for a, b in pairs) else "wrong_words"


def game_factory(options: EnvOptions) -> Callable[[Task], Agreement]:
    """A function that makes one game of a task.

    Raises:
        UserError: The options do not fit.
    """
    read_settings(options.kwargs)
    if options.max_turns != 1:
        raise UserError(
            f"max_turns is {options.max_turns}, but agreement asks for one answer: set "
            "multi_turn.max_turns={train: 1, val: 1}."
        )
    return lambda task: Agreement(task, options.question_tag)


def tasks_of(split: str, options: EnvOptions) -> Sequence[Task]:
    """The tasks of a split.

    Raises:
        UserError: The options do not fit.
    """
    settings = read_settings(options.kwargs)
    return make_tasks(split, dict(settings.tasks)[split], settings.seed)


def _pieces(text: str) -> tuple[str, ...]:
    return tuple(_PIECE.findall(text.lower()))
