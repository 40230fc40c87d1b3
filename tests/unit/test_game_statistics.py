"""Kinds of wins, questions, beliefs and relations of stored games, on games of a few turns."""

from __future__ import annotations

import math
from typing import Any

import pytest

from delta_belief_rl.eval.game_statistics import (
    WinKind,
    answer_agreement,
    belief_stats,
    is_list_question,
    prior_noise,
    published_score,
    question_stats,
    relations,
    win_kind,
    win_kinds,
)
from delta_belief_rl.eval.published import StoredGame, read_game
from tests.stored import INVALID, LISTED, LOST, MENTIONED, REPEATED, WON, published, val_only


def read(*rows: dict[str, Any]) -> list[StoredGame]:
    return [read_game(row, number) for number, row in enumerate(rows, start=1)]


# --- winning questions


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        ("Is it a dog?", "single"),
        ("  IS IT DOG ? ", "single"),
        ("Is the secret word 'dog'?", "single"),
        ('Is the word "dog"?', "single"),
        ("Is the secret the dog?", "single"),
        ("Is it something called dog?", "single"),
        ("Hmm is it a dog?", "single"),
        ("Is it a dog", "other"),
        ("Is it a big dog?", "other"),
        ("Is it a dog house?", "other"),
        ("Is it used for a dog?", "other"),
        ("Is it a dog or a cat?", "list"),
        ("Well, is it a dog?", "list"),
        ("Is it an orchid dog?", "other"),
    ],
)
def test_a_winning_question_has_one_of_the_published_kinds(question: str, kind: str) -> None:
    assert win_kind(question, "dog") == kind


def test_a_secret_is_taken_letter_by_letter() -> None:
    assert win_kind("Is it c++?", "C++") is WinKind.SINGLE
    assert win_kind("Is it doge?", "d.g") is WinKind.OTHER


def test_wins_are_parted_by_kind_and_losses_are_not_counted() -> None:
    games = read(*(published(pairs) for pairs in (WON, WON, LISTED, MENTIONED, LOST)))
    assert win_kinds(games) == {WinKind.SINGLE: 2, WinKind.LIST: 1, WinKind.OTHER: 1}
    assert win_kinds([]) == {WinKind.SINGLE: 0, WinKind.LIST: 0, WinKind.OTHER: 0}


def test_a_list_has_the_word_or_or_a_comma() -> None:
    assert is_list_question("Is it A OR B?")
    assert is_list_question("Is it a, b?")
    assert not is_list_question("Is it for organs?")


# --- questions


def test_questions_are_counted_with_their_repeats() -> None:
    pairs = (
        ("Is it big?", "yes"),
        ("Is it big?", "no"),
        ("Is it big?", REPEATED),
        ("is it  BIG", "yes"),
    )
    found = question_stats(read(published(pairs), published((("Is it big, or small?", INVALID),))))
    assert found.questions == 5
    assert found.duplicates == 2, "word for word"
    assert found.normalised_duplicates == 3
    assert found.unflagged == 1
    assert found.list_share == found.candidate_list_share == pytest.approx(1 / 5)
    assert found.words == pytest.approx((3 + 3 + 3 + 3 + 5) / 5)
    assert (found.invalid, found.repeated) == (1, 1)
    assert found.cacheable_share == pytest.approx(3 / 5)
    assert found.judge_failures is None


def test_a_repeat_in_another_game_is_no_repeat() -> None:
    assert question_stats(read(published(LOST), published(LOST))).duplicates == 0


def test_contradictory_answers_are_pairs_of_one_question_about_one_secret() -> None:
    rows = [published((("Is it big?", reply),)) for reply in ("yes", "no", "Yes.", REPEATED)]
    other = published((("Is it big?", "no"),), secret="cat")
    found = question_stats(read(*rows, other))
    assert found.answer_pairs == 3
    assert found.contradictions == pytest.approx(2 / 3)
    assert math.isnan(question_stats(read(other)).contradictions)


def test_agreement_compares_every_pair_over_two_files() -> None:
    first = read(*(published((("Is it big?", reply),)) for reply in ("yes", "yes", "no")))
    second = read(*(published((("Is it BIG", reply),)) for reply in ("yes", "no")))
    assert answer_agreement(first, second) == (pytest.approx(3 / 6), 6)
    share, pairs = answer_agreement(first, read(published(WON)))
    assert math.isnan(share)
    assert pairs == 0


def test_nothing_asked_is_no_share() -> None:
    found = question_stats(read(published(())))
    assert found.questions == 0
    assert math.isnan(found.list_share)


# --- beliefs


def test_beliefs_are_means_over_the_games_that_have_the_turn() -> None:
    games = read(
        published(WON, beliefs=(-8.0, -10.0, -2.0)),
        published(LOST, beliefs=(-6.0, -9.0, -8.0, -8.5, -5.0)),
    )
    found = belief_stats(games)
    assert found is not None
    assert (found.games, found.prior, found.final, found.net_gain) == (2, -7.0, -3.5, 3.5)
    assert found.positive_sum == pytest.approx((8.0 + (1.0 + 3.5)) / 2)
    assert found.positive_over_net == pytest.approx(6.25 / 3.5)
    assert found.by_turn == pytest.approx((-7.0, -9.5, -5.0, -8.5, -5.0))
    assert found.games_by_turn == (2, 2, 2, 1, 1)
    assert found.change_by_turn == pytest.approx((-2.5, 4.5, -0.5, 3.5))


def test_beliefs_that_fall_have_no_ratio_and_absent_ones_no_numbers() -> None:
    found = belief_stats(read(published(MENTIONED, beliefs=(-1.0, -2.0))))
    assert found is not None
    assert math.isnan(found.positive_over_net)
    assert belief_stats(read(published(LOST, log_prob_reward=None))) is None
    assert belief_stats(read(val_only(LOST, log_prob_reward=[-1.0]))) is None


def test_the_noise_of_a_prior_is_its_spread_inside_a_secret() -> None:
    rows = [published(WON, beliefs=(prior, -2.0, -1.0)) for prior in (-8.0, -8.4)]
    other = [published(WON, "cat", (-5.0, -2.0, -1.0))] * 2
    deviation, largest = prior_noise(read(*rows, *other))
    assert deviation == pytest.approx(0.4 / math.sqrt(2) / 2)
    assert largest == pytest.approx(0.4)
    assert all(map(math.isnan, prior_noise(read(rows[0]))))


# --- relations


def satisfied(row: dict[str, Any]) -> dict[str, bool]:
    """Relations of one row; those that do not apply are left out."""
    return {r.name: bool(r.satisfied) for r in relations(read(row)) if r.checked}


@pytest.mark.parametrize("pairs", [WON, LISTED, MENTIONED, LOST])
def test_a_row_of_the_published_form_satisfies_every_relation(pairs: tuple[Any, ...]) -> None:
    found = satisfied(published(pairs))
    assert len(found) == 7
    assert all(found.values()), found
    assert all(satisfied(val_only(pairs)).values())


@pytest.mark.parametrize(
    ("row", "broken"),
    [
        (published(score=1.0, reward=1.0), {"score"}),
        (published(reward=0.5), {"score = reward"}),
        (published(log_prob_diff=[0.0] * 4), {"score", "log_prob_diff"}),
        (published(WON, log_prob_diff=[1.5, 1.5, 0.0, 0.0]), {"score", "log_prob_diff"}),
        (
            published(log_prob_reward=[-8.0, -6.5, -5.0, -3.5, 0.0]),
            {"log_prob_reward", "log_prob_diff"},
        ),
        (published(LOST[:2]), {"lost games use all turns"}),
        (
            published(WON, game_status=0),
            {"score", "log_prob_diff", "lost games use all turns", "won by the exact rule"},
        ),
        (published((("Is it a dog?", "yes"), *LOST[1:])), {"won by the exact rule"}),
        (
            published((("Is it alive?", REPEATED), *LOST[1:]), repeated_count=2),
            {"score", "invalid and repeated counts"},
        ),
    ],
)
def test_each_relation_finds_the_row_that_breaks_it(row: dict[str, Any], broken: set[str]) -> None:
    found = satisfied(row)
    assert {name for name, holds in found.items() if not holds} == broken


def test_relations_count_the_rows_that_have_what_they_need() -> None:
    games = read(published(WON), published(score=1.0, reward=1.0), published(reward=None))
    found = {relation.name: relation for relation in relations(games)}
    assert (found["score"].checked, found["score"].satisfied) == (3, 2)
    assert found["score = reward"].checked == 2


@pytest.mark.parametrize(
    ("counts", "score"),
    [
        # k (2 w - 0.05 k) - 5 invalid - repeated + 0.1 sum of gains, worked by hand
        ({}, 2 * (2 - 0.1) + 0.1 * 1.5),
        ({"invalid_count": 1}, 3.95 - 5),
        ({"repeated_count": 2}, 3.95 - 2),
    ],
)
def test_the_published_score_is_worked_by_hand(counts: dict[str, int], score: float) -> None:
    assert published_score(read_game(published(WON, **counts))) == pytest.approx(score)


def test_a_game_of_one_turn_pays_nothing_for_its_length() -> None:
    assert published_score(read_game(published(MENTIONED))) == pytest.approx(2.0)
