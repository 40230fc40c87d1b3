"""Chat messages in, text out, by a model behind an OpenAI-compatible API.

Messages go out as messages; no chat template and no tokenizer takes part. The service counts the
tokens of a prompt and refuses one that is too long for its model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from delta_belief_rl.engines.api_client import ApiClient, ApiReply, ApiSettings, Endpoint
from delta_belief_rl.engines.base import FinishReason
from delta_belief_rl.engines.own_loop import OwnLoop
from delta_belief_rl.engines.text_engine import TextCompletion, TextRequest


class ApiTextEngine:
    """A text engine over an API; any number of threads may ask it at a time.

    Args:
        endpoint: Of the service.
        settings: How the model is called.

    Raises:
        UserError: The libraries of the extra ``api`` are not installed.
    """

    def __init__(self, endpoint: Endpoint, settings: ApiSettings) -> None:
        self._loop = OwnLoop("api-text")
        self._client = self._loop.begin(_made(endpoint, settings))

    def generate(self, requests: Sequence[TextRequest]) -> list[TextCompletion]:
        """One completion for each request, in their order."""
        return self._loop.wait(self._all(requests))

    async def _all(self, requests: Sequence[TextRequest]) -> list[TextCompletion]:
        client = self._client
        replies = await asyncio.gather(
            *(client.complete(one.messages, one.sampling, one.seed) for one in requests)
        )
        return [completion_of(reply) for reply in replies]

    def close(self) -> None:
        """End the connections and the thread; a second call does nothing."""
        if self._loop.closed:
            return
        self._loop.wait(self._client.close())
        self._loop.close()


async def _made(endpoint: Endpoint, settings: ApiSettings) -> ApiClient:
    """The client, made on the loop that it is used on."""
    return ApiClient(endpoint, settings)


def completion_of(reply: ApiReply) -> TextCompletion:
    """A call's outcome as the engines' own type."""
    faults = tuple(fault.value for fault in reply.faults)
    if reply.answer is None:
        return TextCompletion(
            "", FinishReason.ERROR, error=f"{faults[-1]}: {reply.reason}", faults=faults
        )
    answer = reply.answer
    return TextCompletion(
        answer.text,
        answer.finish,
        prompt_tokens=answer.prompt_tokens,
        sampled_tokens=answer.sampled_tokens,
        cost=answer.cost,
        faults=faults,
    )
