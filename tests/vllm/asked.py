"""What a judge on vLLM is asked in tests, and what plain PyTorch writes."""

from __future__ import annotations

from pathlib import Path

import torch

from delta_belief_rl.engines.base import SamplingParams
from delta_belief_rl.engines.text_engine import TextRequest
from delta_belief_rl.models.loading import load_causal_lm, load_tokenizer
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.types import Message

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def asked(text: str, seed: int = 0, sampling: SamplingParams = GREEDY) -> TextRequest:
    messages = (Message("system", "you are the judge"), Message("user", text))
    return TextRequest(messages, seed, sampling, max_prompt_tokens=40)


@torch.inference_mode()
def greedy_text(folder: Path, request: TextRequest) -> str:
    """What plain PyTorch writes."""
    chat = ChatFormat.from_tokenizer(load_tokenizer(folder))
    model = load_causal_lm(folder)
    ids = list(chat.open_ids(request.messages))
    start = len(ids)
    while len(ids) < start + request.sampling.max_tokens and ids[-1:] != [chat.eot_id]:
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return chat.decode(ids[start:])
