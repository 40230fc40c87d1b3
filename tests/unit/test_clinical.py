"""Credit for questions by the uncertainty that their answers remove."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_tables import Act, table_of

from delta_belief_rl.algo.shapers.clinical import (
    FORMS,
    LEAST_PROBABILITY,
    ClinicalSettings,
    entropies,
    question_credit,
    true_state_logp,
)
from delta_belief_rl.algo.shapers.questions import question_rewards
from delta_belief_rl.types import FloatArray, Turn, UserError, Verdict


def by_bayes(prior: list[float], likelihoods: list[list[float]]) -> FloatArray:
    """The beliefs before and after each answer, ``[1, K + 1, H]``."""
    beliefs = [np.array(prior)]
    for likelihood in likelihoods:
        product = beliefs[-1] * likelihood
        beliefs.append(product / product.sum())
    return np.array(beliefs)[None]


# The second answer is as likely in every state, so it tells nothing.
CASE = by_bayes([0.5, 0.3, 0.2], [[0.8, 0.3, 0.1], [0.5, 0.5, 0.5], [0.9, 0.1, 0.2]])
ALL = np.ones((1, 3), dtype=np.bool_)


def credit(beliefs: FloatArray, asks: np.ndarray, truth: int = 0, **knobs: Any) -> FloatArray:
    chosen = replace(ClinicalSettings(beta=1.0), **knobs)
    hidden = np.full(len(beliefs), truth)
    measure = true_state_logp(beliefs, hidden) if chosen.form == "logp" else entropies(beliefs)
    return question_credit(measure, asks, chosen)


def test_A13_question_credit_matches_its_worked_example() -> None:
    np.testing.assert_allclose(
        CASE[0, 1:],
        [[0.784314, 0.176471, 0.039216]] * 2 + [[0.965147, 0.024129, 0.010724]],
        atol=1e-5,
    )
    np.testing.assert_allclose(
        entropies(CASE)[0], [0.937231, 0.567679, 0.567679, 0.157232], atol=1e-5
    )
    np.testing.assert_allclose(credit(CASE, ALL)[0], [0.369552, 0, 0.410446], atol=1e-5)
    np.testing.assert_allclose(credit(CASE, ALL, beta=0.5)[0], [0.184776, 0, 0.205223], atol=1e-5)
    np.testing.assert_allclose(
        credit(CASE, ALL, cost=0.1)[0], [0.269552, -0.1, 0.310446], atol=1e-5
    )


def test_the_log_form_pays_what_the_true_state_gains() -> None:
    want = [np.log(0.784314 / 0.5), 0, np.log(0.965147 / 0.784314)]
    np.testing.assert_allclose(credit(CASE, ALL, form="logp")[0], want, atol=1e-5)
    # Another true state loses by the same answers.
    assert credit(CASE, ALL, truth=1, form="logp")[0, 0] == pytest.approx(
        np.log(0.176471 / 0.3), abs=1e-5
    )


def test_a_rise_of_uncertainty_costs_except_in_the_positive_form() -> None:
    back = CASE[:, ::-1]
    np.testing.assert_allclose(credit(back, ALL)[0], [-0.410446, 0, -0.369552], atol=1e-5)
    assert not credit(back, ALL, form="positive").any()
    np.testing.assert_allclose(credit(CASE, ALL, form="positive"), credit(CASE, ALL), atol=1e-12)


beliefs = st.lists(
    st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any), min_size=2, max_size=6
).map(lambda rows: np.array([np.array(row) / sum(row) for row in rows])[None])


@settings(max_examples=60, deadline=None)
@given(case=beliefs, form=st.sampled_from(["entropy", "logp"]), truth=st.integers(0, 2))
def test_the_credit_of_a_game_telescopes_and_is_bounded(
    case: FloatArray, form: str, truth: int
) -> None:
    asks = np.ones((1, case.shape[1] - 1), dtype=np.bool_)
    total = credit(case, asks, truth, form=form, beta=0.5).sum()
    if form == "entropy":
        ends = entropies(case)[0, [0, -1]]
        assert total == pytest.approx(0.5 * (ends[0] - ends[1]), abs=1e-9)
        assert -0.5 - 1e-9 <= total <= 0.5 + 1e-9
    else:
        first, last = true_state_logp(case, np.array([truth]))[0, [0, -1]]
        assert total == pytest.approx(0.5 * (last - first), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(case=beliefs)
def test_asking_in_a_circle_earns_nothing_but_in_the_positive_form(case: FloatArray) -> None:
    there_and_back = np.concatenate([case, case[:, ::-1]], axis=1)
    asks = np.ones((1, there_and_back.shape[1] - 1), dtype=np.bool_)
    assert credit(there_and_back, asks).sum() == pytest.approx(0.0, abs=1e-9)
    up_and_down = np.abs(np.diff(entropies(there_and_back))).sum()
    earned = credit(there_and_back, asks, form="positive").sum()
    assert earned == pytest.approx(0.5 * up_and_down, abs=1e-9)


def test_zeros_certainty_and_a_single_state() -> None:
    sure = np.array([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]])
    np.testing.assert_allclose(entropies(sure)[0], [np.log(2) / np.log(3), 0, 0], atol=1e-12)
    np.testing.assert_allclose(credit(sure, ALL[:, :2])[0], [np.log(2) / np.log(3), 0])
    np.testing.assert_array_equal(entropies(np.ones((1, 2, 1))), np.zeros((1, 2)))
    # What was ruled out is held at the floor, so that nothing is infinite.
    lost = credit(sure, ALL[:, :2], truth=1, form="logp")[0]
    np.testing.assert_allclose(lost, [np.log(LEAST_PROBABILITY / 0.5), 0])


@pytest.mark.parametrize("form", FORMS)
def test_turns_that_do_not_ask_and_unknown_beliefs_are_paid_nothing(form: str) -> None:
    asks = np.array([[True, False, False]])
    got = credit(CASE, asks, form=form, cost=0.1)
    np.testing.assert_array_equal(got[0, 1:], [0, 0])
    assert got[0, 0] == credit(CASE, ALL, form=form, cost=0.1)[0, 0]
    unknown = CASE.copy()
    unknown[0, 1] = np.nan
    np.testing.assert_array_equal(credit(unknown, ALL, form=form, cost=0.1)[0, :2], [0, 0])
    assert credit(unknown, ALL, form=form)[0, 2] == credit(CASE, ALL, form=form)[0, 2]


def turns_of(pairs: list[tuple[float, float] | None], answer: int = -1) -> list[Turn]:
    """Turns with the entropies around them; ``answer`` is the number of one that asks nothing."""
    return [
        Turn(
            n, n, n + 1, (-1.0,), 0, "q", "a", Verdict.OTHER, is_guess=n == answer, uncertainty=pair
        )
        for n, pair in enumerate(pairs)
    ]


def test_J1_the_channel_pays_valid_rows_of_games_of_any_length() -> None:
    table = table_of([[Act("s")] * 3, [Act("s")]], invalid=[(0, 2)])
    around = entropies(CASE)[0]
    pairs = [(float(around[k]), float(around[k + 1])) for k in range(3)]
    chosen = ClinicalSettings(beta=1.0, cost=0.05)
    got = question_rewards(table, turns_of([*pairs, (0.9, 0.4)]), chosen)
    np.testing.assert_allclose(got, [0.319552, -0.05, 0, 0.45], atol=1e-5)
    silent = question_rewards(table, turns_of([*pairs, (0.9, 0.4)], answer=0), chosen)
    np.testing.assert_allclose(silent, [0, -0.05, 0, 0.45], atol=1e-5)
    assert question_rewards(table_of([]), [], chosen).shape == (0,)


def test_J1_a_failed_turn_takes_nothing_from_its_neighbours() -> None:
    table = table_of([[Act("s")] * 3], invalid=[(0, 1)])
    turns = turns_of([(1.0, 0.5), None, (0.5, 0.2)])
    got = question_rewards(table, turns, ClinicalSettings(beta=1.0))
    np.testing.assert_allclose(got, [0.5, 0.0, 0.3])


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="beliefs for"):
        question_credit(entropies(CASE), np.ones((1, 4), dtype=np.bool_))


@pytest.mark.parametrize(
    ("knob", "value"), [("form", "kl"), ("beta", -0.1), ("cost", -0.1), ("beta", float("inf"))]
)
def test_clinical_settings_out_of_range_are_refused_by_name(knob: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"algorithm\.clinical\.{knob} is"):
        ClinicalSettings(**{knob: value})
