"""DTCA: its worked example, its reductions, what it must not depend on, and its state."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from delta_belief_rl.algo import TRANSFORMS, build_credit
from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.algo.catalogue import CATALOGUE, Label
from delta_belief_rl.algo.credit.dtca import Dtca, DtcaSettings, step_odds
from delta_belief_rl.algo.losses.policy import PolicyInputs, PolicyLossSettings
from delta_belief_rl.algo.losses.registry import LOSSES
from delta_belief_rl.types import FloatArray, IntArray, TurnTable, UserError

NUM, VERB, PUNCT = 0.0, 1.0, 2.0
EXACT = 1e-5
GAIN = [0.35 / 3, 0.175, 0.0, math.nan]
ENTROPY = [0.8, 0.6, 0.4, 0.2]
_FLAGS = ("terminal", "truncated", "won")
CREDIT = [0.674314, 1.509113, 0.834216, 0.982357]


def table_of(
    gain: list[list[float]],
    category: list[list[float]],
    entropy: list[list[float]],
    step: list[list[int]] | None = None,
    valid: list[bool] | None = None,
    update: int = 0,
) -> TurnTable:
    """A response of one turn for each entry."""
    count = len(gain)
    steps = step or [list(range(len(row))) for row in gain]
    return TurnTable(
        group=np.zeros(count, dtype=np.int64),
        traj=np.arange(count),
        turn=np.zeros(count, dtype=np.int64),
        n_tokens=np.array([len(row) for row in gain], dtype=np.int64),
        valid=np.array(valid or [True] * count),
        terminal=np.ones(count, dtype=np.bool_),
        truncated=np.zeros(count, dtype=np.bool_),
        won=np.zeros(count, dtype=np.bool_),
        tokens={
            "gain": np.concatenate([np.array(row, dtype=float) for row in gain]),
            "category": np.concatenate([np.array(row, dtype=float) for row in category]),
            "commit_entropy": np.concatenate([np.array(row, dtype=float) for row in entropy]),
            "commit_step": np.concatenate([np.array(row, dtype=float) for row in steps]),
        },
        update=update,
    )


def example(update: int = 0) -> TurnTable:
    """The worked example: NUM, VERB, NUM, PUNCT, one a step."""
    return table_of([GAIN], [[NUM, VERB, NUM, PUNCT]], [ENTROPY], update=update)


def of_turns(values: list[float]) -> Advantage:
    """What an estimator hands on."""
    return Advantage(turns=np.array(values), weight=np.ones(len(values)))


def tokens(advantage: Advantage) -> FloatArray:
    assert advantage.tokens is not None
    return advantage.tokens


def test_A13_dtca_matches_its_worked_example() -> None:
    method, table = Dtca(DtcaSettings(step_share=1.0)), example()
    got = tokens(method.apply(table, of_turns([0.8])))
    assert method.overall == pytest.approx(0.097222, abs=EXACT)
    assert method.means == {
        int(NUM): pytest.approx(0.058333, abs=EXACT),
        int(VERB): pytest.approx(0.175, abs=EXACT),
    }
    weights = method.category_weights(table.tokens["category"])
    assert_allclose(weights, [0.823292, 1.475341, 0.823292, 1.0], atol=EXACT)
    mean_one = weights / weights.mean()
    assert_allclose(mean_one, [0.798939, 1.431701, 0.798939, 0.970421], atol=EXACT)
    credit = method.token_credit(weights, np.array(ENTROPY))
    assert_allclose(credit, CREDIT, atol=EXACT)
    steps, odds = step_odds(np.arange(4), credit)
    assert steps.tolist() == [0, 1, 2, 3]
    assert_allclose(odds, [0.168578, 0.377278, 0.208554, 0.245589], atol=EXACT)
    assert_allclose(got, 0.8 * np.array(CREDIT), atol=EXACT)


def policy_loss(advantages: FloatArray) -> float:
    """The clipped loss of the worked example, a mean over its four tokens."""
    inputs = PolicyInputs(
        logp=torch.tensor([-0.9, -1.2, -0.3, -0.1]),
        old_logp=torch.tensor([-1.0, -1.0, -0.4, -0.1]),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weight=torch.ones(4),
        rows=torch.zeros(4, dtype=torch.int64),
    )
    settings = PolicyLossSettings(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=10.0)
    loss, _ = LOSSES["ppo"](inputs, settings, {"tokens": 4.0, "turns": 1.0, "rows": 1.0})
    return float(loss)


@pytest.mark.parametrize(
    ("token", "wanted"), [(0, -0.596186), (1, -0.988446), (2, -0.737561), (3, -0.785885)]
)
def test_A13_the_loss_of_each_token_is_that_of_the_worked_example(
    token: int, wanted: float
) -> None:
    alone = np.where(np.arange(4) == token, 0.8 * np.array(CREDIT), 0.0)
    assert 4.0 * policy_loss(alone) == pytest.approx(wanted, abs=EXACT)


def test_A13_the_loss_of_all_steps_and_of_two_is_that_of_the_worked_example() -> None:
    whole = tokens(Dtca(DtcaSettings(step_share=1.0)).apply(example(), of_turns([0.8])))
    assert policy_loss(whole) == pytest.approx(-0.777020, abs=EXACT)
    for update in range(200):
        half = tokens(Dtca().apply(example(update), of_turns([0.8])))
        if np.flatnonzero(half).tolist() == [0, 1]:
            break
    else:
        pytest.fail("the steps 0 and 1 were never drawn together")
    assert policy_loss(half) == pytest.approx(-0.792316, abs=EXACT)


def test_steps_are_drawn_by_their_odds() -> None:
    rounds = 1500
    first = np.zeros(4)
    for update in range(rounds):
        method = Dtca(DtcaSettings(step_share=0.25))
        first += tokens(method.apply(example(update), of_turns([1.0]))) != 0
    odds = np.array([0.168578, 0.377278, 0.208554, 0.245589])
    # Four standard deviations of a share.
    assert_allclose(first / rounds, odds, atol=4 * math.sqrt(0.25 / rounds))


def test_every_response_keeps_its_mean_over_the_steps_that_are_drawn() -> None:
    got = tokens(Dtca().apply(example(3), of_turns([1.0])))
    drawn = got != 0
    assert drawn.sum() == 2
    assert_allclose(got[drawn], np.array(CREDIT)[drawn] * 2.0, atol=EXACT)


def test_weights_have_mean_one() -> None:
    method = Dtca(DtcaSettings(step_share=1.0))
    table = table_of(
        [GAIN, [0.4, -0.1, math.nan]],
        [[NUM, VERB, NUM, PUNCT], [VERB, PUNCT, NUM]],
        [ENTROPY, [0.1, 1.9, 0.3]],
    )
    got = tokens(method.apply(table, of_turns([1.0, -2.0])))
    assert got[:4].mean() == pytest.approx(1.0)
    assert got[4:].mean() == pytest.approx(-2.0)


def test_A14_with_all_steps_and_a_wide_tau_nothing_changes() -> None:
    method = Dtca(DtcaSettings(tau=1e12, step_share=1.0))
    table = table_of([GAIN, GAIN], [[NUM, VERB, NUM, PUNCT]] * 2, [ENTROPY, ENTROPY])
    assert_allclose(
        tokens(method.apply(table, of_turns([0.7, -0.7]))), np.repeat([0.7, -0.7], 4), atol=1e-9
    )


def test_tokens_of_one_step_are_drawn_together_and_a_step_counts_by_their_mean() -> None:
    steps, odds = step_odds(np.array([1, 0, 1]), np.array([1.0, 2.0, 3.0]))
    assert steps.tolist() == [0, 1]
    assert odds.tolist() == [0.5, 0.5]
    table = table_of(
        [[0.1, 0.2, 0.2, math.nan]], [[NUM, VERB, NUM, PUNCT]], [ENTROPY], [[0, 1, 1, 2]]
    )
    for update in range(20):
        got = tokens(Dtca().apply(replace(table, update=update), of_turns([1.0]))) != 0
        assert got[1] == got[2]
        assert len({0, 1, 2} & {s for s, used in zip([0, 1, 1, 2], got, strict=True) if used}) == 2


def two_responses() -> TurnTable:
    return table_of(
        [GAIN, [0.4, -0.1, math.nan], [0.3, math.nan]],
        [[NUM, VERB, NUM, PUNCT], [VERB, PUNCT, NUM], [PUNCT, VERB]],
        [ENTROPY, [0.1, 1.9, 0.3], [0.5, 0.5]],
        update=4,
    )


def rows_in(table: TurnTable, order: IntArray) -> TurnTable:
    ends = np.cumsum(table.n_tokens)
    spans = [np.arange(int(ends[r] - table.n_tokens[r]), int(ends[r])) for r in order.tolist()]
    index = np.concatenate([np.zeros(0, dtype=np.int64), *spans])
    return replace(
        table,
        **{
            name: getattr(table, name)[order]
            for name in ("group", "traj", "turn", "n_tokens", "valid", *_FLAGS)
        },
        tokens={name: column[index] for name, column in table.tokens.items()},
    )


def test_A9_dtca_does_not_depend_on_the_order_of_rows() -> None:
    table, order = two_responses(), np.array([2, 0, 1])
    straight, turned = Dtca(), Dtca()
    one = tokens(straight.apply(table, of_turns([1.0, -1.0, 0.5])))
    other = tokens(turned.apply(rows_in(table, order), of_turns([0.5, 1.0, -1.0])))
    parts = np.split(one, np.cumsum(table.n_tokens)[:-1])
    assert other.tolist() == np.concatenate([parts[row] for row in order]).tolist()
    assert straight.state_dict() == turned.state_dict()


def test_rounding_of_any_number_draws_the_same_steps_and_every_turn_its_own() -> None:
    whole = [[0.2, 0.1, 0.05, 0.15, 0.3, math.nan]] * 6
    table = table_of(whole, [[NUM, VERB, NUM, VERB, PUNCT, NUM]] * 6, [[0.5] * 6] * 6)
    turns = np.array([0, 1, 0, 1, 0, 1])
    table = replace(table, traj=np.array([0, 0, 1, 1, 2, 2]), turn=turns)
    moved = {
        name: column if name in ("category", "commit_step") else column * (1 + 2e-15)
        for name, column in table.tokens.items()
    }
    before = of_turns([1.0] * 6)
    drawn = tokens(Dtca().apply(table, before)) != 0
    assert (
        drawn.tolist() == (tokens(Dtca().apply(replace(table, tokens=moved), before)) != 0).tolist()
    )
    # Equal answers of other games and other turns draw for themselves.
    assert len({tuple(row) for row in drawn.reshape(6, 6).tolist()}) > 3


def test_J1_dtca_does_not_see_junk_on_turns_that_are_not_valid() -> None:
    table = two_responses()
    valid = np.array([True, False, True])
    used = np.repeat(valid, table.n_tokens)
    clean = replace(table, valid=valid)
    for junk in (9.0, math.nan, -1e300):
        dirty = {name: np.where(used, column, junk) for name, column in clean.tokens.items()}
        one, other = Dtca(), Dtca()
        before = of_turns([1.0, 0.0, 0.5])
        left = tokens(one.apply(clean, before))
        right = tokens(other.apply(replace(clean, tokens=dirty), before))
        assert left.tolist() == right.tolist()
        assert not left[~used].any()
        assert one.state_dict() == other.state_dict()


def test_a_response_of_one_step_is_trained_whole_and_teaches_no_mean() -> None:
    method = Dtca()
    table = table_of([[math.nan, math.nan]], [[NUM, VERB]], [[0.0, 0.0]], [[0, 0]])
    assert tokens(method.apply(table, of_turns([0.4]))).tolist() == [0.4, 0.4]
    assert method.state_dict() == {"overall": None, "means": []}


def test_no_rows_give_no_advantages() -> None:
    whole, nothing = example(), np.zeros(0)
    empty = rows_in(replace(whole, tokens={}), np.zeros(0, dtype=np.int64))
    empty = replace(empty, tokens=dict.fromkeys(whole.tokens, nothing))
    assert len(tokens(Dtca().apply(empty, of_turns([])))) == 0


def test_the_running_means_move_by_what_decay_leaves() -> None:
    method = Dtca(DtcaSettings(decay=0.75))
    method.apply(example(), of_turns([1.0]))
    later = table_of([[0.5, math.nan]], [[VERB, NUM]], [[1.0, 1.0]])
    method.apply(later, of_turns([1.0]))
    assert method.means[int(VERB)] == pytest.approx(0.75 * 0.175 + 0.25 * 0.5)
    assert method.means[int(NUM)] == pytest.approx(0.175 / 3, abs=1e-9)
    assert method.overall == pytest.approx(0.75 * 0.291667 / 3 + 0.25 * 0.5, abs=EXACT)


def test_extreme_gains_with_a_small_tau_stay_finite_and_inside_the_bounds() -> None:
    method = Dtca(DtcaSettings(tau=1e-6, step_share=1.0))
    table = table_of([[1.0, -1.0, math.nan]], [[NUM, VERB, PUNCT]], [[1.0, 1.0, 1.0]])
    got = tokens(method.apply(table, of_turns([1.0])))
    assert np.isfinite(got).all()
    assert got.max() / got.min() <= 4.0 / 0.25 + 1e-9


def test_saved_and_loaded_means_make_the_same_next_update() -> None:
    straight = Dtca()
    straight.apply(two_responses(), of_turns([1.0, -1.0, 0.5]))
    resumed = Dtca()
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    one, other = (m.apply(example(9), of_turns([0.3])) for m in (straight, resumed))
    assert tokens(one).tolist() == tokens(other).tolist()
    assert straight.state_dict() == resumed.state_dict()


@pytest.mark.parametrize(
    "state",
    [{}, {"overall": 1.0}, {"overall": "x", "means": []}, {"overall": 0.1, "means": [["a", 1.0]]}],
)
def test_a_state_of_something_else_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(UserError, match="means of dtca cannot be read"):
        Dtca().load_state_dict(state)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("tau", 0.0),
        ("decay", 1.5),
        ("weight_low", -0.1),
        ("weight_low", 0.0),
        ("weight_low", 1.1),
        ("weight_high", 0.9),
        ("step_share", 0.0),
        ("step_share", 1.1),
    ],
)
def test_a_knob_out_of_range_is_refused_by_name(knob: str, value: float) -> None:
    with pytest.raises(UserError, match=f"algorithm.dtca.{knob}"):
        build_credit("dtca", {knob: value}, transform=True)


def test_it_is_a_transform_that_needs_one_before_it() -> None:
    assert "dtca" in TRANSFORMS
    assert CATALOGUE["dtca"].label is Label.DIGEST
    with pytest.raises(UserError, match="dtca changes the advantages of another method"):
        Dtca().apply(example())


def test_a_table_without_a_denoisers_columns_is_refused_by_name() -> None:
    bare = replace(example(), tokens={"logp": np.zeros(4)})
    with pytest.raises(ValueError, match="no column gain"):
        Dtca().apply(bare, of_turns([1.0]))
