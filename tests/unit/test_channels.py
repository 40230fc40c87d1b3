"""From finished games to the turn table and its reward channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.base import Shaper
from delta_belief_rl.algo.shapers.channels import (
    CHANNELS,
    ChannelShaper,
    RewardSettings,
    WinRule,
    build_table,
    is_void,
)
from delta_belief_rl.eval.metrics import grades
from delta_belief_rl.eval.source_metrics import source_metrics
from delta_belief_rl.eval.step_metrics import game_metrics
from delta_belief_rl.types import (
    FloatArray,
    Group,
    StopReason,
    Task,
    Trajectory,
    Turn,
    TurnTable,
    UserError,
    Verdict,
)

V = Verdict
TASK = Task(id="t", source="tw_q", secret="otter", messages=())


def game(
    verdicts: Sequence[Verdict],
    stop: StopReason = StopReason.TURN_LIMIT,
    *,
    strict: bool = False,
    guesses: Sequence[int] = (),
    number: int = 0,
) -> Trajectory:
    """A game of three-token turns; a WIN verdict is a compatible win, on request a strict one."""
    turns = tuple(
        Turn(
            index=k,
            start=10 * k,
            end=10 * k + 3,
            logprobs=(-1.0,) * 3,
            adapter_version=0,
            action=f"Question {k}?",
            reply="",
            verdict=verdict,
            compatible_win=verdict is V.WIN,
            strict_win=verdict is V.WIN and strict,
            is_guess=k in guesses or verdict is V.WIN,
            state_key=f"s{k}",
            action_key=f"a{k}",
            progress=float(k),
        )
        for k, verdict in enumerate(verdicts)
    )
    if V.WIN in verdicts:
        stop = StopReason.WIN
    return Trajectory(TASK, number, tuple(range(10 * len(turns))), turns, stop)


def shaped(
    games: Sequence[Trajectory], belief: FloatArray | None = None, **prices: object
) -> tuple[TurnTable, dict[str, FloatArray]]:
    settings = RewardSettings(**prices)  # type: ignore[arg-type]
    groups = [Group(TASK, tuple(games))]
    table = build_table(groups, settings.rule)
    channels = ChannelShaper(settings).shape(table, groups, belief)
    return replace(table, rewards=channels), channels


def test_a_grade_takes_the_place_of_win_or_loss_in_the_outcome() -> None:
    ended = game([V.OTHER, V.OTHER], StopReason.ENDED)
    graded = [
        replace(ended, turns=(*ended.turns[:-1], replace(ended.turns[-1], score=score)))
        for score in (0.25, 0.0, None)
    ]
    won = game([V.OTHER, V.WIN])
    won = replace(won, turns=(won.turns[0], replace(won.turns[1], score=0.5)))
    _, channels = shaped([*graded, won], win=2.0)
    assert channels["outcome"].tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_build_table_has_one_row_for_each_turn_in_game_order() -> None:
    groups = [
        Group(TASK, (game([V.YES, V.WIN]), game([V.NO, V.NO, V.NO]))),
        Group(TASK, (game([V.NO], StopReason.CONTEXT_FULL),)),
    ]
    table = build_table(groups)
    assert table.group.tolist() == [0, 0, 0, 0, 0, 1]
    assert table.traj.tolist() == [0, 0, 1, 1, 1, 2]
    assert table.turn.tolist() == [0, 1, 0, 1, 2, 0]
    assert table.n_tokens.tolist() == [3] * 6
    assert table.terminal.tolist() == [False, True, False, False, True, True]
    assert table.truncated.tolist() == [False] * 5 + [True]
    assert table.won.tolist() == [True, True, False, False, False, False]
    assert table.valid.all()
    assert table.state_key[:2] == ("s0", "s1")
    assert table.action_key[:2] == ("a0", "a1")
    assert table.progress.tolist() == [0, 1, 0, 1, 2, 0]


def test_build_table_of_nothing_is_empty() -> None:
    table = build_table([])
    assert (table.num_rows, table.num_games, table.num_turns) == (0, 0, 0)
    assert ChannelShaper().shape(table, [])["outcome"].shape == (0,)


@pytest.mark.parametrize(("rule", "won"), [("compatible", True), ("strict", False)])
def test_won_follows_the_configured_rule(rule: str, won: bool) -> None:
    table, channels = shaped([game([V.NO, V.WIN])], rule=rule)
    assert table.won.tolist() == [won, won]
    assert channels["outcome"].tolist() == [0.0, 2.0 * won]


def test_outcome_and_length_fall_on_the_last_turn_only() -> None:
    _, channels = shaped([game([V.YES, V.NO, V.WIN]), game([V.NO, V.NO])])
    np.testing.assert_allclose(channels["outcome"], [0, 0, 2, 0, 0])
    np.testing.assert_allclose(channels["length"], [0, 0, -0.15, 0, -0.1])


def test_a_game_of_one_turn_pays_no_length() -> None:
    _, channels = shaped([game([V.WIN])])
    assert channels["length"].tolist() == [0.0]
    assert channels["outcome"].tolist() == [2.0]


def test_validity_prices_invalid_repeated_and_valid_turns() -> None:
    _, channels = shaped([game([V.INVALID, V.REPEATED, V.YES, V.OTHER])], all_valid=0.1)
    np.testing.assert_allclose(channels["validity"], [-5, -1, 0.1, 0.1])


def test_a_wrong_guess_costs_its_price_and_a_winning_one_does_not() -> None:
    games = [game([V.YES, V.NO, V.WIN], strict=True, guesses=[1])]
    assert not shaped(games)[1]["guess"].any()
    np.testing.assert_allclose(shaped(games, wrong_guess=-0.5)[1]["guess"], [0, -0.5, 0])
    loose = [game([V.YES, V.WIN])]
    strict = shaped(loose, wrong_guess=-0.5, rule="strict")[1]["guess"]
    np.testing.assert_allclose(strict, [0, -0.5])


def test_belief_rows_are_weighted_and_zero_when_not_given() -> None:
    games = [game([V.YES, V.NO])]
    _, channels = shaped(games, np.array([0.5, 2.0]), weight_elicit=0.1)
    np.testing.assert_allclose(channels["belief"], [0.05, 0.2])
    assert not shaped(games)[1]["belief"].any()


@pytest.mark.parametrize(
    ("turns", "won", "invalid", "repeated", "belief", "score"),
    [
        (20, False, 0, 0, 16.153999, -18.384600),
        (17, True, 0, 0, 19.565250, 21.506525),
        (20, False, 1, 5, 11.612816, -28.838718),
        (20, False, 0, 1, 15.744165, -19.425585),
    ],
)
def test_A6_published_scores_are_the_sum_of_the_rewards_that_turn_wise_grpo_uses(
    turns: int, won: bool, invalid: int, repeated: int, belief: float, score: float
) -> None:
    plain = turns - invalid - repeated - won
    verdicts = [V.INVALID] * invalid + [V.REPEATED] * repeated + [V.NO] * plain + [V.WIN] * won
    rows = np.zeros(turns)
    rows[0] = belief
    table, _ = shaped([game(verdicts)], rows, weight_elicit=0.1)
    advantage = build_credit("grpo_turn", {"parity": "reference"}).apply(table)
    assert advantage.rewards.sum() == pytest.approx(score, abs=1e-5)


def test_J1_a_judge_error_is_neither_paid_nor_counted_as_a_turn() -> None:
    games = [game([V.YES, V.ERROR, V.NO])]
    table, channels = shaped(games, np.array([1.0, 9.0, 1.0]), all_valid=0.1)
    assert table.valid.tolist() == [True, False, True]
    for name in CHANNELS:
        assert channels[name][1] == 0.0
    np.testing.assert_allclose(channels["length"], [0, 0, -0.1])


@pytest.mark.parametrize(
    "failed",
    [
        game([V.YES, V.ERROR], StopReason.JUDGE_FAILED),
        game([V.YES, V.NO], StopReason.ENGINE_FAILED),
        game([V.YES, V.ERROR], StopReason.TURN_LIMIT),
    ],
)
def test_J1_a_game_without_known_outcome_is_not_paid_at_all(failed: Trajectory) -> None:
    table, channels = shaped([failed], np.array([1.0, 1.0]), all_valid=0.1, wrong_guess=-1.0)
    assert is_void(failed, WinRule.COMPATIBLE)
    assert not table.valid.any()
    assert sum(np.abs(column).sum() for column in channels.values()) == 0.0


def test_J1_failures_are_marked_truncated_and_a_full_context_is_a_loss() -> None:
    failed = game([V.NO, V.ERROR], StopReason.JUDGE_FAILED)
    full = game([V.NO, V.NO], StopReason.CONTEXT_FULL)
    table, channels = shaped([failed, full])
    assert table.truncated.tolist() == [False, True, False, True]
    assert table.valid.tolist() == [False, False, True, True]
    np.testing.assert_allclose(channels["length"], [0, 0, 0, -0.1])
    assert not is_void(full, WinRule.COMPATIBLE)


def test_J1_a_win_stands_even_if_the_engine_fails_afterwards() -> None:
    won = replace(game([V.NO, V.WIN]), stop=StopReason.ENGINE_FAILED)
    table, channels = shaped([won])
    assert table.valid.all()
    assert channels["outcome"].sum() == 2.0


def test_J1_a_win_stands_even_if_the_judge_fails_afterwards() -> None:
    won = replace(game([V.WIN, V.NO, V.ERROR]), stop=StopReason.JUDGE_FAILED)
    table, channels = shaped([won])
    assert table.valid.tolist() == [True, True, False]
    np.testing.assert_allclose(channels["outcome"], [0, RewardSettings().win, 0])
    assert channels["length"][1] == pytest.approx(2 * RewardSettings().traj_len)


def test_a_won_game_without_a_grade_counts_as_one() -> None:
    won = game([V.NO, V.WIN])
    lost = game([V.NO, V.NO], number=1)
    lost = replace(lost, turns=(lost.turns[0], replace(lost.turns[1], score=0.5)))
    group = Group(TASK, (won, lost))
    assert grades([group], WinRule.COMPATIBLE) == [[1.0, 0.5]]
    found = source_metrics([group], "compatible")
    assert found[f"val-aux/{TASK.source}/score/mean@2"] == 0.75
    assert game_metrics([group])["train/mean_score"] == 0.75


def test_J1_a_failed_game_changes_no_advantage_of_its_siblings() -> None:
    played = [game([V.YES, V.WIN]), game([V.NO, V.NO, V.NO])]
    failed = game([V.YES, V.ERROR], StopReason.JUDGE_FAILED)
    for name in ("grpo", "grpo_turn", "grpo_turn_rtg", "rloo"):
        credit = build_credit(name)
        alone = credit.apply(shaped(played)[0]).turns
        with_failed = credit.apply(shaped([*played, failed])[0]).turns
        np.testing.assert_allclose(with_failed, [*alone, 0.0, 0.0])


def test_mismatched_inputs_are_refused() -> None:
    groups = [Group(TASK, (game([V.NO]),))]
    table = build_table(groups)
    with pytest.raises(ValueError, match="same turns"):
        ChannelShaper().shape(table, [])
    with pytest.raises(ValueError, match="same turns"):
        ChannelShaper().shape(table, groups, np.zeros(3))


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(UserError, match="win rule"):
        RewardSettings(rule="loose")
    with pytest.raises(UserError, match="invalid_action"):
        RewardSettings(invalid_action=float("nan"))


def test_the_shaper_meets_its_protocol() -> None:
    assert isinstance(ChannelShaper(), Shaper)
    assert ChannelShaper().provides == tuple(f"reward:{name}" for name in CHANNELS)
