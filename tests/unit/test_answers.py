"""Text rules: the published checks letter by letter, and the strict ones."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.envs.answers import (
    candidate_list,
    exact_match,
    guess_form,
    is_duplicate,
    normalise,
    strict_guess,
    verify_question,
)
from delta_belief_rl.types import UserError

ALL = ("length", "question", "multiple_questions", "sentence", "exact")


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_normal_form_is_stable(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


@pytest.mark.parametrize(
    "text",
    [
        "Is it a dog?",
        "  is  it\ta\u00a0DOG ??",
        "\u201cIs it a dog?\u201d",
        "\uff29s it a \uff44og\uff1f",
        "is it\u200b a d\u200dog\ufeff",
        "'Is it a dog'",
    ],
)
def test_equal_texts_share_a_normal_form(text: str) -> None:
    assert normalise(text) == "is it a dog"


@pytest.mark.parametrize(
    ("action", "word", "answer", "diagnostics", "outcome"),
    [
        ("Is it big?", "Yes", "yes", (), "true_negative"),
        ("Is it a dog?", "no", "finished", (), "false_negative"),
        ("Is it a dog?", "finished", "finished", (), "true_positive"),
        ("Is it a puppy?", "finished", "yes", (), "false_positive"),
        ("Is it a puppy?", "repeated", "repeated", ("repeated",), "true_negative"),
        ("Is it a puppy?", "invalid", "invalid", ("invalid_by_judge",), "true_negative"),
        ("Is it a dog", "finished", "invalid", ("no_question",), "false_positive"),
        ("Is it a dog? Or a cat?", "yes", "invalid", ("multiple_questions",), "wrong_negative"),
        ("Is it\na dog?", "yes", "invalid", ("invalid_chars",), "wrong_negative"),
        ("Is it\u00a0big?", "yes", "invalid", ("invalid_chars",), "wrong_negative"),
        ("Is it\u2028big?", "yes", "invalid", ("invalid_chars",), "wrong_negative"),
        ("?", "yes", "invalid", ("too_short_action",), "wrong_negative"),
        ("a" * 500 + "?", "yes", "invalid", ("too_long_action",), "wrong_negative"),
        ("a" * 499 + "?", "yes", "yes", (), "true_negative"),
        ("x", "no", "invalid", ("too_short_action", "no_question"), "wrong_negative"),
    ],
)
def test_the_published_rules_correct_the_judge(
    action: str, word: str, answer: str, diagnostics: tuple[str, ...], outcome: str
) -> None:
    result = verify_question(action, word, "dog", ALL)
    assert (result.answer, result.diagnostics, result.outcome) == (answer, diagnostics, outcome)


def test_short_circuit_stops_at_the_first_failure() -> None:
    result = verify_question("x", "no", "dog", ALL, short_circuit=True)
    assert result.diagnostics == ("too_short_action",)


def test_the_replacement_of_an_unconfirmed_win_can_be_chosen() -> None:
    assert verify_question("Is it big?", "finished", "dog", ALL, "no").answer == "no"
    assert verify_question("Is it big?", "finished", "dog", ALL, None).answer == "finished"


def test_without_a_positive_rule_no_win_is_confirmed() -> None:
    assert verify_question("Is it a dog?", "finished", "dog", ("question",)).answer == "yes"


def test_the_regex_rule_takes_the_secret_unescaped() -> None:
    assert verify_question("Is it DOGS?", "no", "dogs?", ("regex",)).positive
    assert verify_question("Is it a hotdogstand?", "no", "dog", ("regex",)).positive
    with pytest.raises(UserError, match="not a regular expression"):
        verify_question("Is it c?", "no", "c++(", ("regex",))


def test_unknown_rules_and_the_lemma_rule_are_refused() -> None:
    with pytest.raises(UserError, match="not available in this version"):
        verify_question("Is it?", "no", "dog", ("syntax",))
    with pytest.raises(UserError, match="'spelling'"):
        verify_question("Is it?", "no", "dog", ("spelling",))


@pytest.mark.parametrize(
    ("action", "secret", "found"),
    [
        ("Is it a dog?", "dog", True),
        ("IS IT A DOG?", " Dog ", True),
        ("Does it chase a dog, or a cat?", "cat", True),
        ("Is it 'dog'?", "dog", True),
        ("Is it a dog's bone?", "dog", False),
        ("Is it dogs?", "dog", False),
        ("Is it a cat/dog?", "dog", False),
        ("Is it a cat,dog?", "dog", False),
        ("Is it a hot-dog?", "dog", False),
        ("Is it a hot-dog?", "hot-dog", True),
        ("Is it ice cream?", "ice cream", False),
        ("Is it dog2?", "dog", True),
    ],
)
def test_the_published_win_is_a_whole_word_anywhere(action: str, secret: str, found: bool) -> None:
    assert exact_match(action, secret) is found


@pytest.mark.parametrize(
    "action",
    [
        "Is it a dog?",
        "is it dog ?",
        "Is it the dog?",
        "Is it 'dog'?",
        'Is it "dog?"',
        "Is it a \u2018dog\u2019?",
        "Is the secret dog?",
        "Is the secret word 'dog'?",
        "Is the word dog?",
        "Is it the word 'dog'?",
        "Is it called dog?",
        "Is it something called a dog?",
        "So, is it a dog?",
        "Ok, is it a DOG??",
        "Is it a d\u200bog?",
        "Is it a hound?",
    ],
)
def test_J12_a_direct_guess_is_a_strict_win(action: str) -> None:
    assert strict_guess(action, "dog", ("hound",))


@pytest.mark.parametrize(
    "action",
    [
        "Is it a dog",
        "dog?",
        "I think it is a dog?",
        "Is it a dog or a cat?",
        "Is it a cat, a dog?",
        "Is it a dog, a cat?",
        "Is it like a dog?",
        "Is it bigger than a dog?",
        "Is it not a dog?",
        "Is it a dogs?",
        "Is it a doghouse?",
        "Is it a dog? Is it a cat?",
        "Is it a cat? Is it a dog?",
        "Is it a dog and a cat?",
        "Is it a dog/cat?",
        "Is it a kind of dog?",
        "Is it a?",
        "",
    ],
)
def test_J12_a_mention_is_no_strict_win(action: str) -> None:
    assert not strict_guess(action, "dog", ("hound",))


def test_a_secret_of_several_words_can_be_guessed_strictly() -> None:
    assert strict_guess("Is it an ice-cream?", "ice cream")
    assert strict_guess("Is it salt and pepper?", "salt and pepper")


@settings(max_examples=200, deadline=None)
@given(
    names=st.lists(
        st.sampled_from(["dog", "cat", "cow", "sun"]), min_size=2, max_size=4, unique=True
    ),
    separator=st.sampled_from([" or ", ", ", " or a ", "/", "; ", "? Is it a ", " and a ", " "]),
)
def test_J12_naming_several_candidates_is_never_a_strict_guess(
    names: list[str], separator: str
) -> None:
    action = f"Is it a {separator.join(names)}?"
    assert not any(strict_guess(action, name) for name in names)
    assert candidate_list(action) or separator == " "


@settings(max_examples=200, deadline=None)
@given(before=st.text(max_size=12), after=st.text(max_size=12))
def test_a_valid_strict_guess_of_one_word_is_a_published_win(before: str, after: str) -> None:
    action = f"{before}is it 'dog'{after}?"
    if strict_guess(action, "dog") and not re.search(r"[^\x00-\x7f]", action):
        assert exact_match(action, "dog")


@pytest.mark.parametrize(
    ("action", "listed"),
    [
        ("Is it a dog or a cat?", True),
        ("Is it used for heating or cooling?", True),
        ("Is it a dog, cat?", True),
        ("Is it a dog? Is it a cat?", True),
        ("Is it either of them?", True),
        ("Is it orange?", False),
        ("So, is it a dog, please?", False),
        ("Is it used for cutting and slicing?", False),
    ],
)
def test_lists_are_recognised(action: str, listed: bool) -> None:
    assert candidate_list(action) is listed


def test_the_form_of_a_guess_is_recognised() -> None:
    assert guess_form("Is it a dog?")
    assert guess_form("Is it 'dog'?")
    assert not guess_form("Is it alive?")
    assert not guess_form("Can it fly?")


def test_J13_duplicates_are_compared_in_normal_form() -> None:
    assert is_duplicate("is it ALIVE ?", ["Can it fly?", "Is it alive?"])
    assert not is_duplicate("Is it alive?", ["Is it a live?"])
