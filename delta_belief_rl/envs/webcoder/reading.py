"""What an agent's message asks for: files, edits, and the end of a task.

The format is plain text. A fenced block whose first line names a path is a whole file; one that
begins with ``edit`` and a path holds the old piece, a line ``=====`` and the new piece::

    ```index.html
    <h1>Hello</h1>
    ```

    ```edit index.html
    Hello
    =====
    Good morning
    ```

Outside of blocks three commands count, each on a line of its own: ``show PATH``, ``delete PATH``
and ``done``, which ends the task. All other text is talk and means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from delta_belief_rl.envs.webcoder.project import Delete, Edit, Operation, Show, Write

MOST_OPERATIONS = 16
SEPARATOR = "====="

_OPEN = re.compile(r"(`{3,})\s*([^`]*)")
_COMMAND = re.compile(r"(show|delete)\s+(\S+)", re.IGNORECASE)
_DONE = re.compile(r"done[.!]?", re.IGNORECASE)
_LANGUAGES = frozenset({"html", "json", "text", "txt"})


@dataclass(frozen=True, slots=True)
class Reading:
    """A message as it was understood.

    Attributes:
        operations: In order.
        done: Whether the agent says that the task is finished.
        note: Name of why the message cannot be carried out; empty where it can.
        problem: The same as a sentence without its end.
    """

    operations: tuple[Operation, ...] = ()
    done: bool = False
    note: str = ""
    problem: str = ""


def read(text: str) -> Reading:
    """Read a message.

    Example:
        >>> read("Here it is.\\n```notes.txt\\nHi\\n```\\ndone")
        Reading(operations=(Write(path='notes.txt', text='Hi\\n'),), done=True, note='', problem='')
    """
    operations: list[Operation] = []
    done = False
    lines = iter(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    for line in lines:
        stripped = line.strip()
        opened = _OPEN.fullmatch(stripped)
        if opened:
            body = _body(lines, opened[1])
            if body is None:
                return Reading(note="unclosed_block", problem="a block is never closed")
            operation = _block(opened[2].split(), body)
            if isinstance(operation, Reading):
                return operation
            operations.append(operation)
        elif command := _COMMAND.fullmatch(stripped):
            path = command[2]
            operations.append(Show(path) if command[1].lower() == "show" else Delete(path))
        elif _DONE.fullmatch(stripped):
            done = True
    if len(operations) > MOST_OPERATIONS:
        problem = f"a message has at most {MOST_OPERATIONS} blocks and commands"
        return Reading(note="too_large", problem=problem)
    if not operations and not done:
        return Reading(note="no_block", problem="the message has neither a block nor a command")
    return Reading(tuple(operations), done)


def _body(lines: Iterator[str], fence: str) -> list[str] | None:
    """The lines up to the fence that closes a block; None where there is none."""
    body: list[str] = []
    for line in lines:
        stripped = line.strip()
        if len(stripped) >= len(fence) and not stripped.strip("`"):
            return body
        body.append(line)
    return None


def _block(words: list[str], body: list[str]) -> Operation | Reading:
    """What a block asks for, or why it cannot be."""
    edits = bool(words) and words[0].lower() == "edit"
    if edits or (len(words) == 2 and words[0].lower() in _LANGUAGES):
        words = words[1:]
    if len(words) != 1 or words[0].lower() in _LANGUAGES:
        return Reading(note="no_path", problem="the first line of a block names one file")
    if not edits:
        return Write(words[0], "".join(f"{line}\n" for line in body))
    middle = [index for index, line in enumerate(body) if line.strip() == SEPARATOR]
    if len(middle) != 1:
        problem = f"an edit has one line {SEPARATOR} between the old and the new text"
        return Reading(note="bad_edit", problem=problem)
    old, new = body[: middle[0]], body[middle[0] + 1 :]
    return Edit(words[0], "\n".join(old), "\n".join(new))
