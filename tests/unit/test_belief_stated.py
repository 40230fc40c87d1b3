"""What a model says about its belief, read as a number or as a reason why there is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_belief_rl.belief.stated import NoProbability, names_secret, parse_probability


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1.0),
        ("0", 0.0),
        ("0.3", 0.3),
        (".3", 0.3),
        ("0.3.", 0.3),
        ("1.0", 1.0),
        ("-0", 0.0),
        ("30 %", 0.3),
        ("I am 70% sure.", 0.7),
        ("thirty? no, 30 percent", 0.3),
        ("1/4", 0.25),
        ("3 out of 10", 0.3),
        ("0,35", 0.35),
        ("1e-3", 0.001),
        ("Probability: 0.2-0.4", 0.2),
        ("p=0.25", 0.25),
        ("After 5 questions I say 0.2", 0.2),
        ("<think>Perhaps 0.9?</think> 0.1", 0.1),
        ("1. My answer is 0.6", 0.6),
    ],
)
def test_a_probability_is_read_in_the_forms_that_models_use(text: str, value: float) -> None:
    assert parse_probability(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", NoProbability.EMPTY),
        (" \n", NoProbability.EMPTY),
        ("<think>0.5</think>", NoProbability.EMPTY),
        ("Very likely.", NoProbability.NO_NUMBER),
        ("1,000", NoProbability.NO_NUMBER),
        ("70", NoProbability.OUT_OF_RANGE),
        ("-0.2", NoProbability.OUT_OF_RANGE),
        ("150 %", NoProbability.OUT_OF_RANGE),
        ("3/2", NoProbability.OUT_OF_RANGE),
        ("1/0", NoProbability.OUT_OF_RANGE),
        ("1.5", NoProbability.OUT_OF_RANGE),
        ("Question 12", NoProbability.OUT_OF_RANGE),
    ],
)
def test_what_is_no_probability_has_a_reason_and_is_never_a_number(
    text: str, reason: NoProbability
) -> None:
    assert parse_probability(text) is reason


@given(st.floats(0, 1))
def test_every_probability_survives_being_written(value: float) -> None:
    assert parse_probability(f"{value:.6f}") == pytest.approx(value, abs=1e-6)


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    found = parse_probability(text)
    assert isinstance(found, NoProbability) or 0.0 <= found <= 1.0
    assert not names_secret(text, "an unlikely secret")


@pytest.mark.parametrize(
    "text",
    [
        "dog",
        "Dog.",
        "a dog",
        "'dog'",
        "It is a dog.",
        "The secret word is dog",
        "Is it a dog?",
        "I think it's a Dog!",
        "<think>a cat</think>\nThe dog",
        "dog\nbecause it barks",
        "hound",
    ],
)
def test_a_bare_name_a_sentence_and_a_guess_name_the_secret(text: str) -> None:
    assert names_secret(text, "dog", ["hound"])


@pytest.mark.parametrize("text", ["", "a dog or a cat", "dogs", "not a dog", "cat", "<think>dog"])
def test_lists_other_names_and_negations_do_not(text: str) -> None:
    assert not names_secret(text, "dog")
