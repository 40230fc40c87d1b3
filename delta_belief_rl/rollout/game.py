"""One game, from its first prompt to a finished trajectory.

The transcript is a list of token ids that only grows. Sampled ids are appended as they were
sampled; the environment's text is rendered once, when it is appended. Nothing is decoded and
encoded again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from delta_belief_rl.engines.base import (
    Completion,
    Engine,
    FinishReason,
    GenRequest,
    SamplingParams,
)
from delta_belief_rl.envs.base import Action, Env, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.rollout.seeds import turn_seed
from delta_belief_rl.types import Message, StopReason, Trajectory, Turn, Verdict


class AsyncJudge(Protocol):
    """What a game needs of the judge pool. Failures are replies with ``Verdict.ERROR``."""

    async def ask(self, request: JudgeRequest) -> JudgeReply:
        """Judge one action."""
        ...


class Chat(Protocol):
    """What a game needs of ``text.chat.ChatFormat``."""

    @property
    def eot_id(self) -> int:
        """The token that ends a turn."""
        ...

    def open_ids(self, messages: Sequence[Message], /) -> tuple[int, ...]:
        """The first prompt, with the header of the first turn."""
        ...

    def reply_ids(self, reply: str, /) -> tuple[int, ...]:
        """Everything between the end-of-turn token and the next sampled token."""
        ...

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of sampled ids."""
        ...


@dataclass(frozen=True, slots=True)
class GameSettings:
    """The limits of a game and how its tokens are drawn.

    Attributes:
        max_turns: The game ends with ``TURN_LIMIT`` after so many turns.
        max_turn_tokens: Most tokens sampled in one turn.
        max_episode_tokens: Most tokens of the stream at the end of an action; prompt, replies and
            sampled tokens all count. A turn that has no room left ends the game with
            ``CONTEXT_FULL``.
        max_judge_errors: The game ends with ``JUDGE_FAILED`` at so many judge errors.
        sampling: Settings of the engine; ``max_tokens`` is replaced by what the two limits leave,
            and the chat's end-of-turn token is added to the stop tokens.
        clock: Seconds for the timings of turns; a constant one makes trajectories comparable.
    """

    max_turns: int
    max_turn_tokens: int
    max_episode_tokens: int
    max_judge_errors: int = 3
    sampling: SamplingParams = field(default_factory=SamplingParams)
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True)
class GameId:
    """Which game this is; the names that its random numbers depend on.

    Attributes:
        step: Training step (or epoch) that the game belongs to.
        game: Index inside its group.
        phase: Keeps sessions of training and validation apart. It does not enter the seed.
    """

    run_seed: int
    step: int
    game: int
    run_id: str = ""
    phase: str = "train"

    def session(self, task_id: str) -> str:
        """Name of the game's engine session, unique inside a run."""
        return f"{self.phase}/{self.step:08d}/{task_id}/{self.game:05d}"


@dataclass(slots=True)
class _Stream:
    """The growing game."""

    ids: list[int]
    turns: list[Turn]
    judge_errors: int = 0


async def play_game(
    env: Env,
    engine: Engine,
    judge: AsyncJudge,
    chat: Chat,
    settings: GameSettings,
    identity: GameId,
) -> Trajectory:
    """Play one game to its end.

    A failed engine call ends the game with ``ENGINE_FAILED``; a failed judge call costs one turn
    with ``Verdict.ERROR``. Earlier turns are kept in either case.

    Returns:
        The trajectory; its stream ends with the last reply and the header of the turn after it.
    """
    task = env.task
    stream = _Stream(ids=list(chat.open_ids(task.messages)), turns=[])
    session = identity.session(task.id)
    try:
        stop = await _play(env, engine, judge, chat, settings, identity, stream)
    finally:
        await engine.release(session)
    return Trajectory(
        task=task,
        game=identity.game,
        token_ids=tuple(stream.ids),
        turns=tuple(stream.turns),
        stop=stop,
        run_id=identity.run_id,
        step=identity.step,
    )


async def _play(
    env: Env,
    engine: Engine,
    judge: AsyncJudge,
    chat: Chat,
    settings: GameSettings,
    identity: GameId,
    stream: _Stream,
) -> StopReason:
    """Turn after turn until there is a reason to stop."""
    for index in range(settings.max_turns):
        budget = turn_budget(settings, len(stream.ids))
        if budget <= 0:
            return StopReason.CONTEXT_FULL
        state_key, progress = _state_key(env), _progress(env)
        request = _request(env, chat, settings, identity, index, budget, stream.ids)
        began = settings.clock()
        completion = await engine.generate(request)
        engine_seconds = settings.clock() - began
        if completion.finish is FinishReason.ERROR or not completion.token_ids:
            return StopReason.ENGINE_FAILED
        start, end = _append_action(chat, completion, stream.ids)
        text = action_text(chat, completion, request.sampling.stop_token_ids)
        began = settings.clock()
        action, reply, outcome = await _respond(env, judge, text)
        stream.ids.extend(chat.reply_ids(outcome.reply))
        stream.turns.append(
            Turn(
                index=index,
                start=start,
                end=end,
                logprobs=completion.logprobs,
                adapter_version=completion.adapter_version,
                action=text,
                reply=outcome.reply,
                verdict=outcome.verdict,
                strict_win=outcome.strict_win,
                compatible_win=outcome.compatible_win,
                is_guess=outcome.is_guess,
                is_list=outcome.is_list,
                truncated=completion.finish is FinishReason.LENGTH,
                state_key=state_key,
                action_key=outcome.action_key or _action_key(env, action),
                progress=progress,
                judge_seconds=settings.clock() - began,
                engine_seconds=engine_seconds,
                raw_verdict=_raw_verdict(reply),
            )
        )
        stop = _after(outcome, stream, settings)
        if stop is not None:
            return stop
    return StopReason.TURN_LIMIT


def turn_budget(settings: GameSettings, used: int) -> int:
    """Tokens that the next turn may sample after ``used`` ones; 0 or less means no room."""
    return min(settings.max_turn_tokens, settings.max_episode_tokens - used)


def action_text(chat: Chat, completion: Completion, stop_ids: tuple[int, ...]) -> str:
    """The sampled text as the environment reads it: without the stop token that ended it."""
    ids = completion.token_ids
    return chat.decode(ids[:-1] if ids[-1] in stop_ids else ids)


def _request(
    env: Env,
    chat: Chat,
    settings: GameSettings,
    identity: GameId,
    index: int,
    budget: int,
    ids: list[int],
) -> GenRequest:
    stops = settings.sampling.stop_token_ids
    if chat.eot_id not in stops:
        stops = (chat.eot_id, *stops)
    return GenRequest(
        session=identity.session(env.task.id),
        prompt_ids=tuple(ids),
        seed=turn_seed(identity.run_seed, env.task.id, identity.step, identity.game, index),
        sampling=replace(settings.sampling, max_tokens=budget, stop_token_ids=stops),
    )


def _append_action(chat: Chat, completion: Completion, ids: list[int]) -> tuple[int, int]:
    """Append the sampled ids; returns their span. A missing end-of-turn token follows untrained."""
    start = len(ids)
    ids.extend(completion.token_ids)
    end = len(ids)
    if completion.token_ids[-1] != chat.eot_id:
        ids.append(chat.eot_id)
    return start, end


async def _respond(
    env: Env, judge: AsyncJudge, text: str
) -> tuple[Action, JudgeReply | None, Outcome]:
    """The environment's reaction; the judge is asked only about a question that could be parsed."""
    action = env.parse(text)
    reply = None
    if action.question is not None and action.needs_judge:
        reply = await judge.ask(env.judge_request(action))
    return action, reply, env.apply(action, reply)


def _after(outcome: Outcome, stream: _Stream, settings: GameSettings) -> StopReason | None:
    """Why the game ends after this turn, or None."""
    if outcome.verdict is Verdict.ERROR:
        stream.judge_errors += 1
        if stream.judge_errors >= settings.max_judge_errors:
            return StopReason.JUDGE_FAILED
    if outcome.done:
        return StopReason.WIN if outcome.verdict is Verdict.WIN else StopReason.TURN_LIMIT
    return None


def _raw_verdict(reply: JudgeReply | None) -> str:
    """The judge's own word; for a failed call, why it failed."""
    if reply is None:
        return ""
    if reply.verdict is Verdict.ERROR:
        return f"error: {reply.reason}" if reply.reason else "error"
    return reply.text or reply.verdict.value


def _state_key(env: Env) -> str:
    hook: Callable[[], str] | None = getattr(env, "state_key", None)
    return hook() if hook is not None else ""


def _progress(env: Env) -> float:
    hook: Callable[[], float] | None = getattr(env, "progress", None)
    return float(hook()) if hook is not None else 0.0


def _action_key(env: Env, action: Action) -> str:
    hook: Callable[[str], str] | None = getattr(env, "action_key", None)
    return hook(action.text) if hook is not None else ""
