"""Many games at once: determinism, order of results, failures, limits, heartbeat."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rollout_fakes import VOCAB, CharChat, ScriptedEnv, ScriptedJudge, make_task
from transformers import AutoModelForCausalLM, Qwen3Config

from delta_belief_rl.engines.base import Engine, SamplingParams
from delta_belief_rl.engines.fake_engine import FakeEngine, Fault, FaultKind
from delta_belief_rl.engines.hf_engine import HFEngine
from delta_belief_rl.engines.pump import EngineFailure, EnginePump, EngineRouter, local_calls
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.judge.pool import JudgePool, JudgePoolFailure, JudgePoolSettings
from delta_belief_rl.rollout.driver import Heartbeat, RolloutDriver
from delta_belief_rl.rollout.game import GameSettings
from delta_belief_rl.types import Group, StopReason, Task, Trajectory, Verdict

CHAT = CharChat()
SETTINGS = GameSettings(max_turns=3, max_turn_tokens=5, max_episode_tokens=200)
TASKS = [make_task(f"t{i}") for i in range(4)]
SAMPLING = SamplingParams(temperature=1.0)


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return AutoModelForCausalLM.from_config(config).eval()


MODEL = tiny_model()


def driver(engine: Engine, judge: Any = None, **options: Any) -> RolloutDriver:
    settings: dict[str, Any] = {"max_games": 64, "run_seed": 7, "run_id": "run-a"} | options
    return RolloutDriver(engine, judge or ScriptedJudge(), CHAT, ScriptedEnv, SETTINGS, **settings)


def fake(script: Callable[..., Any] = lambda r: "abc", **options: Any) -> FakeEngine:
    return FakeEngine(script, CHAT.encode, **options)


def collect(engine: Engine, judge: Any = None, games: int = 3, **options: Any) -> list[Group]:
    return asyncio.run(driver(engine, judge, **options).collect(TASKS, games, 2, SAMPLING))


def delays(salt: str) -> Callable[[JudgeRequest], float]:
    """Another order of completion for each salt."""

    def delay(request: JudgeRequest) -> float:
        text = f"{salt}/{request.task.id}/{request.action}/{len(request.history)}"
        return hashlib.sha256(text.encode()).digest()[0] / 255 * 0.01

    return delay


def hf_collect(
    salt: str, *, replicas: int = 1, max_games: int = 64, slots: int = 16
) -> tuple[list[Group], list[HFEngine]]:
    engines = [HFEngine(MODEL, max_sequences=slots, max_len=256) for _ in range(replicas)]
    router = EngineRouter(
        [EnginePump(*local_calls(e, threaded=False), deterministic=True) for e in engines]
    )
    judge = ScriptedJudge(delay=delays(salt))
    return collect(router, judge, max_games=max_games), engines


@pytest.mark.parametrize(
    ("replicas", "max_games", "slots"),
    [(1, 64, 16), (2, 64, 16), (1, 5, 16), (2, 3, 16), (1, 64, 4)],
)
def test_R15_any_order_of_judge_replies_gives_the_same_games_bit_for_bit(
    replicas: int, max_games: int, slots: int
) -> None:
    options = {"replicas": replicas, "max_games": max_games, "slots": slots}
    first, _ = hf_collect("x", **options)
    assert hf_collect("y", **options)[0] == first
    assert hf_collect("z", **options)[0] == first


def test_R15_replicas_and_concurrency_do_not_change_what_is_sampled() -> None:
    def tokens(groups: list[Group]) -> list[tuple[int, ...]]:
        return [t.token_ids for g in groups for t in g.trajectories]

    first = tokens(hf_collect("x")[0])
    assert tokens(hf_collect("x", replicas=2)[0]) == first
    assert tokens(hf_collect("x", max_games=3)[0]) == first


def test_games_with_a_real_model_prefill_every_token_once_and_leave_no_session() -> None:
    groups, (engine,) = hf_collect("x")
    games = [t for g in groups for t in g.trajectories]
    health = engine.health()
    sampled = sum(t.n_tokens for g in games for t in g.turns)
    decoded = sum(t.n_tokens - 1 for g in games for t in g.turns)
    seen = sum(g.turns[-1].end - 1 for g in games)
    assert health.generated_tokens == sampled
    assert health.prefilled_tokens == seen - decoded
    assert engine.cache_misses == 0
    assert health.outstanding == 0


def test_free_mode_plays_the_same_games_up_to_rounding() -> None:
    engine = HFEngine(MODEL, max_sequences=16, max_len=256)
    groups = collect(EnginePump(*local_calls(engine)), ScriptedJudge(delay=delays("q")))
    exact, _ = hf_collect("x")
    ours = [t.token_ids for g in groups for t in g.trajectories]
    assert ours == [t.token_ids for g in exact for t in g.trajectories]


def test_the_result_has_the_order_of_the_tasks_whatever_ends_first() -> None:
    judge = ScriptedJudge(delay=delays("w"))
    groups = collect(fake(), judge)
    assert [g.task.id for g in groups] == [t.id for t in TASKS]
    assert [[t.game for t in g.trajectories] for g in groups] == [[0, 1, 2]] * 4
    assert all(t.task is g.task for g in groups for t in g.trajectories)
    assert all((t.run_id, t.step) == ("run-a", 2) for g in groups for t in g.trajectories)


def test_no_more_than_max_games_live_at_once() -> None:
    live: set[str] = set()
    most = 0

    class Counting(ScriptedJudge):
        async def ask(self, request: JudgeRequest) -> JudgeReply:
            nonlocal most
            key = f"{request.task.id}{id(request)}"
            live.add(key)
            most = max(most, len(live))
            await asyncio.sleep(0.001)
            live.discard(key)
            return JudgeReply(Verdict.NO, "no")

    collect(fake(), Counting(), max_games=3)
    assert most == 3


def test_H2_the_first_unexpected_failure_cancels_all_games_and_is_raised() -> None:
    session = "train/00000002/t1/00001"
    engine = fake(faults={(session, 1): Fault(FaultKind.RAISE, message="boom")})
    hung = ScriptedJudge(delay=lambda r: 0.001 if r.task.id == "t1" else 60.0)
    with pytest.raises(RuntimeError, match="boom"):
        collect(engine, hung)
    assert len(engine.released) == 12


@pytest.mark.parametrize("deterministic", [True, False])
def test_H2_a_failing_engine_step_stops_the_rollout_and_the_driver_can_be_used_again(
    deterministic: bool,
) -> None:
    engine = fake(faults={("train/00000002/t1/00001", 1): Fault(FaultKind.RAISE, message="boom")})
    pump = EnginePump(engine.step, engine.release_all, deterministic=deterministic)
    with pytest.raises(EngineFailure, match="boom"):
        collect(pump)
    # The books of live games are balanced again: one more leave would be too many.
    with pytest.raises(RuntimeError, match="more often"):
        pump.leave()


def test_H2_a_failure_before_any_other_game_starts_is_raised_too() -> None:
    def broken(task: Task) -> ScriptedEnv:
        raise KeyError(task.id)

    pump = EnginePump(fake().step, deterministic=True)
    play = RolloutDriver(pump, ScriptedJudge(), CHAT, broken, SETTINGS, max_games=4, run_seed=0)
    with pytest.raises(KeyError):
        asyncio.run(play.collect(TASKS, 2, 0, SAMPLING))
    with pytest.raises(RuntimeError, match="more often"):
        pump.leave()


def test_J2_a_judge_pool_that_gives_up_stops_the_rollout() -> None:
    async def broken(requests: list[JudgeRequest]) -> list[JudgeReply]:
        return [JudgeReply(Verdict.ERROR, reason="no GPU") for _ in requests]

    settings = JudgePoolSettings(max_attempts=1, min_replies=5, window=10)
    with pytest.raises(JudgePoolFailure, match="no GPU"):
        collect(fake(), JudgePool([broken], settings))


def test_an_engine_error_costs_one_game_and_is_counted() -> None:
    engine = fake(faults={("train/00000002/t1/00001", 1): Fault(FaultKind.ERROR)})
    play = driver(engine)
    groups = asyncio.run(play.collect(TASKS, 2, 2, SAMPLING))
    failed = groups[1].trajectories[1]
    assert failed.stop is StopReason.ENGINE_FAILED
    assert failed.num_turns == 1
    assert play.stats is not None
    assert play.stats.stops == {"turn_limit": 7, "engine_failed": 1}
    assert play.stats.games == 8
    assert play.stats.turns == 7 * 3 + 1
    assert play.stats.verdicts == {"no": 22}
    assert play.stats.adapter_versions == {0: 22}
    assert play.stats.sampled_tokens == 22 * 4
    assert play.stats.truncated_turns == 0


def test_progress_is_told_after_every_game() -> None:
    told: list[tuple[int, int]] = []
    collect(fake(), on_progress=lambda done, total: told.append((done, total)))
    assert told == [(i, 12) for i in range(1, 13)]


def test_H11_the_heartbeat_says_what_is_outstanding_and_for_how_long() -> None:
    beats: list[Heartbeat] = []
    play = driver(fake(), ScriptedJudge(delay=lambda r: 0.05))
    assert play.heartbeat().phase == "idle"

    async def ask_meanwhile() -> None:
        games = asyncio.create_task(play.collect(TASKS, 1, 2, SAMPLING, phase="val"))
        await asyncio.sleep(0.03)
        # As the heartbeat does: from another thread.
        beats.append(await asyncio.to_thread(play.heartbeat))
        await games

    asyncio.run(ask_meanwhile())
    assert (beats[0].engine_calls, beats[0].judge_calls) == (0, 4)
    assert 0.01 < beats[0].judge_age < 0.05
    assert (beats[0].phase, beats[0].games_live, beats[0].games_total) == ("val", 4, 4)
    assert play.heartbeat().judge_calls == 0


def test_H10_a_capacity_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        driver(fake(), max_games=0)


def test_H10_every_engine_gets_a_worker_when_there_are_fewer_games_than_engines() -> None:
    pumps: list[Engine] = [EnginePump(fake().step, deterministic=True) for _ in range(3)]
    groups = collect(EngineRouter(pumps), max_games=1)
    assert sum(len(g.trajectories) for g in groups) == 12


def test_equal_task_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="must differ"):
        asyncio.run(driver(fake()).collect([TASKS[0], TASKS[0]], 1, 0, SAMPLING))


def test_no_tasks_give_no_groups() -> None:
    assert asyncio.run(driver(fake()).collect([], 2, 0, SAMPLING)) == []


def test_J9_validation_and_training_share_the_driver_but_not_their_sessions() -> None:
    engine = fake()
    play = driver(engine)

    async def both() -> list[list[Trajectory]]:
        rounds = [await play.collect(TASKS, 1, 2, SAMPLING, phase=p) for p in ("train", "val")]
        return [[t for g in groups for t in g.trajectories] for groups in rounds]

    train, val = asyncio.run(both())
    assert [t.token_ids for t in train] == [t.token_ids for t in val]
    assert {r.session.split("/")[0] for r in engine.requests} == {"train", "val"}
