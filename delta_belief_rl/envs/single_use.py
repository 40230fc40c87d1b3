"""What the games of all environments share: one immutable state, and the rules of a call."""

from __future__ import annotations

import hashlib
import re
from typing import Generic, Protocol, TypeVar

from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest
from delta_belief_rl.types import Task, UserError

_TAGGED = re.compile(r"<question>(.*?)</question>", re.DOTALL | re.IGNORECASE)


class State(Protocol):
    """Everything that changes in a game; immutable, so a snapshot is the object itself."""

    @property
    def done(self) -> bool:
        """Whether the game is over."""
        ...

    @property
    def feedback(self) -> str:
        """One sentence about the last action; empty before the first."""
        ...


GameState = TypeVar("GameState", bound=State)


class SingleUseGame(Generic[GameState]):
    """One game; whoever derives from it puts a state of the game into ``_state``."""

    _state: GameState

    def feedback(self) -> str:
        """One sentence about the last action; empty before the first."""
        return self._state.feedback

    def snapshot(self) -> object:
        """The game's state, for ``restore`` on this game or another one of the same task."""
        return self._state

    def restore(self, snapshot: object) -> None:
        """Go back to a state that ``snapshot`` returned.

        Raises:
            TypeError: It is no state of such a game.
        """
        if not isinstance(snapshot, type(self._state)):
            raise TypeError(
                f"Expected a snapshot of this environment, got {type(snapshot).__name__}."
            )
        self._state = snapshot

    def _check_call(self, action: Action, reply: JudgeReply | None) -> None:
        """The rules of ``Env.apply``.

        Raises:
            ValueError: The game is over, or a judge's reply is missing or was not asked for.
        """
        if self._state.done:
            raise ValueError("This game is over: make a new environment for the next one.")
        if (reply is None) == action.needs_judge:
            raise ValueError(
                "A judge's reply must be given exactly when the action needs the judge."
            )


def question_text(text: str, question_tag: bool) -> str:
    """What an agent says: its whole text, or what stands in its first ``<question>`` tag.

    Empty where a tag is asked for and there is none, or it is not closed.

    Example:
        >>> question_text("Hm. <question> Is it alive? </question>", question_tag=True)
        'Is it alive?'
    """
    if not question_tag:
        return text.strip()
    tagged = _TAGGED.search(text)
    return tagged.group(1).strip() if tagged else ""


def judge_request(
    task: Task, action: Action, name: str, history: tuple[tuple[str, str], ...]
) -> JudgeRequest:
    """What the judge is asked about an action.

    Args:
        task: The game's.
        action: With a question.
        name: Of the question, equal for all whose answers must be; with ``history`` it names the
            random stream and the cache entry of the call.
        history: Earlier (question, reply) pairs that the judge is to see.

    Raises:
        ValueError: The action has no question.
    """
    if action.question is None:
        raise ValueError("An action without a question is not sent to the judge.")
    key = f"{task.source}/{name}"
    if history:
        key += "/" + digest("\n".join(part for pair in history for part in pair))
    return JudgeRequest(task, action.question, history, key)


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a value that is none of those that a setting may have.

    Raises:
        UserError: It is none of them.
    """
    if value not in known:
        raise UserError(f"{name} is {value!r}; the known values are {', '.join(known)}.")


def digest(text: str) -> str:
    """A short name of a text, the same in every process."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
