"""Rules on the methods that read the played tokens behind another context; see ``rules``."""

from __future__ import annotations

from collections.abc import Iterator

from delta_belief_rl.config.schema import RunConfig

DISTILLING = ("opsd", "sdpo", "sdar", "graph_opd")
READING = ("hcapo", "relace", "rlsd", "opid", "orsd", *DISTILLING)
"""Methods with a teacher."""
VIEWS = {
    "reference": (("rlsd", "sdar", "opsd", "graph_opd"), ("teacher",)),
    "retry": (("opid", "sdpo"), ("teacher", "threshold", "hint_words")),
}
"""Views that several methods read, and the settings on which these must agree."""
BASE_VERIFIER = "base"
"""``algorithm.orsd.verifier_model``: the policy's own model without its adapter."""


def views(config: RunConfig) -> Iterator[str]:
    """A method's teacher and what it reads are there."""
    algorithm = config.algorithm
    chosen = (algorithm.adv_estimator, *algorithm.transforms)
    yield from _ranges(config)
    if config.trainer.val_only:
        return
    if algorithm.adv_estimator == "igpo" and not config.multi_turn.logprob_reward.enabled:
        yield (
            "algorithm.adv_estimator=igpo pays the change of belief: set "
            "multi_turn.logprob_reward.enabled=true."
        )
    if len([name for name in chosen if name in DISTILLING]) > 1:
        yield (
            f"algorithm.adv_estimator and algorithm.transforms hold more than one of "
            f"{', '.join(DISTILLING)}, which distil: keep one of them."
        )
    for name in chosen:
        if name in READING:
            yield from _teacher(config, name)
    if "orsd" in chosen:
        yield from _rubric(config)
    for view, (readers, knobs) in VIEWS.items():
        together = [name for name in readers if name in chosen]
        for knob in knobs:
            if len({getattr(getattr(algorithm, name), knob) for name in together}) > 1:
                names = ", ".join(f"algorithm.{name}.{knob}" for name in together)
                yield (
                    f"{' and '.join(together)} read the view {view!r} with different settings: set "
                    f"{names} alike."
                )


def _rubric(config: RunConfig) -> Iterator[str]:
    """Who writes and who checks the rules of orsd fit together."""
    orsd, model = config.algorithm.orsd, config.actor_rollout_ref.model
    if orsd.writer == "model" and orsd.verifier == "rules":
        yield (
            "algorithm.orsd.verifier=rules cannot check what a model writes: set "
            "algorithm.orsd.verifier=model, or algorithm.orsd.writer=rules."
        )
    if orsd.verifier != "model":
        return
    if not orsd.verifier_model:
        yield "algorithm.orsd.verifier_model must be base or the name of a model, not empty."
    if orsd.verifier_model == BASE_VERIFIER and not model.lora_rank:
        yield (
            "algorithm.orsd.verifier_model=base needs LoRA (actor_rollout_ref.model.lora_rank "
            "above 0), because without an adapter no model is frozen: name one of a service, or "
            "set algorithm.orsd.verifier=rules."
        )


def _teacher(config: RunConfig, name: str) -> Iterator[str]:
    model, teacher = config.actor_rollout_ref.model, getattr(config.algorithm, name).teacher
    full = f"algorithm.{name}.teacher={teacher}"
    if model.api_model_name:
        yield (
            f"{name} needs the policy's own log-probs, which an API does not give: choose another "
            "method, or set actor_rollout_ref.model.api_model_name=null."
        )
    if teacher == "base" and not model.lora_rank:
        yield f"{full} needs LoRA (actor_rollout_ref.model.lora_rank above 0)."
    if teacher == "ema" and not (
        model.lora_rank and "ema" in [adapter.name for adapter in model.adapters]
    ):
        yield (
            f"{full} needs an adapter called ema: set actor_rollout_ref.model.lora_rank and list "
            "ema in actor_rollout_ref.model.adapters."
        )


def _ranges(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    not_negative = {
        "igpo.curriculum_steps": algorithm.igpo.curriculum_steps,
        "hcapo.hindsight_w": algorithm.hcapo.hindsight_w,
        "relace.outcome_w": algorithm.relace.outcome_w,
        "sdar.coefficient": algorithm.sdar.coefficient,
        "sdar.slope": algorithm.sdar.slope,
        "opid.skill_w": algorithm.opid.skill_w,
        "orsd.correction_w": algorithm.orsd.correction_w,
        "orsd.writer_temperature": algorithm.orsd.writer_temperature,
        "opsd.top_k": algorithm.opsd.top_k,
        "sdpo.top_k": algorithm.sdpo.top_k,
        "opsd.ratio_cap": algorithm.opsd.ratio_cap,
        "sdpo.ratio_cap": algorithm.sdpo.ratio_cap,
    }
    for name, value in not_negative.items():
        if value < 0:
            yield f"algorithm.{name} must not be negative, not {value}."
    above = {
        "hcapo.temperature": algorithm.hcapo.temperature,
        "relace.temperature": algorithm.relace.temperature,
        "orsd.clip": algorithm.orsd.clip,
        "orsd.deadline_s": algorithm.orsd.deadline_s,
        "opsd.coefficient": algorithm.opsd.coefficient,
        "sdpo.coefficient": algorithm.sdpo.coefficient,
    }
    for name, value in above.items():
        if value <= 0:
            yield f"algorithm.{name} must be above 0, not {value}."
    shares = {
        "hcapo.clip_low": algorithm.hcapo.clip_low,
        "hcapo.smoothing": algorithm.hcapo.smoothing,
        "relace.clip_low": algorithm.relace.clip_low,
        "relace.smoothing": algorithm.relace.smoothing,
        "rlsd.mix": algorithm.rlsd.mix,
        "rlsd.clip": algorithm.rlsd.clip,
        "orsd.sign_mix": algorithm.orsd.sign_mix,
        "orsd.sign_clip": algorithm.orsd.sign_clip,
        "orsd.min_correlation": algorithm.orsd.min_correlation,
        "opsd.beta": algorithm.opsd.beta,
        "sdpo.beta": algorithm.sdpo.beta,
    }
    for name, value in shares.items():
        if not 0 <= value <= 1:
            yield f"algorithm.{name} must lie in [0, 1], not {value}."
    # At 0 every lost game would be shown as a success.
    grades = {
        "sdpo.threshold": algorithm.sdpo.threshold,
        "opid.threshold": algorithm.opid.threshold,
    }
    for name, value in grades.items():
        if not 0 < value <= 1:
            yield f"algorithm.{name} must lie in (0, 1], not {value}."
    at_least_one: dict[str, float] = {
        "hcapo.clip_high": algorithm.hcapo.clip_high,
        "relace.clip_high": algorithm.relace.clip_high,
        "hcapo.hint_words": algorithm.hcapo.hint_words,
        "sdpo.hint_words": algorithm.sdpo.hint_words,
        "opid.hint_words": algorithm.opid.hint_words,
        "orsd.hint_words": algorithm.orsd.hint_words,
        "orsd.bundles": algorithm.orsd.bundles,
        "orsd.max_criteria": algorithm.orsd.max_criteria,
        "orsd.num_best": algorithm.orsd.num_best,
        "orsd.num_worst": algorithm.orsd.num_worst,
        "orsd.prompt_tokens": algorithm.orsd.prompt_tokens,
        "orsd.writer_tokens": algorithm.orsd.writer_tokens,
    }
    for name, value in at_least_one.items():
        if value < 1:
            yield f"algorithm.{name} must be at least 1, not {value}."
