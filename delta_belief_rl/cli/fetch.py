"""Downloads of the published task files: resumed, checked, and in place whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from delta_belief_rl.config.published import NOTICE, PublishedFile
from delta_belief_rl.types import UserError

TIMEOUT_S = 30.0
_CHUNK = 1 << 16
_MAGIC = b"PAR1"
_NOTHING_LEFT = 416
"""The server's answer when the file ends before the place from which it is asked for."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """One file after a fetch.

    Attributes:
        file: Where it lies.
        size: Bytes.
        new: It was downloaded now.
        verified: Its checksum is on record and agrees.
    """

    path: str
    file: Path
    size: int
    new: bool
    verified: bool


def fetch(
    files: Sequence[PublishedFile], folder: Path, base_url: str, say: Callable[[str], None]
) -> list[Fetched]:
    """Bring files into a folder; those that are there are left as they are.

    A download that breaks off leaves ``.NAME.part``, and the next one goes on from there. The terms
    of the files are written beside them.

    Args:
        files: What to fetch.
        folder: Root below which each file gets its published path.
        base_url: What the published path is put behind.
        say: Told about each file.

    Raises:
        UserError: No connection, no such file, content that is not the published one, or a folder
            that cannot be written.
    """
    if urlsplit(base_url).scheme not in ("http", "https"):
        raise UserError(f"{base_url!r} is no web address: give --base-url https://...")
    found: list[Fetched] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "LICENSE").write_text(NOTICE, encoding="utf-8")
        for file in files:
            target = folder / file.path
            new = not target.is_file()
            if new:
                _download(file, target, f"{base_url.rstrip('/')}/{file.path}")
            elif wrong := _difference(file, target):
                raise UserError(
                    f"{target} is there already and {wrong}: move it away to fetch the "
                    "published one."
                )
            found.append(
                Fetched(file.path, target, target.stat().st_size, new, file.sha256 is not None)
            )
            say(f"{'fetched' if new else 'kept'} {target}")
    except OSError as error:
        raise UserError(
            f"The folder {folder} cannot be written ({error.strerror}): name another one with "
            "--folder."
        ) from error
    return found


def _download(file: PublishedFile, target: Path, url: str) -> None:
    """Fetch one file into its place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    try:
        if not part.is_file() or _difference(file, part):
            _receive(url, part)
    except HTTPError as error:
        raise UserError(
            f"{url} answers {error.code} ({error.reason}): name the place of the files with "
            "--base-url."
        ) from error
    except (URLError, HTTPException, TimeoutError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"{url} cannot be fetched ({reason}): check the connection and run the command again, "
            f"or copy the file to {target} by hand."
        ) from error
    if wrong := _difference(file, part):
        part.unlink()
        raise UserError(f"What {url} gives {wrong}: check --base-url and run the command again.")
    os.replace(part, target)


def _receive(url: str, part: Path) -> None:
    """Add to ``part`` what is missing of the whole file.

    Raises:
        URLError: The connection ended before the file did; ``part`` holds what came.
    """
    have = part.stat().st_size if part.is_file() else 0
    request = Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urlopen(request, timeout=TIMEOUT_S)
    except HTTPError as error:
        if error.code != _NOTHING_LEFT or not have:
            raise
        part.unlink()
        _receive(url, part)
        return
    with answer:
        goes_on = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(
            f"bytes {have}-"
        )
        expected = answer.headers.get("Content-Length")
        with part.open("ab" if goes_on else "wb") as out:
            came = _copy(answer, out)
    if expected is not None and came < int(expected):
        raise URLError(f"the connection ended after {came} of {expected} bytes")


def _copy(source: BinaryIO, out: BinaryIO) -> int:
    came = 0
    while chunk := _read(source):
        out.write(chunk)
        came += len(chunk)
    out.flush()
    os.fsync(out.fileno())
    return came


def _read(source: BinaryIO) -> bytes:
    """The next bytes; a broken connection is told apart from a disk that cannot be written."""
    try:
        return source.read(_CHUNK)
    except OSError as error:
        raise URLError(error) from error


def _difference(file: PublishedFile, path: Path) -> str:
    """How the bytes differ from the published ones, as a verb phrase; empty where they do not."""
    data = path.read_bytes()
    if data[:4] != _MAGIC or data[-4:] != _MAGIC:
        return "is not a parquet file"
    if file.size is not None and len(data) != file.size:
        return f"has {len(data):,} bytes, not {file.size:,}"
    if file.sha256 is not None and hashlib.sha256(data).hexdigest() != file.sha256:
        return "has another checksum than the published file"
    return ""
