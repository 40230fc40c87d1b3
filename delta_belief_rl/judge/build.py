"""A judge from plain settings, inside the process that will run it."""

from __future__ import annotations

from dataclasses import dataclass

from delta_belief_rl.envs.base import Judge
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.judge.api_judge import ApiJudge, ApiJudgeSettings
from delta_belief_rl.judge.llm_judge import LlmJudgeSettings
from delta_belief_rl.judge.packaged import rules_judge
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.judge.vllm_judge import VllmJudge, VllmJudgeSettings


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
        dtype: ``bfloat16``, ``float16`` or ``float32``.
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
    # Any other judge is there seconds earlier, without the libraries of models.
    from delta_belief_rl.judge.hf_judge import build_hf_judge, judge_chat

    if isinstance(settings, VllmJudgeSettings):
        return VllmJudge(settings, judge_chat(settings.model_path, settings.asked.mode))
    return build_hf_judge(settings)
