"""A tiny random policy on disk, its adapters, and what plain PyTorch says of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from delta_belief_rl.engines.base import GenRequest, SamplingParams
from delta_belief_rl.engines.vllm_args import LoraShape, cpu_arguments
from delta_belief_rl.models.adapters import adapter_state, add_lora, load_adapter_state
from delta_belief_rl.text.word_tokenizer import build_word_tokenizer

# By itself vLLM gives each worker a NUMA node of its own, and most machines have one.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

WORDS = "Is it alive big small round made of wood metal yes no the a you are judge answer"
LORA = LoraShape(rank=4, alpha=8.0)
STOP = 2
MAX_LEN = 128

TOKENIZER = build_word_tokenizer([WORDS])
VOCAB = len(TOKENIZER)

CONFIG = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=96,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    initializer_range=0.2,
)

ARGUMENTS = cpu_arguments(
    {
        "max_model_len": MAX_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "seed": 0,
    },
    "float32",
)


def save_model(folder: Path, positions: int = 256) -> Path:
    """The model and its tokenizer, a function of the number of positions alone."""
    torch.manual_seed(0)
    config = Qwen3Config(**CONFIG.to_dict() | {"max_position_embeddings": positions})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


class Reference:
    """The model with an adapter, run by plain PyTorch."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model: Any = add_lora(model, LORA.rank, LORA.alpha, name="policy").eval()

    def adapter(self, seed: int) -> dict[str, np.ndarray]:
        """An adapter that changes answers a great deal; seed 0 changes none."""
        state = adapter_state(self.model, "policy")
        draw = np.random.default_rng(seed)
        for key, value in state.items():
            if ".lora_B." in key:
                changed = draw.normal(0.0, 0.3, value.shape) if seed else np.zeros(value.shape)
                state[key] = changed.astype(np.float32)
        return state

    @torch.inference_mode()
    def logprobs(
        self, state: Mapping[str, np.ndarray], ids: Sequence[int], temperature: float = 1.0
    ) -> np.ndarray:
        """Log-prob of each token after the first."""
        load_adapter_state(self.model, "policy", state)
        logits = self.model(input_ids=torch.tensor([list(ids)])).logits[0, :-1].float()
        target = torch.tensor(list(ids[1:]))[:, None]
        return torch.log_softmax(logits / temperature, -1).gather(-1, target)[:, 0].double().numpy()


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Ordinary tokens."""
    return tuple(int(i) for i in np.random.default_rng(seed).integers(12, VOCAB, length))


def request(session: str, ids: Sequence[int], seed: int = 0, **sampling: Any) -> GenRequest:
    """A request with short answers."""
    settings = {"max_tokens": 8, "stop_token_ids": (STOP,)} | sampling
    return GenRequest(session, tuple(ids), seed, SamplingParams(**settings))
