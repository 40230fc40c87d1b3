"""The list of what a game depends on: every setting is on it, or known to change no game."""

from __future__ import annotations

from functools import cache

import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.game_settings import Kind, game_digest, game_settings
from delta_belief_rl.config.schema import RunConfig, leaves

POLICY, JUDGE = "actor_rollout_ref", "judge_rollout"

CHANGE_NO_GAME = (
    "trainer.",
    "algorithm.",
    "ray_init.",
    "critic.",
    # Secrets are compared themselves.
    "data.train_files",
    "data.test_files",
    "data.train_batch_size",
    "data.shuffle",
    "data.sample_count.train",
    # Where and how fast a policy or a judge works, and what it waits for.
    *(f"{POLICY}.{name}" for name in ("device", "num_threads", "ngpus", "role", "nccl_timeout")),
    *(
        f"{JUDGE}.{name}"
        for name in ("ngpus", "replicas", "share_actor_gpu", "timeout_s", "max_", "self_test.")
    ),
    f"{JUDGE}.model.api_batch_size",
    f"{JUDGE}.rollout.marlin",
    *(
        f"{pool}.rollout.{name}"
        for pool in (POLICY, JUDGE)
        for name in (
            "replicas",
            "gpu_memory_utilization",
            "kv_cache_memory_bytes",
            "enforce_eager",
            "free_cache_engine",
            "tensor_model_parallel_size",
            "max_",
            "disable_log_stats",
            "enable_chunked_prefill",
            "log_prob_",
        )
    ),
    # What the update alone depends on.
    f"{POLICY}.actor.",
    *(
        f"{POLICY}.model.{name}"
        for name in ("enable_gradient_checkpointing", "use_liger", "ema_beta", "ema_warmup_steps")
    ),
)


@cache
def digest(kind: Kind, *more: str) -> str:
    return game_digest(load_config(["experiment=eval_everyday", *more])[0], kind)


def test_a_setting_is_on_the_list_or_known_to_change_no_game() -> None:
    """A new setting fails here until it is put on one of the two sides."""
    listed = {*game_settings(RunConfig(), "train"), *game_settings(RunConfig(), "val")}
    names = {name for name, _, _ in leaves(RunConfig)}
    assert {n for n in names - listed if not n.startswith(CHANGE_NO_GAME)} == set()
    doubtful = {n for n in listed if n.startswith(CHANGE_NO_GAME)}
    own = ("cot", "thinking", "thinking_history", "dtype")
    assert doubtful == {f"{POLICY}.actor.{name}" for name in own}


@pytest.mark.parametrize("kind", ["train", "val"])
@pytest.mark.parametrize(
    "word",
    [
        "seed=7",
        "data.max_response_length=9",
        "multi_turn.win_rule=compatible",
        f"{POLICY}.actor.thinking=true",
        f"{POLICY}.actor.cot=true",
        f"{POLICY}.actor.thinking_history=strip",
        f"{POLICY}.actor.dtype=bfloat16",
        f"{POLICY}.rollout.dtype=float16",
        f"{POLICY}.rollout.n=4",
        f"{POLICY}.rollout.deterministic=false",
        f"+{POLICY}.model.api_extra_body={{reasoning: low}}",
        f"+{POLICY}.model.chat_template_kwargs={{a: 1}}",
        f"{POLICY}.model.tokenizer_path=elsewhere",
        f"{JUDGE}.repeated_prompt=false",
        f"{JUDGE}.rollout.response_length=77",
        f"{JUDGE}.rollout.val_kwargs.temperature=0.1",
        f"{JUDGE}.model.path=other",
        f"{JUDGE}.parser=published",
        f"{JUDGE}.cot=true",
    ],
)
def test_V4_what_changes_a_game_changes_the_digest(kind: Kind, word: str) -> None:
    assert digest(kind, word) != digest(kind)


@pytest.mark.parametrize("kind", ["train", "val"])
@pytest.mark.parametrize(
    "word",
    [
        f"{JUDGE}.max_error_rate=0.5",
        f"{JUDGE}.timeout_s=7",
        f"{JUDGE}.replicas=3",
        f"{JUDGE}.rollout.gpu_memory_utilization=0.3",
        f"{POLICY}.rollout.gpu_memory_utilization=0.3",
        f"{POLICY}.actor.ppo_micro_batch_size_per_gpu=1",
        f"{POLICY}.num_threads=1",
        "trainer.logger=[]",
        "trainer.output_dir=elsewhere",
        "data.train_batch_size=3",
    ],
)
def test_R9_what_changes_no_game_costs_none(kind: Kind, word: str) -> None:
    assert digest(kind, word) == digest(kind)


def test_each_kind_has_its_own_sampling_and_turns() -> None:
    for word in (
        f"{POLICY}.rollout.temperature=0.3",
        f"{POLICY}.rollout.do_sample=false",
        "multi_turn.max_turns.train=3",
        "multi_turn.train.n=9",
    ):
        assert digest("train", word) != digest("train"), word
        assert digest("val", word) == digest("val"), word
    for word in (
        f"{POLICY}.rollout.val_kwargs.temperature=0.3",
        "multi_turn.max_turns.val=3",
        "multi_turn.val.n=3",
        "data.sample_count.val=3",
    ):
        assert digest("val", word) != digest("val"), word
        assert digest("train", word) == digest("train"), word
