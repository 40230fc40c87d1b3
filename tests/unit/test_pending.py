"""Games of the step in progress: taken again when they are the same games, else removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import training_fakes as fakes

from delta_belief_rl.obs.disk import DiskRefused
from delta_belief_rl.trainer import checkpoint, pending
from delta_belief_rl.trainer.pending import Key
from delta_belief_rl.types import Group

KEY = Key("run", 6, 5, "adapter", "settings")
COUNTS = (Counter({"calls": 7, "cached": 2}), Counter({"late": 1}))


def of_run(groups: list[Group]) -> list[Group]:
    return [
        Group(g.task, tuple(replace(t, task=g.task, run_id="run") for t in g.trajectories))
        for g in groups
    ]


GROUPS = of_run(fakes.make_groups(((3, 1, 2), (9, 1))))
TASKS = [group.task for group in GROUPS]


def keep(root: Path, key: Key = KEY) -> None:
    pending.keep(root, key, GROUPS, COUNTS, 20)


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def test_what_was_kept_is_what_is_taken_again_and_again(tmp_path: Path) -> None:
    keep(tmp_path)
    told: list[str] = []
    for _ in range(2):
        assert pending.take(tmp_path, KEY, TASKS, told.append) == (GROUPS, COUNTS)
    assert told == []


@pytest.mark.parametrize("field", ["run_id", "adapter", "settings"])
def test_R9_games_of_another_run_adapter_or_setting_are_removed_and_said(
    tmp_path: Path, field: str
) -> None:
    keep(tmp_path)
    told: list[str] = []
    other = replace(KEY, **{field: "other"})
    assert pending.take(tmp_path, other, TASKS, told.append) is None
    assert names(tmp_path) == []
    assert len(told) == 1
    assert f"{field} differ" in told[0]


@pytest.mark.parametrize("damage", ["games", "about", "secrets", "shorter", "alone"])
def test_R6_damaged_games_are_played_again(tmp_path: Path, damage: str) -> None:
    keep(tmp_path)
    games, about, tasks = tmp_path / "pending_6_5.jsonl", tmp_path / "pending_6_5.json", TASKS
    if damage == "games":
        games.write_bytes(games.read_bytes().replace(b"1", b"2", 1))
    elif damage == "about":
        about.write_bytes(about.read_bytes()[:-9])
    elif damage == "secrets":
        tasks = [replace(TASKS[0], secret="elsewhere"), *TASKS[1:]]
    elif damage == "shorter":
        tasks = TASKS[:1]
    else:
        about.unlink()
    told: list[str] = []
    assert pending.take(tmp_path, KEY, tasks, told.append) is None
    assert names(tmp_path) == []
    assert len(told) == 1


def test_games_of_steps_before_wait_for_their_checkpoint_and_later_ones_go(tmp_path: Path) -> None:
    for step, cursor in ((5, 4), (6, 5), (6, 6), (6, 7), (9, 8)):
        keep(tmp_path, replace(KEY, step=step, cursor=cursor))
    (tmp_path / ".pending_6_6.jsonl.77.tmp").touch()  # of a start that was killed
    told: list[str] = []
    # Batch 6 is of another adapter: with it go all that were played after it.
    again = replace(KEY, cursor=6, adapter="other")
    assert pending.take(tmp_path, again, TASKS, told.append) is None
    left = [f"pending_{which}.{kind}" for which in ("5_4", "6_5") for kind in ("json", "jsonl")]
    assert names(tmp_path) == left
    pending.remove_until(tmp_path, 5)
    assert names(tmp_path) == left[2:]


def test_R5_a_kill_at_any_write_leaves_whole_games_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def cut_at(limit: int) -> bool:
        """Keep games, cut off at the n-th write; whether it got through."""
        calls = 0

        def counted(name: str) -> Callable[..., object]:
            real = getattr(checkpoint.os, name)

            def call(*args: object, **more: object) -> object:
                nonlocal calls
                calls += 1
                if calls == limit:
                    raise Killed
                return real(*args, **more)

            return call

        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "open"):
                patch.setattr(checkpoint.os, name, counted(name))
            try:
                keep(tmp_path)
            except Killed:
                return False
        return True

    outcomes: list[bool] = []
    for limit in range(1, 40):
        whole = cut_at(limit)
        found = pending.take(tmp_path, KEY, TASKS, lambda _text: None)
        assert found in (None, (GROUPS, COUNTS))
        outcomes.append(found is not None)
        assert whole <= outcomes[-1]
        pending.remove_until(tmp_path, 6)
        if whole:
            break
    assert whole
    assert outcomes == sorted(outcomes)
    assert not outcomes[0]


def test_a_disk_that_is_full_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DiskRefused, match=r"The games of step 6 could not be written"):
        keep(tmp_path / ("x" * 300))
