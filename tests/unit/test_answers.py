"""Text rules: the published checks letter by letter, and the strict ones."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.envs.answers import (
    JUDGE_EXTRAS,
    candidate_list,
    check_methods,
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


def test_unknown_rules_are_refused() -> None:
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
    # The published rule takes an underscore and a hyphen for letters, and knows no other marks.
    if strict_guess(action, "dog") and not re.search(r"[^\x00-\x7f]|[_-]", action):
        assert exact_match(action, "dog")


@pytest.mark.parametrize("mark", ["_", "-"])
def test_some_marks_are_letters_for_the_published_rule_only(mark: str) -> None:
    assert strict_guess(f"Is it 'dog'{mark}?", "dog")
    assert not exact_match(f"Is it 'dog'{mark}?", "dog")


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
        ("Is it a cat and/or a dog?", True),
        ("Is it a cat / dog?", True),
        ("Is it a cat\\dog?", True),
        ("Is it a cat\u3001a dog?", True),
        ("Is it a cat\uff0ca dog?", True),
        ("Is it a cat \u2022 dog \u2022 cow?", True),
        ("Is it a cat + dog?", True),
        ("Is it a cat - dog - cow?", True),
        ("Is it a cat \u2013 dog?", True),
        ("Is it a cat vs a dog?", True),
        ("Is it neither a cat nor a dog?", True),
        ("Is it a dog and a cat?", True),
        ("Is it a dog maybe a cat?", True),
        ("Is it one of these: cat dog?", True),
        ("Is it one of the largest animals?", False),
        ("Is it between a cat and a dog?", True),
        ("Is it something between cat and dog in size?", True),
        ("Is it between 1 and 2 meters long?", False),
        ("Is it between one and two feet long?", False),
        ("Is it used between meals?", False),
        ("Is it a dog (or cat)?", True),
        ("Is it a dog (cat)?", True),
        ("Is it a dog (a cat) (a cow)?", True),
        ("Is it (dog) (cat)?", True),
        ("Is it a tool (for cutting)?", False),
        ("Is it heavy (over 5 kg)?", False),
        ("Is it:\n- a dog\n- a cat?", True),
        ("Is it a dog\ncat\nhorse?", True),
        ("Is it one of\r\n1. dog\r\n2. cat?", True),
        ("Let me think.\nIs it a dog?", False),
        ("Is it a dog?\nThank you.", False),
        ("Is it 'dog' 'cat' 'horse'?", True),
        ("Is it the dog's 'toy'?", False),
        ("Is it a hot-dog?", False),
        # Without a separator a list cannot be told from a name of several words.
        ("Is it a dog cat horse?", False),
        ("Is it a dog and cat?", False),
        ("Is it a salt and pepper shaker?", False),
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


# --- the published rules at their edges -------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "problem"),
    [(1, "too_short_action"), (2, None), (3, None), (500, None), (501, "too_long_action")],
)
def test_the_length_rule_counts_characters_after_stripping(
    length: int, problem: str | None
) -> None:
    action = "\u00e9" * (length - 1) + "?"
    for text in (action, f"  {action}\n"):
        result = verify_question(text, "yes", "dog", ("length",))
        assert result.diagnostics == ((problem,) if problem else ())
        assert result.valid is (problem is None)


@pytest.mark.parametrize(
    ("character", "bad"),
    [
        ("\x00", True),
        ("\t", True),
        ("\n", True),
        ("\x1f", True),
        (" ", False),
        ("~", False),
        ("\x7f", True),
        ("\x80", True),
        ("\x9f", True),
        ("\xa0", True),
        ("\xa1", False),
        ("\u2027", False),
        ("\u2028", True),
        ("\u2029", True),
        ("\u202a", False),
    ],
)
def test_the_sentence_rule_at_the_ends_of_its_ranges(character: str, bad: bool) -> None:
    result = verify_question(f"Is it{character}big?", "yes", "dog", ("sentence",))
    assert result.diagnostics == (("invalid_chars",) if bad else ())
    assert result.answer == ("invalid" if bad else "yes")


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ("Is it big?", None),
        ("Is it big? ", None),
        ("Is it big", "no_question"),
        ("Is it big?!", "no_question"),
        ("Is it big\uff1f", "no_question"),
    ],
)
def test_the_question_rule_looks_at_the_last_character_alone(
    action: str, problem: str | None
) -> None:
    assert verify_question(action, "yes", "dog", ("question",)).diagnostics == (
        (problem,) if problem else ()
    )


@pytest.mark.parametrize(("action", "several"), [("a", False), ("a?", False), ("?a?", True)])
def test_the_rule_on_several_questions_counts_marks(action: str, several: bool) -> None:
    result = verify_question(action, "yes", "dog", ("multiple_questions",))
    assert result.diagnostics == (("multiple_questions",) if several else ())


@pytest.mark.parametrize(
    ("action", "secret", "found"),
    [
        ("Is it a d0og?", "dog", True),  # digits are deleted, so the letters join
        ("Is it a dog_?", "dog", False),  # an underscore is a word character
        ("Is it a dog_house?", "dog_house", True),
        ("Is it a -dog?", "dog", False),
        ("Is it an e-mail?", "e-mail", True),
        ("Is it an email?", "e-mail", False),
        ("Is it a 1st?", "1st", False),  # the secret keeps its digit, the action loses it
        ("Is it a caf\u00e9?", "caf\u00e9", True),
        ("Is it a 'dog'?", "dog", True),
        ("Is it a dog\u2019s?", "dog", False),
        ("dog", "dog", True),
    ],
)
def test_the_exact_rule_deletes_digits_and_signs_but_not_hyphens(
    action: str, secret: str, found: bool
) -> None:
    assert verify_question(action, "no", secret, ("exact",)).positive is found


@pytest.mark.parametrize(
    ("action", "secret", "found"),
    [
        ("Is it a catdogfish?", "dog", True),
        ("Is it a dxg?", "d.g", True),
        ("Is it DOG?", "dog", True),
        ("Is it a dg?", "d.g", False),
    ],
)
def test_the_regex_rule_is_unescaped_and_finds_parts_of_words(
    action: str, secret: str, found: bool
) -> None:
    assert verify_question(action, "no", secret, ("regex",)).positive is found


# --- the rule syntax --------------------------------------------------------------------------

SYNTAX = ("syntax",)


def test_the_lists_of_question_words_have_their_published_sizes() -> None:
    from lightlemma import lemmatize, stem

    from delta_belief_rl.envs.lemmas import QUESTION_LEMMAS, QUESTION_STEMS

    words = [
        *("what", "where", "when", "why", "how", "who", "whom", "whose", "which"),
        *("is", "are", "was", "were", "do", "does", "did", "have", "has", "had"),
        *("can", "could", "would", "should", "will", "shall", "may", "might"),
    ]
    assert (len(QUESTION_LEMMAS), len(QUESTION_STEMS)) == (20, 27)
    assert {lemmatize(word) for word in words} == QUESTION_LEMMAS
    assert {stem(word) for word in words} == QUESTION_STEMS
    assert {"coul", "woul", "shoul"} < QUESTION_LEMMAS


@pytest.mark.parametrize(
    ("action", "secret", "answer", "diagnostics"),
    [
        ("Is it a dog?", "dog", "finished", ()),
        ("Is it dogs?", "dog", "finished", ()),
        ("Is it a dog's bone?", "dog", "finished", ()),
        ("Is it running?", "run", "finished", ()),
        ("Is it a run?", "running", "finished", ()),
        ("dogs?", "dog", "finished", ()),  # the secret outranks the missing question word
        ("Is it a cat?", "dog", "no", ()),
        ("big?", "dog", "invalid", ("no_question_word",)),
        ("Could it fly?", "dog", "no", ()),
        ("Would it?", "dog", "no", ()),
        ("Should it?", "dog", "no", ()),
        ("it has legs?", "dog", "no", ()),
        ("the thing being alive?", "dog", "no", ()),
        ("Is it ice cream?", "ice cream", "no", ()),
        ("Is it an e-mail?", "e-mail", "no", ()),
        ("Is it " + "d" * 45 + "?", "d" * 45, "finished", ()),
        ("Is it " + "d" * 46 + "?", "d" * 46, "no", ("too_long_word",)),
        ("is" * 23 + "?", "dog", "invalid", ("too_long_word", "no_question_word")),
        ("Is it big?", "x" * 101, "no", ()),
    ],
)
def test_the_syntax_rule_knows_inflections_and_wants_a_question_word(
    action: str, secret: str, answer: str, diagnostics: tuple[str, ...]
) -> None:
    result = verify_question(action, "no", secret, SYNTAX)
    assert (result.answer, result.diagnostics) == (answer, diagnostics)
    assert result.positive is (answer == "finished")


def test_an_invalid_syntax_outranks_another_rule_that_finds_the_secret() -> None:
    result = verify_question("dog1?", "yes", "dog", ("syntax", "exact"))
    assert (result.positive, result.valid, result.answer) == (True, False, "invalid")


def test_the_syntax_rule_comes_after_the_validity_rules_and_can_cut_short() -> None:
    every = ("length", "question", "multiple_questions", "sentence", "syntax", "regex", "exact")
    assert verify_question("b", "no", "dog", every).diagnostics == (
        *("too_short_action", "no_question", "no_question_word"),
    )
    cut = verify_question("b", "no", "dog", every, short_circuit=True)
    assert cut.diagnostics == ("too_short_action",)
    late = verify_question("dog1?", "no", "dog", every, short_circuit=True)
    assert (late.diagnostics, late.positive) == (("no_question_word",), False)


def test_U2_the_syntax_rule_without_its_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from delta_belief_rl.envs import lemmas

    monkeypatch.setitem(sys.modules, "lightlemma", None)
    lemmas._library.cache_clear()
    try:
        with pytest.raises(UserError, match=r"pip install 'delta-belief-rl\[lemma\]'"):
            check_methods(("exact", "syntax"))
        check_methods(("exact",))
    finally:
        lemmas._library.cache_clear()


def test_every_published_diagnostic_but_the_one_never_set_can_be_produced() -> None:
    methods = (*ALL, "syntax")
    texts = ("b", "x" * 501, "Is it?\nIs it?", "w" * 46 + "?")
    found = {
        name
        for text in texts
        for word in ("invalid", "repeated", "no")
        for name in verify_question(text, word, "dog", methods).diagnostics
    }
    found |= {
        name
        for word in ("invalid", "repeated")
        for name in verify_question("Is it big?", word, "dog", methods).diagnostics
    }
    assert found == set(JUDGE_EXTRAS) - {"possible_overfit"}
