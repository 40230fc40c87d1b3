"""ArCHer: what two critics of turns expect of an action, less what they expect of its state.

With ``Q_j(s, a)`` and ``V_j(s)``, ``j = 1, 2``, the critics before the update, turn ``k`` gets::

    A_k = min(Q_1, Q_2)(s_k, a_k) - min(V_1, V_2)(s_k)

and every token of the turn has it. The critics are a learner of their own (``trainer.archer``) that
is handed the transitions of the step. It moves, with slow copies ``Q'`` and ``V'``::

    Q_j <- r + gamma * (1 - done) * V'_j(s')          on transitions of this step and earlier ones
    V_j <- Q'_j(s, a),  a a fresh sample in s         on the turns of this step, whose actions are

A turn that is not valid, or without a sampled token, makes no transition: ``s'`` is the state of
the next turn that makes one, and a reward of a turn without a token is paid to the last turn before
it. ``done`` is 1 at the last transition of a game, however it ended; with ``bootstrap_truncated`` a
game that its context cut off goes on behind its last reply. In the first ``warmup_steps`` updates
the critics alone learn, and all advantages are zero.

Used with the loss ``reinforce``: ``-A_k * sum over the turn's tokens of logp``.

With ``token_baseline`` token ``t`` of turn ``k`` gets ``A_k - b_t`` instead. The baseline ``b_t``,
another network of that learner, has read the state and the turn's tokens before ``t``, and is
trained towards ``A_k`` by the squared error. Given what it has read it is a constant, so that the
expectation of the gradient stays. A baseline that says 0 changes nothing.

Source: ArCHer (arXiv 2402.19446) and its code. Confidence: exact for targets, advantage and what a
token gets. Reduced to an on-policy form where the authors sample anew: their ``V`` and their policy
learn from fresh actions in states of the whole replay buffer, here from those of the step itself.
Ours: the baseline reads the base model, as the critics do, and learns in the warm-up, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import Advantage, Grain, Stateless, require_first, require_range
from delta_belief_rl.algo.credit.critics import (
    COLUMN,
    ValuedTurns,
    following_turn,
    turn_means,
    valued_turns,
)
from delta_belief_rl.algo.credit.groups import finish, used_channels
from delta_belief_rl.types import BoolArray, FloatArray, TurnTable, UserError

Q, V = "archer_q", "archer_v"
"""Token columns: the smaller of two critics, at each token of a turn."""
BASELINE = "archer_baseline"
"""Token column: what is to be expected of ``A_k`` before the token is said."""
GAME, REWARD, DONE = "archer_game", "archer_reward", "archer_done"
"""What the learner is told of each token: number of its game, reward of its turn, whether nothing
follows; the last two are NaN where a turn makes no transition."""
LEAD = "archer_lead"
"""What the baseline is told of each token: ``A_k``; NaN where a turn makes no transition."""


@dataclass(frozen=True, slots=True)
class ArcherSettings:
    """Knobs of ``Archer``; ``gamma`` counts per turn, ``warmup_steps`` in training steps."""

    gamma: float = 0.95
    warmup_steps: int = 0
    bootstrap_truncated: bool = False
    token_baseline: bool = False

    def __post_init__(self) -> None:
        require_range("algorithm.gamma", self.gamma, 0.0, 1.0)
        require_range("algorithm.archer.warmup_steps", self.warmup_steps, 0)


@dataclass(frozen=True, slots=True)
class Archer(Stateless):
    """See the module's head."""

    settings: ArcherSettings = ArcherSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("traj", "turn", "n_tokens", "valid", "truncated"),
        *("rewards", f"tokens:{Q}", f"tokens:{V}"),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.TRAJECTORY

    @property
    def needs_group(self) -> bool:
        """The critics of states are the baseline."""
        return False

    @property
    def reads(self) -> tuple[str, ...]:
        """The baseline's column where it is asked for, as ``requires`` would have it."""
        return (f"tokens:{BASELINE}",) if self.settings.token_baseline else ()

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages, with a baseline those of single tokens, too; what the critics are told.

        Raises:
            UserError: It is not the first of its chain, or there are no critics, or no baseline.
        """
        require_first(previous, "archer")
        self._check_columns(table)
        turns = valued_turns(replace(table, tokens={COLUMN: table.tokens[V]}), "archer")
        actions = np.where(turns.used, table.tokens[Q], 0.0)
        q, v = replace(turns, values=actions).at(turns.first), turns.at(turns.first)
        done, open_end = self._ends(turns)
        warming = table.update < self.settings.warmup_steps
        told = {GAME: table.traj.astype(np.float64), REWARD: turns.rewards, DONE: done}
        level, tokens, fitted = q - v, None, dict[str, float]()
        if self.settings.token_baseline:
            told[LEAD] = q - v
            level, tokens, fitted = _less_baseline(turns, q - v, table.tokens[BASELINE])
        out = finish(table, np.zeros(len(q)) if warming else level, used_channels(table))
        columns = {
            name: np.where(turns.used | (name == GAME), value[turns.row], np.nan)
            for name, value in told.items()
        }
        stats = {"archer_warming": float(warming), **self._fit(turns, q, v, open_end), **fitted}
        tokens = None if warming else tokens
        return replace(out, stats={**out.stats, **stats}, columns=columns, tokens=tokens)

    def _check_columns(self, table: TurnTable) -> None:
        """Refuse a table without what the critics say.

        Raises:
            UserError: A column is missing; it is named.
        """
        wanted = (Q, V, BASELINE) if self.settings.token_baseline else (Q, V)
        for column in wanted:
            if column not in table.tokens:
                raise UserError(
                    f"archer needs the token column {column} of its critics, which nothing in this "
                    "run makes: choose another algorithm.adv_estimator."
                )

    def _ends(self, turns: ValuedTurns) -> tuple[FloatArray, BoolArray]:
        """Whether nothing follows a turn, and whether only a last reply does, ``[R]`` each."""
        table, exists = turns.table, turns.exists
        later = following_turn(exists.astype(np.float64), exists)[table.traj, table.turn]
        last = turns.taught & (later == 0.0)
        cut = np.asarray(table.grid(table.truncated).any(axis=1), dtype=np.bool_)[table.traj]
        open_end = last & cut & self.settings.bootstrap_truncated
        return (last & ~open_end).astype(np.float64), open_end

    def _fit(
        self, turns: ValuedTurns, q: FloatArray, v: FloatArray, open_end: BoolArray
    ) -> dict[str, float]:
        """Means of the critics, and how far ``Q`` is from its target by the ``V`` of the step."""
        if not turns.taught.any():
            return {}
        table = turns.table
        after = following_turn(table.grid(v), turns.exists)[table.traj, table.turn]
        error = turns.rewards + self.settings.gamma * after - q
        known = turns.taught & ~open_end
        out = {
            "archer_q_mean": float(q[turns.taught].mean()),
            "archer_v_mean": float(v[turns.taught].mean()),
        }
        if known.any():
            out["archer_td_error"] = float(np.sqrt(np.mean(error[known] ** 2)))
        return out


def _less_baseline(
    turns: ValuedTurns, lead: FloatArray, baseline: FloatArray
) -> tuple[FloatArray, FloatArray, dict[str, float]]:
    """``A_k - b_t``: its means over turns ``[R]``, itself ``[S]``, and how well ``b`` tells ``A``.

    Args:
        turns: The turns.
        lead: ``A_k``, ``[R]``.
        baseline: ``b_t``, ``[S]``; anything at tokens that do not count.
    """
    baseline = np.where(turns.used, baseline, 0.0)
    wanted = lead[turns.row]
    each = np.where(turns.used, wanted - baseline, 0.0)
    told: dict[str, float] = {}
    spread = float(wanted[turns.used].var()) if turns.used.any() else 0.0
    if spread > 1e-12:
        left = float(each[turns.used].var())
        told["archer_baseline_explained"] = 1.0 - left / spread
    return lead - turn_means(turns, baseline), each, told
