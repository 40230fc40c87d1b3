"""LoRA layers that compute in half precision around adapters that stay in float32.

PEFT turns a half-precision activation into float32 before it meets a float32 adapter, and
multiplies, scales and adds whole activations in that format: slower than the frozen layer itself.
Here the adapter is rounded instead, the update is added inside a matrix product, and gradients of
the adapter leave their product in float32, unrounded. In float32 nothing changes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear

HALF = (torch.bfloat16, torch.float16)


class LoraLinear(Linear):
    """PEFT's layer, with a half-precision way of its own; parameters and their names are PEFT's."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``[..., in] -> [..., out]`` in the dtype of ``x``."""
        name = self._only_adapter()
        if args or kwargs or name is None or x.dtype not in HALF:
            return super().forward(x, *args, **kwargs)
        base = self.get_base_layer()
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        return _LowRankProduct.apply(x, base.weight, base.bias, down, up, self.scaling[name])  # type: ignore[no-any-return]

    def _only_adapter(self) -> str | None:
        """The adapter that is on, None where PEFT's own way is needed."""
        if (
            self.disable_adapters
            or self.merged
            or type(self.get_base_layer()) is not torch.nn.Linear
        ):
            return None
        names = [name for name in self.active_adapters if name in self.lora_A]
        plain = len(names) == 1 and names[0] not in self.lora_variant
        if not plain or not isinstance(self.lora_dropout[names[0]], torch.nn.Identity):
            return None
        return names[0]


class _LowRankProduct(torch.autograd.Function):
    """``x W^T + b + scale * (x A^T) B^T`` with ``A`` and ``B`` rounded to the dtype of ``x``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = F.linear(rows, weight, bias)
        narrow = rows @ down.to(x.dtype).t()
        out.addmm_(narrow, up.to(x.dtype).t(), alpha=scale)
        ctx.save_for_backward(rows, narrow, weight, down, up)
        ctx.scale, ctx.shape = scale, x.shape
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        rows, narrow, weight, down, up = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_down, needs_up, _ = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1])
        grad_narrow = (grad @ up.to(grad.dtype)) * ctx.scale
        grad_x = None
        if needs_x:
            grad_x = (grad @ weight).addmm_(grad_narrow, down.to(grad.dtype)).view(ctx.shape)
        return (
            grad_x,
            float32_product(grad.t(), rows).to(weight.dtype) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            float32_product(grad_narrow.t(), rows).to(down.dtype) if needs_down else None,
            float32_product(grad.t(), narrow).mul_(ctx.scale).to(up.dtype) if needs_up else None,
            None,
        )


def float32_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right`` of half-precision matrices, accumulated and kept in float32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
