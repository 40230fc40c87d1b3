"""Policy losses: worked numbers, gradients, mismatch guards, layout invariance."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from delta_belief_rl.algo import AGGREGATIONS, LOSSES
from delta_belief_rl.algo.losses.aggregate import (
    Metrics,
    count_units,
    mean_metrics,
    merge_metrics,
)
from delta_belief_rl.algo.losses.policy import (
    PolicyInputs,
    PolicyLossSettings,
    cispo_loss,
    gspo_loss,
    ppo_loss,
    turn_ratio_loss,
)
from delta_belief_rl.types import UserError

# One game of three turns; the observation tokens at 2 and 6 hold junk on purpose.
KEEP = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1], dtype=torch.float64)
TURNS = torch.tensor([0, 0, 9, 1, 1, 1, 9, 2])
ROWS = torch.zeros(8, dtype=torch.int64)
NAN = float("nan")
LOGP = torch.tensor([-1.0, -0.8, NAN, -0.5, -0.6, -0.9, NAN, -0.2], dtype=torch.float64)
OLD = torch.tensor([-1.1, -1.0, NAN, -0.7, -0.6, -1.0, NAN, -0.1], dtype=torch.float64)
ADVANTAGES = torch.tensor([1, 1, NAN, -1, -1, -1, NAN, 0.5], dtype=torch.float64)
TIGHT = PolicyLossSettings(clip_ratio_low=0.1, clip_ratio_high=0.1)
COUNTS = count_units(KEEP, ROWS, TURNS)


def fixture_b() -> PolicyInputs:
    return PolicyInputs(LOGP.clone().requires_grad_(), OLD, ADVANTAGES, KEEP, ROWS, TURNS)


def per_token_gradient(inputs: PolicyInputs, loss: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, inputs.logp)
    return gradient


def test_token_ppo_matches_the_worked_example() -> None:
    loss, metrics = ppo_loss(fixture_b(), TIGHT, COUNTS)
    assert float(loss.detach()) == pytest.approx(0.112359, abs=1e-5)
    means = mean_metrics(metrics)
    assert means["actor/pg_loss"] == pytest.approx(0.112359, abs=1e-5)
    # Of six tokens, the first two are clipped from above.
    assert means["actor/pg_clipfrac"] == pytest.approx(2 / 6)
    assert means["actor/ppo_kl"] == pytest.approx(-0.5 / 6)


def test_gspo_matches_the_worked_example() -> None:
    settings_ = replace(TIGHT, loss_agg_mode="seq-mean-token-mean")
    loss, _ = gspo_loss(fixture_b(), settings_, COUNTS)
    assert float(loss.detach()) == pytest.approx(0.090575, abs=1e-5)


@pytest.mark.parametrize(("mode", "expected"), [("token-mean", 0.110516), ("turn-mean", -0.149083)])
def test_turn_ratio_matches_the_worked_example(mode: str, expected: float) -> None:
    loss, _ = turn_ratio_loss(fixture_b(), replace(TIGHT, loss_agg_mode=mode), COUNTS)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-5)


def test_cispo_matches_the_worked_example() -> None:
    loss, _ = cispo_loss(fixture_b(), TIGHT, COUNTS)
    assert float(loss.detach()) == pytest.approx(-0.011586, abs=1e-5)


def test_gspo_with_one_turn_is_the_turn_ratio_and_one_token_turns_are_token_ppo() -> None:
    inputs = fixture_b()
    one = replace(inputs, turns=ROWS)
    mode = replace(TIGHT, loss_agg_mode="seq-mean-token-mean")
    a, b = gspo_loss(inputs, mode, COUNTS)[0], turn_ratio_loss(one, mode, COUNTS)[0]
    torch.testing.assert_close(a, b)
    each = replace(inputs, turns=torch.arange(8))
    off = replace(TIGHT, clip_ratio_c=1e9)
    a, b = turn_ratio_loss(each, off, COUNTS)[0], ppo_loss(inputs, off, COUNTS)[0]
    torch.testing.assert_close(a, b)


def token(logp: float, old: float, advantage: float, settings_: PolicyLossSettings) -> float:
    """Loss of a single token."""

    def one(x: float) -> Tensor:
        return torch.tensor([x], dtype=torch.float64)

    rows = torch.zeros(1, dtype=torch.int64)
    inputs = PolicyInputs(one(logp), one(old), one(advantage), one(1.0), rows)
    return float(ppo_loss(inputs, settings_, {"tokens": 1.0, "rows": 1.0})[0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 1.0, -1.0),
        (1.5, 1.0, -1.28),
        (0.5, 1.0, -0.5),
        (0.5, -1.0, 0.8),
        (1.5, -1.0, 1.5),
        (2.9, -1.0, 2.9),
        (5.0, -1.0, 3.0),
    ],
)
def test_clip_higher_and_dual_clip_closed_forms(
    ratio: float, advantage: float, expected: float
) -> None:
    value = token(math.log(ratio), 0.0, advantage, PolicyLossSettings())
    assert value == pytest.approx(expected)


def test_log_ratio_is_clamped_to_twenty() -> None:
    value = token(0.0, -1000.0, -1.0, PolicyLossSettings(clip_ratio_c=1e12))
    assert value == pytest.approx(math.exp(20))


def random_inputs(seed: int, games: int = 4) -> PolicyInputs:
    """Games of uneven length, weights with holes; away from the kinks of the clip."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (games,), generator=generator)
    rows = torch.repeat_interleave(torch.arange(games), lengths)
    size = len(rows)
    turns = rows * 10 + torch.randint(0, 3, (size,), generator=generator)

    def draw(scale: float) -> Tensor:
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    logp = -1 + draw(0.3)
    old = logp + draw(0.15)
    weight = (torch.rand(size, generator=generator) > 0.2).double()
    return PolicyInputs(logp, old, draw(1.0), weight, rows, turns, old + draw(0.05))


MODES = st.sampled_from(AGGREGATIONS)
NAMES = st.sampled_from(list(LOSSES))
GUARDED = PolicyLossSettings(
    tis_imp_ratio_cap=1.02, token_reject_ratio=1.1, sequence_reject_ratio=1.03
)


def run(
    name: str, inputs: PolicyInputs, settings_: PolicyLossSettings, counts: dict[str, float]
) -> tuple[Tensor, Tensor, Metrics]:
    """Loss, gradient in logp, metrics."""
    leaf = inputs.logp.detach().clone().requires_grad_()
    loss, metrics = LOSSES[name](replace(inputs, logp=leaf), settings_, counts)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, metrics


def take(inputs: PolicyInputs, index: Tensor) -> PolicyInputs:
    assert inputs.turns is not None
    assert inputs.rollout_logp is not None
    return PolicyInputs(
        inputs.logp[index],
        inputs.old_logp[index],
        inputs.advantages[index],
        inputs.weight[index],
        inputs.rows[index],
        inputs.turns[index],
        inputs.rollout_logp[index],
    )


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), name=NAMES, mode=MODES, parts=st.integers(2, 4))
def test_A11_micro_batches_add_up_to_the_whole_loss_gradient_and_metrics(
    seed: int, name: str, mode: str, parts: int
) -> None:
    inputs = random_inputs(seed)
    settings_ = replace(GUARDED, loss_agg_mode=mode)
    counts = count_units(inputs.weight, inputs.rows, inputs.turns, 9.0)
    loss, gradient, metrics = run(name, inputs, settings_, counts)
    total, pieces, seen = torch.zeros((), dtype=torch.float64), torch.zeros_like(gradient), []
    for part in range(parts):
        index = torch.nonzero(inputs.rows % parts == part).squeeze(1)
        piece, slope, some = run(name, take(inputs, index), settings_, counts)
        total += piece
        pieces[index] = slope
        seen.append(some)
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(pieces, gradient)
    assert mean_metrics(merge_metrics(seen)) == pytest.approx(mean_metrics(metrics))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), name=NAMES, mode=MODES)
def test_A9_A14_junk_padding_and_order_change_neither_loss_nor_gradient(
    seed: int, name: str, mode: str
) -> None:
    inputs = random_inputs(seed)
    settings_ = replace(GUARDED, loss_agg_mode=mode)
    counts = count_units(inputs.weight, inputs.rows, inputs.turns, 9.0)
    loss, gradient, _ = run(name, inputs, settings_, counts)
    size, junk = len(inputs.rows), torch.full((6,), NAN, dtype=torch.float64)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    mixed = take(inputs, order)
    assert mixed.turns is not None
    assert mixed.rollout_logp is not None
    padded = PolicyInputs(
        torch.cat([mixed.logp, junk]),
        torch.cat([mixed.old_logp, junk]),
        torch.cat([mixed.advantages, junk]),
        torch.cat([mixed.weight, torch.zeros(6, dtype=torch.float64)]),
        torch.cat([mixed.rows, torch.tensor([0, 0, 1, 7, 7, 8])]),
        torch.cat([mixed.turns, torch.tensor([0, 1, 10, 70, 70, 80])]),
        torch.cat([mixed.rollout_logp, junk]),
    )
    recount = count_units(padded.weight, padded.rows, padded.turns, 9.0)
    assert recount == counts
    second, slope, _ = run(name, padded, settings_, recount)
    torch.testing.assert_close(second, loss)
    torch.testing.assert_close(slope[:size], gradient[order])
    assert not slope[size:].any()


def numeric_gradient(name: str, inputs: PolicyInputs, settings_: PolicyLossSettings) -> Tensor:
    """Central differences in every ``logp``."""
    counts = count_units(inputs.weight, inputs.rows, inputs.turns, 9.0)
    out = torch.zeros_like(inputs.logp)
    for i in range(len(out)):
        for sign in (1, -1):
            moved = inputs.logp.clone()
            moved[i] += sign * 1e-6
            loss = LOSSES[name](replace(inputs, logp=moved), settings_, counts)[0]
            out[i] += sign * loss / 2e-6
    return out


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_A15_token_ppo_gradient_matches_finite_differences(mode: str, seed: int) -> None:
    inputs = random_inputs(seed)
    settings_ = PolicyLossSettings(clip_ratio_c=1.2, loss_agg_mode=mode)
    counts = count_units(inputs.weight, inputs.rows, inputs.turns, 9.0)
    _, gradient, _ = run("ppo", inputs, settings_, counts)
    torch.testing.assert_close(
        gradient, numeric_gradient("ppo", inputs, settings_), atol=1e-6, rtol=1e-5
    )


def test_A15_gspo_and_turn_ratio_gradients_sum_to_finite_differences_over_their_unit() -> None:
    # With one advantage for a unit, the stopped form has the gradient of the plain ratio
    # when all tokens of a unit move together.
    generator = torch.Generator().manual_seed(4)
    logp = -1 + 0.1 * torch.randn(6, generator=generator, dtype=torch.float64)
    rows, turns = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 0, 1, 2, 3, 3])
    advantages = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, -0.5], dtype=torch.float64)
    weight = torch.ones(6, dtype=torch.float64)
    inputs = PolicyInputs(logp, logp - 0.02, advantages, weight, rows, turns)
    settings_ = PolicyLossSettings(loss_agg_mode="seq-mean-token-mean")
    counts = count_units(weight, rows, turns)
    for name, unit in (("gspo", rows), ("turn_ratio", turns)):
        _, gradient, _ = run(name, inputs, settings_, counts)
        for u in unit.unique():
            mine = (unit == u).double()
            up = LOSSES[name](replace(inputs, logp=logp + 1e-6 * mine), settings_, counts)[0]
            down = LOSSES[name](replace(inputs, logp=logp - 1e-6 * mine), settings_, counts)[0]
            slope = float(up - down) / 2e-6
            assert float((gradient * mine).sum()) == pytest.approx(slope, rel=1e-5)


def test_A15_cispo_gradient_is_the_clipped_ratio_times_the_advantage() -> None:
    inputs = fixture_b()
    loss, _ = cispo_loss(inputs, TIGHT, COUNTS)
    gradient = per_token_gradient(inputs, loss)
    expected = torch.tensor([-1.1, -1.1, 0, 1.1, 1.0, 1.1, 0, -0.452419], dtype=torch.float64) / 6
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", list(LOSSES))
def test_P6_with_one_update_the_old_policy_is_this_one(name: str) -> None:
    inputs = replace(random_inputs(0), rollout_logp=None)
    noisy = replace(inputs, old_is_new=True)
    exact = replace(inputs, old_logp=inputs.logp.detach())
    counts = count_units(inputs.weight, inputs.rows, inputs.turns, 9.0)
    loss, gradient, metrics = run(name, noisy, PolicyLossSettings(), counts)
    again, slope, _ = run(name, exact, PolicyLossSettings(), counts)
    assert torch.equal(loss, again)
    assert torch.equal(gradient, slope)
    # On policy every loss has the plain policy gradient, whatever the clip.
    plain = -inputs.advantages * inputs.weight / counts["tokens"]
    torch.testing.assert_close(gradient, plain)
    assert mean_metrics(metrics)["actor/ppo_kl"] == 0.0


def mismatch(
    rollout: list[float], settings_: PolicyLossSettings
) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics of six on-policy tokens in two games, with ``old`` all -1."""
    logp = torch.full((6,), -1.0, dtype=torch.float64).requires_grad_()
    ones = torch.ones(6, dtype=torch.float64)
    rows = torch.tensor([0, 0, 0, 1, 1, 1])
    engine = torch.tensor(rollout, dtype=torch.float64)
    inputs = PolicyInputs(logp, logp.detach(), -ones, ones, rows, None, engine)
    loss, metrics = ppo_loss(inputs, settings_, {"tokens": 6.0, "rows": 2.0})
    return 6 * per_token_gradient(inputs, loss), mean_metrics(metrics)


OFF = PolicyLossSettings(tis_imp_ratio_cap=-1, token_reject_ratio=0, sequence_reject_ratio=0)


def test_P4_truncated_importance_sampling_caps_the_factor_and_reports_the_rate() -> None:
    rollout = [-1.0, -1.0 - math.log(5), -1.0 + math.log(2), -1.0, -1.0, -1.0]
    gradient, means = mismatch(rollout, replace(OFF, tis_imp_ratio_cap=2.0))
    expected = torch.tensor([1, 2, 0.5, 1, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected)
    assert means["actor/tis_clip_frac"] == pytest.approx(1 / 6)
    assert means["actor/tis_factor"] == pytest.approx(6.5 / 6)


def test_P4_token_reject_drops_far_tokens_on_both_sides() -> None:
    rollout = [-1.0, -1.0 - math.log(5), -1.0 + math.log(5), -1.1, -1.0, -1.0]
    gradient, means = mismatch(rollout, replace(OFF, token_reject_ratio=2.0))
    torch.testing.assert_close(gradient, torch.tensor([1, 0, 0, 1, 1, 1], dtype=torch.float64))
    assert means["actor/token_reject_frac"] == pytest.approx(2 / 6)


def test_P4_sequence_reject_drops_whole_games_and_counts_games() -> None:
    rollout = [-1.5, -1.4, -0.9, -1.5, -0.5, -1.0]
    gradient, means = mismatch(rollout, replace(OFF, sequence_reject_ratio=1.2))
    torch.testing.assert_close(gradient, torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.float64))
    assert means["actor/sequence_reject_frac"] == pytest.approx(1 / 2)
    assert means["actor/token_reject_frac"] == 0.0


def test_P4_guards_are_on_by_default_and_do_nothing_without_mismatch() -> None:
    assert PolicyLossSettings().tis_imp_ratio_cap > 0
    assert PolicyLossSettings().sequence_reject_ratio > 1
    gradient, means = mismatch([-1.0] * 6, PolicyLossSettings())
    torch.testing.assert_close(gradient, torch.ones(6, dtype=torch.float64))
    for rate in ("tis_clip_frac", "token_reject_frac", "sequence_reject_frac", "rollout_logp_gap"):
        assert means[f"actor/{rate}"] == 0.0


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_P7_non_finite_rollout_log_probs_are_masked_and_counted(bad: float) -> None:
    gradient, means = mismatch([-1.0, bad, -1.0, -1.0, -1.0, -1.0], PolicyLossSettings())
    torch.testing.assert_close(gradient, torch.tensor([1, 0, 1, 1, 1, 1], dtype=torch.float64))
    assert means["actor/rollout_nonfinite_frac"] == pytest.approx(1 / 6)


@pytest.mark.parametrize("name", list(LOSSES))
def test_A18_a_batch_in_which_everything_is_masked_has_loss_zero_and_a_graph(name: str) -> None:
    inputs = replace(random_inputs(0), weight=torch.zeros_like(random_inputs(0).weight))
    counts = count_units(inputs.weight, inputs.rows, inputs.turns)
    loss, gradient, metrics = run(name, inputs, PolicyLossSettings(), counts)
    assert float(loss.detach()) == 0.0
    assert not gradient.any()
    assert mean_metrics(metrics).get("actor/pg_loss") is None


def test_missing_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="turn of each token"):
        turn_ratio_loss(replace(fixture_b(), turns=None), TIGHT, COUNTS)


@pytest.mark.parametrize(
    "knobs",
    [
        {"clip_ratio_low": 1.5},
        {"clip_ratio_high": -0.1},
        {"clip_ratio_c": 1.0},
        {"loss_agg_mode": "mean"},
        {"token_reject_ratio": 0.9},
        {"sequence_reject_ratio": NAN},
        {"tis_imp_ratio_cap": NAN},
    ],
)
def test_settings_out_of_range_are_refused(knobs: dict[str, object]) -> None:
    with pytest.raises(UserError):
        PolicyLossSettings(**knobs)  # type: ignore[arg-type]
