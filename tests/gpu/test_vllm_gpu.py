"""vLLM on a GPU: sleep, wake and many adapters, on a tiny model of random weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from delta_belief_rl.engines.vllm_args import before_import
from tests.vllm import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROBE = tiny.prompt(3, 40)
NEAR = 0.05
"""Nats on average between bfloat16 and float32 at two layers."""
SYNCS = 20
GROWTH = 64 << 20
"""Bytes by which the memory of the card may differ between the fifth sync and the last."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("gpu") / "model")


@pytest.fixture(scope="module")
def loop() -> Any:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def engine(folder: Path, loop: asyncio.AbstractEventLoop) -> Any:
    before_import()
    pytest.importorskip("vllm", reason="needs vLLM")
    from delta_belief_rl.engines.vllm_engine import VllmEngine

    arguments = {
        "model": str(folder),
        "dtype": "bfloat16",
        "max_model_len": tiny.MAX_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "enforce_eager": True,
        "enable_sleep_mode": True,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 1 << 30,
        "seed": 0,
    }
    engine = loop.run_until_complete(VllmEngine.start(arguments, lora=tiny.LORA))
    yield engine
    loop.run_until_complete(engine.shutdown())


def score(engine: Any, loop: asyncio.AbstractEventLoop) -> np.ndarray:
    return loop.run_until_complete(engine.score([PROBE]))[0][1:]


def test_L4_base_weights_and_adapter_are_as_they_were_after_sleep(
    engine: Any, loop: asyncio.AbstractEventLoop, folder: Path
) -> None:
    reference = tiny.Reference(folder)
    state = reference.adapter(1)
    loop.run_until_complete(engine.load_adapter(state, 1))
    before = score(engine, loop)
    assert float(np.abs(before - reference.logprobs(state, PROBE)).mean()) < NEAR
    free = torch.cuda.mem_get_info()[0]
    loop.run_until_complete(engine.sleep())
    assert torch.cuda.mem_get_info()[0] - free > 900 << 20
    loop.run_until_complete(engine.wake())
    assert np.array_equal(score(engine, loop), before)


def test_L9_a_probe_tells_the_adapters_apart(
    engine: Any, loop: asyncio.AbstractEventLoop, folder: Path
) -> None:
    reference = tiny.Reference(folder)
    for version, seed in ((2, 2), (3, 0), (4, 3)):
        state = reference.adapter(seed)
        loop.run_until_complete(engine.load_adapter(state, version))
        wrong = reference.logprobs(reference.adapter(seed + 1), PROBE)
        found = score(engine, loop)
        assert float(np.abs(found - reference.logprobs(state, PROBE)).mean()) < NEAR
        assert float(np.abs(found - wrong).mean()) > 2 * NEAR


def test_L17_the_memory_of_the_card_does_not_grow_with_syncs(
    engine: Any, loop: asyncio.AbstractEventLoop, folder: Path
) -> None:
    reference = tiny.Reference(folder)
    free = []
    for number in range(SYNCS):
        state = reference.adapter(number + 1)
        loop.run_until_complete(engine.load_adapter(state, 10 + number))
        score(engine, loop)
        loop.run_until_complete(engine.sleep())
        loop.run_until_complete(engine.wake())
        free.append(torch.cuda.mem_get_info()[0])
    assert abs(free[-1] - free[4]) < GROWTH


def test_Q3_the_kernels_in_use_and_the_memory_are_told(
    engine: Any, loop: asyncio.AbstractEventLoop
) -> None:
    kernels = loop.run_until_complete(engine.kernels())
    assert sum(kernels["attention"].values()) == tiny.CONFIG.num_hidden_layers
    assert sum(kernels["linear"].values()) == 4 * tiny.CONFIG.num_hidden_layers
    (held,) = loop.run_until_complete(engine.memory())
    assert held["weights"] > 0
    assert 0.9 * (1 << 30) < held["cache"] <= 1 << 30
    assert held["reserved"] >= held["cache"]
