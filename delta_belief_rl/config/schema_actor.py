"""Settings of the policy: model and rollout engine (``actor_rollout_ref.{model,rollout}``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from delta_belief_rl.config.fields import opt
from delta_belief_rl.config.schema_update import Update


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA adapter."""

    name: str = opt("active_lora", "Name; the adapter called ema is the slow copy.")
    r: int = opt(0, "Rank.")
    alpha: int = opt(0, "Scale: the update is multiplied by alpha / r.")
    target_modules: str | tuple[str, ...] = opt("all-linear", "Modules that get the adapter.")
    exclude_modules: str | tuple[str, ...] | None = opt(None, "Modules that do not.")


@dataclass(frozen=True, slots=True)
class ActorModel:
    """The policy's weights."""

    path: str = opt(
        "",
        "Hugging Face id or folder of the policy.",
        corrected="has no default",
    )
    tokenizer_path: str | None = opt(None, "Id or folder of the tokenizer; null uses path.")
    trust_remote_code: bool = opt(False, "Run code that comes with the model.")
    chat_template_kwargs: Mapping[str, object] = field(
        default_factory=dict[str, object],
        metadata={
            "help": "Further variables for the chat template; actor.thinking sets enable_thinking.",
            "new": True,
        },
    )
    api_model_name: str | None = opt(
        None, "Model name at an OpenAI-compatible API; such a policy can only be evaluated."
    )
    api_extra_body: Mapping[str, object] = field(
        default_factory=dict[str, object],
        metadata={
            "help": "Merged into the body of every API request; see "
            "judge_rollout.model.api_extra_body.",
            "new": True,
            "needs": "api",
        },
    )
    enable_gradient_checkpointing: bool = opt(
        True, "Recompute activations in the backward pass: less memory, more time."
    )
    use_liger: bool = opt(True, "Use Liger kernels on a GPU where they are installed.")
    lora_rank: int = opt(
        0,
        "Rank of the adapters; 0 trains all weights, and an evaluation then plays through a new "
        "adapter of rank 8, which changes no answer.",
    )
    lora_alpha: int = opt(0, "Scale of the default adapters; follows lora_rank where not set.")
    target_modules: str | tuple[str, ...] = opt(
        "all-linear", "Modules that get the default adapters."
    )
    exclude_modules: str | tuple[str, ...] | None = opt(
        None, "Modules that do not get the default adapters."
    )
    adapters: tuple[Adapter, ...] = opt(
        (Adapter("active_lora"), Adapter("ema")),
        "Adapters; the first is trained, one called ema follows it slowly.",
    )
    ema_beta: float = opt(
        0.95,
        "Share of itself that the slow adapter keeps in each training step.",
        corrected="is applied",
    )
    ema_warmup_steps: int = opt(
        0, "Training steps in which the slow adapter just copies the trained one."
    )


@dataclass(frozen=True, slots=True)
class EngineKwargs:
    """Further options of the inference engine."""

    vllm: Mapping[str, object] = field(
        default_factory=dict[str, object],
        metadata={"help": "Options handed to vLLM as they are.", "needs": "vllm"},
    )


@dataclass(frozen=True, slots=True)
class ValSampling:
    """Sampling in validation."""

    temperature: float = opt(0.7, "Sampling temperature.")
    top_p: float = opt(0.8, "Share of probability kept.")
    top_k: int = opt(20, "Number of most likely tokens kept; -1 keeps all.")
    do_sample: bool = opt(True, "false decodes greedily.", corrected="takes effect")


@dataclass(frozen=True, slots=True)
class Rollout:
    """The engine that plays the policy."""

    name: Literal["vllm", "hf", "denoiser"] = opt(
        "vllm",
        "Engine: vllm (GPU), hf (plain PyTorch, CPU or GPU), or denoiser (a masked denoiser, which "
        "fills an answer in any order; see docs/agreement.md).",
    )
    tokens_per_step: int = opt(
        1, "Places of an answer that a masked denoiser fills in a step.", new=True, needs="denoiser"
    )
    replicas: int = opt(
        1,
        "Engine replicas of a policy on CPUs, each with its share of the threads; on GPUs they "
        "follow from ngpus and tensor_model_parallel_size.",
        new=True,
    )
    deterministic: bool = opt(
        False,
        "Advance games in a fixed order, so that a CPU run can be repeated exactly.",
        new=True,
    )
    temperature: float = opt(1.0, "Sampling temperature in training.")
    top_p: float = opt(0.8, "Share of probability kept in training.")
    top_k: int = opt(20, "Number of most likely tokens kept in training; -1 keeps all.")
    do_sample: bool = opt(True, "false decodes greedily.")
    n: int = opt(1, "Candidate questions a turn for multi_turn.logprob_sampling.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = opt(
        "bfloat16", "Number format of the engine.", needs="vllm"
    )
    gpu_memory_utilization: float = opt(
        0.5, "Share of each GPU's memory for the engine.", needs="vllm"
    )
    kv_cache_memory_bytes: int | None = opt(
        None,
        "Bytes of each GPU for the key-value cache; overrides gpu_memory_utilization.",
        new=True,
        needs="vllm",
    )
    enforce_eager: bool = opt(True, "No CUDA graphs.", needs="vllm")
    free_cache_engine: bool = opt(
        True,
        "Put the engine to sleep while the policy is trained.",
        corrected="does not need enforce_eager",
        needs="vllm",
    )
    tensor_model_parallel_size: int | None = opt(
        None, "GPUs of one replica; null uses all GPUs of the pool."
    )
    max_num_batched_tokens: int = opt(
        8192, "Tokens that the engine handles in one forward pass.", needs="vllm"
    )
    max_model_len: int | None = opt(
        None,
        "Longest sequence of the engine; null fits data.max_prompt_length and the elicitation.",
        needs="vllm",
    )
    max_num_seqs: int = opt(
        1024, "Games that the engine advances together.", corrected="reaches the engine"
    )
    disable_log_stats: bool = opt(True, "Keep vLLM's own statistics quiet.", needs="vllm")
    enable_chunked_prefill: bool = opt(
        True, "Let vLLM split long prompts over several passes.", needs="vllm"
    )
    log_prob_micro_batch_size_per_gpu: int = opt(16, "Games per forward of the score pass.")
    log_prob_use_dynamic_bsz: bool = opt(
        False, "Fill the score pass up to a token budget instead of a number of games."
    )
    log_prob_max_token_len_per_gpu: int = opt(16384, "That token budget.")
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)
    val_kwargs: ValSampling = field(default_factory=ValSampling)


@dataclass(frozen=True, slots=True)
class ActorRolloutRef:
    """The pool that plays and trains the policy."""

    device: Literal["auto", "cpu", "cuda"] = opt(
        "auto", "Where the policy runs; auto takes GPUs where ngpus asks for them.", new=True
    )
    num_threads: int | None = opt(
        None, "CPU threads of the policy; null uses the allocation.", new=True
    )
    ngpus: int | None = opt(
        None,
        "GPUs, and training ranks, of the pool; 0 for an API policy or a CPU run. null is 0 on a "
        "machine without GPUs and 1 elsewhere.",
    )
    role: Literal["actor_rollout", "actor_rollout_ref", "rollout"] = opt(
        "actor_rollout", "What the pool does; rollout can only evaluate, without beliefs."
    )
    nccl_timeout: int = opt(600, "Seconds until a stuck collective ends the run.")
    model: ActorModel = field(default_factory=ActorModel)
    actor: Update = field(default_factory=Update)
    rollout: Rollout = field(default_factory=Rollout)
