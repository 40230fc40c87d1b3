"""One game of TextArena as an environment.

The agent's text goes to the game as it stands, and the game's rules decide. A game is won where its
own reward says so: the reward of a solved game, which no invalid move brought about. Any other
reward is the score of a game that was not won. The reply to a lost game with a hidden answer never
shows the answer, since the agent's belief is asked after it.

Each action is played on a copy of the game, so that a state of the game is immutable: it is its own
snapshot, and a mistake in the game's code leaves the state as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.envs.single_use import SingleUseGame, digest, question_text
from delta_belief_rl.envs.textarena.library import (
    GAME_FAULTS,
    RandomState,
    begin,
    copied,
    fault,
    on_random_state,
    prototype_of,
    shown,
)
from delta_belief_rl.envs.textarena.settings import TextArenaSettings, read_settings
from delta_belief_rl.envs.textarena.tasks import secret_of, seed_of
from delta_belief_rl.types import Task, UserError, Verdict

NO_MOVE = "You have not made a move. Make one."
FAILED = "The game could not take this move. Try another one."
LOST = "The game is over, and you have not won."
SILENT = "The game goes on."


@dataclass(frozen=True, slots=True)
class GameState:
    """Everything that changes in a game; immutable, so a snapshot is the object itself."""

    env: Any
    """The game of the library, never changed after the state was made."""
    random: RandomState
    completion: float
    turns: int = 0
    done: bool = False
    transcript: tuple[tuple[str, str], ...] = ()
    """Moves that the game took, by their keys, and its replies."""
    feedback: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """What the game made of a move.

    Attributes:
        text: What it showed; empty where nothing.
        reason: Why it ended; empty while it goes on.
        reward: In [0, 1]; None while it goes on.
        invalid: The game refused the move.
        completion: How much of the game is solved after the move, in [0, 1].
    """

    text: str
    reason: str
    reward: float | None
    invalid: bool
    completion: float

    @property
    def won(self) -> bool:
        """The game says that it is solved."""
        return self.reward is not None and self.reward >= 1.0 and not self.invalid


class TextArenaGame(SingleUseGame[GameState]):
    """One game of a task.

    Raises:
        UserError: The task is none of this game, or its hidden answer is not the one of its seed.
    """

    def __init__(
        self, task: Task, settings: TextArenaSettings, max_turns: int, question_tag: bool = False
    ) -> None:
        opening = begin(settings, seed_of(task, settings))
        if secret_of(settings, opening.env) != task.secret:
            raise UserError(
                f"The task {task.id!r} was made with another list of words or other arguments of "
                "the game: make it anew."
            )
        self.task = task
        self.settings = settings
        self._max_turns = max_turns
        self._question_tag = question_tag
        _, self._game = prototype_of(settings)
        self._state = GameState(opening.env, opening.random, self._completion(opening.env))

    def parse(self, text: str) -> Action:
        """The agent's text, or what stands in its ``<question>`` tags; no judge is asked."""
        question = question_text(text, self._question_tag)
        return Action(text, question if _has_text(question) else None, needs_judge=False)

    def judge_request(self, action: Action) -> JudgeRequest:
        """No action of these games needs a judge.

        Raises:
            ValueError: Always.
        """
        raise ValueError("No action of a TextArena game is sent to a judge.")

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        """Play a move.

        Raises:
            ValueError: The game is over, or a judge's reply was given.
        """
        self._check_call(action, reply)
        state = self._state
        last = state.turns + 1 >= self._max_turns
        after = replace(state, turns=state.turns + 1)
        if action.question is None:
            outcome = Outcome(Verdict.INVALID, NO_MOVE, last, diagnostics=("no_action",))
        else:
            env, move = copied(state.env), action.question
            try:
                step, rng = on_random_state(state.random, lambda: self._step(env, move))
            except GAME_FAULTS as error:
                notes = ("game_failed", fault(error))
                outcome = Outcome(Verdict.ERROR, FAILED, last, diagnostics=notes)
            else:
                outcome = self._outcome(move, step, last)
                after = replace(after, env=env, random=rng, completion=step.completion)
                line = (outcome.action_key, outcome.reply)
                after = replace(after, transcript=(*state.transcript, line))
        if outcome.done and not outcome.strict_win and outcome.score is None:
            score = None if outcome.verdict is Verdict.ERROR else after.completion
            outcome = replace(outcome, score=score)
        self._state = replace(after, done=outcome.done, feedback=_feedback(action, outcome))
        return outcome

    def state_key(self) -> str:
        """Name of the moves that the game took and of its replies."""
        return digest("\n".join("\t".join(line) for line in self._state.transcript))

    def progress(self) -> float:
        """How much of the game is solved, in [0, 1], by its own measure; 0 where it has none."""
        return self._state.completion

    def action_key(self, text: str) -> str:
        """Equal for texts with the same move between brackets."""
        question = self.parse(text).question
        return "invalid" if question is None else _key(question)

    def reference(self) -> str:
        """The hidden answer; empty where the game has none."""
        return self.task.secret

    def _step(self, env: Any, move: str) -> Step:
        """Let the game take a move, and read what it made of it."""
        errors = int(env.state.error_count)
        done, _ = env.step(move)
        refused = env.state.error_count > errors
        if not done:
            return Step(shown(env), "", None, refused, self._completion(env))
        rewards, info = env.close()
        invalid, completion = bool(info[0]["invalid_move"]), self._completion(env)
        # Some games mix up the reward of an invalid move with its reason.
        mixed_up = invalid and not isinstance(rewards[0], int | float)
        reward = completion if mixed_up else _share(float(rewards[0]) / self._game.top)
        text, reason = shown(env), str(info[0].get("reason") or "").strip()
        return Step(text, reason or LOST, reward, invalid, completion)

    def _outcome(self, move: str, step: Step, last: bool) -> Outcome:
        state = self._state
        hidden = bool(self.task.secret) and not step.won
        ending = LOST if step.reason and hidden else step.reason
        key = _key(move)
        notes = ("invalid_move",) if step.invalid else ()
        if any(key == earlier for earlier, _ in state.transcript):
            notes = (*notes, "repeated")
        guess = self._game.guess
        verdict = Verdict.INVALID if step.invalid else Verdict.OTHER
        return Outcome(
            verdict=Verdict.WIN if step.won else verdict,
            reply="\n".join(part for part in (step.text, ending) if part) or SILENT,
            done=last or step.reward is not None,
            strict_win=step.won,
            compatible_win=step.won,
            is_guess=not step.invalid and guess is not None and guess.search(move) is not None,
            action_key=key,
            diagnostics=notes,
            score=step.reward,
        )

    def _completion(self, env: Any) -> float:
        if not self._game.completion:
            return 0.0
        return _share(float(getattr(env, self._game.completion)()))


def game_factory(options: EnvOptions) -> Callable[[Task], TextArenaGame]:
    """A function that makes one game of a task.

    Raises:
        UserError: The options do not fit, or the game cannot be played.
    """
    settings = read_settings(options.kwargs)
    if options.max_turns < 1:
        raise UserError(f"max_turns is {options.max_turns}: a game needs at least one turn.")
    prototype_of(settings)
    return lambda task: TextArenaGame(task, settings, options.max_turns, options.question_tag)


def _share(value: float) -> float:
    """A number of the game's, brought into [0, 1]."""
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0


def _key(move: str) -> str:
    """What stands between the first brackets, else the whole text, in one spelling."""
    _, opened, rest = move.partition("[")
    inside, closed, _ = rest.partition("]")
    return " ".join((inside if opened and closed else move).lower().split())


def _has_text(text: str) -> bool:
    return any(sign.isprintable() and not sign.isspace() for sign in text)


def _feedback(action: Action, outcome: Outcome) -> str:
    did = "No move was made." if action.question is None else f"Move: {action.question}"
    notes = f" ({', '.join(outcome.diagnostics)})" if outcome.diagnostics else ""
    return f"{did} Reply: {outcome.reply}{notes}"
