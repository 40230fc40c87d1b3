"""Projects of the environment webcoder train and validate through the loop, on a CPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.envs.webcoder.game import WebCoder
from delta_belief_rl.envs.webcoder.report import by_kind, task_rewards
from delta_belief_rl.envs.webcoder.settings import WebCoderSettings
from delta_belief_rl.envs.webcoder.tasks import blueprint_from_json, make_tasks
from delta_belief_rl.trainer.environments import env_factory
from delta_belief_rl.trainer.tasks import load_tasks
from delta_belief_rl.types import StopReason, Verdict
from tests import tiny_runs
from tests.runs import play
from tests.tiny_runs import played, text_tokenizer, write_policy

TURNS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [task.messages[0].content for task in make_tasks("val", 6, 0)]
    return write_policy(tmp_path_factory.mktemp("model"), text_tokenizer(texts))


def command(out: Path, model: Path, *more: str) -> list[str]:
    """Projects of four tasks, a message each."""
    own = [
        "multi_turn.env_kwargs.tasks={train: 8, val: 3, test: 0}",
        "multi_turn.env_kwargs.turns_per_task=1",
        "multi_turn.env_kwargs.prompt=short",
        f"multi_turn.max_turns={{train: {TURNS}, val: {TURNS}}}",
    ]
    return tiny_runs.command(out, model, "webcoder", *own, *more)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gigpo", "delta_belief"])
def test_projects_train_and_validate_through_the_loop(
    algorithm: str, tmp_path: Path, model: Path
) -> None:
    out = tmp_path / "run"
    run = played(out, command(out, model, f"algorithm={algorithm}"))
    games = run.games
    assert len(games) == 8
    assert {game.task.source for game in games} == {"webcoder"}
    assert {game.stop for game in games} <= {StopReason.TURN_LIMIT, StopReason.ENDED}
    turns = [turn for game in games for turn in game.turns]
    assert Verdict.INVALID in {turn.verdict for turn in turns}
    assert all(turn.state_key and turn.action_key for turn in turns)
    if algorithm == "gigpo":
        # What is not understood changes nothing, so that states are met again.
        assert all(record["critic/mean_state_group_size"] > 1.0 for record in run.trained)
    else:
        # A random policy writes nothing that is understood; its beliefs differ all the same.
        assert all(record["actor/grad_norm"] > 0 for record in run.trained)
        assert all(len(game.beliefs or ()) == game.num_turns + 1 for game in games)
    # A project comes back from the file as it was, and its game can be played again.
    settings = WebCoderSettings(turns_per_task=1)
    for game in games:
        assert blueprint_from_json(game.task.scenario or "").jobs
        assert len(task_rewards(game, settings, TURNS)) == game.num_turns == TURNS
        assert game.score is not None
    assert by_kind(games, settings, TURNS)["reproduce"].tasks == 8
    assert len(run.validated) == 3 * 2


@pytest.mark.slow
def test_each_task_is_paid_where_it_ends_and_a_validation_tells_of_all_kinds(
    tmp_path: Path, model: Path
) -> None:
    out = tmp_path / "run"
    # What nobody writes well is paid for what the page before the first message has.
    paid = ["multi_turn.reward.weight_tasks=2", "multi_turn.reward.signals.win=0"]
    run = played(out, command(out, model, "algorithm=mt_grpo", *paid))
    settings = WebCoderSettings(turns_per_task=1)
    rewards = [task_rewards(game, settings, TURNS) for game in run.games]
    expected = 2 * sum(float(np.nansum(found)) for found in rewards)
    assert run.trained[-1]["critic/channel_sum/task"] == pytest.approx(expected)
    assert run.trained[-1]["critic/channel_sum/outcome"] == 0.0
    report = by_kind(run.validated, settings, TURNS)
    assert list(report) == ["reproduce", "generate", "modify", "repair"]
    for kind, found in report.items():
        told = {
            name.rpartition("/")[2]: value
            for name, value in run.records[-1].items()
            if name.startswith(f"val-aux/webcoder/{kind}/")
        }
        assert told == asdict(found)


def test_tasks_that_an_environment_does_not_pay_are_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tiny_runs.command(tmp_path / "run", model, "errands", "multi_turn.env_kwargs={}")
    status, _ = play([*asked, "multi_turn.reward.weight_tasks=1"])
    assert status == 2
    said = capsys.readouterr().err
    assert "which the environment errands does not give: set it to 0." in said
    assert not (tmp_path / "run").exists()


def test_the_configured_environment_plays_its_tasks(tmp_path: Path, model: Path) -> None:
    cfg, _ = load_config(command(tmp_path, model))
    sets = load_tasks(cfg)
    assert (len(sets.train), len(sets.val), len(sets.test)) == (8, 3, 0)
    game = env_factory(cfg, TURNS)(sets.val[0])
    assert isinstance(game, WebCoder)
    outcome = game.apply(game.parse(game.reference()), None)
    assert outcome.reply.startswith("Build ok.")
    assert outcome.diagnostics == ("task_over",)


def test_the_environment_by_its_name_alone_has_all_tasks() -> None:
    name = ["experiment=smollm2_cpu", "env=webcoder", "judge=rules"]
    cfg, _ = load_config([*name, "data.sample_count={val: 64}", "trainer.final_test=true"])
    sets = load_tasks(cfg)
    assert (len(sets.train), len(sets.val), len(sets.test)) == (256, 64, 64)
