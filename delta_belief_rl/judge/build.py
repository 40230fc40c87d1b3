"""A judge from plain settings, inside the process that will run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from delta_belief_rl.engines.hf_engine import HFEngine
from delta_belief_rl.engines.text_engine import StepTextEngine
from delta_belief_rl.envs.base import Judge
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.judge.api_judge import ApiJudge, ApiJudgeSettings
from delta_belief_rl.judge.llm_judge import LlmJudge, LlmJudgeSettings
from delta_belief_rl.judge.packaged import rules_judge
from delta_belief_rl.judge.prompts import JudgeMode
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.judge.vllm_judge import VllmJudge, VllmJudgeSettings
from delta_belief_rl.models.loading import load_causal_lm, load_tokenizer
from delta_belief_rl.text.chat import ChatFormat

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class WorldJudgeSettings:
    """The exact judge of an embedded world, by name or path."""

    world: str


@dataclass(frozen=True, slots=True)
class RulesJudgeSettings:
    """The rules of an environment, by its name.

    Attributes:
        plugins: Modules that may bring the environment.
    """

    env: str
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HfJudgeSettings:
    """A causal language model of a local folder or the hub, through transformers.

    Attributes:
        asked: How it is asked and read.
        dtype: A name in ``DTYPES``.
        lanes: Questions that it answers together.
        reuse: See ``StepTextEngine.keep``.
        max_batch_tokens: Most tokens of one forward pass over prompts.
        num_threads: CPU threads; None leaves the number as it is.
    """

    model_path: str
    asked: LlmJudgeSettings
    device: str = "cpu"
    dtype: str = "float32"
    lanes: int = 8
    reuse: bool = True
    max_batch_tokens: int = 8192
    num_threads: int | None = None


JudgeSettings = (
    WorldJudgeSettings | RulesJudgeSettings | HfJudgeSettings | VllmJudgeSettings | ApiJudgeSettings
)


def build_judge(settings: JudgeSettings) -> Judge:
    """The judge that the settings describe.

    Raises:
        UserError: The world, a plug-in or the model cannot be loaded, the model has no chat
            template, or the engine cannot be started with these settings.
    """
    if isinstance(settings, WorldJudgeSettings):
        return WorldJudge(load_world(settings.world))
    if isinstance(settings, RulesJudgeSettings):
        return rules_judge(settings.env, settings.plugins)
    if isinstance(settings, ApiJudgeSettings):
        return ApiJudge(settings)
    if isinstance(settings, VllmJudgeSettings):
        return VllmJudge(settings, judge_chat(settings.model_path, settings.asked.mode))
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    chat = judge_chat(settings.model_path, settings.asked.mode)
    model = load_causal_lm(settings.model_path, DTYPES[settings.dtype], settings.device)
    asked = settings.asked
    engine = HFEngine(
        model,
        max_sequences=settings.lanes,
        max_len=asked.prompt_length + asked.response_length,
        max_batch_tokens=settings.max_batch_tokens,
    )
    text = StepTextEngine(engine, chat, lanes=settings.lanes, keep=settings.reuse)
    return LlmJudge(text, asked)


def judge_chat(model_path: str, mode: JudgeMode) -> ChatFormat:
    """The chat format that a judge is asked in.

    Raises:
        UserError: There is no tokenizer, or it cannot render a conversation.
    """
    return ChatFormat.from_tokenizer(
        load_tokenizer(model_path), {"enable_thinking": mode == "thinking"}
    )
