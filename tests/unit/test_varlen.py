"""Attention without padding: the layout, against padded rows, with a kernel written out in full."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_attention import build, plain_logits, tokens

from delta_belief_rl.belief.branched import plan_passes
from delta_belief_rl.models import varlen
from delta_belief_rl.models.packed import Branch, PackedInput, PackSegment, pack


def kernel_by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float | None,
) -> torch.Tensor:
    """What the GPU kernels compute: each sequence alone and causal."""
    calls.append(longest)
    out: list[torch.Tensor] = []
    repeats = query.shape[1] // key.shape[1]
    assert int(starts.diff().max()) == longest
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(repeats, 0) for x in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        out.append(attended.transpose(0, 1))
    return torch.cat(out)


calls: list[int] = []


@pytest.fixture
def ragged_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "kernel", lambda: kernel_by_definition)
    calls.clear()


def logits_of(model: Any, packed: PackedInput) -> torch.Tensor:
    return model(
        input_ids=packed.input_ids, position_ids=packed.position_ids, packed=packed, use_cache=False
    ).logits[0]


@torch.no_grad()
@pytest.mark.usefixtures("ragged_on_cpu")
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_ragged_pack_gives_the_logits_of_a_padded_one_and_of_plain_forwards(kind: str) -> None:
    model = build(kind)
    batch = [PackSegment(tokens(n, n)) for n in (8, 3, 5)]
    packed = pack(batch, ragged=True)
    got = logits_of(model, packed)
    layers = model.config.num_hidden_layers
    assert calls == [8] * layers
    torch.testing.assert_close(got, logits_of(model, pack(batch)), atol=1e-5, rtol=1e-5)
    want = plain_logits(model, list(batch[1].token_ids))
    torch.testing.assert_close(got[8:11], want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.usefixtures("ragged_on_cpu")
def test_a_pack_with_branches_is_spread() -> None:
    model = build("qwen3")
    batch = [PackSegment(tokens(8, 1), (Branch(4, (1, 2)),)), PackSegment(tokens(3, 2))]
    packed = pack(batch, ragged=True)
    assert packed.ragged is None
    assert torch.equal(logits_of(model, packed), logits_of(model, pack(batch)))
    assert not calls


@pytest.mark.usefixtures("ragged_on_cpu")
def test_gradients_of_a_ragged_pack_equal_those_of_a_padded_one() -> None:
    model = build("qwen3")
    batch = [PackSegment(tokens(8, 1)), PackSegment(tokens(3, 2))]
    found: list[dict[str, torch.Tensor]] = []
    for ragged in (True, False):
        model.zero_grad()
        logits_of(model, pack(batch, ragged=ragged)).logsumexp(-1).sum().backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for name, gradient in found[1].items():
        torch.testing.assert_close(found[0][name], gradient, atol=1e-5, rtol=1e-4)


def test_without_a_gpu_packs_stay_padded() -> None:
    assert not varlen.runs_ragged(build("qwen3"))
    assert not varlen.runs_ragged(build("qwen3").to(torch.bfloat16))


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(1, 60))
def test_passes_without_padding_are_bounded_by_the_sum_of_their_tokens(
    lengths: list[int], budget: int
) -> None:
    parts = plan_passes(lengths, budget, padded=False)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or sum(lengths[i] for i in part) <= budget
    assert len(parts) <= len(plan_passes(lengths, budget))
