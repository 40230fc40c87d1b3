"""SPA-RL trains through the whole loop, and a resumed run is the straight one."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_belief_rl.algo.credit.spa_rl import SpaRl
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer.contributions import ContributionSettings
from delta_belief_rl.trainer.settings import credit_method, critic_settings, learner_settings
from delta_belief_rl.types import UserError
from tests.runs import games_of, metrics_of, play, words, write_world

STEPS = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


def command(out: Path, world: Path, *more: str) -> list[str]:
    """The method's own group, on the embedded world.

    Three turns are too short to win, so beliefs are paid, and what a game is paid over all is what
    the head shares out.
    """
    return words(
        out,
        world,
        "algorithm=spa_rl",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=-1",
        "trainer.final_test=false",
        "multi_turn.logprob_reward.enabled=true",
        "algorithm.reward_normalisation.method=mean_std",
        "critic.optim.lr=1e-2",
        "algorithm.spa_rl.warmup_steps=1",
        *more,
    )


@pytest.mark.slow
@pytest.mark.parametrize("more", ["source=base", "source=policy", "estimator=turn_ppo"])
def test_R2_the_method_trains_through_the_loop_and_a_resumed_run_is_the_straight_one(
    more: str, tmp_path: Path, world: Path
) -> None:
    more = f"algorithm.spa_rl.{more}"
    assert play(command(tmp_path / "straight", world, more))[0] == 0
    records = read_records(tmp_path / "straight" / "metrics.jsonl")
    trained = [record for record in records if record["step"] > 0]
    assert [record["step"] for record in trained] == [1, STEPS]
    for record in trained:
        assert record["contributions/loss"] > 0
        assert 0 < record["contributions/fit"] <= 1
        assert record["contributions/skipped_games"] == 0
        assert record["critic/vf_loss"] > 0
        assert record["actor/grad_norm"] > 0
        assert 0 < record["critic/executed_turns"] <= 1
        assert record["timing_s/learners"] > 0
    first, second = trained
    assert second["contributions/games"] == 2 * first["contributions/games"] > 0
    # In the warm-up the game's own pay is used, and a new head explains none of it.
    assert "critic/reward_sum/contribution" not in first
    assert first["critic/contribution_explained"] == pytest.approx(0)
    assert second["critic/reward_sum/grounding"] > 0
    assert abs(second["critic/reward_sum/contribution"]) > 1e-6
    cut = command(tmp_path / "cut", world, more)
    assert play([*cut, "trainer.total_training_steps=1"])[0] == 0
    assert play(cut)[0] == 0
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "straight")
    assert games_of(tmp_path / "cut") == games_of(tmp_path / "straight")


def test_the_settings_reach_the_method_and_the_head(world: Path) -> None:
    def config(*more: str) -> RunConfig:
        return load_config(command(Path("out"), world, *more))[0]

    cfg = config("algorithm.spa_rl={alpha: 2.0, beta: 0.25, games: 7, ridge: 0.5, source: policy}")
    (made,) = learner_settings(cfg, total_steps=7)
    assert isinstance(made, ContributionSettings)
    assert (made.source, made.games, made.ridge) == ("policy", 7, 0.5)
    credit = credit_method(cfg)
    assert isinstance(credit, SpaRl)
    settings = credit.settings
    assert (settings.alpha, settings.beta, settings.warmup_steps) == (2.0, 0.25, 1)
    assert critic_settings(cfg) is not None
    assert learner_settings(config("trainer.val_only=true")) == ()
    assert learner_settings(config("algorithm=ppo")) == ()


def test_a_base_cannot_be_read_apart_from_a_policy_without_adapters(world: Path) -> None:
    ref = "actor_rollout_ref.model"
    bare = [f"{ref}.lora_rank=0", f"{ref}.adapters=[]", "multi_turn.logprob_reward.enabled=false"]
    with pytest.raises(UserError, match=r"algorithm\.spa_rl\.source=base needs LoRA adapters"):
        learner_settings(load_config(command(Path("out"), world, *bare))[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("games=0", "algorithm.spa_rl.games is 0"),
        ("ridge=0", "algorithm.spa_rl.ridge is 0"),
        ("alpha=-1", "algorithm.spa_rl.alpha is -1"),
        ("source=ema", "algorithm.spa_rl.source"),
        ("warmup_steps=0 algorithm.spa_rl.refresh=false", "leaves the head untrained"),
    ],
)
def test_settings_are_checked_before_anything_is_played(
    setting: str, said: str, tmp_path: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = f"algorithm.spa_rl.{setting}".split()
    assert play(command(tmp_path / "run", world, *more))[0] == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
