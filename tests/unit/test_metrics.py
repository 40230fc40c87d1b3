"""Evaluation metrics against enumeration and closed forms, and the metrics of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.algo.shapers.channels import ChannelShaper, RewardSettings, build_table
from delta_belief_rl.eval.metrics import (
    cluster_bootstrap,
    mean_at_n,
    paired_difference,
    pass_at_k,
    rollout_metrics,
    secret_counts,
    std_at_n,
    success_rate,
    summarise,
    win_by_turn,
)
from delta_belief_rl.eval.step_metrics import (
    judge_classes,
    judge_extras,
    normalise_question,
    returns_to_come,
)
from delta_belief_rl.trainer.validation import parts_text
from delta_belief_rl.types import (
    FloatArray,
    Group,
    StopReason,
    Task,
    Trajectory,
    Turn,
    UserError,
    Verdict,
)


def turn(k: int, **fields: object) -> Turn:
    base = Turn(
        index=k,
        start=5 * k,
        end=5 * k + 2,
        logprobs=(-1.0, -1.0),
        adapter_version=0,
        action=f"Is it thing {k}?",
        reply="No",
        verdict=Verdict.NO,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def game(task: Task, outcome: str, turns: int = 2, number: int = 0) -> Trajectory:
    """``strict``, ``list`` (compatible only), ``lost`` or ``error``."""
    rows = [turn(k) for k in range(turns)]
    stop = StopReason.TURN_LIMIT
    if outcome in ("strict", "list"):
        stop = StopReason.WIN
        rows[-1] = turn(
            turns - 1,
            verdict=Verdict.WIN,
            compatible_win=True,
            strict_win=outcome == "strict",
            is_guess=True,
            is_list=outcome == "list",
        )
    if outcome == "error":
        stop = StopReason.JUDGE_FAILED
        rows[-1] = turn(turns - 1, verdict=Verdict.ERROR)
    return Trajectory(task, number, tuple(range(5 * turns)), tuple(rows), stop)


def evaluation(outcomes: Sequence[Sequence[str]]) -> list[Group]:
    groups: list[Group] = []
    for s, row in enumerate(outcomes):
        task = Task(id=f"val_{s}", source="tw_q", secret=f"secret{s}", messages=())
        groups.append(Group(task, tuple(game(task, o, number=i) for i, o in enumerate(row))))
    return groups


MIXED = evaluation(
    [
        ["strict", "list", "lost", "lost"],
        ["lost", "lost", "lost", "lost"],
        ["list", "list", "list", "strict"],
    ]
)
FAILED = evaluation([["strict", "error"], ["lost", "lost"], ["list", "lost"]])


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 7), data=st.data())
def test_V1_pass_at_k_equals_enumeration_of_all_draws(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_V1_one_win_in_four_is_certain_at_four_and_not_a_bootstrap() -> None:
    assert [pass_at_k(4, 1, k) for k in range(1, 5)] == [0.25, 0.5, 0.75, 1.0]
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_V1_k_above_n_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(UserError, match="pass@"):
        pass_at_k(n, c, k)


def test_V1_more_wins_than_games_are_refused() -> None:
    with pytest.raises(UserError, match="cannot be won"):
        pass_at_k(2, 3, 1)


def test_std_at_n_is_over_the_sample_columns() -> None:
    # 198 secrets, 4 samples, column wins 21, 20, 16, 19: the published 9.60 +- 0.94.
    wins = np.zeros((198, 4))
    for column, count in enumerate((21, 20, 16, 19)):
        wins[:count, column] = 1
    assert 100 * mean_at_n(wins) == pytest.approx(9.60, abs=0.005)
    assert 100 * std_at_n(wins) == pytest.approx(0.94, abs=0.005)


def test_missing_outcomes_stay_out_of_means() -> None:
    wins = np.array([[1.0, np.nan], [0.0, 1.0]])
    assert mean_at_n(wins) == pytest.approx(0.75)
    assert std_at_n(wins) == pytest.approx(np.std([0.5, 1.0]))
    assert np.isnan(mean_at_n(np.full((2, 2), np.nan)))
    assert np.isnan(std_at_n(np.zeros((0, 0))))


def test_both_rules_are_reported_side_by_side() -> None:
    out = summarise(MIXED)
    assert out["val-core/success_rate"] == pytest.approx(6 / 12)
    assert out["val-core/compatible_success_rate"] == pytest.approx(6 / 12)
    assert out["val-core/strict_success_rate"] == pytest.approx(2 / 12)
    assert summarise(MIXED, "strict")["val-core/success_rate"] == pytest.approx(2 / 12)
    assert out["val-core/success_rate/ci_low"] <= 0.5 <= out["val-core/success_rate/ci_high"]


def test_V1_the_summary_holds_the_unbiased_pass_at_k_of_each_k() -> None:
    out = summarise(MIXED)
    assert out["pass@k/1"] == pytest.approx(6 / 12)
    assert out["pass@k/2"] == pytest.approx((pass_at_k(4, 2, 2) + 0 + 1) / 3)
    assert out["pass@k/4"] == pytest.approx(2 / 3)
    assert out["strict_pass@k/4"] == pytest.approx(2 / 3)
    assert "pass@k/5" not in out


def test_V4_n_in_a_name_comes_from_the_data() -> None:
    four = summarise(MIXED)
    eight = summarise([replace(g, trajectories=g.trajectories * 2) for g in MIXED])
    assert four["val-core/success_rate/mean@4"] == pytest.approx(0.5)
    assert "val-core/success_rate/std@4" in four
    assert "val-core/success_rate/mean@8" in eight
    assert "val-core/success_rate/mean@4" not in eight
    uneven = [MIXED[0], replace(MIXED[1], trajectories=MIXED[1].trajectories[:2])]
    assert not any("mean@" in name for name in summarise(uneven))


def test_V5_errors_are_shown_both_excluded_and_as_losses() -> None:
    out = summarise(FAILED)
    assert out["val-core/success_rate"] == pytest.approx(2 / 5)
    assert out["val-core/success_rate/errors_as_losses"] == pytest.approx(2 / 6)
    assert out["val-core/error_games"] == 1.0
    assert out["val-core/judge/error_rate"] == pytest.approx(1 / 12)
    assert out["pass@k/1"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert "pass@k/2" not in out
    assert out["pass@k/2/errors_as_losses"] == pytest.approx(2 / 3)


def test_V5_an_evaluation_of_errors_only_is_not_a_zero_percent_result() -> None:
    out = summarise(evaluation([["error", "error"]]))
    assert np.isnan(out["val-core/success_rate"])
    assert out["val-core/success_rate/errors_as_losses"] == 0.0


def test_V9_the_interval_resamples_secrets_not_games() -> None:
    # Games of a secret agree perfectly, so 4 games say no more than 1.
    wins = np.repeat([1.0, 0.0], 50)
    few = cluster_bootstrap(wins, np.ones(100), seed=1)
    many = cluster_bootstrap(wins * 4, np.full(100, 4.0), seed=1)
    assert (few.low, few.high) == (many.low, many.high)
    assert few.se == pytest.approx(0.05, abs=0.004)
    assert few.low == pytest.approx(0.40, abs=0.02)
    assert few.units == 100


def test_intervals_depend_on_the_seed_given_and_on_nothing_else() -> None:
    first = success_rate(MIXED, seed=3)
    np.random.seed(0)
    assert success_rate(MIXED, seed=3) == first
    assert cluster_bootstrap([], []).units == 0


def test_paired_differences_cancel_the_difficulty_of_secrets() -> None:
    rng = np.random.default_rng(0)
    hard = rng.integers(0, 9, size=60)
    before = {f"s{i}": (float(w), 10) for i, w in enumerate(hard)}
    after = {name: (w + 1, n) for name, (w, n) in before.items()}
    gap = paired_difference(before, after)
    assert gap.value == pytest.approx(0.1)
    assert gap.high - gap.low < 1e-9
    assert paired_difference(before, {"s3": (0.0, 5)}).units == 1
    with pytest.raises(UserError, match="share no secret"):
        paired_difference(before, {"other": (0.0, 5)})


def test_secret_counts_leave_out_games_without_outcome() -> None:
    assert secret_counts(FAILED) == {"val_0": (1.0, 1), "val_1": (0.0, 2), "val_2": (1.0, 2)}
    lost = secret_counts(FAILED, errors_as_losses=True)
    assert lost["val_0"] == (1.0, 2)


def test_win_by_turn_is_cumulative_and_ends_at_the_rate() -> None:
    task = Task(id="a", source="tw_q", secret="a", messages=())
    games = (game(task, "strict", 1), game(task, "list", 3), game(task, "lost", 4))
    groups = [Group(task, games)]
    np.testing.assert_allclose(win_by_turn(groups), [0, 1 / 3, 1 / 3, 2 / 3, 2 / 3])
    np.testing.assert_allclose(win_by_turn(groups, "strict", 2), [0, 1 / 3, 1 / 3])
    assert win_by_turn([]).tolist() == [0.0]


def test_training_secrets_in_the_validation_set_are_reported_apart() -> None:
    out = summarise(MIXED, train_secrets={"SECRET2"})
    assert out["val-core/success_rate/overlap"] == pytest.approx(1.0)
    assert out["val-core/success_rate/clean"] == pytest.approx(2 / 8)
    assert out["val-core/strict_success_rate/clean"] == pytest.approx(1 / 8)
    assert out["val-core/secrets/overlap"] == 1
    assert out["val-core/secrets/clean"] == out["val-core/secrets"] - 1
    low, high = (out[f"val-core/success_rate/ci_{end}/clean"] for end in ("low", "high"))
    assert low <= 2 / 8 <= high
    assert out["pass@k/1/overlap"] == pytest.approx(1.0)
    assert out["pass@k/1/clean"] == pytest.approx(2 / 8)
    assert out["strict_pass@k/1/clean"] == pytest.approx(1 / 8)
    assert "val-core/success_rate/clean" not in summarise(MIXED, train_secrets={"other"})


def test_the_line_about_a_validation_tells_both_parts() -> None:
    assert parts_text(summarise(MIXED)) == ""
    out = summarise(MIXED, train_secrets={"secret2"})
    rate = out["val-core/strict_success_rate/overlap"]
    others = int(out["val-core/secrets"]) - 1
    assert parts_text(out) == (
        f" ({100 * rate:.1f} % on the 1 that are training secrets, 12.5 % on the {others} others)"
    )


def test_a_validation_set_of_training_secrets_alone_has_no_clean_part() -> None:
    out = summarise(MIXED, train_secrets={group.task.secret.upper() for group in MIXED})
    assert out["val-core/secrets/clean"] == 0
    assert out["val-core/secrets/overlap"] == out["val-core/secrets"]
    assert [name for name in out if name.endswith("/clean")] == ["val-core/secrets/clean"]


def step(
    games: Sequence[Trajectory], belief: FloatArray | None = None
) -> tuple[list[Group], dict[str, float]]:
    groups = [Group(games[0].task, tuple(games))]
    table = build_table(groups)
    rewards = ChannelShaper(RewardSettings(weight_elicit=0.1)).shape(table, groups, belief)
    table = replace(table, rewards=rewards)
    advantage = build_credit("grpo_turn_rtg").apply(table)
    return groups, rollout_metrics(groups, table, advantage, belief_weight=0.1)


def test_rollout_metrics_carry_the_reference_names() -> None:
    task = Task(id="a", source="tw_q", secret="a", messages=())
    lost = game(task, "lost", 4)
    rows = list(lost.turns)
    rows[1] = replace(rows[1], verdict=Verdict.INVALID, is_list=True, truncated=True)
    rows[2] = replace(rows[2], verdict=Verdict.REPEATED, action="is it  THING 0")
    lost = replace(lost, turns=tuple(rows), beliefs=(-3.0, -5.0, -4.0, -4.0, -2.5))
    belief = np.array([0.0, 0.0, 0.0, 1.0, 0.0, 1.5])
    _, out = step([game(task, "strict", 2), lost], belief)
    expected = {
        "train/mean_successful": 0.5,
        "train/strict_successful": 0.5,
        "train/total_invalid": 1.0,
        "train/mean_repeated": 0.5,
        "train/list_question_share": 1 / 6,
        "train/duplicate_share": 1 / 6,
        "num_questions/mean": 3.0,
        "num_questions/max": 4.0,
        "response_length/mean": 6.0,
        "response_length/min": 4.0,
        "response_length/clip_ratio": 1 / 6,
        "critic/eog/mean": (2 - 0.1 - 0.2) / 2,
        "critic/eog/max": 1.9,
        "critic/turn_rewards/min": -5.0,
        "critic/elicit_scores/max": 1.5,
        "critic/frac_dead_groups": 0.0,
        "belief/prior": -3.0,
        "belief/final": -2.5,
        "belief/net_gain": 0.5,
        "belief/positive_sum": 2.5,
        "belief/positive_over_net": 5.0,
        "judge/error_rate": 0.0,
        "train/error_games": 0.0,
    }
    assert {name: out[name] for name in expected} == pytest.approx(expected)


def test_A6_logged_channel_sums_equal_the_logged_reward_sum() -> None:
    task = Task(id="a", source="tw_q", secret="a", messages=())
    _, out = step([game(task, "strict", 2), game(task, "lost", 3)], np.ones(5))
    channels = [value for name, value in out.items() if name.startswith("critic/channel_sum/")]
    assert out["critic/reward_sum"] == pytest.approx(sum(channels))
    assert out["critic/rewards/mean"] == pytest.approx(sum(channels) / 5)


def test_J1_failed_games_are_counted_and_stay_out_of_the_win_rate() -> None:
    task = Task(id="a", source="tw_q", secret="a", messages=())
    _, out = step([game(task, "strict"), game(task, "lost"), game(task, "error", 5)])
    assert out["train/mean_successful"] == pytest.approx(0.5)
    assert out["train/error_games"] == 1.0
    assert out["num_questions/max"] == 2.0
    assert out["judge/error_turns"] == 1.0
    assert out["critic/frac_invalid_turns"] == pytest.approx(5 / 9)


def test_advantage_metrics_weigh_tokens() -> None:
    task = Task(id="a", source="tw_q", secret="a", messages=())
    won = game(task, "strict", 1)
    won = replace(won, turns=(replace(won.turns[0], end=won.turns[0].start + 6),))
    _, out = step([won, game(task, "lost", 1)])
    name = "critic/advantages"
    assert out[f"{name}/token_max"] == pytest.approx(2.0)
    assert out[f"{name}/token_mean_global"] == pytest.approx((6 * 2 - 2 * 2) / 8)
    assert out[f"{name}/mean_per_seq_mean"] == pytest.approx(0.0)
    assert out[f"{name}/mean_per_seq_std"] == pytest.approx(0.0)


def test_returns_are_the_rewards_still_to_come_each_paid_once() -> None:
    task = Task(id="a", source="tw_q", secret="a", messages=())
    games = [game(task, "strict", 2), game(task, "lost", 1)]
    groups = [Group(task, tuple(games))]
    table = build_table(groups)
    belief = np.array([3.0, 0.0, 1.0])
    rewards = ChannelShaper(RewardSettings(weight_elicit=1.0)).shape(table, groups, belief)
    table = replace(table, rewards=rewards)
    end = 2.0 - 0.05 * 2
    np.testing.assert_allclose(returns_to_come(table), [3 + end, end, 1.0])
    # Two tokens a turn; an estimator that pays the outcome at every turn changes nothing.
    for estimator in ("grpo_turn", "grpo_turn_rtg", "grpo"):
        out = rollout_metrics(groups, table, build_credit(estimator).apply(table))
        assert out["critic/returns/token_max"] == pytest.approx(3 + end)
        assert out["critic/returns/token_min"] == 1.0
        assert out["critic/returns/token_mean_global"] == pytest.approx((3 + 2 * end + 1) / 3)
        assert out["critic/returns/mean_per_seq_mean"] == pytest.approx((1.5 + end + 1) / 2)
        assert out["critic/returns/mean_per_seq_std"] == pytest.approx(1.5 / 2)


def test_advantages_of_tokens_are_counted_token_by_token() -> None:
    task = Task(id="a", source="tw_q", secret="a", messages=())
    games = [game(task, "strict", 1), game(task, "error", 1), game(task, "lost", 1)]
    groups = [Group(task, tuple(games))]
    table = build_table(groups)
    advantage = Advantage(
        turns=np.array([2.0, 9.0, 0.0]),
        weight=np.ones(3),
        rewards=np.zeros(3),
        tokens=np.array([1.0, 3.0, 9.0, 9.0, -1.0, 1.0]),
    )
    out = rollout_metrics(groups, table, advantage)
    assert out["critic/advantages/token_max"] == 3.0
    assert out["critic/advantages/token_min"] == -1.0
    assert out["critic/advantages/token_mean_global"] == 1.0
    assert out["critic/advantages/mean_per_seq_std"] == 1.0


def test_coverage_is_the_share_of_sampled_tokens_after_the_prompt() -> None:
    task = Task(id="a", source="tw_q", secret="a", messages=())
    first = game(task, "lost", 2)  # tokens 0-9, turns at 0-1 and 5-6
    late = replace(
        first,
        token_ids=tuple(range(13)),
        turns=tuple(replace(t, start=t.start + 3, end=t.end + 3) for t in first.turns),
    )
    _, out = step([first, late])
    assert out["state_tokens(total)"] == 8.0
    assert out["state_tokens/coverage"] == pytest.approx(8 / 20)


def test_judge_classes_say_what_the_rules_made_of_the_judges_word() -> None:
    pairs = [
        ("finished", Verdict.WIN),
        ("finished", Verdict.YES),
        ("yes", Verdict.WIN),
        ("yes", Verdict.INVALID),
        ("no", Verdict.NO),
        ("perhaps", Verdict.INVALID),
        ("", Verdict.NO),
    ]
    out = judge_classes(turn(0, raw_verdict=raw, verdict=verdict) for raw, verdict in pairs)
    names = ("true_positives", "false_positives", "false_negatives", "wrong_negatives")
    assert out == pytest.approx(
        {f"judge/{name}": 1 / 6 for name in (*names, "true_negatives", "unrecognized")}
    )


def test_J1_a_failed_call_is_no_word_of_the_judge() -> None:
    failed = turn(0, raw_verdict="error: no answer", verdict=Verdict.ERROR)
    assert judge_classes([failed]) == {}
    plain = turn(0, raw_verdict="error", verdict=Verdict.ERROR)
    assert judge_classes([failed, plain, turn(1, raw_verdict="no")])["judge/true_negatives"] == 1.0


def test_judge_extras_are_shares_of_all_questions() -> None:
    turns = [
        turn(0, diagnostics=("no_question", "repeated")),
        turn(1, diagnostics=("no_question", "no_question")),
        turn(2, raw_verdict="no"),
        turn(3, diagnostics=("candidate_list",)),
    ]
    out = judge_extras(turns)
    assert out["judge/extra/no_question"] == 0.5
    assert out["judge/extra/repeated"] == 0.25
    assert out["judge/extra/candidate_list"] == 0.25
    assert out["judge/extra/too_long_word"] == 0.0
    assert judge_extras([]) == {}
    reason = "ValueError: a board of 3 x 3"
    assert judge_extras([turn(0, diagnostics=("game_failed", reason))]).keys() == {
        *(name for name in out if "candidate" not in name),
        "judge/extra/game_failed",
    }
    _, training = step([replace(MIXED[0].trajectories[2], turns=tuple(turns))])
    assert training["judge/extra/no_question"] == 0.5


def test_a_summary_has_the_judge_and_every_source_by_the_published_names() -> None:
    groups = [
        replace(g, trajectories=tuple(with_words(game) for game in g.trajectories)) for g in MIXED
    ]
    out = summarise(groups, rewards=[float(i) for i in range(12)])
    assert out["val-core/judge/true_negatives"] == pytest.approx(18 / 24)
    assert out["val-core/judge/false_negatives"] == pytest.approx(6 / 24)
    assert out["val-core/judge/extra/no_question"] == 0.0
    assert out["val-core/tw_q/reward/mean@4"] == 5.5
    assert out["val-core/tw_q/reward/best@4/mean"] == pytest.approx((3 + 7 + 11) / 3)
    assert out["val-aux/tw_q/num_questions/mean@4"] == 2.0
    assert "val-core/tw_q/reward/mean@4" not in summarise(groups)
    assert not any(name.startswith("val-core/judge/true") for name in summarise(MIXED))


def with_words(game: Trajectory) -> Trajectory:
    """The game as if a judge had said no to everything."""
    return replace(game, turns=tuple(replace(t, raw_verdict="no") for t in game.turns))


def test_questions_are_the_same_without_case_spaces_and_final_punctuation() -> None:
    assert normalise_question(" Is it\n ALIVE? ") == normalise_question("is it alive")
    assert normalise_question("Is it alive?") != normalise_question("Is it a live one?")


def test_metrics_of_nothing_are_empty_and_not_an_error() -> None:
    table = build_table([])
    advantage = build_credit("grpo").apply(table)
    assert "num_questions/mean" not in rollout_metrics([], table, advantage)
    assert summarise([])["val-core/games"] == 0.0
