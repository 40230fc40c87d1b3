"""Liger kernels: which models take them, and that the rest is said."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from delta_belief_rl.models import liger
from delta_belief_rl.models.adapters import add_lora
from delta_belief_rl.models.loading import build_causal_lm, tiny_qwen3_config

IDS = torch.arange(12)[None]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, mode: str, in_place: bool
) -> torch.Tensor:
    assert (offset, mode, in_place) == (0.0, "llama", False)
    CALLS.append("norm")
    return weight * F.rms_norm(x, x.shape[-1:], eps=eps)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    CALLS.append("swiglu")
    return F.silu(gate) * up


def rope(*_: Any) -> Any:
    raise AssertionError("the fused rotation is for GPUs")


CALLS: list[str] = []


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the functions' names, in plain PyTorch."""
    functional = ModuleType("liger_kernel.transformers.functional")
    functional.liger_rms_norm = rms_norm  # type: ignore[attr-defined]
    functional.liger_swiglu = swiglu  # type: ignore[attr-defined]
    functional.liger_rope = rope  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    monkeypatch.setattr(liger, "find_spec", lambda name: object())
    module = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    monkeypatch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)
    CALLS.clear()


@torch.no_grad()
@pytest.mark.usefixtures("installed")
def test_norms_and_feed_forwards_of_the_model_are_replaced_and_nothing_else_changes() -> None:
    model = add_lora(build_causal_lm(tiny_qwen3_config(41)), rank=2, alpha=2.0)
    other = build_causal_lm(tiny_qwen3_config(41))
    want = model(input_ids=IDS).logits
    assert liger.apply_liger(model) is None
    assert liger.apply_liger(model) is None
    torch.testing.assert_close(model(input_ids=IDS).logits, want, atol=1e-5, rtol=1e-5)
    # Two layers of four norms and a feed-forward, and the last norm.
    assert sorted(CALLS) == ["norm"] * 9 + ["swiglu"] * 2
    CALLS.clear()
    other(input_ids=IDS)
    assert not CALLS


@pytest.mark.usefixtures("installed")
def test_an_unknown_model_is_left_alone_and_said() -> None:
    config = GPTNeoXConfig(
        vocab_size=41, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=48,
    )  # fmt: skip
    reason = liger.apply_liger(GPTNeoXForCausalLM(config))
    assert reason is not None
    assert "'gpt_neox'" in reason


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    reason = liger.apply_liger(build_causal_lm(tiny_qwen3_config(41)))
    assert reason is not None
    assert "not installed" in reason
