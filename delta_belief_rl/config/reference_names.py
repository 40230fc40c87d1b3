"""Names of the published implementation's settings, as dotted leaves."""

from __future__ import annotations

_LEAVES = {
    "": "seed",
    "multi_turn": "env enable debug",
    "multi_turn.max_turns": "train val",
    "multi_turn.train": "n",
    "multi_turn.val": "n",
    "multi_turn.logprob_reward": (
        "enabled agg base_model step_model normalised methods clip_min clip_max tau"
    ),
    "multi_turn.logprob_sampling": "enabled best_n worst_n p_best",
    "multi_turn.verify_judge": "enabled methods false_positive_behavior short_circuit",
    "multi_turn.reward": "attribution_level weight_elicit",
    "multi_turn.reward.signals": (
        "win invalid_action repeated_action traj_len action_len all_valid"
    ),
    "multi_turn.belief": "enabled method agg data_dir",
    "data": (
        "enable_thinking tokenizer train_files val_files prompt_key system_key reward_fn_key "
        "max_prompt_length max_response_length max_start_length train_batch_size "
        "val_batch_size return_raw_input_ids return_raw_chat shuffle filter_overlong_prompts "
        "filter_overlong_prompts_workers truncation image_key video_key gen_batch_size "
        "cache_dir seed"
    ),
    "data.custom_cls": "path name",
    "data.sample_count": "train val",
    "actor_rollout_ref": "hybrid_engine ngpus role gen_n val_only resume_mode nccl_timeout",
    "actor_rollout_ref.model": (
        "path external_lib override_config enable_gradient_checkpointing use_remove_padding "
        "use_liger lora_rank lora_path skip_lora_adapter_files_on_resume adapters ema_beta "
        "ema_warmup_steps api_model_name trust_remote_code tokenizer_path "
        "fused_kernel_options lora_alpha target_modules exclude_modules"
    ),
    "actor_rollout_ref.actor": (
        "state_masking cot thinking strategy ppo_mini_batch_size ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu grad_clip "
        "clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c tis_imp_ratio_cap "
        "loss_agg_mode entropy_coeff use_kl_loss use_torch_compile kl_loss_coef kl_loss_type "
        "ppo_epochs shuffle ulysses_sequence_parallel_size dtype"
    ),
    "actor_rollout_ref.actor.checkpoint": "contents",
    "actor_rollout_ref.actor.optim": (
        "lr lr_warmup_steps lr_warmup_steps_ratio min_lr_ratio warmup_style "
        "total_training_steps weight_decay betas"
    ),
    "actor_rollout_ref.actor.fsdp_config.wrap_policy": "min_num_params",
    "actor_rollout_ref.actor.fsdp_config": (
        "param_offload optimizer_offload fsdp_size model_dtype mixed_precision "
        "use_orig_params forward_prefetch"
    ),
    "actor_rollout_ref.ref": (
        "resource_pool_actor strategy use_torch_compile log_prob_micro_batch_size "
        "log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu ulysses_sequence_parallel_size"
    ),
    "actor_rollout_ref.ref.fsdp_config": "param_offload",
    "actor_rollout_ref.ref.fsdp_config.wrap_policy": "min_num_params",
    "actor_rollout_ref.rollout": (
        "name mode chat_scheduler temperature top_k top_p use_fire_sampling prompt_length "
        "response_length dtype gpu_memory_utilization ignore_eos enforce_eager "
        "free_cache_engine load_format tensor_model_parallel_size max_num_batched_tokens "
        "max_model_len max_num_seqs log_prob_micro_batch_size "
        "log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu disable_log_stats enable_chunked_prefill do_sample n "
        "detokenize layered_summon seed limit_images"
    ),
    "actor_rollout_ref.rollout.engine_kwargs": "swap_space vllm",
    "actor_rollout_ref.rollout.val_kwargs": "top_k top_p temperature n do_sample",
    "judge_rollout": "env repeated_prompt enable ngpus cot thinking truncation",
    "judge_rollout.model": "path input_tokenizer api_model_name api_batch_size temperature top_p",
    "judge_rollout.rollout": (
        "name mode chat_scheduler temperature top_k top_p use_fire_sampling prompt_length "
        "response_length dtype gpu_memory_utilization ignore_eos enforce_eager "
        "free_cache_engine load_format tensor_model_parallel_size max_num_batched_tokens "
        "max_model_len max_num_seqs disable_log_stats enable_chunked_prefill quantization n "
        "detokenize kv_cache_memory_bytes seed"
    ),
    "judge_rollout.rollout.engine_kwargs": "swap_space vllm",
    "judge_rollout.rollout.val_kwargs": "top_k top_p temperature n do_sample",
    "critic": (
        "rollout_n strategy ppo_mini_batch_size ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu forward_micro_batch_size "
        "forward_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu "
        "forward_max_token_len_per_gpu ulysses_sequence_parallel_size ppo_epochs shuffle "
        "grad_clip cliprange_value"
    ),
    "critic.optim": (
        "lr lr_warmup_steps_ratio min_lr_ratio warmup_style total_training_steps weight_decay"
    ),
    "critic.model": (
        "path tokenizer_path override_config external_lib enable_gradient_checkpointing "
        "use_remove_padding"
    ),
    "critic.model.fsdp_config": "param_offload optimizer_offload fsdp_size",
    "critic.model.fsdp_config.wrap_policy": "min_num_params",
    "critic.checkpoint": "contents",
    "reward_model": (
        "enable strategy micro_batch_size micro_batch_size_per_gpu max_length "
        "ulysses_sequence_parallel_size use_dynamic_bsz forward_max_token_len_per_gpu "
        "reward_manager launch_reward_fn_async"
    ),
    "reward_model.model": "input_tokenizer path external_lib use_remove_padding",
    "reward_model.model.fsdp_config.wrap_policy": "min_num_params",
    "reward_model.model.fsdp_config": "param_offload fsdp_size",
    "custom_reward_function": "path name",
    "algorithm": (
        "alpha gamma lam adv_estimator norm_adv_in_mtr clip_adv_in_mtr clip_adv_min "
        "clip_adv_max only_propagate_eog_in_mtr norm_adv_by_std_in_grpo use_kl_in_reward "
        "kl_penalty"
    ),
    "algorithm.filter_groups": "enabled metric max_num_gen_batches",
    "algorithm.kl_ctrl": "type kl_coef horizon target_kl",
    "trainer": (
        "val_only balance_batch total_epochs total_training_steps project_name "
        "experiment_name logger log_val_generations rollout_data_dir rollout_freq "
        "validation_data_dir nnodes n_gpus_per_node save_freq resume_mode resume_from_path "
        "val_before_train test_freq critic_warmup default_hdfs_dir del_local_ckpt_after_load "
        "default_local_dir max_actor_ckpt_to_keep max_critic_ckpt_to_keep "
        "ray_wait_register_center_timeout checkpoint_step remove_previous_ckpt_in_save"
    ),
    "ray_init": "num_cpus",
}

REFERENCE_NAMES: tuple[str, ...] = tuple(
    f"{node}.{leaf}" if node else leaf for node, text in _LEAVES.items() for leaf in text.split()
)
"""The published default file, what its launch lines add, and what it reads if present."""
