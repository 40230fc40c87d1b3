"""What a chat-completions service answers, read with suspicion: an answer or a typed fault.

A service and everything between it and this program may send anything under any status. What is
not one complete answer of the documented form is a fault with a reason; the answer's own text is
passed on as it is, white space, punctuation and case included.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any, cast

from delta_belief_rl.engines.base import FinishReason

SHOWN_CHARACTERS = 300
"""So much is shown of what a service says."""
_LEAST_SECRET = 8
"""A shorter key is a stand-in such as ``none``, which occurs in sentences by itself."""
_STOPS = frozenset({"stop", "eos", "eos_token", "end_turn"})
"""Reasons under which services say that the model ended its answer by itself."""
_MOST = 2**53
"""Numbers of this size and above are no counts and no costs, and sums of them would overflow."""
_SPENT = frozenset({"insufficient_quota", "billing_hard_limit_reached"})
"""Codes of HTTP 429 that waiting does not change."""


class ApiFault(StrEnum):
    """How one attempt failed.

    ``REFUSED`` is a wrong key, model or request, ``FILTERED`` an answer that the service or the
    model withholds. The same attempt would end so again; all others may pass.
    """

    CONNECTION = "connection"
    TIMEOUT = "timeout"
    RATE_LIMIT = "rate_limit"
    SERVER = "server"
    GARBLED = "garbled"
    EMPTY = "empty"
    REFUSED = "refused"
    FILTERED = "filtered"


class ApiError(RuntimeError):
    """One attempt without an answer.

    Args:
        fault: Its kind.
        reason: In words, on one line, without any secret.
        retry_after: Seconds that the service asks to wait; None where it says nothing.

    Attributes:
        passes: Whether another attempt may succeed.
    """

    def __init__(self, fault: ApiFault, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.fault = fault
        self.reason = reason
        self.retry_after = retry_after
        self.passes = fault not in (ApiFault.REFUSED, ApiFault.FILTERED)


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    """One answer.

    Attributes:
        text: As the service sent it.
        finish: ``STOP`` or ``LENGTH``.
        cost: What the service says that it charged, in its own currency; 0 where it is silent.
    """

    text: str
    finish: FinishReason
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cost: float = 0.0


def read_answer(body: str) -> ApiAnswer:
    """Read the body of a reply with a status of success.

    Raises:
        ApiError: It holds no answer, more than one, or an incomplete one.
    """
    document = _object(body)
    choices = document.get("choices")
    if document.get("error") and not choices:
        raise _told(document["error"])
    if not isinstance(choices, list):
        raise ApiError(ApiFault.GARBLED, "the reply has no list of choices")
    choices = cast("list[object]", choices)
    if len(choices) != 1:
        raise ApiError(ApiFault.GARBLED, f"the reply has {len(choices)} choices, not one")
    choice = _mapping(choices[0])
    if choice.get("error"):
        raise _told(choice["error"])
    message = _mapping(choice.get("message"))
    if not message:
        raise ApiError(ApiFault.GARBLED, "the reply has a choice without a message")
    text, reason = message.get("content"), choice.get("finish_reason")
    if text is not None and not isinstance(text, str):
        raise ApiError(ApiFault.GARBLED, f"the content is no text but a {type(text).__name__}")
    text = whole(text or "")
    finish = _finish(reason, message.get("refusal"))
    # A model that thinks may reach the limit before its answer begins.
    if not text.strip() and finish is FinishReason.STOP:
        raise ApiError(ApiFault.EMPTY, "the answer is empty")
    usage = _mapping(document.get("usage"))
    return ApiAnswer(
        text,
        finish,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        sampled_tokens=_count(usage.get("completion_tokens")),
        cost=_amount(usage.get("cost")),
    )


def status_error(status: int, body: object, headers: Mapping[str, str]) -> ApiError:
    """The fault that a reply with a status of failure stands for.

    Args:
        status: Of HTTP.
        body: What came with it: an object, a text, or nothing.
        headers: Those of the reply, with small letters in their names or blind to case.
    """
    detail = _mapping(body)
    detail = _mapping(detail.get("error")) or detail
    said = _said(body)
    return ApiError(
        _fault_of(status, detail.get("code")),
        f"HTTP {status}: {said}" if said else f"HTTP {status}",
        retry_after(headers),
    )


def retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds that a reply asks to wait: ``Retry-After`` as a number or a date.

    Args:
        headers: Of the reply.
        now: The present, for tests.

    Returns:
        None where nothing, or nothing that can be read, is said; never less than 0.

    Example:
        >>> retry_after({"retry-after": "1.5"})
        1.5
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if math.isfinite(seconds):
            return max(0.0, seconds)
    try:
        moment = parsedate_to_datetime(headers.get("retry-after", ""))
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - (now or datetime.now(UTC))).total_seconds())


def whole(text: str) -> str:
    """The text with each half of a character that has no other half replaced.

    JSON can spell such halves, and no file can hold them.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def hide(text: str, secret: str) -> str:
    """A text of a service without the key, which services like to repeat."""
    return text.replace(secret, "[key]") if len(secret) >= _LEAST_SECRET else text


def one_line(text: str, secret: str) -> str:
    """A text of a service as it may be shown: one short line without the key."""
    line = " ".join(whole(hide(text, secret)).split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 3] + "..."


def _object(body: str) -> dict[str, object]:
    if not body.strip():
        raise ApiError(ApiFault.EMPTY, "the reply is empty")
    try:
        document: object = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(ApiFault.GARBLED, f"the reply is not JSON: {body[:60]!r}") from None
    if not isinstance(document, dict):
        raise ApiError(ApiFault.GARBLED, f"the reply is a JSON {type(document).__name__}")
    return cast("dict[str, object]", document)


def _finish(reason: object, refusal: object) -> FinishReason:
    if reason == "content_filter":
        raise ApiError(ApiFault.FILTERED, "the service's content filter withholds the answer")
    if isinstance(refusal, str) and refusal.strip():
        raise ApiError(ApiFault.FILTERED, f"the model refuses: {refusal}")
    if reason == "length":
        return FinishReason.LENGTH
    if isinstance(reason, str) and reason in _STOPS:
        return FinishReason.STOP
    if reason == "error":
        raise ApiError(ApiFault.SERVER, "the service stopped in the middle of the answer")
    raise ApiError(ApiFault.GARBLED, f"the answer ended for no known reason ({reason!r})")


def _told(error: object) -> ApiError:
    """The fault that a reply tells of although its status is one of success."""
    code = _mapping(error).get("code")
    status = code if isinstance(code, int) and not isinstance(code, bool) else 500
    return status_error(status if 400 <= status <= 599 else 500, {"error": error}, {})


def _fault_of(status: int, code: object) -> ApiFault:
    if status == 429:
        spent = isinstance(code, str) and code in _SPENT
        return ApiFault.REFUSED if spent else ApiFault.RATE_LIMIT
    if status in (408, 409) or status >= 500:
        return ApiFault.SERVER
    # A redirection that leads nowhere is a wrong address.
    return ApiFault.REFUSED


def _said(body: object) -> str:
    """The sentence in the body of a failure; forms differ between services."""
    if isinstance(body, str):
        return body.strip()
    detail = _mapping(body)
    for name in ("error", "message", "detail"):
        inner = detail.get(name)
        if inner:
            return inner.strip() if isinstance(inner, str) else _said(inner)
    return json.dumps(body) if body else ""


def _mapping(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _count(value: object) -> int:
    whole_number = isinstance(value, int) and not isinstance(value, bool)
    return cast("int", value) if whole_number and 0 < cast("int", value) < _MOST else 0


def _amount(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0.0
    return float(value) if 0 < value < _MOST else 0.0
