"""Two small programs that tie processes to the one that started them; run by path, with ``-I``.

    leash.py run PARENT COMMAND [ARGS ...]    become COMMAND, with SIGTERM when PARENT dies
    leash.py guard GRACE                      end what a parent that was killed has left

``run`` keeps its process id, so whoever started it supervises the command itself. ``guard`` reads
lines ``PID BIRTH`` from stdin: the leader of a session that is to be ended when stdin ends, or
``0 0`` for none. It waits for the leader, which has its signal already, then asks the rest to end,
and kills what is left after GRACE seconds.

Nothing but the standard library is imported: a start of it takes some ten milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
NO_COMMAND, NOT_EXECUTABLE = 127, 126
"""Exit statuses of a command that could not be started, as shells have them."""
GUARD_POLL_SECONDS = 0.05


def process_stat(pid: int) -> list[str]:
    """Fields of ``/proc/<pid>/stat`` behind the name: state, parent, group, session, ...

    An empty list where there is no such process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def born(pid: int) -> str:
    """Start time in clock ticks since boot; empty when the process is gone or a zombie."""
    fields = process_stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def members(session: int) -> list[int]:
    """Living processes of a session, its leader included."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        fields = process_stat(int(folder.name))
        if fields and fields[3] == str(session) and fields[0] not in "ZX":
            found.append(int(folder.name))
    return found


def send(pids: list[int], signum: int) -> None:
    """A signal to some processes; those that are gone are passed over."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def run(parent: int, command: list[str]) -> int:
    """Become the command; returns only where it cannot be started."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        print(f"{command[0]}: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        return NOT_EXECUTABLE
    if os.getppid() != parent:
        # It died before the line above, and no signal will come.
        return 128 + signal.SIGTERM
    # Python ignores these two; a command that inherits that would not end with its pipe.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        print(f"{command[0]}: there is no such command.", file=sys.stderr)
        return NO_COMMAND
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_EXECUTABLE


def guard(grace: float) -> None:
    """Wait for the end of stdin, then end the session that its last line names."""
    leader, birth = 0, ""
    for line in sys.stdin:
        first, birth = line.split()
        leader = int(first)
    if not leader:
        return
    asked: set[int] = set()
    deadline = time.monotonic() + grace
    while left := members(leader):
        if born(leader) not in (birth, ""):
            return  # the number belongs to another process by now
        if time.monotonic() > deadline:
            send(left, signal.SIGKILL)
        elif leader not in left:
            send([pid for pid in left if pid not in asked], signal.SIGTERM)
            asked.update(left)
        time.sleep(GUARD_POLL_SECONDS)


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        guard(float(sys.argv[2]))
    else:
        sys.exit(run(int(sys.argv[2]), sys.argv[3:]))
