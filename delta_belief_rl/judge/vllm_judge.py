"""A judge on vLLM from the configuration, inside the process that will own the engine.

vLLM is imported here only when a judge is built, never when settings are made.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from delta_belief_rl.config.engine_args import judge_engine_args
from delta_belief_rl.config.gpus import lowest_capability, read_gpus
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.base import EngineState
from delta_belief_rl.engines.kernels import describe_kernels
from delta_belief_rl.engines.vllm_args import before_import, cpu_arguments
from delta_belief_rl.judge.llm_judge import LlmJudge, LlmJudgeSettings
from delta_belief_rl.text.chat import ChatFormat


@dataclass(frozen=True, slots=True)
class VllmJudgeSettings:
    """A causal language model on vLLM.

    Attributes:
        cfg: The configuration, with whole paths; the engine's arguments are made of it.
        asked: How the model is asked and read.
        device: ``cuda`` or ``cpu``.
    """

    cfg: RunConfig
    asked: LlmJudgeSettings
    device: str

    @property
    def model_path(self) -> str:
        """The folder or hub id of the model."""
        return self.cfg.judge_rollout.model.path


class VllmJudge(LlmJudge):
    """A judge that owns its engine, which can give its memory back between rollouts.

    Args:
        settings: See ``VllmJudgeSettings``.
        chat: Of the judge's model.

    Raises:
        UserError: An argument does not go with the installed vLLM, or the engine cannot start.
    """

    def __init__(self, settings: VllmJudgeSettings, chat: ChatFormat) -> None:
        before_import()
        from delta_belief_rl.engines import vllm_engine
        from delta_belief_rl.engines.vllm_text import VllmTextEngine

        vllm_engine.check_platform(settings.device, "judge_rollout")
        gpus = read_gpus() if settings.device == "cuda" else None
        args = judge_engine_args(
            settings.cfg, vllm_engine.option_names(), lowest_capability(gpus), vllm_engine.VERSION
        )
        os.environ.update(args.env)
        kwargs = dict(args.kwargs)
        if settings.device == "cpu":
            kwargs = cpu_arguments(kwargs, cpu_format(settings.cfg))
            # Otherwise every replica binds its threads to the same first cores.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self._text = VllmTextEngine(kwargs, chat)
        super().__init__(self._text, settings.asked)
        switches = args.notes if settings.device == "cuda" else ()
        self.kernels = describe_kernels(self._text.kernels(), switches)
        print(f"judge engine: vLLM {vllm_engine.VERSION}; {self.kernels}", file=sys.stderr)

    def memory(self) -> list[dict[str, int]]:
        """See ``VllmEngine.memory``."""
        return self._text.memory()

    def sleep(self) -> str:
        """Give the GPU's memory back, unless it has been; returns the state of the engine."""
        if self._text.health().state != EngineState.ASLEEP:
            self._text.sleep()
        return self._text.health().state

    def wake(self) -> None:
        """Take the GPU's memory again; nothing happens when it is there."""
        if self._text.health().state == EngineState.ASLEEP:
            self._text.wake()

    def close(self) -> None:
        """End the engine and its processes."""
        self._text.close()


def cpu_format(cfg: RunConfig) -> str:
    """The number format on CPUs, which have no float16."""
    return "bfloat16" if cfg.judge_rollout.rollout.dtype == "bfloat16" else "float32"
