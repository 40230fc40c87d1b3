"""A language model as judge, whatever game it judges and whatever engine it runs on.

A reply is a function of the request alone: greedy decoding, or sampling from a stream that the
request names. Where a text gives no answer the reply is ``Verdict.ERROR`` with the reason and the
text. The pool then asks again, and since the same text would come again, a further attempt is
always sampled, from a stream of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from delta_belief_rl.engines.base import FinishReason, SamplingParams
from delta_belief_rl.engines.text_engine import TextCompletion, TextEngine, TextRequest
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.judge.parsing import UNRECOGNISED, ParserName
from delta_belief_rl.judge.prompts import JudgeMode
from delta_belief_rl.judge.scripts import JudgeScript, script_of
from delta_belief_rl.rollout.seeds import named_seed
from delta_belief_rl.types import Verdict

KEPT_CHARACTERS = 400
"""Of a text without an answer so much is kept, its end."""


@dataclass(frozen=True, slots=True)
class LlmJudgeSettings:
    """How a judge is asked and read.

    Attributes:
        mode: See ``prompts.JudgeMode``.
        with_history: Show the earlier questions of the game, with the judge's own answers.
        greedy: Take the most likely token in a first attempt; otherwise draw by ``sampling``.
        sampling: Of further attempts, and of all without ``greedy``.
        prompt_length: Most tokens of a prompt.
        response_length: Most tokens of an answer.
        parser: A name in ``parsing.PARSERS``.
        seed: Root of the random streams.
    """

    mode: JudgeMode = "cot"
    with_history: bool = True
    greedy: bool = True
    sampling: SamplingParams = field(
        default_factory=lambda: SamplingParams(temperature=0.7, top_p=0.8, top_k=20)
    )
    prompt_length: int = 1600
    response_length: int = 200
    parser: ParserName = "grammar"
    seed: int = 42


class LlmJudge:
    """Asks a text engine and reads what it writes."""

    def __init__(self, engine: TextEngine, settings: LlmJudgeSettings | None = None) -> None:
        self._engine = engine
        self._settings = settings or LlmJudgeSettings()

    def answer(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        """One reply for each request, in their order; equal prompts are answered once."""
        if not requests:
            return []
        prompts = [self._prompt(request) for request in requests]
        distinct = list(dict.fromkeys(prompts))
        began = time.perf_counter()
        completions = self._engine.generate(distinct)
        seconds = time.perf_counter() - began
        scripts = {
            prompt: script_of(req.task.source)
            for prompt, req in zip(prompts, requests, strict=True)
        }
        replies = {
            prompt: replace(
                self._reply(scripts[prompt], completion, seconds),
                tokens=completion.prompt_tokens + completion.sampled_tokens,
                cost=completion.cost,
                faults=completion.faults,
            )
            for prompt, completion in zip(distinct, completions, strict=True)
        }
        # The first of equal requests bears the cost.
        paid: set[TextRequest] = set()
        out: list[JudgeReply] = []
        for prompt in prompts:
            reply = replies[prompt]
            out.append(replace(reply, tokens=0, cost=0.0, faults=()) if prompt in paid else reply)
            paid.add(prompt)
        return out

    def _prompt(self, request: JudgeRequest) -> TextRequest:
        settings = self._settings
        drawn, limit = settings.sampling, settings.response_length
        greedy = settings.greedy and request.attempt == 0
        return TextRequest(
            messages=script_of(request.task.source).messages(
                request, settings.mode, settings.with_history
            ),
            seed=self._seed(request),
            sampling=SamplingParams(
                temperature=0.0 if greedy else drawn.temperature,
                top_p=1.0 if greedy else drawn.top_p,
                top_k=-1 if greedy else drawn.top_k,
                max_tokens=limit,
            ),
            max_prompt_tokens=settings.prompt_length,
        )

    def _seed(self, request: JudgeRequest) -> int:
        names: tuple[str, ...] = (request.key,)
        if not request.key:
            earlier = request.history if self._settings.with_history else ()
            said = [text for pair in earlier for text in pair]
            names = (request.task.source, request.task.secret, request.action, *said)
        return named_seed("judge", self._settings.seed, request.attempt, *names)

    def _reply(self, script: JudgeScript, completion: TextCompletion, seconds: float) -> JudgeReply:
        if completion.finish is FinishReason.ERROR:
            return JudgeReply(Verdict.ERROR, reason=completion.error, seconds=seconds)
        tagged, finished = self._settings.mode != "direct", completion.finish is FinishReason.STOP
        parse = script.parsers[self._settings.parser]
        parsed = parse(completion.text, tagged, finished)
        unread = parsed.verdict is Verdict.ERROR or parsed.reason == UNRECOGNISED
        return JudgeReply(
            parsed.verdict,
            text=_kept(completion.text) if unread else parsed.text or parsed.word,
            reason=parsed.reason,
            seconds=seconds,
            score=parsed.score,
        )


def _kept(text: str) -> str:
    """The end of a text on one line."""
    return " ".join(text.split())[-KEPT_CHARACTERS:] or "(nothing)"
