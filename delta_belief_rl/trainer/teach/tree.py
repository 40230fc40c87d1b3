"""A batch of prompts that begin alike, run as one row in which every common beginning stands once.

Prompts of a judge share their rules, and those about one secret also what follows up to the
question. The row holds the rules once, then one *opening* for each group of prompts, then one
*branch* for each prompt: its last tokens and the answer. Attention lets a branch see the rules, its
group's opening and itself, so every token is computed as in its own whole prompt.

Legend: ``R`` tokens of the rules, ``S`` groups, ``W`` tokens of the longest opening, ``K`` prompts
of a group, ``Q`` tokens of the longest branch, ``T = R + S * W + S * K * Q``, ``H`` heads, ``D``
head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from delta_belief_rl.types import IntArray

TREE_ATTENTION = "delta_belief_tree"


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How a row is cut; ``opened [S]`` are the lengths of the openings without padding."""

    rules: int
    groups: int
    opening: int
    prompts: int
    branch: int
    opened: Tensor


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """One row and what is trained on.

    Attributes:
        input_ids: ``[1, T]``; padding is 0.
        position_ids: ``[1, T]``, those of the whole prompts.
        sources: ``[S * K * A]``, positions of the row that predict an answer's tokens; first those
            of every prompt's first answer token.
        targets: ``[S * K * A]``, these tokens.
        ends: ``[S]``, where the openings end in the row.
    """

    input_ids: Tensor
    position_ids: Tensor
    shape: TreeShape
    sources: Tensor
    targets: Tensor
    ends: Tensor

    def to(self, device: torch.device) -> TreeBatch:
        """The same on another device."""
        return TreeBatch(
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            shape=replace(self.shape, opened=self.shape.opened.to(device)),
            sources=self.sources.to(device),
            targets=self.targets.to(device),
            ends=self.ends.to(device),
        )


def tree_batch(
    groups: Sequence[Sequence[tuple[tuple[int, ...], tuple[int, ...]]]],
) -> TreeBatch:
    """Lay out prompts with their answers, on the CPU.

    Args:
        groups: ``S`` groups of ``K`` (prompt, answer) pairs each, as token ids.

    Raises:
        ValueError: Groups differ in size, or a prompt or an answer is too short to be cut.
    """
    count = len(groups[0])
    if not count or any(len(group) != count for group in groups):
        raise ValueError("all groups of a batch need the same number of prompts, at least one")
    begins = [_common([prompt for prompt, _ in group]) for group in groups]
    # Whatever is shared, an opening and a branch keep a token of their own.
    begins = [
        min(begin, *(len(prompt) - 1 for prompt, _ in group))
        for begin, group in zip(begins, groups, strict=True)
    ]
    firsts = [group[0][0] for group in groups]
    rules = min(_common(firsts), min(begins) - 1)
    if rules < 1 or any(not answer for group in groups for _, answer in group):
        raise ValueError("a prompt needs at least three tokens, and an answer one")
    opening = max(begins) - rules
    branch = max(
        len(prompt) - begin + len(answer) - 1
        for begin, group in zip(begins, groups, strict=True)
        for prompt, answer in group
    )
    total = rules + len(groups) * (opening + count * branch)
    ids, positions = (np.zeros(total, dtype=np.int64) for _ in range(2))
    ids[:rules], positions[:rules] = firsts[0][:rules], np.arange(rules)
    found: list[tuple[int, int, int]] = []
    for number, (begin, group) in enumerate(zip(begins, groups, strict=True)):
        at = rules + number * opening
        ids[at : at + begin - rules] = group[0][0][rules:begin]
        positions[at : at + opening] = rules + np.arange(opening)
        for place, (prompt, answer) in enumerate(group):
            at = rules + len(groups) * opening + (number * count + place) * branch
            own = (*prompt[begin:], *answer[:-1])
            ids[at : at + len(own)] = own
            positions[at : at + branch] = begin + np.arange(branch)
            last = at + len(prompt) - begin - 1
            found += [(order, last + order, token) for order, token in enumerate(answer)]
    found.sort(key=lambda entry: entry[0])

    def as_tensor(values: IntArray | list[int]) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64))

    return TreeBatch(
        input_ids=as_tensor(ids)[None],
        position_ids=as_tensor(positions)[None],
        shape=TreeShape(
            rules,
            len(groups),
            opening,
            count,
            branch,
            as_tensor([begin - rules for begin in begins]),
        ),
        sources=as_tensor([source for _, source, _ in found]),
        targets=as_tensor([target for _, _, target in found]),
        ends=as_tensor([begin - 1 + number * opening for number, begin in enumerate(begins)]),
    )


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: TreeShape | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one row, ``[1, H, T, D] -> [1, T, H, D]``; keys and values may have fewer heads.

    Padding stands behind whatever could see it, or is masked.
    """
    assert tree is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    repeats = query.shape[1] // key.shape[1]
    rows = [query[0] * scale, *(x[0].repeat_interleave(repeats, dim=0) for x in (key, value))]
    (asked, *rules), (asked_s, *openings), (asked_k, *branches) = zip(
        *(_cut(row, tree) for row in rows), strict=True
    )
    hidden = torch.arange(tree.opening, device=query.device) >= tree.opened[:, None, None, None]
    own = [_causal(length, query.device) for length in (tree.rules, tree.opening, tree.branch)]
    parts = [
        _attend(asked, [(*rules, own[0])]),
        _attend(asked_s, [(*rules, None), (*openings, own[1])]),
        _attend(asked_k, [(*rules, None), (*openings, hidden), (*branches, own[2])]),
    ]
    heads, _, width = rows[0].shape
    out = torch.cat([part.reshape(heads, -1, width) for part in parts], dim=1)
    return out.transpose(0, 1)[None], None


def _cut(row: Tensor, tree: TreeShape) -> tuple[Tensor, Tensor, Tensor]:
    """``[H, T, D]`` to rules ``[H, R, D]``, openings ``[H, S, W, D]`` and branches
    ``[H, S, K, Q, D]``."""
    heads, _, width = row.shape
    end = tree.rules + tree.groups * tree.opening
    return (
        row[:, : tree.rules],
        row[:, tree.rules : end].reshape(heads, tree.groups, tree.opening, width),
        row[:, end:].reshape(heads, tree.groups, tree.prompts, tree.branch, width),
    )


def _attend(query: Tensor, seen: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> Tensor:
    """One softmax over blocks of keys, values and, where a key is hidden, true.

    Keys have the query's first axes, or fewer of them; queries that differ in the others see the
    same keys and stand side by side in one product.
    """
    scores: list[Tensor] = []
    for key, _, hidden in seen:
        score = query.reshape(*key.shape[:-2], -1, key.shape[-1]) @ key.transpose(-1, -2)
        score = score.reshape(*query.shape[:-1], key.shape[-2])
        scores.append(score if hidden is None else score.masked_fill(hidden, float("-inf")))
    weights = torch.cat(scores, dim=-1).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    out = torch.zeros_like(query)
    for (_, value, _), part in zip(
        seen, weights.split([score.shape[-1] for score in scores], dim=-1), strict=True
    ):
        side = part.reshape(*value.shape[:-2], -1, part.shape[-1])
        out = out + (side @ value).reshape(query.shape)
    return out


def _causal(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def _common(rows: Sequence[tuple[int, ...]]) -> int:
    """Length of the common beginning."""
    shortest, longest = min(rows), max(rows)
    for at, (one, other) in enumerate(zip(shortest, longest, strict=False)):
        if one != other:
            return at
    return min(len(shortest), len(longest))


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The attention brings its own."""


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, _no_mask)
