"""A project as text files, and what a message does to it.

A project is a mapping of paths to texts that never changes; a message makes a new one or, where any
part of it cannot be done, leaves the old one as it is. Nothing here touches a disk: a path is a
name that has to fit ``PATH`` and is never opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from delta_belief_rl.envs.single_use import digest

PAGE, BEHAVIOUR = "index.html", "app.json"
"""The two files that are built; others are kept and mean nothing."""
MOST_FILES = 8
MOST_CHARACTERS = 12_000
"""Of one file."""
PATH = re.compile(r"[A-Za-z0-9_-]{1,32}(?:/[A-Za-z0-9_-]{1,32}){0,2}\.(?:html|json|css|txt|md)")

Project = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Write:
    """A whole file."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Edit:
    """A piece of a file that is there exactly once, and what takes its place."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Delete:
    """A file goes."""

    path: str


@dataclass(frozen=True, slots=True)
class Show:
    """A file is read; nothing changes."""

    path: str


Operation = Write | Edit | Delete | Show


class Refused(ValueError):
    """A message cannot be carried out; ``note`` is the name of the reason."""

    def __init__(self, note: str, problem: str) -> None:
        super().__init__(problem)
        self.note = note


def changed(project: Project, operations: Sequence[Operation]) -> Project:
    """The project after all operations, in their order.

    Raises:
        Refused: One of them cannot be done; none of them is then.

    Example:
        >>> changed({}, [Write("index.html", "<p>Hi</p>"), Edit("index.html", "Hi", "Ho")])
        {'index.html': '<p>Ho</p>'}
    """
    files = dict(project)
    for operation in operations:
        path = operation.path
        check_path(path)
        if isinstance(operation, Write):
            files[path] = _fitting(path, operation.text)
            continue
        if path not in files:
            raise Refused("no_such_file", f"there is no file {path}")
        if isinstance(operation, Edit):
            files[path] = _fitting(path, _edited(files[path], operation))
        elif isinstance(operation, Delete):
            del files[path]
    if len(files) > MOST_FILES:
        raise Refused("too_large", f"a project has at most {MOST_FILES} files")
    return files


def check_path(path: str) -> None:
    """Refuse what is no plain relative path of a known kind.

    Raises:
        Refused: It is none.
    """
    if not PATH.fullmatch(path):
        shown = path[:40].encode("ascii", "backslashreplace").decode()
        raise Refused("bad_path", f"{shown!r} is no path that a file of this project may have")


def canonical(path: str, text: str) -> str:
    """Equal for texts of a file that differ in line ends, trailing space, or the layout of JSON."""
    if path.endswith(".json"):
        try:
            return json.dumps(json.loads(text, object_pairs_hook=_unique), sort_keys=True)
        except (ValueError, RecursionError):
            pass  # no JSON, or none that can be read: it is compared as text
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def fingerprint(project: Project) -> str:
    """Name of a project, the same for those that are equal in canonical form."""
    parts = [[path, canonical(path, project[path])] for path in sorted(project)]
    return digest(json.dumps(parts))


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A file with a key that stands twice is not the same as one without it."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _edited(text: str, edit: Edit) -> str:
    found = text.count(edit.old) if edit.old else 0
    if found != 1:
        times = "not there" if not found else f"there {found} times"
        raise Refused("no_place", f"the text to replace in {edit.path} is {times}")
    return text.replace(edit.old, edit.new)


def _fitting(path: str, text: str) -> str:
    if len(text) > MOST_CHARACTERS:
        raise Refused("too_large", f"{path} has more than {MOST_CHARACTERS} characters")
    return text
