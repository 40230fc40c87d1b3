"""Continuous batching on any Hugging Face causal language model, on CPU or GPU.

The engine keeps one key-value slot per live game. A later turn of a game runs only the tokens that
came since: the environment's reply, and the last sampled token, which no forward pass has seen yet.
Live games fill the slots ``0 .. n - 1`` without holes, so that decoding reads the store in place
whenever all of them run.

``step`` first extends the newly admitted games (one right-padded forward per token budget), then
decodes all running games one token at a time until enough of them are done. Its result is a
function of the order of the requests alone.

A slot keeps what the next text of its session has in common with the last one. A game that tries
several actions gives each of them a session of its own, and ``score_tails`` asks there how likely a
text is after an action and its reply: only tokens that the slot has not seen are run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from delta_belief_rl.engines.base import (
    AdapterState,
    Completion,
    EngineHealth,
    EngineState,
    EngineStateError,
    FinishReason,
    GenRequest,
    TailRequest,
    check_sampling,
)
from delta_belief_rl.engines.hf_forward import next_logits, score_ids, tail_logps
from delta_belief_rl.engines.sampling import SlotTable, cuts_distribution
from delta_belief_rl.models.attention import ATTENTION_NAME, SlotCache
from delta_belief_rl.models.loading import load_adapter_state

T = TypeVar("T")

ADAPTER = "policy"
"""The one name under which the policy's adapter is loaded."""


@dataclass(slots=True)
class _Session:
    """One live game. ``cached`` are the ids whose keys and values the slot holds."""

    name: str
    slot: int
    cached: list[int]
    request: GenRequest | None = None
    sampled: int = 0


@dataclass(frozen=True, slots=True)
class _Tail:
    """A tail to be scored in the slot of its session; ``index`` is its place in the call."""

    index: int
    request: TailRequest
    session: _Session

    @property
    def suffix(self) -> tuple[int, ...]:
        """Tokens that the slot lacks."""
        return self.request.token_ids[len(self.session.cached) :]


class HFEngine:
    """A stepping engine around one model.

    Args:
        model: A causal language model, with or without a PEFT adapter. Its attention implementation
            is set to the one of ``models.attention``.
        max_sequences: Slots, hence most games alive at once; further games wait in order of
            arrival.
        max_len: Most tokens of one game, prompt and answer together.
        max_batch_tokens: Most tokens, padding included, of one prefill forward.
        min_finished: ``step`` returns when so many requests are done: a number, or a fraction of
            the requests that run when it starts (``1 / 16``).
        adapter: Name of the model's adapter that ``load_adapter`` fills.
        loader: Takes over adapter weights instead, for a model whose adapter is merged.
        version: Version stamped on completions until an adapter is loaded.

    Attributes:
        cache_misses: Texts that did not go on where their session's last one ended.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        max_sequences: int = 64,
        max_len: int = 2560,
        max_batch_tokens: int = 16384,
        min_finished: int | float = 1,
        adapter: str = ADAPTER,
        loader: Callable[[AdapterState], None] | None = None,
        version: int = 0,
    ) -> None:
        if max_sequences < 1 or max_len < 2 or max_batch_tokens < 1 or min_finished <= 0:
            raise ValueError("max_sequences, max_len, max_batch_tokens, min_finished are positive")
        self._model: Any = model.eval()
        if self._model.config._attn_implementation != ATTENTION_NAME:
            self._model.set_attn_implementation(ATTENTION_NAME)
        self._max_sequences = max_sequences
        self._max_len = max_len
        self._max_batch_tokens = max_batch_tokens
        self._min_finished = min_finished
        self._load = loader or partial(load_adapter_state, self._model, adapter)
        self._version = version
        self._state = EngineState.READY
        self._sessions: dict[str, _Session] = {}
        self._by_slot: list[_Session] = []
        self._waiting: deque[GenRequest] = deque()
        self._running: list[_Session] = []
        self._allocate()
        self.cache_misses = 0
        self._generated = 0
        self._prefilled = 0

    # -- the protocol -----------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, new: Sequence[GenRequest]) -> list[Completion]:
        """Add requests and run until enough have finished.

        Returns:
            All requests that finished. It is empty only when nothing can run: no request is left,
            or every slot belongs to a game that is idle while new games wait.

        Raises:
            EngineStateError: The engine sleeps.
        """
        self._require(EngineState.READY)
        self._model.eval()  # a trainer that shares the model may have left dropout on
        finished = self._enqueue(new)
        admitted = self._admit()
        target = self._target()
        for chunk in self._padded_chunks(admitted, _missing):
            finished += self._extend(chunk)
        while self._running and len(finished) < target:
            finished += self._decode()
        return finished

    @torch.inference_mode()
    def release(self, sessions: Sequence[str]) -> None:
        """Forget games; their requests that still run or wait get no answer."""
        gone = set(sessions)
        self._waiting = deque(r for r in self._waiting if r.session not in gone)
        self._running = [s for s in self._running if s.name not in gone]
        for name in sessions:
            session = self._sessions.pop(name, None)
            if session is not None:
                self._vacate(session.slot)

    def load_adapter(self, state: AdapterState, version: int) -> None:
        """Take over adapter weights and forget every cached key and value, which old weights made.

        Raises:
            EngineStateError: The engine sleeps, or requests are running.
            UserError: The state matches no module of the model.
        """
        self._require(EngineState.READY)
        if self._running or self._waiting:
            raise EngineStateError(
                f"cannot load adapter version {version}: "
                f"{self._outstanding()} requests are in flight"
            )
        self._load(state)
        self._drop_sessions()
        self._version = version

    @torch.inference_mode()
    def score(self, token_ids: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """Log-probs (nats, temperature 1) of each token given those before; 0.0 at position 0.

        The pass writes and reads a key-value store like generation does, one sequence at a time, so
        a probe sees what generation sees.

        Raises:
            EngineStateError: The engine sleeps.
        """
        self._require(EngineState.READY)
        self._model.eval()
        return [score_ids(self._model, list(ids)) for ids in token_ids]

    @torch.inference_mode()
    def score_tails(self, requests: Sequence[TailRequest]) -> list[NDArray[np.float64]]:
        """Log-probs (nats, temperature 1) of the last tokens of some texts.

        A text runs in its session's slot. Where there is none to be had, or it is too short, the
        text is run as a whole beside the store.

        Returns:
            ``[request.length]`` for each request, in their order.

        Raises:
            EngineStateError: The engine sleeps, or a session is busy or named twice.
        """
        self._require(EngineState.READY)
        self._model.eval()
        busy = {s.name for s in self._running} | {r.session for r in self._waiting}
        scores: dict[int, NDArray[np.float64]] = {}
        placed: list[_Tail] = []
        for index, request in enumerate(requests):
            if request.session in busy:
                raise EngineStateError(f"session {request.session!r} is busy: it cannot be scored")
            busy.add(request.session)
            session = self._slot_for(request)
            if session is None:
                scores[index] = score_ids(self._model, request.token_ids)[request.start :]
            else:
                self._keep_prefix(session, request.token_ids[: request.start])
                placed.append(_Tail(index, request, session))
        for chunk in self._padded_chunks(placed, lambda tail: len(tail.suffix)):
            found = self._run_tails(chunk)
            scores.update((tail.index, score) for tail, score in zip(chunk, found, strict=True))
        return [scores[index] for index in range(len(requests))]

    def health(self) -> EngineHealth:
        """Counters and state; cheap, and allowed in every state."""
        return EngineHealth(
            alive=True,
            adapter_version=self._version,
            state=self._state.value,
            outstanding=self._outstanding(),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
        )

    def sleep(self) -> None:
        """Give back the memory of the key-value store; every game is forgotten.

        Raises:
            EngineStateError: The engine sleeps already, or requests are in flight.
        """
        self._require(EngineState.READY)
        if self._running or self._waiting:
            raise EngineStateError(f"cannot sleep: {self._outstanding()} requests are in flight")
        self._drop_sessions()
        del self._cache, self._table
        self._state = EngineState.ASLEEP

    def wake(self) -> None:
        """Take the memory of the key-value store again.

        Raises:
            EngineStateError: The engine is awake.
        """
        self._require(EngineState.ASLEEP)
        self._allocate()
        self._state = EngineState.READY

    # -- admission --------------------------------------------------------------------------------

    def _enqueue(self, new: Sequence[GenRequest]) -> list[Completion]:
        """Queue what can be served; the rest is answered with an error at once."""
        refused: list[Completion] = []
        busy = {s.name for s in self._running} | {r.session for r in self._waiting}
        for request in new:
            reason = self._refusal(request)
            if request.session in busy:
                reason = "this session has a request in flight already"
            if reason:
                refused.append(self._error(request.session, reason))
            else:
                busy.add(request.session)
                self._waiting.append(request)
        return refused

    def _refusal(self, request: GenRequest) -> str:
        if not request.prompt_ids:
            return "the prompt is empty"
        prompt, asked = len(request.prompt_ids), request.sampling.max_tokens
        if prompt + asked > self._max_len:
            return f"prompt of {prompt} and max_tokens of {asked} exceed max_len {self._max_len}"
        return check_sampling(request.sampling)

    def _admit(self) -> list[_Session]:
        """Give requests to their sessions; new sessions take a slot while there is one."""
        admitted: list[_Session] = []
        still: deque[GenRequest] = deque()
        for request in self._waiting:
            session = self._sessions.get(request.session)
            if session is None and len(self._by_slot) == self._max_sequences:
                still.append(request)
                continue
            session = session or self._open(request.session)
            self._keep_prefix(session, request.prompt_ids)
            session.request, session.sampled = request, 0
            admitted.append(session)
        self._waiting = still
        self._running += admitted
        self._running.sort(key=lambda s: s.slot)
        if admitted:
            requests = [s.request for s in admitted if s.request is not None]
            self._table.assign(
                [s.slot for s in admitted],
                [r.sampling for r in requests],
                [r.seed for r in requests],
            )
        return admitted

    def _open(self, name: str) -> _Session:
        """A new session in the next slot."""
        session = _Session(name, len(self._by_slot), [])
        self._sessions[name] = session
        self._by_slot.append(session)
        return session

    def _slot_for(self, request: TailRequest) -> _Session | None:
        """The request's session where its text fits; waiting games come first at a free slot."""
        if len(request.token_ids) > self._max_len:
            return None
        session = self._sessions.get(request.session)
        taken = self._waiting or len(self._by_slot) == self._max_sequences
        return session or (None if taken else self._open(request.session))

    def _keep_prefix(self, session: _Session, prompt: tuple[int, ...]) -> None:
        """Leave in the cache what the prompt starts with, always less than the whole prompt."""
        cached = session.cached
        kept = len(cached)
        if cached != list(prompt[:kept]):
            self.cache_misses += 1
            pairs = enumerate(zip(cached, prompt, strict=False))
            kept = next((i for i, (held, asked) in pairs if held != asked), len(prompt))
        del cached[min(kept, len(prompt) - 1) :]

    def _target(self) -> int:
        if isinstance(self._min_finished, int):
            return self._min_finished
        return max(1, math.ceil(self._min_finished * len(self._running)))

    # -- forward passes ---------------------------------------------------------------------------

    def _padded_chunks(self, items: Iterable[T], width: Callable[[T], int]) -> Iterator[list[T]]:
        """Group rows by the number of tokens to run; a padded group fits ``max_batch_tokens``."""
        chunk: list[T] = []
        for item in sorted(items, key=width):  # stable: ties keep the order of arrival
            # Sorted upwards, so the newest row is the widest.
            if chunk and width(item) * (len(chunk) + 1) > self._max_batch_tokens:
                yield chunk
                chunk = []
            chunk.append(item)
        if chunk:
            yield chunk

    def _run_tails(self, chunk: list[_Tail]) -> list[NDArray[np.float64]]:
        """Run what the slots lack of some texts and score their tails."""
        suffixes = [tail.suffix for tail in chunk]
        found = tail_logps(
            self._model,
            self._cache,
            suffixes,
            [len(tail.session.cached) for tail in chunk],
            [tail.request.length for tail in chunk],
            torch.tensor([tail.session.slot for tail in chunk], device=self._device),
        )
        for tail, suffix in zip(chunk, suffixes, strict=True):
            tail.session.cached.extend(suffix)
            self._prefilled += len(suffix)
        return found

    def _extend(self, chunk: list[_Session]) -> list[Completion]:
        """Run the tokens of the prompts that the cache lacks and sample the first new token."""
        rows = torch.tensor([s.slot for s in chunk], device=self._device)
        logits = None
        while any(_missing(s) for s in chunk):  # twice or more only for a prompt above the budget
            logits = self._extend_once(chunk, rows)
        assert logits is not None, "every admitted session has a token to run"
        self._table.length[rows] = torch.tensor([len(s.cached) for s in chunk], device=self._device)
        return self._draw(chunk, rows, logits)

    def _extend_once(self, chunk: list[_Session], rows: Tensor) -> Tensor:
        widths = [min(_missing(s), self._max_batch_tokens) for s in chunk]
        ids = np.zeros((len(chunk), max(widths)), dtype=np.int64)
        starts = np.array([len(s.cached) for s in chunk])
        for row, (session, width) in enumerate(zip(chunk, widths, strict=True)):
            assert session.request is not None
            piece = session.request.prompt_ids[starts[row] : starts[row] + width]
            ids[row, :width] = piece
            session.cached.extend(piece)
        self._prefilled += sum(widths)
        columns = np.arange(ids.shape[1])
        last = torch.tensor(widths, device=self._device) - 1
        valid = columns[None] < np.array(widths)[:, None]
        return next_logits(
            self._model,
            self._cache,
            torch.from_numpy(ids).to(self._device),
            torch.from_numpy(starts[:, None] + columns[None]).to(self._device),
            rows,
            kv_len=max(len(s.cached) for s in chunk),
            valid=None if valid.all() else torch.from_numpy(valid).to(self._device),
            last=last,
        )

    def _decode(self) -> list[Completion]:
        """One token for every running game.

        Where at least half of the games run, the forward goes over all slots in place and the idle
        ones are thrown away: on a small model, copying the rows of the store costs more than
        running them.
        """
        running = self._running
        rows = torch.tensor([s.slot for s in running], device=self._device)
        taken = len(self._by_slot)
        whole = len(running) * 2 >= taken
        everyone = slice(0, taken)
        valid = None
        if whole and len(running) < taken:
            valid = torch.zeros(taken, 1, dtype=torch.bool, device=self._device)
            valid[rows] = True
        chosen = everyone if whole else rows
        logits = next_logits(
            self._model,
            self._cache,
            self._table.last[chosen][:, None],
            self._table.length[chosen][:, None],
            chosen,
            kv_len=max(len(s.cached) + s.sampled for s in running),
            valid=valid,
        )
        if valid is not None:
            logits = logits[rows]
        self._table.length[rows] += 1
        return self._draw(running, rows, logits)

    def _draw(self, sessions: list[_Session], rows: Tensor, logits: Tensor) -> list[Completion]:
        """Sample for these sessions; the only device synchronisation of a decoding step is here."""
        cut = any(s.request is not None and cuts_distribution(s.request.sampling) for s in sessions)
        done = self._table.draw(rows, logits, cut).tolist()
        for session in sessions:
            session.sampled += 1
        self._generated += len(sessions)
        ended = [s for s, over in zip(sessions, done, strict=True) if over]
        return self._complete(ended) if ended else []

    def _complete(self, ended: list[_Session]) -> list[Completion]:
        index = torch.tensor([s.slot for s in ended], device=self._device)
        width = max(s.sampled for s in ended)
        tokens = self._table.tokens[index, :width].tolist()
        logps = self._table.logps[index, :width].tolist()
        names = {s.name for s in ended}
        self._running = [s for s in self._running if s.name not in names]
        return [self._close(s, tokens[i], logps[i]) for i, s in enumerate(ended)]

    def _close(self, session: _Session, tokens: list[int], logps: list[float]) -> Completion:
        request, count = session.request, session.sampled
        assert request is not None
        tokens, logps = tokens[:count], logps[:count]
        session.request, session.sampled = None, 0
        # The last token was sampled but not run: it is the first one of the next turn's suffix.
        session.cached.extend(tokens[:-1])
        if not all(math.isfinite(value) for value in logps):
            return self._error(session.name, "the model's logits are not finite")
        stopped = tokens[-1] in request.sampling.stop_token_ids
        return Completion(
            session=session.name,
            token_ids=tuple(tokens),
            logprobs=tuple(logps),
            finish=FinishReason.STOP if stopped else FinishReason.LENGTH,
            adapter_version=self._version,
        )

    # -- slots ------------------------------------------------------------------------------------

    def _vacate(self, slot: int) -> None:
        """Free a slot; the last one moves into the hole."""
        moved = self._by_slot.pop()
        if moved.slot == slot:
            return
        cells = len(moved.cached) + moved.sampled
        for store in (self._cache.keys, self._cache.values):
            store[:, slot, :, :cells] = store[:, moved.slot, :, :cells]
        self._table.move(moved.slot, slot)
        moved.slot = slot
        self._by_slot[slot] = moved
        self._running.sort(key=lambda s: s.slot)

    def _allocate(self) -> None:
        self._cache = SlotCache.for_model(self._model, self._max_sequences, self._max_len)
        self._device = self._cache.device
        self._table = SlotTable(self._max_sequences, self._device)

    def _drop_sessions(self) -> None:
        self._sessions.clear()
        self._by_slot.clear()

    def _outstanding(self) -> int:
        return len(self._running) + len(self._waiting)

    def _error(self, session: str, reason: str) -> Completion:
        return Completion(session, (), (), FinishReason.ERROR, self._version, reason)

    def _require(self, state: EngineState) -> None:
        if self._state is not state:
            raise EngineStateError(f"the engine is {self._state.value}; it must be {state.value}")


def _missing(session: _Session) -> int:
    """Tokens of the prompt that the cache lacks."""
    request = session.request
    return len(request.prompt_ids) - len(session.cached) if request is not None else 0
