"""What a model believes in the course of given conversations, whoever had them.

Three measures, after ``t = 0 .. k`` exchanges:

``logprob``      log-probability of the answer inside the fixed guess (``belief.elicit``), all
                 ``k + 1`` in one pass (``belief.branched``)
``confidence``   the probability that the model states when it is asked for one
``accuracy``     whether the model names the answer when it is asked for it, decoded greedily

The stated ones are asked in the place of the environment: the request follows the last message, and
what the model says is not kept in the conversation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from delta_belief_rl.belief.branched import ScoreRequest, score_beliefs
from delta_belief_rl.belief.elicit import Aggregate, Elicitation, elicitor
from delta_belief_rl.belief.stated import (
    ANSWER_REQUEST,
    CONFIDENCE_REQUEST,
    NoProbability,
    names_secret,
    parse_probability,
)
from delta_belief_rl.engines.base import Completion, FinishReason, GenRequest, SamplingParams
from delta_belief_rl.engines.hf_engine import HFEngine
from delta_belief_rl.eval.conversations import Conversation
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.types import Message, UserError

METHODS = ("logprob", "confidence", "accuracy")
CHUNK = 64
"""Conversations that are measured together, and after which rows come out."""


@dataclass(frozen=True, slots=True)
class BeliefOptions:
    """What is measured.

    Attributes:
        methods: Some of ``METHODS``.
        every: Stated beliefs are asked after so many exchanges, at the start and at the end.
        agg: ``sum`` or ``mean`` over the answer's tokens.
        max_tokens: Token budget of one scoring pass.
        answer_tokens: Longest statement.
        sequences: Statements that are decoded side by side.
    """

    methods: tuple[str, ...] = ("logprob",)
    every: int = 1
    agg: Aggregate = "sum"
    max_tokens: int = 16384
    answer_tokens: int = 24
    sequences: int = 16


@dataclass(frozen=True, slots=True)
class BeliefRow:
    """What was measured on one conversation.

    Attributes:
        log_probs: ``k + 1`` values in nats; empty when they were not asked for.
        asked: Exchanges after which the model was asked to state something.
        confidence: A probability or why there is none, one for each of ``asked``.
        confidence_texts: What the model said.
        answers: The answers that the model named, one for each of ``asked``.
        right: Whether each of them is the answer.
    """

    conversation: Conversation
    log_probs: tuple[float, ...] = ()
    asked: tuple[int, ...] = ()
    confidence: tuple[float | NoProbability, ...] = ()
    confidence_texts: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    right: tuple[bool, ...] = ()

    def diffs(self) -> tuple[float, ...]:
        """Change of the log-probability by each exchange, ``k`` values in nats."""
        return tuple(np.diff(self.log_probs).tolist()) if self.log_probs else ()

    def to_json(self) -> dict[str, Any]:
        """One line of ``belief_logprob.jsonl``: the published fields, then ours.

        What was not measured or is not known leaves no field.
        """
        talk = self.conversation
        missing = [c.value if isinstance(c, NoProbability) else None for c in self.confidence]
        fields: dict[str, Any] = {
            "ground_truth": talk.secret,
            "log_prob_reward": list(self.log_probs),
            "diff_logprob": list(self.diffs()),
            "game_status": None if talk.won is None else int(talk.won),
            "messages": [message.as_dict() for message in talk.messages()],
            "confidence": [None if isinstance(c, NoProbability) else c for c in self.confidence],
            "strict_status": None if talk.strict is None else int(talk.strict),
            "asked_after": list(self.asked),
            "confidence_missing": missing,
            "confidence_texts": list(self.confidence_texts),
            "answers": list(self.answers),
            "accuracy": [int(right) for right in self.right],
            "file": talk.file,
            "line": talk.line,
        }
        return {name: value for name, value in fields.items() if value not in (None, [])}


@dataclass(slots=True)
class Measured:
    """How far a measurement is.

    Attributes:
        done: Conversations measured.
        skipped: Conversations that could not be, by reason.
        first_skipped: One sentence on the first of them.
    """

    done: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    first_skipped: str = ""

    def skip(self, talk: Conversation, reason: str, detail: str) -> None:
        """Count a conversation that cannot be measured."""
        self.skipped[reason] += 1
        self.first_skipped = self.first_skipped or f"{talk.file}, line {talk.line}: {detail}"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as a token stream.

    Attributes:
        points: ``k + 1`` prefix lengths at which the agent would speak.
        before_reply: ``k`` prefix lengths that end with the agent's own message.
    """

    token_ids: tuple[int, ...]
    points: tuple[int, ...]
    before_reply: tuple[int, ...]


def render(chat: ChatFormat, talk: Conversation) -> Rendered:
    """The token stream of a conversation, built as a game builds it."""
    ids = list(chat.open_ids(talk.opening))
    points, before = [len(ids)], list[int]()
    for said, reply in talk.exchanges:
        ids += chat.assistant_ids(said)
        before.append(len(ids))
        ids += chat.reply_ids(reply)
        points.append(len(ids))
    return Rendered(tuple(ids), tuple(points), tuple(before))


def turns_asked(num_turns: int, every: int) -> tuple[int, ...]:
    """Exchanges after which statements are asked for: 0, ``every``, ... and the last.

    Example:
        >>> turns_asked(5, 2)
        (0, 2, 4, 5)
    """
    return tuple(sorted({*range(0, num_turns + 1, every), num_turns}))


def measure(
    model: Any,
    chat: ChatFormat,
    conversations: Sequence[Conversation],
    options: BeliefOptions,
    state: Measured | None = None,
) -> Iterator[BeliefRow]:
    """Measure conversations, in their order; those that cannot be measured are counted.

    Args:
        model: A causal model, perhaps with an adapter.
        chat: Its chat format.
        conversations: Of any lengths.
        options: What is measured.
        state: Takes the counts.

    Raises:
        UserError: An option is unusable.
    """
    unknown = [name for name in options.methods if name not in METHODS]
    if unknown or not options.methods:
        named = repr(unknown[0]) if unknown else "nothing"
        raise UserError(f"The method is {named}: choose among {', '.join(METHODS)}.")
    if options.every < 1:
        raise UserError(f"Statements every {options.every} exchanges: choose at least 1.")
    counts = state if state is not None else Measured()
    elicit = elicitor(chat, agg=options.agg)
    for start in range(0, len(conversations), CHUNK):
        part = [
            (talk, stream, guess)
            for talk in conversations[start : start + CHUNK]
            for stream, guess in _fitting(model, chat, talk, elicit, options, counts)
        ]
        rows = [BeliefRow(talk) for talk, _, _ in part]
        if "logprob" in options.methods:
            nothing = np.zeros(0, dtype=np.int64)
            games = [ScoreRequest(s.token_ids, nothing, guess, s.points) for _, s, guess in part]
            beliefs = score_beliefs(model, games, options.max_tokens)
            rows = [
                replace(row, log_probs=tuple(belief.tolist()))
                for row, belief in zip(rows, beliefs, strict=True)
            ]
        if set(options.methods) & {"confidence", "accuracy"}:
            streams = [stream for _, stream, _ in part]
            rows = _stated(model, chat, rows, streams, options)
        counts.done += len(rows)
        yield from rows


def _fitting(
    model: Any,
    chat: ChatFormat,
    talk: Conversation,
    elicit: Callable[[str], Elicitation],
    options: BeliefOptions,
    counts: Measured,
) -> Iterator[tuple[Rendered, Elicitation]]:
    """The conversation's stream and guess, if the model can read them; else it is counted."""
    try:
        guess, stream = elicit(talk.secret), render(chat, talk)
    except UserError as error:
        counts.skip(talk, "not expressible", str(error))
        return
    room = int(getattr(model.config, "max_position_embeddings", 0) or 0)
    longest = len(stream.token_ids) + max(len(guess.token_ids), _request_tokens(chat, talk))
    if room and longest + options.answer_tokens > room:
        detail = f"{longest + options.answer_tokens} tokens are more than the model's {room}"
        counts.skip(talk, "too long", detail)
        return
    yield stream, guess


def _request_tokens(chat: ChatFormat, talk: Conversation) -> int:
    texts = (CONFIDENCE_REQUEST.format(secret=talk.secret), ANSWER_REQUEST)
    return max(len(chat.reply_ids(text)) for text in texts)


# ------------------------------------------------------------------------------- stated beliefs


def _stated(
    model: Any,
    chat: ChatFormat,
    rows: Sequence[BeliefRow],
    streams: Sequence[Rendered],
    options: BeliefOptions,
) -> list[BeliefRow]:
    """The rows with what the model states about each conversation."""
    asked = [turns_asked(row.conversation.num_turns, options.every) for row in rows]
    out = [replace(row, asked=turns) for row, turns in zip(rows, asked, strict=True)]
    for method, request in (("confidence", CONFIDENCE_REQUEST), ("accuracy", ANSWER_REQUEST)):
        if method not in options.methods:
            continue
        prompts = [
            prompt_ids(chat, row.conversation, stream, turn, request)
            for row, stream in zip(out, streams, strict=True)
            for turn in row.asked
        ]
        texts = iter(greedy_texts(model, chat, prompts, options.answer_tokens, options.sequences))
        said = [tuple(next(texts) for _ in row.asked) for row in out]
        fill = _with_confidence if method == "confidence" else _with_answers
        out = [fill(row, words) for row, words in zip(out, said, strict=True)]
    return out


def _with_confidence(row: BeliefRow, said: tuple[str, ...]) -> BeliefRow:
    stated = tuple(parse_probability(text) for text in said)
    return replace(row, confidence=stated, confidence_texts=said)


def _with_answers(row: BeliefRow, said: tuple[str, ...]) -> BeliefRow:
    talk = row.conversation
    right = tuple(names_secret(text, talk.secret, talk.aliases) for text in said)
    return replace(row, answers=said, right=right)


def prompt_ids(
    chat: ChatFormat, talk: Conversation, stream: Rendered, turn: int, request: str
) -> tuple[int, ...]:
    """The conversation up to an exchange, with a request behind its last message.

    Args:
        chat: The chat format.
        talk: The conversation.
        stream: The same, rendered.
        turn: Exchanges that have taken place.
        request: May hold ``{secret}``.
    """
    text = request.replace("{secret}", talk.secret)
    if turn:
        reply = talk.exchanges[turn - 1][1]
        head = stream.token_ids[: stream.before_reply[turn - 1]]
        return (*head, *chat.reply_ids(f"{reply}\n\n{text}"))
    *earlier, last = talk.opening or (Message("user", ""),)
    if last.role == "user":
        joined = Message("user", f"{last.content}\n\n{text}" if last.content else text)
        return chat.open_ids([*earlier, joined])
    return chat.open_ids([*earlier, last, Message("user", text)])


def greedy_texts(
    model: Any,
    chat: ChatFormat,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    sequences: int = 16,
) -> list[str]:
    """The greedy continuation of each prompt as text, in the order of the prompts.

    Raises:
        RuntimeError: The engine could not serve a prompt.
    """
    if not prompts:
        return []
    longest = max(len(prompt) for prompt in prompts) + max_tokens
    engine = HFEngine(model, max_sequences=min(sequences, len(prompts)), max_len=longest)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=(chat.eot_id,))
    waiting = [GenRequest(str(i), prompt, 0, sampling) for i, prompt in enumerate(prompts)]
    done: dict[str, Completion] = {}
    while len(done) < len(prompts):
        finished = engine.step(waiting)
        waiting = []
        if not finished:
            raise RuntimeError(f"the engine stopped with {len(prompts) - len(done)} prompts left")
        engine.release([completion.session for completion in finished])
        done.update((completion.session, completion) for completion in finished)
    return [_text(chat, done[str(i)]) for i in range(len(prompts))]


def _text(chat: ChatFormat, completion: Completion) -> str:
    if completion.finish is FinishReason.ERROR:
        raise RuntimeError(f"a prompt could not be continued: {completion.error}")
    ids = completion.token_ids
    return chat.decode(ids[:-1] if ids and ids[-1] == chat.eot_id else ids)


def probability(log_prob: float) -> float:
    """A log-probability in nats as a probability."""
    return math.exp(min(log_prob, 0.0))
