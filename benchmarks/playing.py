"""Real games of the packaged agent, with the settings of a quick-start run.

Two ways to play the same games: ``play_async``, as the trainer does, and ``play_lockstep``, where
all games finish turn ``t`` before any begins turn ``t + 1``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from delta_belief_rl.cli.front import prepare
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.base import Completion, GenRequest, SamplingParams
from delta_belief_rl.engines.hf_engine import HFEngine
from delta_belief_rl.engines.pump import EnginePump, local_calls
from delta_belief_rl.envs.base import Action, Env, JudgeReply, JudgeRequest
from delta_belief_rl.envs.worlds.game import WORLD_NOTICES, WorldTwentyQuestions
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.envs.worlds.tasks import world_tasks
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.models.loading import load_causal_lm, load_tokenizer
from delta_belief_rl.rollout.driver import RolloutDriver
from delta_belief_rl.rollout.game import GameId, GameSettings, action_text, turn_budget
from delta_belief_rl.rollout.seeds import named_seed, turn_seed
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.actor import PolicyActor
from delta_belief_rl.trainer.settings import (
    actor_settings,
    env_settings,
    sampling_params,
    template_options,
)
from delta_belief_rl.types import Group, Task, Trajectory

ROOT = Path(__file__).resolve().parents[1]
AGENT = ROOT / "delta_belief_rl" / "assets" / "agent"
RUN_SHARE = 0.25
"""``min_finished`` of the engines of a run."""


@dataclass(frozen=True, slots=True)
class Arena:
    """One configuration with everything that games and updates need."""

    cfg: RunConfig
    actor: PolicyActor
    player: Any
    """The model that engines run: as in a run, without adapter layers (it is merged, and zero)."""
    chat: ChatFormat
    grammar: Grammar
    tasks: tuple[Task, ...]

    @classmethod
    def open(cls, threads: int) -> Arena:
        """The quick start's settings; its learning rate is 0, so that repeats see one policy."""
        cfg, _, _ = prepare(["experiment=quickstart", f"actor_rollout_ref.model.path={AGENT}"])
        settings = actor_settings(cfg, "cpu", 1, threads)
        optimizer = replace(settings.optimizer, lr=0.0, weight_decay=0.0)
        assert cfg.data.world is not None
        world = load_world(cfg.data.world)
        return cls(
            cfg=cfg,
            actor=PolicyActor(replace(settings, optimizer=optimizer)),
            player=load_causal_lm(AGENT),
            chat=ChatFormat.from_tokenizer(load_tokenizer(AGENT), template_options(cfg)),
            grammar=Grammar(world),
            tasks=tuple(world_tasks(world, "train")),
        )

    def env(self, task: Task, max_turns: int) -> Env:
        settings = env_settings(self.cfg, max_turns, notices=WORLD_NOTICES)
        return WorldTwentyQuestions(task, settings, self.grammar)

    def engine(self, games: int, max_len: int, min_finished: float = RUN_SHARE) -> HFEngine:
        tokens = self.cfg.actor_rollout_ref.rollout.max_num_batched_tokens
        return HFEngine(
            self.player,
            max_sequences=games,
            max_len=max_len,
            max_batch_tokens=tokens,
            min_finished=min_finished,
        )

    def limits(self, max_turns: int) -> GameSettings:
        turn = self.cfg.data.max_response_length
        return GameSettings(max_turns, turn, max_turns * 24, sampling=self.sampling())

    def sampling(self) -> SamplingParams:
        params = sampling_params(self.cfg, "train")
        return replace(params, stop_token_ids=(self.chat.eot_id,))


class Desk:
    """The world's judge with an answering time, which a language-model judge would have.

    Args:
        latency: Mean seconds of an answer; each takes 0.5 to 1.5 times that, by its question.
    """

    def __init__(self, grammar: Grammar, latency: float = 0.0) -> None:
        self._judge = WorldJudge(grammar.world, grammar)
        self._latency = latency

    async def ask(self, request: JudgeRequest) -> JudgeReply:
        if self._latency:
            share = named_seed("judge", request.task.secret, request.action) / 2**64
            await asyncio.sleep(self._latency * (0.5 + share))
        return self._judge.answer([request])[0]


def play_async(
    arena: Arena,
    engine: HFEngine,
    desk: Desk,
    tasks: Sequence[Task],
    games: int,
    max_turns: int,
    *,
    step: int = 1,
    deterministic: bool = True,
) -> list[Group]:
    """Play as the trainer does: every game goes on as soon as it has its answer."""

    async def collect() -> list[Group]:
        pump = EnginePump(*local_calls(engine), deterministic=deterministic)
        driver = RolloutDriver(
            pump,
            desk,
            arena.chat,
            lambda task: arena.env(task, max_turns),
            arena.limits(max_turns),
            max_games=len(tasks) * games,
            run_seed=arena.cfg.seed,
        )
        return await driver.collect(tasks, games, step, arena.sampling())

    return asyncio.run(collect())


@dataclass(slots=True)
class _Seat:
    """One game of a lock-step batch."""

    env: Env
    identity: GameId
    ids: list[int] = field(default_factory=list)
    over: bool = False

    @property
    def session(self) -> str:
        return self.identity.session(self.env.task.id)


def play_lockstep(
    arena: Arena,
    engine: HFEngine,
    desk: Desk,
    tasks: Sequence[Task],
    games: int,
    max_turns: int,
    *,
    step: int = 1,
    keep_cache: bool,
) -> list[tuple[int, ...]]:
    """Play the same games turn by turn.

    The engine (made with ``min_finished=1.0``) generates for all active games; when all have their
    question, the judge answers all; only then the next turn begins.

    Args:
        keep_cache: False forgets every game after each turn, so that the next one reads the whole
            conversation again, as an engine without a cache across calls does.

    Returns:
        The token streams, in the order of ``play_async``.
    """
    seats = [
        _Seat(arena.env(task, max_turns), GameId(arena.cfg.seed, step, game))
        for task in tasks
        for game in range(games)
    ]
    for seat in seats:
        seat.ids.extend(arena.chat.open_ids(seat.env.task.messages))
    asyncio.run(_turns(arena, engine, desk, seats, max_turns, keep_cache))
    engine.release([seat.session for seat in seats])
    return [tuple(seat.ids) for seat in seats]


async def _turns(
    arena: Arena,
    engine: HFEngine,
    desk: Desk,
    seats: Sequence[_Seat],
    max_turns: int,
    keep_cache: bool,
) -> None:
    limits = arena.limits(max_turns)
    for turn in range(max_turns):
        for seat in seats:
            seat.over = seat.over or turn_budget(limits, len(seat.ids)) <= 0
        active = [seat for seat in seats if not seat.over]
        if not active:
            return
        requests = [_request(arena, limits, seat, turn) for seat in active]
        completions = {c.session: c for c in engine.step(requests)}
        actions = [_act(arena, seat, completions[seat.session]) for seat in active]
        replies = await asyncio.gather(
            *(_judged(desk, seat, action) for seat, action in zip(active, actions, strict=True))
        )
        for seat, action, reply in zip(active, actions, replies, strict=True):
            outcome = seat.env.apply(action, reply)
            seat.ids.extend(arena.chat.reply_ids(outcome.reply))
            seat.over = outcome.done
        if not keep_cache:
            engine.release([seat.session for seat in active])


def _request(arena: Arena, limits: GameSettings, seat: _Seat, turn: int) -> GenRequest:
    identity = seat.identity
    budget = turn_budget(limits, len(seat.ids))
    return GenRequest(
        session=seat.session,
        prompt_ids=tuple(seat.ids),
        seed=turn_seed(identity.run_seed, seat.env.task.id, identity.step, identity.game, turn),
        sampling=replace(limits.sampling, max_tokens=budget),
    )


def _act(arena: Arena, seat: _Seat, completion: Completion) -> Action:
    seat.ids.extend(completion.token_ids)
    if completion.token_ids[-1] != arena.chat.eot_id:
        seat.ids.append(arena.chat.eot_id)
    return seat.env.parse(action_text(arena.chat, completion, (arena.chat.eot_id,)))


async def _judged(desk: Desk, seat: _Seat, action: Action) -> JudgeReply | None:
    if action.question is None or not action.needs_judge:
        return None
    return await desk.ask(seat.env.judge_request(action))


def counted(
    engine: HFEngine, play: Callable[[], list[Group] | list[tuple[int, ...]]]
) -> tuple[list[tuple[int, ...]], int]:
    """Token streams of the games that ``play`` plays, and the tokens that the engine ran."""
    before = engine.health()
    played = play()
    after = engine.health()
    streams: list[tuple[int, ...]] = []
    for item in played:
        streams += [g.token_ids for g in item.trajectories] if isinstance(item, Group) else [item]
    ran = after.generated_tokens + after.prefilled_tokens
    return streams, ran - before.generated_tokens - before.prefilled_tokens


def flat(groups: Sequence[Group]) -> list[Trajectory]:
    """The games of all groups, in order."""
    return [game for group in groups for game in group.trajectories]


def long_games(arena: Arena, turns: int, count: int) -> list[Trajectory]:
    """Games of exactly ``turns`` turns, from as many rollouts as it takes to find them."""
    found: list[Trajectory] = []
    tasks = arena.tasks[:32]
    engine = arena.engine(2 * len(tasks), turns * 24 + 64)
    desk = Desk(arena.grammar)
    for step in range(1, 101):
        played = flat(play_async(arena, engine, desk, tasks, 2, turns, step=step))
        found += [game for game in played if game.num_turns == turns]
        if len(found) >= count:
            return found[:count]
    raise RuntimeError(f"only {len(found)} of 100 rollouts' games reach {turns} turns")
