"""From beliefs to the dense reward of each turn.

``delta_t = belief_t - belief_{t-1}`` in nats, then, in this order: difference rule, dead band,
winning turn, centering, scale, squash. All statistics are taken per turn index over the games that
have that turn (and did not win on it), so a game that is over never enters as a zero.

Legend: ``N`` games, ``K`` turns of the longest game, ``R`` rows of a turn table. Grids have ``NaN``
    where a
game has no such turn.

``ShapingOptions.reference_parity`` reproduces the published code where it differs: the logistic
squash pays a winning turn 0.5, and ``episode_centering`` averages over all turns of the budget,
unused ones as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from delta_belief_rl.types import BoolArray, FloatArray, IntArray, TurnTable, UserError

CENTERINGS = ("batch_centering", "group_centering", "group_min_max")
SCALES = ("group_std", "batch_std")
SQUASHES = ("tanh", "sigmoid", "min_max", "positive")
METHODS = ("episode_centering", *CENTERINGS, *SCALES, *SQUASHES)

Difference = Literal["step", "running_maximum", "potential"]


@dataclass(frozen=True, slots=True)
class ShapingOptions:
    """How beliefs become rewards.

    Attributes:
        normalised: False applies none of ``methods``; difference, dead band and winning turn hold.
        methods: Names of ``METHODS``; order does not matter. None of them is the raw ("naive")
            change.
        difference: ``step``: belief minus the one before. ``running_maximum``: how far the belief
            rises above the highest one so far, never negative. ``potential``: ``gamma * phi_t -
            phi_{t-1}`` with ``phi = belief - prior`` and 0 at the end of the game, whose discounted
            sum over a game is 0.
        winning_turn: ``drop`` pays nothing on the turn that wins; ``keep`` treats it like any
            other; ``auto`` drops it when ``normalised``. ``potential`` always keeps it.
        first_turn: ``drop`` measures from the belief after the first turn, because the one before
            it follows a text of another form; ``keep`` measures from the prior.
        dead_band: Changes of at most this size, in nats, count as zero.
        clip_min: Lower bound of ``min_max``.
        clip_max: Upper bound of ``min_max``.
        tau: Factor inside ``tanh``.
        gamma: Discount of ``potential``.
        std_floor: Smallest standard deviation that is divided by.
        reference_parity: See the module's head.
        turn_budget: Turns a game may have; only ``episode_centering`` under parity needs it. 0
            stands for the longest game of the batch.
    """

    normalised: bool = True
    methods: tuple[str, ...] = ("positive",)
    difference: Difference = "step"
    winning_turn: Literal["auto", "drop", "keep"] = "auto"
    first_turn: Literal["keep", "drop"] = "keep"
    dead_band: float = 0.0
    clip_min: float = -2.0
    clip_max: float = 2.0
    tau: float = 1.0
    gamma: float = 1.0
    std_floor: float = 1e-8
    reference_parity: bool = False
    turn_budget: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise UserError(
                f"Unknown belief transform {unknown[0]!r}: choose from {', '.join(METHODS)}."
            )
        if self.difference not in ("step", "running_maximum", "potential"):
            raise UserError(
                f"Unknown belief difference {self.difference!r}: "
                "choose step, running_maximum or potential."
            )
        if self.winning_turn not in ("auto", "drop", "keep"):
            raise UserError("winning_turn must be 'auto', 'drop' or 'keep'.")
        if self.first_turn not in ("drop", "keep"):
            raise UserError("first_turn must be 'drop' or 'keep'.")
        if self.clip_min > self.clip_max or self.dead_band < 0:
            raise UserError("Belief shaping needs clip_min <= clip_max and dead_band >= 0.")

    @property
    def drops_winning_turn(self) -> bool:
        """Whether the turn that wins is paid nothing."""
        if self.difference == "potential":
            return False
        return self.winning_turn == "drop" or (self.winning_turn == "auto" and self.normalised)


def belief_grid(beliefs: Sequence[Sequence[float] | FloatArray]) -> FloatArray:
    """Ragged beliefs as ``[N, K + 1]``, ``NaN`` behind each game's last."""
    width = max((len(row) for row in beliefs), default=1)
    out = np.full((len(beliefs), width), np.nan)
    for i, row in enumerate(beliefs):
        out[i, : len(row)] = row
    return out


def belief_delta(beliefs: FloatArray, previous: FloatArray | None = None) -> FloatArray:
    """``belief_t - previous_{t-1}``, ``[N, K + 1] -> [N, K]``.

    Args:
        beliefs: Under the model that measures the current belief.
        previous: Under the model that measures the belief before; by default the same.
    """
    before = beliefs if previous is None else previous
    with np.errstate(invalid="ignore"):
        return beliefs[:, 1:] - before[:, :-1]


def shape_beliefs(
    beliefs: FloatArray,
    group: IntArray,
    won: BoolArray,
    options: ShapingOptions,
    lengths: IntArray | None = None,
    previous: FloatArray | None = None,
    failed: BoolArray | None = None,
) -> FloatArray:
    """Rewards of all turns.

    Args:
        beliefs: ``[N, K + 1]`` in nats. An unknown belief is ``NaN``; the turns it touches get 0.
        group: ``[N]``, games of one secret share a number.
        won: ``[N]``, whether the game's last turn won.
        options: What to do.
        lengths: ``[N]``, turns of each game; by default read off the last belief that is a number.
        previous: As in ``belief_delta``; for ``difference="step"`` only.
        failed: ``[N, K]``, turns that are paid nothing and enter no statistics.

    Returns:
        ``[N, K]``, before the weight; 0 where a game has no such turn.

    Raises:
        UserError: ``previous`` is combined with another difference rule.
    """
    beliefs = np.where(np.isfinite(beliefs), beliefs, np.nan)
    turns: IntArray = np.arange(beliefs.shape[1] - 1, dtype=np.int64)
    if lengths is None:
        last = beliefs.shape[1] - 1 - np.argmax(np.isfinite(beliefs)[:, ::-1], axis=1)
        lengths = np.where(np.isfinite(beliefs).any(axis=1), last, 0)
    exists: BoolArray = turns < lengths[:, None]
    played: BoolArray = exists if failed is None else exists & ~failed
    winning: BoolArray = exists & won[:, None] & (turns == lengths[:, None] - 1)
    delta = np.where(played, _difference(beliefs, previous, exists, lengths, options), np.nan)
    if options.dead_band > 0:
        delta = np.where(
            np.abs(delta) <= options.dead_band, np.where(np.isnan(delta), delta, 0), delta
        )
    if options.normalised and "episode_centering" in options.methods:
        return _fill(_episode(delta, played, options), played)
    if options.drops_winning_turn:
        delta = np.where(winning, np.nan, delta)
    if not options.normalised:
        return _fill(delta, played)
    delta = _centre_and_scale(delta, group, options)
    squashed = _squash(_zero(delta), options)
    if options.reference_parity:
        return np.where(played, squashed, 0.0)
    return np.where(played & np.isfinite(delta), squashed, 0.0)


def shape_rows(
    table: TurnTable,
    beliefs: FloatArray,
    options: ShapingOptions,
    previous: FloatArray | None = None,
) -> FloatArray:
    """The reward of every row of a turn table, ``[R]``.

    Args:
        table: Columns ``group``, ``traj``, ``turn``, ``won`` and ``valid`` are read. A row that is
            not valid (the judge failed) is paid nothing and enters no statistics.
        beliefs: ``[N, K + 1]``, row ``i`` for game number ``i`` of the table.
        options: What to do.
        previous: As in ``belief_delta``.

    Raises:
        ValueError: The beliefs do not fit the table's games and turns.
    """
    if not table.num_rows:
        return np.zeros(0)
    games, turns = table.num_games, table.num_turns
    if beliefs.shape != (games, turns + 1):
        raise ValueError(f"beliefs {beliefs.shape} for {games} games of up to {turns} turns")
    lengths = np.zeros(games, dtype=np.int64)
    np.maximum.at(lengths, table.traj, table.turn + 1)
    won = np.zeros(games, dtype=np.bool_)
    won[table.traj] = table.won
    failed = table.grid(~table.valid).astype(np.bool_)
    shaped = shape_beliefs(beliefs, table.game_group(), won, options, lengths, previous, failed)
    return np.where(table.valid, shaped[table.traj, table.turn], 0.0)


def belief_summary(beliefs: FloatArray) -> dict[str, float]:
    """Means over games of prior, final belief, net gain and sum of rises, in nats.

    Args:
        beliefs: ``[N, K + 1]``, ``NaN`` behind each game's last.
    """
    known = beliefs[np.isfinite(beliefs).any(axis=1)]
    if not len(known):
        return {"prior": np.nan, "final": np.nan, "net_gain": np.nan, "sum_positive": np.nan}
    last = known.shape[1] - 1 - np.argmax(np.isfinite(known)[:, ::-1], axis=1)
    final = known[np.arange(len(known)), last]
    rises = np.maximum(_zero(belief_delta(known)), 0).sum(axis=1)
    return {
        "prior": float(np.nanmean(known[:, 0])),
        "final": float(final.mean()),
        "net_gain": float(np.nanmean(final - known[:, 0])),
        "sum_positive": float(rises.mean()),
    }


def _difference(
    beliefs: FloatArray,
    previous: FloatArray | None,
    exists: BoolArray,
    lengths: IntArray,
    options: ShapingOptions,
) -> FloatArray:
    if previous is not None and options.difference != "step":
        raise UserError(
            f"The belief difference {options.difference!r} needs one belief model for both sides: "
            "set base_model equal to step_model."
        )
    beliefs, before = beliefs.copy(), None if previous is None else previous.copy()
    if options.first_turn == "drop" and beliefs.shape[1] > 1:
        # Starting every rule at the second belief makes the first change zero and nothing else.
        (beliefs if before is None else before)[:, 0] = beliefs[:, 1]
    if options.difference == "step":
        return belief_delta(beliefs, before)
    if options.difference == "running_maximum":
        best = np.fmax.accumulate(beliefs, axis=1)
        rise = np.maximum(belief_delta(best), 0.0)
        return np.where(np.isfinite(beliefs[:, 1:]), rise, np.nan)
    potential = beliefs - beliefs[:, :1]
    ends: BoolArray = np.arange(1, beliefs.shape[1], dtype=np.int64) == lengths[:, None]
    after = np.where(ends & exists, 0.0, potential[:, 1:])
    return options.gamma * after - potential[:, :-1]


def _episode(delta: FloatArray, exists: BoolArray, options: ShapingOptions) -> FloatArray:
    """Centre each game on its own mean; the winning turn is in, and ``positive`` has no effect."""
    if options.reference_parity:
        count = np.full(len(delta), options.turn_budget or delta.shape[1], dtype=np.float64)
    else:
        count = np.maximum(np.isfinite(delta).sum(axis=1), 1).astype(np.float64)
    centred = delta - (np.nansum(delta, axis=1) / count)[:, None]
    without = [name for name in options.methods if name != "positive"]
    known = exists & (np.isfinite(centred) | options.reference_parity)
    return np.where(known, _squash(_zero(centred), options, without), 0.0)


def _centre_and_scale(delta: FloatArray, group: IntArray, options: ShapingOptions) -> FloatArray:
    methods = options.methods
    whole = np.zeros_like(group)
    centering = next((name for name in CENTERINGS if name in methods), None)
    if centering is None:
        return delta
    if centering == "group_min_max":
        delta = np.maximum(delta, 0.0)
        low, high = _extremes(delta, group)
        return (delta - low) / (high - low + 1e-8)
    mean, _, _ = _moments(delta, whole if centering == "batch_centering" else group)
    delta = delta - mean
    scale = None
    if "group_std" in methods and centering == "group_centering":
        scale = group
    elif "batch_std" in methods:
        scale = whole
    if scale is None:
        return delta
    _, std, count = _moments(delta, scale)
    return np.where(count > 1, delta / np.maximum(std, options.std_floor), delta)


def _squash(
    delta: FloatArray, options: ShapingOptions, methods: Sequence[str] | None = None
) -> FloatArray:
    name = next((m for m in SQUASHES if m in (options.methods if methods is None else methods)), "")
    if name == "tanh":
        return np.tanh(options.tau * delta)
    if name == "sigmoid":
        # The same function as 1 / (1 + exp(-x)), without overflow.
        return 0.5 * (1.0 + np.tanh(0.5 * delta))
    if name == "min_max":
        return np.clip(delta, options.clip_min, options.clip_max)
    if name == "positive":
        return np.maximum(delta, 0.0)
    return delta


def _moments(values: FloatArray, group: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Mean, population deviation and count per (group, turn), spread back over ``[N, K]``."""
    _, index = np.unique(group, return_inverse=True)
    shape = (int(index.max(initial=-1)) + 1, values.shape[1])
    known = np.isfinite(values)
    count, total, square = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    np.add.at(count, index, known.astype(np.float64))
    np.add.at(total, index, np.where(known, values, 0.0))
    mean = (total / np.maximum(count, 1))[index]
    np.add.at(square, index, np.where(known, values - mean, 0.0) ** 2)
    std = np.sqrt(square / np.maximum(count, 1))[index]
    return mean, std, count[index]


def _extremes(values: FloatArray, group: IntArray) -> tuple[FloatArray, FloatArray]:
    """Smallest and largest known value per (group, turn), spread back over ``[N, K]``."""
    _, index = np.unique(group, return_inverse=True)
    shape = (int(index.max(initial=-1)) + 1, values.shape[1])
    low, high = np.full(shape, np.inf), np.full(shape, -np.inf)
    np.minimum.at(low, index, np.where(np.isfinite(values), values, np.inf))
    np.maximum.at(high, index, np.where(np.isfinite(values), values, -np.inf))
    empty = ~np.isfinite(low)
    return np.where(empty, 0.0, low)[index], np.where(empty, 0.0, high)[index]


def _zero(values: FloatArray) -> FloatArray:
    return np.where(np.isfinite(values), values, 0.0)


def _fill(values: FloatArray, exists: BoolArray) -> FloatArray:
    return np.where(exists, _zero(values), 0.0)
