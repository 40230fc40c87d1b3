"""Turn tables with views, for the tests of methods that read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.base import VIEW, Advantage
from delta_belief_rl.types import FloatArray, TurnTable

EXACT = 1e-9
ESTIMATING = ("igpo", "hcapo", "relace", "opsd", "sdpo")
CHANGING = ("rlsd", "sdar", "opid", "orsd")
LENGTHS = (3, 3, 2, 3)
STATES = ("s0", "s1", "s2", "s0", "s1", "s3", "s0", "s2", "s0", "s4", "s4")
HINDSIGHT = [-0.5, -1, -0.2, -0.6, -1.2, -1.5, -0.4, -0.3, -1, -0.9, -0.9]
PLAYED = [-0.7, -0.9, -0.6, -0.7, -1.1, -1.4, -0.8, -0.6, -0.9, -0.8, -0.8]
NAMES = ("hindsight", "outcome", "reference", "retry", "rubric")


def table_of(
    lengths: Sequence[int] = LENGTHS,
    returns: Sequence[float] = (1, 0, 1, 0),
    group: Sequence[int] | None = None,
    told: Sequence[float] | FloatArray = HINDSIGHT,
    played: Sequence[float] | FloatArray = PLAYED,
    states: Sequence[str] = STATES,
    tokens: Sequence[int] | None = None,
    gains: Sequence[float] | None = None,
) -> TurnTable:
    """Games paid on their last turn; ``told`` and ``played`` are log-probs of each turn's mean."""
    traj = np.repeat(np.arange(len(lengths)), lengths)
    turn = np.concatenate([np.arange(n) for n in lengths])
    last = np.append(np.diff(traj) > 0, True)
    sizes = np.array(tokens or [1] * len(traj), dtype=np.int64)
    return TurnTable(
        group=np.array(group or [0] * len(lengths), dtype=np.int64)[traj],
        traj=traj.astype(np.int64),
        turn=turn.astype(np.int64),
        n_tokens=sizes,
        valid=np.ones(len(traj), dtype=np.bool_),
        terminal=last,
        truncated=np.zeros(len(traj), dtype=np.bool_),
        won=np.array(returns)[traj] > 0.5,
        answered=np.ones(len(traj), dtype=np.bool_),
        state_key=tuple(states),
        rewards={
            "outcome": np.where(last, np.array(returns, dtype=np.float64)[traj], 0.0),
            "belief": np.array(gains or [0.0] * len(traj), dtype=np.float64),
        },
        tokens={
            "logp": np.repeat(np.asarray(played, dtype=np.float64), sizes),
            **{VIEW + name: np.repeat(np.asarray(told, dtype=float), sizes) for name in NAMES},
        },
    )


FIXTURE_A = table_of()


def run(name: str, table: TurnTable, **knobs: object) -> Advantage:
    return build_credit(name, knobs).apply(table)


def changed(
    name: str, table: TurnTable, before: Advantage | None = None, **knobs: object
) -> Advantage:
    """A transform behind GRPO."""
    first = run("grpo", table) if before is None else before
    return build_credit(name, knobs, transform=True).apply(table, first)


def any_of(name: str) -> Callable[[TurnTable], Advantage]:
    return (lambda t: run(name, t)) if name in ESTIMATING else (lambda t: changed(name, t))


def tokens_of(table: TurnTable, advantage: Advantage) -> FloatArray:
    found = advantage.tokens
    return np.repeat(advantage.turns, table.n_tokens) if found is None else found


GAINS = [0.2, 0.3, 7.0, 0.1, 0, 0, 0.4, 7.0, 0, -0.05, 7.0]
"""What the last turn gained is never paid."""

# Two games of one turn and three tokens each, out of a group with returns 1, 0, 1, 0.
SHORT = table_of(
    lengths=(1, 1, 1, 1), states="aaaa", told=[0.0] * 4, played=[0.0] * 4, tokens=[3] * 4
)
PLAIN_LOGP = [-1, -2, -0.5, -1, -1, -1, *[-1] * 6]
TOLD_LOGP = [-0.4, -2.3, -0.5, -1.5, -0.9, -1, *[-1] * 6]
RUBRIC = replace(
    SHORT,
    tokens={
        "logp": np.array(PLAIN_LOGP, dtype=float),
        **{VIEW + name: np.array(TOLD_LOGP, dtype=float) for name in NAMES},
    },
)
