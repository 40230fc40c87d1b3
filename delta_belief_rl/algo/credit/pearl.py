"""PEARL: bad decisions that keep coming back are punished harder.

Not an estimator: it stands behind one in the credit chain and changes negative advantages only.

Two games of a group part at the first turn where both have seen the same states and taken the same
actions but now act differently. If their returns ``S`` differ by more than ``outcome_margin``, the
better game's action has won against the other's in this state, and the other's has lost. A memory
counts both over the whole training, by (family, state, action)::

    win, loss <- decay * (win, loss) + counts of this step
    rate      = (loss + 1) / (loss + win + 2)
    strength  = min(1, loss / loss_cap) * rate    if loss >= min_losses and rate >= min_rate, else 0
    A'        = A * (1 + kappa * strength)        where A < 0, else A

The counts of a step are in the memory before its advantages are changed. A pair of games counts
once; games that never part, or that part into different states after the same action, do not. What
was neither counted nor looked up for longest is forgotten first once there are more than
``capacity`` entries; the memory does not depend on the order of rows, games or groups.

All games of one ``family`` share what is remembered, whatever their secret: a state key should name
what is known, not which secret it is about. Only valid turns are looked at.

Shapes: ``R`` rows of the turn table; ``tokens`` of an advantage as in ``algo.base``.

Source: the idea of a memory of decisions at which games part. Confidence: reconstructed from a
short description; key, rate, thresholds, decay and the factor are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np

from delta_belief_rl.algo.base import (
    Advantage,
    Grain,
    paid_rewards,
    require_previous,
    require_range,
)
from delta_belief_rl.algo.credit.groups import live_games
from delta_belief_rl.types import FloatArray, TurnTable, UserError

Key = tuple[str, str, str]
Step = tuple[str, str]
# Returns that are equal differ by rounding, relative to the largest of the batch.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class PearlSettings:
    """Knobs of ``Pearl``; ``outcome_margin`` in reward units, ``capacity`` in entries."""

    kappa: float = 1.0
    outcome_margin: float = 0.0
    min_losses: float = 2.0
    min_rate: float = 0.6
    loss_cap: float = 4.0
    decay: float = 0.9
    capacity: int = 10_000
    family: str = "all"

    def __post_init__(self) -> None:
        require_range("algorithm.pearl.kappa", self.kappa, 0.0)
        require_range("algorithm.pearl.outcome_margin", self.outcome_margin, 0.0)
        require_range("algorithm.pearl.min_losses", self.min_losses, 0.0, open_low=True)
        require_range("algorithm.pearl.min_rate", self.min_rate, 0.0, 1.0)
        require_range("algorithm.pearl.loss_cap", self.loss_cap, 0.0, open_low=True)
        require_range("algorithm.pearl.decay", self.decay, 0.0, 1.0)
        require_range("algorithm.pearl.capacity", self.capacity, 1)


@dataclass(slots=True)
class Decision:
    """How often an action won and lost against another one, and the update that last met it."""

    win: float = 0.0
    loss: float = 0.0
    met: int = 0


class Pearl:
    """See the module's head. Its memory is its state."""

    requires: ClassVar[tuple[str, ...]] = (
        *("group", "traj", "turn", "valid", "rewards"),
        *("state_key", "action_key"),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    def __init__(self, settings: PearlSettings | None = None) -> None:
        self.settings = settings or PearlSettings()
        self.memory: dict[Key, Decision] = {}
        self.update = 0

    @property
    def needs_group(self) -> bool:
        """Decisions are found between siblings."""
        return True

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """The advantages of ``previous``, the negative ones of recurring bad decisions enlarged.

        Raises:
            UserError: It is the first of its chain.
            ValueError: The table has no state or action keys.
        """
        previous = require_previous(previous, "pearl")
        if not len(table.state_key) == len(table.action_key) == table.num_rows:
            raise ValueError("the turn table has no columns state_key and action_key")
        recorded = self._remember(table)
        factor = self._factors(table, previous)
        self._forget()
        out = _scaled(table, previous, factor)
        enlarged = (factor > 1.0) & (out.turns != previous.turns)
        stats = {
            "decision_memory_size": float(len(self.memory)),
            "decisions_recorded": float(recorded),
            "frac_enlarged_turns": float(enlarged.sum() / max(table.valid.sum(), 1)),
        }
        return replace(out, stats={**out.stats, **stats})

    def paid(self, table: TurnTable) -> FloatArray:
        """The rewards whose sums say which game was better, ``[R]``."""
        return paid_rewards(table)

    def strength(self, key: Key) -> float:
        """How bad a decision has proved, in [0, 1); 0 where too little is known."""
        entry = self.memory.get(key)
        if entry is None or entry.loss < self.settings.min_losses:
            return 0.0
        rate = (entry.loss + 1.0) / (entry.loss + entry.win + 2.0)
        if rate < self.settings.min_rate:
            return 0.0
        return min(1.0, entry.loss / self.settings.loss_cap) * rate

    def state_dict(self) -> dict[str, object]:
        """Everything remembered, as plain values in a fixed order."""
        entries = [
            [*key, entry.win, entry.loss, entry.met] for key, entry in sorted(self.memory.items())
        ]
        return {"update": self.update, "entries": entries}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take over a saved memory; of one larger than ``capacity`` the latest entries.

        Raises:
            UserError: The state is not one of ``state_dict``.
        """
        update, entries = state.get("update"), state.get("entries")
        if set(state) != {"update", "entries"} or not _is_memory(update, entries):
            raise UserError(
                "The checkpoint's memory of pearl cannot be read; resume with the algorithm that "
                "wrote it."
            )
        self.update = cast(int, update)
        self.memory = {
            (family, known, action): Decision(float(win), float(loss), met)
            for family, known, action, win, loss, met in cast(
                Sequence[tuple[str, str, str, float, float, int]], entries
            )
        }
        self._forget()

    def _remember(self, table: TurnTable) -> int:
        """Let the memory fade, then count the decisions of a step; returns how many there were."""
        self.update += 1
        for entry in self.memory.values():
            entry.win *= self.settings.decay
            entry.loss *= self.settings.decay
        # Whole numbers are summed before they meet the faded ones, so that no order is rounded in.
        counts: dict[Step, tuple[int, int]] = {}
        for step, wins, losses in _decisions(table, self.settings.outcome_margin):
            won, lost = counts.get(step, (0, 0))
            counts[step] = (won + wins, lost + losses)
        for step, (wins, losses) in counts.items():
            entry = self.memory.setdefault((self.settings.family, *step), Decision())
            entry.win += wins
            entry.loss += losses
            entry.met = self.update
        return sum(losses for _, losses in counts.values())

    def _factors(self, table: TurnTable, previous: Advantage) -> FloatArray:
        """What a negative advantage of each row is multiplied by, ``[R]``."""
        out = np.ones(table.num_rows)
        below = previous.turns < 0.0
        if previous.tokens is not None:
            below = np.bincount(table.token_row(), previous.tokens < 0.0, table.num_rows) > 0
        for row in np.flatnonzero(below & table.valid).tolist():
            key = (self.settings.family, table.state_key[row], table.action_key[row])
            if key in self.memory:
                self.memory[key].met = self.update
                out[row] += self.settings.kappa * self.strength(key)
        return out

    def _forget(self) -> None:
        """Keep the entries met last; of those met together, by name."""
        surplus = len(self.memory) - self.settings.capacity
        if surplus > 0:
            order = sorted(self.memory, key=lambda key: (self.memory[key].met, key))
            for key in order[:surplus]:
                del self.memory[key]


def _decisions(table: TurnTable, margin: float) -> Iterator[tuple[Step, int, int]]:
    """State and action, wins and losses of the action, at every place where games part."""
    score = table.grid(paid_rewards(table)).sum(axis=1)
    noise = ROUNDING * float(np.abs(score).max(initial=0.0))
    steps, groups = _games(table), table.game_group()
    live = np.flatnonzero(live_games(table)).tolist()
    pending = [
        ([game for game in live if groups[game] == group], 0)
        for group in sorted({int(groups[game]) for game in live})
    ]
    while pending:
        together, turn = pending.pop()
        by_state: dict[str, dict[str, list[int]]] = {}
        for game in together:
            if turn < len(steps[game]):
                state, action = steps[game][turn]
                by_state.setdefault(state, {}).setdefault(action, []).append(game)
        for state, by_action in by_state.items():
            for action, games in by_action.items():
                others = [i for other, many in by_action.items() if other != action for i in many]
                lead = score[games][:, None] - score[others][None, :]
                wins = int((lead > margin + noise).sum())
                losses = int((lead < -margin - noise).sum())
                if wins or losses:
                    yield (state, action), wins, losses
                if len(games) > 1:
                    pending.append((games, turn + 1))


def _games(table: TurnTable) -> list[list[Step]]:
    """State and action of the valid turns of each game, in order."""
    out: list[list[Step]] = [[] for _ in range(table.num_games)]
    rows: list[int] = np.flatnonzero(table.valid).tolist()
    for row in sorted(rows, key=lambda row: int(table.turn[row])):
        out[int(table.traj[row])].append((table.state_key[row], table.action_key[row]))
    return out


def _scaled(table: TurnTable, advantage: Advantage, factor: FloatArray) -> Advantage:
    """Negative advantages times the factor of their row."""
    if advantage.tokens is None:
        turns = np.where(advantage.turns < 0.0, advantage.turns * factor, advantage.turns)
        return replace(advantage, turns=turns)
    row = table.token_row()
    tokens = np.where(advantage.tokens < 0.0, advantage.tokens * factor[row], advantage.tokens)
    added = np.bincount(row, tokens - advantage.tokens, table.num_rows)
    return replace(
        advantage, turns=advantage.turns + added / np.maximum(table.n_tokens, 1), tokens=tokens
    )


def _is_memory(update: object, entries: object) -> bool:
    """Whether these are the values of a ``state_dict``."""
    if type(update) is not int or not isinstance(entries, Sequence) or isinstance(entries, str):
        return False
    for entry in cast(Sequence[object], entries):
        if not isinstance(entry, Sequence) or isinstance(entry, str):
            return False
        values = cast(Sequence[object], entry)
        if len(values) != 6 or not all(isinstance(name, str) for name in values[:3]):
            return False
        counts = values[3:5]
        if not all(type(x) in (int, float) and math.isfinite(cast(float, x)) for x in counts):
            return False
        if type(values[5]) is not int:
            return False
    return True
