"""Games of a mediocre but faultless teacher, many at once.

The teacher never repeats a question and guesses only what all replies allow. Its choice of
questions is poor on purpose (one in three is sure to tell things apart), which leaves questions for
the later training. Now and then it slips: it repeats a question or says nonsense. Slips are not
trained on; they show the model the replies that follow and what to do then.

Legend: ``B`` games, ``L`` tokens of the longest, ``R`` turns of all games, ``N`` trained tokens of
all games, ``P`` properties, ``S`` things, ``A`` actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delta_belief_rl.trainer.warmup.actions import Actions
from delta_belief_rl.types import BoolArray, FloatArray, IntArray

HAZARD = (1.0, 1.0, 0.35, 0.2, 0.12)
"""Probability to guess with 0..4 things left; the first entry is never used."""
HAZARD_FEW = 0.04
"""With five to eight things left."""
HAZARD_MANY = 0.005
"""With more: small, never zero, so that the guess form stays in the language."""


_NO, _YES, _REPEATED, _INVALID = range(4)
_NONSENSE = 2
"""Tokens of the cut-off sentence that stands for nonsense."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """How the teacher plays.

    Attributes:
        informative: Share of its questions drawn from those whose answer it does not know; the
            others are drawn from all that were not asked.
        slip_rate: Probability of a slip per turn, from the second turn on.
    """

    informative: float = 1 / 3
    slip_rate: float = 0.02


@dataclass(frozen=True, slots=True)
class Language:
    """What the generator needs to know of a world and of its tokenizer; pickled once per worker.

    Attributes:
        values: ``[S, P]``, whether the property holds.
        actions: What can be said.
        prompt: Tokens before the first action.
        yes: Tokens from after the end of turn to before the next action, when the reply is yes.
        no: The same for no.
        repeated: The same for a question that was asked before.
        invalid: The same for an action that is no question of the world.
        end: End-of-turn token.
        pad: Padding token.
    """

    values: BoolArray
    actions: Actions
    prompt: tuple[int, ...]
    yes: tuple[int, ...]
    no: tuple[int, ...]
    repeated: tuple[int, ...]
    invalid: tuple[int, ...]
    end: int
    pad: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Shape of each game.

    Attributes:
        turns: ``[B]``, number of turns that the teacher plays freely.
        guess: ``[B]``, whether a guess is then added if the game is still open.
    """

    turns: IntArray
    guess: BoolArray


@dataclass(frozen=True, slots=True)
class GameBatch:
    """Token ids and exact targets.

    Attributes:
        token_ids: ``[B, L]``, padded on the right.
        lengths: ``[B]``.
        turn_game: ``[R]``, game of the turn; rows are ordered by game, then turn.
        turn_start: ``[R]``, position of the turn's first token.
        turn_action: ``[R]``, what was said; -1 for nonsense.
        turn_slip: ``[R]``, true for repeated questions and nonsense, which are not trained on.
        ask: ``[R, P]``, the teacher's probability of each property; sums to one with
            ``guess_rate``.
        guess_rate: ``[R]``, the teacher's probability to guess.
        consistent: ``[R, S]``, things that the replies before the turn allow.
        token_turn: ``[N]``, row of the turn table.
        token_offset: ``[N]``, offset of the token from ``turn_start``.
        token_node: ``[N]``, node of the action tree before the token.
    """

    token_ids: IntArray
    lengths: IntArray
    turn_game: IntArray
    turn_start: IntArray
    turn_action: IntArray
    turn_slip: BoolArray
    ask: NDArray[np.float32]
    guess_rate: FloatArray
    consistent: BoolArray
    token_turn: IntArray
    token_offset: IntArray
    token_node: IntArray

    def loss_mask(self) -> BoolArray:
        """``[B, L]``, true on the agent's tokens, the end of each turn included."""
        mask = np.zeros(self.token_ids.shape, dtype=np.bool_)
        mask[self.turn_game[self.token_turn], self.token_column()] = True
        return mask

    def token_column(self) -> IntArray:
        """``[N]``, position of each trained token in its game."""
        return self.turn_start[self.token_turn] + self.token_offset

    def posterior(self) -> FloatArray:
        """``[R, S]``, uniform over what is consistent."""
        return self.consistent / self.consistent.sum(axis=1, keepdims=True)

    def action_probabilities(self, actions: Actions) -> FloatArray:
        """``[R, A]``, the teacher's exact policy."""
        guess = self.posterior() * self.guess_rate[:, None]
        return actions.action_probabilities(self.ask, guess)

    def select(self, games: IntArray) -> GameBatch:
        """Some of the games, trimmed to the longest of them."""
        lengths = self.lengths[games]
        new_game = np.full(len(self.lengths), -1, dtype=np.int64)
        new_game[games] = np.arange(len(games))
        turns = np.flatnonzero(new_game[self.turn_game] >= 0)
        new_turn = np.full(len(self.turn_game), -1, dtype=np.int64)
        new_turn[turns] = np.arange(len(turns))
        tokens = np.flatnonzero(new_turn[self.token_turn] >= 0)
        return GameBatch(
            token_ids=self.token_ids[games, : int(lengths.max())],
            lengths=lengths,
            turn_game=new_game[self.turn_game[turns]],
            turn_start=self.turn_start[turns],
            turn_action=self.turn_action[turns],
            turn_slip=self.turn_slip[turns],
            ask=self.ask[turns],
            guess_rate=self.guess_rate[turns],
            consistent=self.consistent[turns],
            token_turn=new_turn[self.token_turn[tokens]],
            token_offset=self.token_offset[tokens],
            token_node=self.token_node[tokens],
        )


def plan_games(share: float, games: int, max_turns: int, rng: np.random.Generator) -> Plan:
    """Choose game lengths by the share of training done, from one-turn games to full ones.

    Up to 10 %: one question and a guess. To 45 %: the longest game grows. To 80 %: games cut
    anywhere and a guess added. Then four of five games run to their end.
    """
    if share < 0.10:
        turns = np.ones(games, dtype=np.int64)
    elif share < 0.45:
        longest = 1 + round((max_turns - 1) * (share - 0.10) / 0.35)
        turns = rng.integers(0, longest + 1, games)
    else:
        turns = rng.integers(0, max_turns, games)
    guess = np.ones(games, dtype=np.bool_)
    if share >= 0.80:
        full = rng.random(games) < 0.8
        turns = np.where(full, max_turns, turns)
        guess = ~full
    return Plan(turns=turns.astype(np.int64), guess=guess)


def guess_rate(remaining: IntArray) -> FloatArray:
    """The teacher's probability to guess, from the number of consistent things. Shape kept."""
    table = np.array([*HAZARD, *([HAZARD_FEW] * 4)])
    return np.where(
        remaining < len(table), table[np.minimum(remaining, len(table) - 1)], HAZARD_MANY
    )


def teacher_policy(
    consistent: BoolArray, asked: BoolArray, values: BoolArray, informative: float = 1 / 3
) -> tuple[FloatArray, FloatArray]:
    """Probabilities of the teacher's next move.

    Args:
        consistent: ``[B, S]``.
        asked: ``[B, P]``.
        values: ``[S, P]``.
        informative: See :class:`Teacher`.

    Returns:
        ``ask [B, P]`` and ``guess_rate [B]``; each row of ``ask`` and its ``guess_rate`` sum to
        one.
    """
    remaining = consistent.sum(axis=1)
    holds = consistent.astype(np.float32) @ values.astype(np.float32)
    splits = (holds > 0) & (holds < remaining[:, None]) & ~asked
    n_splits = splits.sum(axis=1, keepdims=True)
    n_open = (~asked).sum(axis=1, keepdims=True)
    rate = np.where(n_splits[:, 0] > 0, guess_rate(remaining), 1.0)
    useful = splits / np.maximum(n_splits, 1)
    anything = ~asked / np.maximum(n_open, 1)
    ask = informative * useful + (1 - informative) * anything
    return ask * (1 - rate)[:, None], rate


def play_games(
    language: Language, plan: Plan, rng: np.random.Generator, teacher: Teacher | None = None
) -> GameBatch:
    """Play a batch of games on secrets drawn from all things.

    Args:
        language: World and tokens.
        plan: Length of each game.
        rng: The only source of chance: equal generators give equal games.
        teacher: The default one when None.
    """
    teacher = teacher or Teacher()
    actions, values = language.actions, language.values
    games = len(plan.turns)
    secret = rng.integers(0, len(values), games)
    consistent = np.ones((games, len(values)), dtype=np.bool_)
    asked = np.zeros((games, values.shape[1]), dtype=np.bool_)
    active = np.arange(games)
    records: list[_TurnRecord] = []
    for turn in range(int((plan.turns + plan.guess).max())):
        forced = plan.turns[active] <= turn
        active = active[~forced | (plan.guess[active] & (plan.turns[active] == turn))]
        if not len(active):
            break
        forced = plan.turns[active] == turn
        ask, rate = teacher_policy(consistent[active], asked[active], values, teacher.informative)
        slip = ~forced & asked[active].any(axis=1) & (rng.random(len(active)) < teacher.slip_rate)
        action = _draw(
            actions,
            np.where(slip[:, None], asked[active], ask * ~forced[:, None]),
            np.where(slip, 0.0, np.where(forced, 1.0, rate)),
            consistent[active],
            rng,
        )
        reply = _reply(actions, action, values[secret[active]])
        reply = np.where(slip, rng.choice([_REPEATED, _REPEATED, _INVALID], len(active)), reply)
        records.append(_TurnRecord(active, action, ask, rate, consistent[active].copy(), reply))
        _learn(consistent, asked, active[~slip], action[~slip], reply[~slip], language)
        active = active[slip | (actions.thing_of[action] != secret[active])]
    return _assemble(language, games, records)


@dataclass(frozen=True, slots=True)
class _TurnRecord:
    games: IntArray
    action: IntArray
    ask: FloatArray
    rate: FloatArray
    consistent: BoolArray
    reply: IntArray


def _draw(
    actions: Actions,
    ask: FloatArray,
    rate: FloatArray,
    consistent: BoolArray,
    rng: np.random.Generator,
) -> IntArray:
    """Draw one action per game; ``ask`` and ``rate`` need not sum to one."""
    posterior = consistent / consistent.sum(axis=1, keepdims=True)
    weights = actions.action_probabilities(ask, posterior * rate[:, None])
    cumulative = np.cumsum(weights, axis=1)
    draw = rng.random(len(rate)) * cumulative[:, -1]
    return (cumulative <= draw[:, None]).sum(axis=1)


def _reply(actions: Actions, action: IntArray, facts: BoolArray) -> IntArray:
    """Reply to each action; a guess that is still followed by a reply was wrong."""
    prop = actions.property_of[action]
    holds = (prop >= 0) & facts[np.arange(len(action)), np.maximum(prop, 0)]
    return np.where(holds, _YES, _NO)


def _learn(
    consistent: BoolArray,
    asked: BoolArray,
    active: IntArray,
    action: IntArray,
    reply: IntArray,
    language: Language,
) -> None:
    prop = language.actions.property_of[action]
    thing = language.actions.thing_of[action]
    questions = np.flatnonzero(prop >= 0)
    rows = active[questions]
    asked[rows, prop[questions]] = True
    said = (reply[questions] == _YES)[:, None]
    consistent[rows] &= said == language.values[:, prop[questions]].T
    guesses = np.flatnonzero(prop < 0)
    consistent[active[guesses], thing[guesses]] = False


def _assemble(language: Language, games: int, records: Sequence[_TurnRecord]) -> GameBatch:
    game = np.concatenate([record.games for record in records])
    order = np.argsort(game, kind="stable")
    action = np.concatenate([record.action for record in records])[order]
    reply = np.concatenate([record.reply for record in records])[order]
    game = game[order]
    slip = reply >= _REPEATED
    action = np.where(reply == _INVALID, -1, action)
    replies = (language.no, language.yes, language.repeated, language.invalid)
    nonsense = (*language.actions.tokens[0][:_NONSENSE], language.end)
    streams: list[list[int]] = [list(language.prompt) for _ in range(games)]
    start = np.zeros(len(game), dtype=np.int64)
    lengths = np.zeros(games, dtype=np.int64)
    for r, (g, a) in enumerate(zip(game.tolist(), action.tolist(), strict=True)):
        stream = streams[g]
        start[r] = len(stream)
        stream.extend(language.actions.tokens[a] if a >= 0 else nonsense)
        lengths[g] = len(stream)
        stream.extend(replies[reply[r]])
    token_ids = np.full((games, int(lengths.max())), language.pad, dtype=np.int64)
    for g, stream in enumerate(streams):
        token_ids[g, : lengths[g]] = stream[: lengths[g]]
    trained = np.flatnonzero(~slip)
    sizes = np.array([len(language.actions.tokens[a]) for a in action[trained]], dtype=np.int64)
    token_turn = np.repeat(trained, sizes)
    offset = np.arange(len(token_turn)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    node = np.concatenate([np.asarray(language.actions.paths[a]) for a in action[trained]])
    return GameBatch(
        token_ids=token_ids,
        lengths=lengths,
        turn_game=game,
        turn_start=start,
        turn_action=action,
        turn_slip=slip,
        ask=np.concatenate([record.ask for record in records])[order].astype(np.float32),
        guess_rate=np.concatenate([record.rate for record in records])[order],
        consistent=np.concatenate([record.consistent for record in records])[order],
        token_turn=token_turn,
        token_offset=offset.astype(np.int64),
        token_node=node.astype(np.int64),
    )
