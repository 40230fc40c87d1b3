"""What is settled before vLLM starts: arguments, refusals, adapters; and what its worker runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from delta_belief_rl.engines.base import GenRequest, SamplingParams
from delta_belief_rl.engines.vllm_args import (
    CPU_BLOCK,
    CPU_CACHE_BYTES,
    LoraShape,
    adapter_modules,
    before_import,
    check_modules,
    check_shape,
    check_vllm_version,
    cpu_arguments,
    engine_arguments,
    max_lora_rank,
    refusal,
    sampling_arguments,
    write_adapter,
)
from delta_belief_rl.engines.vllm_worker import OWNER, PolicyWorkerExtension, temper
from delta_belief_rl.models.loading import (
    adapter_state,
    add_lora,
    build_causal_lm,
    load_adapter_state,
    tiny_qwen3_config,
)
from delta_belief_rl.types import UserError

LORA = LoraShape(4, 8.0)
ROOT = Path(__file__).resolve().parents[2]


def request(ids: tuple[int, ...] = (3, 4), seed: int = 1, **drawn: Any) -> GenRequest:
    return GenRequest("g", ids, seed, SamplingParams(**drawn))


@pytest.mark.parametrize("version", ["0.23.0", "0.32.0+cpu", "0.25.1.dev3+g12ab"])
def test_a_tested_version_is_taken(version: str) -> None:
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.22.9", "0.33.0", "1.0", "dev"])
def test_another_version_is_refused_with_the_window(version: str) -> None:
    with pytest.raises(UserError, match=r"vllm>=0\.23,<0\.33"):
        check_vllm_version(version)


def test_on_cpus_an_engine_neither_sleeps_nor_splits_prompts_and_its_cache_is_bounded() -> None:
    given: dict[str, object] = {
        "model": "m",
        "max_num_batched_tokens": 512,
        "max_model_len": 2550,
        "enable_sleep_mode": True,
        "enable_chunked_prefill": True,
    }
    assert cpu_arguments(given, "float32") == {
        "model": "m",
        "dtype": "float32",
        "max_num_batched_tokens": 2550,
        "max_model_len": 2550,
        "enable_sleep_mode": False,
        "enable_chunked_prefill": False,
        "kv_cache_memory_bytes": CPU_CACHE_BYTES,
        "block_size": CPU_BLOCK,
    }
    chosen = {"max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 1000, "block_size": 64}
    assert chosen.items() <= cpu_arguments(given | chosen, "float32").items()


def test_an_engine_gets_what_was_asked_and_what_it_needs() -> None:
    plain = engine_arguments({"model": "m", "max_model_len": 64})
    assert plain["max_model_len"] == 64
    assert plain["logprobs_mode"] == "raw_logprobs"
    assert plain["enable_lora"] is False
    assert "max_loras" not in plain
    assert plain["distributed_executor_backend"] == "uni"
    wide = engine_arguments({"model": "m", "tensor_parallel_size": 2}, LoraShape(12, 24.0))
    assert (wide["enable_lora"], wide["max_loras"], wide["max_lora_rank"]) == (True, 1, 16)
    assert wide["distributed_executor_backend"] == "mp"
    assert (
        engine_arguments({"model": "m", "disable_log_stats": False})["disable_log_stats"] is False
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"model": "m", "logprobs_mode": "processed_logprobs"}, "logprobs_mode"),
        ({"model": "m", "enable_lora": True}, "enable_lora"),
        ({"max_model_len": 8}, "needs a model"),
    ],
)
def test_what_contradicts_the_engine_is_refused(given: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        engine_arguments(given)


def test_ranks_are_rounded_up_to_what_vllm_reserves() -> None:
    assert [max_lora_rank(rank) for rank in (1, 8, 9, 64, 512)] == [8, 8, 16, 64, 512]
    for rank in (0, 513):
        with pytest.raises(UserError, match="ranks from 1 to 512"):
            max_lora_rank(rank)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(()), "empty"),
        (request((1,) * 60, max_tokens=5), "exceed max_len 64"),
        (request((1, 9)), "vocabulary of 9"),
        (request((1, -1)), "vocabulary of 9"),
        (request(max_tokens=0), "at least one token"),
        (request(temperature=0.005), "0.01"),
        (request(temperature=-1.0), "negative"),
        (request(top_p=0.0), "top_p"),
        (request((1,) * 59, max_tokens=5), ""),
        (request(temperature=0.0), ""),
    ],
)
def test_C1_what_does_not_fit_is_refused_with_a_reason(asked: GenRequest, reason: str) -> None:
    said = refusal(asked, 64, 9)
    assert reason in said
    assert bool(said) == bool(reason)


def test_only_a_requests_own_tokens_stop_it() -> None:
    made = sampling_arguments(request(seed=2**64 - 1, top_k=0, stop_token_ids=(7,)))
    assert made["stop_token_ids"] == [7]
    assert made["ignore_eos"] is True
    assert made["top_k"] == -1
    assert 0 <= made["seed"] < 2**63


def model_and_state() -> tuple[Any, dict[str, np.ndarray]]:
    model = add_lora(build_causal_lm(tiny_qwen3_config(31)), 4, 8.0, name="policy")
    state = adapter_state(model, "policy")
    draw = np.random.default_rng(0)
    return model, {k: draw.normal(size=v.shape).astype(np.float32) for k, v in state.items()}


def test_an_adapter_on_disk_is_what_peft_reads(tmp_path: Path) -> None:
    from peft import PeftModel

    model, state = model_and_state()
    write_adapter(tmp_path, state, LORA)
    again = load_file(tmp_path / "adapter_model.safetensors")
    assert all(np.array_equal(again[key], value) for key, value in state.items())
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    load_adapter_state(model, "policy", state)
    read = PeftModel.from_pretrained(build_causal_lm(tiny_qwen3_config(31)), tmp_path).eval()
    with torch.inference_mode():
        assert torch.allclose(read(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5)


def test_L7_the_modules_of_an_adapter_have_the_base_models_names() -> None:
    model, state = model_and_state()
    names = adapter_modules(state)
    inner = model.base_model.model
    assert all(inner.get_submodule(name) for name in names)
    assert len(names) == len(state) / 2 == 14


def test_L12_B2_adapters_that_would_have_no_effect_are_refused() -> None:
    _, state = model_and_state()
    key = next(iter(state))
    half = {name: value for name, value in state.items() if name != key}
    head = {f"base_model.model.lm_head.lora_{h}.weight": np.zeros((4, 4)) for h in "AB"}
    cases = [
        ({key.removeprefix("base_model.model."): state[key]}, "not named as PEFT"),
        (half, "no complete LoRA adapter"),
        ({}, "it is empty"),
        (state | head, "lm_head"),
    ]
    for wrong, message in cases:
        with pytest.raises(UserError, match=message):
            adapter_modules(wrong)
    with pytest.raises(UserError, match="rank 4, the engine was started for rank 8"):
        check_shape(state, LoraShape(8, 8.0))
    check_shape(state, LORA)


def test_L7_missing_modules_are_listed() -> None:
    check_modules({"a"}, {"a", "b"}, "there")
    with pytest.raises(UserError, match=r"matches none .*adapter: a, c, d and 1 more; there: b"):
        check_modules({"a", "c", "d", "e"}, {"b"}, "there")
    with pytest.raises(UserError, match=r"lacks \(c\)"):
        check_modules({"a", "c"}, {"a", "b"}, "the engine")


# --- inside vLLM's worker -------------------------------------------------------------------------


class Sampler(torch.nn.Module):
    """Built like vLLM's: log-probs are asked of the raw logits, then the token is drawn."""

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, fail: bool = False) -> Any:
        found = self.compute_logprobs(logits)
        if fail:
            raise RuntimeError("no token")
        return found

    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(dim=-1, dtype=torch.float32)


def test_P1_a_tempered_sampler_divides_by_each_rows_temperature() -> None:
    sampler = Sampler()
    temper(sampler)
    temper(sampler)
    logits = torch.randn(3, 7, dtype=torch.bfloat16)
    heats = torch.tensor([0.7, 0.0, 2.0])
    found = sampler(logits, SimpleNamespace(temperature=heats))
    scale = torch.tensor([0.7, 1.0, 2.0])[:, None]
    assert torch.allclose(found, (logits.float() / scale).log_softmax(-1), atol=1e-6)
    plain = logits.log_softmax(-1, dtype=torch.float32)
    assert torch.equal(sampler(logits, SimpleNamespace(temperature=None)), plain)
    with pytest.raises(RuntimeError, match="no token"):
        sampler(logits, SimpleNamespace(temperature=heats), fail=True)
    # Log-probs of a prompt, which are asked for outside of a sampling step.
    assert torch.equal(sampler.compute_logprobs(logits), plain)


def test_a_sampler_of_another_build_is_refused() -> None:
    with pytest.raises(RuntimeError, match="cannot be tempered"):
        temper(SimpleNamespace())


def test_L7_packed_modules_are_named_as_the_trainer_names_them() -> None:
    part = torch.zeros(1)
    loras = {
        "m.qkv": SimpleNamespace(lora_a=[part, None, part]),
        "m.down": SimpleNamespace(lora_a=part),
        "elsewhere": SimpleNamespace(lora_a=part),
    }
    manager = SimpleNamespace(
        modules={"m.qkv": None, "m.down": None},
        packed_modules={"m.qkv": ["m.q", "m.k", "m.v"]},
        get_adapter={3: SimpleNamespace(loras=loras)}.get,
    )
    worker = PolicyWorkerExtension()
    worker.model_runner = SimpleNamespace(
        sampler=Sampler(), lora_manager=SimpleNamespace(_adapter_manager=manager)
    )
    assert worker.policy_prepare() == ["m.down", "m.k", "m.q", "m.v"]
    assert worker.policy_adapter_modules(3) == ["m.down", "m.q", "m.v"]
    assert worker.policy_adapter_modules(4) == []
    worker.model_runner = SimpleNamespace(sampler=Sampler())
    assert worker.policy_prepare() == []


@pytest.mark.fault
def test_H3_a_worker_ends_with_its_owner() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    owner = subprocess.Popen(sleep)
    script = (
        "import delta_belief_rl.engines.vllm_worker, time; print('on', flush=True); time.sleep(60)"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env=os.environ | {OWNER: str(owner.pid)},
        cwd=ROOT,
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"on\n"
        assert worker.poll() is None
        owner.kill()
        assert worker.wait(10) == -9
        # It also ends at once where the owner is gone before it begins.
        owner.wait()
        env = os.environ | {OWNER: str(owner.pid)}
        late = subprocess.run([sys.executable, "-c", script], env=env, cwd=ROOT, timeout=60)
        assert late.returncode == -9
    finally:
        for process in (owner, worker):
            process.kill()
            process.communicate()


def test_what_vllm_reads_at_its_import_is_set_unless_the_user_has_set_it() -> None:
    environ = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    before_import(environ)
    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"
    assert environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
