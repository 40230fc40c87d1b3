"""A text engine over a chat-completions service that misbehaves in every way it can."""

from __future__ import annotations

import json
import logging
import pickle
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from email.utils import format_datetime
from threading import Barrier
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_belief_rl.engines.api_answer import ApiError, ApiFault, read_answer, retry_after, whole
from delta_belief_rl.engines.api_client import ApiSettings, Endpoint
from delta_belief_rl.engines.api_pause import Pause
from delta_belief_rl.engines.api_text import ApiTextEngine
from delta_belief_rl.engines.base import FinishReason, SamplingParams
from delta_belief_rl.engines.text_engine import TextCompletion, TextEngine, TextRequest
from delta_belief_rl.types import Message, UserError
from tests.api_server import KEY, MODEL, PASSING, FakeApi, Fault, serving

SAID = "  Well, NO!\n\nIt's “not” a *Dog*: naïve: 犬 <answer>Yes.</answer>  "
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)

Make = Callable[..., ApiTextEngine]


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with serving(FakeApi(answer=lambda _: SAID)) as service:
        yield service


@pytest.fixture
def make(api: FakeApi) -> Iterator[Make]:
    with ExitStack() as open_engines:

        def engine(*, key: str = KEY, url: str = "", **settings: Any) -> ApiTextEngine:
            quick = {"model": MODEL, "deadline": 60.0, "backoff": 0.001, "max_backoff": 0.01}
            made = ApiTextEngine(Endpoint(url or api.url, key), ApiSettings(**quick | settings))
            open_engines.callback(made.close)
            return made

        yield engine


def request(text: str = "Is it alive?", **sampling: Any) -> TextRequest:
    messages = (Message("system", "You judge."), Message("user", text))
    params = SamplingParams(**sampling) if sampling else GREEDY
    return TextRequest(messages, seed=7 + 2**40, sampling=params, max_prompt_tokens=100)


def ask(engine: TextEngine, **sampling: Any) -> TextCompletion:
    (completion,) = engine.generate([request(**sampling)])
    return completion


# --- the plain way --------------------------------------------------------------------------------


def test_an_answer_comes_back_as_it_was_sent_with_its_tokens_and_its_cost(
    api: FakeApi, make: Make
) -> None:
    api.cost = 0.00025
    engine = make()
    assert isinstance(engine, TextEngine)
    done = ask(engine)
    assert done == TextCompletion(SAID, FinishReason.STOP, 90, 10, cost=0.00025)


def test_messages_go_out_as_messages_and_greedy_needs_no_further_setting(
    api: FakeApi, make: Make
) -> None:
    ask(make())
    assert api.requests == [
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "You judge."},
                {"role": "user", "content": "Is it alive?"},
            ],
            "temperature": 0.0,
            "max_tokens": 40,
        }
    ]


def test_sampling_and_what_one_service_alone_knows_are_sent(api: FakeApi, make: Make) -> None:
    extra = {"provider": {"order": ["one", "two"]}, "usage": {"include": True}}
    ask(make(extra=extra), temperature=0.7, top_p=0.8, top_k=20, max_tokens=9)
    (body,) = api.requests
    del body["messages"], body["model"]
    assert body == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "max_tokens": 9,
        "seed": 7,
        **extra,
    }


def test_a_service_that_knows_the_limit_under_its_newer_name_only_is_asked_so(
    api: FakeApi, make: Make
) -> None:
    api.wants = "max_completion_tokens"
    engine = make()
    assert ask(engine).text == SAID
    assert ask(engine).text == SAID
    names = ["max_tokens", "max_completion_tokens", "max_completion_tokens"]
    limits = [(body.keys() & set(names)).pop() for body in api.requests if "messages" in body]
    assert limits == names


def test_answers_are_in_the_order_of_the_requests_whatever_happens(
    api: FakeApi, make: Make
) -> None:
    api.answer = lambda body: body["messages"][-1]["content"].upper()
    api.chaos, api.seed = 0.3, 5
    asked = [request(f"question {number}") for number in range(60)]
    done = make(concurrency=8, max_attempts=20).generate(asked)
    assert [one.text for one in done] == [f"QUESTION {number}" for number in range(60)]
    assert len(api.met) > 5
    # Every fault that was met is a fault that is told, and none twice.
    assert sum(len(one.faults) for one in done) == len(api.met)


def test_J3_no_more_calls_are_under_way_than_are_allowed(api: FakeApi, make: Make) -> None:
    api.hold = 0.02
    done = make(concurrency=4).generate([request(str(number)) for number in range(40)])
    assert {one.finish for one in done} == {FinishReason.STOP}
    assert 2 <= api.most <= 4


# --- faults ---------------------------------------------------------------------------------------

KINDS = {
    **dict.fromkeys(("drop", "reset", "cut_off"), ApiFault.CONNECTION),
    **dict.fromkeys(("too_many", "limit_inside"), ApiFault.RATE_LIMIT),
    **dict.fromkeys(("request_timeout", "conflict", "server_error"), ApiFault.SERVER),
    **dict.fromkeys(("bad_gateway", "unavailable", "overloaded"), ApiFault.SERVER),
    **dict.fromkeys(("provider_error", "error_inside"), ApiFault.SERVER),
    **dict.fromkeys(("empty_content", "null_content", "empty_body"), ApiFault.EMPTY),
    "blank_content": ApiFault.EMPTY,
}
"""What the stand-in's faults are called; the rest is garbled."""


@pytest.mark.fault
@pytest.mark.parametrize("kind", [*PASSING, "blank_content", "no_message", "parts", "tool_call"])
def test_J3_a_fault_that_may_pass_is_tried_again_and_counted(
    kind: str, api: FakeApi, make: Make
) -> None:
    api.faults = [Fault(kind)]
    done = ask(make())
    assert (done.text, done.finish, done.error) == (SAID, FinishReason.STOP, "")
    assert done.faults == (KINDS.get(kind, ApiFault.GARBLED).value,)
    assert api.met == [kind]
    assert len(api.requests) == 2


@pytest.mark.fault
@pytest.mark.parametrize("kind", PASSING)
def test_J1_a_fault_that_stays_is_an_error_with_a_reason_and_never_a_text(
    kind: str, api: FakeApi, make: Make
) -> None:
    api.faults = [Fault(kind)] * 9
    done = ask(make(max_attempts=3))
    name = KINDS.get(kind, ApiFault.GARBLED).value
    assert (done.text, done.finish, done.faults) == ("", FinishReason.ERROR, (name,) * 3)
    assert done.error.startswith(f"{name}: ")
    assert "\n" not in done.error
    assert len(api.requests) == 3


@pytest.mark.fault
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("bad_request", "refused: HTTP 400: This is bad_request"),
        ("no_money", "refused: HTTP 402: Insufficient credits"),
        ("forbidden", "refused: HTTP 403: Your key may not use this model"),
        ("no_model", "refused: HTTP 404: The model `stand-in/judge` does not exist"),
        ("no_quota", "refused: HTTP 429: You exceeded your current quota"),
        ("filtered", "filtered: the service's content filter withholds the answer"),
        ("refused", "filtered: the model refuses: I cannot help with that."),
    ],
)
def test_what_would_end_so_again_is_not_tried_again(
    kind: str, said: str, api: FakeApi, make: Make
) -> None:
    api.faults = [Fault(kind)] * 3
    done = ask(make())
    assert (done.finish, done.error) == (FinishReason.ERROR, said)
    assert len(api.requests) == 1


@pytest.mark.parametrize(("kind", "text", "tokens"), [("cut", SAID, 10), ("thought_only", "", 10)])
def test_an_answer_that_was_cut_off_says_so(
    kind: str, text: str, tokens: int, api: FakeApi, make: Make
) -> None:
    api.faults = [Fault(kind)]
    done = ask(make())
    assert (done.text, done.finish, done.sampled_tokens) == (text, FinishReason.LENGTH, tokens)
    assert done.faults == ()


@pytest.mark.parametrize("kind", ["no_usage", "odd_usage"])
def test_an_answer_needs_no_account_of_its_tokens(kind: str, api: FakeApi, make: Make) -> None:
    api.faults = [Fault(kind)]
    done = ask(make())
    assert (done.text, done.prompt_tokens, done.sampled_tokens, done.cost) == (SAID, 0, 0, 0.0)


def test_a_text_that_no_file_can_hold_is_mended(api: FakeApi, make: Make) -> None:
    api.faults = [Fault("half_a_character")]
    text = ask(make()).text
    assert text == "Yes \ufffd."
    assert text.encode()


@pytest.mark.fault
def test_J5_calls_end_with_their_deadline_however_the_service_holds_them(
    api: FakeApi, make: Make
) -> None:
    # The pieces of a dripping answer come far faster than any socket's time-out.
    api.answer = lambda _: "Yes. " * 2000
    # Three calls at once; the one that is refused is tried again, and then it is silent, too.
    api.faults = [Fault("stall"), Fault("drip"), Fault("server_error"), Fault("stall")]
    engine = make(deadline=10.0)
    done = engine.generate([request(str(number)) for number in range(3)])
    assert {one.finish for one in done} == {FinishReason.ERROR}
    silent, dripping, tried_again = sorted(done, key=lambda one: len(one.faults))
    assert silent.faults == dripping.faults == ("timeout",)
    assert silent.error == dripping.error == "timeout: the service gave no answer within 10 s"
    # A deadline counts all attempts, and tells what came before.
    assert tried_again.faults == ("server", "timeout")
    assert tried_again.error == f"{silent.error}; before that: server"
    # And the next call finds the engine as it was, on a connection of its own.
    assert ask(engine).finish is FinishReason.STOP
    *older, last = api.ports
    assert len(older) == 4
    assert last not in older


@pytest.mark.fault
def test_a_service_that_is_not_there_is_a_connection_that_failed(make: Make) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        done = ask(make(url=url, max_attempts=2))
    assert done.faults == ("connection", "connection")
    assert done.error.startswith("connection: the connection failed (")


@pytest.mark.fault
def test_J10_after_a_broken_connection_no_older_one_is_used_again(api: FakeApi, make: Make) -> None:
    together = Barrier(3)

    def batch() -> set[int]:
        """Three calls that are all in work at one moment; the ports of their connections."""

        def answer(_: object) -> str:
            together.wait(timeout=60)
            return SAID

        api.answer = answer
        api.ports.clear()
        engine.generate([request(str(number)) for number in range(3)])
        api.answer = lambda _: SAID
        return set(api.ports)

    engine = make(concurrency=3)
    older = batch()
    assert len(older) == 3
    # Connections are kept and used again as long as they work.
    assert batch() == older
    api.faults = [Fault("drop")]
    assert ask(engine).faults == ("connection",)
    assert not batch() & older


# --- rate limits ----------------------------------------------------------------------------------


@pytest.mark.fault
def test_a_call_waits_as_long_as_the_service_asks(api: FakeApi, make: Make) -> None:
    api.faults = [Fault("too_many", "0.4"), Fault("unavailable", "0.3")]
    done = ask(make())
    assert done.faults == ("rate_limit", "server")
    first, second, third = api.times
    assert second - first >= 0.4
    assert third - second >= 0.3


@pytest.mark.fault
def test_what_one_call_is_told_holds_the_others_back(api: FakeApi, make: Make) -> None:
    api.faults = [Fault("too_many", "0.5")]
    engine = make(concurrency=1)
    # One call at a time: the first is refused, so every later request comes after the wait.
    engine.generate([request(str(number)) for number in range(3)])
    assert min(api.times[1:]) - api.times[0] >= 0.5
    api.times.clear()
    api.faults, api.hold = [Fault("too_many", "0.8")], 0.2
    done = make(concurrency=2).generate([request(str(number)) for number in range(4)])
    assert [one.finish for one in done] == [FinishReason.STOP] * 4
    # Two go out before anybody knows, on a busy machine a third; of the rest none before the time.
    assert len(api.times) == 5
    assert sum(moment - api.times[0] < 0.8 for moment in api.times) <= 3


@pytest.mark.fault
def test_a_wait_beyond_the_deadline_is_not_begun(api: FakeApi, make: Make) -> None:
    api.faults = [Fault("too_many", "86400")]
    done = ask(make())
    assert done.faults == ("rate_limit",)
    assert done.error == (
        "rate_limit: HTTP 429: Rate limit reached; a wait of 86400 s would outlast the call's "
        "deadline"
    )
    assert len(api.requests) == 1


@pytest.mark.fault
def test_J5_no_reply_holds_the_other_calls_for_longer_than_half_their_deadline(
    api: FakeApi, make: Make
) -> None:
    api.faults = [Fault("too_many", "Fri, 31 Dec 2199 23:59:59 GMT")]
    engine = make(deadline=8.0)
    assert ask(engine).faults == ("rate_limit",)
    assert ask(engine).finish is FinishReason.STOP
    first, second = api.times
    assert second - first >= 3.9


def test_a_call_that_has_no_time_to_wait_says_so_and_is_not_tried_again() -> None:
    pause = Pause(deadline=10.0)
    assert pause.left(now=0.0, ends=10.0) == 0.0
    pause.ask(4.0, now=3.0)
    pause.ask(1.0, now=3.0)
    assert pause.left(now=5.0, ends=8.0) == 2.0
    with pytest.raises(ApiError) as refused:
        pause.left(now=5.0, ends=7.0)
    assert (refused.value.fault, refused.value.passes) == (ApiFault.RATE_LIMIT, False)
    assert "a wait of 2 s would outlast" in refused.value.reason
    # Once the time is over nobody waits, however little is left.
    assert pause.left(now=7.0, ends=7.0) == 0.0


NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.25"}, 0.25),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "7", "retry-after-ms": "1500"}, 1.5),
        ({"retry-after": format_datetime(NOW.replace(minute=1), usegmt=True)}, 60.0),
        ({"retry-after": "Thu, 01 Jan 2026 00:00:30"}, 30.0),
        ({"retry-after": format_datetime(NOW.replace(year=2025), usegmt=True)}, 0.0),
        ({"retry-after": "Thu, 99 Jan 2026 00:00:30 GMT"}, None),
    ],
)
def test_the_wait_is_read_as_seconds_or_as_a_date(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert retry_after(headers, NOW) == seconds


@given(st.text())
def test_any_header_is_read_or_passed_over(text: str) -> None:
    seconds = retry_after({"retry-after": text}, NOW)
    assert seconds is None or 0 <= seconds < float("inf")


# --- reading --------------------------------------------------------------------------------------

NAMES = st.sampled_from(
    ["choices", "message", "content", "finish_reason", "usage", "cost", "error", "code", "refusal"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("stop"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(), inner),
    max_leaves=12,
)


@given(st.dictionaries(NAMES, JSON) | JSON)
def test_any_reply_is_an_answer_or_a_fault(document: Any) -> None:
    with suppress(ApiError):
        answer = read_answer(json.dumps(document))
        assert answer.finish in (FinishReason.STOP, FinishReason.LENGTH)
        assert answer.prompt_tokens >= 0
        assert answer.cost >= 0


@pytest.mark.parametrize("number", [10**400, 2**53, -1, 1e308, float("inf"), float("nan"), True])
def test_a_number_that_is_no_count_and_no_cost_is_none(number: float) -> None:
    choice = {"message": {"content": "Yes"}, "finish_reason": "stop"}
    usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "cost"), number)
    answer = read_answer(json.dumps({"choices": [choice], "usage": usage}))
    assert (answer.prompt_tokens, answer.sampled_tokens, answer.cost) == (0, 0, 0.0)


@given(st.text())
def test_any_text_is_an_answer_or_a_fault(body: str) -> None:
    with pytest.raises(ApiError):
        read_answer(body)


@given(st.text(min_size=1).filter(lambda text: bool(text.strip())))
def test_a_content_is_kept_character_for_character(content: str) -> None:
    choice = {"message": {"content": content}, "finish_reason": "stop"}
    assert read_answer(json.dumps({"choices": [choice]})).text == content


@given(st.text(st.characters(categories=["L", "Cs", "Zs"])))
def test_a_mended_text_can_be_written_and_a_whole_one_is_the_same(text: str) -> None:
    mended = whole(text)
    assert whole(mended) == mended
    assert mended.encode().decode() == mended
    if not any(0xD800 <= ord(character) < 0xE000 for character in text):
        assert mended == text


# --- the key and the address ----------------------------------------------------------------------


@pytest.mark.fault
def test_the_key_is_nowhere_but_in_the_header(
    api: FakeApi, make: Make, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "sk-a-wrong-key-that-is-echoed-42"
    done = ask(make(key=wrong))
    # The service repeats the key that it was given.
    assert done.error == "refused: HTTP 401: Incorrect API key provided: [key]."
    api.faults = [Fault(kind) for kind in PASSING]
    shown = [str(ask(make(max_attempts=40, max_backoff=0.001))), str(done)]
    endpoint = Endpoint(api.url, KEY)
    shown += [repr(endpoint), str(endpoint), repr(vars(make())), caplog.text]
    shown += [*capfd.readouterr(), repr(pickle.dumps(ApiSettings(MODEL)))]
    for text in shown:
        assert KEY not in text
        assert wrong not in text


@pytest.mark.fault
def test_a_key_that_is_spelled_in_another_way_is_hidden_in_the_answer(
    api: FakeApi, make: Make
) -> None:
    api.answer = lambda _: f"Yes, {KEY}."
    api.faults = [Fault("escaped")]
    assert ask(make()).text == "Yes, [key]."
    assert api.met == ["escaped"]


@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({}, "OPENAI_BASE_URL is not set"),
        ({"OPENAI_API_KEY": KEY}, "OPENAI_BASE_URL is not set"),
        ({"OPENAI_BASE_URL": "https://a/v1"}, "OPENAI_API_KEY is not set"),
        ({"OPENAI_BASE_URL": " ", "OPENAI_API_KEY": KEY}, "OPENAI_BASE_URL is not set"),
        ({"OPENAI_BASE_URL": "a.b/v1", "OPENAI_API_KEY": KEY}, "is no address"),
        ({"OPENAI_BASE_URL": "ftp://a.b/v1", "OPENAI_API_KEY": KEY}, "is no address"),
        ({"OPENAI_BASE_URL": "http://a:port/v1", "OPENAI_API_KEY": KEY}, "is no address"),
        ({"OPENAI_BASE_URL": "http://[a/v1", "OPENAI_API_KEY": KEY}, "is no address"),
        ({"OPENAI_BASE_URL": f"http://me:{KEY}@a/v1", "OPENAI_API_KEY": KEY}, "holds a user"),
        ({"OPENAI_BASE_URL": f"http://a/v1?key={KEY}", "OPENAI_API_KEY": KEY}, "or a query"),
        ({"OPENAI_BASE_URL": "http://a/v1", "OPENAI_API_KEY": f"{KEY}\n{KEY}"}, "is no key"),
        ({"OPENAI_BASE_URL": "http://a/v1", "OPENAI_API_KEY": f"Bearer {KEY}"}, "is no key"),
        ({"OPENAI_BASE_URL": "http://a/v1", "OPENAI_API_KEY": f"“{KEY}”"}, "is no key"),
    ],
)
def test_an_environment_without_a_service_is_refused_in_one_sentence(
    environ: dict[str, str], part: str
) -> None:
    with pytest.raises(UserError) as refused:
        Endpoint.from_environment(environ)
    assert part in str(refused.value)
    assert KEY not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_environment_says_where_the_service_is() -> None:
    given_names = {"OPENAI_BASE_URL": "https://openrouter.ai/api/v1 ", "OPENAI_API_KEY": f"{KEY}\n"}
    endpoint = Endpoint.from_environment(given_names)
    assert (endpoint.url, endpoint.key) == ("https://openrouter.ai/api/v1", KEY)
    assert endpoint.host == "openrouter.ai"


@pytest.mark.parametrize("library", ["openai", "tenacity"])
def test_without_the_libraries_the_extra_is_named(
    library: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=rf"library {library}, .*delta-belief-rl\[api\]"):
        make()


def test_an_engine_may_be_closed_twice(make: Make) -> None:
    engine = make()
    ask(engine)
    engine.close()
    engine.close()


@pytest.mark.parametrize("odd", [{"concurrency": 0}, {"max_attempts": 0}])
def test_settings_that_could_never_ask_are_refused(odd: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ApiSettings(MODEL, **odd)  # type: ignore[arg-type]
