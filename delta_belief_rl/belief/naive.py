"""The reference scorer: the game is read again for every turn, with the logits of every position.

It shares nothing with ``belief.branched`` but the request type, so that each checks the other, and
the benchmark compares against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from delta_belief_rl.belief.branched import ScoreRequest, ScoreResult
from delta_belief_rl.types import FloatArray


def naive_scores(
    model: Any, games: Sequence[ScoreRequest], temperature: float = 1.0, batch_size: int = 16
) -> list[ScoreResult]:
    """Score games by plain forwards of padded batches.

    Args:
        model: A causal model.
        games: The games.
        temperature: For the games' own tokens; beliefs are at 1.
        batch_size: Sequences of one forward.

    Returns:
        ``logp [n]`` and ``beliefs [k + 1]`` of each game, without entropies.
    """
    own = _token_logps(model, [list(game.token_ids) for game in games], temperature, batch_size)
    logps = [row[game.action_positions] for row, game in zip(own, games, strict=True)]
    beliefs = [np.full(len(game.belief_points), np.nan) for game in games]
    most = max((len(game.belief_points) for game in games), default=0)
    for turn in range(most):
        active = [i for i, game in enumerate(games) if turn < len(game.belief_points)]
        rows: list[list[int]] = []
        for i in active:
            elicitation = games[i].elicitation
            assert elicitation is not None
            rows.append([*_prefix(games[i], turn), *elicitation.token_ids])
        for i, row in zip(active, _token_logps(model, rows, 1.0, batch_size), strict=True):
            elicitation = games[i].elicitation
            assert elicitation is not None
            at = len(_prefix(games[i], turn)) + elicitation.offsets
            beliefs[i][turn] = elicitation.aggregate(row[at])
    return [ScoreResult(logp, belief) for logp, belief in zip(logps, beliefs, strict=True)]


def _prefix(game: ScoreRequest, turn: int) -> list[int]:
    """What stands in front of the guess after so many turns."""
    ids = list(game.token_ids[: game.belief_points[turn]])
    if turn == 0 and game.elicitation is not None:
        ids += game.elicitation.lead_ids
    return ids


@torch.no_grad()
def _token_logps(
    model: Any, rows: Sequence[Sequence[int]], temperature: float, batch_size: int
) -> list[FloatArray]:
    """Log-prob of every token given those before it, ``nan`` for a row's first."""
    out: list[FloatArray] = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        width = max(len(row) for row in batch)
        # Padding on the right is invisible to a causal model's earlier positions.
        ids = torch.tensor(
            [[*row, *[0] * (width - len(row))] for row in batch], device=model.device
        )
        logits = model(input_ids=ids, use_cache=False).logits.float() / temperature
        logp = torch.log_softmax(logits[:, :-1], dim=-1)
        picked = logp.gather(-1, ids[:, 1:, None])[..., 0].double().cpu().numpy()
        out += [
            np.concatenate([[np.nan], picked[i, : len(row) - 1]]) for i, row in enumerate(batch)
        ]
    return out
