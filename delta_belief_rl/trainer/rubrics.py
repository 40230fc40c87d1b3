"""The models that write and check rules of play for ``orsd``, behind ``algo.scorers.roles``.

The writer is the policy with the adapter that it plays with, on its own engines. What checks is
frozen, and there are two of them:

* ``base``: the policy's model without its adapter, on the training ranks. It writes nothing: it
  reads two answers, one by which every rule was kept and one by which none was, and the value of a
  rule is ``P(yes) / (P(yes) + P(no))``, each word behind its like for the rules before.
* a model of a service, whose lines are parsed.

The random stream of an answer is named by run, step, group and game. The deadline is one for all
that is asked of engines or of a service at a time. What has not come by then, like anything else
that goes wrong there, is a ``Failure``; the score pass of ``base`` is one like any other of a run,
and a training rank that is lost in it is lost for the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from delta_belief_rl.algo.base import require_range
from delta_belief_rl.algo.scorers.roles import Ask, Failure, FailureKind
from delta_belief_rl.algo.scorers.rubric_model import read_values
from delta_belief_rl.belief.branched import ScoreRequest, View
from delta_belief_rl.engines.api_client import ApiReply
from delta_belief_rl.engines.base import FinishReason, GenRequest, SamplingParams
from delta_belief_rl.engines.pump import EngineFailure, EngineRouter
from delta_belief_rl.rollout.seeds import named_seed
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.scoring import STAND_IN, GameScore
from delta_belief_rl.types import FloatArray, Message

Answer = TypeVar("Answer")

CHECKED = "rubric_check"
"""Name of the context that a frozen base reads a check in; no game has it."""
GAME_WORDS = 400
"""Words of a game that is shown, where there is room."""
VALUE_TOKENS = 12
"""Most tokens that a service may write for the value of one rule."""
LEAST_WORDS = 8
"""With fewer words of a game there is nothing to compare."""
WORDS = ("yes", "no")
"""What the base reads as the value of every rule."""
GRACE = 5.0
"""Seconds that requests have to end in once they are called off."""


@dataclass(frozen=True, slots=True)
class RubricModels:
    """How the models are asked.

    Attributes:
        run_seed: Root of the random streams.
        room: Most tokens of a prompt with its answer.
        prompt_tokens: Most tokens of a prompt.
        writer_tokens: Most tokens that the writer may write for a group.
        writer_temperature: 0 is greedy.
        deadline: Seconds that all writing, and all checking, of one update may take each.
        grace: See ``GRACE``.
    """

    run_seed: int
    room: int
    prompt_tokens: int = 1536
    writer_tokens: int = 384
    writer_temperature: float = 1.0
    deadline: float = 120.0
    grace: float = GRACE

    def __post_init__(self) -> None:
        require_range("algorithm.orsd.prompt_tokens", self.prompt_tokens, 1)
        require_range("algorithm.orsd.writer_tokens", self.writer_tokens, 1)
        require_range("algorithm.orsd.writer_temperature", self.writer_temperature, 0.0)
        require_range("algorithm.orsd.deadline_s", self.deadline, 0.0, open_low=True)

    @property
    def writer_room(self) -> int:
        """Most tokens of the writer's prompt."""
        return min(self.prompt_tokens, self.room - self.writer_tokens)

    def seed(self, ask: Ask) -> int:
        """Names the random stream of an answer."""
        return named_seed("orsd", self.run_seed, *ask.names)


class Scores(Protocol):
    """The part of the training ranks that is needed here."""

    async def score(self, games: Sequence[ScoreRequest]) -> list[GameScore]:
        """Scores in the order of ``games``."""
        ...


class Completes(Protocol):
    """The part of an API client that is needed here."""

    async def complete(
        self, messages: Sequence[Message], sampling: SamplingParams, seed: int
    ) -> ApiReply:
        """The assistant's next message, or why there is none."""
        ...

    async def close(self) -> None:
        """Nothing more is asked."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question as it is asked, as messages and as tokens of the policy."""

    messages: tuple[Message, ...]
    ids: tuple[int, ...]


def fitted(chat: ChatFormat, ask: Ask, limit: int) -> Prompt | Failure:
    """A question with as much of its games as a number of tokens has room for."""
    words = GAME_WORDS
    while words >= LEAST_WORDS:
        messages = ask.render(words)
        ids = chat.open_ids(messages)
        if len(ids) <= limit:
            return Prompt(messages, ids)
        words = int(words * min(0.9, max(limit, 0) / len(ids)))
    return Failure(FailureKind.PROMPT, f"no game fits a prompt of {limit} tokens")


async def in_time(
    works: Sequence[Coroutine[Any, Any, Answer | Failure]],
    models: RubricModels,
    call_off: Callable[[], Awaitable[None]] | None = None,
) -> list[Answer | Failure]:
    """Results of works that begin together, in their order; a failure for each that is late.

    Args:
        works: What may take ``models.deadline`` seconds.
        models: How the models are asked.
        call_off: Called where some are late; they then have ``models.grace`` seconds to end.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    if not tasks:
        return []
    try:
        done, late = await asyncio.wait(tasks, timeout=models.deadline)
        if late and call_off is not None:
            await call_off()
            # An engine that still works on something can neither sleep nor take an adapter.
            await asyncio.wait(late, timeout=models.grace)
    finally:
        for task in tasks:
            task.cancel()
    reason = f"no answer within {models.deadline:g} s (algorithm.orsd.deadline_s)"
    return [
        task.result() if task in done else Failure(FailureKind.DEADLINE, reason) for task in tasks
    ]


@dataclass(frozen=True, slots=True)
class PolicyWriter:
    """The policy as it plays; see ``roles.Writer``."""

    engine: EngineRouter
    chat: ChatFormat
    models: RubricModels

    async def write(self, asks: Sequence[Ask]) -> list[str | Failure]:
        """A text for each question, in their order."""
        prompts = [fitted(self.chat, ask, self.models.writer_room) for ask in asks]
        requests = [
            self._request(ask, prompt)
            for ask, prompt in zip(asks, prompts, strict=True)
            if not isinstance(prompt, Failure)
        ]

        async def call_off() -> None:
            for request in requests:
                await self._forget(request)

        works = [self._text(request) for request in requests]
        texts = iter(await in_time(works, self.models, call_off))
        # Waits for the end of a step that runs: an engine takes no adapter while it has requests.
        with suppress(EngineFailure):
            await self.engine.flush()
        return [prompt if isinstance(prompt, Failure) else next(texts) for prompt in prompts]

    def _request(self, ask: Ask, prompt: Prompt) -> GenRequest:
        sampling = SamplingParams(
            temperature=self.models.writer_temperature,
            max_tokens=self.models.writer_tokens,
            stop_token_ids=(self.chat.eot_id,),
        )
        name = "/".join(str(part) for part in ask.names)
        return GenRequest(name, prompt.ids, self.models.seed(ask), sampling)

    async def _text(self, request: GenRequest) -> str | Failure:
        try:
            completion = await self.engine.generate(request)
        except EngineFailure as error:
            await self._forget(request)
            return Failure(FailureKind.ENGINE, str(error))
        # At once: others may wait for its place in the engine.
        await self._forget(request)
        if completion.finish is FinishReason.ERROR:
            return Failure(FailureKind.ENGINE, completion.error)
        text = self.chat.decode(completion.token_ids)
        # The header of some models begins the thought that the text then ends, or does not.
        return f"<think>{text}" if _opens_thought(self.chat) else text

    async def _forget(self, request: GenRequest) -> None:
        """An engine that is lost has nothing left to forget, and the others still have."""
        with suppress(EngineFailure):
            await self.engine.release(request.session)


def _opens_thought(chat: ChatFormat) -> bool:
    header = chat.after_reply
    return header.rfind("<think") > header.rfind("</think")


@dataclass(frozen=True, slots=True)
class BaseChecker:
    """The policy's model without its adapter; see ``roles.Checker``."""

    ranks: Scores
    chat: ChatFormat
    models: RubricModels

    async def check(self, asks: Sequence[Ask]) -> list[Sequence[float | None] | Failure]:
        """How much likelier a yes is than a no, for each rule."""
        found = [self._answers(ask) for ask in asks]
        read = [one for answers in found if not isinstance(answers, Failure) for one in answers]
        # What the policy itself makes of a check is of no use, so it gets next to nothing to read.
        games = [replace(STAND_IN, views={CHECKED: one.view}) for one in read]
        scores = await self.ranks.score(games) if games else []
        logps = iter(
            one.logps(score.views[CHECKED]) for one, score in zip(read, scores, strict=True)
        )
        return [
            answers if isinstance(answers, Failure) else shares(next(logps), next(logps))
            for answers in found
        ]

    def _answers(self, ask: Ask) -> tuple[_Answer, _Answer] | Failure:
        """The question with an answer of nothing but yes, and with one of nothing but no."""
        limit = self.models.room - answer_tokens(self.chat, ask.values)
        prompt = fitted(self.chat, ask, min(self.models.prompt_tokens, limit))
        if isinstance(prompt, Failure):
            return prompt
        opening = (*prompt.ids, *self.chat.no_thought_ids)
        forms = (_form(self.chat, ask.values, word) for word in WORDS)
        yes, no = (_Answer.behind(opening, ids, rules, ask.values) for ids, rules in forms)
        return yes, no


def answer_tokens(chat: ChatFormat, count: int) -> int:
    """Most tokens of an answer that the base reads, for so many rules."""
    longest = max(len(_form(chat, count, word)[0]) for word in WORDS)
    return len(chat.no_thought_ids) + longest


def _form(chat: ChatFormat, count: int, word: str) -> tuple[tuple[int, ...], list[int | None]]:
    """An answer that says one word of every rule.

    Returns:
        Its tokens, and for each the rule whose word it holds a part of; None for all others, such
        as numbers of rules.
    """
    text, spans = chat.assistant_prefix, list[tuple[int, int]]()
    for number in range(1, count + 1):
        text += f"{number}: "
        spans.append((len(text), len(text) + len(word)))
        text += f"{word}\n"
    ids, offsets = chat.encode_with_offsets(text.rstrip("\n"))
    rules = [
        next((n for n, (low, high) in enumerate(spans) if a < high and b > low), None)
        for a, b in offsets
    ]
    return ids, rules


@dataclass(frozen=True, slots=True)
class _Answer:
    """A view of an answer that says one word of every rule.

    Attributes:
        rules: The rule that each scored token belongs to.
        count: How many rules there are.
    """

    view: View
    rules: Sequence[int]
    count: int

    @classmethod
    def behind(
        cls, opening: tuple[int, ...], ids: tuple[int, ...], rules: Sequence[int | None], count: int
    ) -> _Answer:
        """The answer behind a question."""
        places = [place for place, rule in enumerate(rules) if rule is not None]
        positions = np.array(places, dtype=np.int64) + len(opening)
        known = [rule for rule in rules if rule is not None]
        return cls(View((*opening, *ids), positions), known, count)

    def logps(self, tokens: FloatArray) -> FloatArray:
        """Log-prob of each rule's word, from that of the scored tokens."""
        return np.bincount(self.rules, weights=tokens, minlength=self.count).astype(np.float64)


def shares(yes: FloatArray, no: FloatArray) -> list[float | None]:
    """``P(yes) / (P(yes) + P(no))`` from log-probs; None where there is no number."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = 1.0 / (1.0 + np.exp(no - yes))
    return [float(value) if np.isfinite(value) else None for value in values]


@dataclass(frozen=True, slots=True)
class ServiceChecker:
    """A model of a service, asked greedily; see ``roles.Checker``."""

    client: Completes
    chat: ChatFormat
    models: RubricModels

    async def check(self, asks: Sequence[Ask]) -> list[Sequence[float | None] | Failure]:
        """What it says of each rule."""
        return [*await in_time([self._values(ask) for ask in asks], self.models)]

    async def _values(self, ask: Ask) -> list[float | None] | Failure:
        # The service counts in tokens of its own; those of the policy are near enough for a bound.
        prompt = fitted(self.chat, ask, self.models.prompt_tokens)
        if isinstance(prompt, Failure):
            return prompt
        sampling = SamplingParams(temperature=0.0, max_tokens=VALUE_TOKENS * ask.values)
        reply = await self.client.complete(prompt.messages, sampling, self.models.seed(ask))
        if reply.answer is None:
            return Failure(FailureKind.SERVICE, reply.reason)
        text = reply.answer.text
        if reply.answer.finish is not FinishReason.STOP:
            # Half a number is another number.
            text = text.rpartition("\n")[0]
        return read_values(text, ask.values)
