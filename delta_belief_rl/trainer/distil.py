"""Distillation in the update: the teacher's likeliest tokens, and the term of the loss.

The teacher is read in the score pass, behind a view (``ScorePass``). With the forms ``sampled`` and
``gate`` its log-probs of the played tokens are all that is needed, and they travel like those of
any view. With ``top`` the score pass also keeps the teacher's likeliest tokens at each place, and
the update asks the policy for the same ones.

Legend: ``n`` places, ``k`` kept tokens, ``T`` positions of a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.checkpoint import checkpoint

from delta_belief_rl.algo.base import Credit
from delta_belief_rl.algo.chain import elements_of
from delta_belief_rl.algo.credit.distilling import Distillation, Distils
from delta_belief_rl.algo.losses.aggregate import Metrics
from delta_belief_rl.algo.losses.distil import DistilInputs, distil_loss
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.models.logprobs import hidden_states, output_logits
from delta_belief_rl.models.packed import PackSegment, pack
from delta_belief_rl.models.varlen import runs_ragged
from delta_belief_rl.types import FloatArray, TrainBatch, UserError

if TYPE_CHECKING:
    from delta_belief_rl.trainer.policy_terms import Scored

TOP_IDS, TOP_LOGP = "top:ids", "top:logp"
"""Names in ``TrainBatch.views``, ``[T, k]``."""


@dataclass(frozen=True, slots=True)
class TopScore:
    """What a teacher says at the places of one game's played tokens.

    Attributes:
        logp: ``[n]``, of the played tokens, in nats.
        ids: ``[n, k]`` int32, its likeliest tokens, falling.
        top_logp: ``[n, k]`` float32, theirs.
    """

    logp: FloatArray
    ids: NDArray[np.int32]
    top_logp: NDArray[np.float32]


def distillation_of(credit: Credit) -> Distillation | None:
    """How the methods of a chain distil; None where none does.

    Raises:
        UserError: Two of them do.
    """
    found = [part.distillation for part in elements_of(credit) if isinstance(part, Distils)]
    if len(found) > 1:
        raise UserError(
            "Two methods of algorithm.adv_estimator and algorithm.transforms distil; keep one."
        )
    return found[0] if found else None


# --- the teacher ----------------------------------------------------------------------------------


@torch.no_grad()
def score_tops(
    model: Any,
    games: Sequence[ScoreRequest],
    top_k: int,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> list[TopScore]:
    """Read games in one packed forward.

    Args:
        model: The model that is the teacher, its adapter chosen.
        games: Behind the teacher's context.
        top_k: Tokens to keep; a smaller vocabulary is kept whole.
        temperature: That of the sampler.
        chunk: Rows of logits that exist at one time.
    """
    if not games:
        return []
    packed = pack([PackSegment(game.token_ids) for game in games], model.device, runs_ragged(model))
    hidden = hidden_states(model, packed)
    sources = np.concatenate(
        [packed.trunk_sources(place, game.action_positions) for place, game in enumerate(games)]
    )
    played = np.concatenate(
        [np.asarray(game.token_ids, dtype=np.int64)[game.action_positions] for game in games]
    )
    head = model.get_output_embeddings()
    parts: list[tuple[torch.Tensor, ...]] = []
    for start in range(0, len(sources), chunk):
        places = torch.as_tensor(sources[start : start + chunk], device=hidden.device)
        wanted = torch.as_tensor(played[start : start + chunk], device=hidden.device)
        logp = torch.log_softmax(output_logits(head, hidden[places]) / temperature, dim=-1)
        best = logp.topk(min(top_k, logp.shape[-1]), dim=-1)
        parts.append((logp.gather(-1, wanted[:, None])[:, 0], best.indices, best.values))
    if not parts:
        none = np.zeros((0, top_k), dtype=np.float32)
        return [TopScore(np.zeros(0), none.astype(np.int32), none) for _ in games]
    logp, ids, top = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    ends = np.cumsum([len(game.action_positions) for game in games])[:-1]
    columns = (logp.double().numpy(), ids.to(torch.int32).numpy(), top.float().numpy())
    cut = [np.split(column, ends) for column in columns]
    return [TopScore(*rows) for rows in zip(*cut, strict=True)]


def with_tops(batch: TrainBatch, tops: Sequence[TopScore | None]) -> TrainBatch:
    """The batch with the teacher's likeliest tokens at the sampled positions.

    Args:
        batch: The games.
        tops: Of each game, in order; None where it has no teacher.
    """
    width = next((top.ids.shape[1] for top in tops if top is not None), 0)
    if not width:
        return batch
    sampled = batch.turn_ids >= 0
    # Half as wide as other numbers, because there are k times as many; ids below 2^24 are exact.
    ids, logp = (np.zeros((len(sampled), width), dtype=np.float32) for _ in range(2))
    for span, top in zip(batch.games(), tops, strict=True):
        if top is not None:
            where = np.flatnonzero(sampled[span]) + span.start
            ids[where], logp[where] = top.ids, top.top_logp
    views: dict[str, Any] = {**batch.views, TOP_IDS: ids, TOP_LOGP: logp}
    return replace(batch, views=views)


# --- the update -----------------------------------------------------------------------------------


def distil_term(
    how: Distillation, temperature: float, scored: Scored, old_is_new: bool = False
) -> tuple[torch.Tensor, Metrics]:
    """The term of a micro-batch, its coefficient included; see ``losses.distil``.

    Args:
        how: What is asked.
        temperature: That of the sampler.
        scored: The micro-batch.
        old_is_new: The policy before the update is the current one, so that no ratio differs from 1
            by rounding.
    """
    batch = scored.batch
    old = scored.scores.logp.detach() if old_is_new else scored.column(batch.old_logp)
    top_logp = top_teacher = None
    if how.form == "top":
        top_logp, top_teacher = _both_tops(temperature, scored)
    inputs = DistilInputs(
        logp=scored.scores.logp,
        teacher=scored.column(batch.views[how.view]),
        old_logp=old,
        weight=scored.column(batch.views["distil"]),
        top_logp=top_logp,
        top_teacher=top_teacher,
    )
    return distil_loss(inputs, how, scored.denominators)


def _both_tops(temperature: float, scored: Scored) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the teacher's likeliest tokens: the policy's and its own, ``[n, k]``."""
    views, index = scored.batch.views, scored.index
    if TOP_IDS not in views:
        # No game of the whole step has a teacher, so no token has weight.
        blank = scored.scores.logp.new_zeros((len(index), 1))
        return blank, blank
    device = scored.hidden.device
    ids = torch.as_tensor(views[TOP_IDS][index].astype(np.int64), device=device)
    teacher = torch.as_tensor(views[TOP_LOGP][index], dtype=torch.float32, device=device)
    places = torch.as_tensor(index - 1, device=device)
    return chosen_logprobs(scored.head, scored.hidden, places, ids, temperature), teacher


def chosen_logprobs(
    head: torch.nn.Module,
    hidden: torch.Tensor,
    places: torch.Tensor,
    ids: torch.Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> torch.Tensor:
    """Log-probs of several tokens at each place, ``[n, k]`` float32, differentiable.

    Args:
        head: The model's output layer.
        hidden: ``[T, hidden]`` of a packed row.
        places: ``[n]``, where in it the tokens are predicted.
        ids: ``[n, k]``, the tokens.
        temperature: Logits are divided by it.
        chunk: Rows of logits that exist at one time; each chunk is computed again in the backward
            pass.
    """
    score = partial(_chosen, head, temperature)
    parts: list[torch.Tensor] = []
    for start in range(0, len(places), chunk):
        rows = hidden.index_select(0, places[start : start + chunk])
        wanted = ids[start : start + chunk]
        if torch.is_grad_enabled() and rows.requires_grad:
            parts.append(checkpoint(score, rows, wanted, use_reentrant=False))  # type: ignore[arg-type]
        else:
            parts.append(score(rows, wanted))
    return torch.cat(parts) if parts else hidden.new_zeros(ids.shape, dtype=torch.float32)


def _chosen(
    head: torch.nn.Module, temperature: float, rows: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    logits = output_logits(head, rows) / temperature
    return logits.gather(-1, ids) - torch.logsumexp(logits, dim=-1, keepdim=True)
