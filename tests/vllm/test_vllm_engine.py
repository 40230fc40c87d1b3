"""The vLLM engine against plain PyTorch: log-probs, versions, caches, states, refusals."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed: use make test-vllm")

import tiny
from held import BOUND, Held, gap

from delta_belief_rl.engines.base import (
    BranchEngine,
    Completion,
    EngineStateError,
    FinishReason,
    TailRequest,
)
from delta_belief_rl.engines.vllm_args import memory_folder
from delta_belief_rl.types import UserError

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    held = Held(tiny.save_model(tmp_path_factory.mktemp("policy")))
    # The first sync is the n-th sync: before it the engine has nothing to say.
    with pytest.raises(EngineStateError, match="no adapter"):
        held.play(tiny.request("early", tiny.prompt(0, 5)))
    held.load(0, 0)
    yield held
    held.close()


def test_the_engine_satisfies_the_protocol(held: Held) -> None:
    assert isinstance(held.engine, BranchEngine)


def test_L3_an_untrained_policy_is_adapter_version_0_and_equals_the_base_model(held: Held) -> None:
    state, ids = held.load(0, 0), tiny.prompt(1, 9)
    (answer,) = held.play(tiny.request("g", ids))
    assert answer.adapter_version == 0
    assert answer.finish is not FinishReason.ERROR
    assert gap(held, state, ids, answer) < BOUND


@pytest.mark.parametrize(
    "drawn",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.8, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 5},
        {"temperature": 0.0},
    ],
)
def test_P1_sampled_logprobs_are_those_of_logits_over_temperature_before_cuts(
    held: Held, drawn: dict[str, Any]
) -> None:
    state = held.load(3, 3)
    prompts = [tiny.prompt(seed, 5 + 3 * seed) for seed in range(6)]
    asked = [tiny.request(f"g{i}", ids, seed=i, **drawn) for i, ids in enumerate(prompts)]
    answers = held.play(*asked)
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.finish in (FinishReason.STOP, FinishReason.LENGTH)
        assert gap(held, state, ids, answer, drawn["temperature"] or 1.0) < BOUND


def test_P1_requests_of_different_temperatures_share_a_batch(held: Held) -> None:
    state, ids = held.load(3, 3), tiny.prompt(5, 20)
    heats = [0.0, 0.5, 0.7, 1.0, 1.5]
    asked = [tiny.request(f"g{heat}", ids, temperature=heat) for heat in heats]
    answers = held.play(*asked)
    for heat, answer in zip(heats, answers, strict=True):
        assert gap(held, state, ids, answer, heat or 1.0) < BOUND


def test_H2_more_prompts_than_one_pass_holds_are_drawn_after_as_they_are_alone(held: Held) -> None:
    held.load(3, 3)
    prompts = [tiny.prompt(30 + i, 100) for i in range(8)]
    assert sum(map(len, prompts)) > 512
    asked = [tiny.request(f"g{i}", ids, seed=i) for i, ids in enumerate(prompts)]
    together = held.play(*asked)
    assert [held.play(one)[0].token_ids for one in asked] == [one.token_ids for one in together]


def test_the_stop_token_is_part_of_the_answer_and_a_cut_answer_has_none(held: Held) -> None:
    held.load(3, 3)
    ids = tiny.prompt(6, 8)
    (free,) = held.play(tiny.request("free", ids, max_tokens=12, stop_token_ids=()))
    assert free.finish is FinishReason.LENGTH
    assert len(free.token_ids) == 12
    stop = free.token_ids[4]
    (ended,) = held.play(tiny.request("ended", ids, max_tokens=12, stop_token_ids=(stop,)))
    first = free.token_ids.index(stop)
    assert ended.finish is FinishReason.STOP
    assert ended.token_ids == free.token_ids[: first + 1]
    assert len(ended.logprobs) == first + 1


def test_what_a_seed_draws_does_not_depend_on_the_company(held: Held) -> None:
    held.load(3, 3)
    one = tiny.request("one", tiny.prompt(7, 10), seed=2**63 + 5)
    two = tiny.request("two", tiny.prompt(8, 14), seed=11)
    other = tiny.request("other", tiny.prompt(7, 10), seed=12)
    together = held.play(one, two, other)
    assert [answer.token_ids for answer in together[:2]] == [
        held.play(one)[0].token_ids,
        held.play(two)[0].token_ids,
    ]
    assert together[0].token_ids != together[2].token_ids


def test_B6_scores_equal_plain_pytorch_whatever_the_cache_holds(held: Held) -> None:
    state = held.load(4, 4)
    ids = tiny.prompt(9, 60)
    held.play(tiny.request("warm", ids[:50]))
    (whole,) = held(held.engine.score([ids]))
    expected = held.reference.logprobs(state, ids)
    assert whole.shape == (60,)
    assert whole[0] == 0.0
    assert np.max(np.abs(whole[1:] - expected)) < BOUND
    tails = [TailRequest("a", ids, 55), TailRequest("b", ids[:30], 1)]
    late, early = held(held.engine.score_all(tails))
    assert late.shape == (5,)
    assert early.shape == (29,)
    assert np.max(np.abs(late - expected[54:])) < BOUND
    assert np.max(np.abs(early - expected[:29])) < BOUND


def test_B4_scores_and_games_that_ask_at_the_same_time_keep_apart(held: Held) -> None:
    state = held.load(4, 4)
    prompts = [tiny.prompt(20 + i, 30) for i in range(4)]
    tails = [[TailRequest(f"s{i}", ids, 25)] for i, ids in enumerate(prompts)]

    async def both() -> tuple[list[Completion], list[Any]]:
        games = [held.engine.generate(tiny.request(f"g{i}", ids)) for i, ids in enumerate(prompts)]
        scores = [held.engine.score_all(tail) for tail in tails]
        mixed = await asyncio.gather(
            *(work for pair in zip(games, scores, strict=True) for work in pair)
        )
        return mixed[::2], mixed[1::2]

    answers, scores = held(both())
    for ids, answer, (tail,) in zip(prompts, answers, scores, strict=True):
        assert gap(held, state, ids, answer) < BOUND
        assert np.max(np.abs(tail - held.reference.logprobs(state, ids)[24:])) < BOUND
    assert held.engine.outstanding == 0


def test_L13_a_cache_warmed_by_one_adapter_serves_no_other(held: Held) -> None:
    ids = tiny.prompt(10, 80)
    old = held.load(5, 1)
    (first,) = held.play(tiny.request("g", ids, temperature=0.0))
    read = held.engine.health().prefilled_tokens
    (again,) = held.play(tiny.request("g", ids, temperature=0.0))
    assert held.engine.health().prefilled_tokens - read == 80 - 64
    assert first.logprobs == pytest.approx(again.logprobs, abs=1e-5)
    new = held.load(6, 2)
    read = held.engine.health().prefilled_tokens
    (fresh,) = held.play(tiny.request("g", ids, temperature=0.0))
    assert held.engine.health().prefilled_tokens - read == 80
    assert (first.adapter_version, fresh.adapter_version) == (1, 2)
    assert gap(held, new, ids, fresh) < BOUND
    assert gap(held, old, ids, fresh) > 10 * BOUND


def test_L13_a_version_that_comes_back_with_other_weights_is_the_new_one(held: Held) -> None:
    ids = tiny.prompt(11, 40)
    held.load(5, 7)
    held.play(tiny.request("g", ids))
    state = held.load(6, 7)
    (answer,) = held.play(tiny.request("g", ids))
    assert gap(held, state, ids, answer) < BOUND


def test_L1_the_engine_holds_one_adapter_however_many_were_loaded(held: Held) -> None:
    for version in (1, 2, 3):
        held.load(version, version)
        assert len(held(held.engine._llm.list_loras())) == 1
    assert held.engine.health().adapter_version == 3


def test_no_adapter_is_left_on_disk_or_in_memory(held: Held) -> None:
    folder = memory_folder() or "/tmp"
    before = {name for name in os.listdir(folder) if name.startswith("dbrl-adapter-")}
    held.load(1, 1)
    after = {name for name in os.listdir(folder) if name.startswith("dbrl-adapter-")}
    assert after <= before


def test_L12_L7_an_adapter_for_other_modules_is_refused_and_the_old_one_stays(held: Held) -> None:
    state, ids = held.load(3, 3), tiny.prompt(12, 10)
    bare = {key.removeprefix("base_model.model."): value for key, value in state.items()}
    elsewhere = {key.replace("model.layers.", "model.blocks."): v for key, v in state.items()}
    deeper = state | {key.replace("layers.0", "layers.9"): v for key, v in state.items()}
    cases = [
        (bare, "not named as PEFT"),
        (elsewhere, "matches none"),
        (deeper, r"lacks \(model\.layers\.9"),
        ({}, "no complete LoRA adapter"),
        (
            {key: value[:2] if ".lora_A." in key else value[:, :2] for key, value in state.items()},
            "rank 2",
        ),
    ]
    for wrong, message in cases:
        with pytest.raises(UserError, match=message):
            held(held.engine.load_adapter(wrong, 4))
    (answer,) = held.play(tiny.request("g", ids))
    assert answer.adapter_version == 3
    assert gap(held, state, ids, answer) < BOUND


def test_L7_an_adapter_on_some_modules_only_is_loaded_as_it_is(held: Held) -> None:
    state = {k: v for k, v in held.reference.adapter(3).items() if "q_proj" in k or "down" in k}
    held(held.engine.load_adapter(state, 5))
    whole = held.reference.adapter(0) | state
    ids = tiny.prompt(13, 12)
    (answer,) = held.play(tiny.request("g", ids))
    assert gap(held, whole, ids, answer) < BOUND


def test_C1_what_cannot_be_served_is_a_completion_with_an_error(held: Held) -> None:
    held.load(3, 3)
    fine = tiny.prompt(14, 10)
    asked = [
        tiny.request("long", tiny.prompt(14, tiny.MAX_LEN)),
        tiny.request("empty", ()),
        tiny.request("none", fine, max_tokens=0),
        tiny.request("odd", (*fine, tiny.VOCAB)),
        tiny.request("cold", fine, temperature=0.001),
        tiny.request("fine", fine),
        tiny.request("fine", fine),
    ]
    *refused, served, twice = held.play(*asked)
    for answer in (*refused, twice):
        assert answer.finish is FinishReason.ERROR
        assert answer.error
        assert answer.token_ids == ()
    assert served.finish is not FinishReason.ERROR
    with pytest.raises(ValueError, match="128 tokens"):
        held(held.engine.score([tiny.prompt(14, tiny.MAX_LEN)]))
    (full,) = held.play(tiny.request("full", tiny.prompt(14, tiny.MAX_LEN - 8)))
    assert full.finish is not FinishReason.ERROR


def test_a_released_game_ends_with_an_error_and_its_name_is_free(held: Held) -> None:
    held.load(3, 3)
    asked = tiny.request("g", tiny.prompt(15, 6), max_tokens=100, stop_token_ids=())

    async def leave() -> Completion:
        running = asyncio.ensure_future(held.engine.generate(asked))
        while not held.engine.health().outstanding:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        await held.engine.release("g")
        return await running

    assert held(leave()).finish is FinishReason.ERROR
    (answer,) = held.play(asked)
    assert answer.finish is FinishReason.LENGTH


def test_L8_nothing_is_loaded_asked_or_scored_while_the_engine_sleeps(held: Held) -> None:
    state, ids = held.load(3, 3), tiny.prompt(16, 10)
    held(held.engine.sleep())
    assert held.engine.health().state == "asleep"
    for call in (
        held.engine.load_adapter(state, 4),
        held.engine.generate(tiny.request("g", ids)),
        held.engine.score([ids]),
        held.engine.sleep(),
    ):
        with pytest.raises(EngineStateError, match="asleep"):
            held(call)
    held(held.engine.wake())
    with pytest.raises(EngineStateError, match="ready"):
        held(held.engine.wake())
    (answer,) = held.play(tiny.request("g", ids))
    assert gap(held, state, ids, answer) < BOUND


def test_L8_nothing_is_loaded_while_a_game_waits_for_its_answer(held: Held) -> None:
    state = held.load(3, 3)
    asked = tiny.request("g", tiny.prompt(17, 6), max_tokens=40, stop_token_ids=())

    async def overlap() -> Completion:
        running = asyncio.ensure_future(held.engine.generate(asked))
        while not held.engine.health().outstanding:
            await asyncio.sleep(0)
        for call in (held.engine.load_adapter(state, 4), held.engine.sleep()):
            with pytest.raises(EngineStateError, match="1 requests are in flight"):
                await call
        return await running

    assert held(overlap()).adapter_version == 3


def test_health_counts_tokens(held: Held) -> None:
    held.load(3, 3)
    before = held.engine.health()
    (answer,) = held.play(tiny.request("g", tiny.prompt(18, 40)))
    after = held.engine.health()
    assert after.generated_tokens - before.generated_tokens == len(answer.token_ids)
    assert after.prefilled_tokens - before.prefilled_tokens == 40
    assert (after.alive, after.outstanding) == (True, 0)
