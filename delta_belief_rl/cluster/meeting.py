"""How the machines of one start find each other: small files in a folder that all of them see.

Rank 0 has the head of Ray. It publishes the head's address together with the ids that the others
have written down, and a rank believes only a file with its own id of this start in it: whatever an
earlier start has left is never believed, without clocks and without a number that all have to know.
Files are written beside and renamed, so nobody reads half of one.

    rank-<r>.json   written by rank r: its id; the start that it has joined; whether all shall end
    head.json       written by rank 0: the start's id, address, token, and the ranks that are known
    end.json        written by rank 0: the id of the start that is over, and its exit status
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_belief_rl.types import UserError


@dataclass(frozen=True, slots=True)
class Head:
    """Where the head of Ray is.

    Attributes:
        start: Id of this start.
        address: Host and port.
        token: What a machine shows to be let in.
        host: Name of its machine.
    """

    start: str
    address: str
    token: str
    host: str


class Meeting:
    """One rank's side of it.

    Args:
        folder: On a file system that all machines share; made where it is missing.
        rank: Of this machine.

    Raises:
        UserError: Nothing can be written there.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._own = secrets.token_hex(8)
        self._published: dict[str, str] | None = None

    # --- rank 0 -------------------------------------------------------------------------------

    def publish(self, address: str, token: str) -> None:
        """Tell the ranks that are there, and only them, where the head is.

        Raises:
            UserError: Another start meets in the same folder.
        """
        if self._published is not None and self._read("head").get("start") != self._own:
            raise UserError(
                f"Another start of several machines meets in {self._folder}: give each a folder of "
                "its own."
            )
        known = {name: str(told["id"]) for name, told in self._ranks().items()}
        if known == self._published:
            return
        head = {"start": self._own, "address": address, "token": token, "ranks": known}
        self._write("head", head | {"host": socket.gethostname()})
        self._published = known

    def joined(self) -> list[int]:
        """Ranks that are part of this start's cluster, without rank 0."""
        return sorted(
            int(name) for name, told in self._ranks().items() if told.get("joined") == self._own
        )

    def end_wanted(self) -> bool:
        """Whether a rank of this start was told to end."""
        ranks = self._ranks().values()
        return any(told.get("joined") == self._own and told.get("end") for told in ranks)

    def finish(self, status: int) -> None:
        """Let the others end, with an exit status."""
        self._write("end", {"start": self._own, "status": status})

    def clear(self) -> None:
        """Remove what this start has left, and the folder where nothing else is in it."""
        for rank in self.joined():
            self._path(f"rank-{rank}").unlink(missing_ok=True)
        for name in ("head", "end"):
            if self._read(name).get("start") == self._own:
                self._path(name).unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()

    # --- the other ranks ----------------------------------------------------------------------

    def announce(self) -> None:
        """Write down that this rank is here."""
        self._write(f"rank-{self._rank}", {"id": self._own})

    def find_head(self) -> Head | None:
        """Where this start's head is; None as long as it has not answered this rank.

        Raises:
            UserError: Another process has announced itself by the same rank.
        """
        if self._read(f"rank-{self._rank}").get("id") != self._own:
            raise UserError(
                f"Another machine has rank {self._rank} in {self._folder} as well: give each "
                "machine a rank of its own."
            )
        told = self._read("head")
        if told.get("ranks", {}).get(str(self._rank)) != self._own:
            return None
        return Head(told["start"], told["address"], told["token"], told["host"])

    def join(self, head: Head, *, end: bool = False) -> None:
        """Write down that this rank is part of the cluster.

        Args:
            head: That it has joined.
            end: It was told to end, and so all are.
        """
        told = {"id": self._own, "joined": head.start, "end": end}
        self._write(f"rank-{self._rank}", told)

    def end(self, head: Head) -> int | None:
        """The exit status with which rank 0 has let the others end; None where it has not."""
        told = self._read("end")
        return int(told["status"]) if told.get("start") == head.start else None

    def is_cleared(self, head: Head) -> bool:
        """Whether rank 0 has cleared up; true as well where the folder cannot be read."""
        return self._read("head").get("start") != head.start

    def leave(self) -> None:
        """Remove what is this rank's."""
        name = f"rank-{self._rank}"
        if self._read(name).get("id") == self._own:
            self._path(name).unlink(missing_ok=True)

    # --- files --------------------------------------------------------------------------------

    def _ranks(self) -> dict[str, dict[str, Any]]:
        found = sorted(self._folder.glob("rank-*.json"))
        told = {path.stem.removeprefix("rank-"): self._read(path.stem) for path in found}
        return {name: one for name, one in told.items() if name.isdigit() and one}

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _read(self, name: str) -> dict[str, Any]:
        """What a file says; nothing where there is none of ours."""
        with suppress(OSError, json.JSONDecodeError):
            # A file system of the network looks at its server anew when a folder is read.
            os.listdir(self._folder)
            return json.loads(self._path(name).read_text(encoding="utf-8"))
        return {}

    def _write(self, name: str, told: dict[str, Any]) -> None:
        beside = self._folder / f".{name}.{self._own}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Who reads the token may run anything in the cluster.
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(told, file)
            beside.replace(self._path(name))
        except OSError as error:
            raise UserError(
                f"The machines cannot meet in {self._folder} ({error.strerror or error}): name a "
                "writable folder on a file system that all of them share."
            ) from error
