"""GraphOPD: which turns of a game others build on, and so which are worth distilling.

A turn reads and writes variables of the environment's state. An edge ``k -> l`` says that turn
``l`` reads a variable whose latest writer before it is ``k``. A walk goes from a turn to those that
enabled it, each with equal chance; with chance ``1 - damping``, and from a turn that nothing
enabled, it starts again anywhere. With ``P`` the matrix of the walk (rows sum to 1) and ``D_k`` the
mean divergence of teacher and student over the tokens of turn ``k``::

    pi       = (1 - damping) / K + damping * P^T pi
    aptitude = (K pi_k) * (D_k / mean D)                                fusion="product"
             = alpha * K pi_k + (1 - alpha) * D_k / mean D              fusion="sum"
    mask_k   = 1 where the aptitude is above the mean of the game, else 0

    loss     = sum_k mask_k * n_k * D_k / sum_k mask_k * n_k            n_k tokens

``direction="to_effects"`` walks along the edges instead of against them, ``"both"`` either way.

A game of one turn has mask 1. Without any divergence the mask is 0; with equal aptitudes too, since
none is above the mean. Without edges the mask is that of a divergence above average. An estimate of
a divergence below 0 counts as 0. Turns that are not valid do nothing: ``K`` counts the others.

Shapes: ``K`` turns of one game, ``R`` rows of the turn table.

Source: GraphOPD (arXiv 2610.08959). Confidence: reconstructed from the abstract; edges by the last
writer, the direction of the walk, damping and the product are ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.algo.base import require_choice, require_range
from delta_belief_rl.types import BoolArray, FloatArray, TurnTable

DIRECTIONS = ("to_enablers", "to_effects", "both")
FUSIONS = ("product", "sum")
# Equal aptitudes differ by rounding, relative to their mean.
ROUNDING = 1e-9

Footprint = tuple[Collection[str], Collection[str]]
"""What a turn read and what it wrote, as ``Env.footprint`` gives it."""


@dataclass(frozen=True, slots=True)
class FootprintSettings:
    """Knobs of ``distilled_turns``; ``alpha`` is the walk's part in a sum."""

    damping: float = 0.85
    direction: str = "to_enablers"
    fusion: str = "product"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        require_range("algorithm.graph_opd.damping", self.damping, 0.0, 0.999)
        require_choice("algorithm.graph_opd.direction", self.direction, DIRECTIONS)
        require_choice("algorithm.graph_opd.fusion", self.fusion, FUSIONS)
        require_range("algorithm.graph_opd.alpha", self.alpha, 0.0, 1.0)


def last_writer_edges(footprints: Sequence[Footprint]) -> BoolArray:
    """``[K, K]``, true at ``[k, l]`` where turn ``l`` reads what turn ``k`` was the last to write.

    A turn that reads and writes one variable reads what an earlier turn wrote.
    """
    edges = np.zeros((len(footprints), len(footprints)), dtype=np.bool_)
    writer: dict[str, int] = {}
    for turn, (reads, writes) in enumerate(footprints):
        for variable in reads:
            if variable in writer:
                edges[writer[variable], turn] = True
        writer.update(dict.fromkeys(writes, turn))
    return edges


def walk(edges: BoolArray, damping: float = 0.85, direction: str = "to_enablers") -> FloatArray:
    """``pi``, the share of time that the walk spends at each turn; sums to 1. ``[K]``.

    Raises:
        UserError: Unknown direction.
    """
    require_choice("algorithm.graph_opd.direction", direction, DIRECTIONS)
    turns = len(edges)
    if not turns:
        return np.zeros(0)
    steps = {"to_enablers": edges.T, "to_effects": edges, "both": edges | edges.T}[direction]
    ways = steps.sum(axis=1, keepdims=True)
    chance = np.where(ways > 0, steps / np.maximum(ways, 1), 1.0 / turns)
    start = np.full(turns, (1.0 - damping) / turns)
    pi: FloatArray = np.linalg.solve(np.eye(turns) - damping * chance.T, start).astype(np.float64)
    return pi


def aptitudes(
    pi: FloatArray, divergence: FloatArray, fusion: str = "product", alpha: float = 0.5
) -> FloatArray:
    """How much each turn asks to be distilled, 1 on average for equal turns. ``[K]``.

    Raises:
        UserError: Unknown fusion.
    """
    require_choice("algorithm.graph_opd.fusion", fusion, FUSIONS)
    known = np.maximum(np.where(np.isfinite(divergence), divergence, 0.0), 0.0)
    mean = float(known.mean()) if len(known) else 0.0
    if mean == 0.0:
        return np.zeros(len(known))
    central, apart = len(pi) * pi, known / mean
    return central * apart if fusion == "product" else alpha * central + (1.0 - alpha) * apart


def above_mean(aptitude: FloatArray) -> BoolArray:
    """True where the aptitude is above the mean; a single turn needs only to have some. ``[K]``."""
    if len(aptitude) < 2:
        return np.asarray(aptitude > 0.0, dtype=np.bool_)
    mean = float(aptitude.mean())
    return np.asarray(aptitude > mean * (1.0 + ROUNDING), dtype=np.bool_)


def distilled_turns(
    table: TurnTable,
    footprints: Sequence[Footprint],
    divergence: FloatArray,
    settings: FootprintSettings | None = None,
) -> BoolArray:
    """The mask of all games, ``[R]``; false on rows that are not valid.

    Args:
        table: Its columns ``traj``, ``turn`` and ``valid`` are read.
        footprints: Of each row.
        divergence: ``D`` of each row, ``[R]``.
        settings: The knobs.

    Raises:
        ValueError: ``footprints`` or ``divergence`` does not have one entry for each row.
    """
    knobs = settings or FootprintSettings()
    if not len(footprints) == len(divergence) == table.num_rows:
        raise ValueError("table, footprints and divergence must describe the same turns")
    games: dict[int, list[int]] = {}
    rows: list[int] = np.flatnonzero(table.valid).tolist()
    for row in sorted(rows, key=lambda row: int(table.turn[row])):
        games.setdefault(int(table.traj[row]), []).append(row)
    out = np.zeros(table.num_rows, dtype=np.bool_)
    for own in games.values():
        pi = walk(last_writer_edges([footprints[r] for r in own]), knobs.damping, knobs.direction)
        out[own] = above_mean(aptitudes(pi, divergence[own], knobs.fusion, knobs.alpha))
    return out


def masked_divergence(divergence: FloatArray, tokens: FloatArray, mask: BoolArray) -> float:
    """The loss of the module's head over any set of turns; 0 where the mask keeps no token.

    Args:
        divergence: Mean over the tokens of each turn.
        tokens: How many there are.
        mask: Turns that count.
    """
    count = float(tokens[mask].sum())
    return float((divergence[mask] * tokens[mask]).sum()) / count if count else 0.0
