"""Games that leave another game before one of its turns and play on by themselves.

A branch has the tokens, turns and verdicts of the game that it leaves, as they were sampled, up to
the turn before which it leaves. From there on it is a game like any other: its random numbers are
named by its own number, its turn limit and its budget of tokens count what it shares.

Its environment comes to the state that the other game was in by one of two ways:

* *snapshot*: the environment has ``snapshot`` and ``restore``. The state before every turn is kept
  while a game is played, and put into a fresh game of the task.
* *replay*: the environment says by ``replayable()`` that its state follows from the actions and the
  judge's replies. They are kept, and applied to a fresh game; the judge is not asked again. An
  outcome that differs from the one on record ends the run.

An environment with neither is refused before a game is played.

What is kept of a game lives as long as its group is being played, in this process alone: a step
that is done again plays its games again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from delta_belief_rl.envs.base import Env, JudgeReply
from delta_belief_rl.rollout.candidates import Rewindable
from delta_belief_rl.rollout.game import Beginning, Move, needs_judge
from delta_belief_rl.types import Trajectory, UserError

Way = Literal["snapshot", "replay"]


def rewind_way(env: Env) -> Way:
    """How a fresh game of an environment comes to a state that another game was in.

    Raises:
        UserError: There is no way.
    """
    if isinstance(env, Rewindable):
        return "snapshot"
    hook: Callable[[], bool] | None = getattr(env, "replayable", None)
    if hook is not None and hook():
        return "replay"
    raise UserError(
        f"The environment {type(env).__name__} has neither snapshot and restore nor replayable, so "
        "no game of it can be continued from the middle: add one of them, or set "
        "algorithm.tree.rule=none."
    )


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a branch begins.

    Attributes:
        game: The game that it leaves, of the same task.
        memory: Of that game.
        turn: Before which it leaves; 0 shares the opening alone.
    """

    game: Trajectory
    memory: Memory
    turn: int

    def __post_init__(self) -> None:
        if not 0 <= self.turn < max(self.game.num_turns, 1):
            raise ValueError(
                f"a game of {self.game.num_turns} turns is left before one of them, not before "
                f"turn {self.turn}"
            )

    def beginning(self, number: int) -> Beginning:
        """What a branch with this number begins with."""
        return Beginning(
            token_ids=self.game.token_ids[: self.game.belief_points[self.turn]],
            turns=self.game.turns[: self.turn],
            lineage=lineage_of(self.game, self.turn, number),
        )

    def restore(self, env: Env) -> None:
        """Bring a fresh game of the task to the state before the turn."""
        self.memory.restore(env, self.game, self.turn)


class Memory:
    """What must be known of a game so that others can leave it; the witness of that game.

    Args:
        way: How states are restored.
        origin: Where the game itself began; None at the opening.
    """

    def __init__(self, way: Way, origin: Origin | None = None) -> None:
        self._way: Way = way
        self._states: list[object] = []
        self._replies: list[JudgeReply | None] = []
        if origin is not None:
            self._states = origin.memory._states[: origin.turn]
            self._replies = origin.memory._replies[: origin.turn]

    def before(self, env: Env) -> None:
        """Keep the state before a turn."""
        if self._way == "snapshot":
            assert isinstance(env, Rewindable), "the way was found on such an environment"
            self._states.append(env.snapshot())

    def after(self, move: Move) -> None:
        """Keep what the judge said about it."""
        self._replies.append(move.reply)

    def restore(self, env: Env, game: Trajectory, turn: int) -> None:
        """Bring a fresh game to the state before a turn.

        Args:
            env: A game that nothing was played in.
            game: The one that this is the memory of.
            turn: Below its number of turns.

        Raises:
            UserError: A replayed action had another outcome than the first time.
        """
        if turn == 0:
            return
        if self._way == "snapshot":
            assert isinstance(env, Rewindable), "the way was found on such an environment"
            env.restore(self._states[turn])
            return
        for played, reply in zip(game.turns[:turn], self._replies, strict=False):
            action = env.parse(played.action)
            if needs_judge(action) != (reply is not None):
                raise _differs(env, played.index)
            outcome = env.apply(action, reply)
            if (outcome.verdict, outcome.reply) != (played.verdict, played.reply) or outcome.done:
                raise _differs(env, played.index)


def lineage_of(game: Trajectory, turn: int, number: int) -> tuple[tuple[int, int], ...]:
    """Lineage of game ``number``, which leaves ``game`` before a turn; see ``Trajectory``.

    Example:
        >>> from delta_belief_rl.types import StopReason, Task
        >>> task = Task("t", "tw_q", "dog", ())
        >>> left = ((0, 0), (3, 2))
        >>> parent = Trajectory(task, 3, (), (), StopReason.WIN, lineage=left)
        >>> lineage_of(parent, 4, 7), lineage_of(parent, 1, 7)
        (((0, 0), (3, 2), (7, 4)), ((0, 0), (7, 1)))
    """
    own = game.lineage or ((game.game, 0),)
    # The first pair names the tree, also where nothing of it is shared.
    return (own[0], *(pair for pair in own[1:] if pair[1] < turn), (number, turn))


def _differs(env: Env, turn: int) -> UserError:
    return UserError(
        f"The environment {type(env).__name__} says that it is replayable, but turn {turn} of a "
        "replayed game went differently: give it snapshot and restore, or set "
        "algorithm.tree.rule=none."
    )
