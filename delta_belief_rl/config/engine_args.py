"""From the configuration to the arguments of a vLLM engine, for the policy and for a judge replica.

What leaves here is a plain dictionary and environment variables, so everything that can be wrong
about them is refused without vLLM and without a GPU. The names that the installed version knows are
handed in by whoever has imported it.

Kernel switches, and why they are set:

- Marlin, the kernel of 4-bit weights, can be turned off for a judge; vLLM then takes the next one.
- FlashAttention 3 does not run on GPUs of compute capability 8.x, so version 2 is named there.
  Elsewhere the engine chooses.
- Cascade attention gave wrong log-probs of shared prefixes on Ampere, so it is off there.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.schema_actor import Rollout
from delta_belief_rl.config.schema_judge import JudgeEngine
from delta_belief_rl.config.versions import VLLM
from delta_belief_rl.types import UserError

Capability = tuple[int, int]
"""Compute capability of a GPU, e.g. ``(8, 0)`` for an A100 and ``(9, 0)`` for an H100."""
Pool = Literal["actor_rollout_ref", "judge_rollout"]

AMPERE = 8
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM reserves memory for; an adapter of another rank fits the next larger one."""
DISABLED_KERNELS = "VLLM_DISABLED_KERNELS"
MARLIN = "MarlinLinearKernel"

_SETTINGS = {
    "model": "model.path",
    "dtype": "rollout.dtype",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_memory_bytes",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "max_model_len": "rollout.max_model_len",
    "enforce_eager": "rollout.enforce_eager",
    "enable_chunked_prefill": "rollout.enable_chunked_prefill",
    "enable_sleep_mode": "rollout.free_cache_engine",
    "disable_log_stats": "rollout.disable_log_stats",
}
"""Options that have a setting of their own inside a pool."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernel switches of one engine.

    Attributes:
        kwargs: Options of the engine.
        env: Environment variables of its process.
        notes: What is switched and why, for the plan.
    """

    kwargs: Mapping[str, object]
    env: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Everything that one engine is started with.

    Attributes:
        kwargs: Options of ``vllm.AsyncEngineArgs``.
        env: Environment variables that its process needs before vLLM is imported.
        notes: Kernel switches in words.
    """

    kwargs: Mapping[str, object]
    env: Mapping[str, str]
    notes: tuple[str, ...]


def policy_engine_args(
    config: RunConfig,
    known: Collection[str],
    capability: Capability | None,
    version: str,
    environ: Mapping[str, str] = os.environ,
) -> EngineArgs:
    """Arguments of one replica of the policy's engine.

    Args:
        config: A valid configuration, with whole paths.
        known: Names of the engine options of the installed vLLM.
        capability: Of the engine's GPUs; None where it is not known.
        version: Of the installed vLLM.
        environ: Environment that ``env`` is laid over.

    Raises:
        UserError: An option that the installed version does not know, an option that has a setting
            of its own, or limits that exclude each other.
    """
    actor, data = config.actor_rollout_ref, config.data
    longest = data.max_prompt_length + data.max_response_length
    kwargs: dict[str, object] = {
        "model": actor.model.path,
        **_common(config, actor.rollout, actor.ngpus, actor.rollout.max_model_len or longest),
        **_lora(config),
    }
    kernels = kernel_switches(capability, "auto", version, environ)
    return _finish("actor_rollout_ref", kwargs, actor.rollout, kernels, known, version)


def judge_engine_args(
    config: RunConfig,
    known: Collection[str],
    capability: Capability | None,
    version: str,
    environ: Mapping[str, str] = os.environ,
) -> EngineArgs:
    """Arguments of one replica of the judge; see ``policy_engine_args``.

    Raises:
        UserError: As there, or ``marlin=off`` with a version that no switch is known for.
    """
    judge = config.judge_rollout
    engine = judge.rollout
    longest = engine.prompt_length + engine.response_length
    kwargs: dict[str, object] = {
        "model": judge.model.path,
        **_common(config, engine, judge.ngpus, engine.max_model_len or longest),
    }
    # By the plain name some versions take AWQ's own kernel, several times slower than Marlin; left
    # to itself each takes its best one for what the checkpoint says.
    own_choice = engine.quantization == "awq" and engine.marlin == "auto"
    if engine.quantization is not None and not own_choice:
        kwargs["quantization"] = engine.quantization
    kernels = kernel_switches(capability, engine.marlin, version, environ)
    return _finish("judge_rollout", kwargs, engine, kernels, known, version)


def kernel_switches(
    capability: Capability | None,
    marlin: Literal["auto", "off"],
    version: str,
    environ: Mapping[str, str] = os.environ,
) -> Kernels:
    """The switches for a GPU and a version of vLLM.

    Raises:
        UserError: Marlin is to be off and the version is outside the supported window, so that
            nobody knows how.
    """
    kwargs: dict[str, object] = {}
    env: dict[str, str] = {}
    notes: list[str] = []
    if capability is None:
        notes.append("FlashAttention by the GPU, which is not known here")
    elif capability[0] == AMPERE:
        shown = f"compute capability {capability[0]}.{capability[1]}"
        kwargs |= {"attention_config": {"flash_attn_version": 2}, "disable_cascade_attn": True}
        notes += [f"FlashAttention 2 ({shown})", f"cascade attention off ({shown})"]
    else:
        shown = f"compute capability {capability[0]}.{capability[1]}"
        notes.append(f"FlashAttention as the engine chooses ({shown})")
    if marlin == "off":
        if not VLLM.holds(version):
            raise UserError(
                f"judge_rollout.rollout.marlin=off has no switch in vLLM {version}: install "
                f"'{VLLM.text()}', or set judge_rollout.rollout.marlin=auto."
            )
        others = [name for name in environ.get(DISABLED_KERNELS, "").split(",") if name]
        env[DISABLED_KERNELS] = ",".join(dict.fromkeys([*others, MARLIN]))
        notes.append(f"Marlin off ({DISABLED_KERNELS}={env[DISABLED_KERNELS]})")
    return Kernels(kwargs, env, tuple(notes))


def kernel_lines(config: RunConfig, capability: Capability | None, version: str) -> Iterator[str]:
    """The kernel switches of every vLLM engine of a run, one line each; none without such engines.

    Raises:
        UserError: See ``kernel_switches``.
    """
    if config.actor_rollout_ref.rollout.name == "vllm":
        yield f"policy: {'; '.join(kernel_switches(capability, 'auto', version).notes)}"
    if config.judge_rollout.name == "vllm":
        marlin = config.judge_rollout.rollout.marlin
        yield f"judge: {'; '.join(kernel_switches(capability, marlin, version).notes)}"


def _common(
    config: RunConfig, engine: Rollout | JudgeEngine, ngpus: int | None, max_model_len: int
) -> dict[str, object]:
    """Options that both pools set."""
    kwargs: dict[str, object] = {
        "dtype": engine.dtype,
        "tensor_parallel_size": engine.tensor_model_parallel_size or ngpus or 1,
        # Kept beside an explicit size of the cache: the engine demands this share of the GPU to be
        # free at its start, and its own default is most of the GPU.
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": max_model_len,
        "enforce_eager": engine.enforce_eager,
        "enable_chunked_prefill": engine.enable_chunked_prefill,
        "enable_prefix_caching": True,
        "enable_sleep_mode": engine.free_cache_engine,
        "disable_log_stats": engine.disable_log_stats,
        "load_format": "auto",
        "seed": config.seed,
        "trust_remote_code": False,
    }
    if engine.kv_cache_memory_bytes is not None:
        kwargs["kv_cache_memory_bytes"] = engine.kv_cache_memory_bytes
    return kwargs


def _lora(config: RunConfig) -> dict[str, object]:
    """Room for the trained adapter, one version of it at a time."""
    model = config.actor_rollout_ref.model
    rank = (model.adapters[0].r if model.adapters else 0) or model.lora_rank
    if not rank:
        return {"enable_lora": False}
    fitting = [size for size in LORA_RANKS if size >= rank]
    if not fitting:
        raise UserError(
            f"An adapter of rank {rank} is more than the {LORA_RANKS[-1]} that vLLM serves: lower "
            "actor_rollout_ref.model.lora_rank and the r of its adapters."
        )
    return {"enable_lora": True, "max_lora_rank": fitting[0], "max_loras": 1}


def _finish(
    pool: Pool,
    kwargs: dict[str, object],
    engine: Rollout | JudgeEngine,
    kernels: Kernels,
    known: Collection[str],
    version: str,
) -> EngineArgs:
    """Lay kernels and passed options over the settings, and refuse what cannot be."""
    _check_limits(pool, kwargs)
    passed = {name: value for name, value in engine.engine_kwargs.vllm.items() if value is not None}
    for name in passed:
        _check_passed(pool, name, known, version)
    merged = {**kwargs, **kernels.kwargs, **passed}
    for name in merged:
        if name not in known:
            raise UserError(
                f"vLLM {version} has no engine option {name}, which this run needs: install "
                f"'{VLLM.text()}'."
            )
    notes = [*kernels.notes, *(f"{name}={value} as given" for name, value in passed.items())]
    return EngineArgs(merged, kernels.env, tuple(notes))


def _check_passed(pool: Pool, name: str, known: Collection[str], version: str) -> None:
    where = f"{pool}.rollout.engine_kwargs.vllm.{name}"
    if name == "trust_remote_code":
        raise UserError(f"{where}: code that comes with a model is never run; leave it out.")
    setting = _setting(pool, name)
    if setting is not None:
        raise UserError(f"{where} has a setting of its own: set {setting} instead.")
    if name not in known:
        close = difflib.get_close_matches(name, sorted(known), n=1)
        hint = f"; did you mean {close[0]}?" if close else ": leave it out."
        raise UserError(f"{where} is no engine option of vLLM {version}{hint}")


def _setting(pool: Pool, name: str) -> str | None:
    """The setting that an option has of its own; None where it can only be passed on."""
    if name == "seed":
        return "seed"
    if name in _SETTINGS:
        return f"{pool}.{_SETTINGS[name]}"
    if name == "quantization" and pool == "judge_rollout":
        return "judge_rollout.rollout.quantization"
    if name in ("enable_lora", "max_lora_rank") and pool == "actor_rollout_ref":
        return "actor_rollout_ref.model.lora_rank"
    return None


def _check_limits(pool: Pool, kwargs: Mapping[str, object]) -> None:
    """Limits that the engine would refuse only after the model is loaded."""
    tokens, games = kwargs["max_num_batched_tokens"], kwargs["max_num_seqs"]
    longest = kwargs["max_model_len"]
    assert isinstance(tokens, int)
    assert isinstance(games, int)
    assert isinstance(longest, int)
    name = f"{pool}.rollout.max_num_batched_tokens={tokens}"
    if tokens < games:
        raise UserError(
            f"{name} must not be below {pool}.rollout.max_num_seqs={games}: raise it, or lower "
            "the number of sequences."
        )
    if not kwargs["enable_chunked_prefill"] and tokens < longest:
        raise UserError(
            f"{name} cannot hold the longest sequence ({longest} tokens): raise it, or set "
            f"{pool}.rollout.enable_chunked_prefill=true."
        )
