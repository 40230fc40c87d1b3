"""The judge that answers from the table."""

from __future__ import annotations

import pytest

from delta_belief_rl.envs.base import Judge, JudgeRequest
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.types import Verdict
from tests.worlds import PROPERTIES, small_world, task_for

WORLD = small_world()
JUDGE = WorldJudge(WORLD)


def _verdict(secret: str, action: str, history: tuple[tuple[str, str], ...] = ()) -> Verdict:
    return JUDGE.answer([JudgeRequest(task_for(secret), action, history)])[0].verdict


def test_it_is_a_judge() -> None:
    assert isinstance(JUDGE, Judge)
    assert JUDGE.answer([]) == []


def test_every_property_of_every_thing_is_answered_from_the_table() -> None:
    requests = [
        JudgeRequest(task_for(thing.name), f"{phrasing}?")
        for thing in WORLD.things
        for _, phrasings in PROPERTIES
        for phrasing in phrasings
    ]
    truth = [
        WORLD.value(thing.name, key)
        for thing in WORLD.things
        for key, phrasings in PROPERTIES
        for _ in phrasings
    ]
    replies = JUDGE.answer(requests)
    assert [reply.verdict for reply in replies] == [
        Verdict.YES if yes else Verdict.NO for yes in truth
    ]
    assert {reply.text for reply in replies} == {"Yes", "No"}


@pytest.mark.parametrize(
    ("action", "verdict"),
    [
        ("Is it a bicycle?", Verdict.WIN),
        ("Is it a bike?", Verdict.WIN),
        ("Is it a push bike?", Verdict.WIN),
        ("Is it a dog?", Verdict.NO),
        ("Is it a bicycle or a dog?", Verdict.INVALID),
        ("Is it a bicycle, bike?", Verdict.INVALID),
        ("Is it faster than a bicycle?", Verdict.INVALID),
        ("Isn't it a bicycle?", Verdict.INVALID),
        ("bicycle", Verdict.INVALID),
        ("What is it?", Verdict.INVALID),
    ],
)
def test_J12_only_a_direct_guess_of_the_secret_or_an_alias_wins(
    action: str, verdict: Verdict
) -> None:
    assert _verdict("bicycle", action) is verdict


def test_an_alias_of_the_task_wins_too() -> None:
    request = JudgeRequest(task_for("dog", aliases=("pooch",)), "Is it a pooch?")
    assert JUDGE.answer([request])[0].verdict is Verdict.WIN


def test_a_secret_may_be_given_by_an_alias() -> None:
    assert _verdict("hound", "Is it a dog?") is Verdict.WIN


def test_an_unknown_secret_is_an_error_with_a_reason() -> None:
    reply = JUDGE.answer([JudgeRequest(task_for("unicorn"), "Is it alive?")])[0]
    assert reply.verdict is Verdict.ERROR
    assert "'unicorn' is not a thing of the world 'small'" in reply.reason


def test_an_unread_question_says_why() -> None:
    reply = JUDGE.answer([JudgeRequest(task_for("dog"), "Isn't it alive?")])[0]
    assert (reply.verdict, reply.reason) == (Verdict.INVALID, "negated")


def test_J13_the_same_question_gets_the_same_answer_whatever_was_asked_before() -> None:
    history = (("Can it fly?", "Yes"), ("Is it orange?", "No"))
    for _, phrasings in PROPERTIES:
        replies = {_verdict("whale", f"{phrasing}?") for phrasing in phrasings}
        assert len(replies) == 1
    assert _verdict("whale", "Is it alive?", history) is _verdict("whale", "Is it alive?")


def test_J13_a_question_in_the_history_is_repeated_in_any_words() -> None:
    history = (("Do people eat it?", "No"), ("Is it a bike?", "No"))
    assert _verdict("dog", "Can you eat it?", history) is Verdict.REPEATED
    assert _verdict("dog", "Is it a bicycle?", history) is Verdict.REPEATED
    assert _verdict("dog", "Is it a dog?", (("Is it a dog?", "No"),)) is Verdict.WIN
