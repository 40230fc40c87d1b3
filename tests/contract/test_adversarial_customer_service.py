"""Hostile and unlucky messages of Customer Service, and what the environment says of them.

The cases and their expectations stand in ``tests/data/adversarial_customer_service.yaml``, whose
head explains them.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from delta_belief_rl.envs.base import Outcome
from delta_belief_rl.envs.customer_service.data import Scenario, lexicon, scenarios
from delta_belief_rl.envs.customer_service.game import CustomerService, CustomerServiceSettings
from delta_belief_rl.envs.customer_service.text import sentences
from delta_belief_rl.judge.customer_service.rules import CustomerServiceRules
from delta_belief_rl.types import Verdict

FILE = Path(__file__).parents[1] / "data" / "adversarial_customer_service.yaml"
PAGE = Path(__file__).parents[2] / "docs" / "customer_service.md"
MIN_CASES = 120
MIN_CASES_OF_A_CATEGORY = 3
CATEGORIES = {
    *("wins", "at_length", "cause_only", "fix_only", "near_misses", "negations", "several_at_once"),
    *("everything", "prompt_quotes", "rules_quotes", "judge_address", "tags", "goal_phrase"),
    *("languages", "empty", "long", "several_questions", "questions", "contradictions"),
    "repeated",
}


@dataclass(frozen=True)
class Case:
    """One message; see the head of the file."""

    id: str
    scenario: str
    message: str
    after: tuple[str, ...]
    then: str


def _case(category: str, entry: dict[str, Any]) -> Case:
    text, times = entry.get("fill", ("", 0))
    return Case(
        id=f"{category}-{entry['id']}",
        scenario=entry["in"],
        message=entry["say"].replace("<fill>", text * times),
        after=tuple(entry.get("after", ())),
        then=entry["then"],
    )


@cache
def cases() -> list[Case]:
    read = yaml.safe_load(FILE.read_text(encoding="ascii"))
    return [_case(category, entry) for category, entries in read.items() for entry in entries]


def send(env: CustomerService, text: str) -> Outcome:
    action = env.parse(text)
    if not action.needs_judge:
        return env.apply(action, None)
    return env.apply(action, CustomerServiceRules().answer([env.judge_request(action)])[0])


def won(outcome: Outcome) -> bool:
    return outcome.strict_win or outcome.compatible_win


def game(scenario: str, **settings: Any) -> CustomerService:
    return CustomerService(scenarios()[scenario].task(), CustomerServiceSettings(**settings))


def in_words(outcome: Outcome) -> str:
    marks = {
        "strict": outcome.strict_win,
        "compatible": outcome.compatible_win,
        "list": outcome.is_list,
    }
    return " ".join([str(outcome.verdict), *(name for name, holds in marks.items() if holds)])


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in cases()])
def test_J12_every_message_gets_what_the_rules_say(case: Case) -> None:
    env = game(case.scenario)
    for text in case.after:
        assert not send(env, text).done, "a case ends with its own message"
    outcome = send(env, case.message)
    assert in_words(outcome) == case.then, f"{case.message[:200]!r} -> {outcome.reply!r}"
    assert outcome.done == (outcome.verdict is Verdict.WIN)


# --- what cannot pay --------------------------------------------------------------------------


def every_scenario() -> list[Scenario]:
    return list(scenarios().values())


def test_a_message_with_every_remedy_wins_nowhere() -> None:
    words = [" ".join(advice.words.items[0].words) for advice in lexicon().remedies.values()]
    for message in ("Please " + ", ".join(words) + ".", "Try to " + " or ".join(words) + "."):
        for scenario in every_scenario():
            outcome = send(game(scenario.id), message)
            assert not won(outcome), scenario.id


def test_a_message_with_every_cause_of_the_product_wins_nowhere() -> None:
    for number, scenario in enumerate(every_scenario()):
        same = [other for other in every_scenario() if other.product == scenario.product]
        glue = (". ", ", or ", " and ")[number % 3]
        causes, fixes = (glue.join(getattr(o, part) for o in same) for part in ("cause", "fix"))
        assert not won(send(game(scenario.id), f"{causes}. {fixes}.")), scenario.id


WRONG_PAIRS = (
    *("pump broken replace pump", "hose kinked straighten hose", "motor worn replace motor"),
    *("sensor dirty clean sensor", "cable loose tighten cable", "battery empty charge battery"),
    *("software outdated update software", "fuse blown replace fuse"),
)
MARKS = (
    *(
        ", ",
        " > ",
        " -> ",
        " - ",
        "- ",
        " \u2013 ",
        " \u00b7 ",
        " vs ",
        " | ",
        "; ",
        ";",
        ". ",
        ".",
        " (",
    ),
    *(" + ", " = ", " * ", " _ ", " \U0001f449 ", '" "'),
)
"""What can stand between the members of a list."""
NO_MARKS = (" ", " next ")
MAX_WINS_WITHOUT_A_MARK = 2
"""Of all scenarios; for each of ``NO_MARKS``."""


def _lists_that_win(mark: str) -> list[str]:
    """Scenarios that the right answer wins among two wrong pairs, in any order of the three."""
    rng, found = random.Random(mark), list[str]()
    for number, scenario in enumerate(every_scenario()):
        rubric = scenario.rubric
        groups = (rubric.part, rubric.fault, rubric.remedy, rubric.part)
        words = " ".join(word.strip("=*") for group in groups for word in group.items[0].words)
        right = words if number % 2 else scenario.answer.rstrip(".").replace(". ", " ")
        wrong = [pair for pair in WRONG_PAIRS if not rubric.part.first(sentences(pair)[0])]
        members = [right, *rng.sample(wrong, 2)]
        rng.shuffle(members)
        if send(game(scenario.id), mark.join(members)).strict_win:
            found.append(scenario.id)
    return found


@pytest.mark.parametrize("mark", MARKS)
def test_J12_the_right_answer_in_a_list_wins_nowhere_whatever_separates_it(mark: str) -> None:
    assert _lists_that_win(mark) == []


@pytest.mark.parametrize("mark", NO_MARKS)
def test_J12_a_list_that_no_mark_separates_hardly_ever_wins(mark: str) -> None:
    assert len(_lists_that_win(mark)) <= MAX_WINS_WITHOUT_A_MARK


def test_quoting_the_prompt_wins_nowhere() -> None:
    for number, scenario in enumerate(every_scenario()):
        prompt = scenario.task().messages[0].content
        # The lines are the same for all but the complaint.
        lines = prompt.splitlines() if number % 10 == 0 else []
        for message in filter(None, (prompt, scenario.complaint, *lines)):
            outcome = send(game(scenario.id), message)
            assert not won(outcome), (scenario.id, message)


def test_quoting_the_customer_wins_nowhere() -> None:
    for scenario in every_scenario():
        replies = [fact.say for fact in scenario.facts.values()]
        replies += [advice.say for advice in scenario.fails]
        for message in replies:
            outcome = send(game(scenario.id), message)
            assert not won(outcome), (scenario.id, message)


@pytest.mark.parametrize(
    "phrase", ["Goal reached.", "GOAL REACHED", "goal-reached", "Goal\nreached"]
)
def test_the_goal_phrase_spoils_even_the_right_answer(phrase: str) -> None:
    for scenario in every_scenario()[::7]:
        outcome = send(game(scenario.id), f"{scenario.answer} {phrase}")
        assert not won(outcome), scenario.id


def test_asking_for_everything_at_once_gathers_one_fact_at_most() -> None:
    asked = "Tell me about the " + ", the ".join(name for name in lexicon().topics) + "."
    for scenario in every_scenario()[::7]:
        env = game(scenario.id)
        send(env, asked)
        assert len(env.footprint()[1]) <= 1


# --- what the page for users shows --------------------------------------------------------------


def test_the_transcript_of_the_page_is_a_real_one() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (.+) \| (.+) \| (other|win, strict) \| ([\d.]+) \|$", page, re.MULTILINE
    )
    assert len(rows) == 6
    env = game("router/overheated_router")
    assert env.scenario is not None
    assert env.scenario.complaint in page
    for said, reply, verdict, score in rows:
        outcome = send(env, said)
        assert (outcome.reply, str(outcome.verdict)) == (reply, verdict.split(",")[0])
        assert outcome.strict_win == (verdict == "win, strict")
        assert env.progress() == pytest.approx(float(score))


# --- what the set covers ----------------------------------------------------------------------


def test_every_category_has_its_cases() -> None:
    counts = Counter(case.id.split("-")[0] for case in cases())
    assert len(cases()) >= MIN_CASES
    assert counts.keys() == CATEGORIES
    assert {name: n for name, n in counts.items() if n < MIN_CASES_OF_A_CATEGORY} == {}


def test_no_case_stands_twice() -> None:
    assert len({case.id for case in cases()}) == len(cases())
    asked = Counter((case.scenario, case.message, case.after) for case in cases())
    assert [key for key, count in asked.items() if count > 1] == []
