"""The ten published launch lines: six trainings, four evaluations, as their scripts write them."""

from __future__ import annotations

COCA = "delta_belief_rl/env/twenty_questions/direct/coca_plus"
FORMER = COCA.replace("delta_belief_rl", "learning_to_ask", 1)
"""The two GRPO scripts name the folder by its older name."""

TRAINING = """seed=42
multi_turn.logprob_sampling.enabled=false
multi_turn.verify_judge.enabled=true
multi_turn.verify_judge.methods=["exact","sentence","question","multiple_questions","length"]
multi_turn.verify_judge.false_positive_behavior="yes"
multi_turn.train.n=16
multi_turn.debug=false
data.train_batch_size=240
actor_rollout_ref.ngpus=1
actor_rollout_ref.model.path=BASE
actor_rollout_ref.model.lora_rank=64
actor_rollout_ref.model.adapters=[{name: actor_lora, r: 64, alpha: 64, target_modules: all-linear}]
actor_rollout_ref.model.use_liger=true
actor_rollout_ref.model.enable_gradient_checkpointing=true
actor_rollout_ref.actor.ppo_mini_batch_size=80
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
actor_rollout_ref.actor.use_kl_loss=false
actor_rollout_ref.actor.fsdp_config.param_offload=false
actor_rollout_ref.actor.fsdp_config.optimizer_offload=false
+actor_rollout_ref.actor.optim.betas=[0.9,0.95]
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.0
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=70000
actor_rollout_ref.actor.ppo_epochs=1
actor_rollout_ref.rollout.free_cache_engine=true
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.rollout.temperature=1.0
actor_rollout_ref.rollout.top_p=1.0
actor_rollout_ref.rollout.top_k=-1
actor_rollout_ref.rollout.n=1
+actor_rollout_ref.rollout.layered_summon=true
actor_rollout_ref.rollout.load_format=safetensors
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16
judge_rollout.model.path=ORACLE
judge_rollout.cot=true
judge_rollout.thinking=false
judge_rollout.rollout.response_length=250
judge_rollout.rollout.free_cache_engine=false
trainer.total_epochs=15
trainer.validation_data_dir=validation/NAME
trainer.val_before_train=true
trainer.rollout_data_dir=rollout/NAME
trainer.n_gpus_per_node=GPUS
trainer.project_name=delta_belief_rl
trainer.experiment_name=NAME
trainer.test_freq=4
trainer.resume_mode=auto""".splitlines()
BELIEF = [
    "multi_turn.logprob_reward.enabled=true",
    "multi_turn.logprob_reward.normalised=true",
    'multi_turn.logprob_reward.methods=["positive"]',
    "multi_turn.reward.weight_elicit=0.1",
    "algorithm.adv_estimator=grpo_turn",
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    f"data.train_files={COCA}/train_rl.parquet",
    f"data.val_files={COCA}/val.parquet",
]
STARPO = [
    "multi_turn.logprob_reward.enabled=false",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    f"data.train_files={FORMER}/train_rl.parquet",
    f"data.val_files={FORMER}/val.parquet",
]


def judge(ngpus: int, tokens: int, share: float, save: int, val: int = 4) -> list[str]:
    return [
        f"multi_turn.val.n={val}",
        f"judge_rollout.ngpus={ngpus}",
        f"judge_rollout.rollout.max_num_batched_tokens={tokens}",
        f"judge_rollout.rollout.gpu_memory_utilization={share}",
        f"trainer.save_freq={save}",
    ]


LR = "actor_rollout_ref.actor.optim.lr="
TRAINING_LINES = {
    "train_8xa100_paper": [
        *BELIEF,
        *judge(6, 4096, 0.65, 1),
        LR + "3e-5",
        "judge_rollout.rollout.tensor_model_parallel_size=2",
        "+judge_rollout.rollout.kv_cache_memory_bytes=30000000000",
    ],
    "train_8xa100_awq_dp7": [
        *BELIEF,
        *judge(7, 8192, 0.60, 1, val=8),
        LR + "3e-5",
        "judge_rollout.rollout.tensor_model_parallel_size=1",
        "+judge_rollout.rollout.kv_cache_memory_bytes=35000000000",
        "judge_rollout.rollout.quantization=awq",
        "judge_rollout.rollout.dtype=float16",
    ],
    "train_delta_belief_qwen1.7b": [*BELIEF, *judge(1, 2048, 0.7, 4), LR + "3e-5"],
    "train_delta_belief_qwen4b": [*BELIEF, *judge(1, 2048, 0.7, 4), LR + "3e-5"],
    "train_grpo_qwen1.7b": [*STARPO, *judge(1, 8192, 0.7, 4), LR + "1e-5"],
    "train_grpo_qwen4b": [*STARPO, *judge(1, 8192, 0.7, 4), LR + "3e-5"],
}

EVALUATION = """seed=42
multi_turn.val.n=8
actor_rollout_ref.ngpus=1
actor_rollout_ref.model.path=BASE
actor_rollout_ref.model.use_liger=true
actor_rollout_ref.rollout.free_cache_engine=true
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.rollout.temperature=1.0
actor_rollout_ref.rollout.top_p=1.0
actor_rollout_ref.rollout.top_k=-1
actor_rollout_ref.rollout.n=1
+actor_rollout_ref.rollout.layered_summon=true
actor_rollout_ref.rollout.load_format=safetensors
judge_rollout.cot=true
judge_rollout.thinking=false
judge_rollout.rollout.response_length=250
judge_rollout.rollout.free_cache_engine=false
judge_rollout.rollout.max_num_batched_tokens=2048
judge_rollout.rollout.gpu_memory_utilization=0.7
trainer.rollout_data_dir=rollout/NAME
trainer.n_gpus_per_node=GPUS
trainer.project_name=delta_belief_rl
trainer.experiment_name=NAME
trainer.validation_data_dir=test/NAME
trainer.val_only=true
trainer.val_before_train=true
trainer.resume_mode=disable""".splitlines()
ENV = "delta_belief_rl/env"
OTHER_ENV = ["data.system_key=null", "judge_rollout.repeated_prompt=false"]
API = [
    "judge_rollout.ngpus=0",
    "+judge_rollout.model.api_model_name=ORACLE",
    "+judge_rollout.model.api_batch_size=200",
]
EVALUATION_LINES = {
    "twenty_questions": [
        "multi_turn.debug=false",
        "multi_turn.verify_judge.enabled=true",
        'multi_turn.verify_judge.methods=["exact","sentence","question","multiple_questions","length"]',
        "multi_turn.verify_judge.false_positive_behavior=yes",
        f"data.train_files={COCA}/train_rl.parquet",
        f"data.val_files={COCA}/test.parquet",
        "judge_rollout.model.path=ORACLE",
        "judge_rollout.ngpus=1",
    ],
    "guess_my_city": [
        *OTHER_ENV,
        "multi_turn.debug=true",
        "multi_turn.env=guess_my_city",
        'multi_turn.verify_judge.methods=["exact","multiple_bets","multiple_questions"]',
        f"data.val_files={ENV}/guess_my_city/direct/paprika/test.parquet",
        "data.max_response_length=100",
        "judge_rollout.model.path=ORACLE",
        "judge_rollout.ngpus=1",
    ],
    "murder_mystery": [
        *OTHER_ENV,
        *API,
        "multi_turn.debug=false",
        "multi_turn.env=murder_mystery",
        "multi_turn.verify_judge.enabled=false",
        f"data.val_files={ENV}/murder_mystery/direct/paprika/test.parquet",
        "data.max_response_length=200",
        "data.max_prompt_length=7500",
    ],
    "customer_service": [
        *OTHER_ENV,
        *API,
        "multi_turn.debug=true",
        "multi_turn.env=customer_service",
        'multi_turn.verify_judge.methods=["multiple_questions"]',
        f"data.val_files={ENV}/customer_service/direct/paprika/test.parquet",
        "data.max_response_length=100",
        "data.max_prompt_length=3000",
    ],
}
LINES = {
    **{name: [*TRAINING, *more] for name, more in TRAINING_LINES.items()},
    **{name: [*EVALUATION, *more] for name, more in EVALUATION_LINES.items()},
}


def filled(name: str) -> list[str]:
    """The words of a launch line, with its environment variables filled in."""
    gpus = "8" if "8xa100" in name else "2"
    line = [text.replace("NAME", name).replace("GPUS", gpus) for text in LINES[name]]
    return [text.replace("BASE", "org/policy").replace("ORACLE", "org/judge") for text in line]
