"""Clinical cases: how they are drawn, and who plays them well."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest

from delta_belief_rl.algo.shapers.clinical import SURE
from delta_belief_rl.envs.clinical import ENVIRONMENTS
from delta_belief_rl.envs.clinical.game import ClinicalCase
from delta_belief_rl.envs.clinical.players import (
    Bayes,
    Impatient,
    Player,
    Random,
    expected_gain,
    play,
)
from delta_belief_rl.envs.clinical.sheets import SIMULATORS, STRATA, sheets
from delta_belief_rl.envs.clinical.tasks import SPLITS, Case, make_tasks, rules, split_of
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.types import Task

OPTIONS = EnvOptions(10)
TURNS = 10


@cache
def tasks(split: str) -> tuple[Task, ...]:
    make = ENVIRONMENTS["clinical"].tasks
    assert make is not None
    return tuple(make(split, OPTIONS))


def every() -> list[Task]:
    return [task for split in SPLITS for task in tasks(split)]


def case(task: Task) -> Case:
    return Case.from_json(task.scenario or "")


def opening(task: Task) -> str:
    return task.messages[0].content.split("\n\n")[-1]


def test_there_are_a_few_hundred_cases_and_no_two_are_the_same() -> None:
    assert [len(tasks(split)) for split in SPLITS] == [288, 72, 72]
    assert len({opening(task) for task in every()}) == 432
    assert len({case(task).key for task in every()}) == 432


@pytest.mark.parametrize("seed", [0, 1])
def test_no_two_splits_share_a_case_with_whatever_seeds(seed: int) -> None:
    openings = {
        split: {opening(task) for task in make_tasks(split, 600, seed, SIMULATORS, False)}
        for split in SPLITS
    }
    for split in SPLITS:
        assert all(split_of(text) == split for text in openings[split])
    assert not openings["train"] & openings["val"]
    assert not openings["train"] & openings["test"]
    assert not openings["val"] & openings["test"]


def test_cases_are_a_function_of_their_seed() -> None:
    few = make_tasks("val", 5, 0, SIMULATORS, True)
    assert few == tasks("val")[:5]
    make_tasks.cache_clear()
    assert make_tasks("val", 5, 0, SIMULATORS, True) == few
    other = make_tasks("val", 5, 1, SIMULATORS, True)
    assert {opening(task) for task in other}.isdisjoint(opening(task) for task in tasks("val"))


def test_sheets_and_strata_have_equal_shares() -> None:
    counts = Counter((case(task).sheet, case(task).stratum) for task in tasks("train"))
    assert set(counts) == {(name, stratum) for name in sheets() for stratum in STRATA}
    assert set(counts.values()) == {24}
    assert all(task.source == f"clinical_{case(task).stratum}" for task in every())
    assert all(
        task.secret == sheets()[case(task).sheet].states[case(task).state] for task in every()
    )


def test_hidden_states_follow_the_prior_of_their_stratum() -> None:
    drawn = make_tasks("train", 4000, 3, ("refill",), False)
    for stratum in STRATA:
        sheet = sheets()["refill_pressure"]
        states = [
            sheet.index(case(task).state)
            for task in drawn
            if (case(task).sheet, case(task).stratum) == (sheet.name, stratum)
        ]
        shares = np.bincount(states, minlength=3) / len(states)
        # Five standard errors of a share.
        np.testing.assert_allclose(
            shares, sheet.prior[stratum], atol=5 * 0.5 / np.sqrt(len(states))
        )


def test_simulators_can_be_chosen_and_the_opening_can_be_short() -> None:
    only = make_tasks("val", 8, 0, ("titration",), False)
    assert {sheets()[case(task).sheet].simulator for task in only} == {"titration"}
    sheet = sheets()[case(only[0]).sheet]
    assert only[0].messages[0].content.startswith(rules(sheet, False))
    full = make_tasks("val", 8, 0, ("titration",), True)
    assert [opening(task) for task in full] == [opening(task) for task in only]
    said = [one.say for one in sheet.questions.values()]
    assert all(text in full[0].messages[0].content for text in said)
    assert not any(text in only[0].messages[0].content for text in said)


def test_the_opening_says_the_stratum_and_not_what_is_hidden() -> None:
    for task in every():
        sheet, own = sheets()[case(task).sheet], case(task).stratum
        assert any(risk in opening(task) for risk in sheet.risk[own])
        other = "low" if own == "high" else "high"
        assert not any(risk in opening(task) for risk in sheet.risk[other])
        assert task.secret not in opening(task)


# --- players ------------------------------------------------------------------------------------


def results(player: Player, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Value and number of turns of every case of a split."""
    values: list[float] = []
    turns: list[int] = []
    for task in tasks(split):
        log = play(ClinicalCase(task, TURNS), player, TURNS)
        assert log[-1].score is not None
        values.append(2.0 * log[-1].score - 1.0)
        turns.append(len(log))
    return np.array(values), np.array(turns)


def interval(differences: np.ndarray) -> tuple[float, float]:
    """99.9 % bootstrap interval of a mean over cases."""
    rng = np.random.default_rng(0)
    means = rng.choice(differences, (2000, len(differences))).mean(axis=1)
    low, high = np.quantile(means, [0.0005, 0.9995])
    return float(low), float(high)


@cache
def bayes() -> tuple[np.ndarray, np.ndarray]:
    return results(Bayes())


def test_a_player_who_asks_beats_an_impatient_one_and_a_random_one_by_far() -> None:
    asked, turns = bayes()
    at_once, one = results(Impatient())
    drawn, _ = results(Random(np.random.default_rng(0)))
    # Of a range from -1 to 1.
    assert interval(asked - at_once)[0] > 0.4
    assert interval(asked - drawn)[0] > 0.6
    assert interval(at_once - drawn)[1] < 0.6
    assert set(one) == {1}
    assert 3.0 < turns.mean() < 7.0
    assert asked.mean() > 0.75


@pytest.mark.parametrize("stratum", STRATA)
@pytest.mark.parametrize("simulator", SIMULATORS)
def test_asking_pays_in_every_simulator_and_stratum(simulator: str, stratum: str) -> None:
    chosen = np.array(
        [
            sheets()[case(task).sheet].simulator == simulator and case(task).stratum == stratum
            for task in tasks("train")
        ]
    )
    at_once, _ = results(Impatient())
    asked, _ = bayes()
    assert (asked - at_once)[chosen].mean() > 0.25


def test_a_player_who_asks_is_sure_when_it_decides_and_an_impatient_one_is_not() -> None:
    sure = [play(ClinicalCase(task, TURNS), Bayes(), TURNS)[-1] for task in tasks("val")]
    hasty = [play(ClinicalCase(task, TURNS), Impatient(), TURNS)[-1] for task in tasks("val")]
    assert np.mean(["premature" in outcome.diagnostics for outcome in sure]) < 0.2
    assert all("premature" in outcome.diagnostics for outcome in hasty)
    assert all(sheets()[name].prior[s].max() < SURE for name in sheets() for s in STRATA)


def test_asking_again_is_not_expected_to_tell_anything_but_a_useless_question_is_worst() -> None:
    sheet = sheets()["refill_pressure"]
    gains = {key: expected_gain(sheet, "high", (), key) for key in sheet.questions}
    assert all(gain > -1e-12 for gain in gains.values())
    # A cough is as likely in every state.
    assert gains["cough"] == pytest.approx(0.0, abs=1e-12)
    assert max(gains, key=lambda key: gains[key]) in ("creatinine", "cuff")
