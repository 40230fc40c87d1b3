"""Chat completions of an OpenAI-compatible service: bounded, patient, and within a deadline.

One call is one question. Its attempts, the waits between them and the waits that the service asks
for all count towards its deadline, so that neither silence nor a byte a second can hold it longer.
What may pass is tried again with exponentially growing, random waits; what cannot pass is not.
After a broken connection or a time-out the next attempt has a new HTTP client, because the old
one's idle connections may be as dead as the one that broke.

The key is read from the environment by the process that uses it, and is in no setting.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from delta_belief_rl.engines.api_answer import (
    ApiAnswer,
    ApiError,
    ApiFault,
    hide,
    one_line,
    read_answer,
    status_error,
)
from delta_belief_rl.engines.api_pause import Pause, beyond
from delta_belief_rl.engines.base import SamplingParams
from delta_belief_rl.types import Message, UserError

URL_NAME, KEY_NAME = "OPENAI_BASE_URL", "OPENAI_API_KEY"
_NEWER_LIMIT = "max_completion_tokens"
"""What some services call ``max_tokens``; they name it where they refuse the older one."""
_SEEDS = 2**31
"""Services keep seeds in 32 bits with a sign."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the service is, and the key for it, which is never shown."""

    url: str
    key: str = field(repr=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Endpoint:
        """The service that the environment names.

        Raises:
            UserError: A variable is missing, or the address is none.
        """
        url, key = (environ.get(name, "").strip() for name in (URL_NAME, KEY_NAME))
        for name, value in ((URL_NAME, url), (KEY_NAME, key)):
            if not value:
                raise UserError(
                    f"The environment variable {name} is not set: a model behind an API needs the "
                    f"address of its service in {URL_NAME} and the key in {KEY_NAME} (any word "
                    "where the service wants none)."
                )
        try:
            parts = urlsplit(url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port
        except ValueError:
            known = False
            parts = None
        if parts is None or not known:
            raise UserError(f"{URL_NAME} is no address such as https://openrouter.ai/api/v1.")
        if parts.username or parts.password or parts.query:
            raise UserError(
                f"{URL_NAME} holds a user, a password or a query: give the address alone, and the "
                f"key in {KEY_NAME}."
            )
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise UserError(f"{KEY_NAME} is no key: it holds characters that no header can have.")
        return cls(url, key)

    @property
    def host(self) -> str:
        """Host, and port where one is given."""
        return urlsplit(self.url).netloc


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """How a model is called.

    Attributes:
        model: Its name at the service.
        deadline: Seconds that one call may take, all attempts and waits included.
        concurrency: Calls under way at once.
        max_attempts: Most attempts of one call.
        backoff: Upper bound in seconds of the random wait after the first failed attempt; doubles
            with each further one.
        max_backoff: The bound never exceeds so many seconds.
        extra: Merged into the body of every request.
    """

    model: str
    deadline: float = 120.0
    concurrency: int = 32
    max_attempts: int = 8
    backoff: float = 1.0
    max_backoff: float = 20.0
    extra: Mapping[str, object] = field(default_factory=dict[str, object])

    def __post_init__(self) -> None:
        if min(self.concurrency, self.max_attempts) < 1:
            raise ValueError("calls at once and attempts of an API client are at least 1")


@dataclass(frozen=True, slots=True)
class ApiReply:
    """What a call came to.

    Attributes:
        answer: None where every attempt failed.
        faults: Of the failed attempts, in order; the last one is the end of a call without answer.
        reason: Why there is no answer, in words.
        seconds: From the first attempt to the end.
    """

    answer: ApiAnswer | None
    faults: tuple[ApiFault, ...]
    reason: str
    seconds: float


@dataclass(slots=True, eq=False)
class _Session:
    """An HTTP client, and how many attempts use it."""

    client: Any
    users: int = 0


class ApiClient:
    """Calls one model of one service. Use it inside one event loop.

    Raises:
        UserError: The libraries of the extra ``api`` are not installed.
    """

    def __init__(self, endpoint: Endpoint, settings: ApiSettings) -> None:
        self._openai, self._tenacity = _libraries()
        self._endpoint, self._settings = endpoint, settings
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._limit_name = "max_tokens"
        self._pause = Pause(settings.deadline)
        self._session: _Session | None = None
        self._wait = self._tenacity.wait_random_exponential(
            multiplier=settings.backoff, max=settings.max_backoff
        )

    async def complete(
        self, messages: Sequence[Message], sampling: SamplingParams, seed: int
    ) -> ApiReply:
        """Ask for the assistant's next message. A failure is a reply without an answer."""
        loop, faults = asyncio.get_running_loop(), list[ApiFault]()
        deadline = self._settings.deadline
        async with self._slots:
            began, answer, reason = loop.time(), None, ""
            ends = began + deadline
            limit = asyncio.timeout(deadline)
            try:
                async with limit:
                    answer = await self._attempts(messages, sampling, seed, faults, ends)
            except ApiError as error:
                reason, asked = error.reason, error.retry_after
                if asked is not None and error.passes and loop.time() + asked >= ends:
                    reason += beyond(asked)
            except TimeoutError:
                if not limit.expired():
                    raise
                before = f"; before that: {faults[-1].value}" if faults else ""
                faults.append(ApiFault.TIMEOUT)
                reason = f"the service gave no answer within {deadline:g} s{before}"
        return ApiReply(answer, tuple(faults), reason, loop.time() - began)

    async def close(self) -> None:
        """Close the connections; call it when nothing is under way."""
        session, self._session = self._session, None
        if session is not None:
            await session.client.close()

    # -- attempts ----------------------------------------------------------------------------

    async def _attempts(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        seed: int,
        faults: list[ApiFault],
        ends: float,
    ) -> ApiAnswer:
        """Try until there is an answer or no sense in trying; notes every failed attempt.

        Args:
            faults: Gets the failed attempts.
            ends: The loop's time at which the call's deadline is over.
        """
        settings, tenacity = self._settings, self._tenacity

        async def attempt() -> ApiAnswer:
            name = self._limit_name
            try:
                await self._hold_back(ends)
                return await self._attempt(self._body(messages, sampling, seed))
            except ApiError as error:
                faults.append(error.fault)
                self._learn(error, name)
                raise

        return await tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, ApiError) and e.passes),
            stop=tenacity.stop_after_attempt(settings.max_attempts)
            | tenacity.stop_before_delay(settings.deadline),
            wait=self._backoff,
            reraise=True,
        )(attempt)

    def _backoff(self, state: Any) -> float:
        """Seconds before the next attempt: what the service asks for, and a random time more."""
        asked = state.outcome.exception().retry_after
        return (asked or 0.0) + float(self._wait(state))

    def _learn(self, error: ApiError, limit_name: str) -> None:
        """What a failure tells about the calls to come.

        Args:
            error: The failure; it passes where the request can be put right.
            limit_name: How the request called the limit of tokens.
        """
        if error.retry_after is not None:
            self._pause.ask(error.retry_after, asyncio.get_running_loop().time())
        refused = error.fault is ApiFault.REFUSED and _NEWER_LIMIT in error.reason
        if refused and limit_name != _NEWER_LIMIT:
            self._limit_name = _NEWER_LIMIT
            error.passes = True

    async def _attempt(self, body: Mapping[str, object]) -> ApiAnswer:
        """One request over HTTP."""
        openai, key = self._openai, self._endpoint.key
        session = self._enter()
        try:
            raw = await session.client.chat.completions.with_raw_response.create(**body)
            answer = read_answer(hide(raw.text, key))
            # Once more: JSON can spell each of its characters in another way.
            return replace(answer, text=hide(answer.text, key))
        except ApiError as error:
            error.reason = one_line(error.reason, key)
            raise
        except openai.APIConnectionError as error:
            self._retire(session)
            raise _broken(error, isinstance(error, openai.APITimeoutError), key) from None
        except openai.APIStatusError as error:
            failure = status_error(error.status_code, error.body, error.response.headers)
            failure.reason = one_line(failure.reason, key)
            raise failure from None
        except asyncio.CancelledError:
            self._retire(session)
            raise
        finally:
            await self._leave(session)

    async def _hold_back(self, ends: float) -> None:
        """Wait as long as the service has asked any call to wait."""
        wait = self._pause.left(asyncio.get_running_loop().time(), ends)
        if wait > 0:
            # Not all at the same moment.
            await asyncio.sleep(wait + random.uniform(0, self._settings.backoff))

    def _body(
        self, messages: Sequence[Message], sampling: SamplingParams, seed: int
    ) -> dict[str, object]:
        """The request; what not every service knows is sent only where it says something."""
        extra = dict(self._settings.extra)
        if sampling.top_k > 0 and sampling.temperature > 0:
            extra = {"top_k": sampling.top_k, **extra}
        body: dict[str, object] = {
            "model": self._settings.model,
            "messages": [message.as_dict() for message in messages],
            "temperature": sampling.temperature,
            self._limit_name: sampling.max_tokens,
            "extra_body": extra,
        }
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.temperature > 0:
            body["seed"] = seed % _SEEDS
        return body

    # -- sessions ----------------------------------------------------------------------------

    def _enter(self) -> _Session:
        if self._session is None:
            deadline = self._settings.deadline
            self._session = _Session(
                self._openai.AsyncOpenAI(
                    api_key=self._endpoint.key,
                    base_url=self._endpoint.url,
                    max_retries=0,
                    timeout=self._openai.Timeout(deadline, connect=min(10.0, deadline)),
                )
            )
        self._session.users += 1
        return self._session

    def _retire(self, session: _Session) -> None:
        """Give the next attempt another client; several failures of one client count once."""
        if self._session is session:
            self._session = None

    async def _leave(self, session: _Session) -> None:
        session.users -= 1
        if session.users == 0 and session is not self._session:
            await session.client.close()


def _broken(error: BaseException, late: bool, key: str) -> ApiError:
    """A connection that broke, with the first cause in words."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    words = one_line(f"{type(cause).__name__} {cause}", key)
    if late:
        return ApiError(ApiFault.TIMEOUT, f"the connection timed out ({words})")
    return ApiError(ApiFault.CONNECTION, f"the connection failed ({words})")


def _libraries() -> tuple[Any, Any]:
    try:
        import openai
        import tenacity
    except ImportError as error:
        raise UserError(
            f"A model behind an API needs the library {error.name}, which is not installed: "
            "pip install 'delta-belief-rl[api]'."
        ) from error
    # Their lines name every request, and with more detail what is in it.
    for name in ("openai", "httpx", "httpx2", "httpcore", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return openai, tenacity
