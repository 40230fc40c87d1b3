"""The text engine on vLLM: what a judge asks and gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed: use make test-vllm")

import tiny
from asked import asked, greedy_text

from delta_belief_rl.engines.base import FinishReason, SamplingParams
from delta_belief_rl.engines.text_engine import TextEngine
from delta_belief_rl.engines.vllm_text import VllmTextEngine
from delta_belief_rl.models.loading import load_tokenizer
from delta_belief_rl.text.chat import ChatFormat

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VllmTextEngine]:
    chat = ChatFormat.from_tokenizer(load_tokenizer(folder))
    engine = VllmTextEngine({"model": str(folder), **tiny.ARGUMENTS}, chat)
    yield engine
    engine.close()


def test_answers_come_in_the_order_of_the_requests_and_equal_plain_pytorch(
    engine: VllmTextEngine, folder: Path
) -> None:
    assert isinstance(engine, TextEngine)
    requests = [asked(text) for text in ("Is it alive", "Is it big", "Is it made of wood")]
    answers = engine.generate(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert answer.text == greedy_text(folder, request)
        assert 0 < answer.sampled_tokens <= 6
        assert answer.prompt_tokens > 8
    assert engine.generate([]) == []


def test_a_prompt_that_is_too_long_is_an_error_of_that_request(engine: VllmTextEngine) -> None:
    long, fine = engine.generate([asked("big " * 60), asked("Is it big")])
    assert long.finish is FinishReason.ERROR
    assert "more than 40 tokens" in long.error
    assert long.prompt_tokens > 60
    assert fine.finish is not FinishReason.ERROR


def test_a_drawn_answer_is_a_function_of_its_seed(engine: VllmTextEngine) -> None:
    drawn = SamplingParams(temperature=1.0, max_tokens=6)
    first = engine.generate([asked("Is it big", seed, drawn) for seed in range(4)])
    again = [engine.generate([asked("Is it big", seed, drawn)])[0] for seed in range(4)]
    assert [a.text for a in first] == [a.text for a in again]
    assert len({a.text for a in first}) > 1


def test_a_judge_sleeps_and_wakes(engine: VllmTextEngine) -> None:
    (before,) = engine.generate([asked("Is it big")])
    engine.sleep()
    assert engine.health().state == "asleep"
    engine.wake()
    assert engine.generate([asked("Is it big")]) == [before]
