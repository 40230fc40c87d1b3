"""IGPO, HCAPO, RELACE, RLSD, SDAR, OPID, ORSD, OPSD, SDPO: worked examples, reductions, chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from view_tables import (
    CHANGING,
    ESTIMATING,
    EXACT,
    FIXTURE_A,
    GAINS,
    HINDSIGHT,
    NAMES,
    PLAIN_LOGP,
    PLAYED,
    RUBRIC,
    TOLD_LOGP,
    changed,
    run,
    table_of,
    tokens_of,
)

from delta_belief_rl.algo import CREDITS, SCORERS, TRANSFORMS, build_credit
from delta_belief_rl.algo.base import VIEW, Credit
from delta_belief_rl.algo.chain import chain_of
from delta_belief_rl.algo.credit.distilling import Distillation, Distils
from delta_belief_rl.algo.credit.views import AsksViews, game_ratios, smoothed
from delta_belief_rl.types import FloatArray, UserError

# --- worked examples ------------------------------------------------------------------------------

JOINT = [
    *(1.876201, 2.060143, 1.974303, -1.900727, -1.447005, -0.723502),
    *(2.329923, 1.974303, -2.305398, -1.581895, -0.723502),
]
SEPARATE = [
    *(2.451538, 2.043292, 0.999998, -2.088653, -1.86185, -0.999998),
    *(2.678341, 0.999998, -3.041226, -2.179374, -0.999998),
]


@pytest.mark.parametrize(("norm", "expected"), [("joint", JOINT), ("separate", SEPARATE)])
def test_A13_igpo_matches_its_worked_example(norm: str, expected: Sequence[float]) -> None:
    got = run("igpo", table_of(gains=GAINS), norm=norm).turns
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_igpo_takes_gain_turns_from_the_table_and_not_from_the_reward() -> None:
    """Dropping the zero gains, as public code does, gives row 0 1.341219."""
    got = run("igpo", table_of(gains=GAINS), norm="joint").turns[0]
    assert got == pytest.approx(1.876201, abs=1e-5)
    assert abs(got - 1.341219) > 0.5


def test_igpo_discounts_by_turn_and_pays_other_channels_everywhere() -> None:
    table = table_of(
        lengths=(2, 2), returns=(1, 0), states="abab", told=[0.0] * 4, played=[0.0] * 4
    )
    fine = replace(table, rewards={**table.rewards, "validity": np.array([-1.0, 0, 0, 0])})
    got = run("igpo", fine, norm="separate", gamma=0.5, epsilon=0.0).turns
    # Gains: -1 against 0, last turns: 1 against 0, both half their mean's distance.
    np.testing.assert_allclose(got, [-1 + 0.5, 1, 1 - 0.5, -1], atol=1e-6)


def test_A13_hcapo_matches_its_worked_example() -> None:
    plain = run("hcapo", FIXTURE_A, smoothing=1.0).turns
    low = -1.731905
    np.testing.assert_allclose(
        plain,
        [1.808781, 1.722799, 2.128097, low, low, low, 1.863998, 2.001729, low, low, low],
        atol=1e-5,
    )
    low = -1.733522
    np.testing.assert_allclose(
        run("hcapo", FIXTURE_A).turns,
        [1.726024, 1.882232, 2.080502, low, low, low, 1.889487, 1.956865, low, low, low],
        atol=1e-5,
    )


def test_hcapo_keeps_hindsight_from_punishing_a_game_that_was_won() -> None:
    """Two turns of one won game with Q = 1 and 0.5; the second comes to 0, not to -0.707105."""
    table = table_of(lengths=(2,), returns=(1,), states="ab", told=[0.0, 0.0], played=[0.0, 0.0])
    low = replace(table, tokens={**table.tokens, VIEW + "hindsight": np.log([1.0, 1 / 3])})
    knobs = {"temperature": 1.0, "gamma": 1.0, "smoothing": 1.0}
    got = run("hcapo", low, **knobs, clip_low=0.0, clip_high=9.0).turns  # rho = 1.5, 0.5
    np.testing.assert_allclose(got, [0.707105, 0.0], atol=1e-5)
    lost = replace(low, won=np.zeros(2, dtype=np.bool_))
    got = run("hcapo", lost, **knobs, clip_low=0.0, clip_high=9.0).turns
    np.testing.assert_allclose(got, [0.707105, -0.707105], atol=1e-5)


RATIOS = [1.012754, 0.8, 1.2, 1.137457, 0.931271, 0.931271, 1.049958, 0.950042, 1, 1, 1]
HIND_RATIOS = [
    *(1.011233, 0.915002, 1.073765, 1.102054, 0.977434, 0.920513),
    *(0.99, 1.01, 0.986711, 1.006644, 1.006644),
]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (np.array(HINDSIGHT) / 5.0, HIND_RATIOS),
        (np.array(HINDSIGHT) - np.array(PLAYED), RATIOS),
        (np.array(HINDSIGHT) / 5.0 + 4000 * FIXTURE_A.traj, HIND_RATIOS),
    ],
)
def test_A13_ratios_match_the_worked_examples(
    scores: FloatArray, expected: Sequence[float]
) -> None:
    seen = np.ones(4, dtype=np.bool_)
    np.testing.assert_allclose(game_ratios(FIXTURE_A, scores, seen, 0.8, 1.2), expected, atol=2e-6)


def test_A13_smoothing_matches_the_worked_example() -> None:
    values = np.array([0.91401, 0.76, 1.2, 0, 0, 0, 0.99746, 0.950042, 0, 0, 0])
    want = [0.837005, 0.98, 1.2, 0, 0, 0, 0.973751, 0.950042, 0, 0, 0]
    np.testing.assert_allclose(smoothed(FIXTURE_A, values, 0.5), want, atol=1e-6)
    gap = replace(FIXTURE_A, valid=np.arange(11) != 1)
    np.testing.assert_allclose(smoothed(gap, values, 0.5)[:3], [(0.91401 + 1.2) / 2, 0.76, 1.2])


def test_A13_relace_matches_its_worked_example() -> None:
    expected = [
        *(1.597088, 1.57313, 1.573127, -1.727151, -1.57313, -0.866024),
        *(1.857213, 0.866024, -1.727151, -0.866024, -0.866024),
    ]
    np.testing.assert_allclose(run("relace", FIXTURE_A).turns, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({}, [0.926024, 0.836024, 0.866024, -0.916024, -0.856024, -0.866024]),
        ({"center": True}, [0.916024, 0.826024, 0.856024, -0.902691, -0.842691, -0.852691]),
        (
            {"mode": "sign_weight"},
            [0.952626, 0.779422, 0.866024, -0.952626, -0.824817, -0.866024],
        ),
    ],
)
def test_A13_orsd_matches_its_worked_example(
    knobs: dict[str, Any], expected: Sequence[float]
) -> None:
    found = changed("orsd", RUBRIC, **knobs)
    np.testing.assert_allclose(tokens_of(RUBRIC, found)[:6], expected, atol=1e-5)
    np.testing.assert_allclose(found.turns[0], np.mean(expected[:3]), atol=1e-5)
    assert found.stats["view_share"] == 1.0


def test_A13_rlsd_matches_the_same_numbers() -> None:
    got = tokens_of(RUBRIC, changed("rlsd", RUBRIC))[:6]
    want = [0.952626, 0.779422, 0.866024, -0.952626, -0.824817, -0.866024]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_opid_adds_a_share_of_the_gap() -> None:
    got = tokens_of(RUBRIC, changed("opid", RUBRIC, skill_w=0.5))[:6]
    base = tokens_of(RUBRIC, run("grpo", RUBRIC))[:6]
    gap = np.array(TOLD_LOGP[:6]) - np.array(PLAIN_LOGP[:6])
    np.testing.assert_allclose(got, base + 0.5 * gap, atol=EXACT)


def test_opid_tells_its_size_over_the_tokens_that_it_may_change() -> None:
    told = np.array(PLAIN_LOGP) + 2.0
    told[np.repeat(RUBRIC.traj == 0, RUBRIC.n_tokens)] = np.nan
    valid = RUBRIC.valid.copy()
    valid[-1] = False
    table = replace(RUBRIC, valid=valid, tokens={**RUBRIC.tokens, VIEW + "retry": told})
    assert changed("opid", table, skill_w=0.5).stats["correction_size"] == pytest.approx(1.0)
    nothing = {**RUBRIC.tokens, VIEW + "retry": np.full(len(told), np.nan)}
    found = changed("opid", replace(RUBRIC, tokens=nothing), skill_w=0.5)
    assert found.stats["correction_size"] == 0.0


def test_orsd_bounds_the_gap_and_counts_where_it_did() -> None:
    far = replace(RUBRIC, tokens={**RUBRIC.tokens, VIEW + "rubric": np.array(PLAIN_LOGP) + 7.0})
    found = changed("orsd", far)
    base = tokens_of(far, run("grpo", far))
    np.testing.assert_allclose(tokens_of(far, found), base + 0.1, atol=EXACT)
    assert found.stats["correction_clipped"] == 1.0


def test_a_transform_starts_from_the_tokens_of_the_one_before() -> None:
    first = changed("opid", RUBRIC, skill_w=0.5)
    both = changed("orsd", RUBRIC, first)
    gap = np.clip(np.array(TOLD_LOGP) - np.array(PLAIN_LOGP), -1, 1)
    np.testing.assert_allclose(
        tokens_of(RUBRIC, both), tokens_of(RUBRIC, first) + 0.1 * gap, atol=EXACT
    )


@pytest.mark.parametrize(("name", "view"), [("opsd", "reference"), ("sdpo", "retry")])
def test_self_distillation_has_weights_and_no_advantages(name: str, view: str) -> None:
    told = FIXTURE_A.tokens[VIEW + view].copy()
    told[FIXTURE_A.traj == 1] = np.nan
    found = run(name, replace(FIXTURE_A, tokens={**FIXTURE_A.tokens, VIEW + view: told}))
    want = (FIXTURE_A.traj != 1).astype(float)
    assert found.distil is not None
    np.testing.assert_array_equal(found.distil, want)
    np.testing.assert_array_equal(found.weight, want)
    assert not found.turns.any()
    assert found.stats["view_share"] == 0.75
    assert found.stats["distilled_turns"] == pytest.approx(8 / 11)
    assert found.stats["frac_dead_groups"] == 0.0


@pytest.mark.parametrize(("name", "view"), [("opsd", "reference"), ("sdpo", "retry")])
def test_A18_without_any_teacher_nothing_is_left_to_train(name: str, view: str) -> None:
    nothing = np.full(11, np.nan)
    found = run(name, replace(FIXTURE_A, tokens={**FIXTURE_A.tokens, VIEW + view: nothing}))
    assert not found.weight.any()
    assert found.stats["distilled_turns"] == 0.0
    assert found.stats["frac_dead_groups"] == 1.0


def test_sdar_leaves_the_advantages_and_marks_the_turns() -> None:
    before = run("grpo", FIXTURE_A)
    found = changed("sdar", FIXTURE_A)
    np.testing.assert_array_equal(found.turns, before.turns)
    np.testing.assert_array_equal(found.weight, before.weight)
    assert found.distil is not None
    assert found.distil.all()


# --- what they reduce to --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "knobs"), [("hcapo", {"hindsight_w": 0.0}), ("relace", {"outcome_w": 0.0})]
)
def test_A13_an_estimator_without_its_own_term_is_grpo(name: str, knobs: dict[str, Any]) -> None:
    for std in (True, False):
        got = run(name, FIXTURE_A, norm_adv_by_std_in_grpo=std, **knobs).turns
        want = run("grpo", FIXTURE_A, norm_adv_by_std_in_grpo=std).turns
        np.testing.assert_allclose(got, want, atol=EXACT)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("rlsd", {"mix": 0.0}),
        ("rlsd", {"clip": 0.0}),
        ("opid", {"skill_w": 0.0}),
        ("orsd", {"correction_w": 0.0}),
        ("orsd", {"mode": "sign_weight", "sign_mix": 0.0}),
    ],
)
def test_A13_a_transform_without_its_correction_changes_nothing(
    name: str, knobs: dict[str, Any]
) -> None:
    found = changed(name, RUBRIC, **knobs)
    before = run("grpo", RUBRIC)
    np.testing.assert_allclose(tokens_of(RUBRIC, found), tokens_of(RUBRIC, before), atol=1e-12)
    np.testing.assert_allclose(found.turns, before.turns, atol=1e-12)


def test_A13_igpo_with_one_turn_a_game_is_grpo() -> None:
    table = table_of(
        lengths=(1,) * 4, returns=(1, 0.25, 0, 0.5), states="aaaa", told=[0.0] * 4, played=[0.0] * 4
    )
    got = run("igpo", table, unbiased_std=True).turns
    np.testing.assert_allclose(got, run("grpo", table).turns, atol=1e-6)


def test_A13_centred_orsd_leaves_the_mean_of_each_game() -> None:
    found = tokens_of(RUBRIC, changed("orsd", RUBRIC, center=True))
    base = tokens_of(RUBRIC, run("grpo", RUBRIC))
    np.testing.assert_allclose(
        found.reshape(4, 3).mean(axis=1), base.reshape(4, 3).mean(axis=1), atol=EXACT
    )


def test_ratios_without_smoothing_or_spread_are_a_discount_alone() -> None:
    """Equal log-probs in hindsight leave ``Q = gamma^(K-1-k) R``."""
    flat = replace(FIXTURE_A, tokens={**FIXTURE_A.tokens, VIEW + "hindsight": np.full(11, -2.0)})
    blank = replace(flat, tokens={**flat.tokens, VIEW + "hindsight": np.full(11, np.nan)})
    np.testing.assert_allclose(run("hcapo", flat).turns, run("hcapo", blank).turns, atol=EXACT)
    assert run("hcapo", blank).stats["view_share"] == 0.0
    assert run("hcapo", flat).stats["ratio_std"] == pytest.approx(0.0)


# --- curriculum -----------------------------------------------------------------------------------


def test_igpo_moves_the_weights_with_the_updates_of_the_table() -> None:
    table = table_of(gains=GAINS)
    credit = build_credit("igpo", {"curriculum_steps": 10})
    for update, final, gain in ((0, 0.5, 1.0), (5, 0.75, 0.75), (10, 1.0, 0.5), (99, 1.0, 0.5)):
        found = credit.apply(replace(table, update=update))
        assert found.stats["outcome_weight"] == final
        assert found.stats["gain_weight"] == gain
        assert found.rewards.sum() == pytest.approx(final * 2.0 + gain * 0.95)
        np.testing.assert_array_equal(found.rewards, credit.paid(replace(table, update=update)))


# --- chains, needs and settings -------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATING)
def test_an_estimator_refuses_to_stand_behind_another(name: str) -> None:
    with pytest.raises(UserError, match="put it first"):
        build_credit(name).apply(FIXTURE_A, run("grpo", FIXTURE_A))


@pytest.mark.parametrize("name", CHANGING)
def test_a_transform_refuses_to_stand_alone(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} in algorithm.transforms"):
        build_credit(name, transform=True).apply(FIXTURE_A)


def test_two_methods_of_a_chain_cannot_both_distil() -> None:
    with pytest.raises(UserError, match="distil; keep one"):
        changed("sdar", FIXTURE_A, run("opsd", FIXTURE_A))


def test_a_chain_of_two_transforms_is_the_two_of_them() -> None:
    parts = [
        ("grpo", build_credit("grpo")),
        ("rlsd", build_credit("rlsd", transform=True)),
        ("orsd", build_credit("orsd", transform=True)),
    ]
    got = chain_of(parts).apply(RUBRIC)
    want = changed("orsd", RUBRIC, changed("rlsd", RUBRIC))
    np.testing.assert_array_equal(tokens_of(RUBRIC, got), tokens_of(RUBRIC, want))


def every() -> list[tuple[str, Credit]]:
    known: list[tuple[str, Credit]] = [(name, build_credit(name)) for name in ESTIMATING]
    return [*known, *((name, build_credit(name, transform=True)) for name in CHANGING)]


def test_every_view_that_is_required_has_somebody_who_tells_it() -> None:
    asked: set[str] = set()
    for name, credit in every():
        views = {need.removeprefix(VIEW) for need in credit.requires if need.startswith(VIEW)}
        asked |= views
        if name == "igpo":
            assert views == set()
            continue
        assert isinstance(credit, AsksViews)
        assert {scorer.view for scorer in credit.scorers("strict")} == views
        assert views <= set(SCORERS)
    assert asked == set(NAMES)
    assert all(SCORERS[name]().view == name for name in NAMES)


@pytest.mark.parametrize("teacher", ["policy", "base", "ema"])
def test_the_teacher_is_who_reads_the_view(teacher: str) -> None:
    for name in (*ESTIMATING[1:], *CHANGING):
        credit = build_credit(name, {"teacher": teacher}, transform=name in CHANGING)
        assert isinstance(credit, AsksViews)
        assert [scorer.model for scorer in credit.scorers("compatible")] == [teacher]


def test_what_the_update_is_told() -> None:
    found = {name: credit.distillation for name, credit in every() if isinstance(credit, Distils)}
    assert found == {
        "opsd": Distillation("reference", "sampled", ratio_cap=0.0),
        "sdpo": Distillation("retry", "sampled", ratio_cap=2.0),
        "sdar": Distillation("reference", "gate", coefficient=0.01, slope=5.0, ratio_cap=0.0),
    }
    wide = build_credit("sdpo", {"top_k": 20, "beta": 1.0, "tail": "renormalise"})
    assert isinstance(wide, Distils)
    assert wide.distillation == Distillation(
        "retry", "top", beta=1.0, top_k=20, tail="renormalise", ratio_cap=2.0
    )


@pytest.mark.parametrize(
    ("name", "knobs", "said"),
    [
        ("igpo", {"norm": "none"}, "algorithm.igpo.norm"),
        ("igpo", {"curriculum_steps": -1}, "algorithm.igpo.curriculum_steps"),
        ("hcapo", {"temperature": 0.0}, "algorithm.hcapo.temperature"),
        ("hcapo", {"clip_low": 1.5}, "algorithm.hcapo.clip_low"),
        ("hcapo", {"clip_high": 0.5}, "algorithm.hcapo.clip_high"),
        ("hcapo", {"smoothing": 2.0}, "algorithm.hcapo.smoothing"),
        ("hcapo", {"hint_words": 0}, "algorithm.hcapo.hint_words"),
        ("hcapo", {"teacher": "critic"}, "algorithm.hcapo.teacher"),
        ("relace", {"outcome_w": -1.0}, "algorithm.relace.outcome_w"),
        ("relace", {"gamma": 1.5}, "algorithm.gamma"),
        ("rlsd", {"mix": 1.5}, "algorithm.rlsd.mix"),
        ("rlsd", {"clip": -0.1}, "algorithm.rlsd.clip"),
        ("sdar", {"coefficient": -1.0}, "algorithm.sdar.coefficient"),
        ("opid", {"threshold": 2.0}, "algorithm.opid.threshold"),
        ("orsd", {"mode": "both"}, "algorithm.orsd.mode"),
        ("orsd", {"clip": 0.0}, "algorithm.orsd.clip"),
        ("orsd", {"bundles": 0}, "algorithm.orsd.bundles"),
        ("orsd", {"correlation": "kendall"}, "algorithm.orsd.correlation"),
        ("opsd", {"beta": 1.1}, "algorithm.opsd.beta"),
        ("opsd", {"tail": "none"}, "algorithm.opsd.tail"),
        ("sdpo", {"top_k": -1}, "algorithm.sdpo.top_k"),
        ("sdpo", {"ratio_cap": -1.0}, "algorithm.sdpo.ratio_cap"),
    ],
)
def test_a_knob_out_of_range_is_named(name: str, knobs: Mapping[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build_credit(name, knobs, transform=name in CHANGING)


def test_A16_methods_that_compare_games_say_so() -> None:
    comparing = {name for name, credit in every() if credit.needs_group}
    assert comparing == {"igpo", "hcapo", "relace", "orsd"}


def test_igpo_takes_the_channels_that_there_are() -> None:
    table = table_of(gains=GAINS)
    for name in ("belief", "outcome"):
        kept = {one: column for one, column in table.rewards.items() if one != name}
        found = run("igpo", replace(table, rewards=kept))
        assert np.isfinite(found.turns).all()
        assert found.rewards.sum() == pytest.approx(2.0 if name == "belief" else 0.95)


def test_the_names_are_in_the_closed_lists() -> None:
    assert set(ESTIMATING) <= set(CREDITS)
    assert set(CHANGING) <= set(TRANSFORMS)
