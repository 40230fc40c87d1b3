"""The policy engine of one process, from plain settings.

``ENGINES`` is the table of engines that can be made in this way; a worker of the cluster and the
doctor make theirs here, so that what the doctor looks at is what a run uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from delta_belief_rl.engines.base import BranchStepEngine
from delta_belief_rl.engines.hf_engine import HFEngine
from delta_belief_rl.models.loading import add_lora, load_causal_lm
from delta_belief_rl.models.merged import MergedLora
from delta_belief_rl.trainer.actor import POLICY, AdapterSettings
from delta_belief_rl.types import UserError


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine replica needs to know.

    Attributes:
        min_finished: Share of the running games that one call advances to the end of their turn. A
            small share keeps games apart; a large one makes the forward passes between two calls
            larger.
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
        model = add_lora(
            model,
            lora.rank,
            lora.alpha,
            lora.target_modules,
            name=POLICY,
            exclude=lora.exclude_modules,
            trainable=False,
            seed=settings.seed,
        )
    return HFEngine(
        model,
        max_sequences=settings.max_sequences,
        max_len=settings.max_len,
        max_batch_tokens=settings.max_batch_tokens,
        min_finished=settings.min_finished,
        adapter=POLICY,
        loader=loader,
    )


ENGINES: dict[str, Callable[[EngineSettings], BranchStepEngine]] = {"hf": hf_engine}
"""By ``actor_rollout_ref.rollout.name``."""


def build_engine(name: str, settings: EngineSettings) -> BranchStepEngine:
    """A stepping engine of this process.

    Raises:
        UserError: No engine of that name can be made here, or its model cannot be loaded.
    """
    check_engine(name)
    return ENGINES[name](settings)


def check_engine(name: str) -> None:
    """Refuse an engine that ``build_engine`` cannot make.

    Raises:
        UserError: No engine of that name can be made here.
    """
    if name not in ENGINES:
        raise UserError(
            f"actor_rollout_ref.rollout.name={name} cannot run inside one process: "
            f"set actor_rollout_ref.rollout.name={next(iter(ENGINES))}."
        )
