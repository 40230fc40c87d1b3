"""What runs inside vLLM's worker process; it imports no vLLM.

vLLM mixes ``PolicyWorkerExtension`` into its worker class and lets the engine's owner call the
methods. Importing this module there starts a watch that ends the process when the owner is gone:
vLLM's own processes outlive an owner that is killed, and keep the GPU.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any

import torch

from delta_belief_rl.engines.kernels import model_kernels

OWNER = "DELTA_BELIEF_ENGINE_OWNER"
"""Environment variable with the process id of the engine's owner."""

_GREEDY_BELOW = 1e-5


class PolicyWorkerExtension:
    """Methods that the engine's owner calls in every worker, by ``collective_rpc``."""

    model_runner: Any

    def policy_prepare(self) -> list[str]:
        """Define log-probs as ``SamplingParams`` does.

        Returns:
            Modules that an adapter can change, by the names of the base model; empty without LoRA.
        """
        temper(self.model_runner.sampler)
        manager = _manager(self.model_runner)
        if manager is None:
            return []
        names = (_unpacked(manager, name) for name in manager.modules)
        return sorted(name for several in names for name in several)

    def policy_kernels(self) -> dict[str, dict[str, int]]:
        """Layers of the model by the kernel that they run."""
        return model_kernels(self.model_runner.model)

    def policy_memory(self) -> dict[str, int]:
        """Bytes of the weights, of the key-value cache, and the most that PyTorch has reserved."""
        caches = _tensors(getattr(self.model_runner, "kv_caches", ()))
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        return {
            "weights": int(getattr(self.model_runner, "model_memory_usage", 0)),
            "cache": sum(cache.numel() * cache.element_size() for cache in caches),
            "reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
        }

    def policy_adapter_modules(self, adapter_id: int) -> list[str]:
        """Modules that a loaded adapter changes here, by the names of the base model."""
        manager = _manager(self.model_runner)
        adapter = manager and manager.get_adapter(adapter_id)
        if adapter is None:
            return []
        found: list[str] = []
        for name, weights in adapter.loras.items():
            if name not in manager.modules:
                continue
            parts = weights.lora_a if isinstance(weights.lora_a, list) else [weights.lora_a]
            names = _unpacked(manager, name)
            found += [n for n, part in zip(names, parts, strict=True) if part is not None]
        return sorted(found)


def temper(sampler: Any) -> None:
    """Let a sampler report log-probs of ``softmax(logits / temperature)`` before any cut.

    By itself it offers those of ``softmax(logits)``, or those after top-k and top-p. Rows that are
    decoded greedily keep the former.

    Raises:
        RuntimeError: The sampler is built otherwise.
    """
    plain = type(sampler)
    if issubclass(plain, _Tempered):
        return
    if not all(callable(getattr(plain, name, None)) for name in ("forward", "compute_logprobs")):
        raise RuntimeError(f"the sampler {plain.__name__} of this vLLM cannot be tempered")
    sampler.__class__ = type(f"Tempered{plain.__name__}", (_Tempered, plain), {})


class _Tempered:
    """Stands before vLLM's sampler, whose ``forward`` asks ``compute_logprobs`` for raw ones."""

    _temperature: torch.Tensor | None = None

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **more: Any) -> Any:
        self._temperature = sampling_metadata.temperature
        try:
            return super().forward(logits, sampling_metadata, *args, **more)  # type: ignore[misc]
        finally:
            # Prompt log-probs come by another way, and are those of temperature 1.
            self._temperature = None

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        if self._temperature is not None:
            greedy = self._temperature < _GREEDY_BELOW
            scale = torch.where(greedy, torch.ones_like(self._temperature), self._temperature)
            logits = logits.float() / scale[:, None]
        return logits.log_softmax(dim=-1, dtype=torch.float32)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The distinct tensors of a list, of lists or of a mapping."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    found = {part.data_ptr(): part for item in value for part in _tensors(item)}
    return list(found.values())


def _manager(model_runner: Any) -> Any:
    """vLLM's keeper of adapters; None without LoRA."""
    outer = getattr(model_runner, "lora_manager", None)
    return None if outer is None else outer._adapter_manager


def _unpacked(manager: Any, name: str) -> list[str]:
    """The modules of the base model that one of vLLM's modules stands for, in its order."""
    return list(manager.packed_modules.get(name, (name,)))


def watch_owner(owner: int) -> None:
    """End this process when the process ``owner`` ends, from now on or already."""
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def wait() -> None:
        gone = select.poll()
        gone.register(handle, select.POLLIN)
        gone.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="engine-owner-watch", daemon=True).start()


if int(os.environ.get(OWNER, os.getpid())) != os.getpid():
    watch_owner(int(os.environ[OWNER]))
