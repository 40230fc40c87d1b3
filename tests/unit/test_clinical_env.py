"""Clinical cases: the game, its exact belief, and what a turn records of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from rollout_fakes import CharChat, ScriptedEnv, ScriptedJudge, make_task

from delta_belief_rl.algo.shapers.channels import RewardSettings, build_table, outcomes
from delta_belief_rl.algo.shapers.clinical import (
    SURE,
    ClinicalSettings,
    entropies,
    question_credit,
)
from delta_belief_rl.engines.fake_engine import FakeEngine
from delta_belief_rl.envs.base import Env, JudgeReply, Outcome
from delta_belief_rl.envs.check import available_hooks, check_env
from delta_belief_rl.envs.clinical import ENVIRONMENTS
from delta_belief_rl.envs.clinical.game import NOTICES, ClinicalCase
from delta_belief_rl.envs.clinical.report import by_stratum
from delta_belief_rl.envs.clinical.settings import DEFAULT_TASKS, read_settings
from delta_belief_rl.envs.clinical.sheets import SIMULATORS, Sheet, sheets
from delta_belief_rl.envs.clinical.tasks import Case, make_tasks
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.rollout.game import GameId, GameSettings, play_game
from delta_belief_rl.rollout.store import from_row, to_row
from delta_belief_rl.types import Group, Message, StopReason, Task, Trajectory, UserError, Verdict

PRESSURE = sheets()["refill_pressure"]
CHAT = CharChat()


def task(
    state: str = "kidney", stratum: str = "high", sheet: str = "refill_pressure", key: str = "k"
) -> Task:
    return Task(
        "t",
        f"clinical_{stratum}",
        sheets()[sheet].states[state],
        (Message("user", "A case."),),
        scenario=Case(key, sheet, stratum, state).to_json(),
    )


def game(turns: int = 10, **case: str) -> ClinicalCase:
    return ClinicalCase(task(**case), turns)


def do(env: ClinicalCase, *texts: str) -> list[Outcome]:
    return [env.apply(env.parse(text), None) for text in texts]


# --- Bayes --------------------------------------------------------------------------------------


def joint_posterior(sheet: Sheet, stratum: str, facts: Mapping[str, int]) -> np.ndarray:
    """The posterior from the whole joint table of states and replies to the asked questions."""
    keys = list(facts)
    sizes = [range(len(sheet.questions[key].replies)) for key in keys]
    joint = np.zeros((len(sheet.states), *(len(size) for size in sizes)))
    for h, prior in enumerate(sheet.prior[stratum]):
        for replies in product(*sizes):
            p = prior
            for key, reply in zip(keys, replies, strict=True):
                p *= sheet.questions[key].chance[h, reply]
            joint[(h, *replies)] = p
    assert joint.sum() == pytest.approx(1.0)
    column = joint[(slice(None), *(facts[key] for key in keys))]
    return column / column.sum()


@pytest.mark.parametrize("name", list(sheets()))
def test_A13_the_belief_is_the_posterior_of_the_joint_table(name: str) -> None:
    sheet = sheets()[name]
    state, rng = list(sheet.states)[1], np.random.default_rng(0)
    env = game(sheet=name, state=state, stratum="low")
    free = [key for key, question in sheet.questions.items() if not question.after]
    asked = [free[int(index)] for index in rng.permutation(len(free))[:4]]
    for key in asked:
        do(env, sheet.questions[key].say)
    assert [key for key, _ in env.facts] == asked
    expected = joint_posterior(sheet, "low", dict(env.facts))
    np.testing.assert_allclose(list(env.belief().values()), expected, rtol=0, atol=1e-12)
    assert list(env.belief()) == list(sheet.states.values())


def test_A13_beliefs_by_hand() -> None:
    env = game(state="kidney", stratum="high")
    np.testing.assert_allclose(env.posterior(), [0.30, 0.42, 0.28])
    assert env.uncertainty()[0] == pytest.approx(0.984855, abs=1e-5)
    assert env.uncertainty()[1] == pytest.approx(math.log(0.42))
    # Yes to the ankles is 0.1, 0.75, 0.08 likely; no is 0.9, 0.25, 0.92.
    do(env, "Are your ankles swollen?")
    ((_, reply),) = env.facts
    weights = np.array([0.30, 0.42, 0.28]) * (
        [0.1, 0.75, 0.08] if reply == 0 else [0.9, 0.25, 0.92]
    )
    np.testing.assert_allclose(env.posterior(), weights / weights.sum(), atol=1e-12)


@pytest.mark.parametrize("name", list(sheets()))
def test_the_tables_are_tables(name: str) -> None:
    sheet = sheets()[name]
    size = len(sheet.states)
    for prior in sheet.prior.values():
        assert prior.shape == (size,)
        assert prior.min() > 0.0
        assert prior.sum() == pytest.approx(1.0)
    for question in sheet.questions.values():
        assert question.chance.shape == (size, len(question.replies))
        np.testing.assert_allclose(question.chance.sum(axis=1), 1.0, atol=1e-12)
        # With no zero, no reply can rule out the truth.
        assert question.chance.min() > 0.0
        assert question.kind in ("ask", "test")
        assert not question.after or question.after in sheet.questions
    values = np.array([decision.value for decision in sheet.decisions.values()])
    assert values.shape == (len(sheet.decisions), size)
    assert np.abs(values).max() <= 1.0
    np.testing.assert_array_equal(values.max(axis=0), 1.0)


def test_replies_follow_the_table_and_the_case() -> None:
    keys = [str(number) for number in range(4000)]
    drawn = np.array([PRESSURE.reply(key, "low", "cuff") for key in keys])
    shares = np.bincount(drawn, minlength=3) / len(keys)
    # Five standard errors of a share.
    np.testing.assert_allclose(shares, [0.85, 0.13, 0.02], atol=5 * 0.5 / math.sqrt(len(keys)))
    again = np.array([PRESSURE.reply(key, "low", "cuff") for key in keys])
    np.testing.assert_array_equal(drawn, again)
    ankles = np.array([PRESSURE.reply(key, "low", "ankles") for key in keys])
    assert abs(np.corrcoef(drawn == 0, ankles == 0)[0, 1]) < 5 / math.sqrt(len(keys))


# --- the game -----------------------------------------------------------------------------------


def test_a_question_asked_twice_has_the_same_reply_and_tells_nothing() -> None:
    env = game()
    (first,) = do(env, "Are your ankles swollen?")
    known, key = env.belief(), env.state_key()
    (second,) = do(env, "Tell me about the swelling.")
    assert (first.verdict, second.verdict) == (Verdict.OTHER, Verdict.REPEATED)
    assert first.reply == second.reply
    assert second.diagnostics == ("repeated",)
    assert (env.belief(), env.state_key()) == (known, key)
    assert first.action_key == second.action_key == "ask:ankles"


def test_the_state_is_what_is_known_in_any_order() -> None:
    one, other = game(), game()
    do(one, "Are you dizzy?", "Do you cough?")
    do(other, "Do you cough?", "What is your name?", "Are you dizzy?")
    assert one.state_key() == other.state_key()
    assert one.belief() == pytest.approx(other.belief())
    assert one.turns != other.turns


@pytest.mark.parametrize(
    ("state", "text", "value"),
    [
        ("clear", "Decision: approve the refill.", 1.0),
        ("clear", "Decision: halve the dose.", -0.2),
        ("kidney", "Decision: approve the refill.", -1.0),
        ("kidney", "Decision: send to the clinic.", 1.0),
        ("low", "Decision: send to the clinic.", 0.0),
    ],
)
def test_a_decision_ends_the_case_with_its_value_as_a_grade(
    state: str, text: str, value: float
) -> None:
    env = game(state=state)
    (outcome,) = do(env, text)
    assert outcome.done
    assert outcome.is_guess
    assert outcome.score == pytest.approx((1.0 + value) / 2.0)
    won = value == 1.0
    assert (outcome.strict_win, outcome.compatible_win) == (won, won)
    assert outcome.verdict is (Verdict.WIN if won else Verdict.OTHER)
    assert ("harm" in outcome.diagnostics) == (value < 0.0)
    assert env.task.secret not in outcome.reply
    with pytest.raises(ValueError, match="over"):
        do(env, "Are you dizzy?")


def test_an_early_decision_is_premature_and_a_late_one_is_not() -> None:
    (early,) = do(game(stratum="high"), "Decision: send to the clinic.")
    assert {"committed", "premature", "premature_high", "committed_high"} <= {*early.diagnostics}
    late = game(stratum="high", key="k1")
    do(late, *(one.say for one in PRESSURE.questions.values()))
    assert late.posterior().max() >= SURE
    (outcome,) = do(late, "Decision: send to the clinic.")
    assert "committed" in outcome.diagnostics
    assert not {"premature", "premature_high"} & {*outcome.diagnostics}


def test_an_undecided_case_ends_at_the_turn_limit_with_the_lowest_grade() -> None:
    *_, last = do(game(turns=2), "Are you dizzy?", "Do you cough?")
    assert last.done
    assert (last.score, last.verdict, last.strict_win) == (0.0, Verdict.OTHER, False)


@pytest.mark.parametrize(
    ("text", "verdict", "notice", "note"),
    [
        ("lorem ipsum", Verdict.INVALID, "no_action", "no_action"),
        ("Decision: refill or refer.", Verdict.INVALID, "several_decisions", "several_decisions"),
        ("I would approve the refill.", Verdict.INVALID, "hedged_decision", "hedged_decision"),
        ("I do not approve the refill.", Verdict.INVALID, "negated_decision", "negated_decision"),
        ("Is it raining?", Verdict.OTHER, "unknown_question", "unknown_question"),
    ],
)
def test_what_does_nothing_leaves_the_belief_as_it_is(
    text: str, verdict: Verdict, notice: str, note: str
) -> None:
    env = game()
    before = env.belief()
    (outcome,) = do(env, text)
    assert (outcome.verdict, outcome.reply) == (verdict, NOTICES[notice])
    assert note in outcome.diagnostics
    assert outcome.is_list == (note == "several_decisions")
    assert (env.belief(), outcome.done, outcome.score) == (before, False, None)


def test_doses_are_tried_step_by_step() -> None:
    env = game(sheet="titration_sleep", state="fast", stratum="low")
    early, low, medium = do(env, "Raise to the medium dose.", "Try the low dose.", "Medium dose!")
    assert (early.verdict, early.diagnostics) == (Verdict.INVALID, ("too_early",))
    assert "Try the low dose" in early.reply
    assert (low.verdict, medium.verdict) == (Verdict.OTHER, Verdict.OTHER)
    assert env.footprint() == (frozenset(("low",)), frozenset(("medium",)))
    assert [key for key, _ in env.facts] == ["low", "medium"]


def test_a_decision_builds_on_all_that_is_known_and_progress_follows_the_entropy() -> None:
    env = game(key="k1")
    assert env.progress() == 0.0
    do(env, "Order a kidney blood test.", "Measure the blood pressure.")
    start = float(entropies(PRESSURE.prior["high"]))
    assert env.progress() == pytest.approx(max(0.0, 1.0 - env.uncertainty()[0] / start))
    do(env, "Decision: send to the clinic.")
    assert env.footprint() == (frozenset(("creatinine", "cuff")), frozenset())
    assert env.reference() == "a kidney disease that nobody noticed"


def test_a_case_keeps_the_contract_of_an_environment() -> None:
    texts = ["Are you dizzy?", "", "Do you cough?", "Decision: halve the dose.", "Are you dizzy?"]
    check_env(game, texts)
    assert {"belief", "uncertainty", "snapshot", "footprint"} <= {
        *available_hooks(game()), "uncertainty"
    }  # fmt: skip
    with pytest.raises(ValueError, match="judge"):
        game().apply(game().parse("Are you dizzy?"), JudgeReply(Verdict.YES, "yes"))
    with pytest.raises(ValueError, match="judge"):
        game().judge_request(game().parse("Are you dizzy?"))


def test_the_question_may_stand_in_tags() -> None:
    env = ClinicalCase(task(), 5, question_tag=True)
    tagged = env.parse("Hm, decision: refill? <question>Are you dizzy?</question>")
    assert tagged.question == PRESSURE.questions["dizzy"].say
    assert env.parse("Are you dizzy?").question is None


@pytest.mark.parametrize(
    "scenario",
    [
        None,
        "",
        "[]",
        "{}",
        '{"key": "k", "sheet": "refill_pressure", "stratum": "high"}',
        '{"key": "k", "sheet": "none", "stratum": "high", "state": "low"}',
        '{"key": "k", "sheet": "refill_pressure", "stratum": "middle", "state": "low"}',
        '{"key": "k", "sheet": "refill_pressure", "stratum": "low", "state": "clot"}',
    ],
)
def test_a_task_without_a_case_is_refused(scenario: str | None) -> None:
    with pytest.raises(UserError, match="'t' has no clinical case"):
        ClinicalCase(replace(task(), scenario=scenario), 5)


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"sead": 1}, "did you mean seed"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": True}, "seed is True"),
        ({"tasks": 5}, "tasks is 5"),
        ({"tasks": {"trian": 5}}, "did you mean train"),
        ({"tasks": {"train": 20_001}}, "tasks.train is 20001"),
        ({"simulators": "refill"}, "simulators is 'refill'"),
        ({"simulators": []}, "simulators is"),
        ({"simulators": ["surgery"]}, "surgery"),
        ({"prompt": "long"}, "prompt is 'long'"),
    ],
)
def test_a_wrong_setting_is_named(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read_settings(kwargs)
    assert "multi_turn.env_kwargs" in str(caught.value)


def test_settings_have_defaults_and_the_factory_checks_them() -> None:
    settings = read_settings({})
    assert dict(settings.tasks) == dict(DEFAULT_TASKS)
    assert settings.simulators == SIMULATORS
    assert read_settings({"simulators": ["workup", "refill"]}).simulators == ("refill", "workup")
    make = ENVIRONMENTS["clinical"].make
    with pytest.raises(UserError, match="max_turns is 0"):
        make(EnvOptions(0))
    with pytest.raises(UserError, match="seed"):
        make(EnvOptions(5, kwargs={"seed": "x"}))
    assert isinstance(make(EnvOptions(5))(task()), ClinicalCase)


# --- what is recorded ---------------------------------------------------------------------------


def played(env: Env, *texts: str, turns: int = 6) -> Trajectory:
    left = iter(texts)
    engine = FakeEngine(lambda request: next(left), CHAT.encode)
    settings = GameSettings(max_turns=turns, max_turn_tokens=80, max_episode_tokens=9000)
    identity = GameId(run_seed=7, step=3, game=1)
    return asyncio.run(play_game(env, engine, ScriptedJudge(), CHAT, settings, identity))


TEXTS = ("Are you dizzy?", "Are you dizzy?", "hm", "Order a kidney blood test.", "Decision: refill")


def test_A13_turns_carry_the_exact_uncertainty_before_and_after_them() -> None:
    env, mirror = game(), game()
    done = played(env, *TEXTS)
    before = [mirror.uncertainty()]
    for text in TEXTS:
        do(mirror, text)
        before.append(mirror.uncertainty())
    assert [turn.uncertainty for turn in done.turns] == [
        (one[0], two[0]) for one, two in pairwise(before)
    ]
    assert [turn.truth_logp for turn in done.turns] == [
        (one[1], two[1]) for one, two in pairwise(before)
    ]
    pairs = [turn.uncertainty for turn in done.turns]
    # Repeated, invalid and deciding turns change nothing.
    for number in (1, 2, 4):
        pair = pairs[number]
        assert pair is not None
        assert pair[0] == pair[1]


def test_A13_question_credit_of_a_played_game_telescopes_and_repeats_earn_nothing() -> None:
    done = played(game(), *TEXTS)
    pairs = [turn.uncertainty or (math.nan, math.nan) for turn in done.turns]
    measure = np.array([[*(pair[0] for pair in pairs), pairs[-1][1]]])
    asks = np.array([[not turn.is_guess for turn in done.turns]])
    credit = question_credit(measure, asks, ClinicalSettings(beta=0.5))
    assert credit.sum() == pytest.approx(0.5 * (measure[0, 0] - measure[0, -1]))
    np.testing.assert_array_equal(credit[0, [1, 2, 4]], 0.0)
    assert credit[0, 0] != 0.0
    assert credit[0, 3] != 0.0


def test_a_game_with_uncertainty_is_stored_and_read_back_whole() -> None:
    done = played(game(), *TEXTS)
    assert from_row(to_row(done, max_turns=6)) == done
    other = played(ScriptedEnv(make_task()), "win")
    assert other.turns[0].uncertainty is None
    row = to_row(other, max_turns=6)
    assert "uncertainty" not in row["turns"][0]
    assert from_row(row) == other


def test_the_grade_is_what_the_outcome_channel_pays() -> None:
    ends = ("Decision: refill", "Decision: refer", "Decision: halve the dose")
    games = [played(game(state="kidney"), "Are you dizzy?", end) for end in ends]
    games.append(played(game(state="kidney"), "hm", "hm", turns=2))
    assert [one.stop for one in games] == [
        StopReason.ENDED, StopReason.WIN, StopReason.ENDED, StopReason.TURN_LIMIT
    ]  # fmt: skip
    groups = [Group(task(), tuple(replace(one, game=i) for i, one in enumerate(games)))]
    paid = outcomes(build_table(groups), groups)[1::2]
    values = [-1.0, 1.0, -0.6, -1.0]
    np.testing.assert_allclose(RewardSettings().win * paid - 1.0, values, atol=1e-12)


def test_the_report_by_stratum_counts_what_happened() -> None:
    low = replace(task("clear", "low"), source="clinical_low")
    games = [
        played(ClinicalCase(low, 6), "Are you dizzy?", "Decision: refill"),
        played(game(state="kidney"), "Decision: refill"),
        played(game(state="kidney"), *(q.say for q in PRESSURE.questions.values()), turns=4),
        played(ScriptedEnv(make_task()), "win"),
    ]
    report = by_stratum(games)
    assert list(report) == ["low", "high", "all"]
    assert (report["low"].games, report["low"].value, report["low"].questions) == (1, 1.0, 1.0)
    assert (report["low"].committed, report["low"].harm) == (1.0, 0.0)
    high = report["high"]
    assert (high.games, high.value, high.questions, high.committed) == (2, -1.0, 2.0, 0.5)
    assert (high.premature, high.harm) == (1.0, 1.0)
    assert report["all"].games == 3
    assert by_stratum([replace(games[0], stop=StopReason.ENGINE_FAILED)]) == {}
    undecided = by_stratum([games[2]])["high"]
    assert math.isnan(undecided.premature)


def test_tasks_of_the_environment_play() -> None:
    for one in make_tasks("val", 12, 0, SIMULATORS, True):
        env = ClinicalCase(one, 5)
        assert env.belief()[one.secret] == pytest.approx(math.exp(env.uncertainty()[1]))
