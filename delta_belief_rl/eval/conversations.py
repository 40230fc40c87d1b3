"""Stored conversations as messages, so that any model can be asked about them.

A line of a file may have one of four forms; the first field found decides:

================  ================================================================================
``turns``         this project's files: opening messages from ``task``, then actions and replies
``history``       evaluation runs of the published code: all messages, padding among them
``messages``      a plain list of messages, with the answer in ``ground_truth`` (or ``secret``)
``output``        published files and light copies of ours: the conversation as text; the opening
                  is the text of ``input``, where it is kept
================  ================================================================================

A line that cannot be trusted is skipped under its number, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_belief_rl.rollout.store import DamagedLine, read_rows
from delta_belief_rl.types import Message, UserError

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One game, or any other talk in which an agent looks for an answer.

    Attributes:
        file, line: Where it stands; lines count from 1.
        secret: The answer.
        opening: Messages before the agent's first one.
        exchanges: What the agent said and what it was told, in order.
        won: Outcome by the compatible rule; None where the line does not say.
        strict: Outcome by the strict rule; None where the line does not say.
        aliases: Other names of the answer.
    """

    file: str
    line: int
    secret: str
    opening: tuple[Message, ...]
    exchanges: tuple[tuple[str, str], ...]
    won: bool | None = None
    strict: bool | None = None
    aliases: tuple[str, ...] = ()

    @property
    def num_turns(self) -> int:
        """``k``, exchanges."""
        return len(self.exchanges)

    def messages(self) -> tuple[Message, ...]:
        """The whole conversation in order."""
        talk = [
            message
            for said, reply in self.exchanges
            for message in (Message("assistant", said), Message("user", reply))
        ]
        return (*self.opening, *talk)


@dataclass(frozen=True, slots=True)
class ConversationFile:
    """The conversations of a file in its order.

    Attributes:
        damaged: Lines that were skipped.
        bare: Conversations whose line holds no opening; they got the one that was handed in.
    """

    path: Path
    conversations: tuple[Conversation, ...]
    damaged: tuple[DamagedLine, ...]
    bare: int


class _Damage(ValueError):
    """Why a row is no conversation."""


def read_conversations(
    path: str | os.PathLike[str], default_opening: Sequence[Message]
) -> ConversationFile:
    """Read a file, ``.jsonl`` or ``.jsonl.gz``; forms may be mixed.

    Args:
        path: The file.
        default_opening: Opening of conversations that are stored without one.

    Raises:
        UserError: There is no such file, or no line of it is a conversation.
    """
    report = read_rows(path)
    found: list[Conversation] = []
    damaged = list(report.damaged)
    bare = 0
    for number, row in zip(report.numbers, report.rows, strict=True):
        try:
            conversation, is_bare = _conversation(row, str(path), number, tuple(default_opening))
        except _Damage as problem:
            damaged.append(DamagedLine(number, str(problem)))
        else:
            found.append(conversation)
            bare += is_bare
    damaged.sort(key=lambda line: line.number)
    if not found:
        first = "".join(f" (line {line.number}: {line.reason})" for line in damaged[:1])
        raise UserError(
            f"{path} holds no conversation{first}: name a file of games, or of objects with "
            "messages and ground_truth."
        )
    return ConversationFile(Path(path), tuple(found), tuple(damaged), bare)


def _conversation(
    row: Mapping[str, Any], file: str, line: int, default: tuple[Message, ...]
) -> tuple[Conversation, bool]:
    secret = row.get("ground_truth", row.get("secret"))
    if not isinstance(secret, str) or not secret.strip():
        raise _Damage("there is neither ground_truth nor secret")
    aliases: tuple[str, ...] = ()
    if "turns" in row:
        opening, talk, aliases = _own(row)
    elif "history" in row or "messages" in row:
        name = "history" if "history" in row else "messages"
        opening, talk = _split(_messages(_list(row, name), name, padded=name == "history"))
    elif "output" in row:
        opening = _messages_of_text(_text(row, "input"), "input") if "input" in row else []
        talk = _messages_of_text(_text(row, "output"), "output")
    else:
        raise _Damage("there is no turns, history, messages or output")
    bare = not opening
    conversation = Conversation(
        file=file,
        line=line,
        secret=secret,
        opening=tuple(opening) or default,
        exchanges=_exchanges(talk),
        won=_flag(row, "game_status"),
        strict=_flag(row, "strict_status"),
        aliases=aliases,
    )
    return conversation, bare


def _own(row: Mapping[str, Any]) -> tuple[list[Message], list[Message], tuple[str, ...]]:
    task = row.get("task")
    if not isinstance(task, dict):
        raise _Damage("task is no object")
    opening = _messages(_list(task, "messages"), "task.messages")
    talk: list[Message] = []
    for turn in _list(row, "turns"):
        if not isinstance(turn, dict):
            raise _Damage("turns has an entry that is no object")
        talk += [Message("assistant", _text(turn, "action")), Message("user", _text(turn, "reply"))]
    aliases = task.get("aliases") or []
    return opening, talk, tuple(name for name in aliases if isinstance(name, str))


def _messages(entries: Sequence[Any], where: str, *, padded: bool = False) -> list[Message]:
    """Messages of a list; with ``padded``, entries that are no objects are passed over."""
    out: list[Message] = []
    for entry in entries:
        if not isinstance(entry, dict):
            if padded:
                continue
            raise _Damage(f"{where} has an entry that is no object")
        role = _text(entry, "role")
        if role not in ROLES:
            raise _Damage(f"{where} has the unknown role {role!r}")
        out.append(Message(role, _text(entry, "content")))
    return out


def _messages_of_text(text: str, where: str) -> list[Message]:
    """Messages of a text in which a line that is nothing but a role opens a message.

    A message that has such a line itself breaks the alternation, and the row is refused.
    """
    parts: list[tuple[str, list[str]]] = []
    for line in text.removesuffix("\n").split("\n"):
        if line in ROLES:
            parts.append((line, []))
        elif parts:
            parts[-1][1].append(line)
        elif line:
            raise _Damage(f"{where} does not begin with a role")
    return [Message(role, "\n".join(lines)) for role, lines in parts]


def _split(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """What comes before the agent's first message, and the rest."""
    first = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
    return messages[:first], messages[first:]


def _exchanges(talk: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    """Pairs of question and reply; a last question without a reply is left out."""
    roles = [message.role for message in talk]
    if roles != [("assistant", "user")[i % 2] for i in range(len(roles))]:
        raise _Damage("questions and replies do not alternate")
    texts = [message.content for message in talk]
    return tuple(zip(texts[::2], texts[1::2], strict=False))


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise _Damage(f"{name} is missing or no text")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise _Damage(f"{name} has half of a surrogate pair")
    return value


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    value = row.get(name)
    if not isinstance(value, list):
        raise _Damage(f"{name} is missing or no list")
    return value


def _flag(row: Mapping[str, Any], name: str) -> bool | None:
    value = row.get(name)
    if value is None:
        return None
    if value not in (0, 1) or isinstance(value, float):
        raise _Damage(f"{name} is neither 0 nor 1")
    return bool(value)
