"""A judge behind an OpenAI-compatible API, and the look at its service before a run begins."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from delta_belief_rl.engines.api_client import ApiClient, ApiReply, ApiSettings, Endpoint
from delta_belief_rl.engines.api_text import ApiTextEngine
from delta_belief_rl.engines.base import SamplingParams
from delta_belief_rl.judge.llm_judge import LlmJudge, LlmJudgeSettings
from delta_belief_rl.types import Message, UserError

PROBE_SECONDS = 60.0
"""A service that needs longer for a word is of no use to a game."""
_PROBE = (Message("user", "Reply with one word: Yes"),)


@dataclass(frozen=True, slots=True)
class ApiJudgeSettings:
    """A model of a service; the environment says where it is, and holds the key.

    Attributes:
        model: Its name at the service.
        asked: How it is asked and read.
        deadline: Seconds that one question may take, further attempts included.
        concurrency: Questions under way at once.
        extra: Merged into the body of every request.
    """

    model: str
    asked: LlmJudgeSettings
    deadline: float = 120.0
    concurrency: int = 32
    extra: Mapping[str, object] = field(default_factory=dict[str, object])

    def api(self) -> ApiSettings:
        """How the model is called."""
        return ApiSettings(
            self.model,
            deadline=self.deadline,
            concurrency=self.concurrency,
            extra=self.extra,
        )


class ApiJudge(LlmJudge):
    """A judge that owns its connections.

    Raises:
        UserError: The environment names no service, or a library is missing.
    """

    def __init__(self, settings: ApiJudgeSettings) -> None:
        self._text = ApiTextEngine(Endpoint.from_environment(), settings.api())
        super().__init__(self._text, settings.asked)

    def close(self) -> None:
        """End the connections."""
        self._text.close()


def probe_service(settings: ApiSettings, sampling: SamplingParams, pool: str, limit: str) -> None:
    """Ask the service for one word, with the key, the model and the settings of the run.

    Args:
        settings: Of the run; no more time than ``PROBE_SECONDS`` is taken.
        sampling: Of the run, with all that a request may say.
        pool: Head of the settings' names, e.g. ``judge_rollout``.
        limit: Name of the setting that says how many tokens an answer may take.

    Raises:
        UserError: It does not answer, with its own reason, or thinks until the limit of tokens.
    """
    endpoint = Endpoint.from_environment()
    quick = replace(settings, deadline=min(settings.deadline, PROBE_SECONDS))
    reply = asyncio.run(_ask(endpoint, quick, sampling))
    if reply.answer is None:
        raise UserError(
            f"The service at {endpoint.host} does not answer for the model {settings.model} "
            f"({reply.reason}): see OPENAI_BASE_URL, OPENAI_API_KEY, {pool}.model.api_model_name "
            f"and {pool}.rollout.val_kwargs."
        )
    if not reply.answer.text.strip():
        raise UserError(
            f"The model {settings.model} at {endpoint.host} spends all {sampling.max_tokens} "
            "tokens of an answer before its text begins, as a model that thinks does: switch its "
            f"thinking off through {pool}.model.api_extra_body, e.g. with {{chat_template_kwargs: "
            f"{{enable_thinking: false}}}}, or raise the limit {limit}."
        )


async def _ask(endpoint: Endpoint, settings: ApiSettings, sampling: SamplingParams) -> ApiReply:
    client = ApiClient(endpoint, settings)
    try:
        return await client.complete(_PROBE, sampling, 0)
    finally:
        await client.close()
