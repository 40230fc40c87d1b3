"""Chat messages in, text out: how a model that is not the policy is asked.

``TextEngine`` is the protocol that judges are written against. ``StepTextEngine`` brings a stepping
engine behind it: prompts are rendered by the model's own chat template, text of messages never
becomes a control token, and a prompt that is too long is an error of that one request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from delta_belief_rl.engines.base import (
    Completion,
    FinishReason,
    GenRequest,
    SamplingParams,
    StepEngine,
)
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.types import Message


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One conversation that waits for the assistant's next message.

    Attributes:
        messages: The conversation.
        seed: Names the random stream of the answer.
        sampling: How tokens are drawn, and how many at most.
        max_prompt_tokens: A longer prompt is refused.
    """

    messages: tuple[Message, ...]
    seed: int
    sampling: SamplingParams
    max_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """The answer to one request; ``error`` says why ``finish`` is ``ERROR``.

    Attributes:
        cost: What a service charged for it, in its own currency.
        faults: Kinds of failed attempts at it, of an engine that tries again by itself.
    """

    text: str
    finish: FinishReason
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    error: str = ""
    cost: float = 0.0
    faults: tuple[str, ...] = ()


@runtime_checkable
class TextEngine(Protocol):
    """Writes answers. What cannot be served is a completion with an error, not an exception."""

    def generate(self, requests: Sequence[TextRequest]) -> list[TextCompletion]:
        """One completion for each request, in their order."""
        ...


class StepTextEngine:
    """A text engine over a stepping engine and a chat format.

    Args:
        engine: Used by nobody else.
        chat: Of the engine's model.
        lanes: Requests under way at a time, each in a cache of its own; at most the engine's slots.
        keep: Leave caches in place, so that a prompt which begins like an earlier one is read from
            there on. An answer may then depend on earlier requests in the last bits of its
            log-probs. Without it, and with one lane, an answer is a function of its request.
    """

    def __init__(
        self, engine: StepEngine, chat: ChatFormat, *, lanes: int = 1, keep: bool = True
    ) -> None:
        if lanes < 1:
            raise ValueError("a text engine needs at least one lane")
        self._engine = engine
        self._chat = chat
        self._keep = keep
        self._held: dict[str, tuple[int, ...]] = {f"lane {i}": () for i in range(lanes)}

    def generate(self, requests: Sequence[TextRequest]) -> list[TextCompletion]:
        """One completion for each request, in their order."""
        prompts = [self._chat.open_ids(request.messages) for request in requests]
        done: dict[int, TextCompletion] = {}
        waiting: deque[int] = deque()
        for number, (request, ids) in enumerate(zip(requests, prompts, strict=True)):
            if len(ids) > request.max_prompt_tokens:
                reason = f"the prompt has more than {request.max_prompt_tokens} tokens"
                done[number] = TextCompletion("", FinishReason.ERROR, len(ids), error=reason)
            else:
                waiting.append(number)
        running: dict[str, int] = {}
        while waiting or running:
            new: list[GenRequest] = []
            while waiting and len(running) < len(self._held):
                number = waiting.popleft()
                lane = self._lane(prompts[number], running)
                running[lane] = number
                self._held[lane] = prompts[number]
                new.append(self._request(lane, requests[number], prompts[number]))
            completions = self._engine.step(new)
            if not completions:
                raise RuntimeError(f"the engine leaves {len(running)} requests without an answer")
            for completion in completions:
                number = running.pop(completion.session)
                done[number] = self._completion(completion, len(prompts[number]))
                if not self._keep:
                    self._engine.release([completion.session])
                    self._held[completion.session] = ()
        return [done[number] for number in range(len(requests))]

    def _lane(self, ids: tuple[int, ...], running: dict[str, int]) -> str:
        """The free lane whose cache has most in common with a prompt; the first of equal ones."""
        free = [lane for lane in self._held if lane not in running]
        return max(free, key=lambda lane: _common(self._held[lane], ids))

    def _request(self, lane: str, request: TextRequest, ids: tuple[int, ...]) -> GenRequest:
        stops = request.sampling.stop_token_ids
        if self._chat.eot_id not in stops:
            stops = (self._chat.eot_id, *stops)
        return GenRequest(lane, ids, request.seed, replace(request.sampling, stop_token_ids=stops))

    def _completion(self, completion: Completion, prompt_tokens: int) -> TextCompletion:
        return TextCompletion(
            text=self._chat.decode(completion.token_ids),
            finish=completion.finish,
            prompt_tokens=prompt_tokens,
            sampled_tokens=len(completion.token_ids),
            error=completion.error,
        )


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
