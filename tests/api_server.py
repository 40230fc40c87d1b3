"""A chat-completions service on this machine, over real sockets, and the ways it can misbehave.

What it does with a request is chosen by ``FakeApi.faults`` in order, then by ``FakeApi.chaos``;
without either it answers. Every request is kept as it came.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

from delta_belief_rl.envs.base import JudgeRequest
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.judge.selftest import FACTS
from tests.worlds import task_for

KEY = "sk-stands-for-a-real-key-0123456789"
MODEL = "stand-in/judge"

Body = dict[str, Any]

STATUSES = {
    "bad_request": 400,
    "no_money": 402,
    "forbidden": 403,
    "no_model": 404,
    "request_timeout": 408,
    "conflict": 409,
    "too_many": 429,
    "no_quota": 429,
    "server_error": 500,
    "bad_gateway": 502,
    "unavailable": 503,
    "overloaded": 529,
}
SENTENCES = {
    "no_model": "The model `stand-in/judge` does not exist",
    "no_money": "Insufficient credits",
    "no_quota": "You exceeded your current quota",
    "too_many": "Rate limit reached",
    "forbidden": "Your key may not use this model",
}
BROKEN_BODIES: dict[str, Callable[[Body], Any]] = {
    "no_choices": lambda body: body | {"choices": []},
    "null_choices": lambda body: body | {"choices": None},
    "two_choices": lambda body: body | {"choices": body["choices"] * 2},
    "odd_choice": lambda body: body | {"choices": ["Yes"]},
    "no_message": lambda body: body | {"choices": [{"index": 0, "finish_reason": "stop"}]},
    "number": lambda body: _with_content(body, 7),
    "parts": lambda body: _with_content(body, [{"type": "text", "text": "Yes"}]),
    "empty_content": lambda body: _with_content(body, ""),
    "blank_content": lambda body: _with_content(body, " \n"),
    "null_content": lambda body: _with_content(body, None),
    "tool_call": lambda body: _ended(body, "tool_calls"),
    "no_reason": lambda body: _ended(body, None),
    "provider_error": lambda body: _ended(body, "error"),
    "filtered": lambda body: _ended(_with_content(body, ""), "content_filter"),
    "refused": lambda body: _refused(body),
    "cut": lambda body: _ended(body, "length"),
    "thought_only": lambda body: _ended(_with_content(body, None), "length"),
    "no_usage": lambda body: {name: part for name, part in body.items() if name != "usage"},
    "odd_usage": lambda body: body | {"usage": {"prompt_tokens": "many", "cost": "NaN"}},
    "error_inside": lambda _: {"error": {"code": 502, "message": "Provider returned error"}},
    "limit_inside": lambda _: {"error": {"code": 429, "message": "Provider is busy"}},
    "list": lambda body: [body],
    "half_a_character": lambda body: _with_content(body, "Yes \ud83d."),
}
RAW_BODIES = {
    "empty_body": b"",
    "garbled": b'{"choices": [{"message": {"content": "Yes"',
    "html": b"<!DOCTYPE html><html><body>Sign in to the network</body></html>",
    "not_utf8": b"\xff\xfe\x00\x80",
    "deep": b"[" * 100_000,
}
SOCKETS = ("drop", "reset", "cut_off", "drip", "stall")
"""What happens to the connection: no answer, a reset or an end in its middle, a byte at a time,
silence."""
PASSING = (
    *("drop", "reset", "cut_off", "too_many", "request_timeout", "conflict", "server_error"),
    *("bad_gateway", "unavailable", "overloaded", "no_choices", "two_choices", "odd_choice"),
    *("number", "empty_content", "null_content", "no_reason", "provider_error", "error_inside"),
    *("limit_inside", "list", "empty_body", "garbled", "html", "not_utf8", "deep"),
)
"""Faults that are over with one request, and take no time."""


@dataclass(frozen=True)
class Fault:
    """One misbehaviour; ``retry_after`` is the header's text, where there is one."""

    kind: str
    retry_after: str | None = None


@dataclass
class FakeApi:
    """State of the service.

    Attributes:
        answer: From the body of a request to the text of the answer.
        faults: Met by the next requests, one each.
        chaos: Share of further requests that meet one of ``kinds``.
        spared: So many of the first requests meet no chaos.
        cursed: Share of questions whose answer is filtered whenever they are asked.
        cost: Told in the usage; None for a service that tells none.
        wants: Refuses requests with this parameter, naming it.
        hold: Seconds before an answer; a refusal comes at once.
        requests: Bodies of all requests with the right key, in the order of their arrival.
        well: Those of them that met no fault.
        met: Kind of every fault, in order.
        most: Most requests that were in work at once.
    """

    answer: Callable[[Body], str] = lambda _: "<answer>Yes</answer>"
    faults: list[Fault] = field(default_factory=list)
    chaos: float = 0.0
    spared: int = 0
    cursed: float = 0.0
    kinds: tuple[str, ...] = PASSING
    seed: int = 0
    cost: float | None = None
    wants: str = ""
    hold: float = 0.0
    url: str = ""
    requests: list[Body] = field(default_factory=list)
    well: list[Body] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    met: list[str] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    released: Event = field(default_factory=Event)
    stalled: Event = field(default_factory=Event)
    lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def take(self, body: Body, port: int) -> Fault | None:
        """Note a request; the fault that it meets."""
        with self.lock:
            self.requests.append(body)
            self.times.append(time.monotonic())
            self.ports.append(port)
            fault = self.faults.pop(0) if self.faults else None
            if fault is None and len(self.requests) > self.spared:
                fault = self._chance(body)
            if fault is None:
                self.well.append(body)
            else:
                self.met.append(fault.kind)
            return fault

    def _chance(self, body: Body) -> Fault | None:
        if self.cursed:
            case = body["messages"][-1]["content"].encode()
            share = int.from_bytes(hashlib.sha256(case).digest()[:4]) / 2**32
            if share < self.cursed:
                return Fault("filtered")
        if self._random.random() < self.chaos:
            return Fault(self._random.choice(self.kinds))
        return None

    @contextmanager
    def work(self) -> Iterator[None]:
        """Count requests that are in work."""
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            yield
        finally:
            with self.lock:
                self.under_way -= 1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, api: FakeApi, *args: Any) -> None:
        self.api = api
        super().__init__(*args)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        with self.api.work(), suppress(ConnectionError, TimeoutError):
            self._serve()

    def _serve(self) -> None:
        body: Body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.path.endswith("/v1/chat/completions"):
            self._send(404, {"detail": "Not Found"})
            return
        given = self.headers.get("Authorization", "")
        if given != f"Bearer {KEY}":
            said = f"Incorrect API key provided: {given.removeprefix('Bearer ')}."
            self._send(401, {"error": {"message": said, "code": "invalid_api_key"}})
            return
        fault = self.api.take(body, self.client_address[1])
        if fault is None and self.api.wants and self.api.wants not in body:
            self._object_to_limit()
            return
        if fault is not None and fault.kind in STATUSES:
            self._refuse(fault)
            return
        if self.api.hold:
            time.sleep(self.api.hold)
        whole = self._completion(body)
        if fault is None:
            self._send(200, whole)
        elif fault.kind in BROKEN_BODIES:
            self._send(200, BROKEN_BODIES[fault.kind](whole))
        elif fault.kind in RAW_BODIES:
            self._raw(200, RAW_BODIES[fault.kind])
        else:
            getattr(self, f"_{fault.kind}")(json.dumps(whole).encode())

    def _completion(self, body: Body) -> Body:
        usage: Body = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
        if self.api.cost is not None:
            usage["cost"] = self.api.cost
        message = {"role": "assistant", "content": self.api.answer(body)}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": usage,
        }

    def _object_to_limit(self) -> None:
        said = f"Unsupported parameter: 'max_tokens'. Use '{self.api.wants}' instead."
        error = {"message": said, "param": "max_tokens", "code": "unsupported_parameter"}
        self._send(400, {"error": error})

    def _refuse(self, fault: Fault) -> None:
        said = SENTENCES.get(fault.kind, f"This is {fault.kind}")
        code = "insufficient_quota" if fault.kind == "no_quota" else fault.kind
        headers = {} if fault.retry_after is None else {"Retry-After": fault.retry_after}
        status = STATUSES[fault.kind]
        self._send(status, {"error": {"message": said, "code": code, "param": None}}, headers)

    def _escaped(self, data: bytes) -> None:
        """The whole answer, with each hyphen spelled as JSON may spell it."""
        self._raw(200, data.replace(b"-", b"\\u002d"))

    # --- connections

    def _drop(self, _data: bytes) -> None:
        self.close_connection = True

    def _reset(self, data: bytes) -> None:
        """Half of the answer, then a reset."""
        self._head(200, len(data))
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        self.close_connection = True

    def _cut_off(self, data: bytes) -> None:
        """Half of the answer, then its end."""
        self._head(200, len(data))
        self.wfile.write(data[: len(data) // 2])
        self.close_connection = True

    def _drip(self, data: bytes) -> None:
        """A byte now and then, so that no socket ever times out."""
        self._head(200, len(data))
        for byte in data:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            if self.api.released.wait(0.05):
                break
        self.close_connection = True

    def _stall(self, _data: bytes) -> None:
        self.api.stalled.set()
        self.api.released.wait()
        self.close_connection = True

    # --- sending

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._raw(status, json.dumps(body).encode(), headers)

    def _raw(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self._head(status, len(data), headers)
        self.wfile.write(data)

    def _head(self, status: int, length: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


@contextmanager
def serving(api: FakeApi) -> Iterator[FakeApi]:
    """Run the service on a free port; ``api.url`` says where."""
    server = _Server(("127.0.0.1", 0), partial(Handler, api))
    api.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield api
    finally:
        api.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


# --- answers ------------------------------------------------------------------------------------


def world_answer(world: str) -> Callable[[Body], str]:
    """Answers a judge's prompts from a world's table, and plain facts as they are."""
    judge = WorldJudge(load_world(world))
    facts = {(fact.secret, fact.question): "Yes" if fact.holds else "No" for fact in FACTS}

    @cache
    def reply(secret: str, question: str) -> str:
        known = facts.get((secret, question))
        return known or judge.answer([JudgeRequest(task_for(secret), question)])[0].text

    def answer(body: Body) -> str:
        case = body["messages"][-1]["content"]
        if not case.startswith("Secret word:"):
            return "<answer>Yes</answer>"
        secret = re.findall(r'^Secret word: "(.*)"$', case, flags=re.MULTILINE)[0]
        question = re.findall(r'^Question \d+: "(.*)"$', case, flags=re.MULTILINE)[-1]
        return f"So it is. <answer>{reply(secret, question)}</answer>"

    return answer


def guessing(things: Sequence[str]) -> Callable[[Body], str]:
    """A player that asks for one property, then guesses one thing after the other.

    What it says follows from the questions that it sees in the conversation.
    """

    def answer(body: Body) -> str:
        asked = [m["content"] for m in body["messages"] if m["role"] == "assistant"]
        if not asked:
            return "Is it ALIVE?"
        return f"  Is it a {things[(len(asked) - 1) % len(things)]}?\n"

    return answer


def _with_content(body: Body, content: Any) -> Body:
    (choice,) = body["choices"]
    return body | {"choices": [choice | {"message": choice["message"] | {"content": content}}]}


def _ended(body: Body, reason: str | None) -> Body:
    (choice,) = body["choices"]
    return body | {"choices": [choice | {"finish_reason": reason}]}


def _refused(body: Body) -> Body:
    (choice,) = _with_content(body, None)["choices"]
    message = choice["message"] | {"refusal": "I cannot help with that."}
    return body | {"choices": [choice | {"message": message}]}
