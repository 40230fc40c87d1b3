"""The loss of the policy as a list of terms, each a function of one packed forward.

``loss_terms`` is the list. A term takes what the forward said about the trained tokens of a
micro-batch (``Scored``) and gives its share of the loss, coefficient included, and its metrics as
(sum, count). The shares are divided by counts over the whole optimizer step
(``losses.aggregate``), so the loss does not depend on how the step is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from delta_belief_rl.algo.losses.aggregate import Metrics
from delta_belief_rl.algo.losses.entropy import entropy_loss
from delta_belief_rl.algo.losses.kl import kl_loss
from delta_belief_rl.algo.losses.policy import PolicyInputs
from delta_belief_rl.algo.losses.registry import LOSSES
from delta_belief_rl.models.logprobs import TokenScores
from delta_belief_rl.trainer.actor_settings import BASE, ActorSettings
from delta_belief_rl.trainer.distil import distil_term
from delta_belief_rl.types import FloatArray, IntArray, TrainBatch


@dataclass(frozen=True, slots=True)
class Scored:
    """The trained tokens of one micro-batch; tensors are ``[n]``.

    Attributes:
        batch: The games.
        index: ``[n]``, positions of the tokens in the batch and in the packed row.
        hidden: ``[T, hidden]``, of the packed row; the token at ``index`` is predicted by
            ``index - 1``.
        head: The model's output layer, for terms that ask for other tokens than the sampled ones.
        scores: Log-probs and entropies, with gradient.
        weight: Of each token.
        rows: Its game.
        turns: Its turn, distinct over the games of the batch.
        denominators: Global counts.
    """

    batch: TrainBatch
    index: IntArray
    hidden: torch.Tensor
    head: torch.nn.Module
    scores: TokenScores
    weight: torch.Tensor
    rows: torch.Tensor
    turns: torch.Tensor
    denominators: Mapping[str, float]

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        index: IntArray,
        hidden: torch.Tensor,
        head: torch.nn.Module,
        scores: TokenScores,
        denominators: Mapping[str, float],
    ) -> Scored:
        """Number the games and turns of the trained tokens."""
        row_of = np.repeat(np.arange(batch.num_games), batch.lengths())[index]
        width = int(batch.turn_ids.max()) + 1
        where = scores.logp.device
        return cls(
            batch=batch,
            index=index,
            hidden=hidden,
            head=head,
            scores=scores,
            weight=torch.as_tensor(batch.weight[index], dtype=torch.float32, device=where),
            rows=torch.as_tensor(row_of, device=where),
            turns=torch.as_tensor(row_of * width + batch.turn_ids[index], device=where),
            denominators=denominators,
        )

    def column(self, values: FloatArray) -> torch.Tensor:
        """Numbers of all tokens of the batch, ``[T]``, at the trained ones, float32."""
        return torch.as_tensor(
            values[self.index], dtype=torch.float32, device=self.scores.logp.device
        )


Term = Callable[[Scored], tuple[torch.Tensor, Metrics]]


def loss_terms(settings: ActorSettings) -> tuple[Term, ...]:
    """The terms of the policy's loss, in the order in which they are added."""
    terms: list[Term] = [partial(policy_term, settings), partial(entropy_term, settings)]
    if settings.kl_coef:
        terms.append(partial(kl_term, settings))
    if settings.distil is not None:
        ask = partial(distil_term, settings.distil, settings.temperature)
        terms.append(partial(ask, old_is_new=settings.old_is_new))
    return tuple(terms)


def policy_term(settings: ActorSettings, scored: Scored) -> tuple[torch.Tensor, Metrics]:
    """The policy loss on the advantages."""
    batch = scored.batch
    inputs = PolicyInputs(
        logp=scored.scores.logp,
        old_logp=scored.column(batch.old_logp),
        advantages=scored.column(batch.advantages),
        weight=scored.weight,
        rows=scored.rows,
        turns=scored.turns,
        rollout_logp=scored.column(batch.rollout_logp),
        old_is_new=settings.old_is_new,
    )
    return LOSSES[settings.loss_name](inputs, settings.loss, scored.denominators)


def entropy_term(settings: ActorSettings, scored: Scored) -> tuple[torch.Tensor, Metrics]:
    """The entropy bonus; its metric is there without it, too."""
    assert scored.scores.entropy is not None
    bonus, metrics = entropy_loss(
        scored.scores.entropy,
        scored.weight,
        scored.rows,
        settings.loss.loss_agg_mode,
        scored.denominators,
        scored.turns,
    )
    if not settings.entropy_coeff:
        return torch.zeros_like(bonus), metrics
    return settings.entropy_coeff * bonus, metrics


def kl_term(settings: ActorSettings, scored: Scored) -> tuple[torch.Tensor, Metrics]:
    """Divergence from the policy without its adapter."""
    loss, metrics = kl_loss(
        scored.scores.logp,
        scored.column(scored.batch.views[BASE]),
        scored.weight,
        scored.rows,
        settings.kl_type,
        settings.loss.loss_agg_mode,
        scored.denominators,
        scored.turns,
    )
    return settings.kl_coef * loss, metrics
