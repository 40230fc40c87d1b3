"""Chat messages in, text out, on a vLLM engine: how a judge model of a GPU machine is asked.

``answer_all`` is the asynchronous form, for callers with an event loop. ``VllmTextEngine`` is the
``TextEngine`` that judges are written against: it keeps an engine and an event loop of its own, so
that any thread can ask and wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

from delta_belief_rl.engines.base import EngineHealth, FinishReason, GenRequest
from delta_belief_rl.engines.own_loop import OwnLoop
from delta_belief_rl.engines.text_engine import TextCompletion, TextRequest
from delta_belief_rl.engines.vllm_engine import VllmEngine
from delta_belief_rl.text.chat import ChatFormat

_NUMBERS = count()


async def answer_all(
    engine: VllmEngine, chat: ChatFormat, requests: Sequence[TextRequest]
) -> list[TextCompletion]:
    """One completion for each request, in their order.

    Prompts that begin alike share what vLLM has cached of them.

    Raises:
        EngineFailure: The engine's process is gone.
    """
    return list(await asyncio.gather(*(_answer(engine, chat, request) for request in requests)))


async def _answer(engine: VllmEngine, chat: ChatFormat, request: TextRequest) -> TextCompletion:
    ids = chat.open_ids(request.messages)
    if len(ids) > request.max_prompt_tokens:
        reason = f"the prompt has more than {request.max_prompt_tokens} tokens"
        return TextCompletion("", FinishReason.ERROR, len(ids), error=reason)
    stops = request.sampling.stop_token_ids
    if chat.eot_id not in stops:
        stops = (chat.eot_id, *stops)
    sampling = replace(request.sampling, stop_token_ids=stops)
    name = f"text {next(_NUMBERS)}"
    completion = await engine.generate(GenRequest(name, ids, request.seed, sampling))
    return TextCompletion(
        text=chat.decode(completion.token_ids),
        finish=completion.finish,
        prompt_tokens=len(ids),
        sampled_tokens=len(completion.token_ids),
        error=completion.error,
    )


class VllmTextEngine:
    """A text engine with a vLLM engine of its own; the constructor waits until it is ready.

    Args:
        arguments: Names of vLLM's ``AsyncEngineArgs``.
        chat: Of the engine's model. From now on it belongs to this engine's thread.

    Raises:
        UserError: As ``VllmEngine.start``.
    """

    def __init__(self, arguments: Mapping[str, object], chat: ChatFormat) -> None:
        self._chat = chat
        self._loop = OwnLoop("vllm-text")
        self._engine = self._loop.begin(VllmEngine.start(arguments))

    def generate(self, requests: Sequence[TextRequest]) -> list[TextCompletion]:
        """One completion for each request, in their order.

        Raises:
            EngineFailure: The engine's process is gone.
        """
        return self._loop.wait(answer_all(self._engine, self._chat, requests))

    def sleep(self) -> None:
        """See ``VllmEngine.sleep``."""
        self._loop.wait(self._engine.sleep())

    def wake(self) -> None:
        """See ``VllmEngine.wake``."""
        self._loop.wait(self._engine.wake())

    def memory(self) -> list[dict[str, int]]:
        """See ``VllmEngine.memory``."""
        return self._loop.wait(self._engine.memory())

    def kernels(self) -> dict[str, dict[str, int]]:
        """See ``VllmEngine.kernels``."""
        return self._loop.wait(self._engine.kernels())

    def health(self) -> EngineHealth:
        """What the engine says of itself."""
        return self._engine.health()

    def close(self) -> None:
        """End the engine and its thread; a second call does nothing."""
        if self._loop.closed:
            return
        self._loop.wait(self._engine.shutdown())
        self._loop.close()
