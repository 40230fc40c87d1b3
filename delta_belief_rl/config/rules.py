"""Cross-field rules: every setting that cannot work is refused here, before anything starts.

Each rule yields sentences that name the cause and the cure. ``problems`` collects them all,
``check`` raises the first.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from delta_belief_rl.config import rules_denoiser, rules_trees, rules_views
from delta_belief_rl.config import rules_learning as learning
from delta_belief_rl.config import rules_pools as pools
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.schema_actor import ActorRolloutRef
from delta_belief_rl.config.schema_algo import CREDIT_TRANSFORMS, ESTIMATORS
from delta_belief_rl.config.schema_turns import BELIEF_METHODS, ENVIRONMENTS, VERIFY_METHODS
from delta_belief_rl.types import UserError


def check(config: RunConfig) -> None:
    """Refuse a configuration that cannot work.

    Raises:
        UserError: The first broken rule, in one sentence.
    """
    for sentence in problems(config):
        raise UserError(sentence)


def problems(config: RunConfig) -> Iterator[str]:
    """Every broken rule as one sentence."""
    for rule in _RULES:
        yield from rule(config)


def _positive(config: RunConfig) -> Iterator[str]:
    turns, data, actor = config.multi_turn, config.data, config.actor_rollout_ref
    trainer, judge = config.trainer, config.judge_rollout
    at_least_one: dict[str, float | None] = {
        "multi_turn.max_turns.train": turns.max_turns.train,
        "multi_turn.max_turns.val": turns.max_turns.val,
        "multi_turn.train.n": turns.train.n,
        "multi_turn.val.n": turns.val.n,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": data.max_response_length,
        "data.train_batch_size": data.train_batch_size,
        "actor_rollout_ref.num_threads": actor.num_threads,
        "actor_rollout_ref.nccl_timeout": actor.nccl_timeout,
        "actor_rollout_ref.actor.ppo_mini_batch_size": actor.actor.ppo_mini_batch_size,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": (
            actor.actor.ppo_micro_batch_size_per_gpu
        ),
        "actor_rollout_ref.actor.ppo_epochs": actor.actor.ppo_epochs,
        "actor_rollout_ref.rollout.n": actor.rollout.n,
        "actor_rollout_ref.rollout.max_num_seqs": actor.rollout.max_num_seqs,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": (
            actor.rollout.log_prob_micro_batch_size_per_gpu
        ),
        "actor_rollout_ref.rollout.replicas": actor.rollout.replicas,
        "judge_rollout.replicas": judge.replicas,
        "judge_rollout.model.api_batch_size": judge.model.api_batch_size,
        "judge_rollout.rollout.prompt_length": judge.rollout.prompt_length,
        "judge_rollout.rollout.response_length": judge.rollout.response_length,
        "judge_rollout.rollout.max_num_seqs": judge.rollout.max_num_seqs,
        "trainer.total_epochs": trainer.total_epochs,
        "trainer.total_training_steps": trainer.total_training_steps,
        "trainer.test_games": trainer.test_games,
        "trainer.max_actor_ckpt_to_keep": trainer.max_actor_ckpt_to_keep,
        "trainer.nnodes": trainer.nnodes,
        "trainer.n_gpus_per_node": trainer.n_gpus_per_node,
        "trainer.ray_wait_register_center_timeout": trainer.ray_wait_register_center_timeout,
        "ray_init.num_cpus": config.ray_init.num_cpus,
    }
    for name, value in at_least_one.items():
        if (
            value is not None
            and value < 1
            and not (name.endswith("n_gpus_per_node") and value == 0)
        ):
            yield f"{name} must be at least 1, not {value}."
    for name in ("test_freq", "save_freq", "recovery_freq", "rollout_freq"):
        value = getattr(trainer, name)
        if value < 1 and value != -1:
            yield (
                f"trainer.{name} must be a positive number of steps, or -1 for never, not {value}."
            )
    for name, count in (("train", data.sample_count.train), ("val", data.sample_count.val)):
        if count < 1 and count != -1:
            yield f"data.sample_count.{name} must be positive, or -1 for all, not {count}."
    for name in ("max_staleness", "log_val_generations", "check_freq"):
        value = getattr(trainer, name)
        if value < 0:
            yield f"trainer.{name} must not be negative, not {value}."


def names(config: RunConfig) -> Iterator[str]:
    """Words that no environment, estimator or method has."""
    turns = config.multi_turn
    # What plug-ins bring is known where they are loaded (envs.plugins).
    if not config.plugins:
        yield from unknown("multi_turn.env", [turns.env], ENVIRONMENTS, " (or name its plug-in)")
    if turns.env_kwargs and turns.env in ENVIRONMENTS:
        yield (
            f"multi_turn.env_kwargs is for environments of plug-ins, and {turns.env} is none: "
            "leave it out."
        )
    algorithm = config.algorithm
    if not config.plugins:
        name = "algorithm.adv_estimator"
        yield from unknown(name, [algorithm.adv_estimator], ESTIMATORS, " (or name its plug-in)")
    if algorithm.kwargs and algorithm.adv_estimator in ESTIMATORS:
        yield (
            f"algorithm.kwargs is for methods of plug-ins, and {algorithm.adv_estimator} is none: "
            "leave it out."
        )
    yield from unknown("algorithm.transforms", config.algorithm.transforms, CREDIT_TRANSFORMS)
    yield from unknown(
        "multi_turn.logprob_reward.methods", turns.logprob_reward.methods, BELIEF_METHODS
    )
    yield from unknown(
        "multi_turn.verify_judge.methods", turns.verify_judge.methods, VERIFY_METHODS
    )


def unknown(name: str, given: Sequence[str], known: Sequence[str], more: str = "") -> Iterator[str]:
    """A sentence for each word that is none of those that a setting may have.

    Args:
        name: The setting.
        more: Follows the list of known words.
    """
    for item in given:
        if item not in known:
            close = difflib.get_close_matches(item, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            yield f"{name} does not know {item}: choose from {', '.join(known)}{more}{hint}"


def _tasks(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.world is not None:
        for name in ("train_files", "val_files", "test_files"):
            if getattr(data, name):
                yield (
                    f"data.world and data.{name} exclude each other: set data.world=null to read "
                    f"files, or data.{name}=[] to play the world."
                )
        if config.multi_turn.env != "twenty_questions":
            yield (
                f"data.world plays twenty_questions only: set multi_turn.env=twenty_questions, or "
                f"data.world=null for {config.multi_turn.env}."
            )
        return
    if data.world_prompt is not None:
        yield "data.world_prompt opens the games of data.world, which is not set."
    if config.multi_turn.env in ENVIRONMENTS:
        yield from missing_files(config)


def missing_files(config: RunConfig) -> Iterator[str]:
    """Sets of tasks that a run without an embedded world needs and that no file is named for."""
    data, trainer = config.data, config.trainer
    if not data.train_files and not trainer.val_only:
        yield (
            "There are no training tasks: set data.train_files, data.world or "
            "trainer.val_only=true."
        )
    wants_val = trainer.val_only or trainer.val_before_train or trainer.test_freq > 0
    if not data.val_files and wants_val:
        yield (
            "There are no validation tasks: set data.val_files, or trainer.val_before_train=false "
            "and trainer.test_freq=-1."
        )
    if trainer.final_test and not data.test_files:
        yield "trainer.final_test needs secrets to play: set data.test_files or data.world."


def _turns(config: RunConfig) -> Iterator[str]:
    data, actor = config.data, config.actor_rollout_ref
    if data.max_response_length >= data.max_prompt_length:
        yield (
            f"data.max_response_length={data.max_response_length} (tokens of a turn) must be less "
            f"than data.max_prompt_length={data.max_prompt_length} (tokens of a game)."
        )
    if actor.actor.cot and actor.actor.thinking:
        yield (
            "actor_rollout_ref.actor.cot and actor_rollout_ref.actor.thinking exclude each other; "
            "set one to false."
        )
    yield from _thinking(actor)
    longest = data.max_prompt_length + data.max_response_length
    limit = actor.rollout.max_model_len
    if limit is not None and limit < longest:
        yield (
            f"actor_rollout_ref.rollout.max_model_len={limit} is shorter than a game and a turn "
            f"({longest} tokens); raise it or set it to null."
        )


def _thinking(actor: ActorRolloutRef) -> Iterator[str]:
    thinking, extra = actor.actor.thinking, actor.model.chat_template_kwargs
    if thinking and actor.actor.thinking_history == "strip":
        yield (
            "actor_rollout_ref.actor.thinking_history=strip would take sampled thoughts out of "
            "later prompts, so a game would be no single stream of tokens: set it to keep, or "
            "actor_rollout_ref.actor.thinking=false."
        )
    if extra.get("enable_thinking", thinking) != thinking:
        yield (
            "actor_rollout_ref.model.chat_template_kwargs.enable_thinking contradicts "
            f"actor_rollout_ref.actor.thinking={str(thinking).lower()}: set the latter alone."
        )


_RULES = (
    _positive,
    names,
    pools.actor_pool,
    _tasks,
    _turns,
    learning.belief,
    learning.batches,
    rules_trees.trees,
    rules_views.views,
    rules_denoiser.denoiser,
    learning.loss,
    learning.sampling,
    learning.abort,
    pools.judge,
    pools.memory,
    pools.run,
)
