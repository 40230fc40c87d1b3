"""A tiny masked denoiser with weights that are no accident of its start."""

from __future__ import annotations

import torch

from delta_belief_rl.engines.base import Completion, GenRequest, SamplingParams
from delta_belief_rl.models.denoiser import NEVER, Denoiser, DenoiserConfig, build_denoiser
from delta_belief_rl.models.denoising import Trace

END, MASK, PLACES = 2, 3, 5
CONFIG = DenoiserConfig(
    vocab_size=12,
    answer_length=PLACES,
    mask_token_id=MASK,
    end_token_id=END,
    # Padding, unknown, end, mask, two headers, six words of two kinds.
    categories=(NEVER, NEVER, 2, NEVER, NEVER, NEVER, 0, 0, 0, 1, 1, 1),
    category_names=("noun", "verb", "end"),
    hidden_size=16,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=16,
)


def tiny(seed: int = 0, scale: float = 6.0) -> Denoiser:
    """A model whose answers depend on prompt, places and what is filled."""
    model = build_denoiser(CONFIG, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model


def ask(
    session: int = 0,
    prompt: tuple[int, ...] = (4, 7, 9, 5),
    seed: int | None = None,
    **knobs: float,
) -> GenRequest:
    """A request for one answer."""
    sampling = {"max_tokens": PLACES, "stop_token_ids": (END,), **knobs}
    return GenRequest(
        f"s{session}",
        prompt,
        session if seed is None else seed,
        SamplingParams(**sampling),  # type: ignore[arg-type]
    )


def trace_of(request: GenRequest, answer: Completion) -> Trace:
    """How the answer came about."""
    return Trace(request.prompt_ids, answer.token_ids, answer.order)
