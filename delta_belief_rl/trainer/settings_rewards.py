"""From the configuration tree to what pays, prices and filters games before credit."""

from __future__ import annotations

from delta_belief_rl.algo.base import Shaper
from delta_belief_rl.algo.samplers.variance import VarianceSettings
from delta_belief_rl.algo.shapers.channels import ChannelShaper, RewardSettings
from delta_belief_rl.algo.shapers.clinical import ClinicalSettings
from delta_belief_rl.algo.shapers.decay import Decay, DecaySettings
from delta_belief_rl.algo.shapers.kl_reward import KlReward, KlRewardSettings
from delta_belief_rl.algo.shapers.length import LengthPrice, LengthPriceSettings
from delta_belief_rl.algo.shapers.normalise import NormaliseSettings
from delta_belief_rl.algo.shapers.prices import Prices
from delta_belief_rl.algo.shapers.requirements_met import TaskShaper
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.trainer.own_environment import task_rewards


def reward_shaper(cfg: RunConfig) -> Shaper:
    """What makes the reward channels.

    Raises:
        UserError: A number is out of its range, or is paid for what the environment does not say.
    """
    channels, rewards = (
        ChannelShaper(reward_settings(cfg), question_settings(cfg)),
        task_rewards(cfg),
    )
    if rewards is None:
        return channels
    return TaskShaper(channels, rewards, cfg.multi_turn.reward.weight_tasks)


def reward_settings(cfg: RunConfig) -> RewardSettings:
    """Signed prices of the reward channels."""
    signals = cfg.multi_turn.reward.signals
    return RewardSettings(
        rule=cfg.multi_turn.win_rule,
        win=signals.win,
        invalid_action=signals.invalid_action,
        repeated_action=signals.repeated_action,
        traj_len=signals.traj_len,
        all_valid=signals.all_valid,
        wrong_guess=signals.wrong_guess,
        weight_elicit=cfg.multi_turn.reward.weight_elicit,
    )


def question_settings(cfg: RunConfig) -> ClinicalSettings | None:
    """How questions are paid; None where they are not.

    Raises:
        UserError: A number is out of its range.
    """
    chosen = cfg.algorithm.clinical
    if not chosen.enabled:
        return None
    return ClinicalSettings(chosen.form, chosen.beta, chosen.cost)


def kl_reward(cfg: RunConfig) -> KlReward | None:
    """The price on divergence from the reference policy, where it is a reward."""
    algorithm, control = cfg.algorithm, cfg.algorithm.kl_ctrl
    if not algorithm.use_kl_in_reward:
        return None
    return KlReward(
        KlRewardSettings(
            kl_penalty=algorithm.kl_penalty,
            controller=control.type,
            kl_coef=control.kl_coef,
            horizon=control.horizon,
            target_kl=control.target_kl,
        )
    )


def prices(cfg: RunConfig, planned: int) -> Prices:
    """Everything that changes rewards behind their channels.

    Args:
        cfg: The configuration.
        planned: Updates of the whole run.

    Raises:
        UserError: A number is out of its range.
    """
    algorithm = cfg.algorithm
    long, fading, scale = (
        algorithm.overlong,
        algorithm.process_reward,
        algorithm.reward_normalisation,
    )
    length = None
    if long.enabled:
        data = cfg.data
        whole = data.max_response_length if long.unit == "turn" else data.max_prompt_length
        most = long.max_tokens or whole
        length = LengthPrice(LengthPriceSettings(most, long.buffer_tokens, long.factor, long.unit))
    decay = None
    if fading.channel:
        decay = Decay(
            DecaySettings(
                fading.weight,
                fading.schedule,
                fading.aggregation,
                fading.horizon,
                fading.half_life,
            ),
            planned,
        )
    normalise = NormaliseSettings(scale.method, scale.over, scale.clamp_low, scale.clamp_high)
    return Prices(length, decay, fading.channel, normalise)


def variance_settings(cfg: RunConfig) -> VarianceSettings:
    """Which groups stay under the rules ``top_k`` and ``share``."""
    chosen = cfg.algorithm.filter_groups
    rule = VarianceSettings().rule if chosen.rule == "differ" else chosen.rule
    return VarianceSettings(rule, chosen.keep, chosen.metric)
