"""Games of an evaluation: each is on the disk as it ends, and is not played a second time."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import training_fakes as fakes
from rollout_fakes import CharChat, ScriptedEnv, ScriptedJudge, make_task

from delta_belief_rl.algo.shapers.channels import WinRule, is_void
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.engines.base import SamplingParams
from delta_belief_rl.engines.fake_engine import FakeEngine
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.obs.disk import DiskRefused
from delta_belief_rl.rollout.driver import RolloutDriver
from delta_belief_rl.rollout.game import GameSettings
from delta_belief_rl.trainer import kept
from delta_belief_rl.trainer.kept import KeptGames, Key
from delta_belief_rl.trainer.pending import Counts
from delta_belief_rl.trainer.validation import evaluate_kept
from delta_belief_rl.types import Group, StopReason, Trajectory, Verdict

KEY = Key("run", 0, "adapter", "settings", "tasks", "policy")
COUNTS = (Counter({"calls": 7, "cached": 2}), Counter({"late": 1}))


def of_run(groups: list[Group]) -> list[Group]:
    """The groups with the names that games of a run have."""
    return [
        Group(g.task, tuple(replace(t, task=g.task, run_id="run") for t in g.trajectories))
        for g in groups
    ]


GROUPS = of_run(fakes.make_groups(((3, 1), (9, 1), (2, 4))))
TASKS = [group.task for group in GROUPS]
GAMES = [game for group in GROUPS for game in group.trajectories]


def opened(folder: Path, key: Key = KEY, told: list[str] | None = None) -> KeptGames:
    say = (lambda _text: None) if told is None else told.append
    return KeptGames.open(folder / "evaluation_0.jsonl", key, 20, WinRule.STRICT, say)


def filled(folder: Path, games: list[Trajectory] = GAMES) -> Path:
    file = opened(folder)
    for number, game in enumerate(games, 1):
        file.append([game], COUNTS, float(number))
    return file.path


def test_what_was_kept_is_there_again_with_its_counts_and_its_time(tmp_path: Path) -> None:
    filled(tmp_path)
    told: list[str] = []
    again = opened(tmp_path, told=told)
    assert list(again.games.values()) == GAMES
    assert (again.counts, again.seconds) == (COUNTS, float(len(GAMES)))
    assert kept.whole(again, TASKS, 2) == GROUPS
    assert kept.whole(again, TASKS, 3) is None
    assert told == []


def test_R5_a_kill_at_any_byte_costs_the_game_that_was_being_written_and_no_other(
    tmp_path: Path,
) -> None:
    data = filled(tmp_path).read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in [*range(0, len(data), 97), *ends, *(end - 1 for end in ends)]:
        path = tmp_path / "evaluation_0.jsonl"
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends) - 1
        again = opened(tmp_path)
        assert list(again.games.values()) == GAMES[: max(whole, 0)], cut
        # What follows stands behind what is whole.
        again.append([GAMES[-1]], COUNTS, 9.0)
        assert list(opened(tmp_path).games.values())[-1] == GAMES[-1]


def failed(game: Trajectory) -> Trajectory:
    """The game without its outcome."""
    last = replace(game.turns[-1], verdict=Verdict.ERROR, strict_win=False, compatible_win=False)
    return replace(game, turns=(*game.turns[:-1], last), stop=StopReason.JUDGE_FAILED)


@pytest.mark.parametrize("part", [1, 3])
def test_J3_games_without_an_outcome_are_played_again_and_their_calls_are_counted(
    tmp_path: Path, part: int
) -> None:
    """A part with such a game is not kept at all: its games are played together or not."""
    file = opened(tmp_path)
    file.append(GAMES[:1], (Counter({"calls": 1}), Counter()), 1.0)
    games = [*GAMES[1:part], failed(GAMES[part])]
    file.append(games, COUNTS, 2.0)
    for one in (file, opened(tmp_path)):
        assert list(one.games.values()) == GAMES[:1]
    again = opened(tmp_path)
    assert (again.counts, again.seconds) == (COUNTS, 2.0)
    assert kept.whole(again, TASKS, 2) is None
    again.append(GAMES[1:], COUNTS, 3.0)
    assert kept.whole(opened(tmp_path), TASKS, 2) == GROUPS


@pytest.mark.parametrize("line", [1, 3])
def test_R6_a_damaged_game_and_all_behind_it_are_played_again(tmp_path: Path, line: int) -> None:
    path = filled(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    place = lines[line].index(b"token_ids") + 14
    torn = lines[line][:place] + b"7" + lines[line][place + 1 :]
    assert torn != lines[line]
    path.write_bytes(b"".join([*lines[:line], torn, *lines[line + 1 :]]))
    assert list(opened(tmp_path).games.values()) == GAMES[: line - 1]


@pytest.mark.parametrize("name", ["run_id", "step", "adapter", "settings", "tasks", "policy"])
def test_R9_games_of_something_else_are_removed_and_said(tmp_path: Path, name: str) -> None:
    filled(tmp_path)
    told: list[str] = []
    other = replace(KEY, **{name: 5 if name == "step" else "other"})
    assert opened(tmp_path, other, told).games == {}
    assert len(told) == 1
    assert f"{name} differ" in told[0]
    assert opened(tmp_path).games == {}


def test_a_disk_that_is_full_is_one_sentence(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.path = tmp_path / ("x" * 300)
    with pytest.raises(DiskRefused, match="The games of the evaluation could not be written"):
        file.append(GAMES[:1], COUNTS, 1.0)


def test_parts_are_whole_secrets_and_depend_on_their_number_alone() -> None:
    tasks = [make_task(f"t{i}") for i in range(7)]
    per = kept.PART_GAMES // 3
    for games, size in ((kept.PART_GAMES, 1), (per, 3), (2 * kept.PART_GAMES, 1), (1, 7)):
        found = list(kept.parts(tasks, games, fixed=True))
        assert [task for part in found for task in part] == tasks
        assert {len(part) for part in found[:-1]} <= {size}
    assert list(kept.parts(tasks, 3, fixed=False)) == [tasks]


def test_what_a_game_depends_on_is_in_the_key_and_what_it_does_not_is_not() -> None:
    def key(*more: str) -> Key:
        cfg, _ = load_config(["experiment=eval_everyday", *more])
        return Key.of(cfg, "run", 0, "adapter", TASKS)

    plain = key()
    for same in ("actor_rollout_ref.num_threads=1", "trainer.logger=[]", "ray_init.num_cpus=3"):
        assert key(same) == plain, same
    val = "actor_rollout_ref.rollout.val_kwargs"
    for other in (
        f"{val}.temperature=1.0",
        "multi_turn.max_turns.val=21",
        "seed=7",
        "actor_rollout_ref.rollout.deterministic=false",
        "judge_rollout.cot=true",
    ):
        assert key(other).settings != plain.settings, other
    assert key("actor_rollout_ref.model.path=org/none").policy != plain.policy
    cfg, _ = load_config(["experiment=eval_everyday"])
    assert Key.of(cfg, "run", 0, "adapter", TASKS[1:]).tasks != plain.tasks


# --- the driver ---------------------------------------------------------------------------------


def play(known: dict[tuple[str, int], Trajectory]) -> tuple[list[Group], list[Trajectory], int]:
    """Four secrets with two games each; all groups, the games that were told, the sessions."""
    chat = CharChat()
    engine = FakeEngine(lambda request: f"ask {request.session}", chat.encode)
    settings = GameSettings(max_turns=2, max_turn_tokens=40, max_episode_tokens=400)
    driver = RolloutDriver(
        engine, ScriptedJudge(), chat, ScriptedEnv, settings, max_games=3, run_seed=7, run_id="run"
    )
    told: list[Trajectory] = []
    tasks = [make_task(f"t{i}") for i in range(4)]
    sampling = SamplingParams(temperature=1.0)
    groups = asyncio.run(
        driver.collect(tasks, 2, 0, sampling, phase="val", known=known, on_game=told.append)
    )
    return groups, told, driver.played


def test_games_that_are_known_are_not_played_and_stand_in_their_places() -> None:
    straight, told, played = play({})
    games = {(t.task.id, t.game): t for group in straight for t in group.trajectories}
    assert played == 8
    assert {(t.task.id, t.game) for t in told} == games.keys()
    marked = {key: replace(games[key], run_id="before") for key in (("t0", 1), ("t2", 0))}
    groups, told, played = play(marked)
    assert played == 6
    assert marked.keys().isdisjoint((t.task.id, t.game) for t in told)
    found = [t for group in groups for t in group.trajectories]
    assert [(t.task.id, t.game) for t in found] == list(games)
    assert {(t.task.id, t.game): t for t in found if t.run_id == "before"} == marked
    assert [t.token_ids for t in found] == [t.token_ids for t in games.values()]
    assert play(games)[2] == 0


class CountingPool:
    """What an evaluation asks of the judge pool: one count of all calls, over all starts."""

    def __init__(self, judge: ScriptedJudge) -> None:
        self._judge = judge
        self._before = 0

    def mark(self) -> Counts:
        return Counter(calls=self._before + len(self._judge.requests)), Counter()

    def rewind(self, counts: Counts) -> None:
        self._before = counts[0]["calls"]


@pytest.mark.parametrize("fixed", [False, True])
def test_J3_a_start_plays_the_games_whose_judge_had_failed(tmp_path: Path, *, fixed: bool) -> None:
    words = [f"trainer.output_dir={tmp_path}", "multi_turn.max_turns.val=2"]
    words.append(f"actor_rollout_ref.rollout.deterministic={str(fixed).lower()}")
    cfg, _ = load_config(["experiment=eval_everyday", *words])
    tasks = [make_task(f"t{i}") for i in range(3)]

    async def sync(_policy: object) -> None:
        return

    def start(broken: str) -> tuple[list[Group], int, int]:
        """The groups, the games that were played, and the calls over all starts."""

        def reply(request: JudgeRequest) -> JudgeReply:
            failed = request.task.id == broken
            return JudgeReply(Verdict.ERROR if failed else Verdict.NO, "no")

        chat, judge = CharChat(), ScriptedJudge(reply)
        engine = FakeEngine(lambda request: f"ask {request.session}", chat.encode)
        settings = GameSettings(max_turns=2, max_turn_tokens=40, max_episode_tokens=400)
        driver = RolloutDriver(
            engine, judge, chat, ScriptedEnv, settings, max_games=3, run_seed=7, run_id="run"
        )
        pool = CountingPool(judge)
        run: Any = SimpleNamespace(
            cfg=cfg,
            run_id="run",
            state=SimpleNamespace(step=0),
            policy=None,
            engines=SimpleNamespace(sync=sync, adapter="adapter"),
            progress=SimpleNamespace(say=lambda _text: None),
            judge=pool,
            timers=SimpleNamespace(add=lambda _name, _seconds: None),
            val_rollouts=driver,
        )
        groups = asyncio.run(evaluate_kept(run, tasks, kept.PART_GAMES, "val"))
        return groups, driver.played, pool.mark()[0]["calls"]

    _, played, calls = start("t1")
    assert played == 3 * kept.PART_GAMES
    groups, again, total = start("none")
    assert again == kept.PART_GAMES
    assert total == calls + 2 * again
    assert not any(is_void(g, WinRule.STRICT) for group in groups for g in group.trajectories)
    assert start("none")[1:] == (0, total)
