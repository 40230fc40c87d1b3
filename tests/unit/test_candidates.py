"""Choosing a turn among several sampled actions by the change of belief."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_fakes import (
    EOT,
    HEADER,
    OFFSET,
    START,
    VOCAB,
    CharChat,
    ScriptedEnv,
    ScriptedJudge,
    make_task,
)

from delta_belief_rl.belief.branched import ScoreRequest, score_batch
from delta_belief_rl.belief.elicit import Elicitation
from delta_belief_rl.engines.base import GenRequest, SamplingParams, TailRequest
from delta_belief_rl.engines.fake_engine import FakeEngine, Fault, FaultKind
from delta_belief_rl.engines.hf_engine import HFEngine
from delta_belief_rl.engines.pump import EnginePump, EngineRouter, local_calls, local_score
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.envs.worlds.game import WorldTwentyQuestions, world_settings
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.models.loading import build_causal_lm, tiny_qwen3_config
from delta_belief_rl.rollout.candidates import (
    NOT_FINITE,
    NOT_SAMPLED,
    CandidateChooser,
    CandidateSettings,
    Preference,
    choose,
    chooser_factory,
)
from delta_belief_rl.rollout.driver import RolloutDriver
from delta_belief_rl.rollout.game import GameId, GameSettings, play_game
from delta_belief_rl.rollout.seeds import candidate_seed, named_uniform, turn_seed
from delta_belief_rl.types import Candidate, Group, StopReason, Task, Trajectory, UserError, Verdict
from tests.worlds import PROPERTIES, ask, small_world

CHAT = CharChat()
SETTINGS = GameSettings(max_turns=3, max_turn_tokens=20, max_episode_tokens=500)
ID = GameId(run_seed=7, step=3, game=0, run_id="run-a")
SESSION = ID.session("t0")
BEST = CandidateSettings(4, grouped=False)


def guess_of(secret: str, lead: str = "") -> Elicitation:
    """``Is it 'SECRET'`` of the character chat, every character of the secret scored."""
    ids = CHAT.encode(f"Is it '{secret}")
    lead_ids = (*CHAT.encode(lead), EOT, *CHAT.reply_ids("yes")) if lead else ()
    return Elicitation(secret, ids, tuple(range(7, len(ids))), lead_ids=lead_ids)


class RewindEnv(ScriptedEnv):
    """The scripted environment, with a way back."""

    def snapshot(self) -> object:
        return tuple(self.history)

    def restore(self, snapshot: Any) -> None:
        self.history = list(snapshot)


def exchanges(ids: Sequence[int]) -> list[tuple[str, str]]:
    """Questions and replies of a stream of the character chat, the guess at its end left out."""
    parts = "".join({EOT: "|", START: "<", HEADER: ">"}.get(i) or chr(i - OFFSET) for i in ids)
    turns = [turn.split("|<") for turn in parts.split(">")[1:-1]]
    return [(question, reply.rstrip("|")) for question, reply in turns]


def worth(gains: dict[str, float], prior: float = -9.0) -> Callable[[TailRequest], list[float]]:
    """A belief that each question of a game changes by so many nats."""

    def tails(request: TailRequest) -> list[float]:
        asked = [question for question, _ in exchanges(request.token_ids)]
        belief = prior + sum(gains[question] for question in asked)
        return [belief / request.length] * request.length

    return tails


def in_turn(*texts: str) -> Callable[[GenRequest], str]:
    left = iter(texts)
    return lambda request: next(left)


def play(
    script: Callable[[GenRequest], Any],
    gains: dict[str, float],
    settings: CandidateSettings | None = BEST,
    *,
    judge: ScriptedJudge | None = None,
    faults: dict[tuple[str, int], Fault] | None = None,
    limits: GameSettings = SETTINGS,
    identity: GameId = ID,
    tails: Callable[[TailRequest], Sequence[float]] | None = None,
) -> tuple[Trajectory, FakeEngine]:
    engine = FakeEngine(script, CHAT.encode, version=5, faults=faults, tails=tails or worth(gains))
    chooser = None if settings is None else CandidateChooser(settings, guess_of("cat"))
    env, judge = RewindEnv(make_task()), judge or ScriptedJudge()
    game = asyncio.run(play_game(env, engine, judge, CHAT, limits, identity, chooser))
    return game, engine


def without_candidates(game: Trajectory) -> Trajectory:
    return replace(game, turns=tuple(replace(turn, candidates=()) for turn in game.turns))


# --- which one is taken ---------------------------------------------------------------------------


def tried(delta: float | None, verdict: Verdict = Verdict.NO, error: str = "") -> Candidate:
    return Candidate("q", "no", verdict, delta, delta, error=error)


def test_the_best_and_the_worst_are_those_of_largest_and_smallest_change() -> None:
    row = [tried(d) for d in (0.5, -1.0, 2.0, 2.0, -1.0)]
    assert choose(row, Preference.BEST, 0.9) == 2
    assert choose(row, Preference.WORST, 0.9) == 1
    assert [choose(row, Preference.ANY, u) for u in (0.0, 0.2, 0.5, 0.99)] == [0, 1, 2, 4]


@given(
    st.lists(st.integers(-50, 50), min_size=1, max_size=8),
    st.integers(-9, 9),
    st.floats(0, 0.999),
)
def test_a_shift_of_all_changes_alters_no_choice_and_a_sign_swaps_best_and_worst(
    deltas: list[int], shift: int, uniform: float
) -> None:
    row = [tried(float(d)) for d in deltas]
    for preference in Preference:
        moved = [tried(float(d + shift)) for d in deltas]
        assert choose(moved, preference, uniform) == choose(row, preference, uniform)
    turned = [tried(-float(d)) for d in deltas]
    assert choose(turned, Preference.BEST, uniform) == choose(row, Preference.WORST, uniform)


def test_J1_a_candidate_whose_judge_failed_is_taken_only_where_all_failed() -> None:
    failed = tried(None, Verdict.ERROR, "down")
    absent = tried(None, Verdict.ERROR, NOT_SAMPLED)
    for preference in Preference:
        for uniform in (0.0, 0.5, 0.99):
            assert choose([failed, tried(-9.0), absent], preference, uniform) == 1
            assert choose([absent, failed, absent], preference, uniform) == 1
            assert choose([failed, tried(None, error=NOT_FINITE)], preference, uniform) == 1
    assert choose([absent, absent], Preference.BEST, 0.5) is None


def test_members_of_a_group_look_for_the_best_the_worst_or_anything() -> None:
    settings = CandidateSettings(4, best_n=3, worst_n=2)
    found = [settings.preference(replace(ID, game=game), "t", 0) for game in range(7)]
    assert found == ["best"] * 3 + ["worst"] * 2 + ["any"] * 2


@pytest.mark.parametrize("p_best", [0.0, 0.3, 1.0])
def test_R15_without_groups_the_best_is_taken_with_its_probability_by_name(p_best: float) -> None:
    settings = CandidateSettings(4, p_best=p_best, grouped=False)
    names = [(ID, f"t{i}", turn) for i in range(400) for turn in range(5)]
    found = [settings.preference(*name) for name in names]
    assert set(found) <= {Preference.BEST, Preference.ANY}
    assert found.count(Preference.BEST) / len(found) == pytest.approx(p_best, abs=0.03)
    assert [settings.preference(*name) for name in names] == found


def test_R15_seeds_of_candidates_are_names_and_the_first_is_that_of_the_turn() -> None:
    assert candidate_seed(7, "t0", 3, 1, 2, 0) == turn_seed(7, "t0", 3, 1, 2)
    seeds = {candidate_seed(7, "t0", 3, game, 2, number) for game in (0, 1) for number in range(4)}
    assert len(seeds) == 8
    draws = np.array([named_uniform("draw", i) for i in range(4000)])
    assert ((draws >= 0) & (draws < 1)).all()
    assert np.histogram(draws, 10, (0, 1))[0].min() > 320


# --- one game -------------------------------------------------------------------------------------


def test_T1_the_chosen_tokens_stand_as_sampled_and_losers_leave_none() -> None:
    gains = {"a": 0.5, "bb": 2.0, "c": -1.0, "dd": 1.0, "x": 0.0, "win": 3.0}
    script = in_turn("a", "bb", "c", "dd", "x", "win", "a", "c")
    game, engine = play(script, gains)
    expected = list(CHAT.open_ids(game.task.messages))
    for text, reply in (("bb", "no"), ("win", "finished")):
        expected += [*CHAT.encode(text), EOT, *CHAT.reply_ids(reply)]
    assert list(game.token_ids) == expected
    assert game.stop is StopReason.WIN
    assert game.action_mask().sum() == len("bb") + len("win") + 2
    first = game.turns[0].candidates
    assert [c.action for c in first] == ["a", "bb", "c", "dd"]
    assert [c.delta for c in first] == pytest.approx([0.5, 2.0, -1.0, 1.0])
    assert [c.belief for c in first] == pytest.approx([-8.5, -7.0, -10.0, -8.0])
    assert [c.chosen for c in first] == [False, True, False, False]
    assert {(c.reply, c.verdict) for c in first} == {("no", Verdict.NO)}
    won = game.turns[1].candidates[1]
    assert (won.reply, won.verdict, won.chosen) == ("finished", Verdict.WIN, True)
    assert sorted(set(engine.released)) == sorted(engine.released)
    assert set(engine.released) == {request.session for request in engine.requests}


def test_a_winning_action_is_chosen_for_its_change_of_belief_alone() -> None:
    game, _ = play(lambda r: "a" if r.session == SESSION else "win", {"a": 1.0, "win": 0.5})
    assert [turn.action for turn in game.turns] == ["a"] * 3
    assert game.stop is StopReason.TURN_LIMIT


def test_every_candidate_is_sampled_from_the_same_context_with_its_own_seed() -> None:
    game, engine = play(lambda r: "a", {"a": 1.0})
    for turn in range(3):
        asked = engine.requests[4 * turn : 4 * turn + 4]
        assert len({request.prompt_ids for request in asked}) == 1
        assert asked[0].prompt_ids == game.token_ids[: game.turns[turn].start]
        seeds = [candidate_seed(7, "t0", 3, 0, turn, number) for number in range(4)]
        assert [request.seed for request in asked] == seeds
        assert len({request.session for request in asked}) == 4


def test_equal_candidates_are_judged_and_measured_once_and_the_chosen_is_not_asked_again() -> None:
    judge = ScriptedJudge()
    game, engine = play(in_turn(*"aabb", *"aaaa", *"abba"), {"a": 1.0, "b": 0.5}, judge=judge)
    assert [request.action for request in judge.requests] == ["a", "b", "a", "a", "b"]
    # One text before the first turn, then one for each different action.
    assert len(engine.scored) == 1 + 2 + 1 + 2
    assert [len(turn.candidates) for turn in game.turns] == [4, 4, 4]
    assert [c.delta for c in game.turns[0].candidates] == pytest.approx([1.0, 1.0, 0.5, 0.5])


def test_trying_out_leaves_the_game_as_if_only_the_chosen_action_had_been_taken() -> None:
    gains = {"a": 0.0, "b": 1.0, "c": 2.0, "d": -1.0}
    histories: list[tuple[tuple[str, str], ...]] = []

    def reply(request: JudgeRequest) -> JudgeReply:
        histories.append(request.history)
        return JudgeReply(Verdict.YES, "yes")

    limits = replace(SETTINGS, clock=lambda: 0.0)
    game, _ = play(in_turn(*"abcd" * 3), gains, judge=ScriptedJudge(reply), limits=limits)
    assert [turn.action for turn in game.turns] == ["c", "c", "c"]
    assert histories == [()] * 4 + [(("c", "yes"),)] * 4 + [(("c", "yes"),) * 2] * 4
    alone, _ = play(lambda r: "c", gains, None, judge=ScriptedJudge(reply), limits=limits)
    assert alone == without_candidates(game)


def test_one_candidate_is_the_game_without_sampling() -> None:
    limits = replace(SETTINGS, clock=lambda: 0.0)
    script: Callable[[GenRequest], str] = lambda r: "abc"[r.seed % 3] * (1 + r.seed % 5)  # noqa: E731
    gains = {c * n: 0.1 * n for c in "abc" for n in range(1, 6)}
    for game in range(5):
        identity = replace(ID, game=game)
        one, _ = play(script, gains, CandidateSettings(1), limits=limits, identity=identity)
        plain, _ = play(script, gains, None, limits=limits, identity=identity)
        assert without_candidates(one) == plain


def test_the_scenario_of_a_task_reaches_the_judge() -> None:
    task = replace(make_task(), scenario="a broken phone")
    judge = ScriptedJudge()
    engine = FakeEngine(lambda r: "a", CHAT.encode, tails=worth({"a": 1.0}))
    chooser = CandidateChooser(BEST, guess_of("cat"))
    asyncio.run(play_game(RewindEnv(task), engine, judge, CHAT, SETTINGS, ID, chooser))
    assert {request.task.scenario for request in judge.requests} == {"a broken phone"}


# --- failures -------------------------------------------------------------------------------------


def test_J1_a_failed_judge_call_costs_its_candidate_only() -> None:
    def reply(request: JudgeRequest) -> JudgeReply:
        if request.action == "b":
            return JudgeReply(Verdict.ERROR, reason="down")
        return JudgeReply(Verdict.NO, "no")

    gains = {"a": 0.1, "b": 9.0, "c": 0.2}
    game, _ = play(in_turn(*"abca" * 3), gains, judge=ScriptedJudge(reply))
    assert [turn.action for turn in game.turns] == ["c"] * 3
    failed = game.turns[0].candidates[1]
    assert (failed.verdict, failed.delta, failed.error) == (Verdict.ERROR, None, "down")
    assert game.count(Verdict.ERROR) == 0


def test_J1_where_every_judge_call_fails_the_turn_is_an_error_and_the_game_ends_at_its_limit() -> (
    None
):
    judge = ScriptedJudge(lambda request: JudgeReply(Verdict.ERROR, reason="down"))
    limits = replace(SETTINGS, max_turns=9, max_judge_errors=2)
    gains = dict.fromkeys("abcd", 1.0)
    game, engine = play(in_turn(*"abcd" * 2), gains, judge=judge, limits=limits)
    assert game.stop is StopReason.JUDGE_FAILED
    assert [turn.verdict for turn in game.turns] == [Verdict.ERROR] * 2
    assert game.turns[0].raw_verdict == "error: down"
    assert all(c.belief is None for turn in game.turns for c in turn.candidates)
    assert set(engine.released) == {request.session for request in engine.requests}


def test_an_engine_error_costs_its_candidate_and_only_all_of_them_end_the_game() -> None:
    gains = {"a": 0.1, "b": 9.0}
    script: Callable[[GenRequest], str] = lambda r: "b" if r.session == f"{SESSION}~001" else "a"  # noqa: E731
    one = {(f"{SESSION}~001", 1): Fault(FaultKind.ERROR)}
    game, _ = play(script, gains, faults=one)
    assert [turn.action for turn in game.turns] == ["b", "a", "b"]
    lost = game.turns[1].candidates[1]
    assert (lost.action, lost.verdict, lost.error) == ("", Verdict.ERROR, NOT_SAMPLED)
    sessions = CandidateChooser(BEST, guess_of("cat")).sessions(SESSION)
    every = {(session, 1): Fault(FaultKind.ERROR) for session in sessions}
    game, _ = play(script, gains, faults=every)
    assert game.stop is StopReason.ENGINE_FAILED
    assert game.num_turns == 1


def test_B6_a_belief_that_is_not_finite_is_no_number_and_the_next_one_is_measured_anew() -> None:
    def tails(request: TailRequest) -> list[float]:
        asked = [question for question, _ in exchanges(request.token_ids)]
        value = math.nan if asked == ["a"] else -6.0 + len(asked)
        return [value / request.length] * request.length

    game, engine = play(lambda r: "a", {}, tails=tails)
    first, second, _ = (turn.candidates for turn in game.turns)
    assert {(c.belief, c.delta, c.error) for c in first} == {(None, None, NOT_FINITE)}
    # The state between the turns is asked once more, and is still not a number.
    assert {(c.belief, c.delta, c.error) for c in second} == {(-4.0, None, NOT_FINITE)}
    assert [c.delta for c in game.turns[2].candidates] == pytest.approx([1.0] * 4)
    assert len(engine.scored) == 1 + 1 + 2 + 1


def test_B6_a_tail_of_the_wrong_length_is_never_filled_in() -> None:
    with pytest.raises(IndexError):
        play(lambda r: "a", {}, tails=lambda request: [-1.0] * (request.length - 1))


def test_an_environment_without_a_way_back_is_one_sentence() -> None:
    engine = FakeEngine(lambda r: "a", CHAT.encode)
    chooser = CandidateChooser(BEST, guess_of("cat"))
    call = play_game(ScriptedEnv(make_task()), engine, ScriptedJudge(), CHAT, SETTINGS, ID, chooser)
    with pytest.raises(UserError, match="no snapshot and restore"):
        asyncio.run(call)


# --- a larger change of belief is a better question -----------------------------------------------

WORLD = small_world()
GRAMMAR = Grammar(WORLD)
QUESTIONS = [f"{phrasings[0].capitalize()}?" for _, phrasings in PROPERTIES]


def oracle(secret: str, turns: int) -> Callable[[TailRequest], list[float]]:
    """The exact posterior of the secret after the questions of a stream."""
    judge = WorldJudge(WORLD, GRAMMAR)

    def tails(request: TailRequest) -> list[float]:
        env = WorldTwentyQuestions(Task("x", "tw_q", secret, ()), world_settings(turns), GRAMMAR)
        for question, _ in exchanges(request.token_ids):
            ask(env, judge, question)
        return [math.log(env.belief()[secret]) / request.length] * request.length

    return tails


def world_game(secret: str, settings: CandidateSettings | None, turns: int = 4) -> Trajectory:
    """A policy that asks any of the questions with equal probability."""
    engine = FakeEngine(
        lambda r: QUESTIONS[r.seed % len(QUESTIONS)], CHAT.encode, tails=oracle(secret, turns + 1)
    )
    task = Task(f"w-{secret}", "tw_q", secret, make_task().messages)
    env = WorldTwentyQuestions(task, world_settings(turns + 1), GRAMMAR)
    table = WorldJudge(WORLD, GRAMMAR)
    judge = ScriptedJudge(lambda request: table.answer([request])[0])
    limits = GameSettings(max_turns=turns, max_turn_tokens=50, max_episode_tokens=900)
    chooser = None if settings is None else CandidateChooser(settings, guess_of(secret))
    return asyncio.run(play_game(env, engine, judge, CHAT, limits, ID, chooser))


def final_belief(game: Trajectory) -> float:
    """Exact log-posterior of the secret at the end."""
    ids = (*game.token_ids, OFFSET)
    request = TailRequest("", ids, len(ids) - 1)
    return sum(oracle(game.task.secret, 9)(request))


def test_under_an_exact_belief_best_of_eight_is_the_most_informative_question_sampled() -> None:
    for secret in ("dog", "sun", "eagle"):
        game = world_game(secret, CandidateSettings(8, grouped=False))
        row = WORLD.values[WORLD.index(secret)]
        alike = {q: int((WORLD.values[:, i] == row[i]).sum()) for i, q in enumerate(QUESTIONS)}
        first = game.turns[0].candidates
        for candidate in first:
            # The posterior is uniform over the things with the same answer.
            assert candidate.belief == pytest.approx(-math.log(alike[candidate.action]))
        assert alike[game.turns[0].action] == min(alike[c.action] for c in first)


def test_under_an_exact_belief_best_of_eight_beats_a_draw_and_worst_of_eight_loses_to_it() -> None:
    secrets = [thing.name for thing in WORLD.things]
    means = {
        name: float(np.mean([final_belief(world_game(secret, settings)) for secret in secrets]))
        for name, settings in (
            ("best", CandidateSettings(8, grouped=False)),
            ("alone", None),
            ("worst", CandidateSettings(8, best_n=0, worst_n=1)),
        )
    }
    assert means["best"] > means["alone"] + 0.5
    assert means["alone"] > means["worst"] + 0.5


def test_the_mean_of_the_chosen_change_is_that_of_the_largest_of_f_draws() -> None:
    gains = {"a": 0.0, "b": 1.0, "c": 2.0, "d": 3.0}
    deltas: list[float] = []
    limits = replace(SETTINGS, max_turns=1)
    for number in range(300):
        game, _ = play(
            lambda r: "abcd"[r.seed % 4],
            gains,
            CandidateSettings(3, grouped=False),
            limits=limits,
            identity=replace(ID, game=number),
        )
        (taken,) = (c for c in game.turns[0].candidates if c.chosen)
        assert taken.delta is not None
        deltas.append(taken.delta)
    expected = sum(1 - (k / 4) ** 3 for k in (1, 2, 3))
    assert np.mean(deltas) == pytest.approx(expected, abs=0.12)


# --- a real model, many games ---------------------------------------------------------------------


def tiny_model() -> Any:
    """Weights large enough that beliefs differ by nats between contexts."""
    model = build_causal_lm(tiny_qwen3_config(VOCAB))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
    return model.eval()


MODEL = tiny_model()
TASKS = [make_task(f"t{i}") for i in range(3)]
THREE = CandidateSettings(3, best_n=1, worst_n=1)


def delays(salt: str) -> Callable[[JudgeRequest], float]:
    def delay(request: JudgeRequest) -> float:
        text = f"{salt}/{request.task.id}/{request.action}/{len(request.history)}"
        return hashlib.sha256(text.encode()).digest()[0] / 255 * 0.01

    return delay


def collect(
    salt: str,
    settings: CandidateSettings | None = THREE,
    *,
    replicas: int = 1,
    max_games: int = 64,
    deterministic: bool = True,
    lead: str = "",
) -> tuple[list[Group], list[HFEngine]]:
    engines = [HFEngine(MODEL, max_sequences=32, max_len=256) for _ in range(replicas)]
    pumps = [
        EnginePump(
            *local_calls(engine, threaded=False),
            score=local_score(engine, threaded=False),
            deterministic=deterministic,
        )
        for engine in engines
    ]
    driver = RolloutDriver(
        EngineRouter(pumps),
        ScriptedJudge(delay=delays(salt)),
        CHAT,
        RewindEnv,
        GameSettings(max_turns=3, max_turn_tokens=5, max_episode_tokens=200),
        max_games=max_games,
        run_seed=7,
        run_id="run-a",
        make_chooser=chooser_factory(settings, lambda secret: guess_of(secret, lead)),
    )
    return asyncio.run(driver.collect(TASKS, 3, 2, SamplingParams())), engines


def games_of(groups: list[Group]) -> list[Trajectory]:
    return [game for group in groups for game in group.trajectories]


@pytest.mark.parametrize(("replicas", "max_games"), [(1, 64), (2, 64), (1, 2), (2, 3)])
def test_R15_any_order_of_judge_replies_gives_the_same_choices_bit_for_bit(
    replicas: int, max_games: int
) -> None:
    options: dict[str, Any] = {"replicas": replicas, "max_games": max_games}
    first, _ = collect("x", **options)
    assert all(len(turn.candidates) == 3 for game in games_of(first) for turn in game.turns)
    assert collect("y", **options)[0] == first
    assert collect("z", **options)[0] == first


def test_R15_replicas_concurrency_and_timing_do_not_change_what_is_chosen() -> None:
    first = [game.token_ids for game in games_of(collect("x")[0])]
    for options in ({"replicas": 2}, {"max_games": 2}, {"deterministic": False}):
        assert [game.token_ids for game in games_of(collect("q", **options)[0])] == first


@pytest.mark.parametrize("lead", ["", "Is it something?"])
def test_B1_the_engines_belief_of_the_chosen_candidate_is_the_trainers(lead: str) -> None:
    groups, _ = collect("x", lead=lead)
    games = games_of(groups)
    scored = score_batch(MODEL, [ScoreRequest.of(g, guess_of("cat", lead)) for g in games])
    for game, result in zip(games, scored, strict=True):
        for turn, before, after in zip(
            game.turns, result.beliefs[:-1], result.beliefs[1:], strict=True
        ):
            (taken,) = (c for c in turn.candidates if c.chosen)
            assert taken.belief == pytest.approx(after, abs=1e-4)
            assert taken.delta == pytest.approx(after - before, abs=1e-4)
    assert np.ptp(np.concatenate([result.beliefs for result in scored])) > 0.5


def test_members_of_a_group_take_the_largest_and_the_smallest_change_of_their_own() -> None:
    for group in collect("x")[0]:
        for game in group.trajectories[:2]:
            pick = max if game.game == 0 else min
            for turn in game.turns:
                (taken,) = (c for c in turn.candidates if c.chosen)
                assert taken.delta == pick(c.delta for c in turn.candidates if c.delta is not None)
        drawn = [
            [c.chosen for c in turn.candidates].index(True) for turn in group.trajectories[2].turns
        ]
        assert set(drawn) <= {0, 1, 2}


def test_one_candidate_on_a_real_model_samples_what_a_game_without_sampling_does() -> None:
    one, plain = (games_of(collect("x", s)[0]) for s in (CandidateSettings(1), None))
    assert [game.token_ids for game in one] == [game.token_ids for game in plain]
    for left, right in zip(one, plain, strict=True):
        for a, b in zip(left.turns, right.turns, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_the_slots_of_candidates_run_the_common_stream_once_and_are_given_back() -> None:
    groups, (engine,) = collect("x")
    games = games_of(groups)
    streams = sum(len(game.token_ids) for game in games)
    tried_out = sum(len(c.action) + 8 + 10 for g in games for t in g.turns for c in t.candidates)
    # Each of a game's slots reads its stream once; a candidate adds itself, its reply, its guess.
    assert engine.health().prefilled_tokens < THREE.count * streams + 2 * tried_out
    assert engine.health().outstanding == 0
    assert engine._by_slot == []
