"""The environment agreement: its language, its tasks, what its games decide, and its settings."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.envs.agreement.game import Agreement, game_factory, tasks_of
from delta_belief_rl.envs.agreement.language import (
    CATEGORIES,
    LONGEST,
    NOUNS,
    REPLIES,
    VERBS,
    Problem,
    sums,
    tag,
    words,
)
from delta_belief_rl.envs.agreement.settings import read_settings
from delta_belief_rl.envs.agreement.tasks import draw, make_tasks, split_of
from delta_belief_rl.envs.check import available_hooks
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.trainer.environments import env_factory
from delta_belief_rl.trainer.tasks import load_tasks
from delta_belief_rl.types import Task, UserError, Verdict

ONE = Problem(3, "minus", 2, "mouse", "sleep", "red", "quietly")
MANY = Problem(2, "plus", 3, "goose", "run")
OPTIONS = EnvOptions(max_turns=1)


def game_of(problem: Problem) -> Agreement:
    """A game of a task with this problem."""
    task = replace(make_tasks("train", 1, 0)[0], scenario=json.dumps(asdict(problem)))
    return Agreement(task)


def test_noun_and_verb_agree_with_the_result() -> None:
    assert ONE.question() == "three minus two : red mouse sleep quietly"
    assert ONE.answer() == "three minus two is one so one red mouse sleeps quietly ."
    assert MANY.question() == "two plus three : goose run"
    assert MANY.answer() == "two plus three is five so five geese run ."


def test_a_slip_and_another_result_are_the_mistakes_that_they_say() -> None:
    assert MANY.answer(slip=True) == "two plus three is five so five geese runs ."
    assert MANY.answer(result=1) == "two plus three is one so one goose runs ."


def test_every_sum_has_words_on_both_sides() -> None:
    found = sums()
    assert len(found) == len(set(found)) == 72
    for left, operator, right in found:
        assert 1 <= (left + right if operator == "plus" else left - right) <= 9


@pytest.mark.parametrize(
    ("left", "operator", "right"), [(9, "plus", 9), (2, "minus", 2), (0, "plus", 1)]
)
def test_a_number_without_a_word_is_refused(left: int, operator: str, right: int) -> None:
    with pytest.raises(ValueError, match="has no word"):
        Problem(left, operator, right, "cat", "run")


def test_the_vocabulary_is_small_and_every_word_of_an_answer_has_one_part_of_speech() -> None:
    known = words()
    assert len(known) == len(set(known)) <= 56
    rng = np.random.default_rng(0)
    for _ in range(200):
        problem = draw(rng)
        said = problem.answer().split()
        assert len(said) + 1 <= LONGEST
        assert {*said, *problem.question().split()} <= set(known)
        assert all(tag(word) in CATEGORIES for word in said)
    assert {tag(word) for word in (*NOUNS, *NOUNS.values())} == {"noun"}
    assert {tag(word) for word in (*VERBS, *VERBS.values())} == {"verb"}
    assert [tag(word) for word in REPLIES] == ["", ""]


def test_tasks_are_a_function_of_seed_split_and_number_and_splits_share_none() -> None:
    sets = {split: make_tasks(split, 200, 3) for split in ("train", "val", "test")}
    questions = [task.messages[0].content for tasks in sets.values() for task in tasks]
    assert len(questions) == len(set(questions)) == 600
    for split, tasks in sets.items():
        assert make_tasks(split, 20, 3) == tasks[:20]
        assert {task.split for task in tasks} == {split}
        assert [task.id for task in tasks[:2]] == [f"{split}_0", f"{split}_1"]
    assert make_tasks("train", 20, 4) != sets["train"][:20]


def test_one_problem_in_three_has_the_result_one() -> None:
    rng = np.random.default_rng(5)
    singles = sum(draw(rng).result == 1 for _ in range(2000)) / 2000
    assert 0.28 < singles < 0.38


def test_the_split_of_a_problem_does_not_depend_on_the_seed() -> None:
    for seed in (0, 1):
        for task in make_tasks("val", 20, seed):
            assert split_of(Agreement(task).problem) == "val"


@pytest.mark.parametrize(
    ("text", "verdict", "note"),
    [
        ("two plus three is five so five geese run .", Verdict.WIN, ""),
        ("Two plus three is five so five geese run.", Verdict.WIN, ""),
        ("two plus three is six so six geese run .", Verdict.OTHER, "wrong_sum"),
        ("two plus three is five so six geese run .", Verdict.OTHER, "wrong_sum"),
        ("two plus three is five so five geese runs .", Verdict.OTHER, "wrong_agreement"),
        ("two plus three is five so five goose run .", Verdict.OTHER, "wrong_agreement"),
        ("two plus three is one so one goose runs .", Verdict.OTHER, "wrong_sum"),
        ("two plus three is five so five cats run .", Verdict.OTHER, "wrong_words"),
        ("two plus three is five so five geese sing .", Verdict.OTHER, "wrong_words"),
        ("two plus three is five so five geese run", Verdict.OTHER, "wrong_words"),
        ("two plus three is five so five red geese run .", Verdict.OTHER, "wrong_words"),
        ("two minus three is five so five geese run .", Verdict.OTHER, "wrong_words"),
        ("", Verdict.INVALID, "no_words"),
        ("  ", Verdict.INVALID, "no_words"),
    ],
)
def test_an_answer_is_decided_word_for_word(text: str, verdict: Verdict, note: str) -> None:
    game = game_of(MANY)
    action = game.parse(text)
    assert not action.needs_judge
    outcome = game.apply(action, None)
    assert (outcome.verdict, outcome.diagnostics) == (verdict, (note,) if note else ())
    assert outcome.strict_win is outcome.compatible_win is (verdict is Verdict.WIN)
    assert outcome.done
    assert {*outcome.reply.split()} <= {*words()}
    with pytest.raises(ValueError, match="over"):
        game.apply(action, None)


def test_hooks_say_the_reference_and_equal_answers_have_one_key() -> None:
    game = game_of(ONE)
    assert game.reference() == ONE.answer()
    assert game.action_key("One CAT.") == game.action_key("one cat .")
    saved = game.snapshot()
    game.apply(game.parse(ONE.answer()), None)
    assert game.reference() == ""
    game.restore(saved)
    assert game.apply(game.parse("one"), None).verdict is Verdict.OTHER
    assert set(available_hooks(game)) >= {"reference", "action_key", "snapshot", "feedback"}


def test_a_judge_is_never_asked() -> None:
    game = game_of(ONE)
    with pytest.raises(ValueError, match="judge"):
        game.judge_request(game.parse("one"))


def test_a_task_of_another_environment_is_refused_by_name() -> None:
    task = Task("t7", "x", "s", make_tasks("val", 1, 0)[0].messages)
    for scenario in (None, "{}", "[1]", '{"left": 9, "operator": "plus", "right": 9}'):
        with pytest.raises(UserError, match="'t7' has no sum"):
            Agreement(replace(task, scenario=scenario))


def test_more_than_one_turn_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"multi_turn\.max_turns"):
        game_factory(EnvOptions(max_turns=2))


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"sede": 1}, "did you mean seed"),
        ({"seed": -1}, "multi_turn.env_kwargs.seed"),
        ({"tasks": 3}, "multi_turn.env_kwargs.tasks"),
        ({"tasks": {"train": True}}, "tasks.train"),
        ({"tasks": {"val": 10**6}}, "tasks.val"),
        ({"tasks": {"dev": 1}}, "has no key 'dev'"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    kwargs: dict[str, object], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        read_settings(kwargs)


def test_the_tasks_of_a_split_are_as_many_as_the_settings_say() -> None:
    options = EnvOptions(max_turns=1, kwargs={"tasks": {"train": 5, "val": 2}})
    assert [len(tasks_of(split, options)) for split in ("train", "val", "test")] == [5, 2, 0]


def test_the_configured_environment_plays_its_tasks() -> None:
    cfg, _ = load_config(["experiment=agreement_quickstart"])
    sets = load_tasks(cfg)
    assert (len(sets.train), len(sets.val), len(sets.test)) == (256, 64, 64)
    game = env_factory(cfg, 1)(sets.val[0])
    assert game.apply(game.parse(sets.val[0].secret), None).verdict is Verdict.WIN
