"""One game, from its first prompt to a finished trajectory.

The transcript is a list of token ids that only grows. Sampled ids are appended as they were
sampled; the environment's text is rendered once, when it is appended. Nothing is decoded and
encoded again.

How a game comes to its next action is up to a ``Chooser``. The usual one takes what is sampled;
``rollout.candidates`` has one that tries several actions first.

A game may go on where another one stood (``Beginning``); ``rollout.branching`` says how its
environment comes to that state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
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
from delta_belief_rl.types import Candidate, Message, StopReason, Trajectory, Turn, Verdict


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
        least_turn_tokens: Room that a turn must have.
        max_judge_errors: The game ends with ``JUDGE_FAILED`` at so many judge errors.
        sampling: Settings of the engine; ``max_tokens`` is replaced by what the two limits leave,
            and the chat's end-of-turn token is added to the stop tokens.
        clock: Seconds for the timings of turns; a constant one makes trajectories comparable.
    """

    max_turns: int
    max_turn_tokens: int
    max_episode_tokens: int
    least_turn_tokens: int = 1
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


@dataclass(frozen=True, slots=True)
class GameParts:
    """Everything that takes part in one game and stays the same from turn to turn."""

    env: Env
    engine: Engine
    judge: AsyncJudge
    chat: Chat
    settings: GameSettings
    identity: GameId


@dataclass(frozen=True, slots=True)
class Move:
    """The action that a game takes; the environment has applied it already.

    Attributes:
        completion: The sampled tokens, with the log-probs of the sampler.
        text: What the environment has read.
        reply: The judge's; None where it was not asked.
        candidates: What the action was chosen from.
    """

    completion: Completion
    text: str
    action: Action
    reply: JudgeReply | None
    outcome: Outcome
    engine_seconds: float
    judge_seconds: float
    candidates: tuple[Candidate, ...] = ()


class Chooser(Protocol):
    """How a game comes to its next action. One object serves one game."""

    def sessions(self, session: str, /) -> tuple[str, ...]:
        """Every engine session that the game uses, given the name of its own."""
        ...

    async def move(self, parts: GameParts, request: GenRequest, index: int, /) -> Move | None:
        """Take turn ``index``.

        Args:
            request: How one action is sampled here: the stream so far, its seed and its limits.

        Returns:
            None when the engine has failed.
        """
        ...


class FirstSample:
    """The action is what the policy says."""

    def sessions(self, session: str, /) -> tuple[str, ...]:
        """The game's own session."""
        return (session,)

    async def move(self, parts: GameParts, request: GenRequest, index: int, /) -> Move | None:
        """Sample one action and let the environment answer it."""
        clock = parts.settings.clock
        began = clock()
        completion = await parts.engine.generate(request)
        engine_seconds = clock() - began
        if is_failed(completion):
            return None
        text = action_text(parts.chat, completion, request.sampling.stop_token_ids)
        began = clock()
        action, reply, outcome = await respond(parts.env, parts.judge, text)
        return Move(completion, text, action, reply, outcome, engine_seconds, clock() - began)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a game has behind it when it begins; its environment stands after these turns.

    Attributes:
        token_ids: The stream so far, up to the next sampled token; empty for the task's opening.
        turns: As they were played.
        lineage: See ``Trajectory.lineage``.
    """

    token_ids: tuple[int, ...] = ()
    turns: tuple[Turn, ...] = ()
    lineage: tuple[tuple[int, int], ...] = ()


OPENING = Beginning()
"""Nothing was played yet."""


class Witness(Protocol):
    """Sees a game while it is played. One object serves one game."""

    def before(self, env: Env, /) -> None:
        """A turn is about to be taken."""
        ...

    def after(self, move: Move, /) -> None:
        """It was taken."""
        ...


@dataclass(slots=True)
class _Stream:
    """The growing game."""

    ids: list[int]
    turns: list[Turn]
    judge_errors: int = 0

    @classmethod
    def of(cls, beginning: Beginning, opening: Sequence[int]) -> _Stream:
        """A stream that grows from here on."""
        errors = sum(turn.verdict is Verdict.ERROR for turn in beginning.turns)
        return cls(list(beginning.token_ids or opening), list(beginning.turns), errors)


async def play_game(
    env: Env,
    engine: Engine,
    judge: AsyncJudge,
    chat: Chat,
    settings: GameSettings,
    identity: GameId,
    chooser: Chooser | None = None,
    *,
    beginning: Beginning = OPENING,
    witness: Witness | None = None,
) -> Trajectory:
    """Play one game to its end.

    A failed engine call ends the game with ``ENGINE_FAILED``; a failed judge call costs one turn
    with ``Verdict.ERROR``. Earlier turns are kept in either case.

    Args:
        chooser: Takes every turn of this game; ``FirstSample`` when None.
        beginning: What was played before.
        witness: Sees every turn that this game plays itself.

    Returns:
        The trajectory; its stream ends with the last reply and the header of the turn after it.
    """
    task = env.task
    stream = _Stream.of(beginning, chat.open_ids(task.messages))
    chooser = chooser or FirstSample()
    try:
        parts = GameParts(env, engine, judge, chat, settings, identity)
        stop = await _play(parts, chooser, stream, witness)
    finally:
        for session in chooser.sessions(identity.session(task.id)):
            await engine.release(session)
    return Trajectory(
        task=task,
        game=identity.game,
        token_ids=tuple(stream.ids),
        turns=tuple(stream.turns),
        stop=stop,
        run_id=identity.run_id,
        step=identity.step,
        lineage=beginning.lineage,
    )


async def _play(
    parts: GameParts, chooser: Chooser, stream: _Stream, witness: Witness | None
) -> StopReason:
    """Turn after turn until there is a reason to stop."""
    settings, env = parts.settings, parts.env
    for index in range(len(stream.turns), settings.max_turns):
        budget = turn_budget(settings, len(stream.ids))
        if budget < settings.least_turn_tokens:
            return StopReason.CONTEXT_FULL
        state_key, progress, before = _state_key(env), _progress(env), _uncertainty(env)
        if witness is not None:
            witness.before(env)
        request = _request(parts, index, budget, stream.ids)
        move = await chooser.move(parts, request, index)
        if move is None:
            return StopReason.ENGINE_FAILED
        if witness is not None:
            witness.after(move)
        start = len(stream.ids)
        stream.ids.extend(closed_ids(parts.chat, move.completion))
        stream.ids.extend(parts.chat.reply_ids(move.outcome.reply))
        turn = _turn(env, move, index, start, state_key, progress)
        stream.turns.append(_with_uncertainty(turn, before, _uncertainty(env)))
        stop = _after(move.outcome, stream, settings)
        if stop is not None:
            return stop
    return StopReason.TURN_LIMIT


def _turn(env: Env, move: Move, index: int, start: int, state_key: str, progress: float) -> Turn:
    """The record of a move whose tokens begin at ``start``."""
    completion, outcome, question = move.completion, move.outcome, move.action.question
    reads, writes = _footprint(env)
    return Turn(
        index=index,
        start=start,
        end=start + len(completion.token_ids),
        logprobs=completion.logprobs,
        adapter_version=completion.adapter_version,
        action=move.text,
        reply=outcome.reply,
        verdict=outcome.verdict,
        strict_win=outcome.strict_win,
        compatible_win=outcome.compatible_win,
        is_guess=outcome.is_guess,
        is_list=outcome.is_list,
        truncated=completion.finish is FinishReason.LENGTH,
        state_key=state_key,
        action_key=outcome.action_key or _action_key(env, move.action),
        reads=reads,
        writes=writes,
        progress=progress,
        judge_seconds=move.judge_seconds,
        engine_seconds=move.engine_seconds,
        raw_verdict=_raw_verdict(move.reply),
        diagnostics=outcome.diagnostics,
        question="" if question is None or question == move.text.strip() else question,
        candidates=move.candidates,
        score=outcome.score,
        order=completion.order,
    )


def turn_budget(settings: GameSettings, used: int) -> int:
    """Tokens that the next turn may sample after ``used`` ones; 0 or less means no room."""
    return min(settings.max_turn_tokens, settings.max_episode_tokens - used)


def action_text(chat: Chat, completion: Completion, stop_ids: tuple[int, ...]) -> str:
    """The sampled text as the environment reads it: without the stop token that ended it."""
    ids = completion.token_ids
    return chat.decode(ids[:-1] if ids[-1] in stop_ids else ids)


def is_failed(completion: Completion) -> bool:
    """Whether the engine gave no tokens to go on with."""
    return completion.finish is FinishReason.ERROR or not completion.token_ids


def closed_ids(chat: Chat, completion: Completion) -> tuple[int, ...]:
    """The sampled ids; an end-of-turn token that was not sampled follows them, untrained."""
    ids = completion.token_ids
    return ids if ids[-1] == chat.eot_id else (*ids, chat.eot_id)


def needs_judge(action: Action) -> bool:
    """Whether the judge is asked: only about a question that could be parsed."""
    return action.question is not None and action.needs_judge


def _request(parts: GameParts, index: int, budget: int, ids: list[int]) -> GenRequest:
    sampling, identity, task = parts.settings.sampling, parts.identity, parts.env.task
    stops = sampling.stop_token_ids
    if parts.chat.eot_id not in stops:
        stops = (parts.chat.eot_id, *stops)
    return GenRequest(
        session=identity.session(task.id),
        prompt_ids=tuple(ids),
        seed=turn_seed(identity.run_seed, task.id, identity.step, identity.game, index),
        sampling=replace(sampling, max_tokens=budget, stop_token_ids=stops),
    )


async def respond(
    env: Env, judge: AsyncJudge, text: str
) -> tuple[Action, JudgeReply | None, Outcome]:
    """The environment's reaction."""
    action = env.parse(text)
    reply = await judge.ask(env.judge_request(action)) if needs_judge(action) else None
    return action, reply, env.apply(action, reply)


def _after(outcome: Outcome, stream: _Stream, settings: GameSettings) -> StopReason | None:
    """Why the game ends after this turn, or None."""
    if outcome.verdict is Verdict.ERROR:
        stream.judge_errors += 1
        if stream.judge_errors >= settings.max_judge_errors:
            return StopReason.JUDGE_FAILED
    if outcome.done:
        if outcome.verdict is Verdict.WIN:
            return StopReason.WIN
        full = len(stream.turns) >= settings.max_turns
        return StopReason.TURN_LIMIT if full else StopReason.ENDED
    return None


def _raw_verdict(reply: JudgeReply | None) -> str:
    """The judge's own word; for a failed call, why it failed and what the judge wrote instead."""
    if reply is None:
        return ""
    if reply.verdict is Verdict.ERROR:
        parts = ("error", reply.reason, reply.text)
        return ": ".join(part for part in parts if part)
    return reply.text or reply.verdict.value


def _state_key(env: Env) -> str:
    hook: Callable[[], str] | None = getattr(env, "state_key", None)
    return hook() if hook is not None else ""


def _progress(env: Env) -> float:
    hook: Callable[[], float] | None = getattr(env, "progress", None)
    return float(hook()) if hook is not None else 0.0


def _uncertainty(env: Env) -> tuple[float, float] | None:
    hook: Callable[[], tuple[float, float]] | None = getattr(env, "uncertainty", None)
    return hook() if hook is not None else None


def _with_uncertainty(
    turn: Turn, before: tuple[float, float] | None, after: tuple[float, float] | None
) -> Turn:
    """The turn with what the exact posterior said around it, where there is one."""
    if before is None or after is None:
        return turn
    return replace(turn, uncertainty=(before[0], after[0]), truth_logp=(before[1], after[1]))


def _footprint(env: Env) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the last action read and wrote of the environment's state, by name."""
    hook: Callable[[], tuple[Collection[str], Collection[str]]] | None
    hook = getattr(env, "footprint", None)
    if hook is None:
        return (), ()
    reads, writes = hook()
    return tuple(sorted(reads)), tuple(sorted(writes))


def _action_key(env: Env, action: Action) -> str:
    hook: Callable[[str], str] | None = getattr(env, "action_key", None)
    return hook(action.text) if hook is not None else ""
