"""A masked denoiser as the policy that is trained; the same methods as ``PolicyActor``.

The score pass asks the policy again for every step of every answer (``models.denoising``): it gives
the log-prob of each token at its own step, and the columns that credit may ask for (``COLUMNS``).
The update does the same with gradients, so importance ratios are those of a token given the state
in which it was said. All weights are trained and are what is sent to the engine.

One rank only: a denoiser is not sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from delta_belief_rl.algo.losses.aggregate import Metrics, merge_metrics
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.models.adapters import state_checksum
from delta_belief_rl.models.denoiser import (
    DenoiserConfig,
    denoiser_state,
    load_denoiser,
    load_denoiser_state,
    token_logps,
)
from delta_belief_rl.models.denoising import (
    Trace,
    TraceScore,
    block_logits,
    score_traces,
    states_before,
)
from delta_belief_rl.models.logprobs import TokenScores
from delta_belief_rl.trainer.actor import AdapterSnapshot
from delta_belief_rl.trainer.actor_settings import ActorSettings
from delta_belief_rl.trainer.optimizer import (
    build_optimizer,
    gradient_norm,
    learning_rate,
    set_learning_rate,
    update_figures,
)
from delta_belief_rl.trainer.policy_terms import Scored, loss_terms
from delta_belief_rl.trainer.scoring import GameScore
from delta_belief_rl.trainer.usage import UPDATE, RankUsage, UsageMeter
from delta_belief_rl.types import BoolArray, FloatArray, IntArray, TrainBatch, UserError

COLUMNS = ("tokens:gain", "tokens:commit_entropy", "tokens:commit_step", "tokens:category")
"""Columns of the turn table that a denoiser's score pass fills."""
STEP = "commit_step"
"""The view of a training batch that holds the step of each token."""


class DenoiserActor:
    """The one training rank of a denoiser.

    Args:
        settings: As of any policy; adapters, beliefs, views, a critic and learners have no meaning.
        rank: 0.
        world_size: 1.

    Raises:
        UserError: There is another rank, or the model cannot be loaded.
    """

    def __init__(self, settings: ActorSettings, rank: int = 0, world_size: int = 1) -> None:
        if world_size != 1:
            raise UserError(
                f"A masked denoiser is trained on one rank, not on {world_size}: set "
                "actor_rollout_ref.ngpus to 0 or 1."
            )
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.rank, self.world_size = rank, world_size
        self.device = torch.device(settings.device)
        self.version = 0
        self.model = load_denoiser(settings.model_path, self.device)
        self.optimizer = build_optimizer(self.model.parameters(), settings.optimizer)
        self._meter = UsageMeter(self.device)
        self._terms = loss_terms(settings)
        self._size = sum(parameter.numel() for parameter in self.model.parameters())

    # --- scoring ---------------------------------------------------------------------------------

    def score(self, games: Sequence[ScoreRequest]) -> list[GameScore]:
        """Log-probs of each game's own tokens at their own steps, and ``COLUMNS``."""
        per_game = [_traces(np.asarray(g.token_ids), g.action_positions, g.order) for g in games]
        flat = [trace for traces in per_game for trace in traces]
        for trace in flat:
            trace.check(self.model.config)
        scores: Iterator[TraceScore] = iter(())
        if flat:
            rows = self._max_rows()
            scores = iter(score_traces(self.model, flat, self.settings.temperature, rows))
        return [self._game(traces, [next(scores) for _ in traces]) for traces in per_game]

    def _game(self, traces: Sequence[Trace], scores: Sequence[TraceScore]) -> GameScore:
        def joined(name: str) -> FloatArray:
            return np.concatenate([np.zeros(0), *(getattr(score, name) for score in scores)])

        entropy = joined("entropy")
        order = np.concatenate([np.zeros(0), *(np.array(t.order, dtype=float) for t in traces)])
        return GameScore(
            logp=joined("logp"),
            entropy=float(entropy.mean()) if len(entropy) else 0.0,
            views={STEP: order},
            beliefs={},
            columns={
                "gain": joined("gain"),
                "commit_entropy": entropy,
                "commit_step": order,
                "category": joined("category"),
            },
        )

    def probe(self, token_ids: Sequence[int]) -> FloatArray:
        """Log-prob of each token of a fixed text where it alone is masked, but the first one's."""
        return token_logps(self.model, token_ids)[1:]

    # --- updating --------------------------------------------------------------------------------

    def update(
        self,
        steps: Sequence[tuple[Sequence[TrainBatch | None], Mapping[str, float]]],
        training_step: int,
    ) -> dict[str, tuple[float, float]]:
        """Run the optimizer steps of one training step; see ``PolicyActor.update``."""
        with self._meter.measure(UPDATE):
            return self._update(steps, training_step)

    def usage(self) -> RankUsage:
        """Time, operations and memory since the last call."""
        return self._meter.drain()

    def _update(
        self,
        steps: Sequence[tuple[Sequence[TrainBatch | None], Mapping[str, float]]],
        training_step: int,
    ) -> dict[str, tuple[float, float]]:
        rate = learning_rate(self.settings.optimizer, training_step)
        set_learning_rate(self.optimizer, rate)
        parts: list[Metrics] = []
        norms: list[float] = []
        for micro_batches, denominators in steps:
            self.optimizer.zero_grad(set_to_none=True)
            parts += [self._backward(b, denominators) for b in micro_batches if b is not None]
            norm = gradient_norm(self.optimizer, self.settings.grad_clip)
            norms.append(norm)
            if np.isfinite(norm):
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += bool(steps)
        merged = {name: (float(s), float(n)) for name, (s, n) in merge_metrics(parts).items()}
        told = update_figures(norms, rate)
        return merged | told | {"actor/empty_updates": (float(not steps), 1.0)}

    def _backward(self, batch: TrainBatch, denominators: Mapping[str, float]) -> Metrics:
        """Forward and backward of a micro-batch; without anything to train it does nothing."""
        index = self._trained(batch)
        if not len(index):
            return {}
        scores = self._scores(batch, index)
        nothing, none = torch.zeros(0, device=self.device), nn.Identity()
        scored = Scored.of(batch, index, nothing, none, scores, denominators)
        total = torch.zeros((), device=self.device)
        metrics: Metrics = {}
        for term in self._terms:
            loss, found = term(scored)
            total = total + loss
            metrics |= found
        total.backward()
        return metrics

    def _trained(self, batch: TrainBatch) -> IntArray:
        """Positions of the tokens that the loss sees: whole games, because it counts in units.

        A game without any advantage has no policy loss; where nothing else is trained, its
        forwards are saved.
        """
        used = (batch.turn_ids >= 0) & (batch.weight != 0)
        game = np.repeat(np.arange(batch.num_games), batch.lengths())
        used &= np.isin(game, game[used & self._learns(batch)])
        return np.flatnonzero(used).astype(np.int64)

    def _learns(self, batch: TrainBatch) -> BoolArray:
        """Tokens whose own log-prob or entropy has a gradient, ``[T]``."""
        return (batch.advantages != 0) | bool(self.settings.entropy_coeff)

    def _scores(self, batch: TrainBatch, index: IntArray) -> TokenScores:
        """Log-probs and entropies of some tokens at their own steps, ``[n]``.

        Every step is a row of a forward, so a micro-batch is far more than its tokens: rows are
        asked in parts of about as many tokens as it has, and only one part is kept for the
        backward pass at a time. A row in which no token learns has no gradient.
        """
        traces, places = batch_traces(batch)
        asked = [places[position] for position in index.tolist()]
        learns = self._learns(batch)[index]
        size = rows_at_once(batch, traces, self.model.config)
        parts = step_parts(traces, asked, learns, size)
        found: list[Tensor] = []
        for tokens in parts:
            some = [asked[token] for token in tokens]
            if not learns[tokens].any():
                with torch.no_grad():
                    found.append(self._said(traces, some, 2.0))
            elif len(parts) == 1:
                found.append(self._said(traces, some, 6.0))
            else:
                found.append(self._said_again(traces, some))
        order = np.argsort(np.concatenate(parts)).tolist()
        logp, entropy = torch.cat(found, dim=1)[:, self._ids(order)]
        return TokenScores(logp=logp, entropy=entropy)

    def _said_again(self, traces: Sequence[Trace], asked: Sequence[tuple[int, int]]) -> Tensor:
        """As ``_said``, asked a second time when its gradient is wanted."""
        costs = iter((6.0, 0.0))  # the second time is not counted

        def said() -> Tensor:
            return self._said(traces, asked, next(costs))

        return cast(Tensor, checkpoint(said, use_reentrant=False, preserve_rng_state=False))

    def _said(
        self, traces: Sequence[Trace], asked: Sequence[tuple[int, int]], cost: float
    ) -> Tensor:
        """Log-probs and entropies of some tokens in one forward, ``[2, n]``.

        Args:
            traces: The answers.
            asked: Answer and place of each token.
            cost: Operations of a weight and token.
        """
        steps = [(number, traces[number].order[place]) for number, place in asked]
        rows = sorted(set(steps))
        row_of = {row: at for at, row in enumerate(rows)}
        states = states_before(traces, rows, self.model.config, self.device)
        logits = block_logits(self.model, states) / self.settings.temperature
        self._meter.add_flops(cost * self._size * states.ids.numel())
        at, where = [row_of[step] for step in steps], [place for _, place in asked]
        chosen = logits[self._ids(at), self._ids(where)].log_softmax(-1)
        tokens = self._ids([traces[number].tokens[place] for number, place in asked])
        logp = chosen.gather(-1, tokens[:, None])[:, 0]
        return torch.stack([logp, -(chosen.exp() * chosen).sum(-1)])

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _max_rows(self) -> int:
        return max(1, self.settings.score_tokens // self.model.config.max_position_embeddings)

    # --- weights and state -----------------------------------------------------------------------

    def snapshot(self) -> AdapterSnapshot:
        """All weights as owned arrays."""
        state = denoiser_state(self.model)
        return AdapterSnapshot(state=state, version=self.version, checksum=state_checksum(state))

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {
            "version": self.version,
            "adapter": dict(self.snapshot().state),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()``; one without an optimizer leaves that as it is.

        Raises:
            UserError: The state is that of another model.
        """
        load_denoiser_state(self.model, state["adapter"])
        self.version = int(state["version"])
        if state.get("optimizer") is not None:
            self.optimizer.load_state_dict(state["optimizer"])

    def barrier(self) -> None:
        """There is no other rank."""


def rows_at_once(batch: TrainBatch, traces: Sequence[Trace], config: DenoiserConfig) -> int:
    """Rows of one forward that have no more tokens than the batch, which keeps to a budget."""
    longest = max(len(trace.prompt) for trace in traces) + config.answer_length
    return max(1, len(batch.token_ids) // longest)


def step_parts(
    traces: Sequence[Trace], asked: Sequence[tuple[int, int]], learns: BoolArray, size: int
) -> list[IntArray]:
    """Numbers of the tokens of each forward.

    Tokens of one step are in one part, and parts in which some token learns have no other steps.

    Args:
        traces: The answers.
        asked: Answer and place of each token.
        learns: ``[n]``.
        size: Most steps of a part.
    """
    steps: dict[tuple[int, int], list[int]] = {}
    for token, (number, place) in enumerate(asked):
        steps.setdefault((number, traces[number].order[place]), []).append(token)
    lively = [tokens for _, tokens in sorted(steps.items()) if learns[tokens].any()]
    silent = [tokens for _, tokens in sorted(steps.items()) if not learns[tokens].any()]
    return [
        np.concatenate([np.array(tokens, dtype=np.int64) for tokens in some[first : first + size]])
        for some in (lively, silent)
        for first in range(0, len(some), size)
    ]


def batch_traces(batch: TrainBatch) -> tuple[list[Trace], dict[int, tuple[int, int]]]:
    """The answers of a training batch, and of each sampled position its answer and place."""
    traces: list[Trace] = []
    places: dict[int, tuple[int, int]] = {}
    steps = batch.views[STEP]
    for span in batch.games():
        positions = np.flatnonzero(batch.turn_ids[span] >= 0)
        order = steps[span][positions].astype(np.int64).tolist()
        found = _traces(batch.token_ids[span], positions, order, batch.turn_ids[span][positions])
        for trace in found:
            first = span.start + len(trace.prompt)
            places |= {first + i: (len(traces), i) for i in range(len(trace.tokens))}
            traces.append(trace)
    return traces, places


def _traces(
    ids: np.ndarray, positions: np.ndarray, order: Sequence[int], turns: np.ndarray | None = None
) -> list[Trace]:
    """The answers of a game.

    Args:
        ids: Its stream.
        positions: Of the sampled tokens.
        order: The step of each.
        turns: The turn of each; None where a gap in the stream parts them, as a reply does.

    Raises:
        ValueError: Some token has no step.
    """
    if len(order) != len(positions):
        raise ValueError(f"{len(positions)} tokens were said at {len(order)} steps")
    if not len(positions):
        return []
    parted = np.diff(positions) != 1
    if turns is not None:
        parted |= np.diff(turns) != 0
    cuts = np.flatnonzero(parted) + 1
    return [
        Trace(
            prompt=tuple(ids[: some[0]].tolist()),
            tokens=tuple(ids[some].tolist()),
            order=tuple(order[at : at + len(some)]),
        )
        for at, some in zip([0, *cuts.tolist()], np.split(positions, cuts), strict=True)
    ]
