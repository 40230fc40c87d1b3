"""One machine of a run on several: starts Ray by rank, plays a command on rank 0, leaves nothing.

Every machine runs this with its rank. Rank 0 starts the head of Ray, the others join it, and when
all are there rank 0 runs the command, which finds the cluster by ``RAY_ADDRESS``. The end of the
command is the end of all. A machine that is told to end passes that on to the command, which may
save what it has while all machines are still there.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from delta_belief_rl.cluster.meeting import Head, Meeting
from delta_belief_rl.cluster.ray_node import RayNode, ray_node
from delta_belief_rl.obs.exits import ExitStatus, Terminated, on_sigusr1, sigterm_asks
from delta_belief_rl.types import UserError

POLL_SECONDS = 0.2

RAY_GONE_SECONDS = 60.0
"""What a command has for ending by itself when Ray is gone under it, before it is asked to."""

STAY_SECONDS = 300.0
"""How long a machine that was told to end stays for a command that saves on another one."""

END_SECONDS = 10.0
"""How long rank 0 waits for the others to leave, and they, without a head, for word of its end."""


class MachinesLost(RuntimeError):
    """The machines did not come together, or came apart."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a machine was asked for.

    Attributes:
        rank: Of this machine, from 0.
        nodes: Machines of the start.
        meet: Folder that all machines see.
        deadline: Seconds until all must be there.
        cpus: Logical CPUs that this machine gives to Ray.
        gpus: GPUs that it gives; None for all that Ray finds.
        interface: Network interface; None for the system's choice.
        command: Run on rank 0.
    """

    rank: int
    nodes: int
    meet: Path
    deadline: float
    cpus: int
    gpus: int | None
    interface: str | None
    command: Sequence[str]


class _Told:
    """Whether this process was told to end."""

    asked = False

    def ask(self) -> None:
        self.asked = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Ctrl-C in the block is heard, and ends nothing: the command has heard it, too."""
        try:
            yield
        except KeyboardInterrupt:
            self.asked = True

    def pause(self) -> None:
        """Let some time pass."""
        with self.listening():
            time.sleep(POLL_SECONDS)


def play(settings: Settings) -> int:
    """Be one machine of a start, to its end.

    Returns:
        On all ranks the command's exit status as a shell counts it; 1 with one sentence where the
        machines do not come together or come apart.

    Raises:
        UserError: Something that the user can mend.
    """
    told = _Told()
    on_sigusr1(told.ask)
    meeting = Meeting(settings.meet, settings.rank)
    with sigterm_asks(told.ask):
        try:
            with ray_node(settings.interface) as node:
                if settings.rank == 0:
                    return _lead(settings, node, meeting, told)
                return _follow(settings, node, meeting, told)
        except MachinesLost as error:
            print(error, file=sys.stderr)
            return ExitStatus.CHECK_FAILED
        except Terminated:
            print(f"Rank {settings.rank} was told to end before the command was.", file=sys.stderr)
            return ExitStatus.TERMINATED
        except KeyboardInterrupt:
            return ExitStatus.INTERRUPTED
        finally:
            # After Ray: who waits for this machine may then start the next one.
            if settings.rank == 0:
                _until(lambda: not meeting.joined(), END_SECONDS, told)
                meeting.clear()
            else:
                meeting.leave()


# --- rank 0 ---------------------------------------------------------------------------------------


def _lead(settings: Settings, node: RayNode, meeting: Meeting, told: _Told) -> int:
    token = secrets.token_hex(32)
    last = time.monotonic() + settings.deadline
    status = int(ExitStatus.CHECK_FAILED)
    node.start(_name(settings), token, settings.cpus, settings.gpus)
    try:
        _wait_for_ray(settings, node, last, told)
        address = node.address()
        assert address is not None
        while True:
            meeting.publish(address, token)
            here = [rank for rank in meeting.joined() if rank < settings.nodes]
            if len(here) + 1 >= settings.nodes:
                break
            if node.is_gone():
                raise MachinesLost(f"Ray's head ended while it waited: {node.last_words()}")
            _check_time(told, last, _who_came(settings, here))
            told.pause()
        print(f"{settings.nodes} machines, the head of Ray at {address}", file=sys.stderr)
        status = _command(settings.command, node, address, meeting, told)
        return status
    finally:
        meeting.finish(status)


def _who_came(settings: Settings, here: Sequence[int]) -> str:
    missing = [rank for rank in range(1, settings.nodes) if rank not in here]
    return (
        f"{len(here) + 1} of {settings.nodes} machines came within {settings.deadline:g} s, "
        f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} did not: start the "
        f"same on all machines, with {settings.meet} on a file system that they share."
    )


def _command(
    words: Sequence[str], node: RayNode, address: str, meeting: Meeting, told: _Told
) -> int:
    """Run the command; its exit status."""
    try:
        process = subprocess.Popen(words, env=node.environment | {"RAY_ADDRESS": address})
    except OSError as error:
        raise UserError(f"{words[0]} cannot be run: {error.strerror}.") from error
    asked, gone_at = False, None
    while (status := process.poll()) is None:
        if gone_at is None and node.is_gone():
            gone_at = time.monotonic()
        late = gone_at is not None and time.monotonic() - gone_at > RAY_GONE_SECONDS
        with told.listening():
            if not asked and (told.asked or late or meeting.end_wanted()):
                process.terminate()
                asked = True
        told.pause()
    return status if status >= 0 else 128 - status


# --- the other ranks ------------------------------------------------------------------------------


def _follow(settings: Settings, node: RayNode, meeting: Meeting, told: _Told) -> int:
    last = time.monotonic() + settings.deadline
    meeting.announce()
    while (head := meeting.find_head()) is None:
        _check_time(
            told,
            last,
            f"Rank 0 did not answer rank {settings.rank} within {settings.deadline:g} s: start the "
            f"same on all machines, with {settings.meet} on a file system that they share.",
        )
        told.pause()
    check_reach(head, socket.gethostname())
    node.start(_name(settings), head.token, settings.cpus, settings.gpus, head.address)
    _wait_for_ray(settings, node, last, told)
    meeting.join(head)
    asked_at = None
    while (status := meeting.end(head)) is None:
        if node.is_gone():
            # Rank 0 says that it ends before it does, but a shared folder may be slow.
            if _until(lambda: meeting.end(head) is not None, END_SECONDS, told):
                continue
            if meeting.is_cleared(head):
                return ExitStatus.DONE
            raise MachinesLost(
                f"Ray ended on rank {settings.rank}, or its head on rank 0 is gone: "
                f"{node.last_words()}"
            )
        if told.asked and asked_at is None:
            meeting.join(head, end=True)
            asked_at = time.monotonic()
        if asked_at is not None and time.monotonic() - asked_at > STAY_SECONDS:
            raise Terminated
        told.pause()
    return status


def check_reach(head: Head, host: str) -> None:
    """Refuse an address that means another machine on each of them.

    Args:
        head: Of Ray.
        host: Name of this machine.

    Raises:
        UserError: The head cannot be reached from here.
    """
    if head.address.startswith("127.") and head.host != host:
        raise UserError(
            f"The head of Ray on {head.host} is at {head.address}, where other machines cannot "
            "reach it: name the network interface between them (--interface)."
        )


# --- both -----------------------------------------------------------------------------------------


def _name(settings: Settings) -> str:
    """Under which a machine is known in the cluster: machines are put in the order of names."""
    return f"rank-{settings.rank}-{socket.gethostname()}"


def _wait_for_ray(settings: Settings, node: RayNode, last: float, told: _Told) -> None:
    """Wait until Ray has started on this machine, and a head has told its address."""
    while not node.has_started() or (settings.rank == 0 and node.address() is None):
        if node.is_gone():
            raise MachinesLost(f"Ray did not start on rank {settings.rank}: {node.last_words()}")
        late = f"Ray did not start on rank {settings.rank} within {settings.deadline:g} s."
        _check_time(told, last, late)
        told.pause()


def _check_time(told: _Told, last: float, sentence: str) -> None:
    if told.asked:
        raise Terminated
    if time.monotonic() > last:
        raise MachinesLost(sentence)


def _until(happened: Callable[[], bool], seconds: float, told: _Told) -> bool:
    """Wait for something; whether it has happened in time."""
    last = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > last:
            return False
        told.pause()
    return True


def rank_and_nodes(rank: int | None, nodes: int | None) -> tuple[int, int]:
    """Those that were given, else those of a step of SLURM, one task on each machine.

    Raises:
        UserError: Neither is there, or they contradict.
    """
    found = {
        "rank": rank if rank is not None else _number("SLURM_NODEID"),
        "nodes": nodes if nodes is not None else _number("SLURM_STEP_NUM_NODES"),
    }
    for name, value in found.items():
        if value is None:
            raise UserError(f"--{name} is needed outside of a step of SLURM.")
    own, all_of = found["rank"], found["nodes"]
    assert own is not None
    assert all_of is not None
    if not 0 <= own < all_of:
        raise UserError(f"--rank={own} must be from 0 to {all_of - 1} for --nodes={all_of}.")
    return own, all_of


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None
