"""Rules on the models that a run names, read from their folders before anything is loaded.

How vLLM splits a model over GPUs: attention heads, and the columns of the feed-forward layers, are
dealt out evenly. Key-value heads are dealt out, too, or copied where there are fewer of them than
GPUs. Groups of quantised weights stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from delta_belief_rl.config.checkpoints import (
    Quantisation,
    half_problems,
    quantisation_problems,
)
from delta_belief_rl.config.facts import Facts, ModelShape
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.versions import release

AWQ_IN_BFLOAT16 = (0, 32)
"""Release of vLLM known to compute ``quantization=awq`` in bfloat16, too."""


def model_problems(config: RunConfig, facts: Facts, actor_gpus: int) -> Iterator[str]:
    """One sentence for each reason why a model of the run cannot be loaded as it is asked to.

    Args:
        config: A valid configuration.
        facts: Of the models' folders; nothing is said of one that is not here.
        actor_gpus: GPUs of the policy.
    """
    actor, judge = config.actor_rollout_ref, config.judge_rollout
    for path in facts.no_models:
        yield (
            f"The folder {path} holds no model (it has no config.json): correct the path, or copy "
            "or download the model again."
        )
    if facts.checkpoint is not None and facts.checkpoint.quantisation is not None:
        yield (
            f"actor_rollout_ref.model.path={actor.model.path} is quantised "
            f"({facts.checkpoint.quantisation.method}) and cannot be trained: give the model that "
            "it was made from."
        )
    if actor.rollout.name == "vllm" and actor_gpus:
        named = actor.rollout.tensor_model_parallel_size
        path = actor.model.path
        yield from _split("actor_rollout_ref", path, named, actor_gpus, facts.model, None)
    if judge.name not in ("vllm", "hf") or facts.judge_checkpoint is None:
        return
    path, found, engine = judge.model.path, facts.judge_checkpoint, judge.rollout
    if judge.name == "hf":
        if found.quantisation is not None:
            yield (
                f"judge_rollout.model.path={path} is quantised ({found.quantisation.method}), "
                "which only judge_rollout.name=vllm serves."
            )
        return
    setting = "judge_rollout.rollout.quantization"
    yield from quantisation_problems(path, found, engine.quantization, setting)
    if judge.ngpus:
        if facts.vllm is None or release(facts.vllm) < AWQ_IN_BFLOAT16:
            yield from half_problems(
                path, found, engine.quantization, engine.dtype, "judge_rollout"
            )
        named = engine.tensor_model_parallel_size
        yield from _split(
            "judge_rollout", path, named, judge.ngpus, facts.judge_model, found.quantisation
        )


def _split(
    pool: str,
    path: str,
    named: int | None,
    ngpus: int,
    shape: ModelShape | None,
    stored: Quantisation | None,
) -> Iterator[str]:
    parallel = named or ngpus
    why = split_problem(shape, parallel, stored) if shape is not None else None
    if shape is None or why is None:
        return
    setting = f"{pool}.rollout.tensor_model_parallel_size"
    given = f"{setting}={named}" if named else f"{setting}=null (all {ngpus} GPUs of the pool)"
    sizes = [str(size) for size in allowed_splits(shape, ngpus, stored)]
    yield f"{given} cannot split {path}, because it {why}: set it to {' or '.join(sizes)}."


def split_problem(shape: ModelShape, parallel: int, stored: Quantisation | None) -> str | None:
    """Why a model cannot be split over ``parallel`` GPUs, as the end of a sentence; None if it can.

    Example:
        >>> shape = ModelShape(5120, 40, 40, 8, 128, 17408, 151936, False)
        >>> split_problem(shape, 3, None)
        'does not divide its 40 attention heads'
        >>> split_problem(shape, 4, None) is None
        True
    """
    if shape.heads % parallel:
        return f"does not divide its {shape.heads} attention heads"
    keys = shape.kv_heads
    if keys % parallel and parallel % keys:
        return f"neither divides its {keys} key-value heads nor is a multiple of them"
    if shape.intermediate % parallel:
        return f"does not divide its feed-forward size {shape.intermediate}"
    group = stored.group_size if stored is not None else None
    if group is None or group < 1:
        return None
    sizes = {"attention": shape.heads * shape.head_dim, "feed-forward": shape.intermediate}
    for name, inputs in sizes.items():
        if inputs // parallel % group:
            return (
                f"leaves {inputs // parallel} inputs of its {name} layers to each GPU, no multiple "
                f"of its quantisation group of {group}"
            )
    return None


def allowed_splits(shape: ModelShape, ngpus: int, stored: Quantisation | None) -> Iterator[int]:
    """Sizes of tensor parallelism that go with a model and with a pool of ``ngpus`` GPUs.

    One GPU for each replica always does.
    """
    for parallel in range(1, ngpus + 1):
        fits = parallel == 1 or split_problem(shape, parallel, stored) is None
        if ngpus % parallel == 0 and fits:
            yield parallel
