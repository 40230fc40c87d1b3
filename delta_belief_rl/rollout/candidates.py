"""Try several actions, take the one that changes the belief in the secret most.

Each turn, ``F`` actions are sampled from the same context. The environment answers each of them on
a snapshot of the game, and the engine says how likely the policy thinks the secret is after it, by
the same guess that the belief reward asks. Then one action is taken and the game goes on with it;
the others leave no token behind, only a ``Candidate`` on the turn.

The tokens and log-probs of the action stand exactly as they were sampled. With a choice among them
the policy that acts is not the policy that was sampled: a log-prob is that of the sampler, and the
ratio of an update compares policies, not the choice with its absence. Members that draw at random
act as the sampler does.

The choice looks at the secret, so games played this way say what a larger change of belief is
worth, not how well the policy plays on its own.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from delta_belief_rl.belief.elicit import Elicitation
from delta_belief_rl.engines.base import BranchEngine, Completion, GenRequest, TailRequest
from delta_belief_rl.envs.base import Action, Env, JudgeReply, Outcome
from delta_belief_rl.rollout.game import (
    AsyncJudge,
    Chooser,
    GameId,
    GameParts,
    Move,
    action_text,
    closed_ids,
    is_failed,
    needs_judge,
)
from delta_belief_rl.rollout.seeds import candidate_seed, named_uniform
from delta_belief_rl.types import Candidate, Task, UserError, Verdict


class Preference(StrEnum):
    """Which candidate a game takes."""

    BEST = "best"
    WORST = "worst"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class CandidateSettings:
    """How many actions are tried, and which one is taken.

    Attributes:
        count: ``F``, actions sampled each turn.
        grouped: The games of a task are compared with each other: the first ``best_n`` of them take
            the largest change of belief, the next ``worst_n`` the smallest, the others draw.
            False: every game takes the largest with probability ``p_best`` and draws otherwise.
    """

    count: int
    best_n: int = 2
    worst_n: int = 2
    p_best: float = 1.0
    grouped: bool = True

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"at least one action must be sampled, not {self.count}")

    def preference(self, identity: GameId, task_id: str, turn: int) -> Preference:
        """What a game looks for in a turn; a function of names."""
        if self.grouped:
            if identity.game < self.best_n:
                return Preference.BEST
            worst = identity.game < self.best_n + self.worst_n
            return Preference.WORST if worst else Preference.ANY
        drawn = named_uniform("prefer", *_names(identity, task_id, turn))
        return Preference.BEST if drawn < self.p_best else Preference.ANY


def choose(candidates: Sequence[Candidate], preference: Preference, uniform: float) -> int | None:
    """The candidate that is taken.

    The largest or smallest change of belief counts as it was measured, on a winning or an invalid
    action like on any other; the first of equals is taken. Where no change could be measured one of
    the answered candidates is drawn. One whose judge call failed is taken only where all failed.

    Args:
        candidates: In the order of sampling; one without an action was not sampled at all.
        uniform: In [0, 1), for a draw.

    Returns:
        Its index; None when nothing was sampled.

    Example:
        >>> from delta_belief_rl.types import Candidate, Verdict
        >>> tried = [Candidate("a?", "no", Verdict.NO, -5.0, d) for d in (0.1, 0.9, -2.0)]
        >>> [choose(tried, preference, 0.5) for preference in Preference]
        [1, 2, 1]
    """
    measured = {
        index: candidate.delta
        for index, candidate in enumerate(candidates)
        if candidate.delta is not None
    }
    if measured and preference is Preference.BEST:
        return max(measured, key=lambda index: (measured[index], -index))
    if measured and preference is Preference.WORST:
        return min(measured, key=lambda index: (measured[index], index))
    answered = [i for i, tried in enumerate(candidates) if tried.verdict is not Verdict.ERROR]
    sampled = [i for i, tried in enumerate(candidates) if tried.error != NOT_SAMPLED]
    pool = answered or sampled
    return pool[int(uniform * len(pool))] if pool else None


NOT_SAMPLED = "the engine gave no tokens"
"""``Candidate.error`` of an action that does not exist."""
NOT_FINITE = "the belief is not finite"


@runtime_checkable
class Rewindable(Protocol):
    """An environment that can go back to an earlier state; see ``envs.base.Env``."""

    def snapshot(self) -> object:
        """The state of the game."""
        ...

    def restore(self, snapshot: object, /) -> None:
        """Go back to it."""
        ...


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the environment makes of one text, tried out and taken back."""

    action: Action
    reply: JudgeReply | None
    outcome: Outcome

    @property
    def error(self) -> str:
        """Why there is no verdict; empty where there is one."""
        if self.outcome.verdict is not Verdict.ERROR:
            return ""
        return (self.reply.reason if self.reply is not None else "") or "the judge failed"


@dataclass(frozen=True, slots=True)
class _Trial:
    """One sampled action: its engine session, its tokens and its text (empty when it failed)."""

    session: str
    completion: Completion
    text: str


def chooser_factory(
    settings: CandidateSettings | None, elicit: Callable[[str], Elicitation]
) -> Callable[[Task], Chooser] | None:
    """What makes the chooser of each game, as ``RolloutDriver`` takes it; None without settings."""
    if settings is None:
        return None
    return lambda task: CandidateChooser(settings, elicit(task.secret))


class CandidateChooser:
    """Takes the turns of one game by trying candidates; see the module's head.

    Args:
        settings: How many, and which one is taken.
        elicitation: The guess of the game's secret, as the belief reward asks it.
    """

    def __init__(self, settings: CandidateSettings, elicitation: Elicitation) -> None:
        self._settings = settings
        self._elicitation = elicitation
        self._belief: float | None = None
        """Before the next turn; None where it is not known."""

    def sessions(self, session: str, /) -> tuple[str, ...]:
        """One session for each candidate; the first is the game's own."""
        others = (f"{session}~{number:03d}" for number in range(1, self._settings.count))
        return (session, *others)

    async def move(self, parts: GameParts, request: GenRequest, index: int, /) -> Move | None:
        """Sample, try out, measure, choose.

        Raises:
            UserError: The environment cannot go back to an earlier state.
            TypeError: The engine cannot score texts.
        """
        engine, clock = _branching(parts), parts.settings.clock
        began = clock()
        before = await self._belief_before(engine, request, index)
        completions = await engine.generate_all(self._requests(parts, request, index))
        sampled = clock()
        trials = _trials(parts, request, completions, self.sessions(request.session))
        texts = [trial.text for trial in trials if not is_failed(trial.completion)]
        answers = await _try_out(parts.env, parts.judge, texts)
        answered = clock()
        beliefs = await self._beliefs(engine, parts, request, trials, answers)
        judge_seconds, engine_seconds = answered - sampled, clock() - answered + sampled - began
        candidates = [_candidate(trial, answers, beliefs, before) for trial in trials]
        names = _names(parts.identity, parts.env.task.id, index)
        preference = self._settings.preference(parts.identity, parts.env.task.id, index)
        taken = choose(candidates, preference, named_uniform("draw", *names))
        if taken is None:
            return None
        candidates[taken] = replace(candidates[taken], chosen=True)
        self._belief = candidates[taken].belief
        answer = answers[trials[taken].text]
        return Move(
            completion=trials[taken].completion,
            text=trials[taken].text,
            action=answer.action,
            reply=answer.reply,
            outcome=parts.env.apply(answer.action, answer.reply),
            engine_seconds=engine_seconds,
            judge_seconds=judge_seconds,
            candidates=tuple(candidates),
        )

    def _requests(self, parts: GameParts, request: GenRequest, index: int) -> list[GenRequest]:
        names = _names(parts.identity, parts.env.task.id, index)
        return [
            replace(request, session=session, seed=candidate_seed(*names, number))
            for number, session in enumerate(self.sessions(request.session))
        ]

    async def _belief_before(
        self, engine: BranchEngine, request: GenRequest, index: int
    ) -> float | None:
        """The belief in the present state: known from the last turn, else measured."""
        if self._belief is None:
            lead = self._elicitation.lead_ids if index == 0 else ()
            tail = self._tail(request.session, (*request.prompt_ids, *lead))
            (self._belief,) = self._values(await engine.score_all([tail]))
        return self._belief

    async def _beliefs(
        self,
        engine: BranchEngine,
        parts: GameParts,
        request: GenRequest,
        trials: Sequence[_Trial],
        answers: Mapping[str, _Answer],
    ) -> dict[tuple[int, ...], float | None]:
        """The belief after each answered action, by its tokens; equal ones are measured once."""
        tails: dict[tuple[int, ...], TailRequest] = {}
        for trial in trials:
            ids = trial.completion.token_ids
            if is_failed(trial.completion) or answers[trial.text].error or ids in tails:
                continue
            reply = parts.chat.reply_ids(answers[trial.text].outcome.reply)
            stream = (*request.prompt_ids, *closed_ids(parts.chat, trial.completion), *reply)
            tails[ids] = self._tail(trial.session, stream)
        if not tails:
            return {}
        values = self._values(await engine.score_all(list(tails.values())))
        return dict(zip(tails, values, strict=True))

    def _tail(self, session: str, stream: tuple[int, ...]) -> TailRequest:
        """The guess after a stream, from the secret's first token on."""
        guess = self._elicitation
        return TailRequest(session, (*stream, *guess.token_ids), len(stream) + guess.scored[0])

    def _values(self, tails: Sequence[NDArray[np.float64]]) -> list[float | None]:
        """Beliefs in nats from the log-probs of guesses; None where one is not finite."""
        guess = self._elicitation
        rows = guess.offsets - guess.scored[0]
        # A tail that is too short raises here: a belief is never filled in.
        values = [float(guess.aggregate(tail[rows])) for tail in tails]
        return [value if math.isfinite(value) else None for value in values]


def _trials(
    parts: GameParts,
    request: GenRequest,
    completions: Sequence[Completion],
    sessions: Sequence[str],
) -> list[_Trial]:
    stops = request.sampling.stop_token_ids
    return [
        _Trial(
            session,
            completion,
            "" if is_failed(completion) else action_text(parts.chat, completion, stops),
        )
        for session, completion in zip(sessions, completions, strict=True)
    ]


async def _try_out(env: Env, judge: AsyncJudge, texts: Sequence[str]) -> dict[str, _Answer]:
    """The environment's answer to each text from the same state, to which it is put back.

    Equal texts are judged once; the judge hears of all others at the same time.

    Raises:
        UserError: The environment cannot go back to an earlier state.
    """
    rewindable = check_rewindable(env)
    snapshot = rewindable.snapshot()
    actions = {text: env.parse(text) for text in texts}
    asked = [text for text, action in actions.items() if needs_judge(action)]
    calls = (judge.ask(env.judge_request(actions[text])) for text in asked)
    replies = dict(zip(asked, await asyncio.gather(*calls), strict=True))
    answers: dict[str, _Answer] = {}
    for text, action in actions.items():
        reply = replies.get(text)
        answers[text] = _Answer(action, reply, env.apply(action, reply))
        rewindable.restore(snapshot)
    return answers


def _candidate(
    trial: _Trial,
    answers: Mapping[str, _Answer],
    beliefs: Mapping[tuple[int, ...], float | None],
    before: float | None,
) -> Candidate:
    """What is kept of one action."""
    if is_failed(trial.completion):
        return Candidate("", "", Verdict.ERROR, None, None, error=NOT_SAMPLED)
    answer = answers[trial.text]
    belief = beliefs.get(trial.completion.token_ids)
    known = belief is not None and before is not None
    return Candidate(
        action=trial.text,
        reply=answer.outcome.reply,
        verdict=answer.outcome.verdict,
        belief=belief,
        delta=belief - before if belief is not None and before is not None else None,
        error=answer.error or ("" if known else NOT_FINITE),
    )


def _names(identity: GameId, task_id: str, turn: int) -> tuple[int, str, int, int, int]:
    return identity.run_seed, task_id, identity.step, identity.game, turn


def _branching(parts: GameParts) -> BranchEngine:
    if not isinstance(parts.engine, BranchEngine):
        raise TypeError(f"a {type(parts.engine).__name__} cannot try out several actions")
    return parts.engine


def check_rewindable(env: Env) -> Rewindable:
    """The environment, as one in which questions can be tried out.

    Raises:
        UserError: It cannot go back to an earlier state.
    """
    if not isinstance(env, Rewindable):
        raise UserError(
            f"The environment {type(env).__name__} has no snapshot and restore, so no question can "
            "be tried out in it: add the two, or set multi_turn.logprob_sampling.enabled=false."
        )
    return env
