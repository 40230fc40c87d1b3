"""A policy that is asked in messages: a model behind an API plays.

The conversation of a game goes out as messages and every answer is played character for character.
Tokens are a matter of bookkeeping here: the text is encoded by the tokenizer of the run, so that
limits, statistics and files mean what they do elsewhere, and no log-probs are known. A call without
an answer ends its game with ``ENGINE_FAILED``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from delta_belief_rl.engines.api_answer import ApiAnswer
from delta_belief_rl.engines.api_client import ApiClient, ApiReply
from delta_belief_rl.engines.base import Completion, FinishReason, GenRequest
from delta_belief_rl.engines.pump import EngineFailure
from delta_belief_rl.rollout.game import GameParts, Move, respond
from delta_belief_rl.types import Message, Task

MAX_ERROR_RATE = 0.1
"""Share of games, not of calls: a failed call ends its game, and a game of many turns meets one
more often than a short one, so that those which remain are rather the ones that were won early."""
MIN_GAMES = 20
"""No verdict on the rate of failed games before so many have begun."""

EncodeTurn = Callable[[str], tuple[int, ...]]
"""An assistant's turn as ids, its end token included."""


class NoEngine:
    """Stands where engines do in a run whose policy is somebody else's."""

    async def generate(self, request: GenRequest) -> Completion:
        """There is nothing to sample from.

        Raises:
            EngineFailure: Always.
        """
        raise EngineFailure(f"no engine can answer {request.session!r}: the policy is an API's")

    async def release(self, session: str) -> None:
        """Nothing is kept of any game."""
        del session


class ApiPlayer:
    """The policy of all games of a run; counts what its calls come to.

    Args:
        client: Of the model.
        encode: See ``EncodeTurn``.
    """

    def __init__(self, client: ApiClient, encode: EncodeTurn) -> None:
        self._client = client
        self._encode = encode
        self._counts: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._seconds: list[float] = []

    def chooser(self, task: Task) -> ApiChooser:
        """What takes the turns of one game of a task."""
        self._counts["games"] += 1
        return ApiChooser(self, task)

    async def ask(self, messages: Sequence[Message], request: GenRequest) -> ApiReply:
        """One call; without an answer it is the last one of its game.

        Raises:
            EngineFailure: Too many games have ended so.
        """
        reply = await self._client.complete(messages, request.sampling, request.seed)
        counts, answer = self._counts, reply.answer
        counts["calls"] += 1
        self._faults.update(fault.value for fault in reply.faults)
        self._seconds.append(reply.seconds)
        if answer is not None:
            counts["tokens"] += answer.prompt_tokens + answer.sampled_tokens
            counts["nano_cost"] += round(answer.cost * 1e9)
            return reply
        counts["errors"] += 1
        games, errors = counts["games"], counts["errors"]
        if games >= MIN_GAMES and errors > MAX_ERROR_RATE * games:
            raise EngineFailure(
                f"{errors} of {games} games ended because the policy's API gave no answer, more "
                f"than the allowed {MAX_ERROR_RATE:.0%}; the last one: {reply.reason}"
            )
        return reply

    def completion(self, answer: ApiAnswer, session: str) -> Completion:
        """The answer in the form of sampled tokens.

        The end token follows where the model has ended its turn, and stands alone for an empty one.
        """
        ids = self._encode(answer.text)
        if answer.finish is FinishReason.LENGTH and len(ids) > 1:
            ids = ids[:-1]
        return Completion(session, ids, (), answer.finish, 0)

    def metrics(self) -> dict[str, float]:
        """Counts and latencies since the last call; they begin anew."""
        counts, faults, seconds = self._counts, self._faults, self._seconds
        self._counts, self._faults, self._seconds = Counter(), Counter(), []
        head = "val-aux/player/"
        out = {
            f"{head}calls": float(counts["calls"]),
            f"{head}errors": float(counts["errors"]),
            f"{head}tokens": float(counts["tokens"]),
            f"{head}cost": counts["nano_cost"] / 1e9,
            f"{head}api_faults": float(faults.total()),
            **{f"{head}api_faults/{kind}": float(n) for kind, n in sorted(faults.items())},
        }
        if seconds:
            p50, p95 = np.percentile(seconds, [50, 95])
            out["perf/val_player_latency_p50_s"] = float(p50)
            out["perf/val_player_latency_p95_s"] = float(p95)
        return out

    async def close(self) -> None:
        """End the connections."""
        await self._client.close()


class ApiChooser:
    """Takes the turns of one game; keeps its conversation."""

    def __init__(self, player: ApiPlayer, task: Task) -> None:
        self._player = player
        self._messages = list(task.messages)

    def sessions(self, session: str, /) -> tuple[str, ...]:
        """No engine knows of the game."""
        del session
        return ()

    async def move(self, parts: GameParts, request: GenRequest, index: int, /) -> Move | None:
        """Ask for one action and let the environment answer it."""
        del index
        clock = parts.settings.clock
        began = clock()
        reply = await self._player.ask(tuple(self._messages), request)
        engine_seconds = clock() - began
        answer = reply.answer
        if answer is None:
            return None
        text = answer.text
        began = clock()
        action, judged, outcome = await respond(parts.env, parts.judge, text)
        self._messages += [Message("assistant", text), Message("user", outcome.reply)]
        completion = self._player.completion(answer, request.session)
        return Move(completion, text, action, judged, outcome, engine_seconds, clock() - began)
