"""What an environment of a plug-in brings beside its games: a report, and rewards of tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from webcoder_fakes import PAGE, THREE, block, played

from delta_belief_rl.algo.shapers.channels import ChannelShaper, build_table
from delta_belief_rl.algo.shapers.requirements_met import TaskShaper
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.clinical.report import report_of
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.envs.webcoder.game import WebCoder
from delta_belief_rl.trainer.own_environment import environment_metrics, task_rewards
from delta_belief_rl.trainer.own_failures import PluginFailed
from delta_belief_rl.trainer.settings_rewards import reward_shaper
from delta_belief_rl.types import Group, StopReason, Trajectory, UserError, Verdict

WEIGHT = "multi_turn.reward.weight_tasks"
MODULE = """
from delta_belief_rl.envs.plugin import EnvPlugin

def report(games, options):
    return {report}

def rewards(game, options):
    return {rewards}

ENVIRONMENTS = {{"maze": EnvPlugin(lambda o: None, report=report, task_rewards=rewards)}}
"""
FINE = {"report": "{'east/games': len(games)}", "rewards": "[0.0] * game.num_turns"}


def written(folder: Path, **changes: str) -> Path:
    path = folder / "maze.py"
    path.write_text(MODULE.format(**{**FINE, **changes}))
    return path


def config(*words: str, env: str = "webcoder") -> RunConfig:
    chosen = ["experiment=smollm2_cpu", f"env={env}", "judge=rules"]
    return load_config([*chosen, "multi_turn.max_turns={train: 8, val: 6}", *words])[0]


def maze(path: Path, *words: str) -> RunConfig:
    own = [f"plugins=[{path}]", "multi_turn.env=maze", "multi_turn.env_kwargs={}"]
    return load_config(["experiment=starpo_quickstart", "judge=rules", *own, *words])[0]


def game(**changes: object) -> Trajectory:
    """Two of three tasks are over after three messages, of which the first ends none."""
    texts = (block("index.html", PAGE), "done", "delete index.html\ndone")
    return replace(played(WebCoder(THREE, 8), *texts), **changes)  # type: ignore[arg-type]


# --- reports --------------------------------------------------------------------------------------


def test_the_report_of_webcoder_is_by_kind_of_task() -> None:
    found = environment_metrics(config(), [game()])
    assert {name.split("/")[2] for name in found} == {"reproduce", "generate"}
    assert found["val-aux/webcoder/reproduce/reward"] == 0.75
    assert found["val-aux/webcoder/generate/reward"] == 0.0
    assert found["val-aux/webcoder/generate/tasks"] == 1.0
    assert found["val-aux/webcoder/reproduce/failed_builds"] == 0.0


def test_the_report_of_clinical_cases_is_by_stratum_and_leaves_out_what_is_unknown() -> None:
    ended = replace(game(), task=replace(THREE, source="clinical_high"), stop=StopReason.TURN_LIMIT)
    found = environment_metrics(config(env="clinical"), [ended])
    assert found["val-aux/clinical/high/games"] == found["val-aux/clinical/all/games"] == 1.0
    assert found["val-aux/clinical/high/questions"] == 3.0
    assert found["val-aux/clinical/high/committed"] == 0.0
    # No case was decided, so no share of the decisions is known.
    assert not any(name.endswith(("/premature", "/harm")) for name in found)
    named = report_of([ended], EnvOptions(6))
    assert {"high/premature", "all/harm"} < {*named}


def test_an_environment_without_a_report_has_no_such_metric() -> None:
    assert environment_metrics(config(env="errands"), [game()]) == {}
    assert environment_metrics(load_config(["experiment=quickstart"])[0], [game()]) == {}


def test_a_report_of_a_users_own_reaches_the_metrics(tmp_path: Path) -> None:
    found = environment_metrics(maze(written(tmp_path)), [game(), game()])
    assert found == {"val-aux/maze/east/games": 2.0}


@pytest.mark.parametrize(
    ("body", "said"), [("1 / 0", "ZeroDivisionError"), ("{'a': 'b'}", "ValueError"), ("3", "Attri")]
)
def test_a_report_that_fails_is_told_as_the_plug_ins_own(
    body: str, said: str, tmp_path: Path
) -> None:
    path = written(tmp_path, report=body)
    begin = f"The environment maze of the plug-in {path} failed in report with {said}"
    with pytest.raises(PluginFailed) as caught:
        environment_metrics(maze(path), [])
    assert str(caught.value).startswith(begin)


def test_a_report_whose_names_an_evaluation_would_not_show_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, report="{'solved@8': 1.0}")
    with pytest.raises(PluginFailed, match=r"the plug-in .*maze\.py reports 'solved@8': '@' in a"):
        environment_metrics(maze(path), [])


# --- rewards of tasks -----------------------------------------------------------------------------


def test_tasks_are_paid_on_the_turns_that_end_them() -> None:
    shaper = reward_shaper(config(f"{WEIGHT}=2", "multi_turn.reward.signals.win=0"))
    assert isinstance(shaper, TaskShaper)
    games = (game(), game(game=1, stop=StopReason.ENGINE_FAILED), game(game=2))
    failed = replace(games[2].turns[1], verdict=Verdict.ERROR)
    games = (*games[:2], replace(games[2], turns=(games[2].turns[0], failed, games[2].turns[2])))
    groups = [Group(THREE, games)]
    table = build_table(groups)
    paid = shaper.shape(table, groups)
    # A game without an outcome is paid nothing, and nor is a turn whose judge failed.
    assert paid["task"].tolist() == [0.0, 1.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    others = ChannelShaper(shaper.others.settings).shape(table, groups)  # type: ignore[attr-defined]
    assert {*paid} - {*others} == {"task"}
    for name, channel in others.items():
        np.testing.assert_array_equal(paid[name], channel)


def test_a_game_is_replayed_with_the_turn_limit_of_its_split() -> None:
    rewards_of = task_rewards(config(f"{WEIGHT}=1", "multi_turn.max_turns={train: 3, val: 4}"))
    assert rewards_of is not None
    texts = (block("index.html", PAGE), "hm", "hm")
    training = played(WebCoder(THREE, 3), *texts)
    # The third message is the last one of a training game, and ends its task.
    assert np.isfinite(rewards_of(training)).tolist() == [False, True, True]
    validation = replace(training, task=replace(THREE, split="val"))
    assert np.isfinite(rewards_of(validation)).tolist() == [False, True, False]


def test_without_a_weight_the_channels_are_what_they_were() -> None:
    assert task_rewards(config()) is None
    assert isinstance(reward_shaper(config()), ChannelShaper)


@pytest.mark.parametrize("env", ["errands", "clinical"])
def test_what_an_environment_does_not_give_cannot_be_paid(env: str) -> None:
    sentence = f"{WEIGHT} pays the rewards of single tasks, which the environment {env} does not"
    with pytest.raises(UserError, match=sentence):
        reward_shaper(config(f"{WEIGHT}=1", env=env))


def test_a_weight_out_of_range_is_named() -> None:
    with pytest.raises(UserError, match=r"multi_turn\.reward\.weight_tasks is -1.0; it must be"):
        reward_shaper(config(f"{WEIGHT}=-1"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[0.0]", "returned (1,) numbers from task_rewards for a game of 3 turns."),
        ("{}['x']", "failed in task_rewards with KeyError: 'x' (maze.py, line "),
    ],
)
def test_rewards_that_fail_are_told_as_the_plug_ins_own(
    body: str, said: str, tmp_path: Path
) -> None:
    path = written(tmp_path, rewards=body)
    rewards_of = task_rewards(maze(path, f"{WEIGHT}=1"))
    assert rewards_of is not None
    with pytest.raises(PluginFailed) as caught:
        rewards_of(game())
    assert f"The environment maze of the plug-in {path} {said}" in str(caught.value)
