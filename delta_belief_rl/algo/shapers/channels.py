"""Turn table and named reward channels of a batch of finished games.

For a game of ``k`` turns with outcome ``w``, after the published reward (arXiv 2602.12342):

=============  ===================================================================  ===============
channel        value                                                                placed on
=============  ===================================================================  ===============
``outcome``    ``win * w``                                                          last valid turn
``length``     ``traj_len * k`` if ``k > 1``                                        last valid turn
``validity``   ``invalid_action``, ``repeated_action`` or ``all_valid``             each turn
``guess``      ``wrong_guess`` where a guess does not win                           each turn
``belief``     ``weight_elicit * shaped belief change``                             each turn
``question``   what its answer told, by ``shapers.questions``, where that is paid   each turn
=============  ===================================================================  ===============

``w`` is 1 for a win and 0 otherwise, or, in an environment that grades, the grade in [0, 1].

A failure is never a reward. A turn whose judge failed is not valid: it is paid nothing, trained on
nothing and not counted in ``k``. A game whose judge or engine gave up, or whose last turn has no
verdict, has no known outcome: none of its turns is valid. A game that filled its context did end,
without a win.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import Grain, Stateless, require_choice
from delta_belief_rl.algo.shapers.clinical import ClinicalSettings
from delta_belief_rl.algo.shapers.length import last_valid
from delta_belief_rl.algo.shapers.questions import CHANNEL as QUESTION
from delta_belief_rl.algo.shapers.questions import question_rewards
from delta_belief_rl.algo.shapers.tree_columns import tree_columns
from delta_belief_rl.types import (
    FloatArray,
    Group,
    StopReason,
    Trajectory,
    Turn,
    TurnTable,
    UserError,
    Verdict,
)

FAILED_STOPS = frozenset({StopReason.JUDGE_FAILED, StopReason.ENGINE_FAILED})
TRUNCATED_STOPS = FAILED_STOPS | {StopReason.CONTEXT_FULL}
UNANSWERED = frozenset({Verdict.INVALID, Verdict.REPEATED, Verdict.ERROR})
CHANNELS = ("outcome", "length", "validity", "guess", "belief")


class WinRule(StrEnum):
    """Which of the two outcomes counts as a win."""

    STRICT = "strict"
    COMPATIBLE = "compatible"

    def turn_won(self, turn: Turn) -> bool:
        """Whether this turn wins the game."""
        return turn.strict_win if self is WinRule.STRICT else turn.compatible_win

    def won(self, game: Trajectory) -> bool:
        """Whether any turn wins the game."""
        return any(self.turn_won(turn) for turn in game.turns)


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """Signed prices in reward units, by the reference's names; ``wrong_guess`` is ours."""

    rule: str = WinRule.COMPATIBLE
    win: float = 2.0
    invalid_action: float = -5.0
    repeated_action: float = -1.0
    traj_len: float = -0.05
    all_valid: float = 0.0
    wrong_guess: float = 0.0
    weight_elicit: float = 1.0

    def __post_init__(self) -> None:
        require_choice("The win rule", self.rule, tuple(WinRule))
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "rule" and not math.isfinite(value):
                raise UserError(f"multi_turn.reward {item.name} is {value}; give a finite number.")


def is_void(game: Trajectory, rule: WinRule) -> bool:
    """True when the outcome is unknown, so the game must be neither paid nor counted as lost."""
    if rule.won(game):
        return False
    last_failed = bool(game.turns) and game.turns[-1].verdict is Verdict.ERROR
    return last_failed or game.stop in FAILED_STOPS


def iter_games(groups: Sequence[Group]) -> Iterator[tuple[int, Trajectory]]:
    """Group number and game, in the order of the turn table's ``traj`` column."""
    for number, group in enumerate(groups):
        for game in group.trajectories:
            yield number, game


def build_table(groups: Sequence[Group], rule: str = WinRule.COMPATIBLE) -> TurnTable:
    """One row per turn of all games, without rewards yet.

    Args:
        groups: The games of a step; games are numbered through in this order.
        rule: ``strict`` or ``compatible``, decides ``won``.
    """
    win_rule = WinRule(rule)
    rows: list[tuple[int, int, int, int, bool, bool, bool, bool, float]] = []
    turns: list[Turn] = []
    for number, (group, game) in enumerate(iter_games(groups)):
        void, won = is_void(game, win_rule), win_rule.won(game)
        for turn in game.turns:
            terminal = turn is game.turns[-1]
            rows.append(
                (
                    group,
                    number,
                    turn.index,
                    turn.n_tokens,
                    not void and turn.verdict is not Verdict.ERROR,
                    terminal,
                    terminal and game.stop in TRUNCATED_STOPS,
                    won,
                    turn.progress,
                )
            )
            turns.append(turn)
    columns = list(zip(*rows, strict=True)) if rows else [()] * 9
    whole, flags = np.int64, np.bool_
    tree, node = tree_columns(groups)
    return TurnTable(
        group=np.array(columns[0], dtype=whole),
        traj=np.array(columns[1], dtype=whole),
        turn=np.array(columns[2], dtype=whole),
        n_tokens=np.array(columns[3], dtype=whole),
        valid=np.array(columns[4], dtype=flags),
        terminal=np.array(columns[5], dtype=flags),
        truncated=np.array(columns[6], dtype=flags),
        won=np.array(columns[7], dtype=flags),
        progress=np.array(columns[8], dtype=np.float64),
        state_key=tuple(turn.state_key for turn in turns),
        action_key=tuple(turn.action_key for turn in turns),
        footprint=tuple((turn.reads, turn.writes) for turn in turns),
        answered=np.array([turn.verdict not in UNANSWERED for turn in turns], dtype=flags),
        tree=tree,
        node=node,
    )


def outcomes(table: TurnTable, groups: Sequence[Group]) -> FloatArray:
    """``w`` of the module's head, repeated on every row of the game. ``[R]``."""
    scores = [game.score for _, game in iter_games(groups) for _ in game.turns]
    graded = np.array([np.nan if score is None else score for score in scores], dtype=np.float64)
    return np.where(np.isnan(graded), table.won, graded)


def grade_of(game: Trajectory, rule: WinRule) -> float:
    """``w`` of one game: its grade, or whether it was won where it has none."""
    return float(rule.won(game)) if game.score is None else game.score


@dataclass(frozen=True, slots=True)
class ChannelShaper(Stateless):
    """The channels of the module's head; ``question`` only with settings of its own."""

    settings: RewardSettings = RewardSettings()
    questions: ClinicalSettings | None = None
    requires: ClassVar[tuple[str, ...]] = ("valid", "terminal", "won")
    provides: ClassVar[tuple[str, ...]] = tuple(f"reward:{name}" for name in CHANNELS)
    grain: ClassVar[Grain] = Grain.TRAJECTORY

    def shape(
        self, table: TurnTable, groups: Sequence[Group], belief: FloatArray | None = None
    ) -> dict[str, FloatArray]:
        """Channels of the head's table, each ``[R]``, zero on rows that are not valid.

        Raises:
            ValueError: ``groups`` or ``belief`` do not have one entry per row of ``table``.
        """
        turns = [turn for _, game in iter_games(groups) for turn in game.turns]
        if len(turns) != table.num_rows or (belief is not None and belief.shape != (len(turns),)):
            raise ValueError("table, groups and belief must describe the same turns")
        prices, rule = self.settings, WinRule(self.settings.rule)
        counted = np.bincount(table.traj, weights=table.valid, minlength=table.num_games)
        turns_used = counted[table.traj] if table.num_rows else np.zeros(0)
        validity = {
            Verdict.INVALID: prices.invalid_action,
            Verdict.REPEATED: prices.repeated_action,
        }
        # What a whole game is paid must not get lost with a turn whose judge failed.
        last = last_valid(table)
        wrong = np.array([t.is_guess and not rule.turn_won(t) for t in turns], dtype=np.float64)
        channels = {
            "outcome": prices.win * np.where(last, outcomes(table, groups), 0.0),
            "length": prices.traj_len * turns_used * (last & (turns_used > 1)),
            "validity": np.array([validity.get(t.verdict, prices.all_valid) for t in turns]),
            "guess": prices.wrong_guess * wrong,
            "belief": np.zeros(len(turns)) if belief is None else prices.weight_elicit * belief,
        }
        if self.questions is not None:
            channels[QUESTION] = question_rewards(table, turns, self.questions)
        return {
            name: np.where(table.valid, value, 0.0).astype(np.float64)
            for name, value in channels.items()
        }
