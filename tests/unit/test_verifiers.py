"""The adapter for environments of verifiers, as far as it works without that library."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.envs.verifiers import ENVIRONMENTS, library
from delta_belief_rl.envs.verifiers.loops import attempt, loop_thread
from delta_belief_rl.envs.verifiers.rows import split_rows
from delta_belief_rl.envs.verifiers.settings import read_settings
from delta_belief_rl.types import UserError


def options(**kwargs: Any) -> EnvOptions:
    return EnvOptions(max_turns=6, kwargs={"environment": "wordle", **kwargs})


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"environment": ""}, "environment is missing"),
        ({"environment": None}, "environment is missing"),
        ({"environment": 3}, "environment is 3: it must be text"),
        ({"enviroment": "wordle"}, "did you mean environment"),
        ({"timeout": 3}, "did you mean timeout_s"),
        ({"args": ["a"]}, "args is ['a']: it must be a mapping"),
        ({"tasks": 5}, "tasks is 5: it must be a mapping"),
        ({"tasks": {"validation": 5}}, "numbers of rows by split: train, val, test"),
        ({"tasks": {"val": -1}}, "tasks.val is -1"),
        ({"tasks": {"val": True}}, "tasks.val is True"),
        ({"tasks": {"val": 1.5}}, "tasks.val is 1.5"),
        ({"secret": 1}, "secret is 1: it must be text"),
        ({"timeout_s": 0}, "timeout_s is 0.0: it must be above 0"),
        ({"timeout_s": "60"}, "timeout_s is '60': it must be a finite number"),
        ({"win_at": float("nan")}, "win_at is nan"),
        ({"win_at": True}, "win_at is True"),
        ({"win_metric": 1}, "win_metric is 1"),
        ({"score_range": 2}, "score_range is 2: it must be two numbers"),
        ({"score_range": [0]}, "score_range is [0]: it must be two numbers"),
        ({"score_range": [1, 0]}, "the lower one first"),
        ({"score_range": [0, "1"]}, "score_range is '1'"),
    ],
)
def test_U2_bad_options_are_one_sentence(kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=r"multi_turn\.env_kwargs") as caught:
        read_settings(options(**kwargs))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_without_values_have_their_defaults() -> None:
    settings = read_settings(options(args=None, tasks=None, secret=None, score_range=None))
    assert (settings.args, settings.tasks, settings.score_range) == ({}, {}, None)
    assert settings.secret == ""
    assert read_settings(options()).secret == "answer"
    assert read_settings(options(score_range=[-1, 2])).score_range == (-1.0, 2.0)
    with pytest.raises(UserError, match="at least one turn"):
        read_settings(EnvOptions(max_turns=0, kwargs={"environment": "wordle"}))


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        return None

    monkeypatch.setattr(library, "find_spec", nothing)
    with pytest.raises(UserError, match=r"pip install 'delta-belief-rl\[verifiers\]'"):
        ENVIRONMENTS["verifiers"].make(options(environment="never_loaded"))


@pytest.mark.parametrize("release", ["0.1.14", "0.1.14.post1", "0.2.0", "0.2.1.dev3"])
def test_releases_that_are_played(release: str) -> None:
    library.check_release(release)


@pytest.mark.parametrize("release", ["0.1.12", "0.1.9.post3", "0.3.0", "0.4.0", "1.0", "unknown"])
def test_other_releases_are_one_sentence(release: str) -> None:
    with pytest.raises(UserError, match=rf"^verifiers {release} is installed, .* pip install"):
        library.check_release(release)


class Rows:
    """A source with so many rows."""

    name = "wordle"

    def __init__(self, train: int, held_out: int) -> None:
        self.sizes = {"train": train, "eval": held_out}

    def rows(self, dataset: str) -> Sequence[Mapping[str, Any]]:
        return [{}] * self.sizes[dataset]


@pytest.mark.parametrize(
    ("sizes", "tasks", "expected"),
    [
        ((100, 20), {}, ("train 0-100", "eval 0-20", "eval 20-20")),
        ((100, 20), {"test": 5}, ("train 0-100", "eval 0-15", "eval 15-20")),
        ((100, 20), {"train": 3, "val": 4, "test": 5}, ("train 0-3", "eval 0-4", "eval 4-9")),
        ((0, 20), {}, ("train 0-0", "eval 0-20", "eval 20-20")),
        ((100, 0), {}, ("train 0-90", "train 90-100", "train 100-100")),
        ((5, 0), {}, ("train 0-4", "train 4-5", "train 5-5")),
        ((100, 0), {"test": 10}, ("train 0-80", "train 80-90", "train 90-100")),
        ((100, 0), {"train": 3, "val": 4, "test": 5}, ("train 0-3", "train 3-7", "train 7-12")),
        ((100, 0), {"val": 0}, ("train 0-100", "train 100-100", "train 100-100")),
    ],
)
def test_splits_share_no_row(
    sizes: tuple[int, int], tasks: dict[str, int], expected: tuple[str, str, str]
) -> None:
    settings = read_settings(options(tasks=tasks))
    found = [split_rows(split, Rows(*sizes), settings) for split in ("train", "val", "test")]  # type: ignore[arg-type]
    assert tuple(f"{name} {at.start}-{at.stop}" for name, at in found) == expected
    taken = [(name, row) for name, at in found for row in at]
    assert len(taken) == len(set(taken))


@pytest.mark.parametrize(
    ("sizes", "tasks"),
    [
        ((10, 0), {"train": 8, "val": 3}),
        ((10, 0), {"test": 11}),
        ((10, 4), {"train": 11}),
        ((10, 4), {"test": 5}),
    ],
)
def test_too_few_rows_are_one_sentence(sizes: tuple[int, int], tasks: dict[str, int]) -> None:
    settings = read_settings(options(tasks=tasks))
    with pytest.raises(UserError, match=r"needs \d+ rows of the (train|eval) dataset of wordle"):
        split_rows("train", Rows(*sizes), settings)  # type: ignore[arg-type]


async def _answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_a_coroutine_runs_beside_the_loop_that_waits_for_it() -> None:
    async def play() -> int:
        return loop_thread().call(_answer(3), 60.0)

    assert asyncio.run(play()) == 3
    assert loop_thread() is loop_thread()


def test_a_blocked_loop_is_given_up_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta_belief_rl.envs.verifiers.loops.GRACE_SECONDS", 0.1)
    blocked, free = loop_thread(), threading.Event()

    async def block() -> None:
        free.wait()

    try:
        with pytest.raises(TimeoutError):
            blocked.call(block(), 0.1)
        assert loop_thread() is not blocked
        assert loop_thread().call(_answer(4), 60.0) == 4
    finally:
        free.set()


def test_whatever_foreign_code_raises_is_a_value() -> None:
    def leave() -> int:
        raise SystemExit(3)

    made, error = attempt(leave)
    assert made is None
    assert isinstance(error, SystemExit)
    assert attempt(lambda: 7) == (7, None)
