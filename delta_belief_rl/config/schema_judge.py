"""Settings of the judge (``judge_rollout.*``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from delta_belief_rl.config.fields import opt
from delta_belief_rl.config.schema_actor import EngineKwargs, ValSampling


@dataclass(frozen=True, slots=True)
class JudgeModel:
    """The judge's weights or its API."""

    path: str = opt("", "Hugging Face id or folder of the judge.", corrected="has no default")
    api_model_name: str | None = opt(
        None, "Model name at an OpenAI-compatible API (OPENAI_BASE_URL, OPENAI_API_KEY)."
    )
    api_batch_size: int = opt(
        32,
        "API calls under way at once, over all replicas.",
        corrected="takes effect",
        needs="api",
    )
    api_extra_body: Mapping[str, object] = field(
        default_factory=dict[str, object],
        metadata={
            "help": "Merged into the body of every API request, for what one service alone knows: "
            "provider, reasoning, chat_template_kwargs.",
            "new": True,
            "needs": "api",
        },
    )


@dataclass(frozen=True, slots=True)
class JudgeEngine:
    """The engine of each judge replica."""

    prompt_length: int = opt(
        1600,
        "Tokens of the judge's prompt.",
        corrected="a longer prompt is a counted judge error; it does not end the run",
        needs="vllm, hf",
    )
    response_length: int = opt(200, "Tokens of the judge's answer.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = opt(
        "bfloat16", "Number format of the engine.", needs="vllm, hf"
    )
    quantization: str | None = opt(
        None,
        "Quantisation of the judge's weights (awq, ...); null reads the model's own.",
        needs="vllm",
    )
    marlin: Literal["auto", "off"] = opt(
        "auto",
        "Marlin, a kernel for 4-bit weights: auto leaves it to the engine, off takes another "
        "kernel, which is slower.",
        new=True,
        needs="vllm",
    )
    gpu_memory_utilization: float = opt(
        0.85, "Share of each GPU's memory for the engine.", needs="vllm"
    )
    kv_cache_memory_bytes: int | None = opt(
        None,
        "Bytes of each GPU for the key-value cache; overrides gpu_memory_utilization.",
        corrected="reaches vLLM",
        needs="vllm",
    )
    enforce_eager: bool = opt(True, "No CUDA graphs.", needs="vllm")
    free_cache_engine: bool = opt(
        True, "Put the judge to sleep while the policy is trained.", needs="vllm"
    )
    tensor_model_parallel_size: int | None = opt(
        None, "GPUs of one replica; null uses all GPUs of the pool."
    )
    max_num_batched_tokens: int = opt(
        8192, "Tokens that the engine handles in one forward pass.", needs="vllm, hf"
    )
    max_model_len: int | None = opt(
        None, "Longest sequence; null is prompt_length plus response_length.", needs="vllm"
    )
    max_num_seqs: int = opt(
        1024,
        "Questions that one replica answers together; hf takes at most 32.",
        corrected="reaches the engine",
        needs="vllm, hf",
    )
    disable_log_stats: bool = opt(True, "Keep vLLM's own statistics quiet.", needs="vllm")
    enable_chunked_prefill: bool = opt(
        True, "Let vLLM split long prompts over several passes.", needs="vllm"
    )
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)
    val_kwargs: ValSampling = field(default_factory=ValSampling)


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Plain facts that a judge is asked before the first game."""

    enabled: bool = opt(
        True,
        "Ask every replica of a judge that is a model for plain facts before the first game; of an "
        "API the first one.",
        new=True,
        needs="vllm, hf, api",
    )
    min_accuracy: float = opt(
        0.8,
        "Share of the facts that each replica must answer rightly; below it nothing starts.",
        new=True,
        needs="vllm, hf, api",
    )
    min_tokens_per_second: float = opt(
        0.0,
        "Warn of a replica that reads and writes fewer tokens a second in this test: a slow kernel "
        "answers as well as a fast one.",
        new=True,
        needs="vllm, hf",
    )


@dataclass(frozen=True, slots=True)
class JudgeRollout:
    """The pool that answers questions."""

    name: Literal["auto", "world", "rules", "hf", "vllm", "api", "fake"] = opt(
        "auto",
        "Judge: world (exact answers of the embedded world, CPU), rules (answers from the packaged "
        "data of the other environments, CPU), hf (a language model through "
        "transformers, on CPUs or one GPU each), vllm, api or fake (scripted, for tests); auto is "
        "api with model.api_model_name, world with data.world, vllm otherwise.",
        new=True,
    )
    ngpus: int | None = opt(
        None,
        "GPUs of the pool; 0 for every judge but vllm and hf. null is 0, or 1 for vllm.",
    )
    replicas: int = opt(
        1,
        "Replicas of a judge on CPUs; on GPUs the vllm replicas that share each block of "
        "tensor_model_parallel_size GPUs, each with rollout.gpu_memory_utilization of it.",
        new=True,
    )
    share_actor_gpu: bool = opt(
        False, "Place the judge on the policy's GPUs; memory shares must fit together.", new=True
    )
    timeout_s: float = opt(120.0, "Seconds until one judge call counts as failed.", new=True)
    max_error_rate: float = opt(
        0.05, "Share of failed judge calls in one step above which the run stops.", new=True
    )
    max_restarts: int = opt(
        10,
        "Restarts of dead judge replicas in one run; when they are used up, a replica that dies "
        "stays away, and the run stops with the last one.",
        new=True,
    )
    repeated_prompt: bool = opt(
        True,
        "Show a judge that is a model the earlier turns of the game.",
        corrected="works in every environment",
    )
    cot: bool = opt(True, "The judge reasons, then answers in answer tags.")
    thinking: bool = opt(False, "The judge uses think tags; excludes cot.")
    parser: Literal["grammar", "published"] = opt(
        "grammar",
        "How the judge's text is read: grammar (any spelling; a text without a clear answer is a "
        "judge error) or published (one exact word; anything else makes the question invalid).",
        new=True,
    )
    model: JudgeModel = field(default_factory=JudgeModel)
    self_test: SelfTest = field(default_factory=SelfTest)
    rollout: JudgeEngine = field(default_factory=JudgeEngine)
