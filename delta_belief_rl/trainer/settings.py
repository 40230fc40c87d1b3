"""From the configuration tree to the small settings that each room takes.

Only this file knows both sides, so no room below depends on the configuration's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields
from typing import Any

from delta_belief_rl.algo import SCORERS, build_credit, find_method
from delta_belief_rl.algo.base import VALUES, VIEW, Credit, Scorer, check_group_size, require_range
from delta_belief_rl.algo.chain import chain_of, elements_of, reads_of
from delta_belief_rl.algo.credit.views import AsksViews
from delta_belief_rl.algo.losses.policy import PolicyLossSettings
from delta_belief_rl.algo.scorers.hints import HintSettings
from delta_belief_rl.belief.elicit import NEUTRAL_QUESTION
from delta_belief_rl.belief.shaping import ShapingOptions
from delta_belief_rl.config.game_settings import question_tag
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.schema_algo import Algorithm
from delta_belief_rl.engines.base import SamplingParams
from delta_belief_rl.envs.base import JudgeRequest
from delta_belief_rl.envs.twenty_questions import TwentyQuestionsSettings
from delta_belief_rl.judge.pool import question_key
from delta_belief_rl.judge.prompts import opening_key
from delta_belief_rl.rollout.candidates import CandidateSettings
from delta_belief_rl.trainer.actor import BASE, EMA, POLICY, ActorSettings, AdapterSettings
from delta_belief_rl.trainer.critic import CriticSettings
from delta_belief_rl.trainer.distil import distillation_of
from delta_belief_rl.trainer.learner import LearnerSettings
from delta_belief_rl.trainer.optimizer import OptimizerSettings
from delta_belief_rl.trainer.own_credit import own_credit
from delta_belief_rl.trainer.rubric_settings import rubric_contexts
from delta_belief_rl.trainer.settings_learners import learners_of
from delta_belief_rl.types import UserError

BELIEF_MODELS = {"actor": POLICY, "ref": EMA, "ema": EMA, "base": BASE}
"""The configuration's names of belief models; ``ref`` is the slow adapter's published name."""
READERS = {"policy": POLICY, "base": BASE, "ema": EMA}
"""Who reads a view, by the name that its scorer has for it."""


def adapter_settings(cfg: RunConfig) -> AdapterSettings:
    """LoRA of the policy: the list's first adapter is trained, one called ``ema`` follows it."""
    model = cfg.actor_rollout_ref.model
    first = model.adapters[0] if model.adapters else None
    rank = (first.r if first else 0) or model.lora_rank
    exclude = (first.exclude_modules if first else None) or model.exclude_modules or ()
    return AdapterSettings(
        rank=rank,
        alpha=float((first.alpha if first else 0) or model.lora_alpha or rank),
        target_modules=first.target_modules if first else model.target_modules,
        exclude_modules=(exclude,) if isinstance(exclude, str) else tuple(exclude),
        ema=EMA in belief_models(cfg) or any(ask.model == "ema" for ask in credit_scorers(cfg)),
        ema_beta=model.ema_beta,
        ema_warmup_steps=model.ema_warmup_steps,
    )


def belief_models(cfg: RunConfig) -> tuple[str, ...]:
    """Models whose belief is needed, without repetition; empty when the belief reward is off."""
    reward = cfg.multi_turn.logprob_reward
    if not reward.enabled:
        return ()
    names = (reward.step_model, reward.base_model)
    return tuple(dict.fromkeys(BELIEF_MODELS[name] for name in names))


def shaping_options(cfg: RunConfig) -> ShapingOptions:
    """How beliefs become rewards.

    ``pacr`` and ``potential`` are rules of the difference, not transforms.
    """
    reward = cfg.multi_turn.logprob_reward
    difference = "step"
    if "pacr" in reward.methods:
        difference = "running_maximum"
    if "potential" in reward.methods:
        difference = "potential"
    winning = reward.winning_turn
    if winning == "auto":
        winning = "drop" if reward.normalised else "keep"
    return ShapingOptions(
        normalised=reward.normalised,
        methods=tuple(name for name in reward.methods if name not in ("pacr", "potential")),
        difference=difference,
        winning_turn=winning,
        first_turn=reward.first_turn,
        dead_band=reward.dead_band,
        clip_min=reward.clip_min,
        clip_max=reward.clip_max,
        tau=reward.tau,
        gamma=cfg.algorithm.gamma,
        std_floor=reward.std_floor,
        reference_parity=cfg.algorithm.parity == "reference",
        turn_budget=cfg.multi_turn.max_turns.train,
    )


def prior_exchange(cfg: RunConfig, yes: str) -> tuple[str, str] | None:
    """Question and reply in front of the first belief; None where it follows the prompt.

    Args:
        cfg: The configuration.
        yes: How the environment says yes.
    """
    form = cfg.multi_turn.logprob_reward.prior_form
    return (NEUTRAL_QUESTION, yes) if form == "reply" else None


def sampling_params(cfg: RunConfig, kind: str) -> SamplingParams:
    """How tokens are drawn: ``train``, ``val`` or ``greedy``."""
    rollout = cfg.actor_rollout_ref.rollout
    source: Any = rollout if kind == "train" else rollout.val_kwargs
    greedy = kind == "greedy" or not source.do_sample
    return SamplingParams(
        temperature=0.0 if greedy else source.temperature,
        top_p=1.0 if greedy else source.top_p,
        top_k=-1 if greedy else source.top_k,
        max_tokens=cfg.data.max_response_length,
    )


def loss_settings(cfg: RunConfig) -> PolicyLossSettings:
    """Clip, dual clip, truncated importance sampling and aggregation."""
    actor = cfg.actor_rollout_ref.actor
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    guarded = actor.tis_imp_ratio_cap > 0
    return PolicyLossSettings(
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=actor.loss_agg_mode,
        tis_imp_ratio_cap=actor.tis_imp_ratio_cap,
        sequence_reject_ratio=PolicyLossSettings().sequence_reject_ratio if guarded else 0.0,
    )


def actor_settings(
    cfg: RunConfig, device: str, total_steps: int, num_threads: int | None
) -> ActorSettings:
    """What a training rank needs to know."""
    ref = cfg.actor_rollout_ref
    actor, optim = ref.actor, ref.actor.optim
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = int(optim.lr_warmup_steps_ratio * total_steps)
    return ActorSettings(
        model_path=ref.model.path,
        adapter=adapter_settings(cfg),
        optimizer=OptimizerSettings(
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            warmup_steps=warmup,
            schedule=optim.warmup_style,
            min_ratio=optim.min_lr_ratio or 0.0,
            total_steps=total_steps,
            offload=device == "cuda" and actor.fsdp_config.optimizer_offload,
        ),
        loss=loss_settings(cfg),
        loss_name=actor.policy_loss,
        seed=cfg.seed,
        device=device,
        dtype=number_format(actor.dtype, device),
        num_threads=num_threads,
        gradient_checkpointing=ref.model.enable_gradient_checkpointing,
        use_liger=ref.model.use_liger,
        grad_clip=actor.grad_clip,
        temperature=ref.rollout.temperature if ref.rollout.do_sample else 1.0,
        entropy_coeff=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_type=actor.kl_loss_type,
        views=(BASE,) if actor.use_kl_loss or cfg.algorithm.use_kl_in_reward else (),
        contexts=(
            *((ask.view, READERS[ask.model]) for ask in credit_scorers(cfg)),
            *rubric_contexts(cfg),
        ),
        beliefs=belief_models(cfg),
        score_tokens=score_tokens(cfg),
        old_is_new=single_update(cfg),
        critic=critic_settings(cfg, device, total_steps),
        distil=None if cfg.trainer.val_only else distillation_of(credit_method(cfg)),
        learners=learner_settings(cfg, device, total_steps),
    )


def critic_settings(
    cfg: RunConfig, device: str = "cpu", total_steps: int = 1
) -> CriticSettings | None:
    """The critic of a method that needs values; None for all others, and for evaluations.

    Raises:
        UserError: A setting is out of its range, the critic's own adapter has no rank, or a warm-up
            is asked for without a critic.
    """
    needs = {name for part in elements_of(credit_method(cfg)) for name in part.requires}
    if cfg.trainer.val_only:
        return None
    if VALUES not in needs:
        if cfg.trainer.critic_warmup:
            raise UserError(
                f"trainer.critic_warmup={cfg.trainer.critic_warmup} is for a critic, which "
                f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} does not have; set it to 0."
            )
        return None
    critic, optim = cfg.critic, cfg.critic.optim
    if critic.form == "own" and not adapter_settings(cfg).rank:
        raise UserError(
            "critic.form=own needs LoRA adapters: set actor_rollout_ref.model.lora_rank, or "
            "critic.form=shared."
        )
    require_range("critic.optim.lr_warmup_steps_ratio", optim.lr_warmup_steps_ratio, 0.0, 1.0)
    if optim.min_lr_ratio is not None and optim.warmup_style == "constant":
        raise UserError(
            "critic.optim.min_lr_ratio needs critic.optim.warmup_style=cosine; remove one of them."
        )
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = int(optim.lr_warmup_steps_ratio * total_steps)
    offload = cfg.actor_rollout_ref.actor.fsdp_config.optimizer_offload
    return CriticSettings(
        form=critic.form,
        detach=critic.detach,
        vf_coef=critic.vf_coef,
        cliprange_value=critic.cliprange_value,
        grad_clip=critic.grad_clip,
        warmup_steps=cfg.trainer.critic_warmup,
        optimizer=OptimizerSettings(
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            warmup_steps=warmup,
            schedule=optim.warmup_style,
            min_ratio=optim.min_lr_ratio or 0.0,
            total_steps=total_steps,
            offload=device == "cuda" and offload,
        ),
    )


def learner_settings(
    cfg: RunConfig, device: str = "cpu", total_steps: int = 1
) -> tuple[LearnerSettings, ...]:
    """The models that a method trains beside the policy; none in evaluations."""
    if cfg.trainer.val_only:
        return ()
    needs = {name for part in elements_of(credit_method(cfg)) for name in part.requires}
    return learners_of(cfg, needs, device, total_steps)


def number_format(name: str, device: str) -> str:
    """The torch dtype that ``auto`` stands for on a device."""
    if name != "auto":
        return name
    return "bfloat16" if device.startswith("cuda") else "float32"


def single_update(cfg: RunConfig) -> bool:
    """Whether a training step has one optimizer step, so that the old policy is the current one."""
    actor = cfg.actor_rollout_ref.actor
    return actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= cfg.data.train_batch_size


def games_per_update(cfg: RunConfig) -> int:
    """Games of one optimizer step."""
    return cfg.actor_rollout_ref.actor.ppo_mini_batch_size * cfg.multi_turn.train.n


def micro_batch_tokens(cfg: RunConfig) -> int:
    """Token budget of an update micro-batch on one rank.

    A number of games is turned into a budget by the longest game that is allowed, so that both
    settings mean a bound on memory.
    """
    actor = cfg.actor_rollout_ref.actor
    if actor.use_dynamic_bsz:
        return actor.ppo_max_token_len_per_gpu
    return actor.ppo_micro_batch_size_per_gpu * cfg.data.max_prompt_length


def score_tokens(cfg: RunConfig) -> int:
    """Token budget of one forward of the score pass on one rank."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.log_prob_use_dynamic_bsz:
        return rollout.log_prob_max_token_len_per_gpu
    return rollout.log_prob_micro_batch_size_per_gpu * cfg.data.max_prompt_length


def credit_method(cfg: RunConfig) -> Credit:
    """The advantage estimator and the transforms behind it, with the knobs that they have."""
    algorithm = cfg.algorithm
    first = own_credit(cfg) or _credit_part(algorithm, algorithm.adv_estimator, transform=False)
    behind = [
        (name, _credit_part(algorithm, name, transform=True)) for name in algorithm.transforms
    ]
    credit = chain_of([(algorithm.adv_estimator, first), *behind])
    check_group_size(credit, cfg.multi_turn.train.n)
    return credit


def _credit_part(algorithm: Algorithm, name: str, transform: bool) -> Credit:
    """One method; a knob is looked for among its own settings first, then among the shared ones."""
    own = getattr(algorithm, name, None)
    shared = {
        "parity": "reference" if algorithm.parity == "reference" else "ours",
        "scale_by_std": algorithm.norm_adv_by_std_in_grpo,
    }
    knobs: dict[str, Any] = {}
    for item in fields(find_method(name, transform=transform)[1]):
        if own is not None and hasattr(own, item.name):
            knobs[item.name] = getattr(own, item.name)
        elif item.name in shared:
            knobs[item.name] = shared[item.name]
        elif hasattr(algorithm, item.name):
            knobs[item.name] = getattr(algorithm, item.name)
    return build_credit(name, knobs, transform=transform)


def credit_scorers(cfg: RunConfig, credit: Credit | None = None) -> tuple[Scorer, ...]:
    """What asks for the views that a method needs, each view once.

    Args:
        cfg: The configuration.
        credit: The method, where it is made already.

    Raises:
        UserError: Nothing makes one of them.
    """
    found: dict[str, Scorer] = {}
    parts = elements_of(credit or credit_method(cfg))
    for part in parts:
        own = part.scorers(cfg.multi_turn.win_rule) if isinstance(part, AsksViews) else ()
        found |= {scorer.view: scorer for scorer in own}
    for part in parts:
        for name in (*part.requires, *reads_of(part)):
            view = name.removeprefix(VIEW)
            # The base model reads the game itself, for the KL terms.
            if not name.startswith(VIEW) or view in found or view == BASE:
                continue
            if view not in SCORERS:
                raise UserError(
                    f"The credit method needs the view {view!r}, which nothing in this run makes: "
                    "choose another algorithm.adv_estimator."
                )
            found[view] = SCORERS[view](HintSettings(cfg.multi_turn.win_rule))
    return tuple(found.values())


def env_settings(
    cfg: RunConfig, max_turns: int, notices: Mapping[str, str] | None = None
) -> TwentyQuestionsSettings:
    """Rules of a game of 20 Questions."""
    turns = cfg.multi_turn
    verify = turns.verify_judge
    return TwentyQuestionsSettings(
        max_turns=max_turns,
        verify_methods=verify.methods if verify.enabled else (),
        false_positive_behavior=verify.false_positive_behavior,
        short_circuit=verify.short_circuit,
        win_rule=turns.win_rule,
        candidate_lists=turns.candidate_lists,
        duplicates=turns.duplicates,
        judge_history=cfg.judge_rollout.repeated_prompt and not judge_is_exact(cfg),
        question_tag=question_tag(cfg),
        notices=dict(notices or {}),
    )


def judge_is_exact(cfg: RunConfig) -> bool:
    """Whether a reply is a function of secret and question alone: the embedded world's judge."""
    return cfg.data.world is not None and cfg.judge_rollout.name in ("auto", "world")


def judge_cache_key(cfg: RunConfig) -> Callable[[JudgeRequest], Hashable] | None:
    """How replies may be cached; None where they are not a function of secret and question."""
    if judge_is_exact(cfg):
        return question_key if cfg.multi_turn.duplicates == "code" else None
    # Greedy or drawn from the request's own stream: either way a function of what the judge reads.
    return opening_key if cfg.judge_rollout.name in ("hf", "vllm", "api") else None


def template_options(cfg: RunConfig) -> dict[str, Any]:
    """Variables for the chat template; templates that do not know them ignore them."""
    actor = cfg.actor_rollout_ref
    return {**actor.model.chat_template_kwargs, "enable_thinking": actor.actor.thinking}


def candidate_settings(cfg: RunConfig, *, evaluation: bool) -> CandidateSettings | None:
    """How questions are chosen among candidates; None where the policy's own are played.

    The choice looks at the secret. Validations of a training run measure the policy, so they make
    none; an evaluation alone makes it in every game, whatever the number of games per secret.
    """
    sampling = cfg.multi_turn.logprob_sampling
    if not sampling.enabled or evaluation != cfg.trainer.val_only:
        return None
    return CandidateSettings(
        count=cfg.actor_rollout_ref.rollout.n,
        best_n=sampling.best_n,
        worst_n=sampling.worst_n,
        p_best=sampling.p_best,
        grouped=not evaluation and cfg.multi_turn.train.n > 1,
    )
