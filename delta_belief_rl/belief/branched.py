"""One forward pass gives a game's own log-probs and the belief after every turn.

The ``k + 1`` guesses of a game hang on it as branches (``models.packed``) that see only their
prefix, so the game is read once instead of ``k + 1`` times. Logits exist at the scored positions
only. What an elicitation puts in front of the first guess is part of that guess's branch, so the
game's own tokens never see it.

Scoring has no access to sampling settings: a belief is always at temperature 1. The log-probs of
the game's own tokens are taken at the temperature they were sampled with, because the update
compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from delta_belief_rl.belief.elicit import Elicitation
from delta_belief_rl.models.adapters import use_adapter
from delta_belief_rl.models.logprobs import hidden_states, score_rows
from delta_belief_rl.models.packed import Branch, PackedInput, PackSegment, pack
from delta_belief_rl.models.varlen import runs_ragged
from delta_belief_rl.types import FloatArray, IntArray, Trajectory

POLICY = "policy"
"""Belief model: the model as it stands, in the same pass as the game's own log-probs."""
BASE = "base"
"""Belief model: the frozen base, adapters off. Any other name is that of an adapter."""


@dataclass(frozen=True, slots=True)
class View:
    """A game's sampled tokens behind another opening.

    Attributes:
        token_ids: The stream with the other opening.
        action_positions: ``[n]``, where the same sampled tokens lie in it.
    """

    token_ids: Sequence[int]
    action_positions: IntArray


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One finished game.

    Attributes:
        token_ids: The whole stream.
        action_positions: ``[n]``, positions of the tokens whose log-prob is wanted, each at least
            1.
        elicitation: The guess; None when no belief is wanted.
        belief_points: Prefix lengths at which the guess is asked, strictly increasing, ``k + 1`` of
            them.
        views: Other contexts of the same tokens, by name.
        order: ``[n]``, the step at which each of these tokens was said (``Turn.order``); empty
            where they were said one after the other.
    """

    token_ids: Sequence[int]
    action_positions: IntArray
    elicitation: Elicitation | None = None
    belief_points: tuple[int, ...] = ()
    views: Mapping[str, View] = field(default_factory=lambda: dict[str, View]())
    order: tuple[int, ...] = ()

    @classmethod
    def of(cls, trajectory: Trajectory, elicitation: Elicitation | None = None) -> ScoreRequest:
        """Every sampled token of a trajectory and, with an elicitation, all its belief points."""
        return cls(
            token_ids=trajectory.token_ids,
            action_positions=np.flatnonzero(trajectory.action_mask()).astype(np.int64),
            elicitation=elicitation,
            belief_points=trajectory.belief_points if elicitation is not None else (),
            order=tuple(step for turn in trajectory.turns for step in turn.order),
        )


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """``logp [n]``, ``beliefs [k + 1]`` and, if asked for, ``entropy [n]``; all in nats.

    ``values [n + 1]``, if asked for, are a critic's: at the places that predict the action
    positions, and at the end of the stream.
    """

    logp: FloatArray
    beliefs: FloatArray
    entropy: FloatArray | None = None
    values: FloatArray | None = None


ValueOf = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states ``[n, hidden]`` to values ``[n]``."""


def score_batch(
    model: Any,
    games: Sequence[ScoreRequest],
    max_tokens_per_pass: int = 16384,
    temperature: float = 1.0,
    with_entropy: bool = False,
    belief_model: str = POLICY,
    chunk: int = 1024,
    value_of: ValueOf | None = None,
) -> list[ScoreResult]:
    """Score finished games, one packed forward for each micro-batch.

    A belief under another model than the policy takes a second pass with that adapter (or none)
    active.

    Args:
        model: The training model.
        games: In any order and of any lengths.
        max_tokens_per_pass: Bound on the tokens of a micro-batch (``plan_passes``); a longer game
            goes alone.
        temperature: Of the sampler, for ``logp`` and ``entropy``; beliefs are at 1.
        with_entropy: Also give the entropy at every action position.
        belief_model: ``"policy"``, ``"base"`` or the name of an adapter.
        chunk: Rows of logits that exist at one time.
        value_of: Also give the values that this reads from the same hidden states.

    Returns:
        One result for each game, in the order given.

    Raises:
        ValueError: A request's points or positions do not fit its tokens.
        UserError: There is no such adapter.
    """
    if not games:
        return []
    for game in games:
        _check(game)
    together = belief_model == POLICY
    results: list[ScoreResult] = [_EMPTY] * len(games)
    lengths = [_segment(game, together).num_tokens for game in games]
    for part in plan_passes(lengths, max_tokens_per_pass, padded=not runs_ragged(model)):
        batch = [games[i] for i in part]
        scored = _pass(model, batch, temperature, chunk, with_entropy, together, value_of)
        for i, result in zip(part, scored, strict=True):
            results[i] = result
    if together or not any(game.elicitation is not None for game in games):
        return results
    beliefs = score_beliefs(model, games, max_tokens_per_pass, belief_model, chunk)
    return [
        ScoreResult(result.logp, belief, result.entropy, result.values)
        for result, belief in zip(results, beliefs, strict=True)
    ]


def score_beliefs(
    model: Any,
    games: Sequence[ScoreRequest],
    max_tokens_per_pass: int = 16384,
    belief_model: str = POLICY,
    chunk: int = 1024,
) -> list[FloatArray]:
    """Beliefs alone, ``[k + 1]`` of each game, under a named model; see ``score_batch``."""
    none = np.zeros(0, dtype=np.int64)
    asked = [
        ScoreRequest(game.token_ids, none, game.elicitation, game.belief_points) for game in games
    ]
    switch = nullcontext()
    if belief_model != POLICY:
        switch = use_adapter(model, None if belief_model == BASE else belief_model)
    with switch:
        results = score_batch(model, asked, max_tokens_per_pass, chunk=chunk)
    return [result.beliefs for result in results]


def plan_passes(lengths: Sequence[int], budget: int, padded: bool = True) -> list[list[int]]:
    """Split items into micro-batches of similar lengths.

    Args:
        lengths: Tokens of each item.
        budget: Bound on ``items x longest`` of a micro-batch, or, without padding, on the sum of
            its lengths.
        padded: Whether every item takes as much as the longest one.

    Returns:
        Indices, a partition of ``range(len(lengths))``; a function of the arguments alone.
    """
    parts: list[list[int]] = []
    filled = longest = 0
    # Descending, so that the first item of a part is its longest.
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        filled += longest if padded else lengths[i]
        if parts and filled <= budget:
            parts[-1].append(i)
        else:
            parts.append([i])
            filled = longest = lengths[i]
    return parts


_EMPTY = ScoreResult(np.zeros(0), np.zeros(0))


def _check(game: ScoreRequest) -> None:
    length = len(game.token_ids)
    points = np.array(game.belief_points, dtype=np.int64)
    if (game.elicitation is None) != (len(points) == 0):
        raise ValueError("belief points and an elicitation belong together")
    if len(points) and (points[0] < 1 or points[-1] > length or (np.diff(points) <= 0).any()):
        raise ValueError(
            f"belief points must rise strictly within 1 .. {length}: {points.tolist()}"
        )
    positions = game.action_positions
    if len(positions) and (positions.min() < 1 or positions.max() >= length):
        raise ValueError(f"action positions must lie in 1 .. {length - 1}")


def _segment(game: ScoreRequest, with_belief: bool) -> PackSegment:
    if not with_belief or game.elicitation is None:
        return PackSegment(game.token_ids)
    ids, lead = game.elicitation.branch_ids, game.elicitation.lead_ids
    first, *later = game.belief_points
    branches = (Branch(first, (*lead, *ids)), *(Branch(point, ids) for point in later))
    return PackSegment(game.token_ids, branches)


@torch.no_grad()
def _pass(
    model: Any,
    games: Sequence[ScoreRequest],
    temperature: float,
    chunk: int,
    with_entropy: bool,
    with_belief: bool,
    value_of: ValueOf | None = None,
) -> list[ScoreResult]:
    segments = [_segment(game, with_belief) for game in games]
    packed = pack(segments, model.device, runs_ragged(model))
    hidden = hidden_states(model, packed)
    actions = [_action_rows(packed, i, game) for i, game in enumerate(games)]
    logp, entropy = _score(model, hidden, actions, temperature, chunk, with_entropy)
    guesses = [
        _belief_rows(packed, i, game) if with_belief else (_NONE, _NONE)
        for i, game in enumerate(games)
    ]
    belief_logp, _ = _score(model, hidden, guesses, 1.0, chunk, False)
    values = _values(packed, hidden, actions, value_of) if value_of is not None else None
    return [
        ScoreResult(
            logp=logp[i],
            beliefs=_beliefs(game, belief_logp[i]) if with_belief else np.zeros(0),
            entropy=entropy[i] if with_entropy else None,
            values=values[i] if values is not None else None,
        )
        for i, game in enumerate(games)
    ]


_NONE = np.zeros(0, dtype=np.int64)
_Rows = tuple[IntArray, IntArray]


def _action_rows(packed: PackedInput, segment: int, game: ScoreRequest) -> _Rows:
    positions = game.action_positions
    ids = np.asarray(game.token_ids, dtype=np.int64)
    return packed.trunk_sources(segment, positions), ids[positions]


def _belief_rows(packed: PackedInput, segment: int, game: ScoreRequest) -> _Rows:
    if game.elicitation is None:
        return _NONE, _NONE
    asked = game.elicitation
    sources = packed.branch_sources(segment, asked.offsets)
    if asked.lead_ids:
        sources[0] = packed.branch_sources(segment, asked.offsets + len(asked.lead_ids))[0]
    return sources.ravel(), np.tile(asked.targets, len(game.belief_points))


def _score(
    model: Any,
    hidden: torch.Tensor,
    rows: Sequence[_Rows],
    temperature: float,
    chunk: int,
    with_entropy: bool,
) -> tuple[list[FloatArray], list[FloatArray]]:
    """Score the rows of all games at once and hand them back game by game."""
    sources = torch.as_tensor(np.concatenate([source for source, _ in rows]))
    targets = torch.as_tensor(np.concatenate([target for _, target in rows]))
    scores = score_rows(model, hidden, sources, targets, temperature, chunk, with_entropy)
    ends = np.cumsum([len(source) for source, _ in rows])
    logp = np.split(_array(scores.logp), ends[:-1])
    entropy = np.split(_array(scores.entropy), ends[:-1]) if scores.entropy is not None else []
    return list(logp), list(entropy)


def _values(
    packed: PackedInput, hidden: torch.Tensor, rows: Sequence[_Rows], value_of: ValueOf
) -> list[FloatArray]:
    """Values at the sources of all games and at the last token of each trunk, game by game."""
    ends = packed.segment_starts[:-1] + packed.trunk_lengths - 1
    sources = [np.append(source, end) for (source, _), end in zip(rows, ends, strict=True)]
    index = torch.as_tensor(np.concatenate(sources), device=hidden.device)
    values = _array(value_of(hidden.index_select(0, index)))
    return list(np.split(values, np.cumsum([len(source) for source in sources])[:-1]))


def _array(values: torch.Tensor) -> FloatArray:
    return values.double().cpu().numpy()


def _beliefs(game: ScoreRequest, logp: FloatArray) -> FloatArray:
    if game.elicitation is None:
        return np.zeros(0)
    # Raises when a log-prob is missing: a belief is never filled in.
    grid = logp.reshape(len(game.belief_points), len(game.elicitation.scored))
    return game.elicitation.aggregate(grid)
