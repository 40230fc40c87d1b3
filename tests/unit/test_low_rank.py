"""LoRA in half precision around float32 adapters: PEFT's numbers, gradients in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear

from delta_belief_rl.models.adapters import adapter_parameters, adapter_state, add_lora, use_adapter
from delta_belief_rl.models.loading import build_causal_lm, tiny_qwen3_config
from delta_belief_rl.models.low_rank import LoraLinear, float32_product

VOCAB = 41
IDS = torch.arange(24).reshape(2, 12)


def build(dtype: torch.dtype, layer_class: bool = True) -> Any:
    """A model with an adapter whose both halves are random, the same for every dtype."""
    model = build_causal_lm(tiny_qwen3_config(VOCAB), torch.bfloat16).to(dtype)
    model.requires_grad_(False)
    model = add_lora(model, rank=4, alpha=8.0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter_parameters(model, "default").values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    if not layer_class:
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.__class__ = Linear
    return model


def run(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and the adapter's gradients of a loss over them."""
    logits = model(input_ids=IDS, use_cache=False).logits.float()
    torch.log_softmax(logits, -1)[..., 3].sum().backward()
    gradients = {
        name: parameter.grad for name, parameter in adapter_parameters(model, "default").items()
    }
    return logits.detach(), gradients


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of ``b``."""
    gap = sum(float((a[name] - b[name]).square().sum()) for name in b)
    return (gap / sum(float(x.square().sum()) for x in b.values())) ** 0.5


def test_float32_is_bit_identical_to_the_library_layer() -> None:
    ours, theirs = run(build(torch.float32)), run(build(torch.float32, layer_class=False))
    assert torch.equal(ours[0], theirs[0])
    for name, gradient in theirs[1].items():
        assert torch.equal(ours[1][name], gradient), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_float32_as_the_library_layer(dtype: torch.dtype) -> None:
    exact, exact_gradients = run(build(torch.float32))
    theirs, their_gradients = run(build(dtype, layer_class=False))
    ours, gradients = run(build(dtype))
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    # The largest of few differences is chance, and another one on another processor.
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
    assert (ours - exact).abs().max() <= 3 * (theirs - exact).abs().max()
    assert distance(gradients, exact_gradients) <= 1.5 * distance(their_gradients, exact_gradients)
    assert distance(gradients, exact_gradients) < 0.05


def test_every_layer_is_ours_and_keeps_the_library_names_and_float32_weights() -> None:
    ours, theirs = build(torch.bfloat16), build(torch.bfloat16, layer_class=False)
    layers = [module for module in ours.modules() if isinstance(module, LoraLinear)]
    assert len(layers) == 2 * 7
    assert {p.dtype for p in adapter_parameters(ours, "default").values()} == {torch.float32}
    assert adapter_state(ours).keys() == adapter_state(theirs).keys()


@torch.no_grad()
def test_switching_adapters_off_and_over_reaches_the_half_precision_layer() -> None:
    model = build(torch.bfloat16)
    with_adapter = model(input_ids=IDS).logits
    add_lora(model, rank=4, alpha=8.0, name="ema", trainable=False)
    with use_adapter(model, None):
        base = model(input_ids=IDS).logits
    with use_adapter(model, "ema"):
        fresh = model(input_ids=IDS).logits
    assert torch.equal(fresh, base)
    assert not torch.equal(with_adapter, base)
    assert torch.equal(model(input_ids=IDS).logits, with_adapter)


def test_gradients_of_a_product_are_those_of_float64() -> None:
    from delta_belief_rl.models.low_rank import _LowRankProduct

    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5), (4, 5), (4,), (2, 5), (4, 2))
    values = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]

    def product(*tensors: torch.Tensor) -> torch.Tensor:
        return _LowRankProduct.apply(*tensors, 0.7)  # type: ignore[no-any-return]

    x, weight, bias, down, up = values
    want = x @ weight.t() + bias + 0.7 * (x @ down.t()) @ up.t()
    torch.testing.assert_close(product(*values), want)
    got = torch.autograd.grad(product(*values).sin().sum(), values)
    for a, b in zip(got, torch.autograd.grad(want.sin().sum(), values), strict=True):
        # Gradients of weights leave their product in float32.
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_half_precision_product_is_kept_in_float32() -> None:
    left, right = torch.full((1, 256), 1.0), torch.full((256, 1), 1.0 + 2**-7)
    out = float32_product(left.bfloat16(), right.bfloat16())
    assert out.dtype == torch.float32
    assert float(out) == 258.0
