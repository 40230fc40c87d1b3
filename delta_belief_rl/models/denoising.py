"""Answers of a masked denoiser as traces: which place was filled at which step.

An answer is a block of ``L`` places behind a prompt, all masked at first. Each step fills one or
more of them; ``order`` says at which step each place was filled. What the model said at a step is a
function of the state before it, and the state before step ``t`` is the block with every place of an
earlier step filled and every other one masked. So the order is all that has to be kept in order to
ask the model again, or another one, for the log-prob of each token *at its own step*.

The end of an answer is said once: it may stand only behind every place that is filled, and with it
the places behind it are filled, too (with the end token, at the same step), so that nothing comes
after. They are no tokens of the answer and are never trained. With that rule tokens and order up to
the end give the whole block.

The confidence of a place is the probability of its likeliest token at temperature 1. The *gain* of
a step is the mean change of confidence over the places that are masked after it; every token of the
step shares it, and a step after which none is masked has none (NaN).

Legend: ``R`` rows (states), ``L`` places, ``V`` vocabulary, ``n`` tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from delta_belief_rl.models.denoiser import NEVER, Denoiser, DenoiserConfig
from delta_belief_rl.types import BoolArray, FloatArray, IntArray

FORBIDDEN = -1e4
"""Logit of a token that may not be said: its probability is zero, its gradient too, and unlike an
infinity it leaves no NaN in an entropy."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One answer and how it came about.

    Attributes:
        prompt: Everything before the block.
        tokens: ``[n]``, up to the end token where there is one.
        order: ``[n]``, the step of each.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        """Steps that the answer took."""
        return max(self.order, default=-1) + 1

    def check(self, config: DenoiserConfig) -> None:
        """Refuse what no denoiser of this configuration can have said.

        Raises:
            ValueError: The order is not one of the tokens, a step has no token, or the answer is
                neither ended nor full.
        """
        length, end = len(self.tokens), config.end_token_id
        if len(self.order) != length or set(self.order) != set(range(self.num_steps)):
            raise ValueError(f"{self.order} is no order in which {length} tokens were said")
        ended = length > 0 and self.tokens[-1] == end
        if end in self.tokens[:-1] or length > config.answer_length:
            raise ValueError("an answer goes on behind its end")
        if not ended and length != config.answer_length:
            raise ValueError(f"an answer of {length} tokens has no end")

    def block(self, config: DenoiserConfig) -> tuple[IntArray, IntArray]:
        """Tokens and steps of the whole block, ``[L]`` each."""
        rest = config.answer_length - len(self.tokens)
        tokens = [*self.tokens, *[config.end_token_id] * rest]
        order = [*self.order, *[self.order[-1] if self.order else 0] * rest]
        return np.array(tokens, dtype=np.int64), np.array(order, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class States:
    """States of blocks as the model reads them.

    Attributes:
        ids: ``[R, T]``, prompt and block, padded on the right.
        starts: ``[R]``, where the block begins.
        known: ``[R, L]``, places that are filled.
    """

    ids: Tensor
    starts: Tensor
    known: Tensor

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        blocks: IntArray,
        known: BoolArray,
        config: DenoiserConfig,
        device: torch.device | str,
    ) -> States:
        """Lay prompts and blocks side by side.

        Args:
            prompts: Of each row.
            blocks: ``[R, L]``, any token where a place is not known.
            known: ``[R, L]``.
            config: Of the model.
            device: Where the tensors go.
        """
        width = max((len(prompt) for prompt in prompts), default=0) + config.answer_length
        ids = np.full((len(prompts), width), config.end_token_id, dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
            ids[row, len(prompt) : len(prompt) + config.answer_length] = np.where(
                known[row], blocks[row], config.mask_token_id
            )
        return cls(
            ids=torch.from_numpy(ids).to(device),
            starts=torch.tensor([len(prompt) for prompt in prompts], device=device),
            known=torch.from_numpy(known.copy()).to(device),
        )


@dataclass(frozen=True, slots=True)
class TraceScore:
    """What a model says about one trace; every array is ``[n]``.

    Attributes:
        logp: Of each token at its own step, at the sampler's temperature.
        entropy: Of the same distribution, in nats.
        gain: Of the token's step; NaN where no place is masked after it.
        category: Of the token.
    """

    logp: FloatArray
    entropy: FloatArray
    gain: FloatArray
    category: FloatArray


def block_logits(model: Denoiser, states: States) -> Tensor:
    """Logits of the blocks at temperature 1, ``[R, L, V]``, without what may not be said."""
    config = model.config
    logits = model(states.ids, states.starts + config.answer_length)
    places = torch.arange(config.answer_length, device=logits.device)
    index = states.starts[:, None] + places[None]
    block = logits.gather(1, index[:, :, None].expand(-1, -1, logits.shape[-1])).float()
    unsaid = torch.tensor(config.categories, device=logits.device) == NEVER
    # The end only behind everything that is known.
    last = torch.where(states.known, places[None], -1).amax(1)
    early = places[None] < last[:, None]
    forbidden = unsaid[None, None].expand_as(block).clone()
    forbidden[:, :, config.end_token_id] |= early
    return block.masked_fill(forbidden, FORBIDDEN)


def confidences(logits: Tensor) -> Tensor:
    """Probability of the likeliest token of each place, ``[R, L, V] -> [R, L]``."""
    return logits.softmax(-1).amax(-1)


def replayed(traces: Sequence[Trace]) -> Iterator[tuple[int, int]]:
    """Trace and step of every state of some traces, in order."""
    for number, trace in enumerate(traces):
        for step in range(trace.num_steps):
            yield number, step


def states_before(
    traces: Sequence[Trace],
    wanted: Sequence[tuple[int, int]],
    config: DenoiserConfig,
    device: torch.device | str,
) -> States:
    """The states before some steps.

    Args:
        traces: The answers.
        wanted: Number of the trace and step, for each row.
        config: Of the model.
        device: Where the tensors go.
    """
    whole = [trace.block(config) for trace in traces]
    blocks = np.stack([whole[number][0] for number, _ in wanted])
    known = np.stack([whole[number][1] < step for number, step in wanted])
    prompts = [traces[number].prompt for number, _ in wanted]
    return States.of(prompts, blocks, known, config, device)


@torch.no_grad()
def score_traces(
    model: Denoiser, traces: Sequence[Trace], temperature: float, max_rows: int = 512
) -> list[TraceScore]:
    """Ask the model again for every step of some answers.

    Args:
        model: The policy.
        traces: Of its answers.
        temperature: Of the log-probs and entropies, above 0.
        max_rows: States of one forward.
    """
    config = model.config
    rows = list(replayed(traces))
    found: dict[tuple[int, int], _Asked] = {}
    for first in range(0, len(rows), max_rows):
        some = rows[first : first + max_rows]
        logits = block_logits(model, states_before(traces, some, config, model.bias.device))
        logp = (logits / temperature).log_softmax(-1)
        parts = (logp, -(logp.exp() * logp).sum(-1), confidences(logits))
        found.update(zip(some, zip(*(_array(part) for part in parts), strict=True), strict=True))
    kinds = np.array(config.categories, dtype=np.float64)
    return [
        _trace_score(trace, [found[number, step] for step in range(trace.num_steps)], config, kinds)
        for number, trace in enumerate(traces)
    ]


_Asked = tuple[FloatArray, FloatArray, FloatArray]
"""Of one state: log-probs ``[L, V]``, entropies ``[L]`` and confidences ``[L]``."""


def _array(values: Tensor) -> FloatArray:
    return values.double().cpu().numpy()


def _trace_score(
    trace: Trace, asked: Sequence[_Asked], config: DenoiserConfig, kinds: FloatArray
) -> TraceScore:
    """The score of one trace from what was said in the states before its steps."""
    said = list(enumerate(zip(trace.tokens, trace.order, strict=True)))
    gains = step_gains([trust for _, _, trust in asked], trace.block(config)[1])
    return TraceScore(
        logp=np.array([asked[step][0][place, token] for place, (token, step) in said]),
        entropy=np.array([asked[step][1][place] for place, (_, step) in said]),
        gain=gains[list(trace.order)],
        category=kinds[list(trace.tokens)],
    )


def step_gains(trust: Sequence[FloatArray], order: IntArray) -> FloatArray:
    """Gain of each step.

    Args:
        trust: Confidence of every place before each step, ``[L]`` each.
        order: ``[L]``.
    """
    gains = np.full(len(trust), np.nan)
    for step in range(len(trust) - 1):
        masked = order > step
        if masked.any():
            gains[step] = float((trust[step + 1] - trust[step])[masked].mean())
    return gains
