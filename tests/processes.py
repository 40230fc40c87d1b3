"""Processes as the tests see them: from ``/proc``, told apart by their start times."""

from __future__ import annotations

from pathlib import Path


def born(pid: int) -> str:
    """Start time of a process in clock ticks; empty when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, front = [], [pid]
    while front:
        front = [child for child, parent in parents.items() if parent in front]
        found += front
    return found


def arguments(pid: int) -> list[str]:
    """Command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def mentioning(text: str) -> list[int]:
    """Processes with a text in their command line or environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if text.encode() in words and born(int(folder.name)):
            found.append(int(folder.name))
    return found
