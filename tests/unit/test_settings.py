"""From the configuration tree to the settings of each room."""

from __future__ import annotations

from typing import Any

import pytest

from delta_belief_rl.algo.losses.policy import PolicyLossSettings
from delta_belief_rl.algo.losses.registry import LOSSES
from delta_belief_rl.algo.shapers.kl_reward import KlRewardSettings
from delta_belief_rl.belief.elicit import NEUTRAL_QUESTION
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.schema_algo import ESTIMATORS
from delta_belief_rl.judge.pool import question_key
from delta_belief_rl.trainer.actor import BASE, EMA, POLICY, ActorSettings
from delta_belief_rl.trainer.settings import (
    BELIEF_MODELS,
    actor_settings,
    adapter_settings,
    belief_models,
    candidate_settings,
    credit_method,
    env_settings,
    games_per_update,
    judge_cache_key,
    loss_settings,
    micro_batch_tokens,
    number_format,
    prior_exchange,
    sampling_params,
    score_tokens,
    shaping_options,
    single_update,
    template_options,
)
from delta_belief_rl.trainer.settings_rewards import kl_reward, reward_settings
from delta_belief_rl.types import UserError

MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
REWARD = "multi_turn.logprob_reward"
LORA = f"{MODEL}.lora_rank=4"


def config(*overrides: str) -> RunConfig:
    return load_config(list(overrides))[0]


def actor(*overrides: str, device: str = "cpu", total_steps: int = 40) -> ActorSettings:
    return actor_settings(config(*overrides), device, total_steps, num_threads=3)


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [("0.1", "0.4", (0.1, 0.4)), ("null", "0.4", (0.3, 0.4)), ("null", "null", (0.3, 0.3))],
)
def test_a_clip_that_is_not_set_falls_back_to_the_common_one(
    low: str, high: str, want: tuple[float, float]
) -> None:
    settings = loss_settings(
        config(
            f"{ACTOR}.clip_ratio=0.3",
            f"{ACTOR}.clip_ratio_low={low}",
            f"{ACTOR}.clip_ratio_high={high}",
        )
    )
    assert (settings.clip_ratio_low, settings.clip_ratio_high) == want


def test_P4_the_mismatch_guards_go_on_and_off_together() -> None:
    off = loss_settings(config(f"{ACTOR}.tis_imp_ratio_cap=-1"))
    assert off.tis_imp_ratio_cap <= 0
    assert off.sequence_reject_ratio == 0
    on = loss_settings(config(f"{ACTOR}.tis_imp_ratio_cap=3"))
    assert on.tis_imp_ratio_cap == 3
    assert on.sequence_reject_ratio == PolicyLossSettings().sequence_reject_ratio > 1


def test_all_knobs_of_the_loss_arrive() -> None:
    settings = actor(
        f"{ACTOR}.clip_ratio_c=4",
        f"{ACTOR}.loss_agg_mode=turn-mean",
        f"{ACTOR}.entropy_coeff=0.02",
        f"{ACTOR}.grad_clip=0.5",
        f"{ROLLOUT}.temperature=0.7",
    )
    assert settings.loss.clip_ratio_c == 4
    assert settings.loss.loss_agg_mode == "turn-mean"
    assert settings.entropy_coeff == 0.02
    assert settings.grad_clip == 0.5
    assert settings.temperature == 0.7
    assert settings.num_threads == 3


def test_A15_the_kl_term_brings_the_view_it_needs_and_only_then() -> None:
    off = actor(LORA, f"{ACTOR}.use_kl_loss=false", f"{ACTOR}.kl_loss_coef=0.3")
    assert (off.kl_coef, off.views) == (0.0, ())
    on = actor(
        LORA, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.3", f"{ACTOR}.kl_loss_type=k2"
    )
    assert (on.kl_coef, on.kl_type, on.views) == (0.3, "k2", (BASE,))


# --- the optimizer and the batches ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "ratio", "want"), [(-1, 0.1, 4), (-1, 0.0, 0), (7, 0.1, 7), (0, 0.5, 0)]
)
def test_warm_up_is_a_share_of_all_steps_unless_it_is_given_in_steps(
    steps: int, ratio: float, want: int
) -> None:
    settings = actor(
        f"{ACTOR}.optim.lr_warmup_steps={steps}", f"{ACTOR}.optim.lr_warmup_steps_ratio={ratio}"
    )
    assert settings.optimizer.warmup_steps == want
    assert settings.optimizer.total_steps == 40


def test_all_knobs_of_the_optimizer_arrive() -> None:
    optimizer = actor(
        f"{ACTOR}.optim.lr=0.003",
        f"{ACTOR}.optim.betas=[0.8,0.9]",
        f"{ACTOR}.optim.weight_decay=0.2",
        f"{ACTOR}.optim.warmup_style=cosine",
        f"{ACTOR}.optim.min_lr_ratio=0.1",
    ).optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (0.003, (0.8, 0.9), 0.2)
    assert (optimizer.schedule, optimizer.min_ratio) == ("cosine", 0.1)
    assert actor(f"{ACTOR}.optim.min_lr_ratio=null").optimizer.min_ratio == 0.0


@pytest.mark.parametrize(
    ("mini", "epochs", "want"), [(8, 1, True), (4, 1, False), (8, 2, False), (9, 1, True)]
)
def test_P6_the_old_policy_is_the_new_one_only_with_one_optimizer_step(
    mini: int, epochs: int, want: bool
) -> None:
    overrides = (
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size={mini}",
        f"{ACTOR}.ppo_epochs={epochs}",
    )
    assert single_update(config(*overrides)) is want
    assert actor(*overrides).old_is_new is want


def test_games_of_an_optimizer_step_are_secrets_times_games() -> None:
    assert games_per_update(config(f"{ACTOR}.ppo_mini_batch_size=3", "multi_turn.train.n=5")) == 15


def test_budgets_are_tokens_or_games_of_the_longest_kind() -> None:
    common = ("data.max_prompt_length=100",)
    games = config(
        *common,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=5",
    )
    assert (micro_batch_tokens(games), score_tokens(games)) == (300, 500)
    tokens = config(
        *common,
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu=777",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=true",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu=888",
    )
    assert (micro_batch_tokens(tokens), score_tokens(tokens)) == (777, 888)
    assert actor(f"{ROLLOUT}.log_prob_use_dynamic_bsz=true").score_tokens == 16384


@pytest.mark.parametrize(
    ("name", "device", "want"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "cuda", "bfloat16"),
        ("auto", "cuda:1", "bfloat16"),
        ("float16", "cpu", "float16"),
        ("float32", "cuda", "float32"),
    ],
)
def test_the_automatic_number_format_follows_the_device(name: str, device: str, want: str) -> None:
    assert number_format(name, device) == want
    assert actor(f"{ACTOR}.dtype={name}", device=device).dtype == want


# --- adapters and beliefs -------------------------------------------------------------------------


def test_the_published_name_of_the_slow_adapter_means_the_slow_adapter() -> None:
    assert BELIEF_MODELS == {"actor": POLICY, "ref": EMA, "ema": EMA, "base": BASE}
    for name in ("ref", "ema"):
        cfg = config(LORA, f"{REWARD}.enabled=true", f"{REWARD}.base_model={name}")
        assert belief_models(cfg) == (POLICY, EMA)
        assert adapter_settings(cfg).ema
        assert actor_settings(cfg, "cpu", 1, None).beliefs == (POLICY, EMA)


def test_a_model_is_asked_once_and_none_without_the_belief_reward() -> None:
    same = (LORA, f"{REWARD}.base_model=ema", f"{REWARD}.step_model=ref")
    assert belief_models(config(*same, f"{REWARD}.enabled=true")) == (EMA,)
    off = config(*same, f"{REWARD}.enabled=false")
    assert belief_models(off) == ()
    assert not adapter_settings(off).ema


def test_a_frozen_belief_model_needs_no_slow_adapter() -> None:
    cfg = config(LORA, f"{REWARD}.enabled=true", f"{REWARD}.base_model=base")
    assert belief_models(cfg) == (POLICY, BASE)
    assert not adapter_settings(cfg).ema


def test_the_first_adapter_of_the_list_is_the_one_trained() -> None:
    text = (
        f"{MODEL}.adapters=[{{name: mine, r: 4, alpha: 16, target_modules: [q_proj, v_proj], "
        "exclude_modules: o_proj}, {name: ema, r: 4, alpha: 16}]"
    )
    adapter = adapter_settings(
        config(LORA, text, f"{MODEL}.ema_beta=0.5", f"{MODEL}.ema_warmup_steps=3")
    )
    assert (adapter.rank, adapter.alpha) == (4, 16.0)
    assert adapter.target_modules == ("q_proj", "v_proj")
    assert adapter.exclude_modules == ("o_proj",)
    assert (adapter.ema_beta, adapter.ema_warmup_steps) == (0.5, 3)


def test_the_scale_of_an_adapter_follows_its_rank_where_it_is_not_set() -> None:
    assert adapter_settings(config(LORA)).alpha == 4.0
    assert adapter_settings(config(LORA, f"{MODEL}.lora_alpha=32")).alpha == 32.0
    assert adapter_settings(config()).rank == 0


def test_pacr_and_potential_choose_the_difference_and_are_no_transforms() -> None:
    plain = shaping_options(config(f"{REWARD}.methods=[episode_centering,tanh]"))
    assert (plain.difference, plain.methods) == ("step", ("episode_centering", "tanh"))
    pacr = shaping_options(config(f"{REWARD}.methods=[pacr,tanh]"))
    assert (pacr.difference, pacr.methods) == ("running_maximum", ("tanh",))
    potential = shaping_options(config(f"{REWARD}.methods=[potential]"))
    assert (potential.difference, potential.methods) == ("potential", ())


@pytest.mark.parametrize(
    ("winning", "normalised", "want"),
    [("auto", True, "drop"), ("auto", False, "keep"), ("keep", True, "keep")],
)
def test_the_winning_turn_is_dropped_with_normalised_rewards_unless_it_is_said_otherwise(
    winning: str, normalised: bool, want: str
) -> None:
    options = shaping_options(
        config(
            f"{REWARD}.winning_turn={winning}",
            f"{REWARD}.normalised={normalised}",
            f"{REWARD}.clip_max=3",
            "multi_turn.max_turns.train=7",
        )
    )
    assert options.winning_turn == want
    assert (options.normalised, options.clip_max, options.turn_budget) == (normalised, 3.0, 7)


def test_the_guards_of_the_belief_reward_arrive_and_are_off_by_default() -> None:
    plain = shaping_options(config())
    assert (plain.first_turn, plain.dead_band, plain.std_floor, plain.gamma) == ("keep", 0, 1e-8, 1)
    assert prior_exchange(config(), "Yes") is None
    cfg = config(
        f"{REWARD}.first_turn=drop",
        f"{REWARD}.dead_band=0.1",
        f"{REWARD}.std_floor=0.2",
        f"{REWARD}.prior_form=reply",
        "algorithm.gamma=0.9",
    )
    options = shaping_options(cfg)
    assert (options.first_turn, options.dead_band) == ("drop", 0.1)
    assert (options.std_floor, options.gamma) == (0.2, 0.9)
    assert prior_exchange(cfg, "Yes") == (NEUTRAL_QUESTION, "Yes")


@pytest.mark.parametrize("name", list(LOSSES))
def test_every_policy_loss_reaches_the_actor(name: str) -> None:
    assert actor(f"{ACTOR}.policy_loss={name}").loss_name == name
    assert actor().loss_name == "ppo"


def test_A15_the_kl_reward_brings_the_view_it_needs_and_all_its_knobs() -> None:
    assert kl_reward(config()) is None
    words = (
        LORA,
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_penalty=abs",
        "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.3, horizon: 50, target_kl: 0.2}",
    )
    assert actor(*words).views == (BASE,)
    assert actor(*words).kl_coef == 0.0
    reward = kl_reward(config(*words))
    assert reward is not None
    assert reward.settings == KlRewardSettings("abs", "adaptive", 0.3, 50, 0.2)


# --- sampling, rewards, credit, rules -------------------------------------------------------------


def test_C2_sampling_has_its_own_settings_in_training_and_validation() -> None:
    cfg = config(
        f"{ROLLOUT}.temperature=1.1",
        f"{ROLLOUT}.top_p=0.95",
        f"{ROLLOUT}.top_k=50",
        f"{ROLLOUT}.val_kwargs.temperature=0.6",
        "data.max_response_length=33",
    )
    train, val = sampling_params(cfg, "train"), sampling_params(cfg, "val")
    assert (train.temperature, train.top_p, train.top_k, train.max_tokens) == (1.1, 0.95, 50, 33)
    assert (val.temperature, val.top_p, val.top_k, val.max_tokens) == (0.6, 0.8, 20, 33)


@pytest.mark.parametrize(
    ("kind", "override"),
    [
        ("greedy", f"{ROLLOUT}.temperature=1"),
        ("train", f"{ROLLOUT}.do_sample=false"),
        ("val", f"{ROLLOUT}.val_kwargs.do_sample=false"),
    ],
)
def test_greedy_sampling_has_temperature_zero_and_no_cuts(kind: str, override: str) -> None:
    params = sampling_params(config(override), kind)
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 1.0, -1)


def test_log_probs_of_a_greedy_run_are_at_temperature_one() -> None:
    assert actor(f"{ROLLOUT}.do_sample=false", f"{ROLLOUT}.temperature=0.3").temperature == 1.0


def test_the_prices_of_all_signals_arrive() -> None:
    signals = "multi_turn.reward.signals"
    rewards = reward_settings(
        config(
            "multi_turn.win_rule=strict",
            f"{signals}.win=3",
            f"{signals}.invalid_action=-4",
            f"{signals}.repeated_action=-2",
            f"{signals}.traj_len=-0.5",
            f"{signals}.all_valid=0.25",
            f"{signals}.wrong_guess=-0.75",
            "multi_turn.reward.weight_elicit=0.1",
        )
    )
    assert rewards.rule == "strict"
    assert (rewards.win, rewards.invalid_action, rewards.repeated_action) == (3.0, -4.0, -2.0)
    assert (rewards.traj_len, rewards.all_valid, rewards.wrong_guess) == (-0.5, 0.25, -0.75)
    assert rewards.weight_elicit == 0.1


def test_the_knobs_of_the_estimators_arrive() -> None:
    words = ("multi_turn.train.n=2", "algorithm.gamma=0.9", "algorithm.parity=masked")

    def made(name: str, *more: str) -> Any:
        credit: Any = credit_method(config(f"algorithm.adv_estimator={name}", *words, *more))
        return credit.settings

    assert made("reinforce").gamma == 0.9
    plus = made("reinforce_plus_plus")
    assert (plus.gamma, plus.parity) == (0.9, "ours")
    assert made("reinforce_plus_plus_baseline").parity == "ours"
    assert made("reinforce_plus_plus", "algorithm.parity=reference").parity == "reference"
    many = made(
        "multi_turn_reinforce",
        "algorithm.norm_adv_in_mtr=true",
        "algorithm.clip_adv_in_mtr=true",
        "algorithm.clip_adv_min=-2",
        "algorithm.clip_adv_max=4",
        "algorithm.only_propagate_eog_in_mtr=false",
    )
    assert (many.gamma, many.norm_adv_in_mtr, many.clip_adv_in_mtr) == (0.9, True, True)
    assert (many.clip_adv_min, many.clip_adv_max) == (-2.0, 4.0)
    assert not many.only_propagate_eog_in_mtr


def test_the_knobs_of_estimators_with_settings_of_their_own_arrive() -> None:
    def made(name: str, *more: str) -> Any:
        words = (f"algorithm.adv_estimator={name}", "multi_turn.train.n=2", "algorithm.gamma=0.9")
        credit: Any = credit_method(config(*words, *more))
        return credit.settings

    raw = "algorithm.norm_adv_by_std_in_grpo=false"
    assert not made("grpo_passk", raw).norm_adv_by_std_in_grpo
    apart = made(
        "mt_grpo",
        "algorithm.mt_grpo.turn_advantage_w=0.5",
        "algorithm.mt_grpo.turn_credit=boundary",
    )
    assert (apart.turn_advantage_w, apart.turn_credit) == (0.5, "boundary")
    steps = made(
        "gigpo",
        raw,
        "algorithm.gigpo.step_advantage_w=0.25",
        "algorithm.gigpo.episode_weighting=turn",
    )
    assert (steps.gamma, steps.norm_adv_by_std_in_grpo) == (0.9, False)
    assert (steps.step_advantage_w, steps.episode_weighting) == (0.25, "turn")
    past = made(
        "hgpo",
        raw,
        "algorithm.hgpo.history=4",
        "algorithm.hgpo.length_weight_alpha=0.5",
        "algorithm.hgpo.base_group=true",
        "algorithm.hgpo.skip_zero=false",
    )
    assert (past.gamma, past.norm_adv_by_std_in_grpo, past.history) == (0.9, False, 4)
    assert (past.length_weight_alpha, past.base_group, past.skip_zero) == (0.5, True, False)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_is_built_from_the_configuration(name: str) -> None:
    credit = credit_method(config(f"algorithm.adv_estimator={name}", "multi_turn.train.n=2"))
    assert name.replace("_", "") in type(credit).__name__.lower()


def test_A16_a_group_estimator_with_single_games_is_refused() -> None:
    with pytest.raises(UserError, match="group size is 1"):
        credit_method(config("algorithm.adv_estimator=grpo_turn_rtg", "multi_turn.train.n=1"))


def test_the_rules_of_the_game_arrive() -> None:
    env = env_settings(
        config(
            "multi_turn.verify_judge.methods=[exact,length]",
            "multi_turn.candidate_lists=refuse",
            f"{ACTOR}.thinking=true",
        ),
        max_turns=6,
    )
    assert (env.max_turns, env.verify_methods) == (6, ("exact", "length"))
    assert env.candidate_lists == "refuse"
    assert env.question_tag
    assert env_settings(config("multi_turn.verify_judge.enabled=false"), 6).verify_methods == ()


def test_replies_are_cached_only_where_they_are_a_function_of_the_question() -> None:
    world = ("data.world=everyday", "judge_rollout.name=world")
    assert judge_cache_key(config(*world, "multi_turn.duplicates=code")) is question_key
    assert judge_cache_key(config(*world, "multi_turn.duplicates=judge")) is None
    assert judge_cache_key(config("judge_rollout.name=world", "multi_turn.duplicates=code")) is None


def test_T11_thinking_is_a_variable_of_the_chat_template() -> None:
    assert template_options(config(f"{ACTOR}.thinking=true")) == {"enable_thinking": True}
    assert template_options(config()) == {"enable_thinking": False}


def test_T11_further_variables_reach_the_chat_template_beside_the_flag_of_thinking() -> None:
    options = template_options(
        config(f"{MODEL}.chat_template_kwargs={{tools: null, style: brief}}")
    )
    assert options == {"tools": None, "style": "brief", "enable_thinking": False}


def test_candidates_are_chosen_in_training_or_in_an_evaluation_alone() -> None:
    on = ("multi_turn.logprob_sampling.enabled=true", f"{ROLLOUT}.n=8", "multi_turn.train.n=6")
    knobs = ("best_n=3", "worst_n=1", "p_best=0.5")
    sampling = [f"multi_turn.logprob_sampling.{knob}" for knob in knobs]
    training = config(*on, *sampling)
    found = candidate_settings(training, evaluation=False)
    assert found is not None
    assert (found.count, found.best_n, found.worst_n, found.p_best) == (8, 3, 1, 0.5)
    assert found.grouped
    assert candidate_settings(training, evaluation=True) is None
    alone = candidate_settings(config(*on, "multi_turn.train.n=1"), evaluation=False)
    assert alone is not None
    assert not alone.grouped
    evaluated = config(*on, *sampling, "trainer.val_only=true", "multi_turn.val.n=8")
    found = candidate_settings(evaluated, evaluation=True)
    assert found is not None
    assert not found.grouped
    assert (found.count, found.p_best) == (8, 0.5)
    assert candidate_settings(evaluated, evaluation=False) is None
    assert candidate_settings(config(f"{ROLLOUT}.n=1"), evaluation=False) is None
