"""Packing of token sequences, with branches, into one row without padding.

A *segment* is a trunk (one game) and any number of *branches*. A branch hangs at a prefix length of
its trunk: it sees the trunk's first ``point`` tokens and its own earlier tokens, and nothing else.
All linear and feed-forward layers work on the packed row ``[1, T]``, which has no padding. So does
attention where a kernel for sequences of any lengths runs (``models.varlen``) and no segment has
branches. Else attention spreads the row over ``[S, L]``: one row per segment, its trunk in the
first ``trunk`` cells and the tokens of its branches in the others. Trunks are plainly causal, so a
mask exists for the tokens of branches alone.

Legend: ``S`` segments, ``L`` cells of a row, ``T`` tokens of all segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from delta_belief_rl.types import IntArray


@dataclass(frozen=True, slots=True)
class Branch:
    """Tokens that continue a trunk's first ``point`` tokens and are seen by nobody else.

    Example:
        A belief asked before the token 12 of a game: ``Branch(point=12, token_ids=(40, 7, 99))``.
    """

    point: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackSegment:
    """A trunk and its branches.

    Example:
        ``PackSegment(token_ids=(5, 6, 7), branches=(Branch(1, (8,)), Branch(3, (8, 9))))``.
    """

    token_ids: Sequence[int]
    branches: tuple[Branch, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of trunk and branches."""
        return len(self.token_ids) + sum(len(branch.token_ids) for branch in self.branches)


@dataclass(frozen=True, slots=True)
class Ragged:
    """Segments without branches as they lie in the packed row.

    Attributes:
        starts: ``[S + 1]`` int32, where each begins.
        longest: Tokens of the longest.
    """

    starts: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class PackedInput:
    """What ``model(input_ids=..., position_ids=..., packed=...)`` needs.

    Attributes:
        input_ids: ``[1, T]``.
        position_ids: ``[1, T]``; a branch's positions continue from its point.
        gather: ``[S, L]``, index into the packed row; padding repeats index 0.
        scatter: ``[T]``, index into the flattened ``[S * L]``.
        trunk: Cells of a row that belong to the trunk, those of the longest one.
        mask: ``[S, 1, L - trunk, L]`` bool, true where a branch's token (third axis) may see a
            cell (last axis); None when no segment has branches.
        full: The segments fill their rows, so that ``gather`` is the identity.
        segment_starts: ``[S + 1]``, where each segment begins in the packed row.
        trunk_lengths: ``[S]``.
        branch_starts: Per segment, where each branch begins in the packed row.
        branch_points: Per segment, the prefix length at which each branch hangs.
        ragged: For attention without padding; None where the row has to be spread.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    gather: torch.Tensor
    scatter: torch.Tensor
    trunk: int
    mask: torch.Tensor | None
    full: bool
    segment_starts: IntArray
    trunk_lengths: IntArray
    branch_starts: tuple[IntArray, ...]
    branch_points: tuple[IntArray, ...]
    ragged: Ragged | None = None

    @property
    def num_tokens(self) -> int:
        """``T``."""
        return int(self.segment_starts[-1])

    @property
    def longest(self) -> int:
        """Positions of the longest segment, at most: ``L``."""
        return int(self.gather.shape[1])

    def trunk_sources(self, segment: int, positions: IntArray) -> IntArray:
        """Rows whose logits predict the trunk's tokens at ``positions``.

        Args:
            segment: Which segment.
            positions: Positions in the trunk, each at least 1.

        Returns:
            Indices into the packed row, same shape.

        Raises:
            IndexError: A position has no predecessor or lies outside the trunk.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and (
            positions.min() < 1 or positions.max() >= self.trunk_lengths[segment]
        ):
            raise IndexError("a scored trunk position must lie in 1 .. length - 1")
        return self.segment_starts[segment] + positions - 1

    def branch_sources(self, segment: int, offsets: IntArray) -> IntArray:
        """Rows whose logits predict each branch's token at ``offsets``.

        The token at offset 0 is predicted by the trunk's last visible token. An offset equal to the
        branch's packed length is allowed: the last token of a branch need not be packed to be
        scored.

        Args:
            segment: Which segment.
            offsets: ``[n]``, the same for every branch of the segment.

        Returns:
            ``[branches, n]`` indices into the packed row.
        """
        offsets = np.asarray(offsets, dtype=np.int64)[None, :]
        inside = self.branch_starts[segment][:, None] + offsets - 1
        before = self.segment_starts[segment] + self.branch_points[segment][:, None] - 1
        return np.where(offsets == 0, before, inside)


def pack(
    segments: Sequence[PackSegment], device: torch.device | str = "cpu", ragged: bool = False
) -> PackedInput:
    """Lay segments side by side and prepare attention's index maps and mask.

    Args:
        segments: At least one, none without tokens in its trunk.
        device: Where the tensors go.
        ragged: Attention may go without padding (``models.varlen.runs_ragged``).

    Returns:
        The packed input.

    Raises:
        ValueError: No segment, an empty trunk, or a branch outside its trunk.
    """
    if not segments:
        raise ValueError("pack() needs at least one segment")
    columns = [_segment_columns(segment) for segment in segments]
    lengths = np.array([len(ids) for ids, *_ in columns], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids, positions, owner, limit = (
        np.concatenate([column[i] for column in columns]) for i in range(4)
    )
    trunk_lengths = np.array([len(segment.token_ids) for segment in segments], dtype=np.int64)
    trunk = int(trunk_lengths.max())
    width = trunk + int((lengths - trunk_lengths).max())
    row = np.repeat(np.arange(len(segments)), lengths)
    cell = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    # A branch's tokens begin behind the cells of the longest trunk, not behind those of their own.
    cell += np.where(owner > 0, np.repeat(trunk - trunk_lengths, lengths), 0)
    scatter = row * width + cell
    gather = np.zeros(len(segments) * width, dtype=np.int64)
    gather[scatter] = np.arange(starts[-1])
    mask = None
    if width > trunk:
        shape = (len(segments), width)
        mask = visibility(
            torch.from_numpy(_spread(owner, scatter, shape, -1)).to(device),
            torch.from_numpy(_spread(limit, scatter, shape, 0)).to(device),
            trunk,
        )
    flat = None
    if ragged and mask is None:
        bounds = torch.from_numpy(starts.astype(np.int32)).to(device)
        flat = Ragged(bounds, longest=trunk)
    return PackedInput(
        input_ids=torch.from_numpy(ids)[None].to(device),
        position_ids=torch.from_numpy(positions)[None].to(device),
        gather=torch.from_numpy(gather.reshape(len(segments), width)).to(device),
        scatter=torch.from_numpy(scatter).to(device),
        trunk=trunk,
        mask=mask,
        full=bool((lengths == width).all()),
        segment_starts=starts,
        trunk_lengths=trunk_lengths,
        branch_starts=tuple(
            start + length + _starts([len(branch.token_ids) for branch in segment.branches])
            for segment, start, length in zip(segments, starts[:-1], trunk_lengths, strict=True)
        ),
        branch_points=tuple(
            np.array([branch.point for branch in segment.branches], dtype=np.int64)
            for segment in segments
        ),
        ragged=flat,
    )


def _starts(lengths: list[int]) -> IntArray:
    ends = np.cumsum(np.array(lengths, dtype=np.int64))
    return ends - np.array(lengths, dtype=np.int64)


def _segment_columns(segment: PackSegment) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Token, position, owner (0 = trunk) and number of visible trunk tokens, each ``[tokens]``."""
    trunk = np.asarray(segment.token_ids, dtype=np.int64)
    if not len(trunk):
        raise ValueError("a segment needs at least one trunk token")
    lengths = np.array([len(branch.token_ids) for branch in segment.branches], dtype=np.int64)
    points = np.array([branch.point for branch in segment.branches], dtype=np.int64)
    if len(points) and (points.min() < 1 or points.max() > len(trunk)):
        raise ValueError("a branch must hang at a prefix length between 1 and the trunk's length")
    branch_ids = [np.asarray(branch.token_ids, dtype=np.int64) for branch in segment.branches]
    offset = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    index = np.arange(len(trunk), dtype=np.int64)
    return (
        np.concatenate([trunk, *branch_ids]),
        np.concatenate([index, np.repeat(points, lengths) + offset]),
        np.concatenate([np.zeros_like(index), np.repeat(np.arange(1, len(lengths) + 1), lengths)]),
        np.concatenate([index + 1, np.repeat(points, lengths)]),
    )


def _spread(column: IntArray, scatter: IntArray, shape: tuple[int, int], fill: int) -> IntArray:
    """``[T] -> [S, L]``, ``fill`` at padding."""
    out = np.full(shape[0] * shape[1], fill, dtype=np.int64)
    out[scatter] = column
    return out.reshape(shape)


def visibility(owner: torch.Tensor, limit: torch.Tensor, trunk: int) -> torch.Tensor:
    """Which cell each token of a branch may see.

    It sees the first ``limit`` cells of its row and the earlier cells of its own branch. Padding
    behind the trunk has an owner of its own and sees itself, because a query that sees nothing at
    all would make the softmax undefined.

    Args:
        owner: ``[S, L]``, 0 for the trunk, ``b + 1`` for branch ``b``, -1 for padding.
        limit: ``[S, L]``, number of visible trunk tokens.
        trunk: Cells of a row that belong to the trunk.

    Returns:
        ``[S, 1, L - trunk, L]`` bool.
    """
    index = torch.arange(owner.shape[1], device=owner.device)
    query = index[None, trunk:, None]
    mask = owner[:, trunk:, None] == owner[:, None, :]
    mask &= (query >= index) & (index >= trunk)
    mask |= index < limit[:, trunk:, None]
    return mask[:, None]
