"""Errands train and validate through the loop, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.envs.errands.world import house_from_json
from delta_belief_rl.trainer.environments import env_factory
from delta_belief_rl.trainer.tasks import load_tasks
from delta_belief_rl.trainer.warmup.errand_games import errand_tokenizer
from delta_belief_rl.types import StopReason, Verdict
from tests.tiny_runs import STEPS, played, write_policy

AGENT = Path(__file__).resolve().parents[2] / "delta_belief_rl" / "assets" / "errands_agent"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy of a few thousand weights that knows the words of the errands."""
    return write_policy(tmp_path_factory.mktemp("model"), errand_tokenizer(), context=1024)


def command(out: Path, model: Path, *more: str) -> list[str]:
    """A run of two steps, each with four games of four tasks."""
    adapter = "{name: actor_lora, r: 4, alpha: 4, target_modules: all-linear}"
    return [
        "experiment=errands_quickstart",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.output_dir={out}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
        "trainer.rollout_freq=1",
        "trainer.test_freq=2",
        "trainer.final_test=false",
        "multi_turn.max_turns={train: 4, val: 4}",
        "multi_turn.train.n=4",
        "multi_turn.val.n=2",
        "multi_turn.env_kwargs.tasks={train: 8, val: 3, test: 0}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.num_threads=1",
        "actor_rollout_ref.model.lora_rank=4",
        f"actor_rollout_ref.model.adapters=[{adapter}]",
        *more,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gigpo", "delta_belief"])
def test_errands_train_and_validate_through_the_loop(
    algorithm: str, tmp_path: Path, model: Path
) -> None:
    out = tmp_path / "run"
    run = played(out, command(out, model, f"algorithm={algorithm}"))
    assert all(record["actor/grad_norm"] > 0 for record in run.trained)
    games = run.games
    assert len(games) == 16
    assert {game.task.source for game in games} == {"errands"}
    assert {game.stop for game in games} <= {StopReason.WIN, StopReason.TURN_LIMIT}
    turns = [turn for game in games for turn in game.turns]
    assert {turn.verdict for turn in turns} >= {Verdict.INVALID}
    assert all(turn.state_key and turn.action_key for turn in turns)
    # The house comes back from the file as it was.
    assert all(house_from_json(game.task.scenario or "") for game in games)
    if algorithm == "gigpo":
        # What is not understood changes nothing: states are met again.
        assert all(record["critic/mean_state_group_size"] > 1.0 for record in run.trained)
    else:
        assert all(len(game.beliefs or ()) == game.num_turns + 1 for game in games)
    assert len(run.validated) == 3 * 2


def test_the_configured_environment_plays_its_tasks(tmp_path: Path, model: Path) -> None:
    cfg, _ = load_config(command(tmp_path, model))
    sets = load_tasks(cfg)
    assert (len(sets.train), len(sets.val), len(sets.test)) == (8, 3, 0)
    game = env_factory(cfg, 3)(sets.val[0])
    action = game.parse("I look around.")
    assert not action.needs_judge
    assert game.apply(action, None).reply.startswith("You are in the ")
