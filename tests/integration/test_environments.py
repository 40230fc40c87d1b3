"""Every environment trains, validates and resumes through the same loop, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.rules import ENVIRONMENTS
from delta_belief_rl.envs.packaged import TASKS
from delta_belief_rl.envs.parquet import SOURCES, read_parquet
from delta_belief_rl.judge.packaged import RULE_JUDGES
from delta_belief_rl.judge.scripts import SCRIPTS
from delta_belief_rl.trainer.environments import FACTORIES
from delta_belief_rl.types import StopReason, Verdict
from tests.tiny_runs import command, played, text_tokenizer, write_policy

OTHERS = sorted({*ENVIRONMENTS} - {"twenty_questions"})


def test_every_environment_has_a_factory_a_judge_and_tasks() -> None:
    assert set(ENVIRONMENTS) == set(FACTORIES) == set(SCRIPTS) == set(SOURCES.values())
    assert set(OTHERS) == set(TASKS) == set(RULE_JUDGES)


@pytest.mark.parametrize("env", OTHERS)
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_packaged_files_hold_the_tasks_of_the_data(env: str, split: str) -> None:
    assert read_parquet(f"package:{env}/{split}", system_key=None) == TASKS[env](split)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy with tokens of the environments' words."""
    texts = [message.content for env in OTHERS for message in TASKS[env]("val")[0].messages]
    return write_policy(tmp_path_factory.mktemp("model"), text_tokenizer(texts))


def asked(env: str, out: Path, model: Path) -> list[str]:
    """A run of two steps, each with two games of four tasks."""
    group = env if env == "user_personalization" else f"{env}_packaged"
    counts = "data.sample_count={train: 8, val: 3}"
    return command(out, model, group, counts, "multi_turn.win_rule=compatible")


@pytest.mark.slow
@pytest.mark.parametrize("env", OTHERS)
def test_an_environment_trains_and_validates_through_the_loop(
    env: str, tmp_path: Path, model: Path
) -> None:
    run = played(tmp_path / "run", asked(env, tmp_path / "run", model))
    assert all(record["judge/error_rate"] == 0.0 for record in run.trained)
    assert all(record["actor/grad_norm"] > 0 for record in run.trained)
    assert len(run.games) == 8
    assert {game.task.source for game in run.games} == {env}
    assert all(len(game.beliefs or ()) == game.num_turns + 1 for game in run.games)
    assert {game.stop for game in run.games} <= {
        StopReason.WIN, StopReason.ENDED, StopReason.TURN_LIMIT, StopReason.CONTEXT_FULL
    }  # fmt: skip
    assert len(run.validated) == 3 * 2


@pytest.mark.parametrize("env", OTHERS)
def test_the_configured_environment_plays_a_packaged_task(env: str, tmp_path: Path) -> None:
    cfg, _ = load_config(asked(env, tmp_path, tmp_path))
    game = FACTORIES[env](cfg, 3)(TASKS[env]("val")[0])
    action = game.parse("Please tell me more about it.")
    (reply,) = (
        RULE_JUDGES[env]().answer([game.judge_request(action)]) if action.needs_judge else (None,)
    )
    outcome = game.apply(action, reply)
    assert outcome.verdict is not Verdict.ERROR
    assert outcome.reply
