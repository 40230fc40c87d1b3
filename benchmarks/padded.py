"""The update on padded rows: what packing is compared with.

Rows of a fixed number of games and of one width, logits at every position, one forward and backward
per such block. The loss itself is the trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch

from delta_belief_rl.algo.losses.policy import PolicyInputs
from delta_belief_rl.algo.losses.registry import LOSSES
from delta_belief_rl.trainer.actor import PolicyActor
from delta_belief_rl.trainer.optimizer import gradient_norm
from delta_belief_rl.types import IntArray, TrainBatch


def padded_update(
    actor: PolicyActor,
    batch: TrainBatch,
    denominators: Mapping[str, float],
    games_per_pass: int,
    width: int | None,
) -> tuple[float, float]:
    """One optimizer step.

    Args:
        width: Columns of every block; None means the longest game of the block.

    Returns:
        The loss and the gradient norm before clipping.
    """
    actor.model.train()
    actor.optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for block in blocks(batch, games_per_pass):
        loss = _loss(actor, batch.select(block), denominators, width)
        loss.backward()
        total += float(loss.detach())
    norm = gradient_norm(actor.optimizer, actor.settings.grad_clip)
    actor.optimizer.step()
    actor.optimizer.zero_grad(set_to_none=True)
    actor.model.eval()
    return total, norm


def blocks(batch: TrainBatch, games: int) -> list[IntArray]:
    """Consecutive games, in batch order."""
    return [
        np.arange(start, min(start + games, batch.num_games))
        for start in range(0, batch.num_games, games)
    ]


def padded_tokens(batch: TrainBatch, games: int, width: int | None) -> int:
    """Cells of all blocks."""
    lengths = batch.lengths()
    return sum(len(block) * (width or int(lengths[block].max())) for block in blocks(batch, games))


def _loss(
    actor: PolicyActor, batch: TrainBatch, denominators: Mapping[str, float], width: int | None
) -> torch.Tensor:
    settings = actor.settings
    lengths = batch.lengths()
    columns = width or int(lengths.max())
    ids = np.zeros((batch.num_games, columns), dtype=np.int64)
    for row, span in enumerate(batch.games()):
        ids[row, : lengths[row]] = batch.token_ids[span]
    tokens = torch.from_numpy(ids).to(actor.device)
    # Padding on the right is invisible to a causal model's earlier positions, so that no mask is
    # needed and the fast kernel runs.
    logits = actor.model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    logp = torch.log_softmax(logits / settings.temperature, dim=-1)
    picked = logp.gather(-1, tokens[:, 1:, None])[..., 0]
    index = np.flatnonzero((batch.turn_ids >= 0) & (batch.weight != 0))
    row_of = np.repeat(np.arange(batch.num_games), lengths)
    column = index - batch.offsets[row_of[index]]
    most = int(batch.turn_ids.max()) + 1
    there = partial(torch.as_tensor, device=actor.device)
    floats = partial(there, dtype=torch.float32)
    inputs = PolicyInputs(
        logp=picked[there(row_of[index]), there(column - 1)],
        old_logp=floats(batch.old_logp[index]),
        advantages=floats(batch.advantages[index]),
        weight=floats(batch.weight[index]),
        rows=there(row_of[index]),
        turns=there(row_of[index] * most + batch.turn_ids[index]),
        rollout_logp=floats(batch.rollout_logp[index]),
        old_is_new=settings.old_is_new,
    )
    return LOSSES[settings.loss_name](inputs, settings.loss, denominators)[0]
