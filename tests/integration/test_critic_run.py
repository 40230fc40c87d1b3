"""Methods with a critic train through the whole loop, and a resumed run is the straight one."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer.settings import critic_settings
from delta_belief_rl.types import UserError
from tests.runs import games_of, metrics_of, play, words, write_world

pytestmark = pytest.mark.slow
STEPS = 2
METHODS = {"ppo": "gae", "turn_ppo": "turn_ppo", "bilevel_gae": "bilevel_gae", "mpo": "mpo"}


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
        "critic.optim.lr=1e-2",
        *more,
    )


@pytest.mark.parametrize("form", ["shared", "own"])
@pytest.mark.parametrize("method", METHODS)
def test_R2_a_method_trains_through_the_loop_and_a_resumed_run_is_the_straight_one(
    method: str, form: str, tmp_path: Path, world: Path
) -> None:
    more = f"critic.form={form}"
    wanted = command(tmp_path / "straight", world, method, more)
    assert load_config(wanted)[0].algorithm.adv_estimator == METHODS[method]
    assert play(wanted)[0] == 0
    records = read_records(tmp_path / "straight" / "metrics.jsonl")
    trained = [record for record in records if record["step"] > 0]
    assert [record["step"] for record in trained] == [1, STEPS]
    for record in trained:
        assert record["critic/vf_loss"] > 0
        assert record["critic/grad_norm"] > 0
        assert record["critic/lr"] == 0.01
        assert record["critic/skipped_updates"] == 0
        assert record["actor/grad_norm"] > 0
        # A critic that shares the policy's hidden states is read with them.
        assert ("timing_s/values" in record) == (form == "own")
    # A new critic says zero; after one step it does not.
    assert trained[0]["critic/values_mean"] == 0
    assert trained[0]["critic/explained_variance"] == pytest.approx(0)
    assert abs(trained[1]["critic/values_mean"]) > 1e-3
    first = command(tmp_path / "cut", world, method, more)
    assert play([*first, "trainer.total_training_steps=1"])[0] == 0
    assert play(first)[0] == 0
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "straight")
    assert games_of(tmp_path / "cut") == games_of(tmp_path / "straight")


def test_in_the_warm_up_of_a_run_the_engines_keep_the_first_policy(
    tmp_path: Path, world: Path
) -> None:
    out = tmp_path / "run"
    assert play(command(out, world, "ppo", "trainer.critic_warmup=1"))[0] == 0
    first, second = [r for r in read_records(out / "metrics.jsonl") if r["step"] > 0]
    assert "actor/grad_norm" not in first
    assert first["critic/grad_norm"] > 0
    assert first["sync/adapter_version"] == second["sync/adapter_version"] == 0
    assert second["actor/grad_norm"] > 0


def test_mpo_tells_the_tokens_of_another_methods_turns_apart(tmp_path: Path, world: Path) -> None:
    out = tmp_path / "run"
    wanted = command(out, world, "grpo_turn", "algorithm.transforms=[mpo]")
    assert play(wanted)[0] == 0
    trained = [r for r in read_records(out / "metrics.jsonl") if r["step"] > 0]
    for record in trained:
        assert 0 < record["critic/mpo_scale"] <= 1
        assert record["critic/vf_loss"] > 0


def test_a_critics_settings_are_checked_before_anything_is_played(
    tmp_path: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for setting, said in (
        ("critic.cliprange_value=0", "critic.cliprange_value is 0"),
        ("critic.optim.lr=0", "critic.optim.lr is 0"),
        ("critic.optim.lr_warmup_steps_ratio=2", "critic.optim.lr_warmup_steps_ratio is 2"),
        ("critic.optim.min_lr_ratio=0.1", "critic.optim.min_lr_ratio needs"),
        ("trainer.critic_warmup=-1", "trainer.critic_warmup is -1"),
        ("algorithm.mpo.kappa=-1", "algorithm.mpo.kappa is -1"),
    ):
        out = tmp_path / "run"
        assert play(command(out, world, "mpo", setting))[0] == 2
        err = capsys.readouterr().err
        assert said in err
        assert "Traceback" not in err
        assert not (out / "metrics.jsonl").exists()


def test_a_method_without_values_and_an_evaluation_start_no_critic(world: Path) -> None:
    def critic(*settings: str) -> object:
        return critic_settings(load_config(command(Path("out"), world, *settings))[0])

    assert critic("grpo") is None
    with pytest.raises(UserError, match=r"trainer.critic_warmup=2 is for a critic"):
        critic("grpo", "trainer.critic_warmup=2")
    assert critic("ppo", "trainer.val_only=true") is None
    assert critic("grpo", "algorithm.transforms=[mpo]") is not None
    made = critic_settings(
        load_config(
            command(
                Path("out"),
                world,
                "turn_ppo",
                "critic={form: own, detach: false, vf_coef: 0.1, cliprange_value: 0.2}",
                "critic.grad_clip=2.0",
                "critic.optim={lr: 1e-3, lr_warmup_steps_ratio: 0.5, weight_decay: 0.1}",
                "critic.optim={warmup_style: cosine, min_lr_ratio: 0.2, betas: [0.8, 0.99]}",
                "trainer.critic_warmup=3",
            )
        )[0],
        total_steps=10,
    )
    assert made is not None
    assert (made.form, made.detach, made.vf_coef, made.cliprange_value) == ("own", False, 0.1, 0.2)
    assert (made.grad_clip, made.warmup_steps) == (2.0, 3)
    optimizer = made.optimizer
    assert (optimizer.lr, optimizer.warmup_steps, optimizer.weight_decay) == (1e-3, 5, 0.1)
    assert (optimizer.schedule, optimizer.min_ratio, optimizer.total_steps) == ("cosine", 0.2, 10)
    assert optimizer.betas == (0.8, 0.99)
    assert not optimizer.offload
