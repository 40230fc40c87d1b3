"""A tiny causal language model on disk that always writes the same word."""

from __future__ import annotations

from pathlib import Path

import torch
from test_chat import CHATML, tokenizer
from transformers import AutoModelForCausalLM, Qwen3Config

HEADER_END = "\n"
"""The last token of the template's assistant header."""


def save_constant_judge(folder: Path, word: str = "yes", broken: bool = False) -> Path:
    """A Qwen3 model with its tokenizer whose greedy answer is ``word``.

    Its layers add nothing to the embedding of the last token, and the output layer maps that token
    to the next one of the answer.

    Args:
        folder: Where it goes.
        word: The answer.
        broken: Make every logit NaN.
    """
    words = tokenizer(CHATML)
    words.add_tokens([word])
    size = len(words)
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=size + size % 2,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    end = words.convert_tokens_to_ids("<|im_end|>")
    answer = words.convert_tokens_to_ids(word)
    (header,) = words.encode(HEADER_END, add_special_tokens=False)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size, config.hidden_size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[answer, header] = model.lm_head.weight[end, answer] = 1.0
        if broken:
            model.lm_head.weight.fill_(torch.nan)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
