"""The score pass: what the models of a training rank say about finished games."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from delta_belief_rl.belief.branched import (
    ScoreRequest,
    ScoreResult,
    plan_passes,
    score_batch,
    score_beliefs,
)
from delta_belief_rl.models.adapters import use_adapter
from delta_belief_rl.models.varlen import runs_ragged
from delta_belief_rl.trainer.actor_settings import BASE, POLICY, ActorSettings
from delta_belief_rl.trainer.critic import Critic
from delta_belief_rl.trainer.distil import TopScore, score_tops
from delta_belief_rl.trainer.learner import Learner
from delta_belief_rl.trainer.usage import UsageMeter
from delta_belief_rl.types import FloatArray

STAND_IN = ScoreRequest(token_ids=(0, 0), action_positions=np.ones(1, dtype=np.int64))
"""The game of a forward that a rank makes only because another rank has one more to make."""

WHOLE = sys.maxsize
"""Token budget of games that are one pass already."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class GameScore:
    """What the score pass found about one game.

    Attributes:
        logp: ``[sampled tokens]`` of the policy.
        entropy: Mean entropy of the policy at its sampled tokens, in nats.
        views: Log-probs of the same tokens by name, under other models and behind other contexts;
            NaN where the game does not have the context.
        beliefs: ``[k + 1]`` per belief model, in nats.
        values: ``[sampled tokens]``, the critic's; None without a critic.
        end_value: The critic's value of the state after the last reply.
        top: The likeliest tokens of a teacher that is distilled in full; None without one.
        columns: Further columns of ``TurnTable.tokens`` by name, ``[sampled tokens]`` each.
    """

    logp: FloatArray
    entropy: float
    views: Mapping[str, FloatArray]
    beliefs: Mapping[str, FloatArray]
    values: FloatArray | None = None
    end_value: float = 0.0
    top: TopScore | None = None
    columns: Mapping[str, FloatArray] = field(default_factory=dict[str, FloatArray])


@dataclass(frozen=True, slots=True)
class ScorePass:
    """Scores games on one rank; every call is a collective where there are several.

    Attributes:
        model: The rank's model.
        settings: What is asked of whom.
        device: Where the ranks agree.
        world_size: How many ranks there are.
        meter: Times the parts.
        critic: Gives values; None for none.
        learners: Give columns.
    """

    model: Any
    settings: ActorSettings
    device: torch.device
    world_size: int
    meter: UsageMeter
    critic: Critic | None = None
    learners: tuple[Learner, ...] = ()

    def __call__(self, games: Sequence[ScoreRequest]) -> list[GameScore]:
        """Log-probs of each game's own tokens, its beliefs and values, in the order of games.

        The policy's log-probs, its beliefs and the values of a critic that shares its hidden states
        come from one forward per micro-batch; each further model, context, critic or learner costs
        one more.
        """
        settings = self.settings
        plain = [replace(game, elicitation=None, belief_points=()) for game in games]
        asked = games if POLICY in settings.beliefs else plain
        score = partial(
            score_batch,
            self.model,
            max_tokens_per_pass=WHOLE,
            temperature=settings.temperature,
        )
        critic = self.critic
        shared = critic.head if critic is not None and not critic.settings.own else None
        own = self._passes(asked, partial(score, with_entropy=True, value_of=shared))
        beliefs: dict[str, list[FloatArray]] = {}
        for name in settings.beliefs:
            if name == POLICY:
                beliefs[name] = [result.beliefs for result in own]
            else:
                ask = partial(
                    score_beliefs, self.model, max_tokens_per_pass=WHOLE, belief_model=name
                )
                with self.meter.measure("belief_model"):
                    beliefs[name] = self._passes(games, ask)
        views: dict[str, list[FloatArray]] = {}
        for name in settings.views:
            with self.meter.measure("ref"), self._reading(name):
                results = self._passes(plain, score)
            views[name] = [result.logp for result in results]
        tops: list[TopScore | None] = [None] * len(games)
        for name, reader in settings.contexts:
            with self.meter.measure("views"), self._reading(reader):
                if settings.distil is not None and settings.distil.keeps_top(name):
                    ask = partial(score_tops, self.model, top_k=settings.distil.top_k)
                    tops = self._behind(name, games, partial(ask, temperature=settings.temperature))
                    views[name] = _logps(games, tops)
                else:
                    views[name] = _logps(games, self._behind(name, games, score))
        values = [result.values for result in own if result.values is not None]
        if critic is not None and critic.settings.own:
            with self.meter.measure("values"):
                values = self._passes(plain, critic.score)
        columns: list[dict[str, FloatArray]] = [{} for _ in games]
        for learner in self.learners:
            with self.meter.measure("learners"):
                for known, found in zip(columns, self._passes(plain, learner.score), strict=True):
                    known |= found
        return [
            GameScore(
                logp=result.logp,
                entropy=_mean(result.entropy),
                views={name: rows[index] for name, rows in views.items()},
                beliefs={name: rows[index] for name, rows in beliefs.items()},
                values=values[index][:-1] if values else None,
                end_value=float(values[index][-1]) if values else 0.0,
                top=tops[index],
                columns=columns[index],
            )
            for index, result in enumerate(own)
        ]

    def _behind(
        self,
        name: str,
        games: Sequence[ScoreRequest],
        score: Callable[[Sequence[ScoreRequest]], Sequence[Result]],
    ) -> list[Result | None]:
        """What is found behind one of the games' other contexts; None where a game has it not."""
        out: list[Result | None] = [None] * len(games)
        have = [index for index, game in enumerate(games) if name in game.views]
        asked = [games[index].views[name] for index in have]
        results = self._passes(
            [ScoreRequest(view.token_ids, view.action_positions) for view in asked], score
        )
        for index, result in zip(have, results, strict=True):
            out[index] = result
        return out

    def _reading(self, reader: str) -> AbstractContextManager[None]:
        """Use one of the models that a view can be asked of."""
        if reader == POLICY:
            return nullcontext()
        return use_adapter(self.model, None if reader == BASE else reader)

    def _passes(
        self,
        games: Sequence[ScoreRequest],
        score: Callable[[Sequence[ScoreRequest]], Sequence[Result]],
    ) -> list[Result]:
        """Score games in passes within the token budget, equally many on every rank.

        A sharded model needs every rank in every forward, so a rank with fewer passes than another
        makes up for them with a stand-in (A19).
        """
        lengths = [_num_tokens(game) for game in games]
        padded = not runs_ragged(self.model)
        parts = plan_passes(lengths, self.settings.score_tokens, padded)
        # Agreed before the first forward: later, this collective would meet another rank's forward.
        missing = self._most(len(parts)) - len(parts)
        results: dict[int, Result] = {}
        for part in parts:
            results.update(zip(part, score([games[index] for index in part]), strict=True))
        for _ in range(missing):
            score([STAND_IN])
        return [results[index] for index in range(len(games))]

    def _most(self, count: int) -> int:
        """The largest ``count`` of all ranks; a collective."""
        if self.world_size == 1:
            return count
        most = torch.tensor(count, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)


def _logps(
    games: Sequence[ScoreRequest], found: Sequence[ScoreResult | TopScore | None]
) -> list[FloatArray]:
    """Log-probs of each game's tokens, NaN where nothing was found."""
    return [
        np.full(len(game.action_positions), np.nan) if result is None else result.logp
        for game, result in zip(games, found, strict=True)
    ]


def _num_tokens(game: ScoreRequest) -> int:
    """Tokens of a game and of the guesses that hang on it."""
    if game.elicitation is None:
        return len(game.token_ids)
    asked = game.elicitation
    guesses = len(game.belief_points) * len(asked.branch_ids)
    return len(game.token_ids) + guesses + len(asked.lead_ids)


def _mean(values: FloatArray | None) -> float:
    return float(values.mean()) if values is not None and len(values) else 0.0
