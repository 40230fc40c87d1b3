"""The generated errands and those who run them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from delta_belief_rl.envs.errands import ENVIRONMENTS
from delta_belief_rl.envs.errands.game import Errand
from delta_belief_rl.envs.errands.planning import needed_items, plan
from delta_belief_rl.envs.errands.players import PLAYERS, Explorer, Walk, run_errand
from delta_belief_rl.envs.errands.tasks import SOLVABLE, SPLITS, hiding_place, make_tasks, split_of
from delta_belief_rl.envs.errands.vocabulary import vocabulary
from delta_belief_rl.envs.errands.world import (
    House,
    first_state,
    holds,
    house_from_json,
)
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.types import Task, Verdict

PLUGIN = ENVIRONMENTS["errands"]
OPTIONS = EnvOptions(SOLVABLE)


@cache
def tasks(split: str) -> tuple[Task, ...]:
    assert PLUGIN.tasks is not None
    return tuple(PLUGIN.tasks(split, OPTIONS))


def every() -> list[Task]:
    return [task for split in SPLITS for task in tasks(split)]


def world(task: Task) -> tuple[House, tuple[str, ...]]:
    return house_from_json(task.scenario or "")


def errand(task: Task) -> str:
    return task.messages[0].content.split("Errand: ")[1].split(".")[0]


def test_there_are_a_few_hundred_tasks_and_no_two_are_the_same() -> None:
    assert [len(tasks(split)) for split in SPLITS] == [256, 64, 64]
    assert len({task.scenario for task in every()}) == 384
    assert all(task.id.startswith(f"{task.split}_") for task in every())


def test_no_two_splits_share_a_house_with_an_errand() -> None:
    pairs = {
        split: {(world(task)[0].layout, errand(task)) for task in tasks(split)} for split in SPLITS
    }
    assert not pairs["train"] & pairs["val"]
    assert not pairs["train"] & pairs["test"]
    assert not pairs["val"] & pairs["test"]
    assert all(split_of(world(task)[0], errand(task)) == task.split for task in every())


def test_tasks_are_a_function_of_their_seed() -> None:
    few = make_tasks("val", 5, 0, True)
    assert few == tasks("val")[:5]
    make_tasks.cache_clear()
    assert make_tasks("val", 5, 0, True) == few
    other = make_tasks("val", 5, 1, True)
    assert not {task.scenario for task in other} & {task.scenario for task in tasks("val")}
    # Another split of the same seed draws from a stream of its own.
    assert {errand(t) for t in make_tasks("test", 5, 0, True)} != {errand(t) for t in few}


def test_every_kind_of_errand_occurs_equally_often() -> None:
    counts = Counter(len(world(task)[1]) for task in every())
    assert set(counts) == {1, 2, 3, 4}
    kinds = len(vocabulary().errands)
    texts = [errand(task) for task in tasks("train")[: 2 * kinds]]
    assert sum("clean" in text and "warm" in text for text in texts) == 2


def test_the_opening_explains_the_commands_unless_it_is_short() -> None:
    full, short = make_tasks("val", 1, 0, True)[0], make_tasks("val", 1, 0, False)[0]
    assert full.messages[0].content.endswith(short.messages[0].content)
    assert "go kitchen" in full.messages[0].content
    assert short.messages[0].content.startswith("Errand: ")
    assert full.scenario == short.scenario


def test_the_secret_is_where_a_thing_that_the_errand_takes_is_hidden() -> None:
    for task in every():
        house, goals = world(task)
        places = {hiding_place(house, item) for item in needed_items(house, goals)}
        assert task.secret in places
        assert task.secret not in task.messages[0].content


def test_nothing_is_done_at_first_and_doing_nothing_wins_nothing() -> None:
    for task in every():
        house, goals = world(task)
        assert not any(holds(house, first_state(house), goal) for goal in goals)
    env = Errand(tasks("train")[0], 4)
    outcomes = [env.apply(env.parse("look"), None) for _ in range(4)]
    assert outcomes[-1].done
    assert outcomes[-1].score == 0.0


def test_a_player_who_has_to_search_wins_every_task_through_the_environment() -> None:
    for task in every():
        env = Errand(task, SOLVABLE)
        walk, commands = run_errand(Explorer(), env.house, env.goals, SOLVABLE)
        assert walk.won, task.id
        outcomes = [env.apply(env.parse(str(command)), None) for command in commands]
        assert outcomes[-1].verdict is Verdict.WIN
        assert not any(outcome.diagnostics for outcome in outcomes)
        best = plan(env.house, first_state(env.house), env.goals, env.house.items)
        assert best is not None
        assert 3 <= len(best) <= len(commands) <= SOLVABLE


def wins(name: str, games: int) -> float:
    played = []
    for number, task in enumerate(tasks("train")[:games]):
        house, goals = world(task)
        player = PLAYERS[name](np.random.default_rng([7, number]))
        played.append(run_errand(player, house, goals, SOLVABLE)[0].won)
    return float(np.mean(played))


def test_a_random_player_wins_seldom_and_a_mediocre_one_now_and_then() -> None:
    assert wins("random", 256) < 0.05
    assert 0.2 < wins("mediocre", 256) < 0.6


def test_a_plan_uses_only_what_was_seen() -> None:
    task = next(t for t in tasks("train") if errand(t).startswith("put the clean"))
    house, goals = world(task)
    state = first_state(house)
    assert plan(house, state, goals, tuple(state.seen)) is None
    assert plan(house, state, goals, house.items)


@pytest.mark.parametrize("name", sorted(PLAYERS))
def test_players_only_use_doors_and_things_that_are_there(name: str) -> None:
    for number, task in enumerate(tasks("val")[:12]):
        house, goals = world(task)
        walk = Walk(house, goals, SOLVABLE)
        player = PLAYERS[name](np.random.default_rng(number))
        while not walk.done:
            command = player.next_command(walk)
            assert command is not None
            assert walk.take(command).blocked == ""


def test_a_searcher_does_not_know_what_it_has_not_seen() -> None:
    """Until a container is opened, its contents change nothing in what the explorer does."""
    for task in tasks("train")[:40]:
        house, goals = world(task)
        shut = [
            fixture
            for fixture in house.fixtures
            if vocabulary().kind_of[fixture] == "container" and fixture not in house.locked
        ]
        hidden = [number for number, place in enumerate(house.begin) if place in shut]
        if not hidden:
            continue
        begin = list(house.begin)
        begin[hidden[0]] = shut[-1]
        moved = replace(house, begin=tuple(begin))
        one, two = Walk(house, goals, SOLVABLE), Walk(moved, goals, SOLVABLE)
        first, second = Explorer(), Explorer()
        while not one.done and not two.done and one.state.seen == two.state.seen:
            a, b = first.next_command(one), second.next_command(two)
            assert a == b
            if a is None or b is None:
                break
            one.take(a)
            two.take(b)
