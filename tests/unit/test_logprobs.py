"""Chunked log-probabilities at chosen positions equal the full-logits path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from delta_belief_rl.models.loading import add_lora, build_causal_lm, tiny_qwen3_config
from delta_belief_rl.models.logprobs import check_output_head, token_logprobs
from delta_belief_rl.models.packed import PackedInput, PackSegment, pack
from delta_belief_rl.types import UserError

VOCAB = 37


@pytest.fixture
def model() -> Any:
    return build_causal_lm(tiny_qwen3_config(VOCAB), seed=3)


@pytest.fixture
def packed() -> PackedInput:
    rng = np.random.default_rng(0)
    return pack([PackSegment(rng.integers(0, VOCAB, n).tolist()) for n in (9, 5, 12)])


def everything(packed: PackedInput) -> tuple[torch.Tensor, torch.Tensor]:
    sources = np.concatenate(
        [packed.trunk_sources(s, np.arange(1, n)) for s, n in enumerate(packed.trunk_lengths)]
    )
    index = torch.from_numpy(sources)
    return index, packed.input_ids[0][index + 1]


def plain(model: Any, packed: PackedInput, temperature: float) -> torch.Tensor:
    logits = model(
        input_ids=packed.input_ids, position_ids=packed.position_ids, packed=packed, use_cache=False
    ).logits[0]
    return torch.log_softmax(logits.float() / temperature, dim=-1)


@pytest.mark.parametrize("chunk", [1, 4, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_M8_chunks_equal_the_full_logits_path(
    model: Any, packed: PackedInput, chunk: int, temperature: float
) -> None:
    index, targets = everything(packed)
    full = plain(model, packed, temperature)
    got = token_logprobs(model, packed, index, targets, temperature, chunk, with_entropy=True)
    torch.testing.assert_close(got.logp, full[index, targets], atol=1e-5, rtol=1e-5)
    assert got.entropy is not None
    want = -(full.exp() * full).sum(-1)[index]
    torch.testing.assert_close(got.entropy, want, atol=1e-5, rtol=1e-5)


def test_B3_no_more_rows_of_logits_exist_than_a_chunk_has(model: Any, packed: PackedInput) -> None:
    rows: list[int] = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _m, _i, out: rows.append(out.shape[-2]))
    index, targets = everything(packed)
    token_logprobs(model, packed, index, targets, chunk=4)
    handle.remove()
    # The first is the single row that the model's own forward makes.
    assert rows[0] == 1
    assert max(rows[1:]) == 4
    assert sum(rows[1:]) == len(index)


def test_M8_gradients_equal_those_of_the_full_logits_path(model: Any, packed: PackedInput) -> None:
    index, targets = everything(packed)
    weight = torch.linspace(-1, 1, len(index))
    (plain(model, packed, 1.0)[index, targets] * weight).sum().backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    got = token_logprobs(model, packed, index, targets, chunk=4)
    (got.logp * weight).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], atol=1e-4, rtol=1e-4)


def test_P6_scores_with_and_without_gradients_are_bitwise_equal(
    model: Any, packed: PackedInput
) -> None:
    index, targets = everything(packed)
    with torch.no_grad():
        old = token_logprobs(model, packed, index, targets).logp
    new = token_logprobs(model, packed, index, targets).logp
    assert torch.equal(old, new.detach())


def test_an_adapter_is_part_of_the_score(model: Any, packed: PackedInput) -> None:
    index, targets = everything(packed)
    before = token_logprobs(model, packed, index, targets).logp.detach()
    model = add_lora(model, rank=2, alpha=2, name="policy")
    assert torch.equal(token_logprobs(model, packed, index, targets).logp.detach(), before)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.add_(0.5)
    after = token_logprobs(model, packed, index, targets).logp
    assert not torch.allclose(after, before, atol=1e-2)
    after.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_no_positions_give_no_scores(model: Any, packed: PackedInput) -> None:
    none = torch.zeros(0, dtype=torch.long)
    assert token_logprobs(model, packed, none, none).logp.shape == (0,)


def test_greedy_temperature_and_unequal_lengths_are_refused(
    model: Any, packed: PackedInput
) -> None:
    index, targets = everything(packed)
    with pytest.raises(ValueError, match="positive temperature"):
        token_logprobs(model, packed, index, targets, temperature=0.0)
    with pytest.raises(ValueError, match="targets"):
        token_logprobs(model, packed, index, targets[1:])


def test_models_that_transform_their_logits_are_refused() -> None:
    config = tiny_qwen3_config(VOCAB)
    check_output_head(config)
    config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="final_logit_softcapping"):
        check_output_head(config)
