"""The channel that pays questions by an exact posterior: clinical cases and the embedded world."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
from rollout_fakes import CharChat, ScriptedEnv, ScriptedJudge, make_task

from delta_belief_rl.algo.shapers.channels import ChannelShaper, RewardSettings, build_table
from delta_belief_rl.algo.shapers.clinical import ClinicalSettings
from delta_belief_rl.engines.fake_engine import FakeEngine
from delta_belief_rl.envs.base import Env, JudgeReply
from delta_belief_rl.envs.check import EnvContractError, check_env
from delta_belief_rl.envs.clinical.game import ClinicalCase
from delta_belief_rl.envs.clinical.tasks import Case
from delta_belief_rl.envs.worlds.game import WorldTwentyQuestions, world_settings
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.rollout.game import GameId, GameSettings, play_game
from delta_belief_rl.types import Group, Message, StopReason, Task, Trajectory, Verdict

CHAT = CharChat()
SCENARIO = Case("k", "refill_pressure", "high", "kidney").to_json()
TASK = Task(
    "t",
    "clinical_high",
    "a kidney disease that nobody noticed",
    (Message("user", "A case."),),
    scenario=SCENARIO,
)
ASKS = ("Are you dizzy?", "Order a kidney blood test.", "Are you dizzy?", "hm", "Decision: refer")
GRAMMAR = Grammar(load_world("everyday"))


def played(env: Env, *texts: str, turns: int = 6, judge: ScriptedJudge | None = None) -> Trajectory:
    left = iter(texts)
    engine = FakeEngine(lambda request: next(left), CHAT.encode)
    settings = GameSettings(max_turns=turns, max_turn_tokens=80, max_episode_tokens=9000)
    identity = GameId(run_seed=7, step=3, game=0)
    return asyncio.run(play_game(env, engine, judge or ScriptedJudge(), CHAT, settings, identity))


def case(*texts: str, turns: int = 6) -> Trajectory:
    return played(ClinicalCase(TASK, turns), *texts, turns=turns)


def paid(*games: Trajectory, settings: ClinicalSettings | None = None) -> np.ndarray:
    numbered = tuple(replace(game, game=number) for number, game in enumerate(games))
    groups = [Group(games[0].task, numbered)]
    shaper = ChannelShaper(RewardSettings(), settings or ClinicalSettings(beta=1.0))
    return shaper.shape(build_table(groups), groups)["question"]


def test_without_settings_there_is_no_such_channel() -> None:
    groups = [Group(TASK, (case(*ASKS),))]
    assert "question" not in ChannelShaper().shape(build_table(groups), groups)


def test_A13_a_question_is_paid_what_its_answer_removed_and_nothing_else_is() -> None:
    game = case(*ASKS)
    row = paid(game)
    pairs = [turn.uncertainty or (math.nan, math.nan) for turn in game.turns]
    np.testing.assert_allclose(row[:2], [pair[0] - pair[1] for pair in pairs[:2]], atol=1e-12)
    # Asked before, not understood, decided.
    np.testing.assert_array_equal(row[2:], 0.0)
    assert row.sum() == pytest.approx(pairs[0][0] - pairs[-1][1])


def test_A13_the_cost_is_charged_for_every_question_and_the_logp_form_reads_the_truth() -> None:
    game = case(*ASKS)
    free, dear = paid(game), paid(game, settings=ClinicalSettings(beta=1.0, cost=0.1))
    np.testing.assert_allclose(free - dear, [0.1, 0.1, 0.1, 0.0, 0.0], atol=1e-12)
    row = paid(game, settings=ClinicalSettings(form="logp", beta=1.0))
    pairs = [turn.truth_logp or (math.nan, math.nan) for turn in game.turns]
    assert row.sum() == pytest.approx(pairs[-1][1] - pairs[0][0])


def test_A13_games_of_other_lengths_do_not_change_a_game() -> None:
    long, short = case(*ASKS), case("Decision: refer")
    middle = case("Do you cough?", "Measure the blood pressure.", turns=2)
    both = paid(short, long, middle)
    np.testing.assert_allclose(both, np.concatenate([paid(short), paid(long), paid(middle)]))
    np.testing.assert_allclose(
        paid(middle, long, short), np.concatenate([paid(middle), paid(long), paid(short)])
    )


def test_turns_that_are_not_valid_or_have_no_posterior_are_paid_nothing() -> None:
    game = case(*ASKS)
    void = replace(game, turns=game.turns[:2], stop=StopReason.ENGINE_FAILED)
    np.testing.assert_array_equal(paid(void), 0.0)
    plain = played(ScriptedEnv(make_task()), "is it", "win")
    np.testing.assert_array_equal(paid(plain, settings=ClinicalSettings(cost=1.0)), 0.0)
    half = replace(game, turns=(replace(game.turns[0], uncertainty=None), *game.turns[1:]))
    assert paid(half)[0] == 0.0
    groups = [Group(TASK, ())]
    shaper = ChannelShaper(RewardSettings(), ClinicalSettings())
    assert shaper.shape(build_table(groups), groups)["question"].shape == (0,)


# --- the embedded world -------------------------------------------------------------------------


def world_game(*texts: str) -> Trajectory:
    task = Task("t", "tw_q", "dog", (Message("user", "Go."),))
    env = WorldTwentyQuestions(task, world_settings(20), GRAMMAR)

    def reply(request: object) -> JudgeReply:
        return JudgeReply(Verdict.YES, "Yes")

    return played(env, *texts, turns=len(texts), judge=ScriptedJudge(reply))


def test_A13_the_embedded_world_knows_its_uncertainty() -> None:
    task = Task("t", "tw_q", "dog", (Message("user", "Go."),))
    env = WorldTwentyQuestions(task, world_settings(20), GRAMMAR)
    assert env.uncertainty() == pytest.approx((1.0, -math.log(len(GRAMMAR.world.things))))
    game = world_game("Is it alive?", "Is it an animal?")
    pairs = [turn.uncertainty or (math.nan, math.nan) for turn in game.turns]
    assert pairs[0][0] == 1.0
    assert 0.0 < pairs[-1][1] < pairs[0][1] < 1.0
    row = paid(game)
    np.testing.assert_allclose(row, [pair[0] - pair[1] for pair in pairs], atol=1e-12)
    # The posterior is uniform over what is left, so both forms are one but for their unit.
    nats = paid(game, settings=ClinicalSettings(form="logp", beta=1.0))
    np.testing.assert_allclose(nats, row * math.log(len(GRAMMAR.world.things)), atol=1e-12)


# --- the contract -------------------------------------------------------------------------------


class Wrong(ClinicalCase):
    """Has a hook that says what cannot be."""

    says = (2.0, -1.0)

    def uncertainty(self) -> tuple[float, float]:
        return self.says


@pytest.mark.parametrize("says", [(2.0, -1.0), (-0.5, -1.0), (0.5, 1.0), (0.5, -math.inf)])
def test_the_check_of_environments_looks_at_the_hook(says: tuple[float, float]) -> None:
    class Other(Wrong):
        pass

    Other.says = says
    with pytest.raises(EnvContractError, match="uncertainty"):
        check_env(lambda: Other(TASK, 9), ["Are you dizzy?"])
