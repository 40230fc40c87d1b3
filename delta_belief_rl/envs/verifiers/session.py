"""One rollout of the library, played text by text.

The library's own loop runs as a coroutine; where it would call a model it waits for the agent's
text here. So set-up, stop conditions, scoring and clean-up are the library's.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from delta_belief_rl.envs.plugins import describe
from delta_belief_rl.envs.verifiers.library import seat_class, texts
from delta_belief_rl.envs.verifiers.loops import loop_thread
from delta_belief_rl.envs.verifiers.rubric import FAULTS
from delta_belief_rl.envs.verifiers.source import Source, added

Output = Mapping[str, Any]
REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Step:
    """What came of a text.

    Attributes:
        messages: Role and text of the environment's messages.
        output: The library's record of the game where it is over; None while it goes on.
        failure: Why the game cannot go on; empty where it can.
    """

    messages: tuple[tuple[str, str], ...] = ()
    output: Output | None = None
    failure: str = ""


class Desk:
    """Where the library's loop and the agent meet; lives on the event loop.

    Attributes:
        max_turns: Replies after which the game is over.
        conversation: The messages that the agent was last asked to go on from.
    """

    def __init__(self, source: Source, row: Mapping[str, Any], max_turns: int) -> None:
        self.max_turns = max_turns
        self.conversation: list[Any] = []
        self._source, self._row = source, row
        self._faults: list[str] = []
        self._task: asyncio.Task[Step] | None = None
        self._asked: asyncio.Future[tuple[tuple[str, str], ...]] | None = None
        self._said: asyncio.Future[str] | None = None

    async def ask(self, prompt: list[Any]) -> str:
        """The agent's next text, once it is there.

        Raises:
            ValueError: The conversation is not the one that the agent knows.
        """
        new = added(self.conversation, prompt)
        asked, self._said = self._asked, asyncio.get_running_loop().create_future()
        self.conversation = list(prompt)
        if asked is not None and not asked.done():
            asked.set_result(texts(new))
        text = await self._said
        self.conversation.append({"role": "assistant", "content": text})
        return text

    async def advance(self, text: str | None, timeout_s: float) -> Step:
        """Start the game where ``text`` is None, else say it; until the environment has replied."""
        self._asked = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = asyncio.create_task(self._play())
        elif text is not None and self._said is not None and not self._said.done():
            self._said.set_result(text)
        await asyncio.wait(
            {self._task, self._asked}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if self._task.done():
            return self._end(self._task)
        if self._asked.done():
            return Step(self._asked.result())
        self.leave()
        return Step(failure=f"no reply in {timeout_s:g} s")

    def leave(self) -> None:
        """End a game that is not played on."""
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[Step]) -> Step:
        if task.cancelled():
            return Step(failure="the environment cancelled its own game")
        error = task.exception()
        return task.result() if error is None else Step(failure=describe(error))

    async def _play(self) -> Step:
        FAULTS.set(self._faults)
        seat = seat_class()(self)
        run = self._source.env.run_rollout
        output: Output = await run(dict(self._row), seat, "agent", {})
        if output.get("error") is not None:
            return Step(failure=str(output["error"]["error_chain_repr"]))
        if output.get("stop_condition") == "timeout_reached":
            return Step(failure="the environment's own time for a game is over")
        if self._faults:
            return Step(failure="; ".join(dict.fromkeys(self._faults)))
        ended = texts(output.get("prompt")) + texts(output.get("completion"))
        return Step(ended[len(self.conversation) :], output)


class Session:
    """A game's side of the desk, for a caller outside of the event loop."""

    def __init__(
        self, source: Source, row: Mapping[str, Any], max_turns: int, timeout_s: float
    ) -> None:
        self._desk = Desk(source, row, max_turns)
        self._thread = loop_thread()
        self._timeout_s = timeout_s
        leave = weakref.finalize(self, _leave, self._desk, self._thread.loop)
        leave.atexit = False

    def say(self, text: str | None) -> Step:
        """Start the game (None) or make a move."""
        try:
            step = self._thread.call(self._desk.advance(text, self._timeout_s), self._timeout_s)
        except TimeoutError:
            step = Step(failure=f"no reply in {self._timeout_s:g} s, and its code does not await")
        return Step(step.messages, step.output, " ".join(step.failure.split())[:REASON_CHARACTERS])


def _leave(desk: Desk, loop: asyncio.AbstractEventLoop) -> None:
    loop.call_soon_threadsafe(desk.leave)
