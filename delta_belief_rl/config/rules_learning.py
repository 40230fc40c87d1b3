"""Rules on beliefs, batches, losses and sampling; see ``rules``."""

from __future__ import annotations

from collections.abc import Iterator

from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.schema_actor import Rollout, ValSampling
from delta_belief_rl.config.schema_algo import GROUP_ESTIMATORS

TRAINABLE_ROLES = ("actor_rollout", "actor_rollout_ref")


def belief(config: RunConfig) -> Iterator[str]:
    """Belief rewards and the choice among candidate questions."""
    reward, actor = config.multi_turn.logprob_reward, config.actor_rollout_ref
    sampling = config.multi_turn.logprob_sampling
    if reward.clip_min >= reward.clip_max:
        yield (
            "multi_turn.logprob_reward.clip_min must be less than "
            "multi_turn.logprob_reward.clip_max."
        )
    if {"pacr", "potential"} <= set(reward.methods):
        yield "multi_turn.logprob_reward.methods holds pacr and potential; keep one of them."
    for name, value in (("dead_band", reward.dead_band), ("std_floor", reward.std_floor)):
        if value < 0:
            yield f"multi_turn.logprob_reward.{name} must not be negative, not {value}."
    if not 0 <= sampling.p_best <= 1:
        yield f"multi_turn.logprob_sampling.p_best must lie in [0, 1], not {sampling.p_best}."
    if sampling.enabled and actor.rollout.n < 2:
        yield (
            "multi_turn.logprob_sampling needs candidates to choose from: set "
            "actor_rollout_ref.rollout.n to 2 or more."
        )
    if not sampling.enabled and actor.rollout.n > 1:
        yield (
            "actor_rollout_ref.rollout.n is the number of candidate questions of "
            "multi_turn.logprob_sampling; for the group size set multi_turn.train.n."
        )
    fades = config.algorithm.process_reward.channel
    if fades == "belief" and not reward.enabled and not config.trainer.val_only:
        yield (
            "algorithm.process_reward.channel=belief fades a reward that is not paid: set "
            "multi_turn.logprob_reward.enabled=true."
        )
    yield from _candidates(config)
    if not (reward.enabled or sampling.enabled):
        return
    if actor.role not in TRAINABLE_ROLES:
        yield (
            "Beliefs need actor_rollout_ref.role=actor_rollout or actor_rollout_ref, not "
            f"{actor.role}."
        )
    if actor.model.api_model_name:
        yield (
            "Beliefs need the policy's own log-probs, which an API does not give: set "
            "multi_turn.logprob_reward.enabled=false or "
            "actor_rollout_ref.model.api_model_name=null."
        )
    yield from _belief_model(config)


def _candidates(config: RunConfig) -> Iterator[str]:
    sampling, rollout = config.multi_turn.logprob_sampling, config.actor_rollout_ref.rollout
    for name, count in (("best_n", sampling.best_n), ("worst_n", sampling.worst_n)):
        if count < 0:
            yield f"multi_turn.logprob_sampling.{name} must not be negative, not {count}."
    if not sampling.enabled:
        return
    games, evaluates = config.multi_turn.train.n, config.trainer.val_only
    if not evaluates and sampling.best_n + sampling.worst_n > games > 1:
        yield (
            "multi_turn.logprob_sampling.best_n + worst_n must not exceed multi_turn.train.n="
            f"{games}."
        )
    if rollout.max_num_seqs < rollout.n:
        yield (
            f"actor_rollout_ref.rollout.max_num_seqs={rollout.max_num_seqs} has no room for the "
            f"{rollout.n} candidates of one game: raise it to {rollout.n} or more."
        )
    if evaluates and (rollout.val_kwargs.temperature == 0 or not rollout.val_kwargs.do_sample):
        yield (
            "Greedy decoding makes all candidates of multi_turn.logprob_sampling equal: set "
            "actor_rollout_ref.rollout.val_kwargs.temperature above 0 and do_sample=true."
        )


def _belief_model(config: RunConfig) -> Iterator[str]:
    reward, model = config.multi_turn.logprob_reward, config.actor_rollout_ref.model
    same = {"ref": "ema"}
    sides = {same.get(name, name) for name in (reward.base_model, reward.step_model)}
    for method in ("pacr", "potential"):
        if method in reward.methods and len(sides) > 1:
            yield (
                f"multi_turn.logprob_reward.methods={method} compares beliefs of one model: set "
                "base_model and step_model alike."
            )
    for name, choice in (("base_model", reward.base_model), ("step_model", reward.step_model)):
        full = f"multi_turn.logprob_reward.{name}={choice}"
        slow = "ema" in [adapter.name for adapter in model.adapters]
        if choice in ("ref", "ema") and not (model.lora_rank and slow):
            yield (
                f"{full} needs an adapter called ema: set actor_rollout_ref.model.lora_rank "
                "and list "
                "ema in actor_rollout_ref.model.adapters."
            )
        if choice == "base" and not model.lora_rank:
            yield f"{full} needs LoRA (actor_rollout_ref.model.lora_rank above 0)."


def batches(config: RunConfig) -> Iterator[str]:
    """Secrets, games and tokens of a step divide."""
    if config.trainer.val_only:
        return
    data, update, turns = config.data, config.actor_rollout_ref.actor, config.multi_turn
    batch, mini = data.train_batch_size, update.ppo_mini_batch_size
    if batch >= 1 and mini >= 1:
        if mini > batch:
            yield (
                f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} exceeds data.train_batch_size="
                f"{batch}; both count secrets, so lower the first or raise the second."
            )
        elif batch % mini:
            yield (
                f"data.train_batch_size={batch} secrets cannot be divided into optimizer steps of "
                f"{mini} secrets; make actor_rollout_ref.actor.ppo_mini_batch_size a divisor "
                f"of {batch}."
            )
    ranks = config.actor_rollout_ref.ngpus or 1
    if 1 <= mini * turns.train.n < ranks:
        yield (
            f"One optimizer step has {mini * turns.train.n} games for {ranks} training ranks; "
            "raise "
            "actor_rollout_ref.actor.ppo_mini_batch_size or multi_turn.train.n."
        )
    if config.algorithm.adv_estimator in GROUP_ESTIMATORS and turns.train.n == 1:
        yield (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares the games of one "
            "secret, so multi_turn.train.n must be at least 2; for single games use reinforce."
        )
    budgets = {
        "actor.ppo_max_token_len_per_gpu": (
            update.use_dynamic_bsz,
            update.ppo_max_token_len_per_gpu,
        ),
        "rollout.log_prob_max_token_len_per_gpu": (
            config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz,
            config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu,
        ),
    }
    for name, (used, budget) in budgets.items():
        if used and budget < data.max_prompt_length:
            yield (
                f"actor_rollout_ref.{name}={budget} cannot hold one game of "
                f"data.max_prompt_length={data.max_prompt_length} tokens; raise it."
            )


def loss(config: RunConfig) -> Iterator[str]:
    """Clips, optimizer and discounts lie in their ranges."""
    update, algorithm = config.actor_rollout_ref.actor, config.algorithm
    low, high = update.clip_ratio_low, update.clip_ratio_high
    clips = {
        "clip_ratio": update.clip_ratio,
        "clip_ratio_low": update.clip_ratio if low is None else low,
        "clip_ratio_high": update.clip_ratio if high is None else high,
    }
    for name, value in clips.items():
        if value <= 0 or (name != "clip_ratio_high" and value >= 1):
            upper = "" if name == "clip_ratio_high" else " and below 1"
            yield f"actor_rollout_ref.actor.{name} must be above 0{upper}, not {value}."
    if update.clip_ratio_c <= 1:
        yield f"actor_rollout_ref.actor.clip_ratio_c must be above 1, not {update.clip_ratio_c}."
    optim = update.optim
    above = {"actor.optim.lr": optim.lr, "actor.grad_clip": update.grad_clip}
    for name, value in above.items():
        if value <= 0:
            yield f"actor_rollout_ref.{name} must be above 0, not {value}."
    for value in optim.betas:
        if not 0 <= value < 1:
            yield f"actor_rollout_ref.actor.optim.betas must lie in [0, 1), not {value}."
    if not 0 <= optim.lr_warmup_steps_ratio <= 1:
        yield "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio must lie in [0, 1]."
    if optim.min_lr_ratio is not None and not 0 <= optim.min_lr_ratio <= 1:
        yield "actor_rollout_ref.actor.optim.min_lr_ratio must lie in [0, 1]."
    if optim.min_lr_ratio is not None and optim.warmup_style == "constant":
        yield (
            "actor_rollout_ref.actor.optim.min_lr_ratio needs warmup_style=cosine; remove one "
            "of them."
        )
    yield from _kl_reward(config)
    if algorithm.clip_adv_min >= algorithm.clip_adv_max:
        yield "algorithm.clip_adv_min must be less than algorithm.clip_adv_max."
    if not 0 <= algorithm.gamma <= 1:
        yield f"algorithm.gamma must lie in [0, 1], not {algorithm.gamma}."
    not_negative = {
        "std_floor": algorithm.std_floor,
        "mt_grpo.turn_advantage_w": algorithm.mt_grpo.turn_advantage_w,
        "gigpo.step_advantage_w": algorithm.gigpo.step_advantage_w,
        "hgpo.history": algorithm.hgpo.history,
        "hgpo.length_weight_alpha": algorithm.hgpo.length_weight_alpha,
    }
    for name, value in not_negative.items():
        if value < 0:
            yield f"algorithm.{name} must not be negative, not {value}."
    model = config.actor_rollout_ref.model
    if not 0 <= model.ema_beta <= 1:
        yield f"actor_rollout_ref.model.ema_beta must lie in [0, 1], not {model.ema_beta}."


def _kl_reward(config: RunConfig) -> Iterator[str]:
    algorithm, model = config.algorithm, config.actor_rollout_ref.model
    control = algorithm.kl_ctrl
    if control.kl_coef < 0:
        yield f"algorithm.kl_ctrl.kl_coef must not be negative, not {control.kl_coef}."
    for name, value in (("horizon", control.horizon), ("target_kl", control.target_kl)):
        if value <= 0:
            yield f"algorithm.kl_ctrl.{name} must be above 0, not {value}."
    rank = (model.adapters[0].r if model.adapters else 0) or model.lora_rank
    if algorithm.use_kl_in_reward and not rank:
        yield (
            "algorithm.use_kl_in_reward compares with the policy without its adapter: set "
            "actor_rollout_ref.model.lora_rank above 0, or algorithm.use_kl_in_reward=false."
        )


def abort(config: RunConfig) -> Iterator[str]:
    """Limits at which a run stops by itself."""
    limits = config.trainer.abort
    for name in ("nan_gradients", "patience"):
        steps = getattr(limits, name)
        if steps is not None and steps < 1:
            yield f"trainer.abort.{name} must be at least 1, not {steps}."
    if limits.min_entropy is not None and limits.min_entropy < 0:
        yield f"trainer.abort.min_entropy must not be negative, not {limits.min_entropy}."
    for name in ("max_repeated_chars", "max_invalid_turns"):
        share = getattr(limits, name)
        if share is not None and not 0 <= share <= 1:
            yield f"trainer.abort.{name} must lie in [0, 1], not {share}."


def sampling(config: RunConfig) -> Iterator[str]:
    """Temperatures and cuts of policy and judge."""
    rollout = config.actor_rollout_ref.rollout
    samplings: dict[str, Rollout | ValSampling] = {
        "actor_rollout_ref.rollout": rollout,
        "actor_rollout_ref.rollout.val_kwargs": rollout.val_kwargs,
        "judge_rollout.rollout.val_kwargs": config.judge_rollout.rollout.val_kwargs,
    }
    for name, sampling in samplings.items():
        if sampling.temperature < 0:
            yield f"{name}.temperature must not be negative, not {sampling.temperature}."
        if not 0 < sampling.top_p <= 1:
            yield f"{name}.top_p must be above 0 and at most 1, not {sampling.top_p}."
        if sampling.top_k < 1 and sampling.top_k != -1:
            yield f"{name}.top_k must be positive, or -1 for all tokens, not {sampling.top_k}."
    if not config.trainer.val_only and (rollout.temperature == 0 or not rollout.do_sample):
        yield (
            "Greedy decoding makes all games of a secret equal, so nothing can be learnt: set "
            "actor_rollout_ref.rollout.temperature above 0 and do_sample=true."
        )
