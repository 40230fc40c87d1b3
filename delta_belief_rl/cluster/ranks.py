"""Training ranks as processes: how they join, and what it means when one does not answer.

Ranks work in step, so one that dies or hangs leaves the others waiting inside a collective. Ray
tells of a process that is gone, and ``actor_rollout_ref.nccl_timeout`` ends the waiting: NCCL then
aborts the process that waited, gloo raises in it. Either way the rank that is *named* is the one
that was waited for. What a rank writes to stderr goes to a file of its own, so that the end of a
run is one sentence and not the stack of every thread of every rank.
"""

from __future__ import annotations

import asyncio
import datetime
import faulthandler
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayTaskError
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from delta_belief_rl.cluster.members import SILENT, WorkerSilent, answered

PHASES = {
    "score": "while games were scored",
    "update": "in the update of the policy",
    "snapshot": "while the adapter was collected",
    "probe": "while the adapter was checked",
    "dump": "while a checkpoint was made",
    "load": "while a checkpoint was loaded",
    "usage": "while its use of the machine was asked for",
    "present": "before a step",
    "setup": "while it was started again",
}
"""What a method of a rank is about, for messages."""

GRACE = 10.0
"""Seconds in which the others may still tell their part of a failure."""

_AFTER = "the last checkpoint is as it was: start the run again to go on from it"
_MORE_MEMORY = (
    "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, or leave it more of the GPU with a "
    "smaller gpu_memory_utilization of engine and judge"
)
_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset)|timed out", re.IGNORECASE)
_LATE = re.compile(r"timed out", re.IGNORECASE)
_ABORTED = "Watchdog caught collective operation timeout"
"""What NCCL writes in the rank that waited; the rank that it waited for is told in other words."""
_LOG_TAIL = 200_000
"""Bytes of a log that are read."""


class RankFailure(RuntimeError):
    """A training rank died or hangs.

    Attributes:
        ranks: The ranks at fault.
        phase: The method that did not come to its end, a key of ``PHASES``.
    """

    def __init__(self, sentence: str, ranks: tuple[int, ...], phase: str) -> None:
        super().__init__(sentence)
        self.ranks, self.phase = ranks, phase

    def what(self) -> str:
        """What has happened, without what to do about it."""
        return str(self).removesuffix(".").removesuffix(f"; {_AFTER}")


class RankOutOfMemory(RankFailure):
    """A training rank has too little memory for what it was asked to do; it would have again."""


@dataclass(frozen=True, slots=True)
class RankLimits:
    """How long ranks may wait for each other, and where they write.

    Attributes:
        timeout: Seconds of a collective (``actor_rollout_ref.nccl_timeout``).
        logs: File of each rank's stderr; empty where it goes where it always goes.
        signs: Seconds in which each must give a sign of life while it works
            (``trainer.heartbeat_timeout``).
    """

    timeout: float = math.inf
    logs: tuple[Path, ...] = ()
    signs: float = math.inf


# --- in the rank's process ------------------------------------------------------------------------


def meeting_point(host: str) -> TCPStore:
    """The store that the ranks of a group meet at, listening on a free port of this host.

    The port is bound here and handed on, so that nobody else can take it in between.
    """
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def join_ranks(
    device: str,
    rank: int,
    world_size: int,
    address: tuple[str, int],
    timeout: float,
    store: Store | None = None,
) -> None:
    """Make this process one rank of the default group; NCCL on GPUs, gloo on CPUs.

    Args:
        device: ``cuda`` or ``cpu``.
        rank: Number of this process.
        world_size: Number of all.
        address: Host and port of the meeting point.
        timeout: Seconds that a collective may take.
        store: The meeting point itself, where it is in this process.
    """
    patience = datetime.timedelta(seconds=timeout)
    if store is None:
        store = TCPStore(*address, world_size, is_master=rank == 0, timeout=patience)
    # NCCL is told its GPU, so that its communicator is there before the first collective and
    # a barrier does not guess one.
    gpu = torch.device("cuda", torch.cuda.current_device()) if device.startswith("cuda") else None
    # After a collective's timeout torch lets four times this pass before it ends the process, a
    # minute by default, whether or not there is anything to dump.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    dist.init_process_group(
        "gloo" if gpu is None else "nccl",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=patience,
        device_id=gpu,
    )


def write_errors_to(path: Path) -> None:
    """Let everything that this process says on stderr, its C++ parts included, go to a new file.

    The file of an earlier start stays beside it, with ``.old`` at its end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_name(f"{path.name}.old"))
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)


@contextmanager
def stack_after(seconds: float) -> Iterator[None]:
    """Write the stacks of this process to stderr when the block takes longer; it goes on then."""
    if not math.isfinite(seconds):
        yield
        return
    faulthandler.dump_traceback_later(seconds, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# --- on the driver --------------------------------------------------------------------------------


async def ask_all(
    ranks: Sequence[Any], method: str, arguments: Sequence[Sequence[Any]], limits: RankLimits
) -> list[Any]:
    """Call a method of every rank and wait for all answers.

    A rank that is not done ``limits.timeout`` seconds (and the grace) after another one counts as
    hanging: their last collective is behind them both. So does one that gives no sign of life.

    Args:
        ranks: Handles of ``ActorWorker``.
        method: Its method.
        arguments: For each rank.
        limits: How long they may wait for each other.

    Returns:
        One answer for each rank, in order.

    Raises:
        RankFailure: A rank is gone, hangs, or ran out of memory.
    """
    began = time.monotonic()
    calls = [
        asyncio.ensure_future(answered(getattr(rank, method).remote(*args), rank, limits.signs))
        for rank, args in zip(ranks, arguments, strict=True)
    ]
    pending: set[Any] = set(calls)
    patience: float | None = None
    while pending:
        done, pending = await asyncio.wait(
            pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED
        )
        if not done or any(call.exception() is not None for call in done):
            break
        patience = limits.timeout + GRACE if math.isfinite(limits.timeout) else None
    seconds = time.monotonic() - began
    if pending:
        # Of two that fail through each other, the one that is at fault may be the second to tell.
        await asyncio.wait(pending, timeout=GRACE)
    answers: list[Any] = [call.result() for call in calls if _succeeded(call)]
    if len(answers) == len(calls):
        return answers
    errors = {i: call.exception() for i, call in enumerate(calls) if call.done()}
    silent = [i for i, call in enumerate(calls) if not call.done()]
    for index in silent:
        calls[index].cancel()
    failed = {i: error for i, error in errors.items() if error is not None}
    still = [i for i, error in failed.items() if isinstance(error, WorkerSilent)]
    if still:
        raise lost_ranks(dict.fromkeys(still, SILENT), len(calls), limits.signs, limits, method)
    raise explain(method, failed, silent, len(calls), seconds, limits)


def explain(
    method: str,
    errors: dict[int, BaseException],
    silent: Sequence[int],
    num_ranks: int,
    seconds: float,
    limits: RankLimits,
) -> BaseException:
    """What has happened, from what each rank said or did not say.

    Args:
        method: What they were asked for.
        errors: By rank.
        silent: Ranks that have neither answered nor failed.
        num_ranks: Of all.
        seconds: From the question to the first failure.
        limits: How long they may wait for each other.

    Returns:
        A ``RankFailure``; a rank's own error, where that is what the others stumbled over.
    """
    phase = PHASES.get(method, f"in {method}")
    for rank, error in errors.items():
        if isinstance(error, RayActorError) or _lost_peer(error):
            continue
        cause = getattr(error, "cause", error)
        if isinstance(cause, torch.OutOfMemoryError):
            what = f"ran out of GPU memory {phase} ({_short(cause)}): {_MORE_MEMORY}."
            return RankOutOfMemory(f"{_names([rank], num_ranks)} {what}", (rank,), method)
        return error
    late = {rank for rank, error in errors.items() if _late(error, rank, seconds, limits)}
    early = [rank for rank in errors if rank not in late]
    died = [rank for rank in early if isinstance(errors[rank], RayActorError)]
    # A rank that waited in vain takes the one that it waited for along, so lateness comes first.
    if late or not errors:
        blamed = list(silent) or early
        whom = "the others" if blamed else "they"
        what = (
            f"hang{'s' if len(blamed) == 1 else ''} {phase}: {whom} waited {limits.timeout:g} s "
            "(actor_rollout_ref.nccl_timeout) in vain"
        )
    elif died:
        blamed = died
        what = f"died {phase} (killed, out of the host's memory, or crashed)"
    else:
        blamed = early[:1]
        what = f"lost the connection to the others {phase} ({_short(errors[blamed[0]])})"
    who = _names(blamed, num_ranks) if blamed else "All training ranks"
    return RankFailure(f"{who} {what}{_where(blamed, limits)}; {_AFTER}.", tuple(blamed), method)


def lost_ranks(
    found: Mapping[int, str],
    num_ranks: int,
    seconds: float,
    limits: RankLimits,
    method: str = "present",
) -> RankFailure:
    """The failure of ranks that gave no sign of life.

    Args:
        found: How each of them is, by rank; see ``members.missing``.
        num_ranks: Of all.
        seconds: That they had for it.
        limits: Of all ranks.
        method: What they were asked for.
    """
    how = "died"
    if SILENT in found.values():
        how = f"{SILENT} within {seconds:g} s (trainer.heartbeat_timeout)"
    what = f"{_names(list(found), num_ranks)} {how} {PHASES.get(method, f'in {method}')}"
    return RankFailure(f"{what}{_where(list(found), limits)}; {_AFTER}.", tuple(found), method)


def _succeeded(call: asyncio.Future[Any]) -> bool:
    return call.done() and not call.cancelled() and call.exception() is None


def _lost_peer(error: BaseException) -> bool:
    """Whether an error is a rank's complaint that another one does not answer."""
    cause = getattr(error, "cause", error) if isinstance(error, RayTaskError) else error
    if isinstance(cause, dist.DistError):
        return True
    return isinstance(cause, RuntimeError) and _LOST_PEER.search(str(cause)) is not None


def _late(error: BaseException, rank: int, seconds: float, limits: RankLimits) -> bool:
    """Whether a rank failed because it had waited too long.

    NCCL aborts such a process, which looks from here like any death; its log tells them apart.
    """
    if not isinstance(error, RayActorError):
        return _LATE.search(str(error)) is not None
    if seconds < limits.timeout:
        return False
    text = _tail(limits.logs[rank]) if rank < len(limits.logs) else None
    return text is None or _ABORTED in text


def _tail(path: Path) -> str | None:
    """The end of a log; None where it cannot be read from here."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return None


def _short(error: BaseException) -> str:
    """The beginning of what an error says, without the dots that would end a sentence."""
    text = " ".join(str(getattr(error, "cause", error)).split())
    return text[:160].replace(". ", "; ").rstrip(". ")


def _names(ranks: Sequence[int], num_ranks: int) -> str:
    if len(ranks) == 1:
        return f"Training rank {ranks[0]} of {num_ranks}"
    return f"Training ranks {', '.join(map(str, ranks))} of {num_ranks}"


def _where(ranks: Sequence[int], limits: RankLimits) -> str:
    """Where to read more."""
    files = [str(limits.logs[rank]) for rank in ranks if rank < len(limits.logs)]
    return f"; its stderr is in {files[0]}" if files else ""
