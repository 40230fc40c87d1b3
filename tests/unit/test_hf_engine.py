"""The Hugging Face engine: exact log-probs, caching between turns, batching, limits, states."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from delta_belief_rl.engines.base import (
    BranchStepEngine,
    Completion,
    FinishReason,
    GenRequest,
    SamplingParams,
    StepEngine,
    TailRequest,
)
from delta_belief_rl.engines.hf_engine import EngineStateError, HFEngine
from delta_belief_rl.engines.sampling import sample_tokens, uniforms
from delta_belief_rl.models.adapters import adapter_state, add_lora
from delta_belief_rl.types import UserError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 61
STOP = 5


def tiny_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().to(DEVICE)


MODEL = tiny_model()
REFERENCE = copy.deepcopy(MODEL)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(seed).integers(6, VOCAB, length))


def request(session: str, ids: Sequence[int], seed: int = 0, **sampling: Any) -> GenRequest:
    settings = {"max_tokens": 6, "stop_token_ids": (STOP,)} | sampling
    return GenRequest(session, tuple(ids), seed, SamplingParams(**settings))


def run(engine: HFEngine, requests: Sequence[GenRequest]) -> dict[str, Completion]:
    """Step until all requests are answered."""
    out = {c.session: c for c in engine.step(requests)}
    while len(out) < len(requests):
        more = engine.step([])
        assert more
        out |= {c.session: c for c in more}
    return out


@torch.inference_mode()
def plain_logprobs(ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Log-prob of each token after the first by one plain forward of the untouched model."""
    logits = (
        REFERENCE(input_ids=torch.tensor([list(ids)], device=DEVICE)).logits[0, :-1].float()
        / temperature
    )
    target = torch.tensor(list(ids[1:]), device=DEVICE)[:, None]
    return torch.log_softmax(logits, -1).gather(-1, target)[:, 0].double().cpu().numpy()


def play(engine: HFEngine, sessions: Sequence[str], turns: int, **sampling: Any) -> dict[str, Any]:
    """Multi-turn games of uneven lengths; returns streams and sampled log-probs by position."""
    streams = {s: list(prompt(i, 4 + 3 * i)) for i, s in enumerate(sessions)}
    found: dict[str, dict[int, float]] = {s: {} for s in sessions}
    for turn in range(turns):
        asked = [
            request(s, streams[s], seed=100 * turn + i, **sampling) for i, s in enumerate(sessions)
        ]
        for session, completion in run(engine, asked).items():
            assert completion.finish is not FinishReason.ERROR
            stream = streams[session]
            for token, logp in zip(completion.token_ids, completion.logprobs, strict=True):
                found[session][len(stream)] = logp
                stream.append(token)
            stream += prompt(1000 + turn, 1 + turn)
    return {"streams": streams, "logprobs": found}


def test_the_engine_satisfies_the_protocol() -> None:
    assert isinstance(HFEngine(MODEL), StepEngine)
    assert isinstance(HFEngine(MODEL), BranchStepEngine)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("budget", [16384, 7])
def test_P1_sampled_logprobs_equal_a_plain_forward_over_many_turns(
    temperature: float, budget: int
) -> None:
    engine = HFEngine(MODEL, max_sequences=4, max_len=128, max_batch_tokens=budget)
    played = play(engine, ["a", "b", "c"], turns=4, temperature=temperature)
    for session, stream in played["streams"].items():
        expected = plain_logprobs(stream, temperature or 1.0)
        for position, logp in played["logprobs"][session].items():
            assert logp == pytest.approx(expected[position - 1], abs=1e-5)


def test_a_game_is_never_prefilled_twice() -> None:
    engine = HFEngine(MODEL, max_sequences=4, max_len=128)
    played = play(engine, ["a", "b", "c"], turns=4)
    health = engine.health()
    sampled = sum(len(v) for v in played["logprobs"].values())
    # The replies after the last turn are in the streams but were never asked about.
    stream_tokens = sum(len(s) - 4 for s in played["streams"].values())
    assert health.generated_tokens == sampled
    # The last sampled token of each turn is run by the next prefill, the others while decoding.
    decoded = sampled - 3 * 4
    last_unrun = 3
    assert health.prefilled_tokens == stream_tokens - decoded - last_unrun
    assert engine.cache_misses == 0


def test_batching_does_not_change_what_a_request_draws() -> None:
    together = play(HFEngine(MODEL, max_sequences=8, max_len=128), list("abcde"), turns=3)
    for index, session in enumerate("abcde"):
        engine = HFEngine(MODEL, max_sequences=1, max_len=128)
        stream = list(prompt(index, 4 + 3 * index))
        for turn in range(3):
            answer = run(engine, [request(session, stream, seed=100 * turn + index)])[session]
            stream += [*answer.token_ids, *prompt(1000 + turn, 1 + turn)]
        assert stream == together["streams"][session]


def test_the_order_of_requests_fixes_the_result_bit_for_bit() -> None:
    first = play(HFEngine(MODEL, max_sequences=8, max_len=128), list("abc"), turns=3)
    again = play(HFEngine(MODEL, max_sequences=8, max_len=128), list("abc"), turns=3)
    assert first == again


def test_greedy_equals_the_generate_method_of_transformers() -> None:
    engine = HFEngine(MODEL, max_sequences=4, max_len=64)
    asked = [request(str(i), prompt(i, 5 + i), temperature=0.0, max_tokens=12) for i in range(4)]
    for i, completion in run(engine, asked).items():
        ids = torch.tensor([asked[int(i)].prompt_ids], device=DEVICE)
        out = REFERENCE.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
            eos_token_id=STOP, pad_token_id=0,
        )  # fmt: skip
        assert completion.token_ids == tuple(out[0, ids.shape[1] :].tolist())


def test_stop_token_is_included_and_ends_the_turn() -> None:
    engine = HFEngine(MODEL, max_len=64)
    free = run(engine, [request("a", prompt(0, 5), temperature=0.0, stop_token_ids=())])["a"]
    assert free.finish is FinishReason.LENGTH
    assert len(free.token_ids) == 6
    stop = free.token_ids[2]
    end = free.token_ids.index(stop) + 1
    cut = run(engine, [request("b", prompt(0, 5), temperature=0.0, stop_token_ids=(60, stop))])["b"]
    assert cut.finish is FinishReason.STOP
    assert cut.token_ids == free.token_ids[:end]


def test_step_returns_as_soon_as_enough_requests_are_done() -> None:
    asked = [request(str(i), prompt(i, 5), max_tokens=2 + i, stop_token_ids=()) for i in range(4)]
    assert [c.session for c in HFEngine(MODEL, max_len=64).step(asked)] == ["0"]
    two = HFEngine(MODEL, max_len=64, min_finished=2)
    assert [c.session for c in two.step(asked)] == ["0", "1"]
    half = HFEngine(MODEL, max_len=64, min_finished=0.75)
    assert [c.session for c in half.step(asked)] == ["0", "1", "2"]
    assert [c.session for c in half.step([])] == ["3"]
    assert half.step([]) == []


def test_games_beyond_max_sequences_wait_in_order_of_arrival() -> None:
    engine = HFEngine(MODEL, max_sequences=2, max_len=64, min_finished=9)
    asked = [request(s, prompt(i, 5)) for i, s in enumerate("abcd")]
    assert {c.session for c in engine.step(asked)} == {"a", "b"}
    assert engine.step([]) == []
    assert engine.health().outstanding == 2
    engine.release(["a"])
    assert {c.session for c in engine.step([])} == {"c"}
    engine.release(["b", "c"])
    assert {c.session for c in engine.step([])} == {"d"}


def test_slots_are_compacted_when_games_end_and_the_others_stay_exact() -> None:
    engine = HFEngine(MODEL, max_sequences=5, max_len=128)
    streams = {s: list(prompt(i, 6 + i)) for i, s in enumerate("abcde")}
    gone = iter(["a", "c", "b", "e", "d"])
    for turn in range(5):
        answers = run(engine, [request(s, streams[s], seed=turn) for s in streams])
        for session, answer in answers.items():
            streams[session] += answer.token_ids
            expected = plain_logprobs(streams[session])[-len(answer.token_ids) :]
            np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)
            streams[session] += prompt(turn, 2)
        leaving = next(gone)
        engine.release([leaving])
        del streams[leaving]
    assert engine.cache_misses == 0


def test_a_running_game_can_be_released_while_others_decode() -> None:
    engine = HFEngine(MODEL, max_sequences=3, max_len=64)
    asked = [
        request(s, prompt(i, 5), max_tokens=n, stop_token_ids=())
        for i, (s, n) in enumerate([("a", 12), ("b", 2), ("c", 12)])
    ]
    assert [c.session for c in engine.step(asked)] == ["b"]
    engine.release(["a"])
    (left,) = engine.step([])
    assert left.session == "c"
    np.testing.assert_allclose(
        left.logprobs, plain_logprobs(asked[2].prompt_ids + left.token_ids)[-12:], atol=1e-5
    )


def test_T7_a_stream_that_does_not_extend_the_cached_ids_is_prefilled_anew_and_counted() -> None:
    engine = HFEngine(MODEL, max_len=64)
    first = run(engine, [request("a", prompt(0, 8))])["a"]
    changed = [*prompt(0, 7), 9, *first.token_ids]
    answer = run(engine, [request("a", changed, seed=3)])["a"]
    assert engine.cache_misses == 1
    expected = plain_logprobs([*changed, *answer.token_ids])[-len(answer.token_ids) :]
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)


def test_the_same_request_twice_gives_the_same_answer() -> None:
    engine = HFEngine(MODEL, max_len=64)
    asked = request("a", prompt(0, 8), seed=4, max_tokens=1)
    first, second = run(engine, [asked])["a"], run(engine, [asked])["a"]
    assert first.token_ids == second.token_ids
    assert engine.cache_misses == 0


@pytest.mark.parametrize(
    ("ids", "sampling", "reason"),
    [
        (prompt(0, 30), {"max_tokens": 5}, "exceed max_len 32"),
        (prompt(0, 5), {"max_tokens": 0}, "max_tokens is 0"),
        (prompt(0, 5), {"max_tokens": -3}, "max_tokens is -3"),
        (prompt(0, 5), {"temperature": -1.0}, "temperature"),
        (prompt(0, 5), {"top_p": 0.0}, "top_p"),
        ((), {}, "prompt is empty"),
    ],
)
def test_C1_a_request_that_cannot_be_served_is_an_error_completion(
    ids: tuple[int, ...], sampling: dict[str, Any], reason: str
) -> None:
    engine = HFEngine(MODEL, max_len=32)
    answers = run(engine, [request("bad", ids, **sampling), request("good", prompt(0, 5))])
    assert answers["bad"].finish is FinishReason.ERROR
    assert reason in answers["bad"].error
    assert answers["good"].finish is not FinishReason.ERROR


def test_a_prompt_may_fill_the_slot_to_the_last_token() -> None:
    engine = HFEngine(MODEL, max_len=32)
    answer = run(engine, [request("a", prompt(0, 27), max_tokens=5, stop_token_ids=())])["a"]
    assert len(answer.token_ids) == 5


def test_a_session_with_two_requests_at_once_gets_one_error() -> None:
    engine = HFEngine(MODEL, max_len=32, min_finished=2)
    answers = engine.step([request("a", prompt(0, 5)), request("a", prompt(0, 5))])
    assert [c.finish is FinishReason.ERROR for c in answers] == [True, False]


def test_P7_logits_that_are_not_finite_are_an_error_completion() -> None:
    model = copy.deepcopy(REFERENCE)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    answer = run(HFEngine(model, max_len=32), [request("a", prompt(0, 5))])["a"]
    assert answer.finish is FinishReason.ERROR
    assert "not finite" in answer.error


def test_score_equals_a_plain_forward() -> None:
    engine = HFEngine(MODEL, max_len=64)
    ids = [prompt(0, 9), prompt(1, 1), prompt(2, 17)]
    scores = engine.score(ids)
    assert [s.shape for s in scores] == [(9,), (1,), (17,)]
    for one, score in zip(ids, scores, strict=True):
        assert score[0] == 0.0
        if len(one) > 1:
            np.testing.assert_allclose(score[1:], plain_logprobs(one), atol=1e-5)


def tails_of(texts: dict[str, tuple[Sequence[int], int]]) -> list[TailRequest]:
    return [TailRequest(name, tuple(ids), start) for name, (ids, start) in texts.items()]


def check_tails(engine: HFEngine, texts: dict[str, tuple[Sequence[int], int]]) -> None:
    """The engine's scores are those of a plain forward of each whole text."""
    found = engine.score_tails(tails_of(texts))
    assert len(found) == len(texts)
    for (ids, start), score in zip(texts.values(), found, strict=True):
        assert score.shape == (len(ids) - start,)
        np.testing.assert_allclose(score, plain_logprobs(ids)[start - 1 :], atol=1e-5)


@pytest.mark.parametrize("budget", [16384, 30, 3])
def test_B1_tails_in_used_and_fresh_slots_equal_a_plain_forward(budget: int) -> None:
    engine = HFEngine(MODEL, max_sequences=4, max_len=64, max_batch_tokens=budget)
    asked = [request(s, prompt(i, 6 + i)) for i, s in enumerate("ab")]
    answers = run(engine, asked)
    streams = {s: (*asked[i].prompt_ids, *answers[s].token_ids) for i, s in enumerate("ab")}
    check_tails(
        engine,
        {
            "a": ((*streams["a"], *prompt(8, 7)), len(streams["a"]) + 4),
            "b": ((*streams["b"], *prompt(9, 2)), len(streams["b"])),
            "c": (prompt(3, 9), 1),
        },
    )
    # And again: what the guess has left behind in the slots is of no consequence.
    check_tails(engine, {"a": ((*streams["a"], *prompt(7, 3)), 5)})


def test_B4_scores_leave_the_games_as_they_were() -> None:
    quiet, asked = (HFEngine(MODEL, max_sequences=4, max_len=128) for _ in range(2))
    streams = {s: list(prompt(i, 5 + i)) for i, s in enumerate("abc")}
    for turn in range(3):
        requests = [request(s, streams[s], seed=turn) for s in streams]
        plain, scored = run(quiet, requests), run(asked, requests)
        for session, stream in streams.items():
            assert scored[session].token_ids == plain[session].token_ids
            np.testing.assert_allclose(scored[session].logprobs, plain[session].logprobs, atol=1e-5)
            stream += [*plain[session].token_ids, *prompt(turn, 2)]
        guesses = {s: ((*ids, *prompt(50, 4)), len(ids) + 2) for s, ids in streams.items()}
        check_tails(asked, guesses)


def test_branches_run_only_what_they_do_not_share() -> None:
    engine = HFEngine(MODEL, max_sequences=3, max_len=128)
    stream = prompt(0, 40)
    names = ("a", "a1", "a2")
    sampling = {"max_tokens": 5, "stop_token_ids": ()}
    answers = run(engine, [request(s, stream, seed=i, **sampling) for i, s in enumerate(names)])
    assert engine.health().prefilled_tokens == 3 * 40
    reply, guess = prompt(1, 2), prompt(2, 3)
    texts = {s: ((*stream, *answers[s].token_ids, *reply, *guess), 40 + 5 + 2 + 2) for s in names}
    check_tails(engine, texts)
    # The last sampled token was not run yet, nor were reply and guess.
    assert engine.health().prefilled_tokens == 3 * 40 + 3 * (1 + 2 + 3)
    after = (*stream, *answers["a1"].token_ids, *reply)
    before = engine.health().prefilled_tokens
    again = [request(s, after, seed=9 + i, **sampling) for i, s in enumerate(names)]
    for answer in run(engine, again).values():
        expected = plain_logprobs([*after, *answer.token_ids])[-5:]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)
    # The branch that was taken forgets the guess; the others keep what all had in common.
    common = [
        next((i for i in range(5) if answers[s].token_ids[i] != answers["a1"].token_ids[i]), 5)
        for s in ("a", "a2")
    ]
    run_anew = 1 + sum(len(after) - 40 - shared for shared in common)
    assert engine.health().prefilled_tokens - before == run_anew


def test_a_text_without_a_slot_is_scored_beside_the_store() -> None:
    engine = HFEngine(MODEL, max_sequences=1, max_len=16)
    run(engine, [request("a", prompt(0, 8))])
    check_tails(engine, {"a": (prompt(0, 30), 20), "b": (prompt(1, 9), 3)})
    assert set(engine._sessions) == {"a"}


def test_a_busy_session_is_not_scored() -> None:
    engine = HFEngine(MODEL, max_len=64)
    long = {"max_tokens": 20, "stop_token_ids": ()}
    engine.step([request("a", prompt(0, 5), **long), request("b", prompt(1, 5), max_tokens=1)])
    with pytest.raises(EngineStateError, match="'a' is busy"):
        engine.score_tails([TailRequest("a", prompt(0, 8), 6)])
    with pytest.raises(EngineStateError, match="'b' is busy"):
        engine.score_tails([TailRequest("b", prompt(0, 8), 6)] * 2)
    # A running neighbour is not disturbed.
    check_tails(engine, {"b": (prompt(1, 9), 6)})
    (left,) = engine.step([])
    expected = plain_logprobs([*prompt(0, 5), *left.token_ids])[-20:]
    np.testing.assert_allclose(left.logprobs, expected, atol=1e-5)
    engine.sleep()
    with pytest.raises(EngineStateError, match="must be ready"):
        engine.score_tails([TailRequest("b", prompt(0, 8), 6)])


@pytest.mark.parametrize("start", [0, 5, 9])
def test_a_tail_that_lies_outside_its_text_is_refused(start: int) -> None:
    with pytest.raises(ValueError, match=r"a tail starts at 1 \.\. 4"):
        TailRequest("a", prompt(0, 5), start)


def lora_model() -> tuple[Any, dict[str, Any]]:
    """A model with a silent adapter, and weights for it that are not silent."""
    model = add_lora(copy.deepcopy(REFERENCE), 4, 8, ["q_proj", "v_proj"], "policy")
    state = {k: np.array(v) for k, v in adapter_state(model, "policy").items()}
    rng = np.random.default_rng(0)
    loud = {k: rng.normal(0, 0.3, v.shape).astype(np.float32) for k, v in state.items()}
    return model, loud


def test_L2_L13_a_new_adapter_drops_every_cache_and_stamps_its_version() -> None:
    model, loud = lora_model()
    engine = HFEngine(model, max_len=64)
    before = run(engine, [request("a", prompt(0, 8), seed=1)])["a"]
    assert before.adapter_version == 0
    engine.load_adapter(loud, 7)
    stream = [*prompt(0, 8), *before.token_ids, 11]
    warm = run(engine, [request("a", stream, seed=2)])["a"]
    assert warm.adapter_version == 7
    assert engine.health().adapter_version == 7
    fresh = HFEngine(lora_model()[0], max_len=64)
    fresh.load_adapter(loud, 7)
    cold = run(fresh, [request("a", stream, seed=2)])["a"]
    assert warm.token_ids == cold.token_ids
    np.testing.assert_allclose(warm.logprobs, cold.logprobs, atol=1e-6)
    base = plain_logprobs([*stream, *warm.token_ids])[-len(warm.token_ids) :]
    assert np.abs(np.array(warm.logprobs) - base).max() > 1e-3


def test_L12_an_adapter_that_matches_no_module_is_an_error() -> None:
    model, loud = lora_model()
    engine = HFEngine(model, max_len=64, version=3)
    with pytest.raises(UserError):
        engine.load_adapter({f"other.{k}": v for k, v in loud.items()}, 9)
    assert engine.health().adapter_version == 3


def test_L8_calls_in_the_wrong_state_raise() -> None:
    model, loud = lora_model()
    engine = HFEngine(model, max_len=64)
    with pytest.raises(EngineStateError, match="must be asleep"):
        engine.wake()
    engine.sleep()
    assert engine.health().state == "asleep"
    with pytest.raises(EngineStateError, match="must be ready"):
        engine.step([request("a", prompt(0, 5))])
    with pytest.raises(EngineStateError):
        engine.load_adapter(loud, 1)
    with pytest.raises(EngineStateError):
        engine.score([prompt(0, 5)])
    with pytest.raises(EngineStateError):
        engine.sleep()
    engine.wake()
    assert run(engine, [request("a", prompt(0, 5))])["a"].finish is not FinishReason.ERROR


def test_L8_an_adapter_cannot_be_loaded_nor_the_engine_sleep_while_requests_run() -> None:
    model, loud = lora_model()
    engine = HFEngine(model, max_len=64)
    engine.step(
        [request(s, prompt(0, 5), max_tokens=n, stop_token_ids=()) for s, n in (("a", 1), ("b", 9))]
    )
    with pytest.raises(EngineStateError, match="1 requests are in flight"):
        engine.load_adapter(loud, 1)
    with pytest.raises(EngineStateError, match="in flight"):
        engine.sleep()


def draw(logits: np.ndarray, u: np.ndarray, temperature: float, k: int, p: float) -> np.ndarray:
    rows = len(u)
    tokens, _ = sample_tokens(
        torch.from_numpy(np.repeat(logits[None], rows, 0)),
        torch.from_numpy(u),
        torch.full((rows,), temperature),
        torch.full((rows,), k),
        torch.full((rows,), p, dtype=torch.float64),
        k > 0 or p < 1,
    )
    return tokens.numpy()


@pytest.mark.parametrize(("k", "p"), [(-1, 1.0), (3, 1.0), (-1, 0.8), (4, 0.7)])
def test_drawn_frequencies_follow_the_cut_distribution(k: int, p: float) -> None:
    logits = np.random.default_rng(3).normal(0, 1.5, 9)
    u = (np.arange(20000) + 0.5) / 20000
    counts = np.bincount(draw(logits, u, 0.7, k, p), minlength=9) / len(u)
    probs = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    order = np.argsort(-probs)
    kept = np.zeros(9)
    top = order[: k if k > 0 else 9]
    kept[top] = probs[top] / probs[top].sum()
    before = np.cumsum(kept[order]) - kept[order]
    kept[order[before >= p]] = 0.0
    np.testing.assert_allclose(counts, kept / kept.sum(), atol=2e-4)


def test_extreme_uniforms_never_draw_a_token_of_probability_zero() -> None:
    logits = np.array([-np.inf, 0.0, 1.0, -np.inf])
    u = np.array([0.0, np.nextafter(1.0, 0.0)])
    assert draw(logits, u, 1.0, -1, 1.0).tolist() == [1, 2]


def test_R15_the_random_stream_is_named_by_its_seed_and_prefix_stable() -> None:
    np.testing.assert_array_equal(uniforms(2**64 - 1, 4), uniforms(2**64 - 1, 9)[:4])
    assert uniforms(1, 3).tolist() != uniforms(2, 3).tolist()
