"""What each setting of the published implementation does here.

A name is *effective* (same effect), *corrected* (in the schema, with a stated difference) or
*inert*: it is accepted where that changes nothing, answered by one warning where it would have no
effect, and refused where silence would mean another experiment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from delta_belief_rl.config.reference_names import REFERENCE_NAMES
from delta_belief_rl.config.schema import RunConfig, leaves

Status = Literal["effective", "corrected", "inert"]


@dataclass(frozen=True, slots=True)
class Inert:
    """A setting that nothing reads.

    Attributes:
        note: Why, and what to use instead.
        holds: Values that describe what happens anyway; they are accepted silently.
        follows: Setting whose value this one always has.
        strict: Other values are an error instead of a warning.
    """

    note: str
    holds: tuple[object, ...] = ()
    follows: str = ""
    strict: bool = False


_UNUSED = "has no effect in the published implementation either"
_PACKED = "the batch planner balances and packs games by tokens"
_SCORE = "the reference and belief passes use the limits of rollout.log_prob_*"
_JUDGE = "the judge always samples with judge_rollout.rollout.val_kwargs"
_ENGINE = "the engine decides"

FAMILIES: dict[str, Inert] = {
    "critic.model": Inert("the critic reads the policy's model (critic.form)"),
    "critic.checkpoint": Inert("the critic is in the policy's checkpoints"),
    "reward_model": Inert("rewards come from the judge and the belief, not from a reward model"),
    "custom_reward_function": Inert("set multi_turn.reward, or play an environment of a plug-in"),
    "multi_turn.belief": Inert(
        "beliefs on stored conversations are a command of their own: delta-belief belief FILES"
    ),
    "actor_rollout_ref.ref": Inert("the reference policy is the policy without its adapter"),
}
"""Nodes whose every leaf is inert for one reason; one warning each."""

_MULTI_TURN: dict[str, Inert] = {
    "multi_turn.enable": Inert("every run is multi-turn", (True,), strict=True),
    "multi_turn.debug": Inert("read games in the run's rollout and validation folders", (False,)),
    "multi_turn.reward.attribution_level": Inert(_UNUSED, (None, "None")),
    "multi_turn.reward.signals.action_len": Inert(_UNUSED, (0.0,)),
}
_DATA: dict[str, Inert] = {
    "data.enable_thinking": Inert("actor.thinking is what reaches the chat template", (False,)),
    "data.tokenizer": Inert("set actor_rollout_ref.model.tokenizer_path", (None,)),
    "data.reward_fn_key": Inert("multi_turn.env selects the rewards", ("data_source",)),
    "data.max_start_length": Inert(_UNUSED, (250,)),
    "data.val_batch_size": Inert("validation streams all its games", (None,)),
    "data.return_raw_input_ids": Inert(_UNUSED, (False,)),
    "data.return_raw_chat": Inert(_UNUSED, (False,)),
    "data.filter_overlong_prompts": Inert("a first prompt above the limit is refused", (False,)),
    "data.filter_overlong_prompts_workers": Inert("prompts are checked in one process", (1,)),
    "data.truncation": Inert("no conversation is ever cut", ("error",)),
    "data.image_key": Inert("tasks are text", ("images",)),
    "data.video_key": Inert("tasks are text", ("videos",)),
    "data.custom_cls.path": Inert("add an environment with a plug-in (plugins)", (None,)),
    "data.custom_cls.name": Inert("add an environment with a plug-in (plugins)", (None,)),
    "data.gen_batch_size": Inert("data.train_batch_size is the number of secrets played", (None,)),
    "data.cache_dir": Inert("files are read where they are", (None,)),
    "data.seed": Inert("seed orders the tasks", (None,)),
}
_ACTOR: dict[str, Inert] = {
    "hybrid_engine": Inert("policy and engine share the pool", (True,), strict=True),
    "gen_n": Inert("set multi_turn.train.n", follows="multi_turn.train.n", strict=True),
    "val_only": Inert("set trainer.val_only", follows="trainer.val_only", strict=True),
    "resume_mode": Inert("set trainer.resume_mode", follows="trainer.resume_mode", strict=True),
    "model.external_lib": Inert("name your module in plugins", (None,), strict=True),
    "model.override_config": Inert("change the model's own config.json", ({},), strict=True),
    "model.use_remove_padding": Inert("batches are always packed", (True,)),
    "model.lora_path": Inert("adapters lie in the checkpoint's own layout", ("lora_adapters",)),
    "model.skip_lora_adapter_files_on_resume": Inert("a resume restores the adapter", (True,)),
    "model.fused_kernel_options": Inert("model.use_liger selects kernels", (None,)),
    "actor.state_masking": Inert("only sampled tokens are trained", (True,), strict=True),
    "actor.strategy": Inert("training is FSDP2", ("fsdp", "fsdp2"), strict=True),
    "actor.ppo_micro_batch_size": Inert("set actor.ppo_micro_batch_size_per_gpu", (None,)),
    "actor.use_torch_compile": Inert("log-probs are computed in chunks without compilation"),
    "actor.shuffle": Inert("mini-batches follow the order of the secrets", (False,)),
    "actor.ulysses_sequence_parallel_size": Inert("sequences are not split", (1,), strict=True),
    "actor.checkpoint.contents": Inert("checkpoints hold all that a resume needs"),
    "actor.optim.total_training_steps": Inert("set trainer.total_training_steps", (-1,)),
    "actor.fsdp_config.wrap_policy.min_num_params": Inert("layers are the unit", (0,)),
    "actor.fsdp_config.fsdp_size": Inert("the whole pool is one shard group", (-1,)),
    "actor.fsdp_config.model_dtype": Inert("set actor.dtype", (None,)),
    "actor.fsdp_config.mixed_precision": Inert("set actor.dtype", (None,)),
    "actor.fsdp_config.use_orig_params": Inert("does not exist in FSDP2"),
    "actor.fsdp_config.forward_prefetch": Inert("FSDP2 prefetches on its own"),
    "ref.resource_pool_actor": Inert("the reference shares the policy's pool", (True,)),
    "ref.strategy": Inert("training is FSDP2", ("fsdp", "fsdp2")),
    "ref.log_prob_micro_batch_size": Inert(_SCORE, (None,)),
    "ref.log_prob_micro_batch_size_per_gpu": Inert(
        _SCORE, follows="actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    ),
    "ref.log_prob_use_dynamic_bsz": Inert(
        _SCORE, follows="actor_rollout_ref.rollout.log_prob_use_dynamic_bsz"
    ),
    "ref.log_prob_max_token_len_per_gpu": Inert(
        _SCORE, follows="actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
    ),
    "ref.ulysses_sequence_parallel_size": Inert("sequences are not split", (1,)),
    "rollout.mode": Inert("games always advance independently", ("sync", "async")),
    "rollout.chat_scheduler": Inert(_UNUSED, (None,)),
    "rollout.use_fire_sampling": Inert(_UNUSED, (False,)),
    "rollout.prompt_length": Inert(
        "set data.max_prompt_length", follows="data.max_prompt_length", strict=True
    ),
    "rollout.response_length": Inert(
        "set data.max_response_length", follows="data.max_response_length", strict=True
    ),
    "rollout.ignore_eos": Inert("a turn ends at its end token", (False,), strict=True),
    "rollout.load_format": Inert(
        "the engine reads the model's own files", ("auto", "safetensors", "dummy_hf")
    ),
    "rollout.log_prob_micro_batch_size": Inert(
        "set rollout.log_prob_micro_batch_size_per_gpu", (None,)
    ),
    "rollout.detokenize": Inert("engines return tokens", (True, False)),
    "rollout.engine_kwargs.swap_space": Inert("vLLM has no such option any more", (None,)),
    "rollout.val_kwargs.n": Inert("set multi_turn.val.n", (1,), strict=True),
    "rollout.layered_summon": Inert("only the adapter travels to the engine", (True, False)),
    "rollout.seed": Inert("seed reaches the engine"),
    "rollout.limit_images": Inert("tasks are text", (None,)),
}
_JUDGE_KEYS: dict[str, Inert] = {
    "env": Inert("set multi_turn.env", follows="multi_turn.env", strict=True),
    "enable": Inert("every game has a judge", (True,), strict=True),
    "truncation": Inert("a judge prompt is never cut", ("error",)),
    "model.input_tokenizer": Inert("text reaches the judge as text"),
    "model.temperature": Inert(_JUDGE),
    "model.top_p": Inert(_JUDGE),
    "rollout.name": Inert("judge_rollout.name selects the judge", ("vllm",), strict=True),
    "rollout.mode": Inert("judge calls are always asynchronous", ("sync", "async")),
    "rollout.chat_scheduler": Inert(_UNUSED, (None,)),
    "rollout.temperature": Inert(_JUDGE),
    "rollout.top_k": Inert(_JUDGE),
    "rollout.top_p": Inert(_JUDGE),
    "rollout.use_fire_sampling": Inert(_UNUSED, (False,)),
    "rollout.ignore_eos": Inert("an answer ends at its end token", (False,), strict=True),
    "rollout.load_format": Inert("the engine reads the model's own files", ("auto", "safetensors")),
    "rollout.n": Inert("each question gets one answer", (1,), strict=True),
    "rollout.detokenize": Inert(_ENGINE, (True,)),
    "rollout.engine_kwargs.swap_space": Inert("vLLM has no such option any more", (None,)),
    "rollout.val_kwargs.n": Inert("each question gets one answer", (1,), strict=True),
    "rollout.seed": Inert("seed reaches the judge"),
}
_ALGORITHM: dict[str, Inert] = {
    "alpha": Inert(_UNUSED, (0.1,)),
}
_CRITIC_BATCHES = "the critic is scored and trained with the policy's batches"
_CRITIC: dict[str, Inert] = {
    **{
        name: Inert(_CRITIC_BATCHES, follows=f"actor_rollout_ref.actor.{name}")
        for name in (
            *("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
            *("ppo_max_token_len_per_gpu", "ppo_epochs"),
        )
    },
    **{
        name: Inert(_CRITIC_BATCHES, (None,))
        for name in (
            *("rollout_n", "ppo_micro_batch_size", "forward_micro_batch_size"),
            *("forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu"),
        )
    },
    "shuffle": Inert(_CRITIC_BATCHES, (False,)),
    "strategy": Inert("the critic is sharded with the policy", ("fsdp", "fsdp2")),
    "ulysses_sequence_parallel_size": Inert("sequences are not split over GPUs", (1,)),
    "optim.total_training_steps": Inert("set trainer.total_training_steps", (-1, None)),
}
_TRAINER: dict[str, Inert] = {
    "balance_batch": Inert(_PACKED),
    "default_hdfs_dir": Inert("checkpoints are local; export them", (None,), strict=True),
    "del_local_ckpt_after_load": Inert("set trainer.max_actor_ckpt_to_keep", (False,)),
    "max_critic_ckpt_to_keep": Inert("the critic is in the policy's checkpoints", (None,)),
    "checkpoint_step": Inert("set trainer.save_freq", (None,)),
    "remove_previous_ckpt_in_save": Inert("set trainer.max_actor_ckpt_to_keep", (False,)),
}
_OTHERS: dict[str, Inert] = {
    "multi_turn.belief.enabled": Inert(FAMILIES["multi_turn.belief"].note, (False,)),
    "reward_model.enable": Inert(FAMILIES["reward_model"].note, (False,), strict=True),
    "custom_reward_function.path": Inert(
        FAMILIES["custom_reward_function"].note, (None,), strict=True
    ),
}

INERT: dict[str, Inert] = {
    **_MULTI_TURN,
    **_DATA,
    **{f"actor_rollout_ref.{name}": entry for name, entry in _ACTOR.items()},
    **{f"judge_rollout.{name}": entry for name, entry in _JUDGE_KEYS.items()},
    **{f"algorithm.{name}": entry for name, entry in _ALGORITHM.items()},
    **{f"critic.{name}": entry for name, entry in _CRITIC.items()},
    **{f"trainer.{name}": entry for name, entry in _TRAINER.items()},
    **_OTHERS,
}


def find_inert(name: str) -> tuple[str, Inert] | None:
    """The entry for a dotted name as ``(name or node that it is listed under, entry)``."""
    parts = name.split(".")
    heads = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    for head in heads:
        if head in INERT:
            return head, INERT[head]
    for head in heads:
        if head in FAMILIES and name in REFERENCE_NAMES:
            return head, FAMILIES[head]
    return None


def status(name: str) -> tuple[Status, str]:
    """What a setting of the published implementation does here: ``(status, note)``.

    Raises:
        KeyError: The name is in neither table.
    """
    for known, item, _ in leaves(RunConfig):
        if known == name:
            note = str(item.metadata.get("corrected", ""))
            return ("corrected", note) if note else ("effective", "")
    found = find_inert(name)
    if found is None:
        raise KeyError(name)
    return "inert", found[1].note
