"""What happens to rewards between their channels and credit, and which groups stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import training_fakes as fakes

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.shapers.channels import ChannelShaper, build_table
from delta_belief_rl.algo.shapers.prices import Prices
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.trainer.settings_rewards import prices, reward_settings, variance_settings
from delta_belief_rl.types import Group, TurnTable, UserError

PROCESS = "algorithm.process_reward"
LONG = "algorithm.overlong"
SCALE = "algorithm.reward_normalisation"


def config(*words: str) -> RunConfig:
    return load_config(["experiment=quickstart", *words])[0]


def paid(cfg: RunConfig, made: Prices, update: int = 0) -> TurnTable:
    """The table of some games whose turns bring belief, as a step makes it."""
    groups: Sequence[Group] = fakes.make_groups()
    table = build_table(groups)
    belief = np.linspace(-1.0, 2.0, table.num_rows)
    rewards = ChannelShaper(reward_settings(cfg)).shape(table, groups, belief)
    return made.change(replace(table, rewards=rewards, update=update))


def test_without_any_price_rewards_stay_as_they_are() -> None:
    cfg = config()
    made = prices(cfg, 10)
    assert made == Prices()
    table = paid(cfg, made)
    assert set(table.rewards) == {"outcome", "length", "validity", "guess", "belief"}
    assert made.scale(table) is table


def test_a_process_reward_fades_with_the_updates_and_is_gone_at_its_horizon() -> None:
    cfg = config(f"{PROCESS}.channel=belief", f"{PROCESS}.weight=0.5", f"{PROCESS}.horizon=10")
    made, plain = prices(cfg, 100), paid(cfg, Prices())
    turns = np.bincount(plain.traj)[plain.traj]
    for update, weight in ((0, 0.5), (5, 0.25), (10, 0.0), (11, 0.0)):
        table = paid(cfg, made, update)
        np.testing.assert_allclose(
            table.rewards["belief"], weight * plain.rewards["belief"] / turns, atol=1e-12
        )
        for name in ("outcome", "length", "validity"):
            np.testing.assert_array_equal(table.rewards[name], plain.rewards[name])


def test_from_its_horizon_on_credit_is_exactly_that_of_the_outcome() -> None:
    cfg = config(f"{PROCESS}.channel=belief", f"{PROCESS}.horizon=4")
    late = paid(cfg, prices(cfg, 100), update=4)
    alone = replace(late, rewards={n: r for n, r in late.rewards.items() if n != "belief"})
    credit = build_credit("grpo")
    np.testing.assert_array_equal(credit.apply(late).turns, credit.apply(alone).turns)


def test_an_open_horizon_is_half_of_the_planned_updates() -> None:
    cfg = config(f"{PROCESS}.channel=belief")
    made = prices(cfg, 20).decay
    assert made is not None
    assert made.horizon == 10
    with pytest.raises(UserError, match=f"{PROCESS}.horizon is 0"):
        prices(cfg, 0)


def test_long_games_are_charged_in_a_channel_of_their_own() -> None:
    cfg = config(f"{LONG}.enabled=true", f"{LONG}.max_tokens=12", f"{LONG}.buffer_tokens=8")
    table = paid(cfg, prices(cfg, 10))
    tokens = np.bincount(table.traj, weights=table.n_tokens)
    charged = np.bincount(table.traj, weights=table.rewards["overlong"])
    np.testing.assert_allclose(charged, -np.maximum(tokens - 4, 0) / 8)
    assert charged.min() < 0


def test_returns_on_one_scale_have_mean_zero_in_each_group_and_one_place() -> None:
    cfg = config(f"{SCALE}.method=mean_std")
    made = prices(cfg, 10)
    table = made.scale(paid(cfg, made))
    assert set(table.rewards) == {"normalised"}
    score = np.bincount(table.traj, weights=table.rewards["normalised"])
    for group in np.unique(table.group):
        mine = score[table.game_group() == group]
        assert abs(mean := float(mine.mean())) < 1e-9, mean
        assert mine.std(ddof=1) == pytest.approx(1.0, abs=1e-4)


def test_the_limit_of_a_game_is_where_the_whole_price_is_charged() -> None:
    for unit, limit in (("game", 256), ("turn", 16)):
        cfg = config(f"{LONG}.enabled=true", f"{LONG}.unit={unit}", f"{LONG}.buffer_tokens=8")
        made = prices(cfg, 10).length
        assert made is not None
        assert made.settings.max_tokens == limit


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((f"{LONG}.enabled=true", f"{LONG}.max_tokens=-1"), "max_tokens"),
        ((f"{LONG}.enabled=true", f"{LONG}.buffer_tokens=1000"), "buffer_tokens is 1000"),
        ((f"{PROCESS}.channel=belief", f"{PROCESS}.weight=-1"), "weight is -1"),
        ((f"{SCALE}.method=mean", f"{SCALE}.clamp_low=4"), "clamp_low is 4"),
    ],
)
def test_every_price_has_a_range(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        prices(config(*words), 10)


def test_the_rule_of_the_filter_arrives() -> None:
    rule = "algorithm.filter_groups"
    made = variance_settings(config(f"{rule}.rule=share", f"{rule}.keep=0.9"))
    assert (made.rule, made.keep, made.metric) == ("share", 0.9, "seq_reward")
    with pytest.raises(UserError, match=r"filter_groups\.keep is 0"):
        variance_settings(config(f"{rule}.rule=top_k", f"{rule}.keep=0"))


def test_a_fading_channel_that_is_not_there_is_named(tmp_path: Path) -> None:
    del tmp_path
    cfg = config(f"{PROCESS}.channel=belief", f"{PROCESS}.horizon=4")
    made = prices(cfg, 10)
    table = replace(paid(cfg, Prices()), rewards={"outcome": np.zeros(20)})
    with pytest.raises(UserError, match="fades the reward channel 'belief'"):
        made.change(replace(table, rewards={"outcome": np.zeros(table.num_rows)}))
