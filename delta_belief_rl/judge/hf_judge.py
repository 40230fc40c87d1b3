"""A judge on transformers, inside the process that owns its model, and the chat of any model."""

from __future__ import annotations

import torch

from delta_belief_rl.engines.hf_engine import HFEngine
from delta_belief_rl.engines.text_engine import StepTextEngine
from delta_belief_rl.judge.build import HfJudgeSettings
from delta_belief_rl.judge.llm_judge import LlmJudge
from delta_belief_rl.judge.prompts import JudgeMode
from delta_belief_rl.models.loading import load_causal_lm, load_tokenizer
from delta_belief_rl.text.chat import ChatFormat

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def build_hf_judge(settings: HfJudgeSettings) -> LlmJudge:
    """Load the model and put a judge on it.

    Raises:
        UserError: The model cannot be loaded, or has no chat template.
    """
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
