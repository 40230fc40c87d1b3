"""Models and tokenizers from a local folder or the hub, always with our attention.

The adapter functions of ``models.adapters`` can be imported from here as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
)

from delta_belief_rl.models.adapters import (
    adapter_names,
    adapter_state,
    add_lora,
    copy_adapter,
    load_adapter_state,
    state_checksum,
    update_ema,
    use_adapter,
)
from delta_belief_rl.models.attention import ATTENTION_NAME
from delta_belief_rl.models.logprobs import check_output_head
from delta_belief_rl.types import UserError

__all__ = [
    "adapter_names",
    "adapter_state",
    "add_lora",
    "build_causal_lm",
    "copy_adapter",
    "load_adapter_state",
    "load_causal_lm",
    "load_tokenizer",
    "state_checksum",
    "stored_dtype",
    "tiny_qwen3_config",
    "update_ema",
    "use_adapter",
]

NO_LIMIT = 10**30
"""What the library itself uses for a tokenizer without a length limit."""


def load_causal_lm(
    path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Any:
    """A causal language model in evaluation mode.

    Args:
        path: A folder in Hugging Face format, or a model id of the hub.
        dtype: Of all parameters.
        device: Where they go.

    Returns:
        The model, with attention implementation ``"delta_belief"``.

    Raises:
        UserError: Nothing there, damaged or incomplete weights, or an unsupported architecture.
    """
    source = _source(path, "model")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation=ATTENTION_NAME, output_loading_info=True
        )
        model, info = loaded
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(_cannot_load("model", source, error)) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"The model at {source!r} lacks {len(missing)} weights, for example {missing[0]!r}: "
            "copy or download it again."
        )
    check_output_head(model.config)
    return model.to(device).eval()


def build_causal_lm(
    config: PretrainedConfig,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Any:
    """A model with random weights, a function of ``config`` and ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    check_output_head(model.config)
    return model.to(device=device, dtype=dtype).eval()


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """A tokenizer that never truncates and never pads by itself.

    Args:
        path: A folder in Hugging Face format, or an id of the hub.

    Raises:
        UserError: Nothing there, or it cannot be read.
    """
    source = _source(path, "tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        raise UserError(_cannot_load("tokenizer", source, error)) from error
    tokenizer.model_max_length = NO_LIMIT
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    return tokenizer


def stored_dtype(path: str | Path) -> torch.dtype:
    """The number format that a model's configuration names, float32 where it names none.

    Args:
        path: Of a model that can be loaded.
    """
    config: Any = AutoConfig.from_pretrained(str(path))
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def tiny_qwen3_config(
    vocab_size: int,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    intermediate: int = 64,
    max_length: int = 4096,
) -> Qwen3Config:
    """The Qwen3 architecture at any size, input and output embeddings tied."""
    extra: dict[str, Any] = {"attn_implementation": ATTENTION_NAME}
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        **extra,
    )


def _source(path: str | Path, what: str) -> str:
    """The path as the library wants it; an absent local path is refused before any download."""
    text = str(path)
    folder = Path(text).expanduser()
    if folder.exists():
        return str(folder)
    if isinstance(path, Path) or text.startswith(("/", ".", "~")) or text.count("/") != 1:
        raise UserError(
            f"There is no {what} folder {text!r}: give the folder of a saved {what} "
            "or a hub id of the form owner/name."
        )
    return text


def _cannot_load(what: str, source: str, error: BaseException) -> str:
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return (
        f"The {what} {source!r} cannot be loaded ({type(error).__name__}: {reason}): "
        "check the path, or copy or download it again."
    )
