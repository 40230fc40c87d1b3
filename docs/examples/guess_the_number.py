"""Guess the number: the agent names numbers and hears whether the secret one is higher or lower."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from delta_belief_rl.envs.base import Action, Env, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.plugin import EnvOptions, EnvPlugin
from delta_belief_rl.envs.single_use import SingleUseGame, question_text
from delta_belief_rl.types import Message, Task, UserError, Verdict

SOURCE = "guess_the_number"
OPENING = (
    "I have chosen a whole number from 1 to {highest}. In each turn name one number, and I tell "
    "you whether mine is higher or lower. Write the number alone."
)


@dataclass(frozen=True, slots=True)
class State:
    """What is known in a game: the secret lies between ``low`` and ``high``, both included."""

    low: int
    high: int
    turns: int = 0
    named: frozenset[int] = frozenset()
    done: bool = False
    feedback: str = ""


class GuessTheNumber(SingleUseGame[State]):
    """One game; ``SingleUseGame`` brings ``snapshot``, ``restore`` and ``feedback``."""

    def __init__(self, task: Task, options: EnvOptions, highest: int) -> None:
        self.task = task
        self.options = options
        self.highest = highest
        self._state = State(1, highest)

    def parse(self, text: str) -> Action:
        """The number that the text names; none where it names none or several."""
        said = question_text(text, self.options.question_tag)
        numbers = re.findall(r"\d+", said, re.ASCII)
        return Action(text, numbers[0] if len(numbers) == 1 else None, needs_judge=False)

    def judge_request(self, action: Action) -> JudgeRequest:
        """Never used, because no action needs a judge."""
        return JudgeRequest(self.task, action.text)

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        """Answer a number."""
        self._check_call(action, reply)
        verdict, said, known = self._answer(action.question)
        done = verdict is Verdict.WIN or known.turns >= self.options.max_turns
        self._state = replace(known, done=done, feedback=said)
        won = verdict is Verdict.WIN
        return Outcome(
            verdict,
            said,
            done,
            strict_win=won,
            compatible_win=won,
            is_guess=action.question is not None,
            action_key=action.question or "",
        )

    def _answer(self, named: str | None) -> tuple[Verdict, str, State]:
        old = replace(self._state, turns=self._state.turns + 1)
        # Longer than any number of the game: not worth reading.
        number = int(named) if named and len(named) <= len(str(self.highest)) else 0
        if not 1 <= number <= self.highest:
            return Verdict.INVALID, f"Name one number from 1 to {self.highest}.", old
        if number in old.named:
            return Verdict.REPEATED, "You have named this number already.", old
        new = replace(old, named=old.named | {number})
        secret = int(self.task.secret)
        if number == secret:
            return Verdict.WIN, "Correct.", replace(new, low=secret, high=secret)
        if number < secret:
            return Verdict.OTHER, "Higher.", replace(new, low=max(new.low, number + 1))
        return Verdict.OTHER, "Lower.", replace(new, high=min(new.high, number - 1))

    # Optional hooks.

    def state_key(self) -> str:
        """Games in which the same is known have the same key."""
        return f"{self._state.low}-{self._state.high}"

    def progress(self) -> float:
        """Bits that were gained so far."""
        return math.log2(self.highest / (self._state.high - self._state.low + 1))

    def belief(self) -> dict[str, float]:
        """The probability of every number that is still possible."""
        left = range(self._state.low, self._state.high + 1)
        return {str(number): 1.0 / len(left) for number in left}

    def action_key(self, text: str) -> str:
        """Texts that name the same number have the same key."""
        return self.parse(text).question or ""


def highest_of(options: EnvOptions) -> int:
    """The setting ``multi_turn.env_kwargs.highest``; 100 where it is not set."""
    odd = sorted({*options.kwargs} - {"highest"})
    if odd:
        raise UserError(f"multi_turn.env_kwargs has {odd[0]}: {SOURCE} reads highest only.")
    highest = options.kwargs.get("highest", 100)
    if not isinstance(highest, int) or not 10 <= highest <= 1_000_000:
        raise UserError(
            f"multi_turn.env_kwargs.highest must be a whole number from 10 to 1000000, not "
            f"{highest!r}."
        )
    return highest


def make(options: EnvOptions) -> Callable[[Task], Env]:
    """A function that makes one game of a task."""
    highest = highest_of(options)
    return lambda task: GuessTheNumber(task, options, highest)


def tasks(split: str, options: EnvOptions) -> list[Task]:
    """Every fifth number is for validation, the one after it for the test, the others to train."""
    highest = highest_of(options)
    of = {0: "val", 1: "test"}
    opening = (Message("user", OPENING.format(highest=highest)),)
    return [
        Task(f"{split}_{number}", SOURCE, str(number), opening, split)
        for number in range(1, highest + 1)
        if of.get(number % 5, "train") == split
    ]


ENVIRONMENTS = {SOURCE: EnvPlugin(make=make, tasks=tasks)}
