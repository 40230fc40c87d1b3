"""Masked denoisers: folder, traces and what is asked of them again, and the engine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

from delta_belief_rl.engines.base import BranchStepEngine, FinishReason, TailRequest
from delta_belief_rl.engines.denoiser_engine import DenoiserEngine
from delta_belief_rl.models.adapters import state_checksum
from delta_belief_rl.models.denoiser import (
    NEVER,
    denoiser_state,
    is_denoiser,
    load_denoiser,
    load_denoiser_state,
    read_config,
    save_denoiser,
    token_logps,
)
from delta_belief_rl.models.denoising import (
    States,
    Trace,
    block_logits,
    confidences,
    score_traces,
    step_gains,
)
from delta_belief_rl.types import UserError
from tests.unit.denoiser_fakes import CONFIG, END, MASK, PLACES, ask, tiny, trace_of

PROMPTS = ((4, 7, 9, 5), (4, 6, 5), (4, 6, 7, 8, 9, 10, 11, 5))


class NoTokenizer:
    """Writes nothing."""

    def save_pretrained(self, folder: Path) -> None:
        del folder


# --- the folder ---------------------------------------------------------------------------------


def test_a_saved_denoiser_is_loaded_as_it_was(tmp_path: Path) -> None:
    model = tiny()
    save_denoiser(model, NoTokenizer(), tmp_path)
    assert is_denoiser(tmp_path)
    assert read_config(tmp_path) == CONFIG
    again = load_denoiser(tmp_path)
    assert state_checksum(denoiser_state(again)) == state_checksum(denoiser_state(model))


def test_other_folders_are_no_denoisers(tmp_path: Path) -> None:
    assert not is_denoiser(tmp_path)
    assert not is_denoiser(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert not is_denoiser(tmp_path)
    with pytest.raises(UserError, match="no masked denoiser"):
        load_denoiser(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"categories": [0]}, {"hidden_size": 15}, {"end_token_id": MASK}, {"vocab_size": "x"}],
)
def test_a_configuration_that_does_not_hold_together_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    save_denoiser(tiny(), NoTokenizer(), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match="no configuration of a masked denoiser"):
        read_config(tmp_path)


def test_damaged_weights_and_weights_of_other_sizes_are_refused(tmp_path: Path) -> None:
    save_denoiser(tiny(), NoTokenizer(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(UserError, match="cannot be read"):
        load_denoiser(tmp_path)
    state = {name: value for name, value in denoiser_state(tiny()).items() if name != "bias"}
    with pytest.raises(UserError, match="not those of this denoiser"):
        load_denoiser_state(tiny(), state)


def test_a_state_is_owned_memory() -> None:
    model = tiny()
    state = denoiser_state(model)
    before = state_checksum(state)
    nn.init.zeros_(model.bias)
    nn.init.zeros_(model.tokens.weight)
    assert state_checksum(state) == before


def test_a_text_is_probed_one_masked_token_at_a_time() -> None:
    model, ids = tiny(), (4, 7, 9, 5, 6)
    got = token_logps(model, ids)
    for place, token in enumerate(ids):
        row = list(ids)
        row[place] = MASK
        with torch.no_grad():
            logits = model(torch.tensor([row]), torch.tensor([len(row)]))[0, place]
        assert got[place] == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-5)


# --- states and traces --------------------------------------------------------------------------


def test_padding_of_longer_neighbours_does_not_leak() -> None:
    model = tiny()
    blocks = np.array([[6, 0, 9, 0, 0]] * 3)
    known = np.array([[True, False, True, False, False]] * 3)
    with torch.no_grad():
        together = block_logits(model, States.of(PROMPTS, blocks, known, CONFIG, "cpu"))
        for row, prompt in enumerate(PROMPTS):
            one = slice(row, row + 1)
            state = States.of([prompt], blocks[one], known[one], CONFIG, "cpu")
            assert_allclose(together[row], block_logits(model, state)[0], atol=1e-5)


def test_what_stands_at_a_masked_place_does_not_leak() -> None:
    model, known = tiny(), np.array([[True, False, False, False, False]])
    with torch.no_grad():
        one, other = (
            block_logits(
                model, States.of([PROMPTS[0]], np.array([[6, *rest]]), known, CONFIG, "cpu")
            )
            for rest in ([0, 0, 0, 0], [9, 9, 9, 9])
        )
    assert torch.equal(one, other)


def test_tokens_without_a_category_and_an_early_end_cannot_be_said() -> None:
    known = np.array([[False, False, True, False, False]])
    state = States.of([PROMPTS[0]], np.array([[0, 0, 6, 0, 0]]), known, CONFIG, "cpu")
    with torch.no_grad():
        chances = block_logits(tiny(), state)[0].softmax(-1)
    unsaid = [token for token, kind in enumerate(CONFIG.categories) if kind == NEVER]
    assert not chances[:, unsaid].any()
    assert chances[:2, END].tolist() == [0.0, 0.0]
    assert (chances[3:, END] > 0).all()


def test_A13_gains_are_those_of_the_worked_example() -> None:
    trust = [
        np.array([0.3, 0.4, 0.2, 0.5]),
        np.array([9.0, 0.6, 0.3, 0.55]),
        np.array([9.0, 9.0, 0.7, 0.5]),
        np.array([9.0, 9.0, 9.0, 0.5]),
    ]
    got = step_gains(trust, np.arange(4))
    assert_allclose(got, [0.116667, 0.175, 0.0, math.nan], atol=1e-5)


def test_places_filled_in_one_step_are_masked_before_it_only() -> None:
    trust = [np.array([0.1, 0.2, 0.3]), np.array([9.0, 9.0, 0.8])]
    assert step_gains(trust, np.array([0, 0, 1]))[0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("tokens", "order", "words"),
    [
        ((6, END), (0,), "no order"),
        ((6, END), (0, 2), "no order"),
        ((6, END, 7, END), (0, 1, 2, 3), "behind its end"),
        ((6, 7), (0, 1), "no end"),
        ((6,) * 6, (0, 1, 2, 3, 4, 5), "behind its end"),
    ],
)
def test_a_trace_that_no_denoiser_can_have_left_is_refused(
    tokens: tuple[int, ...], order: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Trace((4,), tokens, order).check(CONFIG)


def test_places_behind_the_end_are_filled_with_it() -> None:
    tokens, order = Trace((4,), (6, 9, END), (2, 0, 1)).block(CONFIG)
    assert tokens.tolist() == [6, 9, END, END, END]
    assert order.tolist() == [2, 0, 1, 1, 1]


def test_scores_are_those_of_each_state_asked_alone() -> None:
    model, temperature = tiny(), 0.7
    trace = Trace(PROMPTS[0], (6, 9, 7, END), (2, 0, 3, 1))
    score = score_traces(model, [trace], temperature)[0]
    block, order = trace.block(CONFIG)
    trust: list[np.ndarray] = []
    for step in range(4):
        known = (order < step)[None]
        with torch.no_grad():
            logits = block_logits(
                model, States.of([trace.prompt], block[None], known, CONFIG, "cpu")
            )[0]
        place = trace.order.index(step)
        logp = (logits[place] / temperature).log_softmax(-1)
        assert score.logp[place] == pytest.approx(float(logp[trace.tokens[place]]), abs=1e-5)
        entropy = -(logp.exp() * logp).sum()
        assert score.entropy[place] == pytest.approx(float(entropy), abs=1e-5)
        trust.append(confidences(logits).numpy())
    assert_allclose(score.gain, step_gains(trust, order)[list(trace.order)], atol=1e-5)
    assert math.isnan(score.gain[2])
    assert score.category.tolist() == [0.0, 1.0, 0.0, 2.0]


def test_scores_do_not_depend_on_how_the_states_are_cut() -> None:
    model = tiny()
    traces = [
        Trace(PROMPTS[0], (6, 9, 7, END), (2, 0, 3, 1)),
        Trace(PROMPTS[2], (8, 8, 8, 8, 8), (4, 3, 2, 1, 0)),
    ]
    for one, other in zip(
        score_traces(model, traces, 1.0), score_traces(model, traces, 1.0, max_rows=2), strict=True
    ):
        for name in ("logp", "entropy", "gain", "category"):
            assert_allclose(getattr(one, name), getattr(other, name), atol=1e-5)


# --- the engine ---------------------------------------------------------------------------------


@pytest.mark.parametrize("per_step", [1, 2, PLACES])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_every_answer_is_a_trace_whose_log_probs_are_found_again(
    per_step: int, temperature: float
) -> None:
    model = tiny()
    requests = [
        ask(index, PROMPTS[index % 3], temperature=temperature, top_k=4) for index in range(60)
    ]
    answers = DenoiserEngine(model, per_step=per_step).step(requests)
    assert [answer.session for answer in answers] == [request.session for request in requests]
    traces = [trace_of(*pair) for pair in zip(requests, answers, strict=True)]
    for trace in traces:
        trace.check(CONFIG)
        assert trace.num_steps <= math.ceil(PLACES / per_step)
    for answer, score in zip(answers, score_traces(model, traces, temperature), strict=True):
        assert_allclose(answer.logprobs, score.logp, atol=1e-5)
    assert {answer.finish for answer in answers} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len({len(answer.token_ids) for answer in answers}) > 1
    said = {token for answer in answers for token in answer.token_ids}
    assert all(CONFIG.categories[token] != NEVER for token in said)


def test_the_surest_place_is_filled_first() -> None:
    model, request = tiny(), ask(3)
    answer = DenoiserEngine(model).step([request])[0]
    block, order = trace_of(request, answer).block(CONFIG)
    for step in range(max(answer.order) + 1):
        known = (order < step)[None]
        with torch.no_grad():
            state = States.of([request.prompt_ids], block[None], known, CONFIG, "cpu")
            sure = confidences(block_logits(model, state))[0].numpy()
        assert order[np.where(known[0], -1.0, sure).argmax()] == step


def test_an_answer_depends_on_its_own_seed_and_not_on_its_neighbours() -> None:
    model = tiny()
    alone = DenoiserEngine(model).step([ask(7)])[0]
    beside = DenoiserEngine(model).step([ask(1, PROMPTS[2]), ask(7), ask(2, PROMPTS[1])])[1]
    cut = DenoiserEngine(model, max_rows=1).step([ask(1, PROMPTS[2]), ask(7)])[1]
    for other in (beside, cut):
        assert (other.token_ids, other.order) == (alone.token_ids, alone.order)
    others = {DenoiserEngine(model).step([ask(7, seed=seed)])[0].token_ids for seed in range(20)}
    assert len(others) > 3


def test_a_greedy_answer_takes_the_likeliest_token_of_each_state() -> None:
    model, request = tiny(), ask(0, temperature=0.0)
    first, second = DenoiserEngine(model).step([request, ask(1, temperature=0.0)])
    assert first.token_ids == second.token_ids
    trace = trace_of(request, first)
    assert_allclose(first.logprobs, score_traces(model, [trace], 1.0)[0].logp, atol=1e-5)
    # Where it is nearly cold, no other token has a half of the probability.
    assert (score_traces(model, [trace], 1e-3)[0].logp > math.log(0.5)).all()


def test_what_cannot_be_served_is_answered_with_an_error_in_its_place() -> None:
    engine = DenoiserEngine(tiny())
    answers = engine.step(
        [
            ask(0, max_tokens=4),
            ask(1),
            ask(2, prompt=(4,) * 12),
            ask(3, top_p=0.0),
            ask(4, prompt=()),
        ]
    )
    reasons = ["answer takes 5", "", "16 places", "top_p", "prompt is empty"]
    for answer, reason in zip(answers, reasons, strict=True):
        assert (answer.finish is FinishReason.ERROR) == bool(reason)
        assert reason in answer.error
        assert bool(answer.token_ids) != bool(reason)


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = tiny()
    with torch.no_grad():
        model.bias[7] = math.nan
    answer = DenoiserEngine(model).step([ask(0)])[0]
    assert (answer.finish, answer.token_ids) == (FinishReason.ERROR, ())


def test_loaded_weights_are_those_that_answer_and_carry_their_version() -> None:
    engine, other = DenoiserEngine(tiny(0)), tiny(1)
    assert isinstance(engine, BranchStepEngine)
    engine.load_adapter(denoiser_state(other), 5)
    got, want = engine.step([ask(3)])[0], DenoiserEngine(other).step([ask(3)])[0]
    assert got == replace(want, adapter_version=5)
    assert engine.health().adapter_version == 5
    probe = engine.score([(4, 7, 9, 5)])[0]
    assert probe[0] == 0.0
    assert_allclose(probe[1:], token_logps(other, (4, 7, 9, 5))[1:], atol=1e-6)


def test_a_denoiser_says_of_no_text_how_likely_it_is() -> None:
    engine = DenoiserEngine(tiny())
    engine.release(["s0"])
    assert engine.score_tails([]) == []
    with pytest.raises(ValueError, match="how likely"):
        engine.score_tails([TailRequest("s", (4, 5), 1)])
