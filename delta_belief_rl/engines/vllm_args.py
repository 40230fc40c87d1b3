"""What the vLLM engine needs to know beforehand, as pure functions that import no vLLM.

Three things are settled here: which arguments an engine is started with, which requests it can
serve, and how an adapter is handed over. vLLM reads adapters from a folder in PEFT's format, so the
state is written to one; the folder lies in memory where the machine has such a place.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from delta_belief_rl.config.engine_args import LORA_RANKS
from delta_belief_rl.config.versions import VLLM
from delta_belief_rl.engines.base import AdapterState, GenRequest, check_sampling
from delta_belief_rl.types import UserError

LOWEST_TEMPERATURE = 0.01
"""vLLM raises smaller temperatures to this one without a word; 0 stays greedy."""

WORKER_EXTENSION = "delta_belief_rl.engines.vllm_worker.PolicyWorkerExtension"

ENVIRONMENT = {
    # Ray's worker has threads by the time the engine starts.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # The other runner has a sampler that the worker extension does not know.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # FlashInfer's sampler is compiled for a minute or more at the first start, and takes no seeds
    # of single requests, which every request here has.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Environment of the process that starts an engine."""

CPU_CACHE_BYTES = 1 << 30
"""Key-value cache of an engine on CPUs where its size is not set; else it is half of the memory."""
CPU_BLOCK = 32
"""Tokens of a block of it where that is not set. Only whole blocks are found again, and a short
game never fills one of vLLM's own 128."""

QUIET = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Standard output is for results.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""Read when vLLM is imported, in the owner's process and in those that it starts."""

_PREFIX = "base_model.model."
_HALF = re.compile(r"\.lora_(A|B)\.weight$")
_UNSCORED = ("lm_head", "embed_tokens")


@dataclass(frozen=True, slots=True)
class LoraShape:
    """What an engine must know of the adapters that it will be given.

    Attributes:
        rank: Of the update.
        alpha: The update is scaled by ``alpha / rank``.
    """

    rank: int
    alpha: float


def before_import(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what vLLM reads when it is imported; what is set already stays."""
    for name, value in {**QUIET, **ENVIRONMENT}.items():
        environ.setdefault(name, value)


def check_vllm_version(version: str) -> None:
    """Refuse a vLLM outside the supported window.

    Raises:
        UserError: One sentence with the window.

    Example:
        >>> check_vllm_version("0.23.0")
    """
    if not VLLM.holds(version):
        raise UserError(f"vLLM {version} is not supported: install '{VLLM.text()}'.")


def engine_arguments(
    given: Mapping[str, object], lora: LoraShape | None = None
) -> dict[str, object]:
    """All arguments of an engine: what was asked for, and what this package's contract needs.

    Token ids go in and come out, so the engine loads no tokenizer. Log-probs are taken from the raw
    logits, which the worker extension divides by the temperature.

    Args:
        given: Names of vLLM's ``AsyncEngineArgs``; ``model`` is among them.
        lora: Of the adapters; None for an engine without any.

    Raises:
        UserError: An argument contradicts the contract, the rank is too large, or there is no
            model.
    """
    if not given.get("model"):
        raise UserError("A vLLM engine needs a model: give its folder or hub id.")
    needed: dict[str, object] = {
        "logprobs_mode": "raw_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "enable_lora": lora is not None,
    }
    if lora is not None:
        needed |= {"max_loras": 1, "max_lora_rank": max_lora_rank(lora.rank)}
    for name, value in needed.items():
        if name in given and given[name] != value:
            raise UserError(
                f"The vLLM argument {name}={given[name]!r} does not go with this engine, which "
                f"needs {value!r}: leave it out."
            )
    # Inside a Ray actor vLLM would otherwise spread itself over the cluster.
    parallel = given.get("tensor_parallel_size") or 1
    backend = {"distributed_executor_backend": "uni" if parallel == 1 else "mp"}
    defaults: dict[str, object] = {"enable_prefix_caching": True, "disable_log_stats": True}
    return {**defaults, **backend, **given, **needed}


def cpu_arguments(given: Mapping[str, object], dtype: str) -> dict[str, object]:
    """The arguments of an engine on CPUs, where vLLM has no sleep.

    No prompt is split over two passes: vLLM takes the draw after a first part back by turning its
    generator back, which generators on CPUs cannot do, and the engine's process ends.

    Args:
        given: Arguments for a GPU; ``max_num_batched_tokens`` and ``max_model_len`` are among them.
        dtype: The number format.
    """
    tokens, longest = given["max_num_batched_tokens"], given["max_model_len"]
    assert isinstance(tokens, int)
    assert isinstance(longest, int)
    return {
        **given,
        "dtype": dtype,
        "enable_sleep_mode": False,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(tokens, longest),
        "kv_cache_memory_bytes": given.get("kv_cache_memory_bytes") or CPU_CACHE_BYTES,
        "block_size": given.get("block_size") or CPU_BLOCK,
    }


def max_lora_rank(rank: int) -> int:
    """The smallest rank that vLLM reserves room for and that holds ``rank``.

    Raises:
        UserError: There is none.

    Example:
        >>> max_lora_rank(12)
        16
    """
    fitting = [size for size in LORA_RANKS if size >= rank > 0]
    if not fitting:
        raise UserError(
            f"vLLM takes LoRA ranks from 1 to {LORA_RANKS[-1]}, not {rank}: change "
            "actor_rollout_ref.model.lora_rank."
        )
    return fitting[0]


def refusal(request: GenRequest, max_len: int, vocab_size: int) -> str:
    """The reason why a request cannot be served, or an empty string."""
    if not request.prompt_ids:
        return "the prompt is empty"
    prompt, asked = len(request.prompt_ids), request.sampling.max_tokens
    if prompt + asked > max_len:
        return f"prompt of {prompt} and max_tokens of {asked} exceed max_len {max_len}"
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
        return f"the prompt has a token id outside of the vocabulary of {vocab_size}"
    temperature = request.sampling.temperature
    if 0 < temperature < LOWEST_TEMPERATURE:
        return f"temperature is {temperature}; vLLM takes 0, or {LOWEST_TEMPERATURE} and more"
    return check_sampling(request.sampling)


def sampling_arguments(request: GenRequest) -> dict[str, Any]:
    """Arguments of vLLM's ``SamplingParams``; only the request's own tokens stop it."""
    drawn = request.sampling
    return {
        "temperature": drawn.temperature,
        "top_p": drawn.top_p,
        "top_k": drawn.top_k if drawn.top_k > 0 else -1,
        "max_tokens": drawn.max_tokens,
        "stop_token_ids": list(drawn.stop_token_ids),
        # The generators of PyTorch take a signed 64-bit integer.
        "seed": request.seed & (2**63 - 1),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def adapter_modules(state: AdapterState) -> frozenset[str]:
    """Modules that an adapter changes, by the names of the base model.

    Raises:
        UserError: The state is empty, a half of a pair is missing, a name is not PEFT's, or the
            output head or the embeddings are changed.
    """
    halves: dict[str, set[str]] = {}
    for key in state:
        found = _HALF.search(key)
        if found is None or not key.startswith(_PREFIX):
            raise UserError(
                f"The adapter weight {key!r} is not named as PEFT names it ({_PREFIX}...lora_A."
                "weight), so vLLM would pass over it: save the adapter again."
            )
        halves.setdefault(key[len(_PREFIX) : found.start()], set()).add(found[1])
    odd = sorted(name for name, present in halves.items() if present != {"A", "B"})
    if odd or not halves:
        raise UserError(
            f"The adapter state is no complete LoRA adapter ({_some(odd) or 'it is empty'}): "
            "save it again."
        )
    head = [name for name in halves if name.split(".")[-1] in _UNSCORED]
    if head:
        raise UserError(
            f"LoRA on {head[0]!r} is not supported, because vLLM's log-probs of a prompt would "
            'miss it: use target_modules="all-linear".'
        )
    return frozenset(halves)


def check_modules(wanted: Iterable[str], present: Iterable[str], where: str) -> None:
    """Demand that every module of an adapter is there.

    Args:
        wanted: Modules that the trainer's adapter changes.
        present: Modules that the other side names.
        where: What the other side is, for the message.

    Raises:
        UserError: None is there, or some are missing; they are listed.
    """
    wanted, present = set(wanted), set(present)
    missing = sorted(wanted - present)
    if not wanted & present:
        raise UserError(
            f"The adapter matches none of the modules of {where} (adapter: {_some(missing)}; "
            f"there: {_some(sorted(present)) or 'none'}): load it into the model it was trained on."
        )
    if missing:
        raise UserError(
            f"The adapter changes modules that {where} lacks ({_some(missing)}): use the same base "
            "model and target_modules on both sides."
        )


def check_shape(state: AdapterState, lora: LoraShape) -> None:
    """Demand that all matrices have the rank that the engine scales by.

    Raises:
        UserError: One has another rank.
    """
    for key, array in state.items():
        rank = array.shape[0] if ".lora_A." in key else array.shape[1]
        if rank != lora.rank:
            raise UserError(
                f"The adapter weight {key!r} has rank {rank}, the engine was started for rank "
                f"{lora.rank}: use the same rank on both sides."
            )


def write_adapter(folder: Path, state: AdapterState, lora: LoraShape) -> None:
    """Write an adapter in PEFT's format into an existing folder."""
    tensors = {key: np.ascontiguousarray(value, dtype=np.float32) for key, value in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    alpha = int(lora.alpha) if math.floor(lora.alpha) == lora.alpha else lora.alpha
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.split(".")[-1] for name in adapter_modules(state)}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    text = json.dumps(config, indent=1)
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def memory_folder() -> str | None:
    """A folder that lives in memory and can be written to; None where there is none."""
    shared = "/dev/shm"
    return shared if os.path.isdir(shared) and os.access(shared, os.W_OK | os.X_OK) else None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
