"""The policy engine without Ray.

A worker of the cluster makes its engine by the same functions, so that what the doctor looks at is
what a run uses. ``ENGINES`` is the table of engines that can be opened in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.base import BranchStepEngine
from delta_belief_rl.engines.hf_engine import HFEngine
from delta_belief_rl.engines.vllm_step import VllmStepEngine
from delta_belief_rl.models.loading import load_causal_lm
from delta_belief_rl.models.merged import MergedLora
from delta_belief_rl.trainer.actor import POLICY, AdapterSettings
from delta_belief_rl.trainer.settings import adapter_settings, number_format
from delta_belief_rl.trainer.vllm_policy import start_vllm


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine replica needs to know.

    Attributes:
        min_finished: Share of the running games that one call advances to the end of their turn. A
            small share keeps games apart; a large one makes the forward passes between two calls
            larger.
        per_step: Places that a masked denoiser fills in a step.
    """

    model_path: str
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    device: str = "cpu"
    dtype: str = "float32"
    max_sequences: int = 1024
    max_len: int = 4096
    max_batch_tokens: int = 8192
    min_finished: float = 0.25
    num_threads: int | None = None
    seed: int = 42
    per_step: int = 1


def hf_engine(settings: EngineSettings) -> HFEngine:
    """The engine that shares the trainer's model code, with the policy's adapter in place.

    In float32 the adapter is merged into the weights; see ``models.merged``.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    model = load_causal_lm(settings.model_path, getattr(torch, settings.dtype), settings.device)
    lora, loader = settings.adapter, None
    if lora.rank and model.dtype is torch.float32:
        loader = MergedLora(model, lora.alpha / lora.rank).load
    elif lora.rank:
        model = lora.put_on(model, seed=settings.seed)
    return HFEngine(
        model,
        max_sequences=settings.max_sequences,
        max_len=settings.max_len,
        max_batch_tokens=settings.max_batch_tokens,
        min_finished=settings.min_finished,
        adapter=POLICY,
        loader=loader,
    )


@dataclass(frozen=True, slots=True)
class Opening:
    """What an engine is opened with.

    Attributes:
        cfg: The configuration, with whole paths.
        device: ``cpu`` or ``cuda``.
        threads: CPU threads.
        sequences: Most sequences at a time, for an engine that is told so.
    """

    cfg: RunConfig
    device: str
    threads: int
    sequences: int


@contextmanager
def _hf(opening: Opening) -> Iterator[BranchStepEngine]:
    cfg, device = opening.cfg, opening.device
    ref, data = cfg.actor_rollout_ref, cfg.data
    yield hf_engine(
        EngineSettings(
            model_path=ref.model.path,
            adapter=adapter_settings(cfg),
            device=device,
            dtype=number_format(ref.actor.dtype, device),
            max_sequences=opening.sequences,
            max_len=data.max_prompt_length + data.max_response_length,
            max_batch_tokens=ref.rollout.max_num_batched_tokens,
            num_threads=opening.threads,
            seed=cfg.seed,
        )
    )


@contextmanager
def _vllm(opening: Opening) -> Iterator[BranchStepEngine]:
    engine = VllmStepEngine(lambda: start_vllm(opening.cfg, opening.device))
    try:
        yield engine
    finally:
        engine.close()


ENGINES: dict[str, Callable[[Opening], AbstractContextManager[BranchStepEngine]]] = {
    "hf": _hf,
    "vllm": _vllm,
}
"""By ``actor_rollout_ref.rollout.name``.

Raises:
    UserError: The model cannot be loaded, or the engine does not start.
"""
