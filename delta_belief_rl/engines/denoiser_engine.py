"""An engine for masked denoisers: answers of a fixed length, filled where the model is surest.

Each step fills the ``per_step`` places of the block whose likeliest token is likeliest, with tokens
drawn from the model's distribution there at the request's temperature; ``models.denoising`` says
how an answer ends and what the order of its tokens is good for. What a request draws depends on its
own seed and its own logits.

``step`` brings all requests that it is given to their end. There is no key-value cache, because
every place sees every other one: sessions are forgotten at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from delta_belief_rl.engines.base import (
    AdapterState,
    Completion,
    EngineHealth,
    EngineState,
    FinishReason,
    GenRequest,
    SamplingParams,
    TailRequest,
    check_sampling,
)
from delta_belief_rl.engines.sampling import (
    cuts_distribution,
    sample_tokens,
    uniforms,
)
from delta_belief_rl.models.denoiser import Denoiser, load_denoiser_state, token_logps
from delta_belief_rl.models.denoising import States, block_logits, confidences
from delta_belief_rl.types import IntArray


@dataclass(slots=True)
class _Blocks:
    """Answers that are being filled; arrays are ``[R, L]``."""

    tokens: IntArray
    order: IntArray
    logps: NDArray[np.float64]

    @classmethod
    def masked(cls, rows: int, length: int) -> _Blocks:
        """Nothing is filled; the order of such a place is ``-1``."""
        shape = (rows, length)
        return cls(np.zeros(shape, np.int64), np.full(shape, -1, np.int64), np.zeros(shape))


class DenoiserEngine:
    """A stepping engine around one denoiser.

    Args:
        model: It.
        max_rows: Answers of one forward.
        per_step: Places that a step fills.
        version: Version stamped on completions until weights are loaded.
    """

    def __init__(
        self, model: Denoiser, *, max_rows: int = 256, per_step: int = 1, version: int = 0
    ) -> None:
        if max_rows < 1 or per_step < 1:
            raise ValueError("max_rows and per_step are positive")
        self._model = model.eval()
        self._max_rows, self._per_step = max_rows, per_step
        self._version = version
        self._generated = self._prefilled = 0

    @torch.inference_mode()
    def step(self, new: Sequence[GenRequest]) -> list[Completion]:
        """Answer all requests, in their order."""
        refused = {index: why for index, ask in enumerate(new) if (why := self._refusal(ask))}
        done = {index: self._error(new[index].session, why) for index, why in refused.items()}
        rest = [index for index in range(len(new)) if index not in refused]
        for first in range(0, len(rest), self._max_rows):
            some = rest[first : first + self._max_rows]
            done.update(zip(some, self._answer([new[index] for index in some]), strict=True))
        return [done[index] for index in range(len(new))]

    def release(self, sessions: Sequence[str]) -> None:
        """Nothing is kept of a session."""
        del sessions

    def load_adapter(self, state: AdapterState, version: int) -> None:
        """Take over all weights.

        Raises:
            UserError: They are those of another model.
        """
        load_denoiser_state(self._model, state)
        self._version = version

    @torch.inference_mode()
    def score(self, token_ids: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """Log-prob of each token where it alone is masked; ``0.0`` at position 0."""
        out: list[NDArray[np.float64]] = []
        for ids in token_ids:
            logps = token_logps(self._model, ids)
            logps[0] = 0.0
            out.append(logps)
        return out

    def score_tails(self, requests: Sequence[TailRequest]) -> list[NDArray[np.float64]]:
        """A denoiser has no probability of a text.

        Raises:
            ValueError: Anything was asked.
        """
        if requests:
            raise ValueError("a denoiser does not say how likely a text is")
        return []

    def health(self) -> EngineHealth:
        """Counters and state."""
        return EngineHealth(
            alive=True,
            adapter_version=self._version,
            state=EngineState.READY.value,
            outstanding=0,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
        )

    # -- answers ----------------------------------------------------------------------------------

    def _refusal(self, request: GenRequest) -> str:
        config = self._model.config
        prompt, asked = len(request.prompt_ids), request.sampling.max_tokens
        if asked < config.answer_length:
            return f"an answer takes {config.answer_length} tokens and {asked} are left"
        if prompt + config.answer_length > config.max_position_embeddings:
            return (
                f"prompt of {prompt} and answer of {config.answer_length} exceed the model's "
                f"{config.max_position_embeddings} places"
            )
        return "the prompt is empty" if not prompt else check_sampling(request.sampling)

    def _answer(self, requests: Sequence[GenRequest]) -> list[Completion]:
        length = self._model.config.answer_length
        blocks = _Blocks.masked(len(requests), length)
        drawn = np.stack([uniforms(request.seed, length) for request in requests])
        used = np.zeros(len(requests), dtype=np.int64)
        for step in range(length):
            open_rows = np.flatnonzero((blocks.order < 0).any(axis=1))
            if not len(open_rows):
                break
            self._fill(blocks, open_rows, requests, drawn, used, step)
        self._prefilled += sum(len(request.prompt_ids) for request in requests)
        return [self._close(request, blocks, row) for row, request in enumerate(requests)]

    def _fill(
        self,
        blocks: _Blocks,
        open_rows: IntArray,
        requests: Sequence[GenRequest],
        drawn: NDArray[np.float64],
        used: IntArray,
        step: int,
    ) -> None:
        """One step of all answers that are not full.

        Args:
            blocks: Of all requests.
            open_rows: Those with a masked place.
            requests: All.
            drawn: Uniform numbers, ``[R, L]``.
            used: How many of them each request has used.
            step: Its number.
        """
        config, device = self._model.config, self._model.bias.device
        known = blocks.order[open_rows] >= 0
        prompts = [requests[row].prompt_ids for row in open_rows]
        logits = block_logits(
            self._model, States.of(prompts, blocks.tokens[open_rows], known, config, device)
        )
        # A place without a number is filled at once, so that its answer fails and no other does.
        trust = np.nan_to_num(confidences(logits).double().cpu().numpy(), nan=np.inf)
        sure = np.where(known, -1.0, trust)
        ranked = np.argsort(-sure, axis=1, kind="stable")[:, : self._per_step]
        pairs = [
            (index, place)
            for index, places in enumerate(ranked)
            for place in sorted(places.tolist())
            if not known[index, place]
        ]
        asked = [requests[open_rows[index]].sampling for index, _ in pairs]
        luck = np.empty(len(pairs))
        for number, (index, _) in enumerate(pairs):
            row = open_rows[index]
            luck[number] = drawn[row, used[row]]
            used[row] += 1
        tokens, logps = _sample(logits, pairs, asked, luck)
        self._generated += len(pairs)
        for (index, place), token, logp in zip(pairs, tokens, logps, strict=True):
            row = open_rows[index]
            if blocks.order[row, place] >= 0:  # behind an end of this very step
                continue
            blocks.tokens[row, place], blocks.order[row, place] = token, step
            blocks.logps[row, place] = logp
            if token == config.end_token_id:
                blocks.tokens[row, place:] = token
                blocks.order[row, place:] = step

    def _close(self, request: GenRequest, blocks: _Blocks, row: int) -> Completion:
        end = self._model.config.end_token_id
        tokens = blocks.tokens[row].tolist()
        ended = end in tokens
        count = tokens.index(end) + 1 if ended else len(tokens)
        logps = blocks.logps[row, :count].tolist()
        if not all(math.isfinite(value) for value in logps):
            return self._error(request.session, "the model's logits are not finite")
        return Completion(
            session=request.session,
            token_ids=tuple(tokens[:count]),
            logprobs=tuple(logps),
            finish=FinishReason.STOP if ended else FinishReason.LENGTH,
            adapter_version=self._version,
            order=tuple(blocks.order[row, :count].tolist()),
        )

    def _error(self, session: str, reason: str) -> Completion:
        return Completion(session, (), (), FinishReason.ERROR, self._version, reason)


def _sample(
    logits: torch.Tensor,
    pairs: Sequence[tuple[int, int]],
    asked: Sequence[SamplingParams],
    luck: NDArray[np.float64],
) -> tuple[list[int], list[float]]:
    """Tokens at some places of some rows, and their log-probs."""
    device = logits.device
    rows = torch.tensor([index for index, _ in pairs], device=device)
    places = torch.tensor([place for _, place in pairs], device=device)
    tokens, logps = sample_tokens(
        logits[rows, places],
        torch.from_numpy(luck).to(device),
        torch.tensor([one.temperature for one in asked], device=device),
        torch.tensor([one.top_k for one in asked], device=device),
        torch.tensor([one.top_p for one in asked], device=device),
        any(cuts_distribution(one) for one in asked),
    )
    return tokens.tolist(), logps.double().tolist()
