"""From the configuration to what a judge replica needs to know."""

from __future__ import annotations

import math
from dataclasses import replace

from delta_belief_rl.config.memory import judge_lanes
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.base import SamplingParams
from delta_belief_rl.judge.api_judge import ApiJudgeSettings
from delta_belief_rl.judge.build import (
    HfJudgeSettings,
    JudgeSettings,
    RulesJudgeSettings,
    WorldJudgeSettings,
)
from delta_belief_rl.judge.llm_judge import LlmJudgeSettings
from delta_belief_rl.judge.pool import JudgePoolSettings
from delta_belief_rl.judge.prompts import JudgeMode
from delta_belief_rl.judge.vllm_judge import VllmJudgeSettings
from delta_belief_rl.trainer.settings import number_format
from delta_belief_rl.types import UserError

VLLM_CALL = 16
"""Questions of one call to a vLLM judge: few, because a call waits for its slowest answer."""
API_GRACE = 15.0
"""Seconds that the pool waits beyond a replica's own deadline, whose reason says more."""


def judge_calls(cfg: RunConfig) -> int:
    """Calls that one replica works on at a time: vLLM batches what several bring, an API waits."""
    if cfg.judge_rollout.name not in ("vllm", "api"):
        return 1
    pool = pool_settings(cfg)
    return pool.max_outstanding // pool.max_batch


def judge_mode(cfg: RunConfig) -> JudgeMode:
    """How the judge answers."""
    judge = cfg.judge_rollout
    return "cot" if judge.cot else "thinking" if judge.thinking else "direct"


def llm_judge_settings(cfg: RunConfig) -> LlmJudgeSettings:
    """How a language model is asked and read, whatever engine it runs on."""
    judge = cfg.judge_rollout
    drawn = judge.rollout.val_kwargs
    return LlmJudgeSettings(
        mode=judge_mode(cfg),
        with_history=judge.repeated_prompt,
        greedy=not drawn.do_sample,
        sampling=SamplingParams(drawn.temperature, drawn.top_p, drawn.top_k),
        prompt_length=judge.rollout.prompt_length,
        response_length=judge.rollout.response_length,
        parser=judge.parser,
        seed=cfg.seed,
    )


def judge_settings(cfg: RunConfig, threads: int) -> JudgeSettings:
    """What one replica of the judge needs.

    A deterministic run answers one question at a time from an empty cache, so that every reply is
    the same bit for bit whatever was asked before.

    Args:
        cfg: The configuration, with whole paths.
        threads: CPU threads of the replica.

    Raises:
        UserError: The configuration names another judge.
    """
    judge = cfg.judge_rollout
    if judge.name == "hf":
        device = "cuda" if judge.ngpus else "cpu"
        return HfJudgeSettings(
            model_path=judge.model.path,
            asked=llm_judge_settings(cfg),
            device=device,
            dtype=number_format(judge.rollout.dtype, device),
            lanes=judge_lanes(cfg),
            reuse=not cfg.actor_rollout_ref.rollout.deterministic,
            max_batch_tokens=judge.rollout.max_num_batched_tokens,
            num_threads=None if judge.ngpus else threads,
        )
    if judge.name == "rules":
        return RulesJudgeSettings(cfg.multi_turn.env, cfg.plugins)
    if judge.name == "api":
        return api_settings(cfg)
    if judge.name == "vllm":
        return VllmJudgeSettings(cfg, llm_judge_settings(cfg), "cuda" if judge.ngpus else "cpu")
    if cfg.data.world is None or judge.name not in ("auto", "world"):
        raise UserError(
            f"judge_rollout.name={judge.name} is not available: use vllm, hf, api, or world with "
            "data.world=everyday."
        )
    return WorldJudgeSettings(cfg.data.world)


def api_settings(cfg: RunConfig) -> ApiJudgeSettings:
    """What one replica of an API judge needs: its share of the calls among the rest."""
    judge = cfg.judge_rollout
    return ApiJudgeSettings(
        model=judge.model.api_model_name or "",
        asked=llm_judge_settings(cfg),
        deadline=judge.timeout_s,
        concurrency=math.ceil(judge.model.api_batch_size / judge.replicas),
        extra=judge.model.api_extra_body,
    )


def pool_settings(cfg: RunConfig) -> JudgePoolSettings:
    """How patient the pool is.

    A model on CPUs takes a second or more for a question, so a replica is handed no more than it
    answers side by side, with as much again in waiting; the deadline then is one of few answers.
    An API gets each question as a call of its own, so that no game waits for another's answer.
    """
    judge = cfg.judge_rollout
    settings = JudgePoolSettings(
        deadline=judge.timeout_s,
        max_error_rate=judge.max_error_rate,
        max_restarts=judge.max_restarts,
    )
    if judge.name == "vllm":
        return replace(
            settings,
            max_batch=VLLM_CALL,
            max_outstanding=max(VLLM_CALL, judge.rollout.max_num_seqs),
        )
    if judge.name == "api":
        return replace(
            settings,
            deadline=judge.timeout_s + API_GRACE,
            max_batch=1,
            max_outstanding=api_settings(cfg).concurrency,
        )
    if judge.name != "hf":
        return settings
    lanes = judge_lanes(cfg)
    return replace(settings, max_batch=lanes, max_outstanding=2 * lanes)
