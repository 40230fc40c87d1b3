"""A character-level chat, a scripted environment and a scripted judge for rollout tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from delta_belief_rl.envs.base import Action, JudgeReply, JudgeRequest, Outcome
from delta_belief_rl.types import Message, Task, Verdict

EOT, START, HEADER = 1, 2, 3
OFFSET = 4
VOCAB = 128 + OFFSET


class CharChat:
    """One token per ASCII character, three special tokens before them."""

    eot_id = EOT

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(min(ord(c), 127) + OFFSET for c in text)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i - OFFSET) for i in ids if i >= OFFSET)

    def open_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        out: list[int] = []
        for message in messages:
            out += [START, *self.encode(message.content), EOT]
        return (*out, HEADER)

    def reply_ids(self, reply: str) -> tuple[int, ...]:
        return (START, *self.encode(reply), EOT, HEADER)


class ScriptedEnv:
    """Wins on the word "win"; empty text is invalid; everything else is for the judge."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.history: list[tuple[str, str]] = []

    def parse(self, text: str) -> Action:
        return Action(text, text.strip() or None)

    def judge_request(self, action: Action) -> JudgeRequest:
        return JudgeRequest(self.task, action.text, tuple(self.history))

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        if reply is None:
            return Outcome(Verdict.INVALID, "say something", done=False)
        if reply.verdict is Verdict.ERROR:
            return Outcome(Verdict.ERROR, "ask again", done=False)
        won = action.text == "win"
        self.history.append((action.text, reply.text))
        return Outcome(
            Verdict.WIN if won else reply.verdict,
            "finished" if won else reply.text,
            done=won,
            strict_win=won,
            compatible_win=won,
        )


class GradedEnv(ScriptedEnv):
    """Ends at the word "done" without a win, and grades what was done."""

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        if action.text == "done" and reply is not None:
            return Outcome(Verdict.OTHER, "over", done=True, score=reply.score)
        return super().apply(action, reply)


class HookedEnv(ScriptedEnv):
    """The same with the optional hooks."""

    def state_key(self) -> str:
        return f"after {len(self.history)}"

    def progress(self) -> float:
        return float(len(self.history))

    def action_key(self, text: str) -> str:
        return text.upper()


class ScriptedJudge:
    """Replies from a function, after a delay from another one."""

    def __init__(
        self,
        reply: Callable[[JudgeRequest], JudgeReply] | None = None,
        delay: Callable[[JudgeRequest], float] | None = None,
    ) -> None:
        self.requests: list[JudgeRequest] = []
        self._reply = reply or (lambda request: JudgeReply(Verdict.NO, "no"))
        self._delay = delay

    async def ask(self, request: JudgeRequest) -> JudgeReply:
        self.requests.append(request)
        if self._delay is not None:
            await asyncio.sleep(self._delay(request))
        return self._reply(request)


def make_task(name: str = "t0", secret: str = "cat") -> Task:
    return Task(name, "tw_q", secret, (Message("system", "Play."), Message("user", f"Go {name}.")))
