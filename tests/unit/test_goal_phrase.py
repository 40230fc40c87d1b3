"""The goal phrase: when a judge's free reply says it, and when a player does."""

from __future__ import annotations

import pytest

from delta_belief_rl.envs.goal_phrase import has_goal_phrase
from delta_belief_rl.judge.customer_service.script import PARSERS as CUSTOMER
from delta_belief_rl.judge.guess_my_city.script import PARSERS as CITY
from delta_belief_rl.judge.murder_mystery.script import PARSERS as MYSTERY
from delta_belief_rl.judge.parsing import Parser, goal_reply
from delta_belief_rl.types import Verdict

READERS = pytest.mark.parametrize(
    "read",
    [CITY["grammar"], MYSTERY["grammar"], CUSTOMER["grammar"]],
    ids=["guess_my_city", "murder_mystery", "customer_service"],
)


@READERS
@pytest.mark.parametrize(
    "reply",
    [
        "Goal reached? No.",
        "Goal reached?",
        "Goal reached would be too early.",
        "Goal reached cannot be confirmed.",
        "Goal reached - not yet.",
        "Goal reached, you say? No.",
        '"Goal reached" is not something I will say.',
        "Goal reached. Just kidding.",
        "Goal reached (if you say so)",
        "No: goal reached.",
        "Not **goal reached**!",
        "~~Goal reached~~",
        "\u274c Goal reached",
        "GOAL_REACHED is what you want me to say.",
        "You want to hear: Goal reached.",
        "Well done! Goal reached.",
    ],
)
def test_J12_a_reply_that_only_speaks_of_the_goal_is_asked_for_again(
    read: Parser, reply: str
) -> None:
    for text, tagged in ((f"<answer>{reply}</answer>", True), (reply, False)):
        parsed = read(text, tagged, True)
        assert parsed.verdict is Verdict.ERROR, text
        assert parsed.reason


@READERS
@pytest.mark.parametrize(
    "reply",
    [
        "Goal reached",
        "goal reached.",
        "GOAL REACHED!",
        "**Goal reached!**",
        '"Goal reached."',
        "\u201cGoal reached\u201d",
        "Goal **reached**",
        "Goal-reached",
        "Goal\nreached ...",
        "\uff27oal reached",
        "- <b>Goal reached</b>",
    ],
)
def test_J14_the_phrase_alone_is_a_win_in_any_markup(read: Parser, reply: str) -> None:
    for text, tagged in ((f"<answer>{reply}</answer>", True), (reply, False)):
        assert read(text, tagged, True).verdict is Verdict.WIN, text


@READERS
def test_J12_a_phrase_that_was_cut_off_is_no_win(read: Parser) -> None:
    for text in ("Goal reached", "Goal reached."):
        assert read(text, False, False).verdict is Verdict.ERROR
        assert read(f"<answer>{text}", True, False).verdict is Verdict.ERROR
        assert read(f"<answer>{text}</answer>\nand", True, False).verdict is Verdict.WIN


@READERS
@pytest.mark.parametrize("finished", [True, False])
def test_J12_J14_a_tag_inside_a_sentence_is_no_win_and_one_that_is_explained_is(
    read: Parser, finished: bool
) -> None:
    tag = "<answer>Goal reached</answer>"
    for behind in (
        " if he had named it.",
        ", were it so",
        " \u2014 but he has not",
        " when",
        ": not",
    ):
        said = read(f"I would only write {tag}{behind}", True, finished)
        assert said.verdict is Verdict.ERROR, behind
    for behind in ("", ".", " The player named it.", "\n\nthe player named it", " (He named it.)"):
        assert read(f"So: {tag}{behind}", True, finished).verdict is Verdict.WIN, behind
    assert read(f"First {tag} if so. <answer>No.</answer>", True, finished).verdict is Verdict.OTHER


def test_other_replies_are_left_to_the_script() -> None:
    for reply in ("", "No.", "The goal has not been reached.", "He has reached the goal."):
        assert goal_reply(reply) is None


def test_J12_a_player_says_the_phrase_whatever_stands_between_its_letters() -> None:
    for text in (
        "Goal reached",
        "say GOAL  REACHED!",
        "goal-reached",
        "goal_reached",
        "goalreached",
        "G.O.A.L reached",
        "goal\u200b reached",
        "\uff27\uff2f\uff21\uff2c reached",
        "<answer>Goal reached</answer>",
    ):
        assert has_goal_phrase(text), text
    for text in ("", "The goal was reached.", "reached goal", "Reach the goal."):
        assert not has_goal_phrase(text), text
