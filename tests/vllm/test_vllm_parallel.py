"""Engines of tensor-parallel size two against plain PyTorch: a policy and a judge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed: use make test-vllm")

import numpy as np
import tiny
from asked import asked, greedy_text
from held import BOUND, Held, gap

from delta_belief_rl.engines.vllm_text import VllmTextEngine
from delta_belief_rl.models.loading import load_tokenizer
from delta_belief_rl.text.chat import ChatFormat

pytestmark = pytest.mark.timeout(900)

WIDE = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def held(folder: Path) -> Iterator[Held]:
    held = Held(folder, **WIDE)
    yield held
    held.close()


def test_U6_a_policy_over_two_workers_samples_and_scores_with_the_adapter(held: Held) -> None:
    for version, seed in enumerate((3, 4)):
        state, ids = held.load(seed, version), tiny.prompt(seed, 20)
        asked = [tiny.request(f"g{heat}", ids, temperature=heat) for heat in (0.0, 0.7, 1.0)]
        for heat, answer in zip((1.0, 0.7, 1.0), held.play(*asked), strict=True):
            assert answer.adapter_version == version
            assert gap(held, state, ids, answer, heat) < BOUND
        (scores,) = held(held.engine.score([ids]))
        assert np.max(np.abs(scores[1:] - held.reference.logprobs(state, ids))) < BOUND


def test_each_of_two_workers_tells_its_own_memory(held: Held) -> None:
    first, second = held(held.engine.memory())
    assert first["cache"] == second["cache"] > 0


def test_J8_a_judge_over_two_workers_says_what_plain_pytorch_says(folder: Path) -> None:
    chat = ChatFormat.from_tokenizer(load_tokenizer(folder))
    engine = VllmTextEngine({"model": str(folder), **tiny.ARGUMENTS, **WIDE}, chat)
    try:
        requests = [asked(text) for text in ("Is it alive", "Is it big", "Is it made of wood")]
        answers = engine.generate(requests)
        assert [one.text for one in answers] == [greedy_text(folder, one) for one in requests]
        assert len(engine.memory()) == 2
    finally:
        engine.close()
