"""Games that are continued from the middle of others train through the whole loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.types import Trajectory
from tests.runs import (
    Killed,
    assert_same_state,
    games_of,
    metrics_of,
    play,
    state_of,
    words,
    write_world,
)

pytestmark = pytest.mark.slow
STEPS = 2
RULES = ("arpo", "tree_grpo", "at2po")
SECRETS, GAMES = 4, 4
MAZE = """
from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.envs.plugin import EnvPlugin
from delta_belief_rl.types import Message, Task, Verdict


class Maze:
    def __init__(self, task):
        self.task = task
        self.steps = []

    def parse(self, text):
        return Action(text, text, needs_judge=False)

    def judge_request(self, action):
        return JudgeRequest(self.task, action.text)

    def apply(self, action, reply):
        self.steps.append(action.text)
        last = len(self.steps) == 3
        won = last and len(self.steps[0]) % 2 == 0
        verdict = Verdict.WIN if won else Verdict.OTHER
        return Outcome(verdict, f"Room {len(self.steps)}.", last, won, won)


def tasks(split, options):
    opening = (Message("user", "Go."),)
    return [Task(f"{split}_{n}", "maze", "left", opening, split) for n in range(4)]


ENVIRONMENTS = {"maze": EnvPlugin(make=lambda options: Maze, tasks=tasks)}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


def command(out: Path, world: Path, method: str, *more: str) -> list[str]:
    """The method's own group, on the embedded world.

    Beliefs are paid, because three turns are too short to win, and equal games teach nothing.
    """
    return words(
        out,
        world,
        f"algorithm={method}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=-1",
        "trainer.final_test=false",
        "multi_turn.logprob_reward.enabled=true",
        *more,
    )


def trained(out: Path) -> list[dict[str, float]]:
    return [record for record in read_records(out / "metrics.jsonl") if record["step"] > 0]


def by_secret(out: Path, step: int) -> list[list[Trajectory]]:
    games = read_trajectories(out / "rollout" / f"{step}.jsonl").trajectories
    return [
        [game for game in games if game.task.id == name]
        for name in dict.fromkeys(game.task.id for game in games)
    ]


def check_prefixes(games: Sequence[Trajectory]) -> int:
    """Every branch has its parent's beginning, token by token; returns the number of branches."""
    known, branches = {game.game: game for game in games}, 0
    for game in games:
        if game.branch_of is None:
            continue
        branches += 1
        parent, turn = known[game.branch_of[0]], game.branch_of[1]
        assert game.turns[:turn] == parent.turns[:turn]
        end = parent.turns[turn].start
        assert game.token_ids[:end] == parent.token_ids[:end]
        assert game.beliefs is not None
        assert parent.beliefs is not None
        assert game.beliefs[: turn + 1] == pytest.approx(parent.beliefs[: turn + 1], abs=1e-4)
    return branches


@pytest.mark.parametrize("method", RULES)
def test_a_rule_trains_through_the_loop_by_its_own_group(
    method: str, tmp_path: Path, world: Path
) -> None:
    wanted, out = command(tmp_path / "run", world, method), tmp_path / "run"
    assert load_config(wanted)[0].algorithm.tree.rule == method
    assert play(wanted)[0] == 0
    records = trained(out)
    assert [record["step"] for record in records] == [1, STEPS]
    branches = 0
    for record in records:
        groups = by_secret(out, int(record["step"]))
        assert [len(games) for games in groups] == [GAMES] * SECRETS
        here = sum(check_prefixes(games) for games in groups)
        branches += here
        turns = sum(game.num_turns for games in groups for game in games)
        own = sum(game.num_turns - game.num_shared for games in groups for game in games)
        assert record["state_turns/total"] == turns
        assert record["state_turns/played"] == own <= turns
        assert record["train/branch_share"] == here / (SECRETS * GAMES)
        assert record["actor/grad_norm"] > 0
        assert record["critic/frac_dead_groups"] < 1
        # One call of the judge for each turn that was really played, where one was needed.
        assert record["judge/calls"] <= own
    assert branches > 0


def test_shared_turns_are_trained_once_behind_any_method(tmp_path: Path, world: Path) -> None:
    for method in ("arpo", "at2po"):
        out = tmp_path / method
        once = command(out, world, method, "algorithm.transforms=[shared_once]")
        assert play(once)[0] == 0
        for record in trained(out):
            # All turns are valid here, so what is shared is what is left out.
            assert record["critic/frac_shared_turns"] == pytest.approx(
                record["train/shared_turn_share"]
            )
            assert record["actor/grad_norm"] > 0


@pytest.mark.parametrize("method", ["at2po", "tree_grpo"])
def test_R2_R14_a_step_that_is_cut_off_after_its_games_ends_as_the_straight_one(
    method: str, tmp_path: Path, world: Path
) -> None:
    """With tree_grpo some games are played that are not trained on."""
    more = ["algorithm.tree.tree_grpo.expand=2"] if method == "tree_grpo" else []
    straight = command(tmp_path / "straight", world, method, *more)
    status, trace = play(straight)
    assert status == 0
    records = trained(tmp_path / "straight")
    if more:
        groups = [games for step in (1, 2) for games in by_secret(tmp_path / "straight", step)]
        assert [len(games) for games in groups] == [GAMES] * SECRETS * STEPS
        own = sum(game.num_turns - game.num_shared for games in groups for game in games)
        assert sum(record["state_turns/played"] for record in records) > own
    kept = [i for i, name in enumerate(trace.names) if name == "pending.keep done"]
    # After the games of the second step, and in the middle of them.
    for name, moment in (("after", kept[1]), ("amid", kept[1] - 6)):
        cut = command(tmp_path / name, world, method, *more)
        with pytest.raises(Killed):
            play(cut, moment)
        status, again = play(cut)
        assert status == 0
        assert again.names.count("ActorWorker.update") == 1
        assert ("pending.keep" in again.names) == (name == "amid")
        assert metrics_of(tmp_path / name) == metrics_of(tmp_path / "straight")
        assert games_of(tmp_path / name) == games_of(tmp_path / "straight")
        assert_same_state(state_of(tmp_path / name), state_of(tmp_path / "straight"))


def test_R14_games_that_were_kept_are_played_again_under_another_rule(
    tmp_path: Path, world: Path
) -> None:
    straight = command(tmp_path / "straight", world, "at2po", "algorithm.tree.at2po.rounds=1")
    assert play(straight)[0] == 0
    cut = command(tmp_path / "cut", world, "at2po")
    _, trace = play(command(tmp_path / "whole", world, "at2po"))
    with pytest.raises(Killed):
        play(cut, trace.names.index("pending.keep done"))
    assert play([*cut, "algorithm.tree.at2po.rounds=1"])[0] == 0
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "straight")


def test_an_environment_that_cannot_be_brought_back_is_refused_and_one_that_replays_is_not(
    tmp_path: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "maze.py", tmp_path / "run"
    path.write_text(dedent(MAZE), encoding="utf-8")
    own = [f"plugins=['{path}']", "multi_turn.env=maze", "data.world=null", "judge=rules"]
    own += ["multi_turn.logprob_reward.enabled=false"]
    assert play(command(out, world, "arpo", *own))[0] == 2
    said = capsys.readouterr().err
    assert "The environment Maze has neither snapshot and restore nor replayable" in said
    assert "Traceback" not in said
    assert not (out / "metrics.jsonl").exists()
    replays = MAZE.replace(
        "    def parse", "    def replayable(self):\n        return True\n\n    def parse"
    )
    path = tmp_path / "maze_that_replays.py"
    path.write_text(dedent(replays), encoding="utf-8")
    own[0] = f"plugins=['{path}']"
    assert play(command(out, world, "arpo", *own))[0] == 0
    for record in trained(out):
        assert record["train/branch_share"] > 0
        groups = by_secret(out, int(record["step"]))
        # The rooms are counted by the environment itself, so a branch stands in the right one.
        for game in (game for games in groups for game in games):
            assert [turn.reply for turn in game.turns] == ["Room 1.", "Room 2.", "Room 3."]
