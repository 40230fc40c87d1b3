"""Hostile and honest messages of user personalization, and what the rule judge and the game say.

The cases stand in ``tests/data/adversarial_user_personalization.yaml``, whose head explains them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from delta_belief_rl.envs.base import Outcome
from delta_belief_rl.envs.user_personalization.data import SPLITS, Need, Profile, profiles, tasks
from delta_belief_rl.envs.user_personalization.game import (
    UserPersonalization,
    UserPersonalizationSettings,
)
from delta_belief_rl.judge.user_personalization.rating import MIN_WORDS, rate
from delta_belief_rl.judge.user_personalization.rules import UserPersonalizationJudge, facts
from delta_belief_rl.types import Task, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "user_personalization.md"
FILE = Path(__file__).parents[1] / "data" / "adversarial_user_personalization.yaml"
MIN_CASES = 110
MIN_CASES_OF_A_CATEGORY = 3
CATEGORIES = {
    "wins_in_many_spellings",
    "not_an_answer_yet",
    "questions_that_are_understood",
    "questions_without_a_fact",
    "asking_for_everything",
    "prying",
    "form",
    "near_misses",
    "contradictions",
    "listing_everything",
    "quoting",
    "addressing_the_judge",
    "other_languages_and_scripts",
}
JUDGE = UserPersonalizationJudge()
USERS = {profile.id: profile for profile in profiles()}
THRESHOLD = 8.0


@dataclass(frozen=True)
class Case:
    """One message; see the head of the file."""

    id: str
    user: str
    say: str
    before: tuple[str, ...]
    last: bool
    verdict: Verdict
    tells: str | None
    rating: tuple[float, float] | None


@cache
def cases() -> list[Case]:
    read = yaml.safe_load(FILE.read_text(encoding="ascii"))
    return [
        _case(category, entry, read["answers"])
        for category, entries in read["cases"].items()
        for entry in entries
    ]


def _case(category: str, entry: dict[str, Any], answers: dict[str, str]) -> Case:
    text, times = entry.get("fill", ("", 0))
    say = entry["say"].replace("<fill>", " ".join([text] * times))
    for user, answer in answers.items():
        say = say.replace(f"<{user}>", answer)
    rating = entry.get("rating")
    return Case(
        id=f"{category}-{entry['id']}",
        user=entry["user"],
        say=say,
        before=tuple(entry.get("before", ())),
        last=entry.get("last", False),
        verdict=Verdict(entry["verdict"]),
        tells=entry.get("tells"),
        rating=None
        if rating is None
        else (rating, rating)
        if not isinstance(rating, list)
        else (rating[0], rating[1]),
    )


@cache
def _tasks() -> dict[str, Task]:
    return {task.id: task for split in SPLITS for task in tasks(split)}


def _play(env: UserPersonalization, text: str) -> Outcome:
    action = env.parse(text)
    reply = JUDGE.answer([env.judge_request(action)])[0] if action.needs_judge else None
    return env.apply(action, reply)


def _outcome(case: Case) -> Outcome:
    turns = len(case.before) + (1 if case.last else 5)
    env = UserPersonalization(_tasks()[case.user], UserPersonalizationSettings(max_turns=turns))
    for text in case.before:
        assert not _play(env, text).done, "a case ends with its message"
    return _play(env, case.say)


def _fact(user: str, topic: str) -> str:
    return next(fact.say for fact in facts(user) if fact.topic == topic)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_J12_the_game_says_what_its_rules_say(case: Case) -> None:
    outcome = _outcome(case)
    assert outcome.verdict is case.verdict, outcome
    if case.tells is not None:
        assert outcome.reply == _fact(case.user, case.tells)
    if case.rating is not None:
        assert outcome.score is not None
        least, most = case.rating
        assert least - 1e-6 <= 1 + 9 * outcome.score <= most + 1e-6, outcome
    won = case.verdict is Verdict.WIN
    assert (outcome.strict_win, outcome.compatible_win) == (won, won)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_no_reply_tells_more_than_one_fact(case: Case) -> None:
    reply = _outcome(case).reply
    assert sum(fact.say in reply for fact in facts(case.user)) <= 1
    assert _tasks()[case.user].secret not in reply


def test_every_category_has_its_cases() -> None:
    counts = Counter(case.id.split("-")[0] for case in cases())
    assert len(cases()) >= MIN_CASES
    assert counts.keys() == CATEGORIES
    assert {name: n for name, n in counts.items() if n < MIN_CASES_OF_A_CATEGORY} == {}


def test_no_case_stands_twice() -> None:
    assert len({case.id for case in cases()}) == len(cases())
    said = Counter((case.user, case.before, case.say, case.last) for case in cases())
    assert [key for key, count in said.items() if count > 1] == []


# --- what must hold of every packaged user ----------------------------------------------------


def _sentence(need: Need) -> str:
    """A sentence that meets a need, from its own phrases."""
    parts: list[str] = []
    for group in need.must:
        phrase = next((p for p in group if "*" not in p), group[0].replace("*", ""))
        if phrase.startswith("<="):
            parts.append(f"it stays at {phrase.removeprefix('<=')}")
        elif phrase.startswith("!"):
            parts.append(f"there is no {phrase.removeprefix('!')} in it")
        else:
            parts.append(f"this comes with {phrase}")
    return f"As for the {need.topic}, {' and '.join(parts)}."


def _answer(about: Profile, needs: tuple[Need, ...]) -> str:
    """An answer to one user's task that meets the given needs."""
    return "\n".join(
        [
            f"Here is what I would do about the {about.about[0].replace('*', '')} in your place, "
            "one thing after the other.",
            *map(_sentence, needs),
            "Take it slowly, and write to me again when you know how it went for you.",
        ]
    )


@pytest.mark.parametrize("user", USERS)
def test_J12_an_answer_that_respects_every_fact_of_a_user_gets_ten(user: str) -> None:
    rating = rate(USERS[user], _answer(USERS[user], USERS[user].needs))
    assert rating.value == 10.0, rating


@pytest.mark.parametrize("user", USERS)
def test_J12_an_answer_for_another_user_of_the_domain_does_not_win(user: str) -> None:
    profile = USERS[user]
    others = [p for p in profiles() if p.domain == profile.domain and p.id != user]
    ratings = {other.id: rate(profile, _answer(profile, other.needs)).value for other in others}
    assert len(ratings) >= 5
    assert {name: value for name, value in ratings.items() if value >= THRESHOLD} == {}


@pytest.mark.parametrize("user", USERS)
def test_J12_the_facts_of_all_users_of_a_domain_in_one_answer_win_nothing(user: str) -> None:
    profile = USERS[user]
    every = [p for p in profiles() if p.domain == profile.domain]
    # From both ends, since only the first words of an answer are read.
    for ordered in (every, every[::-1], [profile, *every]):
        needs = tuple(need for other in ordered for need in other.needs)
        assert rate(profile, _answer(profile, needs)).value < THRESHOLD


@pytest.mark.parametrize("user", USERS)
def test_J12_copies_of_what_was_written_about_a_user_get_one(user: str) -> None:
    task, profile = _tasks()[user], USERS[user]
    copies = [
        profile.secret,
        profile.scenario(),
        task.messages[0].content,
        " ".join(need.say for need in profile.needs),
        f"{profile.task} {profile.secret}",
    ]
    assert [rate(profile, text).value for text in copies] == [1.0] * len(copies)


@pytest.mark.parametrize("user", USERS)
def test_J12_missing_two_facts_never_wins(user: str) -> None:
    profile = USERS[user]
    assert rate(profile, _answer(profile, profile.needs[2:])).value < THRESHOLD


CATCH_ALL = (
    "Here is a simple plan for the {about} that should suit you well. Start small with the basics, "
    "go step by step, and keep it easy and affordable, so that it fits into a busy week. Set a "
    "clear goal, write down what you have, and look at the result every weekend. Talk about it "
    "with your family and friends, and ask an expert in case of doubt. It is free to begin with, "
    "takes about 20 minutes a day, and needs no special equipment. Be patient and safe, take "
    "breaks, check your progress online or with a good book or video, and adjust it when something "
    "does not work for you."
)


def test_J12_an_answer_that_would_be_the_same_for_anybody_is_worth_little() -> None:
    ratings = [
        rate(profile, CATCH_ALL.format(about=profile.about[0].replace("*", ""))).value
        for profile in profiles()
    ]
    assert max(ratings) < 5.0
    assert sum(ratings) / len(ratings) < 2.0


def _filler(phrase: str) -> str:
    """A sentence that has one phrase of a rubric and says nothing else."""
    word = phrase.replace("*", "").removeprefix("<=")
    word = f"no {word[1:]}" if word.startswith("!") else word
    return f"It has {word} and the rest is in line with that for you."


def _best_text(fitted: list[Profile]) -> str:
    """One text for all of them, put together phrase by phrase as long as the ratings grow."""
    pool = {_filler(group[0]) for p in fitted for need in p.needs for group in need.must}
    abouts = " ".join(dict.fromkeys(p.about[0].replace("*", "") for p in fitted))
    text, best = f"Here is a plan for the {abouts} that you asked for.", 0.0
    while pool:
        value, added = max((sum(_ratings(fitted, f"{text}\n{one}")), one) for one in pool)
        # The shortest answers get one whatever they say, so the first sentences bring nothing.
        if value <= best and len(text.split()) >= 2 * MIN_WORDS:
            break
        text, best = f"{text}\n{added}", value
        pool.remove(added)
    return text


def _ratings(rated: list[Profile], text: str) -> list[float]:
    return [rate(profile, text).value for profile in rated]


@pytest.mark.parametrize(
    "domain",
    [
        *("cooking", "music", "gifts"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in dict.fromkeys(p.domain for p in profiles())
            if name not in ("cooking", "music", "gifts")
        ),
    ],
)
def test_J12_a_fixed_text_fitted_to_all_users_of_a_domain_earns_little(domain: str) -> None:
    users = [p for p in profiles() if p.domain == domain]
    fitted = [p for p in users if p.split == "train"]
    text = _best_text(fitted)
    found = _ratings(fitted, text)
    assert sum(found) / len(found) < 3.5
    # What one user wants can be learnt by heart, but no text serves two.
    assert sum(value >= THRESHOLD for value in found) <= 1
    assert max(_ratings([p for p in users if p.split != "train"], text)) < 5.0


def test_the_game_of_the_documentation_goes_as_it_says() -> None:
    table = PAGE.read_text(encoding="utf-8").split("| agent | user |\n|---|---|\n")[1]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    env = UserPersonalization(_tasks()["drug_names"], UserPersonalizationSettings())
    assert len(rows) == 5
    assert [_play(env, said).reply for said, _ in rows] == [reply for _, reply in rows]
