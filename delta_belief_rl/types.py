"""The data that flow through one training step.

Read this file first: every other module takes or returns these types.

Legend for shapes used in this package: ``N`` games in a batch, ``G`` games of one group (same
secret, same first observation), ``K`` turns of one game, ``R`` rows of a turn table (all turns of
all games), ``T`` tokens of a packed batch.

Everything here is plain Python and NumPy; nothing knows of processes, files or configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class UserError(ValueError):
    """A mistake that the user can mend: printed as one sentence, exit status 2."""


class Verdict(StrEnum):
    """What the environment said about one action."""

    YES = "yes"
    NO = "no"
    REPEATED = "repeated"
    INVALID = "invalid"
    WIN = "win"
    OTHER = "other"
    """An environment's own free-text reply (Guess My City, Customer Service, ...)."""
    ERROR = "error"
    """The judge failed. Never a reward: the turn is not trained and not paid, and it is counted."""


class StopReason(StrEnum):
    """Why a game ended."""

    WIN = "win"
    TURN_LIMIT = "turn_limit"
    CONTEXT_FULL = "context_full"
    ENDED = "ended"
    """The environment ended it before the turn limit and without a win (a wrong accusation)."""
    JUDGE_FAILED = "judge_failed"
    ENGINE_FAILED = "engine_failed"


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, as chat templates expect it.

    Example:
        >>> Message("user", "Ask your first question.").as_dict()
        {'role': 'user', 'content': 'Ask your first question.'}
    """

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """The form that chat templates read."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class Task:
    """One secret (or scenario) to be played.

    Attributes:
        id: Unique name inside its data set, e.g. ``"train_17"``.
        source: The reference's ``data_source``, which names the environment's rewards (``"tw_q"``).
        secret: What the agent has to find.
        messages: The messages that open every game of this task.
        split: ``train``, ``val`` or ``test``.
        aliases: Other names that count as the secret.
        scenario: Extra text that only the judge sees, where an environment has one.
    """

    id: str
    source: str
    secret: str
    messages: tuple[Message, ...]
    split: str = "train"
    aliases: tuple[str, ...] = ()
    scenario: str | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of several actions that were tried out before a turn was taken.

    Losing candidates leave no token in the trajectory; this is all that is kept of them.

    Attributes:
        action: The sampled text.
        reply: What the environment would have replied; empty where it was not asked.
        verdict: What it would have said; ``ERROR`` where the engine or the judge failed.
        belief: Log-probability of the secret after the reply, in nats; None where it could not be
            measured.
        delta: ``belief`` minus the belief before the turn, in nats; None like ``belief``.
        chosen: The turn is this candidate.
        error: Why the candidate could not be compared; empty where it was.
    """

    action: str
    reply: str
    verdict: Verdict
    belief: float | None
    delta: float | None
    chosen: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One action of the agent and the environment's reply.

    ``start`` and ``end`` delimit the sampled tokens in ``Trajectory.token_ids`` (``end``
    exclusive). The end-of-turn token is inside the span when the sampler produced it; it is trained
    like any other.

    Example:
        A turn whose question was sampled as the tokens 17..22::

            Turn(index=0, start=17, end=23, logprobs=(-0.1, ...), adapter_version=4,
                 action="Is it alive?", reply="Yes", verdict=Verdict.YES)
    """

    index: int
    start: int
    end: int
    logprobs: tuple[float, ...]
    adapter_version: int
    action: str
    reply: str
    verdict: Verdict
    strict_win: bool = False
    """One candidate, guessed directly."""
    compatible_win: bool = False
    """The secret appears as a word in a valid question: the published rule."""
    is_guess: bool = False
    """The action names a candidate answer."""
    is_list: bool = False
    """The action names several candidates."""
    truncated: bool = False
    """The token cap of a turn cut the action; no end-of-turn token was sampled."""
    state_key: str = ""
    """What is known before the action, for methods that compare actions in equal states."""
    action_key: str = ""
    reads: tuple[str, ...] = ()
    """Variables of the environment's state that the action depended on."""
    writes: tuple[str, ...] = ()
    """Variables that it changed."""
    progress: float = 0.0
    """How much of the task is solved before the action, in the environment's own unit."""
    judge_seconds: float = 0.0
    engine_seconds: float = 0.0
    raw_verdict: str = ""
    """The judge's own word before any rule changed it."""
    diagnostics: tuple[str, ...] = ()
    """What the environment noticed about the action, e.g. ``no_question``."""
    question: str = ""
    """What the environment read out of an action with reasoning; empty where it read all of it."""
    candidates: tuple[Candidate, ...] = ()
    """What the action was chosen from, in the order of sampling; empty without such a choice."""
    score: float | None = None
    """How well the task was done, in [0, 1], on the turn that ends a graded game; None where win
    or loss says it all."""
    uncertainty: tuple[float, float] | None = None
    """Entropy of the environment's exact posterior over what is hidden, before and after the turn:
    0 is certain, 1 uniform. None where it keeps no posterior."""
    truth_logp: tuple[float, float] | None = None
    """Log-probability of what is true in that posterior, in nats, likewise."""
    order: tuple[int, ...] = ()
    """Step at which each token was said, where a policy does not say them one after the other;
    empty where it does."""

    @property
    def n_tokens(self) -> int:
        """Sampled tokens, the end-of-turn token included where it was sampled."""
        return self.end - self.start

    @property
    def asked(self) -> str:
        """The question as the environment read it."""
        return self.question or self.action


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished game: a token stream and what happened at which span of it.

    The stream always ends with the environment's last reply and the header of the turn that would
    come next, so that the belief after every turn can be asked at a place where the agent would
    speak.

    Attributes:
        token_ids: The whole stream. Sampled ids stand as they were sampled; nothing is tokenised
            again.
        turns: In order; spans do not overlap.
        beliefs: ``k + 1`` log-probabilities of the secret in nats, before the first and after each
            turn.
        game: Index of the game inside its group.
        run_id: The run that played it.
        lineage: Of a game that belongs to a tree: who played its turns, as pairs of a game's number
            and the first turn that it played, oldest first. The first pair names the tree, the last
            one is the game itself. Empty for a game that is a tree of its own.

    Example:
        Game 5 left game 3 before turn 2, which had left game 0 before turn 1::

            lineage=((0, 0), (3, 1), (5, 2))
    """

    task: Task
    game: int
    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    stop: StopReason
    beliefs: tuple[float, ...] | None = None
    run_id: str = ""
    step: int = 0
    lineage: tuple[tuple[int, int], ...] = ()

    @property
    def num_turns(self) -> int:
        """``k``, the actions taken."""
        return len(self.turns)

    @property
    def tree(self) -> int:
        """Number of the game with which the tree began, inside the group."""
        return self.lineage[0][0] if self.lineage else self.game

    @property
    def num_shared(self) -> int:
        """Turns that another game had played before this one left it."""
        return min(self.lineage[-1][1], len(self.turns)) if self.lineage else 0

    @property
    def branch_of(self) -> tuple[int, int] | None:
        """The game that this one left and the turn before which it did; None without one."""
        if len(self.lineage) < 2 or not self.lineage[-1][1]:
            return None
        return self.lineage[-2][0], self.lineage[-1][1]

    def player_of(self, turn: int) -> int:
        """Number of the game that was the first to play a turn of this one."""
        players = [game for game, first in self.lineage if first <= turn]
        return players[-1] if players else self.game

    @property
    def strict_win(self) -> bool:
        """A turn named one candidate, directly, and it was the secret."""
        return any(turn.strict_win for turn in self.turns)

    @property
    def compatible_win(self) -> bool:
        """A win by the published rule; see ``Turn.compatible_win``."""
        return any(turn.compatible_win for turn in self.turns)

    @property
    def score(self) -> float | None:
        """The grade of the turn that ended the game; see ``Turn.score``."""
        return self.turns[-1].score if self.turns else None

    @property
    def belief_points(self) -> tuple[int, ...]:
        """Prefix lengths at which the belief is asked, ``k + 1`` of them."""
        if not self.turns:
            return (len(self.token_ids),)
        return (*(turn.start for turn in self.turns), len(self.token_ids))

    def action_mask(self) -> BoolArray:
        """True exactly where the sampler produced the token. Shape ``[len(token_ids)]``."""
        mask = np.zeros(len(self.token_ids), dtype=np.bool_)
        for turn in self.turns:
            mask[turn.start : turn.end] = True
        return mask

    def count(self, verdict: Verdict) -> int:
        """Turns with this verdict."""
        return sum(turn.verdict is verdict for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Group:
    """The games of one task in one step; the unit of group statistics."""

    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class TurnTable:
    """One row per turn; all credit that needs a group works here, on the driver, in kilobytes.

    All columns have length ``R``. Rows of one game are contiguous and ordered by ``turn``.

    Attributes:
        group: Group number of the row.
        traj: Game number, unique over the whole batch.
        turn: Turn index inside the game.
        n_tokens: Sampled tokens of the turn.
        valid: False for turns that must be neither paid nor trained (judge errors).
        terminal: True on the last turn of its game.
        truncated: True on the last turn of a game that did not end by itself (context, failures).
        won: Per game outcome, repeated on every row of the game.
        footprint: What each turn read and what it wrote of the environment's state.
        answered: True where the action was replied to as one that can be, neither invalid nor a
            repetition nor a failure of the judge.
        tree: Number of the tree of turns that the game belongs to, unique over the batch; empty
            where every game is a tree of its own.
        node: The first row that holds the same turn: games that were continued from one another
            share their first turns; empty where no turn is shared.
        rewards: Named channels, apart until credit.
        tokens: Numbers of every sampled token by name, each ``[S]``, all rows end to end (``S`` is
            the sum of ``n_tokens``): ``logp`` of the policy before the update, ``values`` of a
            critic, and ``view:<name>``, the log-prob behind another context, NaN in games for
            which there is none.
        update: Updates that the policy has had before this one; schedules read it.
    """

    group: IntArray
    traj: IntArray
    turn: IntArray
    n_tokens: IntArray
    valid: BoolArray
    terminal: BoolArray
    truncated: BoolArray
    won: BoolArray
    state_key: tuple[str, ...] = ()
    action_key: tuple[str, ...] = ()
    footprint: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()
    progress: FloatArray = field(default_factory=lambda: np.zeros(0))
    answered: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    tree: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    node: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    rewards: Mapping[str, FloatArray] = field(default_factory=lambda: dict[str, FloatArray]())
    tokens: Mapping[str, FloatArray] = field(default_factory=lambda: dict[str, FloatArray]())
    update: int = 0

    @property
    def num_rows(self) -> int:
        """``R``, turns of all games."""
        return len(self.turn)

    @property
    def num_games(self) -> int:
        """``N``, games that have a turn."""
        return int(self.traj.max()) + 1 if len(self.traj) else 0

    @property
    def num_turns(self) -> int:
        """``K``, turns of the longest game."""
        return int(self.turn.max()) + 1 if len(self.turn) else 0

    def grid(self, column: NDArray[np.generic], fill: float = 0.0) -> FloatArray:
        """Spread a column over games and turns, ``[R] -> [N, K]``; ``fill`` where no turn is."""
        out = np.full((self.num_games, self.num_turns), fill, dtype=np.float64)
        out[self.traj, self.turn] = column
        return out

    def exists(self) -> BoolArray:
        """``[N, K]``, true where the game has that turn."""
        return self.grid(np.ones(self.num_rows)).astype(np.bool_)

    def token_row(self) -> IntArray:
        """The row of each sampled token, ``[S]``."""
        return np.repeat(np.arange(self.num_rows, dtype=np.int64), self.n_tokens)

    def game_group(self) -> IntArray:
        """Group number of each game, ``[N]``."""
        out = np.zeros(self.num_games, dtype=np.int64)
        out[self.traj] = self.group
        return out


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Packed tokens of many games, ready for the policy update.

    Game ``i`` owns the positions ``offsets[i]:offsets[i + 1]``. A token's log-prob sits at the
    token's own position (it is predicted by the one before).

    Attributes:
        token_ids: ``[T]``.
        offsets: ``[N + 1]``.
        turn_ids: ``[T]``, index of the turn inside its game; -1 where the token was not sampled.
        old_logp: ``[T]``, of the policy before the update, zero where not sampled.
        rollout_logp: ``[T]``, as the engine reported it at sampling time.
        advantages: ``[T]``.
        weight: ``[T]``, 0 removes a token from the loss and from every count.
        views: Further numbers of the same tokens by name: log-probs under another model or behind
            another context, values of a critic and what they shall become.
        denominators: Global counts over the whole batch: ``tokens``, ``turns``, ``rows``.
    """

    token_ids: IntArray
    offsets: IntArray
    turn_ids: IntArray
    old_logp: FloatArray
    rollout_logp: FloatArray
    advantages: FloatArray
    weight: FloatArray
    views: Mapping[str, FloatArray] = field(default_factory=lambda: dict[str, FloatArray]())
    denominators: Mapping[str, float] = field(default_factory=lambda: dict[str, float]())

    @property
    def num_games(self) -> int:
        """``N``."""
        return len(self.offsets) - 1

    def lengths(self) -> IntArray:
        """Tokens of each game, ``[N]``."""
        return np.diff(self.offsets)

    def games(self) -> Iterator[slice]:
        """The positions of each game, in order."""
        for start, end in zip(self.offsets[:-1], self.offsets[1:], strict=True):
            yield slice(int(start), int(end))

    def select(self, games: IntArray) -> TrainBatch:
        """The sub-batch of some games, in the given order.

        Denominators stay those of the whole batch.
        """
        lengths = self.lengths()[games]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        shift = np.repeat(self.offsets[games] - offsets[:-1], lengths)
        index = shift + np.arange(int(offsets[-1]), dtype=np.int64)
        return TrainBatch(
            token_ids=self.token_ids[index],
            offsets=offsets,
            turn_ids=self.turn_ids[index],
            old_logp=self.old_logp[index],
            rollout_logp=self.rollout_logp[index],
            advantages=self.advantages[index],
            weight=self.weight[index],
            views={name: view[index] for name, view in self.views.items()},
            denominators=self.denominators,
        )
