"""Hostile and unlucky questions of 20 Questions, and what every rule says of them.

The cases and their expectations stand in ``tests/data/adversarial_twenty_questions.yaml``, whose
head explains them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from delta_belief_rl.envs import answers
from delta_belief_rl.envs.base import JudgeReply, Outcome
from delta_belief_rl.envs.twenty_questions import TwentyQuestions, TwentyQuestionsSettings
from delta_belief_rl.types import Task, Verdict

FILE = Path(__file__).parents[1] / "data" / "adversarial_twenty_questions.yaml"
PUBLISHED = ("exact", "sentence", "question", "multiple_questions", "length")
LIST_POLICIES = ("report", "penalise", "refuse")
MIN_CASES = 240
MIN_CASES_OF_A_CATEGORY = 15
MIN_CASES_OF_AN_OUTCOME = 20
MIN_SYNTAX_CASES = 40
CATEGORIES = {
    "lists",
    "quotes",
    "plurals_and_possessives",
    "accents",
    "invisible",
    "homoglyphs",
    "full_width",
    "judge_injection",
    "hidden_secrets",
    "multi_word",
    "template_tokens",
    "case_digits_underscores",
    "control_characters",
    "length_limits",
    "several_questions",
    "generic_words",
    "game_questions",
    "negations",
    "definitions",
    "repeats",
}
VERDICT_OF = {
    "yes": Verdict.YES,
    "no": Verdict.NO,
    "repeated": Verdict.REPEATED,
    "invalid": Verdict.INVALID,
    "finished": Verdict.WIN,
}


@dataclass(frozen=True)
class Case:
    """One question; see the head of the file."""

    id: str
    secret: str
    aliases: tuple[str, ...]
    judge: str
    action: str
    history: tuple[str, ...]
    holds: frozenset[str]
    breaks: frozenset[str]
    syntax: str | None
    verify: dict[str, str]
    games: dict[str, str]


def _case(category: str, entry: dict[str, Any]) -> Case:
    ask, rules = entry["ask"], entry["rules"]
    text, times = ask.get("fill", ("", 0))
    return Case(
        id=f"{category}-{entry['id']}",
        secret=ask["secret"],
        aliases=tuple(ask.get("aliases", ())),
        judge=ask["judge"],
        action=ask["action"].replace("<fill>", text * times),
        history=tuple(ask.get("history", ())),
        holds=frozenset(rules["holds"]),
        breaks=frozenset(rules["breaks"]),
        syntax=rules.get("syntax"),
        verify=entry["verify"],
        games=entry["games"],
    )


@cache
def cases() -> list[Case]:
    read = yaml.load(FILE.read_text(encoding="ascii"), Loader=yaml.CSafeLoader)
    return [_case(category, entry) for category, entries in read.items() for entry in entries]


# --- what the code says -----------------------------------------------------------------------


def _verified(case: Case, methods: tuple[str, ...], unconfirmed: str | None, word: str) -> str:
    return answers.verify_question(case.action, word, case.secret, methods, unconfirmed).answer


def _is_broken(rule: str, case: Case) -> bool:
    return _verified(case, (rule,), None, "no") == "invalid"


def _is_found(rule: str, case: Case) -> bool:
    return _verified(case, (rule,), None, "no") == "finished"


def _syntax(case: Case) -> str:
    word = _verified(case, ("syntax",), None, "no")
    return {"finished": "named", "no": "asks", "invalid": "nothing"}[word]


def _game(policy: str, case: Case) -> str:
    task = Task("case", "tw_q", case.secret, (), aliases=case.aliases)
    settings = TwentyQuestionsSettings(verify_methods=PUBLISHED, candidate_lists=policy)  # type: ignore[arg-type]
    env = TwentyQuestions(task, settings)
    for question in case.history:
        assert not _play(env, question, "no").done, "a case ends with its action"
    outcome = _play(env, case.action, case.judge)
    marks = {
        "done": outcome.done,
        "strict": outcome.strict_win,
        "compatible": outcome.compatible_win,
    }
    return " ".join([str(outcome.verdict), *(name for name, holds in marks.items() if holds)])


def _play(env: TwentyQuestions, text: str, judge: str) -> Outcome:
    action = env.parse(text)
    return env.apply(action, JudgeReply(VERDICT_OF[judge]) if action.needs_judge else None)


# --- rule by rule: what is expected, and what is ----------------------------------------------

Rule = tuple[Callable[[Case], object], Callable[[Case], object]]


def _holds(name: str, actual: Callable[[Case], bool]) -> Rule:
    return (lambda case: name in case.holds), actual


RULES: dict[str, Rule] = {
    "exact": _holds("exact", partial(_is_found, "exact")),
    "regex": _holds("regex", partial(_is_found, "regex")),
    "strict": _holds("strict", lambda c: answers.strict_guess(c.action, c.secret, c.aliases)),
    "guess": _holds("guess", lambda c: answers.guess_form(c.action)),
    "list": _holds("list", lambda c: answers.candidate_list(c.action)),
    "duplicate": _holds("duplicate", lambda c: answers.is_duplicate(c.action, c.history)),
    **{
        rule: ((lambda c, rule=rule: rule in c.breaks), partial(_is_broken, rule))
        for rule in answers.VALIDITY_METHODS
    },
    "syntax": ((lambda c: c.syntax), _syntax),
    "verify_replaced": (
        (lambda c: c.verify["replaced"]),
        (lambda c: _verified(c, PUBLISHED, "yes", c.judge)),
    ),
    "verify_kept": (
        (lambda c: c.verify["kept"]),
        (lambda c: _verified(c, PUBLISHED, None, c.judge)),
    ),
    **{
        f"game_{policy}": ((lambda c, policy=policy: c.games[policy]), partial(_game, policy))
        for policy in LIST_POLICIES
    },
}


def _applies(rule: str, case: Case) -> bool:
    if rule == "duplicate":
        return bool(case.history)
    return rule != "syntax" or case.syntax is not None


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        pytest.param(case, rule, id=f"{case.id}-{rule}")
        for case in cases()
        for rule in RULES
        if _applies(rule, case)
    ],
)
def test_J12_every_rule_says_what_its_definition_says(case: Case, rule: str) -> None:
    if rule == "syntax" and find_spec("lightlemma") is None:
        pytest.skip("lightlemma is not installed: the rule 'syntax' cannot be used")
    expected, actual = RULES[rule]
    assert actual(case) == expected(case), f"{case.action!r}, secret {case.secret!r}"


# --- what the set covers ----------------------------------------------------------------------


def test_every_category_has_its_cases() -> None:
    counts = Counter(case.id.split("-")[0] for case in cases())
    assert len(cases()) >= MIN_CASES
    assert counts.keys() == CATEGORIES
    assert {name: n for name, n in counts.items() if n < MIN_CASES_OF_A_CATEGORY} == {}


def test_no_case_stands_twice() -> None:
    assert len({case.id for case in cases()}) == len(cases())
    asked = Counter((c.secret, c.aliases, c.judge, c.action, c.history) for c in cases())
    assert [key for key, count in asked.items() if count > 1] == []


@pytest.mark.parametrize("rule", RULES)
def test_both_outcomes_of_every_rule_occur_often(rule: str) -> None:
    expected = RULES[rule][0]
    found = Counter(expected(case) for case in cases() if _applies(rule, case))
    rare = {outcome: n for outcome, n in found.items() if n < MIN_CASES_OF_AN_OUTCOME}
    # A repeat is the least of what a case can end in.
    assert rare.keys() <= {"repeated"}
    assert len(found) - len(rare) >= 2
    assert rule != "syntax" or found.total() >= MIN_SYNTAX_CASES


def test_the_expectations_of_a_case_agree_with_each_other() -> None:
    for case in cases():
        if case.breaks:
            assert set(case.verify.values()) == {"invalid"}, case.id
            assert set(case.games.values()) == {"invalid"}, case.id
        elif "exact" in case.holds:
            assert set(case.verify.values()) == {"finished"}, case.id
        if "strict" in case.holds and not case.breaks:
            assert set(case.games.values()) == {"win done strict compatible"}, case.id
