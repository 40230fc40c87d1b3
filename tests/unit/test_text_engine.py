"""Chat messages in, text out: order, budgets, lanes and caches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from test_chat import CHATML, formats
from transformers import AutoModelForCausalLM, Qwen3Config

from delta_belief_rl.engines.base import Completion, FinishReason, GenRequest, SamplingParams
from delta_belief_rl.engines.hf_engine import HFEngine
from delta_belief_rl.engines.text_engine import StepTextEngine, TextEngine, TextRequest
from delta_belief_rl.types import Message

CHAT = formats(CHATML)
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
DRAWN = SamplingParams(temperature=1.0, max_tokens=5)


def random_engine(slots: int) -> HFEngine:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(CHAT.tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config)
    return HFEngine(model, max_sequences=slots, max_len=256)


def ask(
    text: str, seed: int = 0, sampling: SamplingParams = GREEDY, limit: int = 200
) -> TextRequest:
    return TextRequest((Message("system", "Rules."), Message("user", text)), seed, sampling, limit)


QUESTIONS = [ask(f"Is it {name}?", i) for i, name in enumerate(("red", "big", "alive", "a", "so"))]


@pytest.mark.parametrize("lanes", [1, 2, 3, 7])
@pytest.mark.parametrize("keep", [True, False])
def test_answers_come_back_in_order_whatever_the_number_of_lanes(lanes: int, keep: bool) -> None:
    engine = StepTextEngine(random_engine(lanes), CHAT, lanes=lanes, keep=keep)
    assert isinstance(engine, TextEngine)
    alone = StepTextEngine(random_engine(1), CHAT, lanes=1, keep=False)
    want = [alone.generate([question])[0] for question in QUESTIONS]
    assert engine.generate(QUESTIONS) == want
    assert engine.generate(list(reversed(QUESTIONS))) == list(reversed(want))
    assert len({done.text for done in want}) > 1
    for question, done in zip(QUESTIONS, want, strict=True):
        assert done.prompt_tokens == len(CHAT.open_ids(question.messages))
        assert 1 <= done.sampled_tokens <= 5


def test_R15_what_is_drawn_depends_on_the_requests_seed_alone() -> None:
    engine = StepTextEngine(random_engine(2), CHAT, lanes=2, keep=False)
    one, same, other = engine.generate(
        [ask("Is it?", 1, DRAWN), ask("Is it?", 1, DRAWN), ask("Is it?", 2, DRAWN)]
    )
    assert one == same
    assert one != other


def test_R15_with_one_lane_and_no_kept_cache_an_answer_is_the_same_bit_for_bit() -> None:
    class Noting(HFEngine):
        seen: list[tuple[float, ...]]

        def step(self, new: Sequence[GenRequest]) -> list[Completion]:
            done = super().step(new)
            self.seen += [completion.logprobs for completion in done]
            return done

    model = random_engine(1)._model
    found: list[list[tuple[float, ...]]] = []
    for order in (QUESTIONS, QUESTIONS[::-1]):
        inner = Noting(model, max_sequences=1, max_len=256)
        inner.seen = []
        StepTextEngine(inner, CHAT, lanes=1, keep=False).generate(order)
        found.append(inner.seen)
    assert found[0] == found[1][::-1]


def test_a_prompt_that_begins_like_an_earlier_one_is_read_from_there_on() -> None:
    inner = random_engine(2)
    engine = StepTextEngine(inner, CHAT, lanes=2)
    long = "word " * 20
    engine.generate([ask(long + "one"), ask("other")])
    before = inner.health().prefilled_tokens
    done = engine.generate([ask(long + "two")])[0]
    assert inner.health().prefilled_tokens - before < done.prompt_tokens / 2


def test_C1_a_prompt_above_the_budget_is_refused_and_the_others_are_served() -> None:
    engine = StepTextEngine(random_engine(1), CHAT)
    size = len(CHAT.open_ids(QUESTIONS[0].messages))
    fits, too_long, also = engine.generate(
        [ask("Is it red?", limit=size), ask("Is it red?", limit=size - 1), QUESTIONS[1]]
    )
    assert fits.finish is not FinishReason.ERROR
    assert also.finish is not FinishReason.ERROR
    assert (too_long.finish, too_long.prompt_tokens, too_long.text) == (
        FinishReason.ERROR,
        size,
        "",
    )
    assert too_long.error == f"the prompt has more than {size - 1} tokens"


def test_a_request_that_the_engine_refuses_keeps_the_engines_reason() -> None:
    engine = StepTextEngine(random_engine(1), CHAT)
    done = engine.generate([ask("Is it?", sampling=SamplingParams(max_tokens=10_000))])[0]
    assert done.finish is FinishReason.ERROR
    assert "exceed max_len" in done.error


def test_the_end_token_and_no_control_token_is_part_of_the_text() -> None:
    class Ends:
        def step(self, new: Sequence[GenRequest]) -> list[Completion]:
            assert all(CHAT.eot_id in request.sampling.stop_token_ids for request in new)
            ids = (*CHAT.encode("Yes."), CHAT.eot_id)
            return [
                Completion(r.session, ids, (0.0,) * len(ids), FinishReason.STOP, 0) for r in new
            ]

        def release(self, sessions: Sequence[str]) -> None:
            raise AssertionError("kept caches are not released")

    done = StepTextEngine(Ends(), CHAT).generate([QUESTIONS[0]])[0]  # type: ignore[arg-type]
    assert (done.text, done.finish) == ("Yes.", FinishReason.STOP)


def test_an_engine_that_answers_nothing_is_a_defect() -> None:
    class Silent:
        def step(self, new: Sequence[GenRequest]) -> list[Completion]:
            return []

    with pytest.raises(RuntimeError, match="1 requests without an answer"):
        StepTextEngine(Silent(), CHAT).generate([QUESTIONS[0]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one lane"):
        StepTextEngine(Silent(), CHAT, lanes=0)  # type: ignore[arg-type]
