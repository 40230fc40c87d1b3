"""A small Qwen3 model to be warmed up, and the loss of one batch of teacher games.

Legend: ``B`` games, ``L`` tokens, ``H`` hidden size, ``V`` vocabulary, ``R`` turns, ``N`` trained
tokens, ``P`` properties, ``A`` actions, ``M`` nodes of the action tree, ``S`` things.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from delta_belief_rl.trainer.warmup.actions import Actions
from delta_belief_rl.trainer.warmup.games import GameBatch
from delta_belief_rl.types import IntArray

_NARROW = 16
"""Nodes with more children are computed apart, so that the others need no wide tables."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of the embedded agent; the default has about 0.9 million parameters."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 384
    max_positions: int = 1024


def build_model(
    sizes: ModelSizes, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Qwen3ForCausalLM:
    """A Qwen3 model in float32 with scaled initialisation, a function of ``seed`` alone."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.max_positions,
        tie_word_embeddings=True,
        pad_token_id=cast(int, tokenizer.pad_token_id),
        eos_token_id=cast(int, tokenizer.eos_token_id),
        bos_token_id=None,
        use_cache=True,
    )
    model = Qwen3ForCausalLM(config)
    _initialise(model, sizes.layers, seed)
    return model.float()


def _initialise(model: Qwen3ForCausalLM, layers: int, seed: int) -> None:
    """Embeddings 0.12, matrices one over the root of their inputs, residual outputs smaller with
    depth."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                continue
            std = 0.12 if "embed_tokens" in name else 1.0 / math.sqrt(weight.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * layers)
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)


@dataclass(frozen=True, slots=True)
class ActionTensors:
    """The action tree on the training device; ``width [M]`` stays on the host."""

    property_of: Tensor
    thing_of: Tensor
    wording: Tensor
    children: Tensor
    child_tokens: Tensor
    first: Tensor
    last: Tensor
    width: IntArray

    @classmethod
    def place(cls, actions: Actions, device: torch.device) -> ActionTensors:
        """Copy the tree to a device."""
        return cls(
            property_of=torch.from_numpy(actions.property_of).to(device),
            thing_of=torch.from_numpy(actions.thing_of).to(device),
            wording=torch.from_numpy(actions.wording).to(device),
            children=torch.from_numpy(actions.children).to(device),
            child_tokens=torch.from_numpy(actions.child_tokens).to(device),
            first=torch.from_numpy(actions.first).to(device),
            last=torch.from_numpy(actions.last).to(device),
            width=(actions.children >= 0).sum(axis=1),
        )

    def cumulative(self, ask: Tensor, guess: Tensor) -> Tensor:
        """Probability of the actions before each one, ``[R, P], [R, S] -> [R, A + 1]`` in float64.

        The mass below a node is a difference of two entries.
        """
        asked = ask[:, self.property_of.clamp(min=0)]
        guessed = guess[:, self.thing_of.clamp(min=0)]
        action = torch.where(self.property_of >= 0, asked, guessed).double() * self.wording
        return functional.pad(action.cumsum(1), (1, 0))


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Means over their own counts, in nats. ``loss`` is the one to differentiate."""

    loss: Tensor
    policy_kl: Tensor
    """From the teacher's exact next-token distribution, per trained token."""
    posterior_kl: Tensor
    """From the exact posterior over things, per turn."""


def backbone(model: PreTrainedModel) -> nn.Module:
    """The part below the language-model head, adapters included."""
    adapted = getattr(model, "get_base_model", None)
    inner: Any = model if adapted is None else adapted()
    return inner.base_model


def batch_loss(
    model: PreTrainedModel,
    head: nn.Linear | None,
    tree: ActionTensors,
    batch: GameBatch,
    device: torch.device,
    aux_weight: float,
    autocast: bool = False,
) -> LossTerms:
    """Loss of a batch of games.

    Every trained token has the teacher's exact next-token distribution as its target; ``head``
    reads the posterior over things where the agent is about to speak. Padding stands on the right,
    where a causal model cannot see it from the trained positions.

    Args:
        head: Linear ``H -> S``, or None to leave the posterior out.
        aux_weight: Weight of the posterior term.
        autocast: Compute in bfloat16 where torch does so.
    """
    ids = _to(batch.token_ids, device)
    turn_game, turn_start = _to(batch.turn_game, device), _to(batch.turn_start, device)
    consistent = _to(batch.consistent, device).float()
    posterior = consistent / consistent.sum(1, keepdim=True)
    rate = _to(batch.guess_rate, device).float()
    before = tree.cumulative(_to(batch.ask, device), posterior * rate[:, None])
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
        guess = head(hidden[turn_game, turn_start - 1]) if head is not None else None
    unembed = cast(nn.Module, model.get_output_embeddings())
    total = torch.zeros((), device=device)
    wide = tree.width[batch.token_node] > _NARROW
    for chosen in (np.flatnonzero(~wide), np.flatnonzero(wide)):
        if not len(chosen):
            continue
        turn = batch.token_turn[chosen]
        rows, columns = batch.turn_game[turn], batch.token_column()[chosen] - 1
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits = unembed(hidden[_to(rows, device), _to(columns, device)])
        node = batch.token_node[chosen]
        width = int(tree.width[node].max())
        total = total + _tree_kl(
            logits.float(), tree, before, _to(turn, device), _to(node, device), width
        )
    policy_kl = total / len(batch.token_turn)
    if guess is None:
        return LossTerms(policy_kl, policy_kl.detach(), torch.zeros((), device=device))
    log_left = consistent.sum(1).log()
    cross = -(posterior * functional.log_softmax(guess.float(), dim=-1)).sum(1)
    posterior_kl = (cross - log_left).mean()
    return LossTerms(
        policy_kl + aux_weight * posterior_kl, policy_kl.detach(), posterior_kl.detach()
    )


def _tree_kl(
    logits: Tensor, tree: ActionTensors, before: Tensor, turn: Tensor, node: Tensor, width: int
) -> Tensor:
    """Summed KL of the model from the shares of a node's children, over some tokens."""
    children = tree.children[node, :width]
    child = children.clamp(min=0)
    mass = before[turn[:, None], tree.last[child]] - before[turn[:, None], tree.first[child]]
    # A difference of sums: what is smaller than any real probability is rounding.
    mass = torch.where((children >= 0) & (mass > 1e-12), mass, 0.0)
    target = (mass / mass.sum(1, keepdim=True)).float()
    scores = logits.gather(1, tree.child_tokens[node, :width]) - logits.logsumexp(1, keepdim=True)
    return (target * (target.clamp(min=1e-30).log() - scores)).sum()


def _to(array: NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
