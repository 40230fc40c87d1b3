"""Kernels and memory of a loaded engine, read off its model (``engines.kernels``, worker side)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from delta_belief_rl.engines.kernels import describe_kernels, model_kernels
from delta_belief_rl.engines.vllm_worker import PolicyWorkerExtension


class FlashAttentionImpl:
    """Stands for an attention kernel."""


class MarlinLinearKernel:
    """Stands for a fast kernel of 4-bit weights."""


class AWQLinearMethod:
    """Stands for the slow one."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.impl, self.num_heads = FlashAttentionImpl(), 4


class Linear(nn.Module):
    def __init__(self, method: Any, scheme: Any = None) -> None:
        super().__init__()
        self.quant_method, self.output_size, self.scheme = method, 8, scheme


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method, self.output_size, self.num_embeddings = object(), 8, 100


def model(*linear: nn.Module) -> nn.Module:
    return nn.ModuleList([Attention(), Attention(), Embedding(), *linear])


def test_Q3_the_kernel_of_each_layer_is_told_by_scheme_then_method() -> None:
    kernel = SimpleNamespace(kernel=MarlinLinearKernel())
    layers = [Linear(AWQLinearMethod()), Linear(object(), scheme=kernel), Linear(kernel)]
    found = model_kernels(model(*layers))
    assert found["attention"] == {"FlashAttentionImpl": 2}
    assert found["linear"] == {"AWQLinearMethod": 1, "MarlinLinearKernel": 2}


def test_Q3_one_layer_on_the_slow_kernel_is_called_out() -> None:
    fast = model_kernels(model(Linear(SimpleNamespace(kernel=MarlinLinearKernel()))))
    slow = model_kernels(model(Linear(AWQLinearMethod())))
    assert "slow" not in describe_kernels(fast)
    assert "AWQLinearMethod is the slow kernel" in describe_kernels(slow)
    assert describe_kernels(slow, ("Marlin off",)).endswith("Marlin off")


def test_a_workers_caches_are_counted_once_however_they_are_nested() -> None:
    shared, other = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(3)
    worker = PolicyWorkerExtension()
    caches = [[shared, shared], {"layer": other}]
    worker.model_runner = SimpleNamespace(kv_caches=caches, model_memory_usage=7)
    held = worker.policy_memory()
    assert held["cache"] == 4 * 8 * 2 + 3 * 4
    assert held["weights"] == 7
