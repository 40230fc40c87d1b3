"""From a judge's text to a verdict: the published reading, and the grammar."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.envs.answers import JUDGE_WORDS, UNRECOGNISED
from delta_belief_rl.judge.parsing import VERDICTS, parse_answer, parse_published
from delta_belief_rl.types import Verdict

Y, N, R, I, W = (VERDICTS[word] for word in JUDGE_WORDS)  # noqa: E741
E = Verdict.ERROR

TEXTS: list[tuple[str, Verdict]] = [
    # one word
    ("yes", Y),
    ("No", N),
    ("Yes.", Y),
    ("yes,", Y),
    ("YES!", Y),
    (" no \n", N),
    ("**Yes**", Y),
    ("*no*", N),
    ("`Yes`", Y),
    ('"No."', N),
    ("\u201cYes\u201d", Y),
    ("Invalid", I),
    ("invalid.", I),
    ("Repeated.", R),
    ("Finished!", W),
    ("# Yes", Y),
    ("\uff39\uff45\uff53", Y),
    ("\\boxed{No}", N),
    # a word and more
    ("Yes, a dog is an animal.", Y),
    ("No. Dogs cannot fly.", N),
    ("Yes - it barks", Y),
    ("No \u2014 it does not.", N),
    ("Yes it is.", Y),
    ("No, it isn't", N),
    ("No it does not", N),
    ("Finished: the word was named.", W),
    ("no\n\nBecause dogs have no wings", N),
    # a label
    ("Answer: no", N),
    ("**Answer:** Yes", Y),
    ("Answer - Yes", Y),
    ("answer=no", N),
    ("The answer is yes.", Y),
    ("The answer is: **no**.", N),
    ("Final answer: Invalid", I),
    ("My verdict is no.", N),
    ('{"answer": "yes"}', Y),
    ("A dog barks.\nSo the answer would be yes, of course.", Y),
    ("The answer should be simply no.", N),
    # a conclusion
    ("A dog is kept at home, so yes.", Y),
    ("It has no wings; therefore, no.", N),
    ("There is no dog without legs. Yes.", Y),
    ("Dogs eat meat.\n\nYes", Y),
    ("Hm, no. But wait, dogs do bark. Yes.", Y),
    # tags
    ("<answer>Yes</answer>", Y),
    ("It barks. <answer>yes</answer>", Y),
    ("<ANSWER> No. </ANSWER>", N),
    ("<answer>**Yes**</answer>", Y),
    ("<answer>\nNo\n</answer>", N),
    ("<answer>Yes, it is</answer>", Y),
    ("<answer>The answer is no</answer>", N),
    ("<answer>Yes", Y),
    ("It barks, so it is one. Yes</answer>", Y),
    ("Answer: No</answer>", N),
    ("< answer >no< / answer >", N),
    ("<answer>Yes</answer> <answer>Yes</answer>", Y),
    ("I choose <answer>Yes or No</answer>. <answer>No</answer>", N),
    ("No dog is alike. <answer>Yes</answer> No doubt.", Y),
    ("<answer>Finished</answer>", W),
    ("<answer>Repeated</answer>", R),
    # thinking
    ("<think>Yes? No!</think>\n\n<answer>Yes</answer>", Y),
    ("<think></think>no", N),
    ("It may be no.</think>Yes", Y),
    ("<think><answer>No</answer></think><answer>Yes</answer>", Y),
    # nothing that counts
    ("", E),
    ("   \n", E),
    ("?", E),
    ("maybe", E),
    ("I cannot tell.", E),
    ("yesterday", E),
    ("nobody knows", E),
    ("not yes", E),
    ("It is not invalid.", E),
    ("No dog can fly", E),
    ("The answer is no longer known", E),
    ("The answer is not yes.", E),
    ("yes or no", E),
    ("ja", E),
    ("fin*ished", E),
    ("in valid", E),
    ("yes/no", E),
    ("<answer></answer>", E),
    ("<answer>perhaps</answer>", E),
    ("<answer>yes or no</answer>", E),
    ("<answer>not finished</answer>", E),
    ("Yes. <answer>unsure</answer>", E),
    ("<think>The answer is yes.", E),
    # contradictions
    ("<answer>Yes</answer><answer>No</answer>", E),
    ("Answer: Yes\nAnswer: No", E),
    ("Yes. Hm, actually no.", E),
    ("<answer>Yes. No.</answer>", E),
    ("The answer is yes. Or no.", E),
]


@pytest.mark.parametrize(("text", "verdict"), TEXTS)
@pytest.mark.parametrize("tagged", [True, False])
def test_J14_a_text_is_read_by_a_grammar(text: str, verdict: Verdict, tagged: bool) -> None:
    parsed = parse_answer(text, tagged)
    assert parsed.verdict is verdict, parsed
    if verdict is E:
        assert parsed.reason
        assert parsed.word == ""
    else:
        assert parsed.reason == ""
        assert VERDICTS[parsed.word] is verdict


def test_the_table_is_large_enough() -> None:
    assert len({text for text, _ in TEXTS}) == len(TEXTS) >= 60


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("It barks, so the answer is yes.", Y),
        ("The answer is **no**", N),
        ("It barks.\n<answer>Yes</answer>", Y),
        ("<answer>Yes</", Y),
        ("<answer>Yes", E),
        ("The answer is no", E),  # "... no longer known"
        ("The secret is a dog. The question asks whether it", E),
        ("<answer>Yes</answer> and <answer>N", E),
        ("no", E),
    ],
)
def test_J14_of_a_text_that_was_cut_off_only_a_finished_word_counts(
    text: str, verdict: Verdict
) -> None:
    assert parse_answer(text, True, finished=False).verdict is verdict


PIECES = st.sampled_from(
    [
        *JUDGE_WORDS,
        *(word.upper() for word in JUDGE_WORDS),
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "answer:",
        "the answer is",
        "so",
        ",",
        ".",
        "\n",
        " ",
        "**",
        "not",
        "f",
        "ini",
        "shed",
        "\ufb01nished",
    ]
)


@settings(max_examples=400, deadline=None)
@given(
    text=st.one_of(st.text(max_size=80), st.lists(PIECES, max_size=14).map("".join)),
    tagged=st.booleans(),
    finished=st.booleans(),
)
def test_J14_no_text_breaks_the_reading_and_no_win_comes_from_anything_but_its_word(
    text: str, tagged: bool, finished: bool
) -> None:
    parsed = parse_answer(text, tagged, finished)
    said = unicodedata.normalize("NFKC", text).lower()
    if parsed.verdict is Verdict.ERROR:
        assert parsed.reason
    else:
        assert parsed.word in said
        assert VERDICTS[parsed.word] is parsed.verdict
    if "finished" not in said:
        assert parsed.verdict is not Verdict.WIN
    if "invalid" not in said:
        assert parsed.verdict is not Verdict.INVALID


@settings(max_examples=100, deadline=None)
@given(before=st.text(max_size=30), word=st.sampled_from(JUDGE_WORDS), after=st.text(max_size=10))
def test_J14_a_closed_tag_decides_whatever_stands_in_front_of_it(
    before: str, word: str, after: str
) -> None:
    if any(sign in unicodedata.normalize("NFKC", before + after) for sign in "<>"):
        return
    assert parse_answer(f"{before}<answer>{word}</answer>{after}").word == word


@pytest.mark.parametrize(
    ("text", "tagged", "word", "recognised"),
    [
        ("yes", False, "yes", True),
        ("No way", False, "no", True),
        ("yes.", False, "invalid", False),
        ("yes,", False, "invalid", False),
        ("**Yes**", False, "yes", True),
        ("'Finished'", False, "finished", True),
        ("finished.", False, "invalid", False),
        ("The answer is yes", False, "invalid", False),
        ("", False, "invalid", False),
        ("invalid", False, "invalid", True),
        ("<answer>Yes</answer>", True, "yes", True),
        ("no <answer> Yes </answer>", True, "yes", True),
        ("<Answer>No\n</aNSWER>", True, "no", True),
        ("<answer>yes.</answer>", True, "invalid", False),
        ("<answer>no</answer><answer>yes</answer>", True, "no", True),
        ("<answer></answer><answer>yes</answer>", True, "yes", True),
        ("yes", True, "invalid", False),
        ("It barks, so yes", True, "invalid", False),
        ("<answer>y\u00e9s</answer>", True, "invalid", False),
        ("<answer>ye\u00e9s</answer>", True, "yes", True),
        ("<answer>y-es</answer>", True, "yes", True),
        ("<answer>Repeated question</answer>", True, "repeated", True),
    ],
)
def test_the_published_parser_takes_one_exact_word_and_calls_the_rest_invalid(
    text: str, tagged: bool, word: str, recognised: bool
) -> None:
    parsed = parse_published(text, tagged)
    assert (parsed.word, parsed.verdict) == (word, VERDICTS[word])
    assert parsed.reason == ("" if recognised else UNRECOGNISED)
