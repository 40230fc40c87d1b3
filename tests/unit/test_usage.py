"""What ranks use: operations of an update, time of the parts, memory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_fakes as fakes
from torch.utils.flop_counter import FlopCounterMode

from delta_belief_rl.models.flops import ModelSize, peak_flops, update_flops
from delta_belief_rl.models.loading import add_lora, build_causal_lm, tiny_qwen3_config
from delta_belief_rl.trainer.actor import BASE, PolicyActor
from delta_belief_rl.trainer.usage import RankUsage, UsageMeter, usage_metrics

RANK = RankUsage({"update": 2.0, "ref": 0.5}, 1e12, None, None, None, 2.0**30)


@pytest.fixture
def model() -> Any:
    return build_causal_lm(tiny_qwen3_config(50, hidden=32, layers=2, intermediate=48))


def counted(model: Any, length: int) -> tuple[float, float]:
    """Operations of the linear layers in one forward and backward over one sequence, as PyTorch
    counts them, and of the forward alone."""
    ids = torch.arange(length)[None] % 50
    linear = (torch.ops.aten.mm, torch.ops.aten.addmm)

    def total(counter: FlopCounterMode) -> float:
        return float(sum(counter.get_flop_counts()["Global"].get(op, 0) for op in linear))

    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return total(forward) + total(backward), total(forward)


def test_linear_layers_are_counted_as_pytorch_counts_them(model: Any) -> None:
    size = replace(ModelSize.of(model), attention=0)
    both, forward = counted(model, 16)
    assert size.trained == size.weights
    assert size.head_trained
    # The first layer's input needs no gradient only when the embedding has none.
    assert update_flops(size, np.array([16]), 16) == pytest.approx(both)
    assert 2 * (size.weights + size.head) * 16 == pytest.approx(forward)
    assert update_flops(size, np.array([16]), 16) == pytest.approx(3 * forward)


def test_frozen_weights_cost_no_gradient_of_their_own(model: Any) -> None:
    whole = ModelSize.of(model)
    model.requires_grad_(False)
    adapted = add_lora(model, 4, 8, name="actor")
    alone = ModelSize.of(adapted)
    assert alone.trained == alone.weights - whole.weights
    assert not alone.head_trained
    add_lora(adapted, 4, 8, name="ema", trainable=False)
    assert ModelSize.of(adapted) == alone, "an idle adapter costs nothing"
    lengths = np.array([16])
    per_token = update_flops(replace(alone, attention=0, head=0), lengths, 0) / 16
    assert per_token == 4 * alone.weights + 2 * alone.trained


def test_attention_is_counted_over_what_a_token_may_see(model: Any) -> None:
    only = ModelSize(weights=0, trained=0, head=0, head_trained=False, attention=10)
    pairs = 3 * 4 / 2 + 5 * 6 / 2
    assert update_flops(only, np.array([3, 5]), 8) == 2 * 4 * 10 * pairs
    assert ModelSize.of(model).attention == 2 * 4 * 8


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("NVIDIA A10", None),
        ("cpu", None),
    ],
)
def test_only_a_device_that_is_known_has_a_peak(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_the_slowest_rank_and_the_fullest_device_stand_for_all() -> None:
    gpu = RankUsage({"update": 4.0}, 3e12, 1e12, 2**31, 2**32, 2.0**30)
    other = replace(gpu, seconds={"update": 2.0, "ref": 1.0}, allocated=2**30, reserved=2**33)
    out = usage_metrics([gpu, other])
    assert out == {
        "timing_s/ref": 1.0,
        "perf/mfu/actor": pytest.approx(6e12 / (4.0 * 2e12)),
        "perf/update_tflops": pytest.approx(1.5),
        "perf/max_memory_allocated_gb": 2.0,
        "perf/max_memory_reserved_gb": 8.0,
        "perf/ranks_memory_used_gb": 2.0,
    }


def test_without_a_stated_peak_there_is_no_utilisation_and_without_a_gpu_no_gpu_memory() -> None:
    out = usage_metrics([RANK, replace(RANK, resident=float("nan"))])
    assert out == {
        "timing_s/ref": 0.5,
        "perf/update_tflops": pytest.approx(1.0),
        "perf/ranks_memory_used_gb": 1.0,
    }
    assert usage_metrics([replace(RANK, seconds={}, resident=math.nan)]) == {}
    assert usage_metrics([]) == {}


def test_the_peak_of_the_fullest_rank_is_told_against_the_plans_account() -> None:
    small = RankUsage({}, 0.0, None, 2**30, 2**33, math.nan)
    out = usage_metrics([small, replace(small, allocated=3 * 2**30)], expected_bytes=2 * 2**30)
    memory = {name: value for name, value in out.items() if name.startswith("memory/")}
    assert memory == {
        "memory/actor_peak_gib": 3.0,
        "memory/actor_estimate_gib": 2.0,
        "memory/actor_peak_over_estimate": 1.5,
    }
    for ranks, expected in (([small], None), ([RANK], 2.0**30), ([], 2.0**30)):
        told = usage_metrics(ranks, expected)
        assert not [name for name in told if name.startswith("memory/")]


def test_a_meter_begins_anew_when_it_is_asked() -> None:
    meter = UsageMeter(torch.device("cpu"))
    meter.add_flops(5.0)
    with meter.measure("update"):
        pass
    first, second = meter.drain(), meter.drain()
    assert first.flops == 5.0
    assert set(first.seconds) == {"update"}
    assert (second.flops, dict(second.seconds)) == (0.0, {})
    assert first.resident > 2**20


def test_a_rank_counts_its_update_and_the_passes_of_other_models(tmp_path: Path) -> None:
    groups = fakes.make_groups()
    settings = fakes.settings_of(fakes.save_model(tmp_path / "model"), views=(BASE,))
    actor = PolicyActor(settings)
    scores = actor.score(fakes.requests(groups))
    batch = fakes.make_batch(groups, scores)
    actor.update(fakes.share(batch, fakes.one_step(batch)), 1)
    usage = actor.usage()
    assert set(usage.seconds) == {"ref", "update"}
    scored = int(np.count_nonzero(batch.turn_ids >= 0))
    assert usage.flops == update_flops(ModelSize.of(actor.model), batch.lengths(), scored) > 0
    assert actor.usage().flops == 0.0
