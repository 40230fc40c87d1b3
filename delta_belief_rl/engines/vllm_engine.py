"""The policy on vLLM: token ids in, sampled ids and their log-probs out, one adapter by version.

vLLM runs in processes of its own. This class is the owner's side: it belongs to one event loop and
answers every request when it is done. What the adapter's version means is settled here:

* Each adapter that is loaded gets a name and a number that no other one ever had, because vLLM
  finds an adapter, and the cached keys that it made, by them. A second adapter under an old name
  would be answered from the first one's cache.
* A completion carries the version of the adapter that made all of its tokens: nothing is loaded
  while a request runs.
* After loading, the engine is asked what it holds: exactly one adapter, on exactly the modules of
  the trainer's.

Texts are scored alone: prompt log-probs of several adapter requests in one batch end vLLM's engine
process, and they neither wait for nor read what generation has cached.
"""

# vLLM is an extra.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import vllm
from numpy.typing import NDArray
from vllm import SamplingParams as VllmSampling
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from delta_belief_rl.engines.base import (
    AdapterState,
    Completion,
    EngineHealth,
    EngineState,
    EngineStateError,
    FinishReason,
    GenRequest,
    TailRequest,
)
from delta_belief_rl.engines.pump import EngineFailure, EngineLost
from delta_belief_rl.engines.vllm_args import (
    LoraShape,
    adapter_modules,
    before_import,
    check_modules,
    check_shape,
    check_vllm_version,
    engine_arguments,
    memory_folder,
    refusal,
    sampling_arguments,
    write_adapter,
)
from delta_belief_rl.engines.vllm_worker import OWNER
from delta_belief_rl.types import UserError

T = TypeVar("T")

VERSION: str = vllm.__version__
"""Of the installed vLLM."""

_LAST_MOMENT = 0.05
"""Seconds."""
_KEPT_REASON = 300
"""Characters of vLLM's own complaint."""

NAMES = {
    "actor_rollout_ref": "actor_rollout_ref.rollout.name",
    "judge_rollout": "judge_rollout.name",
}
"""Settings that choose the engine of a pool."""

FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class VllmEngine:
    """An asynchronous engine around one vLLM engine. Build it with ``start``."""

    def __init__(self, llm: AsyncLLM, lora: LoraShape | None, version: int) -> None:
        self._llm = llm
        self._lora = lora
        self._version = version
        self._adapter: LoRARequest | None = None
        self._state = EngineState.READY
        self._gate = Gate()
        self._adaptable: frozenset[str] = frozenset()
        self._numbers = count(1)
        self._ids = count()
        self._running: dict[str, str] = {}
        self._scoring = 0
        self._generated = 0
        self._prefilled = 0
        self._max_len = int(llm.model_config.max_model_len)
        self._vocab_size = int(llm.model_config.get_vocab_size())
        self._closed = False

    @classmethod
    async def start(
        cls, arguments: Mapping[str, object], *, lora: LoraShape | None = None, version: int = 0
    ) -> VllmEngine:
        """Start the engine's processes and load the model; takes a minute.

        Args:
            arguments: Names of vLLM's ``AsyncEngineArgs``; see ``vllm_args.engine_arguments``.
            lora: Of the adapters that will be loaded. Such an engine answers nothing before the
                first one is there: the first sync is the same as the n-th.
            version: Stamped on the completions of an engine without adapters.

        Raises:
            UserError: vLLM is too old or too new, an argument does not go with this engine, or
                vLLM does not start with it.
        """
        check_vllm_version(VERSION)
        settled = engine_arguments(arguments, lora)
        before_import()
        os.environ[OWNER] = str(os.getpid())
        try:
            args = AsyncEngineArgs(**settled)  # type: ignore[arg-type]
        except TypeError as error:
            raise UserError(f"vLLM {VERSION} does not take an argument: {error}.") from error
        try:
            llm = AsyncLLM.from_engine_args(args)
        except (ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:_KEPT_REASON].rstrip(".")
            raise UserError(
                f"vLLM {VERSION} did not start with {settled['model']!r} ({reason}): see its own "
                "messages above; where memory is short, lower rollout.gpu_memory_utilization or "
                "rollout.kv_cache_memory_bytes of its pool."
            ) from error
        engine = cls(llm, lora, version)
        (names, *_) = await engine._call(engine._llm.collective_rpc("policy_prepare"))
        engine._adaptable = frozenset(names)
        return engine

    # -- generation -------------------------------------------------------------------------------

    async def generate(self, request: GenRequest) -> Completion:
        """Wait for the completion of one request.

        A request that cannot be served is a completion with an error.

        Raises:
            EngineFailure: The engine's process is gone, or has failed at this request.
            EngineStateError: The engine sleeps, or its first adapter has not been loaded.
        """
        reason = refusal(request, self._max_len, self._vocab_size)
        if request.session in self._running:
            reason = "this session has a request in flight already"
        if reason:
            return self._error(request.session, reason)
        number = f"{request.session}#{next(self._ids)}"
        self._running[request.session] = number
        try:
            async with self._gate.shared():
                self._require_ready()
                params = VllmSampling(
                    **sampling_arguments(request), output_kind=RequestOutputKind.FINAL_ONLY
                )
                output = await self._call(self._last(request.prompt_ids, params, number))
                return self._completion(request.session, output)
        finally:
            self._running.pop(request.session, None)

    async def generate_all(self, requests: Sequence[GenRequest]) -> list[Completion]:
        """Wait for all completions, in the order of the requests; raises as ``generate``."""
        return list(await asyncio.gather(*(self.generate(request) for request in requests)))

    async def release(self, session: str) -> None:
        """Forget a game: a request of it that still runs ends with an error.

        Keys and values need no word: vLLM drops the least recently used ones by itself.
        """
        number = self._running.get(session)
        if number is not None:
            await self._call(self._llm.abort(number))

    # -- scores -----------------------------------------------------------------------------------

    async def score_all(self, requests: Sequence[TailRequest]) -> list[NDArray[np.float64]]:
        """Log-probs (nats, temperature 1) of each tail, ``[request.length]``; raises as ``score``.

        Every text is run as a whole, alone.
        """
        scores = await self.score([request.token_ids for request in requests])
        return [found[request.start :] for found, request in zip(scores, requests, strict=True)]

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """Log-probs (nats, temperature 1) of each token given those before; 0.0 at position 0.

        Waits until no request runs, and lets none begin meanwhile.

        Raises:
            ValueError: A text does not fit the engine.
            EngineFailure: The engine is gone, or left a position without a log-prob.
            EngineStateError: As ``generate``.
        """
        for ids in token_ids:
            if not 1 <= len(ids) < self._max_len:
                raise ValueError(f"a text of {len(ids)} tokens; 1 .. {self._max_len - 1} fit")
        self._scoring += len(token_ids)
        try:
            async with self._gate.alone():
                self._require_ready()
                return [await self._score_one(tuple(ids)) for ids in token_ids]
        finally:
            self._scoring -= len(token_ids)

    async def _score_one(self, ids: tuple[int, ...]) -> NDArray[np.float64]:
        params = VllmSampling(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._call(self._last(ids, params, f"score#{next(self._ids)}"))
        rows = list(output.prompt_logprobs or ())
        if len(rows) != len(ids) or rows[0] is not None or not all(rows[1:]):
            raise EngineFailure(f"vLLM gave {len(rows)} log-probs for a text of {len(ids)} tokens")
        values = [row[token].logprob for row, token in zip(rows[1:], ids[1:], strict=True)]
        return np.array([0.0, *values], dtype=np.float64)

    # -- adapters ---------------------------------------------------------------------------------

    async def load_adapter(self, state: AdapterState, version: int) -> None:
        """Take over adapter weights; the adapter before is gone, with everything cached.

        Args:
            state: Arrays by PEFT's names.
            version: Carried by every completion from now on.

        Raises:
            EngineStateError: The engine sleeps, requests are in flight, or it was started without
                adapters.
            UserError: The state matches no module, differs from the engine's modules, or has
                another rank. The adapter before is still in place then.
            EngineFailure: The engine is gone, or holds something else after loading.
        """
        self._require_state(EngineState.READY)
        if self._lora is None:
            raise EngineStateError("this engine was started without room for an adapter")
        if self.outstanding:
            raise EngineStateError(
                f"cannot load adapter version {version}: {self.outstanding} requests are in flight"
            )
        wanted = adapter_modules(state)
        check_shape(state, self._lora)
        check_modules(wanted, self._adaptable, "the engine's model")
        async with self._gate.alone():
            before, self._adapter = self._adapter, None
            with _private_folder() as folder:
                write_adapter(folder, state, self._lora)
                number = next(self._numbers)
                request = LoRARequest(f"policy-v{version}-{number}", number, str(folder))
                await self._call(self._llm.add_lora(request))
            if before is not None:
                await self._call(self._llm.remove_lora(before.lora_int_id))
            await self._call(self._llm.reset_prefix_cache())
            await self._check_loaded(number, wanted)
            self._adapter, self._version = request, version

    async def _check_loaded(self, number: int, wanted: frozenset[str]) -> None:
        """Ask every worker what it holds."""
        held = await self._call(self._llm.list_loras())
        if set(held) != {number}:
            raise EngineFailure(f"vLLM holds the adapters {sorted(held)} instead of {number} alone")
        rpc = self._llm.collective_rpc("policy_adapter_modules", args=(number,))
        for rank, names in enumerate(await self._call(rpc)):
            if set(names) != wanted:
                raise EngineFailure(
                    f"vLLM's worker {rank} put the adapter on {len(names)} modules instead of "
                    f"{len(wanted)}; they differ by {sorted(set(names) ^ wanted)[:3]}"
                )

    # -- states -----------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Give the memory of weights and cache back; the weights wait in the host's memory.

        This is vLLM's level 1. Level 2 throws the base weights away and is not offered.

        Raises:
            EngineStateError: The engine sleeps already, or requests are in flight.
            EngineFailure: The engine is gone.
        """
        self._require_state(EngineState.READY)
        if self.outstanding:
            raise EngineStateError(f"cannot sleep: {self.outstanding} requests are in flight")
        async with self._gate.alone():
            await self._call(self._llm.reset_prefix_cache())
            await self._call(self._llm.sleep(level=1))
            self._state = EngineState.ASLEEP

    async def wake(self) -> None:
        """Take the memory again.

        Raises:
            EngineStateError: The engine is awake.
            EngineFailure: The engine is gone.
        """
        self._require_state(EngineState.ASLEEP)
        async with self._gate.alone():
            await self._call(self._llm.wake_up())
            self._state = EngineState.READY

    def health(self) -> EngineHealth:
        """Counters and state; cheap, and allowed in every state."""
        return EngineHealth(
            alive=not (self._closed or self._llm.errored),
            adapter_version=self._version,
            state=self._state.value,
            outstanding=self.outstanding,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
        )

    async def memory(self) -> list[dict[str, int]]:
        """Bytes that each worker holds: ``weights``, ``cache``, and ``reserved`` at most."""
        return list(await self._call(self._llm.collective_rpc("policy_memory")))

    async def kernels(self) -> dict[str, dict[str, int]]:
        """Layers of the model by the kernel that they run, of the first worker."""
        (found, *_) = await self._call(self._llm.collective_rpc("policy_kernels"))
        return found

    @property
    def outstanding(self) -> int:
        """Requests and texts that wait for an answer."""
        return len(self._running) + self._scoring

    async def shutdown(self) -> None:
        """End the engine's processes; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._llm.shutdown()
            # vLLM's tasks have been cancelled and want a moment of the loop to end.
            await asyncio.sleep(_LAST_MOMENT)

    # -- inside -----------------------------------------------------------------------------------

    def _require_state(self, wanted: EngineState) -> None:
        if self._state is not wanted:
            raise EngineStateError(f"the engine is {self._state.value}, not {wanted.value}")

    def _require_ready(self) -> None:
        self._require_state(EngineState.READY)
        if self._lora is not None and self._adapter is None:
            raise EngineStateError("the engine has no adapter: load_adapter() comes first")

    async def _last(self, ids: tuple[int, ...], params: VllmSampling, number: str) -> Any:
        """The final output of one request to vLLM."""
        prompt: Any = {"prompt_token_ids": list(ids)}
        output = None
        async for found in self._llm.generate(prompt, params, number, lora_request=self._adapter):
            output = found
        if output is None:
            raise EngineFailure("vLLM ended a request without an answer")
        self._prefilled += len(ids) - (output.num_cached_tokens or 0)
        return output

    async def _call(self, work: Awaitable[T]) -> T:
        """Wait for vLLM; what it raises when it is gone becomes this package's error."""
        with _failures():
            return await work

    def _completion(self, session: str, output: Any) -> Completion:
        answer = output.outputs[0]
        ids = tuple(int(token) for token in answer.token_ids)
        finish = FINISH.get(answer.finish_reason or "", FinishReason.ERROR)
        if finish is FinishReason.ERROR:
            return self._error(session, f"vLLM ended the request: {answer.finish_reason}")
        rows = list(answer.logprobs or ())
        if len(rows) != len(ids):
            raise EngineFailure(f"vLLM gave {len(rows)} log-probs for {len(ids)} tokens")
        logprobs = tuple(float(row[token].logprob) for row, token in zip(rows, ids, strict=True))
        self._generated += len(ids)
        if not all(math.isfinite(value) for value in logprobs):
            return self._error(session, "a log-prob is not finite")
        return Completion(session, ids, logprobs, finish, self._version)

    def _error(self, session: str, reason: str) -> Completion:
        return Completion(session, (), (), FinishReason.ERROR, self._version, reason)


def option_names() -> frozenset[str]:
    """Names of the engine options that the installed vLLM knows."""
    return frozenset(field.name for field in dataclasses.fields(AsyncEngineArgs))


def check_platform(device: str, pool: str = "actor_rollout_ref") -> None:
    """Demand a vLLM that is built for ``cpu`` or ``cuda``.

    Raises:
        UserError: It is built for something else.
    """
    if current_platform.device_type != device:
        raise UserError(
            f"The installed vLLM runs on {current_platform.device_type or 'nothing here'}, "
            f"{pool} on {device}: install another build of it, or set "
            f"{NAMES[pool]}=hf."
        )


class Gate:
    """Lets many in together, or one alone; one who waits to be alone comes before newcomers."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._inside = 0
        self._waiting_alone = 0
        self._alone = False

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Be inside together with others."""
        async with self._changed:
            await self._changed.wait_for(lambda: not (self._alone or self._waiting_alone))
            self._inside += 1
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Be inside with nobody else."""
        async with self._changed:
            self._waiting_alone += 1
            try:
                await self._changed.wait_for(lambda: not (self._alone or self._inside))
            finally:
                self._waiting_alone -= 1
                self._changed.notify_all()
            self._alone = True
        try:
            yield
        finally:
            async with self._changed:
                self._alone = False
                self._changed.notify_all()


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (EngineDeadError, EngineGenerateError) as error:
        cause = error.__cause__ or error
        kind = EngineLost if isinstance(error, EngineDeadError) else EngineFailure
        raise kind(f"vLLM failed: {type(cause).__name__}: {cause}") from error


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder for the length of the block, in memory where there is a place for it."""
    folder = Path(tempfile.mkdtemp(prefix="dbrl-adapter-", dir=memory_folder()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
