"""MPO: advantages of turns from a critic, shared out among the tokens with their mean kept.

First the turn: ``A_k`` as in ``credit.turn_ppo``, normalised over turns where ``normalise`` says
so. Behind another method (``algorithm.transforms=[mpo]``) ``A_k`` is that method's advantage of the
turn as it is. Then the tokens ``j`` of the turn, by a local signal ``z``::

    c_j = eta * (z_j - mean of z over the turn)
    s   = min(1, kappa * |A_k| / max_j |c_j|)
    A_j = A_k + s * c_j

so that the mean over a turn stays ``A_k`` and, with ``kappa`` up to 1, no token's sign turns over.
A turn of one token and a turn with ``A_k = 0`` are left as they are. The signals:

``td``
    ``z_j = r_k [j is last] + V' - V_j``, with ``V'`` the value at the game's next sampled token.
``gae``
    The sum of the turn's later ``td`` signals, each step back weighted by ``lam``.
``external``
    The token column ``column``, e.g. ``view:reference``. Turns with a number that is not finite in
    it are left as they are.

The critic's target at every token of a turn is the turn's own, ``A_k + V_k`` before normalisation:
nothing is paid inside a turn, so this is what each of its states is worth. Behind a method that has
targets those stand. The policy loss that belongs to it has one ratio for a turn (``turn_ratio``).

Source: a digest of the method. Confidence: reconstructed from the abstract; the signals, the rule
of the scale, the targets and what is normalised are choices of this package, in the spirit of the
method and no reproduction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import (
    VALUES,
    VIEW,
    Advantage,
    Grain,
    Stateless,
    require_choice,
    require_range,
)
from delta_belief_rl.algo.credit.critics import (
    ValuedTurns,
    check_discounts,
    critic_stats,
    finish_valued,
    valued_turns,
)
from delta_belief_rl.algo.credit.whitening import whiten
from delta_belief_rl.types import FloatArray, TurnTable, UserError

SIGNALS = ("td", "gae", "external")


@dataclass(frozen=True, slots=True)
class MpoSettings:
    """Knobs of ``Mpo``; ``gamma`` and ``lam`` count per turn.

    ``lam`` is also that of the signal ``gae``; ``column`` is read by ``external``.
    """

    gamma: float = 1.0
    lam: float = 0.95
    eta: float = 1.0
    kappa: float = 1.0
    signal: str = "td"
    column: str = ""
    normalise: bool = True
    bootstrap_truncated: bool = False

    def __post_init__(self) -> None:
        check_discounts(self.gamma, self.lam)
        require_range("algorithm.mpo.eta", self.eta, 0.0)
        require_range("algorithm.mpo.kappa", self.kappa, 0.0)
        require_choice("algorithm.mpo.signal", self.signal, SIGNALS)
        if (self.signal == "external") != bool(self.column):
            raise UserError(
                f"algorithm.mpo.column is {self.column!r} with algorithm.mpo.signal="
                f"{self.signal}; name a token column with external, and none otherwise."
            )


@dataclass(frozen=True, slots=True)
class Mpo(Stateless):
    """See the module's head."""

    settings: MpoSettings = MpoSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("traj", "turn", "n_tokens", "valid", "truncated"),
        *("rewards", VALUES),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.TOKEN

    @property
    def needs_group(self) -> bool:
        """The critic is the baseline."""
        return False

    @property
    def reads(self) -> tuple[str, ...]:
        """The token column that the settings name, as ``requires`` would have it."""
        column = self.settings.column
        if not column:
            return ()
        return (column if column.startswith(VIEW) else f"tokens:{column}",)

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages of single tokens, those of turns, and targets.

        Raises:
            UserError: There is no critic, or no column of the external signal.
        """
        settings = self.settings
        turns = valued_turns(table, "mpo", bootstrap=settings.bootstrap_truncated)
        value = turns.at(turns.first)
        raw = turns.turn_advantages(value, settings.gamma, settings.lam)
        targets = np.where(turns.used, (raw + value)[turns.row], np.nan)
        if previous is None:
            level = whiten(raw, turns.taught.astype(np.int64)) if settings.normalise else raw
        else:
            level = np.where(turns.taught, previous.turns, 0.0)
        each, scale = self._shared_out(turns, level)
        # A turn without a difference between its tokens has no scale.
        stats = {"mpo_scale": float(np.nanmean(scale))} if np.isfinite(scale).any() else {}
        if previous is None:
            out = finish_valued(turns, level, targets, each)
            return replace(out, stats={**out.stats, **stats})
        if previous.targets is None:
            stats |= critic_stats(turns.values, targets)
            previous = replace(previous, targets=targets)
        return replace(previous, tokens=each, stats={**previous.stats, **stats})

    def _shared_out(self, turns: ValuedTurns, level: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Advantages of tokens ``[S]``, and ``s`` of each turn ``[R]``, NaN where ``c`` is 0."""
        rows, row = turns.table.num_rows, turns.row
        signal = self._signal(turns)
        broken = np.bincount(row, weights=~np.isfinite(signal) & turns.used, minlength=rows) > 0
        free = turns.used & ~broken[row]
        signal = np.where(free, signal, 0.0)
        mean = np.bincount(row, weights=signal, minlength=rows)
        mean = mean / np.maximum(turns.table.n_tokens, 1)
        shift = np.where(free, self.settings.eta * (signal - mean[row]), 0.0)
        largest = np.zeros(rows)
        np.maximum.at(largest, row, np.abs(shift))
        # Signals that are equal differ from their mean by rounding.
        apart = largest > 1e-12
        bound = self.settings.kappa * np.abs(level) / np.where(apart, largest, 1.0)
        scale = np.where(apart, np.minimum(1.0, bound), np.nan)
        each = level[row] + np.where(apart, scale, 0.0)[row] * shift
        return np.where(turns.used, each, 0.0), scale

    def _signal(self, turns: ValuedTurns) -> FloatArray:
        """``z``, ``[S]``."""
        if self.settings.signal == "td":
            return turns.token_advantages(turns.rewards, 1.0, 0.0)
        if self.settings.signal == "gae":
            nothing = np.zeros(turns.table.num_rows)
            return turns.token_advantages(turns.rewards, 1.0, self.settings.lam, nothing)
        column = turns.table.tokens.get(self.settings.column)
        if column is None:
            known = ", ".join(turns.table.tokens)
            raise UserError(
                f"algorithm.mpo.column is {self.settings.column!r}, which nothing in this run "
                f"makes; there are {known}."
            )
        return column
