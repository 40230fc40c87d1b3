"""Packed and cached attention give the logits of the plain forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM

from delta_belief_rl.models.attention import SlotCache, slot_batch
from delta_belief_rl.models.loading import tiny_qwen3_config
from delta_belief_rl.models.packed import Branch, PackSegment, pack
from delta_belief_rl.types import UserError

VOCAB = 41


def build(kind: str, implementation: str = "delta_belief") -> Any:
    torch.manual_seed(0)
    if kind == "qwen3":
        config: Any = tiny_qwen3_config(VOCAB, 32, 2, 4, 2, 8, 48)
        config._attn_implementation = implementation
        return Qwen3ForCausalLM(config).eval()
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=48, attn_implementation=implementation,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def plain_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


@pytest.fixture(params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


def run_packed(model: Any, segments: list[PackSegment]) -> tuple[torch.Tensor, Any]:
    packed = pack(segments)
    out = model(
        input_ids=packed.input_ids, position_ids=packed.position_ids, packed=packed, use_cache=False
    )
    return out.logits[0], packed


def test_plain_mode_equals_the_library_attention() -> None:
    ours, theirs = build("qwen3"), build("qwen3", "eager")
    theirs.load_state_dict(ours.state_dict())
    ids = torch.tensor([tokens(7, 1), tokens(7, 2)])
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    for attention_mask in (None, mask):
        keep = mask.bool() if attention_mask is not None else torch.ones_like(ids).bool()
        a = ours(input_ids=ids, attention_mask=attention_mask).logits
        b = theirs(input_ids=ids, attention_mask=attention_mask).logits
        torch.testing.assert_close(a[keep], b[keep], atol=1e-5, rtol=1e-5)


def test_plain_mode_generates_with_the_library_cache(model: Any) -> None:
    ids = torch.tensor([tokens(5, 3)])
    out = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    step = ids
    for _ in range(4):
        step = torch.cat([step, model(input_ids=step).logits[:, -1:].argmax(-1)], dim=1)
    assert out.tolist() == step.tolist()


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(6, 6), (3, 9, 1)])
def test_packed_sequences_do_not_see_each_other(model: Any, lengths: tuple[int, ...]) -> None:
    games = [tokens(n, n) for n in lengths]
    logits, packed = run_packed(model, [PackSegment(game) for game in games])
    for i, game in enumerate(games):
        start = packed.segment_starts[i]
        torch.testing.assert_close(
            logits[start : start + len(game)], plain_logits(model, game), atol=1e-5, rtol=1e-5
        )


@torch.no_grad()
def test_a_branch_sees_its_prefix_and_itself_only(model: Any) -> None:
    trunks = [tokens(8, 1), tokens(5, 2)]
    branch = tuple(tokens(3, 9))
    points = [(1, 4, 8), (5,)]
    segments = [
        PackSegment(trunk, tuple(Branch(point, branch) for point in at))
        for trunk, at in zip(trunks, points, strict=True)
    ]
    logits, packed = run_packed(model, segments)
    for s, trunk in enumerate(trunks):
        start = packed.segment_starts[s]
        torch.testing.assert_close(
            logits[start : start + len(trunk)], plain_logits(model, trunk), atol=1e-5, rtol=1e-5
        )
        for b, point in enumerate(points[s]):
            first = packed.branch_starts[s][b]
            torch.testing.assert_close(
                logits[first : first + 3],
                plain_logits(model, trunk[:point] + list(branch))[point:],
                atol=1e-5,
                rtol=1e-5,
            )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_a_pack_equal_those_of_separate_games(model: Any, checkpointing: bool) -> None:
    games = [tokens(4, 1), tokens(7, 2)]
    model.train()
    total = sum(plain_logits(model, game).logsumexp(-1).sum() for game in games)
    total.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    logits, _ = run_packed(model, [PackSegment(game) for game in games])
    logits.logsumexp(-1).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_bf16_packed_is_finite_with_padding_and_branches(model: Any) -> None:
    model = model.to(torch.bfloat16)
    segments = [PackSegment(tokens(9, 1), (Branch(2, (1, 2)),)), PackSegment(tokens(2, 2))]
    logits, _ = run_packed(model, segments)
    assert torch.isfinite(logits).all()


def feed(model: Any, cache: SlotCache, rows: Any, new: list[list[int]], at: list[int]) -> Any:
    """Append ragged tokens to slots; returns the logits ``[B, q, V]``."""
    width = max(len(ids) for ids in new)
    ids = torch.zeros(len(new), width, dtype=torch.long)
    valid = torch.zeros(len(new), width, dtype=torch.bool)
    positions = torch.full((len(new), width), 10**6)
    for i, row in enumerate(new):
        ids[i, : len(row)] = torch.tensor(row)
        valid[i, : len(row)] = True
        positions[i, : len(row)] = at[i] + torch.arange(len(row))
    batch = slot_batch(cache, rows, positions, valid)
    return model(
        input_ids=ids,
        position_ids=torch.where(valid, positions, 0),
        slots=batch,
        use_cache=False,
    ).logits


@torch.no_grad()
@pytest.mark.parametrize("kind", ["slice", "index"])
def test_a_slot_cache_continues_ragged_games_in_pieces(model: Any, kind: str) -> None:
    cache = SlotCache.for_model(model, num_slots=4, max_len=16)
    rows: Any = slice(1, 4) if kind == "slice" else torch.tensor([3, 0, 2])
    games = [tokens(12, 1), tokens(9, 2), tokens(12, 3)]
    done = [0, 0, 0]
    for pieces in ([5, 1, 3], [1, 1, 1], [4, 6, 0], [2, 1, 8]):
        new = [game[at : at + n] for game, at, n in zip(games, done, pieces, strict=True)]
        logits = feed(model, cache, rows, new, done)
        for i, n in enumerate(pieces):
            want = plain_logits(model, games[i])[done[i] : done[i] + n]
            torch.testing.assert_close(logits[i, :n], want, atol=1e-5, rtol=1e-5)
        done = [at + n for at, n in zip(done, pieces, strict=True)]
    assert done == [len(game) for game in games]


@torch.no_grad()
def test_padding_queries_never_touch_a_games_cells(model: Any) -> None:
    cache = SlotCache.for_model(model, num_slots=2, max_len=8)
    feed(model, cache, slice(0, 2), [tokens(8, 1), tokens(8, 2)], [0, 0])
    before = cache.keys[:, :, :, :8].clone()
    feed(model, cache, slice(0, 2), [[], tokens(1, 3)], [8, 7])
    changed = (cache.keys[:, :, :, :8] != before).any(dim=(0, 2, 4))
    assert not changed[0].any()
    assert changed[1].tolist() == [False] * 7 + [True]


def test_C1_a_game_longer_than_its_slot_is_a_named_error(model: Any) -> None:
    cache = SlotCache.for_model(model, num_slots=1, max_len=4)
    with pytest.raises(UserError, match="slot holds 4"):
        slot_batch(cache, slice(0, 1), torch.tensor([[4]]))


def test_a_windowed_layer_refuses_sequences_beyond_its_window() -> None:
    config: Any = tiny_qwen3_config(VOCAB, 32, 2, 4, 2, 8, 48)
    config.layer_types = ["full_attention", "sliding_attention"]
    config.sliding_window = 6
    config._attn_implementation = "delta_belief"
    model = Qwen3ForCausalLM(config).eval()
    run_packed(model, [PackSegment(tokens(6, 1)), PackSegment(tokens(2, 1))])
    with pytest.raises(UserError, match="look back 6 tokens"):
        run_packed(model, [PackSegment(tokens(7, 1))])
