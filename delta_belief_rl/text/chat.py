"""Chat templates rendered incrementally: a game's token stream grows by appending.

A conversation starts with ``open_ids``. The engine appends the ids it sampled, the end-of-turn id
included; the environment's reply is appended with ``reply_ids``. What surrounds a reply is read
once off the tokenizer's own template, by rendering a conversation of sentinels. Text of users and
environments never becomes a control token, whatever it contains. A format belongs to one thread, as
its tokenizer does.

Where a stream built this way differs from rendering all messages at once, ``ChatFormat.difference``
says so. The usual cause is a template that drops thinking blocks from earlier turns: the stream
keeps what the model really saw. ``thinking_history="strip"`` leaves the *empty* block of a
non-thinking model's header out everywhere instead, so that history and header agree. Sampled
thoughts are always kept, because without them a stream would not grow by appending; together with
``enable_thinking`` the policy ``strip`` is refused.

A message that is scored and not sampled stands outside of any thought: ``no_thought`` is what a
thinking model's header lacks of the empty block that its template puts before a last answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, cast

from jinja2.exceptions import TemplateError

from delta_belief_rl.types import Message, UserError

if TYPE_CHECKING:
    # A judge that asks no model loads no model library.
    from transformers import PreTrainedTokenizerBase

ThinkingHistory = Literal["keep", "strip"]

_CACHED_TEXTS = 1 << 16
"""Replies and questions recur all the time; tokenising them anew costs more than a small model."""
_CACHED_CHARACTERS, _CACHED_IDS = 2_000, 200
"""Longer texts, such as prompts of a judge with its rules and a history, hardly ever recur."""

_EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*$")
_REST_OF_THINKING = re.compile(r"(?:<think>)?\s*</think>\s*")
"""An empty block, or what follows a header that opens one."""
# Letters only: a template may trim or split at anything else.
_USER, _ASSISTANT, _REPLY = "QZUSERZQ", "QZASSISTANTZQ", "QZREPLYZQ"


@dataclass(frozen=True, eq=False)
class ChatFormat:
    """How one model's conversations become tokens. Build it with ``from_tokenizer``.

    Attributes:
        tokenizer: The model's tokenizer.
        template_kwargs: What the template is rendered with, e.g. ``{"enable_thinking": False}``.
        thinking_history: See the module's head.
        eot_id: The token that ends an assistant's turn; the sampler stops at it and it is trained.
        before_reply: Template text between the end-of-turn token and a reply's content.
        after_reply: Template text between a reply's content and the next sampled token.
        assistant_prefix: White space that the template puts between header and content; the model
            samples it.
        assistant_suffix: The same between content and end-of-turn token.
        trims: The template removes white space around a message.
        special: Matches the text of any control token.
        no_thought: Template text between the header and a message that has no thought; empty where
            the header closes its block itself, and for models that do not think.
        difference: Empty when an incrementally built conversation equals the full render; else one
            sentence.
    """

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any]
    thinking_history: ThinkingHistory
    eot_id: int
    before_reply: str
    after_reply: str
    assistant_prefix: str
    assistant_suffix: str
    trims: bool
    special: re.Pattern[str]
    no_thought: str = ""
    difference: str = ""

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        thinking_history: ThinkingHistory = "keep",
    ) -> ChatFormat:
        """Read the format off the tokenizer's chat template.

        Raises:
            UserError: There is no template, it cannot render alternating messages, it ends an
                assistant's turn with no special token, or sampled thoughts would be stripped.
        """
        if thinking_history not in ("keep", "strip"):
            raise UserError(
                f"thinking_history must be 'keep' or 'strip', not {thinking_history!r}."
            )
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "The tokenizer has no chat template: use an instruction-tuned model or put a "
                "chat_template.jinja beside its tokenizer."
            )
        kwargs = dict(chat_template_kwargs or {})
        if thinking_history == "strip" and kwargs.get("enable_thinking"):
            raise UserError(
                "thinking_history='strip' takes sampled thoughts out of later prompts, so a game "
                "would be no single stream of tokens: use 'keep', or enable_thinking=false."
            )
        if not tokenizer.is_fast:
            raise UserError(
                "The tokenizer gives no character offsets: use a model with a tokenizer.json."
            )
        parts = _read_template(tokenizer, kwargs)
        after = parts.after_reply
        if thinking_history == "strip":
            after = _EMPTY_THINKING.sub("", after)
        draft = cls(
            tokenizer=tokenizer,
            template_kwargs=kwargs,
            thinking_history=thinking_history,
            eot_id=parts.eot_id,
            before_reply=parts.before_reply,
            after_reply=after,
            assistant_prefix=parts.assistant_prefix,
            assistant_suffix=parts.assistant_suffix,
            trims=parts.trims,
            special=_special_pattern(tokenizer),
            no_thought=_no_thought(tokenizer, kwargs) if thinking_history == "keep" else "",
        )
        return replace(draft, difference=_difference(draft))

    def open_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The opening messages and the header of the assistant's first turn.

        Raises:
            UserError: The template refuses these messages.
        """
        contents = [message.content for message in messages]
        if not any(self.special.search(content) for content in contents):
            text = _render(self.tokenizer, messages, self.template_kwargs, header=True)
            return _plain_ids(self.tokenizer, self._header(text), split_special=False)
        names = [f"QZPART{i:04d}ZQ" for i in range(len(messages))]
        named = [Message(m.role, name) for m, name in zip(messages, names, strict=True)]
        text = self._header(_render(self.tokenizer, named, self.template_kwargs, header=True))
        pieces = re.split("(" + "|".join(names) + ")", text)
        content_of = dict(zip(names, contents, strict=True))
        return self._join(
            [(content_of[p], True) if p in content_of else (p, False) for p in pieces]
        )

    def reply_ids(self, reply: str) -> tuple[int, ...]:
        """Everything between the sampled end-of-turn token and the next sampled token."""
        return self._join([(self.before_reply, False), (reply, True), (self.after_reply, False)])

    def assistant_ids(self, text: str) -> tuple[int, ...]:
        """What an assistant's turn with this text would be as sampled ids, with the end token."""
        return (*self.encode(self.assistant_text(text)), self.eot_id)

    def assistant_text(self, text: str) -> str:
        """The text between an assistant's header and its end-of-turn token."""
        return self.assistant_prefix + text + self.assistant_suffix

    @property
    def no_thought_ids(self) -> tuple[int, ...]:
        """``no_thought`` as tokens."""
        return _plain_ids(self.tokenizer, self.no_thought, split_special=False)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text: no control tokens, no truncation, nothing added."""
        return _plain_ids(self.tokenizer, text, split_special=True)

    def encode_with_offsets(self, text: str) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Like ``encode``, with the range of characters ``[start, end)`` of each token."""
        out = self.tokenizer(
            text,
            add_special_tokens=False,
            truncation=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
        )
        ids = cast(list[int], out["input_ids"])
        offsets = cast(list[tuple[int, int]], out["offset_mapping"])
        return tuple(ids), tuple((int(a), int(b)) for a, b in offsets)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids without control tokens, as the environment reads it."""
        return self._decode(ids, skip=True)

    def decode_exact(self, ids: Sequence[int]) -> str:
        """Text with control tokens, for people and for checks."""
        return self._decode(ids, skip=False)

    def _decode(self, ids: Sequence[int], skip: bool) -> str:
        return _text_of(self.tokenizer, tuple(ids), skip)

    def _header(self, text: str) -> str:
        return _EMPTY_THINKING.sub("", text) if self.thinking_history == "strip" else text

    def _join(self, pieces: Sequence[tuple[str, bool]]) -> tuple[int, ...]:
        """Ids of template text and content in turn; ``True`` marks content.

        Content is encoded together with the template text next to it, up to the nearest control
        token, so that merges across the border are those of the full render.
        """
        ids: list[int] = []
        run = ""
        for text, is_content in pieces:
            if is_content:
                run += text.strip() if self.trims else text
                continue
            for part in self.special.split(text):
                if self.special.fullmatch(part):
                    ids.extend(self.encode(run) if run else ())
                    run = ""
                    ids.extend(_plain_ids(self.tokenizer, part, split_special=False))
                else:
                    run += part
        ids.extend(self.encode(run) if run else ())
        return tuple(ids)


@dataclass(frozen=True, slots=True)
class _Template:
    eot_id: int
    before_reply: str
    after_reply: str
    assistant_prefix: str
    assistant_suffix: str
    trims: bool


def _read_template(tokenizer: Any, kwargs: Mapping[str, Any]) -> _Template:
    """Render sentinels and cut the text at them."""
    messages = [Message("user", _USER), Message("assistant", _ASSISTANT), Message("user", _REPLY)]
    with_header = _render(tokenizer, messages, kwargs, header=True)
    without = _render(tokenizer, messages, kwargs, header=False)
    if any(with_header.count(name) != 1 for name in (_USER, _ASSISTANT, _REPLY)):
        raise UserError(
            "The chat template does not show every message exactly once: use a template that "
            "renders alternating user and assistant messages."
        )
    before_answer, rest = with_header.split(_ASSISTANT)
    middle, after_reply = rest.split(_REPLY)
    end = _special_pattern(tokenizer).search(middle)
    if end is None:
        raise UserError(
            "The chat template ends an assistant's turn with no special token, so a turn's end "
            "cannot be sampled: use a template with an end-of-turn token."
        )
    eot_id = int(tokenizer.convert_tokens_to_ids(end.group()))
    plain_tail = without.split(_REPLY)[1]
    header = after_reply[len(plain_tail) :] if after_reply.startswith(plain_tail) else after_reply
    header = _EMPTY_THINKING.sub("", header)
    answer_header = before_answer.split(_USER)[1]
    prefix = (
        answer_header.rpartition(header)[2] if header else answer_header.removeprefix(plain_tail)
    )
    return _Template(
        eot_id=eot_id,
        before_reply=middle[end.end() :],
        after_reply=after_reply,
        assistant_prefix=prefix if prefix.isspace() else "",
        assistant_suffix=middle[: end.start()],
        trims=_is_trimmed(tokenizer, kwargs),
    )


def _no_thought(tokenizer: Any, kwargs: Mapping[str, Any]) -> str:
    """Compare the header of a turn with how the template renders a last answer."""
    if "</think>" not in str(tokenizer.chat_template):
        return ""
    messages = [Message("user", _USER), Message("assistant", _ASSISTANT)]
    header = _render(tokenizer, messages[:1], kwargs, header=True).rpartition(_USER)[2]
    answer = _render(tokenizer, messages, kwargs, header=False).rpartition(_USER)[2]
    rest = answer.partition(_ASSISTANT)[0]
    rest = rest.removeprefix(header) if rest.startswith(header) else ""
    return rest if _REST_OF_THINKING.fullmatch(rest) else ""


def _is_trimmed(tokenizer: Any, kwargs: Mapping[str, Any]) -> bool:
    """A tab is removed by trimming, and no template puts one beside a message."""
    padded = [Message("user", f"\t{_USER}\t")]
    return f"\t{_USER}\t" not in _render(tokenizer, padded, kwargs, header=False)


def _difference(chat: ChatFormat) -> str:
    """Compare a conversation built step by step with its full render."""
    thought = "<think>\nHm.\n</think>\n\n" if chat.template_kwargs.get("enable_thinking") else ""
    asked = [thought + text for text in ("Is it alive?", "Is it made of wood?")]
    texts = ("Think of a thing.", asked[0], "No.", asked[1], "Yes, it is.")
    roles = ("user", "assistant", "user", "assistant", "user")
    messages = [Message(role, text) for role, text in zip(roles, texts, strict=True)]
    stream = chat.open_ids(messages[:1])
    for message in messages[1:]:
        ids = chat.assistant_ids if message.role == "assistant" else chat.reply_ids
        stream += ids(message.content)
    text = _render(chat.tokenizer, messages, chat.template_kwargs, header=True)
    if chat.thinking_history == "strip":
        text = _EMPTY_THINKING.sub("", text)
    full = _plain_ids(chat.tokenizer, text, split_special=False)
    if stream == full:
        return ""
    at = next(
        (i for i, pair in enumerate(zip(stream, full, strict=False)) if pair[0] != pair[1]),
        min(len(stream), len(full)),
    )
    here, there = (chat.decode_exact(ids[at : at + 6]) for ids in (stream, full))
    return (
        f"A conversation built turn by turn has {here!r} where rendering it at once has {there!r} "
        f"(token {at}); the stream that the model saw is kept."
    )


def _render(
    tokenizer: Any,
    messages: Sequence[Message],
    kwargs: Mapping[str, Any],
    header: bool,
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            [message.as_dict() for message in messages],
            tokenize=False,
            add_generation_prompt=header,
            **kwargs,
        )
    except (TemplateError, ValueError, TypeError) as error:
        roles = ", ".join(message.role for message in messages)
        raise UserError(
            f"The chat template cannot render the roles {roles} ({error}): use a template that "
            "takes them or drop the system message."
        ) from error
    return str(text)


def _plain_ids(tokenizer: Any, text: str, split_special: bool) -> tuple[int, ...]:
    encode = _encoded if len(text) <= _CACHED_CHARACTERS else _encoded.__wrapped__
    return encode(tokenizer, text, split_special)


def _text_of(tokenizer: Any, ids: tuple[int, ...], skip: bool) -> str:
    decode = _decoded if len(ids) <= _CACHED_IDS else _decoded.__wrapped__
    return decode(tokenizer, ids, skip)


@lru_cache(maxsize=_CACHED_TEXTS)
def _encoded(tokenizer: Any, text: str, split_special: bool) -> tuple[int, ...]:
    ids = tokenizer.encode(
        text, add_special_tokens=False, truncation=False, split_special_tokens=split_special
    )
    return tuple(cast("list[int]", ids))


@lru_cache(maxsize=_CACHED_TEXTS)
def _decoded(tokenizer: Any, ids: tuple[int, ...], skip: bool) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    )


def _special_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Matches any control token's text; one capturing group, for ``split``."""
    names: set[str] = set(tokenizer.all_special_tokens)
    names.update(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
    ordered = sorted((name for name in names if name), key=len, reverse=True)
    # The empty negative look-ahead never matches.
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")" if ordered else r"((?!))")
