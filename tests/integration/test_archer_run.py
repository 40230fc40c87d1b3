"""ArCHer trains through the whole loop, and a resumed run is the straight one."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_belief_rl.algo.chain import reads_of
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer.archer import ArcherCriticSettings
from delta_belief_rl.trainer.settings import actor_settings, credit_method, learner_settings
from delta_belief_rl.types import UserError
from tests.runs import games_of, metrics_of, play, words, write_world

pytestmark = pytest.mark.slow
STEPS = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


def command(out: Path, world: Path, *more: str) -> list[str]:
    """The method's own group, on the embedded world; beliefs pay for every turn."""
    return words(
        out,
        world,
        "algorithm=archer",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=-1",
        "trainer.final_test=false",
        "multi_turn.logprob_reward.enabled=true",
        "algorithm.archer={lr: 1e-2, width: 16, buffer: 60, critic_epochs: 4, critic_batch: 16}",
        *more,
    )


def test_R2_it_trains_through_the_loop_and_a_resumed_run_is_the_straight_one(
    tmp_path: Path, world: Path
) -> None:
    assert play(command(tmp_path / "straight", world))[0] == 0
    records = read_records(tmp_path / "straight" / "metrics.jsonl")
    first, second = trained = [record for record in records if record["step"] > 0]
    for record in trained:
        assert record["archer/q_loss"] > 0
        assert record["archer/v_loss"] >= 0
        assert record["archer/grad_norm"] > 0
        assert record["archer/lr"] == 0.01
        assert record["archer/skipped_updates"] == 0
        assert 16 <= record["archer/transitions"] <= 48
        assert record["critic/archer_td_error"] > 0
        assert record["critic/archer_warming"] == 0
        assert "timing_s/learners" in record
        assert "actor/pg_clipfrac" not in record
    # New critics say zero and so teach nothing; after one step they do not, and do.
    assert first["critic/archer_q_mean"] == first["critic/archer_v_mean"] == 0
    assert first["actor/grad_norm"] == 0
    assert abs(second["critic/archer_q_mean"]) > 1e-4
    assert second["actor/grad_norm"] > 0
    both = first["archer/transitions"] + second["archer/transitions"]
    assert second["archer/buffer_size"] == min(60, both)
    cut = command(tmp_path / "cut", world)
    assert play([*cut, "trainer.total_training_steps=1"])[0] == 0
    assert play(cut)[0] == 0
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "straight")
    assert games_of(tmp_path / "cut") == games_of(tmp_path / "straight")


def test_in_the_warm_up_of_a_run_the_critics_alone_learn(tmp_path: Path, world: Path) -> None:
    out = tmp_path / "run"
    assert play(command(out, world, "algorithm.archer.warmup_steps=2"))[0] == 0
    for record in (r for r in read_records(out / "metrics.jsonl") if r["step"] > 0):
        assert record["critic/archer_warming"] == 1
        assert "actor/grad_norm" not in record
        assert record["critic/advantages/token_max"] == 0
        assert record["archer/grad_norm"] > 0


def test_a_token_baseline_trains_beside_the_critics(tmp_path: Path, world: Path) -> None:
    wanted = ("algorithm.archer.token_baseline=true", "algorithm.archer.baseline_lr=1e-2")
    assert play(command(tmp_path / "run", world, *wanted))[0] == 0
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    first, second = (record for record in records if record["step"] > 0)
    # New critics and a new baseline say zero, so there is nothing to learn yet.
    assert first["archer/baseline_loss"] == first["archer/baseline_grad_norm"] == 0
    assert "critic/archer_baseline_explained" not in first
    assert second["archer/baseline_loss"] > 0
    assert second["archer/baseline_grad_norm"] > 0
    assert second["archer/baseline_skipped_updates"] == 0
    assert second["critic/archer_baseline_explained"] == pytest.approx(0.0, abs=1e-6)
    assert second["actor/grad_norm"] > 0


def test_its_settings_are_checked_before_anything_is_played(
    tmp_path: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for setting, said in (
        ("algorithm.archer.tau=0", "algorithm.archer.tau is 0"),
        ("algorithm.archer.critic_batch=0", "algorithm.archer.critic_batch is 0"),
        ("algorithm.archer.warmup_steps=-1", "algorithm.archer.warmup_steps is -1"),
        ("algorithm.archer.baseline_lr=0", "algorithm.archer.baseline_lr is 0"),
    ):
        out = tmp_path / "run"
        assert play(command(out, world, setting))[0] == 2
        err = capsys.readouterr().err
        assert said in err
        assert "Traceback" not in err
        assert not (out / "metrics.jsonl").exists()


def test_the_settings_of_a_run_reach_its_critics(world: Path) -> None:
    out = Path("out")
    cfg = load_config(command(out, world, "seed=7", "algorithm.gamma=0.9"))[0]
    (made,) = learner_settings(cfg)
    assert made == ArcherCriticSettings(
        gamma=0.9, lr=1e-2, width=16, buffer=60, epochs=4, batch=16, seed=7
    )
    actor = actor_settings(cfg, "cpu", STEPS, 1)
    assert (actor.loss_name, actor.loss.loss_agg_mode) == ("reinforce", "seq-mean-token-sum")
    assert actor.learners == (made,)
    assert actor.critic is None
    assert learner_settings(load_config(command(out, world, "trainer.val_only=true"))[0]) == ()
    assert learner_settings(load_config(words(out, world, "algorithm=grpo"))[0]) == ()
    (waits,) = learner_settings(
        load_config(command(out, world, "algorithm.archer.warmup_steps=20"))[0]
    )
    assert waits.policy_waits == 20
    more = ("algorithm.archer.token_baseline=true", "algorithm.archer.baseline_lr=3e-3")
    cfg = load_config(command(out, world, *more))[0]
    (based,) = learner_settings(cfg)
    assert isinstance(based, ArcherCriticSettings)
    assert (based.token_baseline, based.baseline_lr) == (True, 3e-3)
    assert set(reads_of(credit_method(cfg))) <= set(based.columns)
    none = ("actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.adapters=[]")
    with pytest.raises(UserError, match="archer reads the base model"):
        learner_settings(load_config(command(out, world, *none))[0])
