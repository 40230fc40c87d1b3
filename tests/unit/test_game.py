"""One game: the token stream, its limits, and what failures leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rollout_fakes import (
    EOT,
    HEADER,
    CharChat,
    GradedEnv,
    HookedEnv,
    ScriptedEnv,
    ScriptedJudge,
    make_task,
)

from delta_belief_rl.engines.base import GenRequest
from delta_belief_rl.engines.fake_engine import FakeEngine, Fault, FaultKind
from delta_belief_rl.engines.pump import EngineFailure, EnginePump
from delta_belief_rl.envs.base import Action, JudgeReply, Outcome
from delta_belief_rl.rollout.game import GameId, GameSettings, play_game
from delta_belief_rl.rollout.seeds import named_seed, turn_seed
from delta_belief_rl.types import StopReason, Trajectory, Verdict

CHAT = CharChat()
SETTINGS = GameSettings(max_turns=4, max_turn_tokens=20, max_episode_tokens=500)
ID = GameId(run_seed=7, step=3, game=1, run_id="run-a")
SESSION = ID.session("t0")


def play(
    script: Callable[[GenRequest], Any],
    *,
    settings: GameSettings = SETTINGS,
    env: ScriptedEnv | None = None,
    judge: ScriptedJudge | None = None,
    faults: dict[tuple[str, int], Fault] | None = None,
) -> tuple[Trajectory, FakeEngine]:
    engine = FakeEngine(script, CHAT.encode, version=5, faults=faults)
    env = env or ScriptedEnv(make_task())
    judge = judge or ScriptedJudge()
    return asyncio.run(play_game(env, engine, judge, CHAT, settings, ID)), engine


def turns_of(*texts: str) -> Callable[[GenRequest], str]:
    left = iter(texts)
    return lambda request: next(left)


def test_T1_T10_the_stream_is_prompt_then_sampled_ids_then_reply_for_every_turn() -> None:
    game, engine = play(turns_of("is it a", "win"))
    expected = list(CHAT.open_ids(game.task.messages))
    for text, reply in (("is it a", "no"), ("win", "finished")):
        expected += [*CHAT.encode(text), EOT, *CHAT.reply_ids(reply)]
    assert list(game.token_ids) == expected
    assert game.stop is StopReason.WIN
    assert game.strict_win
    assert game.compatible_win
    assert [t.action for t in game.turns] == ["is it a", "win"]
    assert [t.reply for t in game.turns] == ["no", "finished"]
    assert game.token_ids[-1] == HEADER
    assert engine.requests[1].prompt_ids == game.token_ids[: game.turns[1].start]
    assert engine.released == [SESSION]


def test_T5_the_action_mask_covers_exactly_the_sampled_tokens() -> None:
    game, _ = play(turns_of("abc", "de", "win"))
    mask = game.action_mask()
    sampled = [i for i, on in zip(game.token_ids, mask, strict=True) if on]
    assert sampled == [*CHAT.encode("abc"), EOT, *CHAT.encode("de"), EOT, *CHAT.encode("win"), EOT]
    assert mask.sum() == sum(len(t.logprobs) for t in game.turns)


@given(st.lists(st.lists(st.integers(0, 131), min_size=1, max_size=12), min_size=1, max_size=4))
@hypothesis_settings(max_examples=50, deadline=None)
def test_T1_any_sampled_ids_are_appended_untouched(actions: list[list[int]]) -> None:
    left = iter(actions)
    settings = GameSettings(max_turns=len(actions), max_turn_tokens=50, max_episode_tokens=5000)
    game, _ = play(lambda request: next(left), settings=settings)
    for turn, ids in zip(game.turns, actions, strict=False):
        assert list(game.token_ids[turn.start : turn.end]) == ids
    assert len(game.belief_points) == game.num_turns + 1


def test_an_action_cut_by_the_token_cap_gets_an_untrained_end_of_turn_token() -> None:
    settings = GameSettings(max_turns=1, max_turn_tokens=3, max_episode_tokens=500)
    game, _ = play(turns_of("abcdef"), settings=settings)
    (turn,) = game.turns
    assert turn.truncated
    assert turn.n_tokens == 3
    assert game.token_ids[turn.end] == EOT
    assert not game.action_mask()[turn.end]
    assert turn.action == "abc"


def test_C2_max_turn_tokens_bounds_every_turn() -> None:
    settings = GameSettings(max_turns=3, max_turn_tokens=2, max_episode_tokens=500)
    game, engine = play(lambda request: "abcdef", settings=settings)
    assert game.stop is StopReason.TURN_LIMIT
    assert [t.n_tokens for t in game.turns] == [2, 2, 2]
    assert all(r.sampling.max_tokens == 2 for r in engine.requests)


def test_C2_max_episode_tokens_bounds_the_stream_at_the_end_of_an_action() -> None:
    opening = len(CHAT.open_ids(make_task().messages))
    settings = GameSettings(max_turns=9, max_turn_tokens=10, max_episode_tokens=opening + 12)
    game, engine = play(lambda request: "abcd", settings=settings)
    assert game.stop is StopReason.CONTEXT_FULL
    assert max(t.end for t in game.turns) <= opening + 12
    assert [r.sampling.max_tokens for r in engine.requests] == [10, 2]


@pytest.mark.parametrize(("room", "turns"), [(5, 0), (6, 1), (7, 1)])
def test_C2_a_turn_without_the_room_that_it_must_have_is_not_taken(room: int, turns: int) -> None:
    opening = len(CHAT.open_ids(make_task().messages))
    limits = GameSettings(9, 6, opening + room, least_turn_tokens=6)
    game, engine = play(lambda request: "abcdef", settings=limits)
    assert game.stop is StopReason.CONTEXT_FULL
    assert game.num_turns == len(engine.requests) == turns


@pytest.mark.parametrize("room", range(-2, 40))
def test_C1_a_negative_budget_never_reaches_the_engine_and_keeps_earlier_turns(room: int) -> None:
    opening = len(CHAT.open_ids(make_task().messages))
    settings = GameSettings(max_turns=20, max_turn_tokens=6, max_episode_tokens=opening + room)
    game, engine = play(lambda request: "abc", settings=settings)
    assert all(r.sampling.max_tokens > 0 for r in engine.requests)
    assert game.stop is StopReason.CONTEXT_FULL
    assert game.num_turns == len(engine.requests)


@pytest.mark.parametrize("limit", [2, 5])
def test_a_game_that_the_environment_ends_without_a_win_keeps_its_grade(limit: int) -> None:
    settings = GameSettings(max_turns=limit, max_turn_tokens=50, max_episode_tokens=5000)
    judge = ScriptedJudge(lambda request: JudgeReply(Verdict.OTHER, "well", score=0.75))
    game, _ = play(
        turns_of("a", "done"), settings=settings, judge=judge, env=GradedEnv(make_task())
    )
    assert game.stop is (StopReason.TURN_LIMIT if limit == 2 else StopReason.ENDED)
    assert [turn.score for turn in game.turns] == [None, 0.75]
    assert game.score == 0.75
    assert not game.strict_win


def test_J4_the_judge_is_not_asked_about_an_action_without_a_question() -> None:
    judge = ScriptedJudge()
    game, _ = play(turns_of(" ", "win"), judge=judge)
    assert [r.action for r in judge.requests] == ["win"]
    assert game.turns[0].verdict is Verdict.INVALID


def test_J1_a_judge_error_is_a_recorded_turn_and_the_game_goes_on() -> None:
    replies = iter([JudgeReply(Verdict.ERROR, reason="down"), JudgeReply(Verdict.YES, "yes")])
    game, _ = play(turns_of("a", "win"), judge=ScriptedJudge(lambda request: next(replies)))
    assert [t.verdict for t in game.turns] == [Verdict.ERROR, Verdict.WIN]
    assert game.turns[0].reply == "ask again"
    assert game.turns[0].raw_verdict == "error: down"


def test_J14_what_the_judge_wrote_in_place_of_an_answer_is_on_the_turn() -> None:
    reply = JudgeReply(Verdict.ERROR, "who knows", "no answer was found")
    replies = iter([reply, JudgeReply(Verdict.YES, "yes")])
    game, _ = play(turns_of("a", "win"), judge=ScriptedJudge(lambda request: next(replies)))
    assert game.turns[0].raw_verdict == "error: no answer was found: who knows"


def test_what_the_environment_noticed_is_on_the_turn() -> None:
    class Noticing(ScriptedEnv):
        def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
            return replace(super().apply(action, reply), diagnostics=("no_question", "repeated"))

    game, _ = play(turns_of("a", "win"), env=Noticing(make_task()))
    assert [turn.diagnostics for turn in game.turns] == [("no_question", "repeated")] * 2


def test_J1_a_game_ends_as_judge_failed_at_its_limit_of_errors() -> None:
    settings = GameSettings(
        max_turns=9, max_turn_tokens=20, max_episode_tokens=500, max_judge_errors=2
    )
    judge = ScriptedJudge(lambda request: JudgeReply(Verdict.ERROR, reason="down"))
    game, _ = play(lambda request: "a", settings=settings, judge=judge)
    assert game.stop is StopReason.JUDGE_FAILED
    assert game.num_turns == 2


def test_an_engine_error_ends_the_game_and_keeps_the_earlier_turns() -> None:
    faults = {(SESSION, 1): Fault(FaultKind.ERROR)}
    game, engine = play(lambda request: "a", faults=faults)
    assert game.stop is StopReason.ENGINE_FAILED
    assert game.num_turns == 1
    assert game.token_ids[-1] == HEADER
    assert engine.released == [SESSION]


def test_H2_an_engine_that_raises_is_not_turned_into_an_outcome_and_the_session_is_released() -> (
    None
):
    engine = FakeEngine(
        lambda request: "a", CHAT.encode, faults={(SESSION, 1): Fault(FaultKind.RAISE)}
    )
    released: list[str] = []

    async def release(names: list[str]) -> None:
        released.extend(names)

    async def main() -> None:
        pump = EnginePump(engine.step, release)
        with pytest.raises(EngineFailure, match="injected fault"):
            await play_game(ScriptedEnv(make_task()), pump, ScriptedJudge(), CHAT, SETTINGS, ID)

    asyncio.run(main())


def test_L2_each_turn_carries_the_version_that_sampled_it() -> None:
    faults = {(SESSION, 1): Fault(FaultKind.VERSION, version=6)}
    game, _ = play(turns_of("a", "b", "win"), faults=faults)
    assert [t.adapter_version for t in game.turns] == [5, 6, 5]


def test_hooks_describe_the_state_before_the_action() -> None:
    game, _ = play(turns_of("a", "b", "win"), env=HookedEnv(make_task()))
    assert [t.state_key for t in game.turns] == ["after 0", "after 1", "after 2"]
    assert [t.progress for t in game.turns] == [0.0, 1.0, 2.0]
    assert [t.action_key for t in game.turns] == ["A", "B", "WIN"]


def test_R15_seeds_are_a_function_of_run_seed_task_step_game_and_turn() -> None:
    _, engine = play(turns_of("a", "win"))
    assert [r.seed for r in engine.requests] == [turn_seed(7, "t0", 3, 1, k) for k in range(2)]
    names = [(7, "t0", 3, 1, 0), (8, "t0", 3, 1, 0), (7, "t1", 3, 1, 0), (7, "t0", 4, 1, 0),
             (7, "t0", 3, 2, 0), (7, "t0", 3, 1, 1), (73, "t0", 1, 1, 0)]  # fmt: skip
    seeds = {turn_seed(*n) for n in names}
    assert len(seeds) == len(names)
    assert all(0 <= s < 2**64 for s in seeds)
    assert named_seed("a", "bc") != named_seed("ab", "c")
    assert named_seed("1") != named_seed(1)
