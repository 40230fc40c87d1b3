"""The policy's vLLM engine from the configuration, for the replicas of a run and for the doctor.

vLLM is imported when an engine starts, in the process that will own it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from delta_belief_rl.config.engine_args import policy_engine_args
from delta_belief_rl.config.gpus import lowest_capability, read_gpus
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.vllm_args import before_import, cpu_arguments
from delta_belief_rl.trainer.settings import adapter_settings, number_format

if TYPE_CHECKING:
    from delta_belief_rl.engines.vllm_engine import VllmEngine


async def start_vllm(cfg: RunConfig, device: str) -> VllmEngine:
    """Start one engine of the policy; it answers when it has its first adapter.

    Args:
        cfg: The configuration, with whole paths.
        device: ``cpu`` or ``cuda``.

    Raises:
        UserError: An argument does not go with the installed vLLM, or the engine does not start.
    """
    before_import()
    from delta_belief_rl.engines import vllm_engine

    vllm_engine.check_platform(device)
    capability = lowest_capability(None if device == "cpu" else read_gpus())
    args = policy_engine_args(cfg, vllm_engine.option_names(), capability, vllm_engine.VERSION)
    os.environ.update(args.env)
    kwargs = dict(args.kwargs)
    if device == "cpu":
        kwargs = cpu_arguments(kwargs, engine_format(cfg, device))
        # Otherwise every replica binds its threads to the same first cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    lora = adapter_settings(cfg)
    shape = vllm_engine.LoraShape(lora.rank, lora.alpha) if lora.rank else None
    return await vllm_engine.VllmEngine.start(kwargs, lora=shape)


def engine_format(cfg: RunConfig, device: str) -> str:
    """The engine's number format: on CPUs the trainer's own, because both take the same memory."""
    ref = cfg.actor_rollout_ref
    return number_format(ref.actor.dtype if device == "cpu" else ref.rollout.dtype, device)
