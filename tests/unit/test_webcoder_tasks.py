"""The generated projects: solvable, different, and graded between nothing and everything."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable

import pytest

from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.envs.webcoder import ENVIRONMENTS
from delta_belief_rl.envs.webcoder.app import build
from delta_belief_rl.envs.webcoder.faults import FAULTS, broken
from delta_belief_rl.envs.webcoder.game import WebCoder
from delta_belief_rl.envs.webcoder.requirements import KINDS, examine
from delta_belief_rl.envs.webcoder.settings import DEFAULT_TASKS, SPLITS
from delta_belief_rl.envs.webcoder.tasks import (
    Blueprint,
    blueprint_from_json,
    families,
    fault_text,
    make_tasks,
)
from delta_belief_rl.types import Task, UserError, Verdict

ALL = [task for split in SPLITS for task in make_tasks(split, DEFAULT_TASKS[split], 0)]


def blueprint(task: Task) -> Blueprint:
    return blueprint_from_json(task.scenario or "")


def solve(env: WebCoder) -> str:
    """The player that reaches everything."""
    return env.reference()


def half(env: WebCoder) -> str:
    """A player that writes the page of every task and forgets what it does."""
    page = env.reference().split("```app.json")[0]
    return f"{page.removesuffix('done')}\ndone"


def talk(env: WebCoder) -> str:
    """A player that says what it would do."""
    return "I have written all files and tested them.\ndone"


def final(task: Task, player: Callable[[WebCoder], str]) -> tuple[tuple[float, ...], float | None]:
    """Rewards of the tasks and the grade of a game; a win has no grade."""
    env = WebCoder(task, 8)
    while True:
        outcome = env.apply(env.parse(player(env)), None)
        if outcome.done:
            assert (outcome.verdict is Verdict.WIN) == (min(env.rewards) == 1.0)
            return env.rewards, outcome.score


def test_there_are_as_many_tasks_as_asked_for_and_no_project_is_there_twice() -> None:
    assert Counter(task.split for task in ALL) == DEFAULT_TASKS
    assert DEFAULT_TASKS["train"] >= 256
    assert min(DEFAULT_TASKS.values()) >= 64
    assert len({task.scenario for task in ALL}) == len(ALL)
    assert len({(task.split, task.id) for task in ALL}) == len(ALL)


@pytest.mark.slow
def test_a_solver_reaches_everything_an_idle_player_nothing_and_a_careless_one_a_part() -> None:
    for task in ALL:
        assert final(task, solve) == ((1.0,) * 4, 1.0), task.id
        assert final(task, talk) == ((0.0,) * 4, 0.0), task.id
        rewards, score = final(task, half)
        assert rewards[0] == 1.0, task.id
        assert all(0.0 < reward < 1.0 for reward in rewards[1:3]), task.id
        assert score is not None
        assert 0.0 < score < 1.0, task.id


@pytest.mark.parametrize("task", ALL[:24], ids=lambda task: task.id)
def test_the_first_tasks_tell_three_players_apart(task: Task) -> None:
    assert final(task, solve) == ((1.0,) * 4, 1.0)
    assert final(task, talk) == ((0.0,) * 4, 0.0)
    score = final(task, half)[1]
    assert score is not None
    assert 0.0 < score < 1.0


@pytest.mark.parametrize("task", ALL[:24], ids=lambda task: task.id)
def test_every_requirement_fails_without_its_task_and_every_fault_breaks_something(
    task: Task,
) -> None:
    plan = blueprint(task)
    files = {job.kind: job.solution for job in plan.jobs}
    for kind, earlier in (("generate", "reproduce"), ("modify", "generate")):
        new = [one for one in plan.requirements if one.since == kind]
        old = examine(new, build(files[earlier]).app)
        assert new
        assert old.met == (0.0,) * len(new)
    fault = plan.jobs[-1].fault
    required = plan.required("repair")
    harmed = broken(files["modify"], fault)
    assert harmed != files["modify"]
    assert min(examine(required, build(harmed).app).met) == 0.0


@pytest.mark.parametrize("task", ALL[:24], ids=lambda task: task.id)
def test_a_fault_finds_other_spellings_of_what_it_breaks(task: Task) -> None:
    """Without it a project could be written that no repair has to mend."""
    plan = blueprint(task)
    solution, fault = plan.jobs[2].solution, plan.jobs[-1].fault
    found = re.search("<h1>(.*?)</h1>", solution["index.html"])
    assert found is not None
    upper = re.sub(r"</(\w+)>", lambda end: f"</{end[1].upper()}>", solution["index.html"])
    page = f"<head><title>{found[1]}</title></head>{upper}"
    files = {**solution, "index.html": page}
    needed = plan.required("repair")
    assert min(examine(needed, build(files).app).met) == 1.0
    assert min(examine(needed, build(broken(files, fault)).app).met) < 1.0


def test_all_families_and_all_faults_take_turns() -> None:
    plans = [blueprint(task) for task in ALL[:256]]
    count = Counter(plan.family for plan in plans)
    assert set(count) == set(families()) == {"counter", "list", "form", "toggle", "tabs", "cards"}
    assert max(count.values()) - min(count.values()) <= 1
    kinds = Counter(plan.jobs[-1].fault["kind"] for plan in plans)
    assert set(kinds) == set(FAULTS)
    assert min(kinds.values()) > 30


@pytest.mark.parametrize("seed", [0, 7])
def test_no_project_is_in_two_splits_with_whatever_seed(seed: int) -> None:
    made = {split: make_tasks(split, 60, seed) for split in SPLITS}
    others = {split: {task.scenario for task in make_tasks(split, 60, 0)} for split in SPLITS}
    for split in SPLITS:
        for other in set(SPLITS) - {split}:
            assert not {task.scenario for task in made[split]} & others[other]


def test_tasks_are_a_function_of_seed_split_and_number() -> None:
    few, many = make_tasks("val", 5, 3), make_tasks("val", 9, 3)
    assert many[:5] == few
    make_tasks.cache_clear()
    assert make_tasks("val", 5, 3) == few
    assert make_tasks("val", 5, 4) != few


def test_the_agent_is_told_the_task_and_never_a_check() -> None:
    for task in ALL[:48]:
        (message,) = task.messages
        assert "Task 1 of 4 (reproduce): The page has a heading h1" in message.content
        assert '"holds"' not in message.content
        assert "weight" not in message.content
        short = make_tasks("train", 1, 0, explain=False)[0].messages[0].content
        assert short.startswith("Task 1 of 4")
        assert message.content.isascii() or "ø" in message.content or "á" in message.content


def test_the_words_need_no_escape_in_html_or_json() -> None:
    for task in ALL:
        words = json.dumps([job.text for job in blueprint(task).jobs], ensure_ascii=False)
        assert not {"&", "<", ">", "'"} & {*words}, task.id


def test_the_secret_is_what_the_repair_has_to_find() -> None:
    for task in ALL[:24]:
        assert task.secret == fault_text(blueprint(task).jobs[-1].fault)
        assert task.secret not in task.messages[0].content
    assert make_tasks("train", 1, 0, ("reproduce",))[0].secret == ""


def test_a_game_may_have_fewer_tasks() -> None:
    options = EnvOptions(4, kwargs={"kinds": ["reproduce", "generate"], "tasks": {"val": 2}})
    plugin = ENVIRONMENTS["webcoder"]
    assert plugin.tasks is not None
    tasks = plugin.tasks("val", options)
    assert [job.kind for job in blueprint(tasks[0]).jobs] == list(KINDS[:2])
    env = plugin.make(options)(tasks[0])
    assert isinstance(env, WebCoder)
    env.apply(env.parse(env.reference()), None)
    assert env.apply(env.parse(env.reference()), None).verdict is Verdict.WIN


def test_more_projects_than_there_are_words_for_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from delta_belief_rl.envs.webcoder import tasks

    pools = {"pools": {"only": ["one"]}}
    family = {
        "draw": {"word": "only"},
        "tasks": {"reproduce": "Write ${word}."},
        "page": {"reproduce": "<p>${word}</p>"},
        "rules": {},
        "requirements": [],
        "faults": [{"kind": "lost_end", "tag": "p", "says": "x"}],
    }
    small = {"webcoder": pools, "webcoder_families": {"families": {"tiny": family}}}
    monkeypatch.setattr(tasks, "_read", small.__getitem__)
    # The one project is in one split; the second one of any split is too much.
    make = tasks.make_tasks.__wrapped__
    with pytest.raises(UserError, match=r"env_kwargs\.tasks\.train is too large"):
        make("train", 2, 0, ("reproduce",))


def test_stored_tasks_need_no_generator() -> None:
    plan = blueprint(ALL[0])
    assert blueprint_from_json(json.dumps(json.loads(ALL[0].scenario or ""))) == plan
