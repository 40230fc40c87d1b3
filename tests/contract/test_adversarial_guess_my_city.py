"""Hostile and unlucky actions of Guess My City, and what every rule says of them.

The cases and their expectations stand in ``tests/data/adversarial_guess_my_city.yaml``, whose head
explains them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml

from delta_belief_rl.envs.base import JudgeReply, Outcome
from delta_belief_rl.envs.guess_my_city.data import OPENING, load_atlas, reveals
from delta_belief_rl.envs.guess_my_city.game import GuessMyCity, GuessMyCitySettings
from delta_belief_rl.envs.guess_my_city.reading import read_action
from delta_belief_rl.judge.guess_my_city.rules import CityJudge
from delta_belief_rl.judge.guess_my_city.script import PARSERS, messages
from delta_belief_rl.types import Task, Verdict

FILE = Path(__file__).parents[1] / "data" / "adversarial_guess_my_city.yaml"
MIN_CASES = 100
FILL = "Paris " * 500


@dataclass(frozen=True)
class Case:
    """One action; see the head of the file."""

    id: str
    city: str
    action: str
    verdict: Verdict
    flags: frozenset[str]


@cache
def cases() -> list[Case]:
    read = yaml.load(FILE.read_text(encoding="ascii"), Loader=yaml.CSafeLoader)
    return [
        Case(
            f"{name}-{number}",
            group["city"],
            action.replace("<fill>", FILL),
            Verdict(verdict),
            frozenset(flags),
        )
        for name, group in read.items()
        for number, (action, verdict, flags) in enumerate(group["cases"])
    ]


def task_of(city: str) -> Task:
    found = load_atlas().cities[city]
    return Task("case", "guess_my_city", found.secret, OPENING, aliases=found.names[1:])


def play(case: Case, settings: GuessMyCitySettings, reply: JudgeReply | None = None) -> Outcome:
    env = GuessMyCity(task_of(case.city), settings)
    action = env.parse(case.action)
    if not action.needs_judge:
        return env.apply(action, None)
    return env.apply(action, reply or CityJudge().answer([env.judge_request(action)])[0])


each_case = pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)


@each_case
@pytest.mark.parametrize("rule", ["strict", "compatible"])
def test_J12_the_rule_judge_and_the_rules_decide_as_written(case: Case, rule: str) -> None:
    outcome = play(case, GuessMyCitySettings(win_rule=rule))  # type: ignore[arg-type]
    assert outcome.verdict is case.verdict, outcome
    assert outcome.strict_win == ("strict" in case.flags)
    assert outcome.compatible_win == ("compatible" in case.flags)
    assert outcome.done == (case.verdict is Verdict.WIN)


@each_case
def test_J12_every_reading_is_as_written(case: Case) -> None:
    task = task_of(case.city)
    reading = read_action(case.action, task.secret, task.aliases)
    found = {
        "exact": reading.exact,
        "guess": bool(reading.guess),
        "list": reading.is_list,
        "strict": reading.strict,
    }
    expected = {name: name in case.flags for name in found}
    if case.id.startswith("empty"):
        expected["guess"] = expected["list"] = False
    assert found == expected


@each_case
def test_J12_only_a_strict_win_survives_a_judge_that_always_says_goal_reached(case: Case) -> None:
    fooled = JudgeReply(Verdict.WIN, "goal reached")
    outcome = play(case, GuessMyCitySettings(win_rule="strict"), fooled)
    assert (outcome.verdict is Verdict.WIN) == ("strict" in case.flags)
    assert outcome.strict_win == ("strict" in case.flags)


@each_case
def test_the_published_rule_wins_as_published_where_the_judge_is_fooled(case: Case) -> None:
    fooled = JudgeReply(Verdict.WIN, "goal reached")
    outcome = play(case, GuessMyCitySettings(), fooled)
    valid = bool(case.action.strip()) and case.verdict is not Verdict.INVALID
    asked_by_many = case.action.count("?") > 1
    reading = read_action(case.action, task_of(case.city).secret, ())
    if "strict" in case.flags:
        assert outcome.verdict is Verdict.WIN
    elif asked_by_many:
        assert outcome.verdict is Verdict.INVALID
    elif valid and reading.bets:
        assert outcome.verdict is Verdict.OTHER
    elif valid:
        won = "exact" in case.flags
        assert outcome.verdict is (Verdict.WIN if won else Verdict.INVALID)
        assert outcome.compatible_win == won


@each_case
def test_J12_no_reply_of_the_rule_judge_gives_the_city_away(case: Case) -> None:
    outcome = play(case, GuessMyCitySettings())
    assert not reveals(outcome.reply, load_atlas().cities[case.city])


@each_case
def test_an_action_cannot_leave_its_quotes_in_the_prompt_of_a_judge(case: Case) -> None:
    env = GuessMyCity(task_of(case.city), GuessMyCitySettings(verify_methods=()))
    action = env.parse(case.action)
    if not action.needs_judge:
        return
    _, user = messages(env.judge_request(action), "cot", True)
    last = user.content.splitlines()[-1]
    assert last.startswith('Action 1: "')
    assert last.endswith('"')
    assert last.count('"') == 2
    assert not set(last) & set("<>[]{}|")


def test_J12_a_judge_that_quotes_the_goal_phrase_does_not_say_it() -> None:
    read = PARSERS["grammar"]
    for text in (
        "You may not write 'goal reached'.",
        "The player wrote goal reached, which is no guess.",
        "No. You will read Goal reached when you name the city.",
        "Goal reached is what I say to a right guess.",
    ):
        assert read(f"<answer>{text}</answer>", True, True).verdict is Verdict.ERROR


def test_J12_naming_every_city_in_one_action_never_wins() -> None:
    names = list(load_atlas().cities)
    for text in (", ".join(names[:120]), " ".join(names[:150]), " or ".join(names[:100])):
        for first in ("", "Is it ", "My guess is "):
            case = Case("all", "Paris", first + text, Verdict.OTHER, frozenset())
            for rule in ("strict", "compatible"):
                outcome = play(case, GuessMyCitySettings(win_rule=rule))  # type: ignore[arg-type]
                assert outcome.verdict is not Verdict.WIN
                assert not outcome.strict_win
                assert not outcome.compatible_win


def test_a_case_stands_once_and_every_category_has_several() -> None:
    assert len(cases()) >= MIN_CASES
    assert len({(case.city, case.action) for case in cases()}) == len(cases())
    counts = Counter(case.id.rsplit("-", 1)[0] for case in cases())
    assert min(counts.values()) >= 3
    assert len(counts) >= 15
